"""Paged attention in the Triton language.

FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691, section 3.1) over the blocks of a paged cache, and
Flash-Decoding (https://crfm.stanford.edu/2023/10/12/flashdecoding.html) where a sequence has few query rows.

Query heads that share a KV head are rows of one tile, so each key and value is read once for all of them. Row r of a
tile is head r % G of token r // G, with G = H / K. A sequence goes one of two ways, whichever its neighbours go:

::

    more than DECODE_ROWS rows                         at most DECODE_ROWS rows
    one program per tile of rows and KV head           one program per split of the keys and KV head

              keys ─────────────────────────►                    keys ─────────────────────────────────►
    tile 0   │full│full│diag│ skipped                  rows     │  split 0   │  split 1   │  split 2  │
    tile 1   │full│full│full│full│diag│ skipped                   part, lse    part, lse    part, lse
    tile 2   │full│full│full│full│full│full│diag│                     └────────────┴────────────┘
                                                                        _combine ─► out
    full   every row sees every key: no mask
    diag   masked, row by row

A split holds `MIN_SPLIT` keys or more; how many there are depends on the sequence alone, and each is one chain of
operations. So a row's result is the same in any batch, and with any number of programs: these take splits in turns. It
is the same, too, however a prompt is cut into chunks of more than DECODE_ROWS rows; but the two ways round otherwise.

Both launches cover all sequences, and the programs of those that go the other way end at once: nothing is sorted, and
the host needs to know no more than the two maxima of `GpuAttentionPlan`.
"""

import math

import torch
import triton
import triton.language as tl

from quire_kernels.attention import GpuAttentionPlan
from quire_kernels.gpu.interpreter import cast, dot

__all__ = ["paged_attention", "plan_attention"]

LOG2_E = tl.constexpr(math.log2(math.e))
DECODE_ROWS = 16
"""Rows of the smallest tile that the tensor cores multiply."""
MIN_SPLIT = 512
"""Keys: a partial result is then 1/30 of the keys' and values' bytes, with G = 4."""
MAX_SPLITS = 32
"""Of a sequence: with 8 KV heads, enough for two programs on each of 132 multiprocessors."""
ENOUGH_PROGRAMS = 1024
"""To fill the device: where there are more splits than that, a program takes several."""


@triton.jit
def _sequence_of_tile(tile, query_start_loc, num_seqs, TOKENS: tl.constexpr):
    """The sequence s for which `query_start_loc[s] // TOKENS + s <= tile` is true last: each sequence has as many tiles
    as it can need, and the host needs no lengths to know the sum."""
    low, high = 0, num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_start_loc + middle).to(tl.int32) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _keys_per_split(first_key, seq_len, BLOCK_N: tl.constexpr, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Keys of a split, in whole tiles; from nothing but the keys that the sequence's rows see."""
    return tl.cdiv(tl.maximum(tl.cdiv(seq_len - first_key, MAX_SPLITS), MIN_SPLIT), BLOCK_N) * BLOCK_N


@triton.jit
def _first_key(position, window, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Start of the first tile of keys that the row at a position sees."""
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(position - window + 1, 0) // BLOCK_N * BLOCK_N
    return first


@triton.jit
def _attend_tiles(
    query_MD, positions_M, max_M, sum_M, out_MD, first_key, end_key,
    key_head, value_head, block_ids, key_strides, value_strides, scale, soft_cap, window,
    HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """Online softmax (Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867) over the keys `first_key : end_key`.

    Takes and returns its state: each row's maximum, sum, and weighted sum of values. Scores are logarithms to the base
    2, as `exp2` is one instruction; `scale` makes them so, unless there is a soft cap to apply in between.

    Whether tiles are masked or not, a key's weight is the same to the last bit: else a row's result would depend on
    which rows share its tile. So the scale is multiplied and the maximum subtracted in one operation that is asked for,
    and not left to the compiler, which joins the two only where no mask comes in between.
    """
    dims_D: tl.constexpr = query_MD.shape[1]
    dims = tl.arange(0, dims_D)
    in_head_D = dims < HEAD_SIZE if dims_D > HEAD_SIZE else tl.full([dims_D], True, tl.int1)
    for start in range(first_key, end_key, BLOCK_N):
        keys_N = start + tl.arange(0, BLOCK_N)
        # What others left in a block must not even be read as a number: a weight of 0 does not undo NaN.
        inside_N = keys_N < end_key if MASKED else tl.full([BLOCK_N], True, tl.int1)
        if HAS_WINDOW:
            inside_N &= keys_N > tl.min(positions_M, 0) - window
        blocks_N = tl.load(block_ids + keys_N // BLOCK_SIZE, mask=inside_N, other=0)
        key_offsets_N = blocks_N * key_strides[0] + keys_N % BLOCK_SIZE * key_strides[1]
        mask = inside_N[None, :] & in_head_D[:, None]
        key_DN = tl.load(key_head + key_offsets_N[None, :] + dims[:, None], mask=mask, other=0.0)
        product_MN = dot(query_MD, key_DN.to(query_MD.dtype), tl.zeros([query_MD.shape[0], BLOCK_N], tl.float32))
        if HAS_SOFT_CAP:  # soft_cap * tanh(product * scale / soft_cap)
            decay_MN = tl.exp(tl.abs(product_MN * scale) * (-2.0 / soft_cap))
            product_MN = tl.where(product_MN < 0, -soft_cap, soft_cap) * ((1.0 - decay_MN) / (1.0 + decay_MN))
            factor = LOG2_E
        else:
            factor = scale
        scores_MN = product_MN * factor
        if MASKED:
            visible_MN = (keys_N[None, :] <= positions_M[:, None]) & inside_N[None, :]
            if HAS_WINDOW:
                visible_MN &= keys_N[None, :] > positions_M[:, None] - window
            scores_MN = tl.where(visible_MN, scores_MN, float("-inf"))
        new_max_M = tl.maximum(max_M, tl.max(scores_MN, 1))
        # A row that has seen nothing yet has no maximum to subtract.
        base_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M) if MASKED else new_max_M
        weights_MN = tl.exp2(tl.fma(product_MN, factor, -base_M[:, None]))
        if MASKED:
            weights_MN = tl.where(visible_MN, weights_MN, 0.0)
        shrink_M = tl.exp2(max_M - base_M)
        value_offsets_N = blocks_N * value_strides[0] + keys_N % BLOCK_SIZE * value_strides[1]
        mask = inside_N[:, None] & in_head_D[None, :]
        value_ND = tl.load(value_head + value_offsets_N[:, None] + dims[None, :], mask=mask, other=0.0)
        sum_M = sum_M * shrink_M + tl.sum(weights_MN, 1)
        value_ND = value_ND.to(query_MD.dtype)
        out_MD = dot(cast(weights_MN, query_MD.dtype), value_ND, out_MD * shrink_M[:, None])
        max_M = new_max_M
    return max_M, sum_M, out_MD


@triton.jit
def _attend(
    query_MD, positions_M, first_key, end_key,
    key_head, value_head, block_ids, key_strides, value_strides, scale, soft_cap, window,
    HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of rows to the keys `first_key : end_key`, of which the first begins a tile of keys.

    Returns:
        The mean of the values, weighted by exponentials of the scores, and the base-2 logarithm of the weights' sum;
        0 and -infinity for a row that sees none of these keys.
    """
    max_M = tl.full([query_MD.shape[0]], float("-inf"), tl.float32)
    sum_M = tl.zeros([query_MD.shape[0]], tl.float32)
    out_MD = tl.zeros(query_MD.shape, tl.float32)
    first_masked = first_key
    if not HAS_WINDOW:
        seen_by_all = tl.minimum(tl.min(positions_M, 0) + 1, end_key) // BLOCK_N * BLOCK_N
        first_masked = tl.maximum(first_key, seen_by_all)
        max_M, sum_M, out_MD = _attend_tiles(
            query_MD, positions_M, max_M, sum_M, out_MD, first_key, first_masked,
            key_head, value_head, block_ids, key_strides, value_strides, scale, soft_cap, window,
            HEAD_SIZE, BLOCK_SIZE, BLOCK_N, False, HAS_WINDOW, HAS_SOFT_CAP,
        )  # fmt: skip
    max_M, sum_M, out_MD = _attend_tiles(
        query_MD, positions_M, max_M, sum_M, out_MD, first_masked, end_key,
        key_head, value_head, block_ids, key_strides, value_strides, scale, soft_cap, window,
        HEAD_SIZE, BLOCK_SIZE, BLOCK_N, True, HAS_WINDOW, HAS_SOFT_CAP,
    )  # fmt: skip
    some_M = tl.where(sum_M > 0, sum_M, 1.0)
    return out_MD * (1.0 / some_M)[:, None], tl.where(sum_M > 0, max_M + tl.log2(some_M), float("-inf"))


@triton.jit(do_not_specialize=["num_seqs", "window"])
def _prefill_kernel(
    query, key_cache, value_cache, block_table, query_start_loc, seq_lens, out, num_seqs,
    query_strides, key_strides, value_strides, out_strides, block_table_stride, scale, soft_cap, window, value_scale,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DECODE_TOKENS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """Program (tile, KV head). The last tiles of a sequence see most keys, and so come first."""
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    tile, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    s = _sequence_of_tile(tile, query_start_loc, num_seqs, TOKENS)
    row_start = tl.load(query_start_loc + s).to(tl.int32)
    query_len = tl.load(query_start_loc + s + 1).to(tl.int32) - row_start
    first_token = (tile - row_start // TOKENS - s) * TOKENS
    if (query_len <= DECODE_TOKENS) | (first_token >= query_len):
        return
    first_position = tl.load(seq_lens + s).to(tl.int32) - query_len + first_token

    rows_M, dims_D = tl.arange(0, BLOCK_M), tl.arange(0, PADDED_SIZE)
    tokens_M, heads_M = first_token + rows_M // GROUP, kv_head * GROUP + rows_M % GROUP
    mask_MD = ((rows_M < TOKENS * GROUP) & (tokens_M < query_len))[:, None] & (dims_D < HEAD_SIZE)[None, :]
    tokens_M += row_start
    query_offsets_M = tokens_M.to(tl.int64) * query_strides[0] + heads_M * query_strides[1]
    query_MD = tl.load(query + query_offsets_M[:, None] + dims_D[None, :], mask=mask_MD, other=0.0)

    # Rows past the end see what the last one sees.
    num_tokens = tl.minimum(TOKENS, query_len - first_token)
    positions_M = first_position + tl.minimum(rows_M // GROUP, num_tokens - 1)
    end_key = first_position + num_tokens
    first_key = _first_key(first_position, window, BLOCK_N, HAS_WINDOW)
    out_MD, _ = _attend(
        query_MD, positions_M, first_key, end_key,
        key_cache + kv_head * key_strides[2], value_cache + kv_head * value_strides[2],
        block_table + s * block_table_stride, key_strides, value_strides, scale, soft_cap, window,
        HEAD_SIZE, BLOCK_SIZE, BLOCK_N, HAS_WINDOW, HAS_SOFT_CAP,
    )  # fmt: skip
    out_offsets_M = tokens_M.to(tl.int64) * out_strides[0] + heads_M * out_strides[1]
    out_MD *= value_scale
    tl.store(out + out_offsets_M[:, None] + dims_D[None, :], cast(out_MD, out.dtype.element_ty), mask=mask_MD)


@triton.jit(do_not_specialize=["window", "partial_rows", "partial_splits"])
def _decode_kernel(
    query, key_cache, value_cache, block_table, query_start_loc, seq_lens, out,
    partials, partial_lse, partial_rows, partial_splits,
    query_strides, key_strides, value_strides, out_strides, block_table_stride, scale, soft_cap, window, value_scale,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DECODE_TOKENS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (sequence, KV head, which splits)."""
    s, kv_head = tl.program_id(0), tl.program_id(1)
    row_start = tl.load(query_start_loc + s).to(tl.int32)
    query_len = tl.load(query_start_loc + s + 1).to(tl.int32) - row_start
    if (query_len == 0) | (query_len > DECODE_TOKENS):
        return
    seq_len = tl.load(seq_lens + s).to(tl.int32)
    first_position = seq_len - query_len

    rows_M, dims_D = tl.arange(0, BLOCK_M), tl.arange(0, PADDED_SIZE)
    tokens_M, heads_M = row_start + rows_M // GROUP, kv_head * GROUP + rows_M % GROUP
    real_M = rows_M < query_len * GROUP
    mask_MD = real_M[:, None] & (dims_D < HEAD_SIZE)[None, :]
    query_offsets_M = tokens_M.to(tl.int64) * query_strides[0] + heads_M * query_strides[1]
    query_MD = tl.load(query + query_offsets_M[:, None] + dims_D[None, :], mask=mask_MD, other=0.0)
    positions_M = first_position + tl.minimum(rows_M // GROUP, query_len - 1)

    first_key = _first_key(first_position, window, BLOCK_N, HAS_WINDOW)
    keys_each = _keys_per_split(first_key, seq_len, BLOCK_N, MIN_SPLIT, MAX_SPLITS)
    splits = tl.cdiv(seq_len - first_key, keys_each)
    for split in range(tl.program_id(2), splits, tl.num_programs(2)):
        start = first_key + split * keys_each
        out_MD, lse_M = _attend(
            query_MD, positions_M, start, tl.minimum(start + keys_each, seq_len),
            key_cache + kv_head * key_strides[2], value_cache + kv_head * value_strides[2],
            block_table + s * block_table_stride, key_strides, value_strides, scale, soft_cap, window,
            HEAD_SIZE, BLOCK_SIZE, BLOCK_N, HAS_WINDOW, HAS_SOFT_CAP,
        )  # fmt: skip
        out_MD *= value_scale
        if splits == 1:
            out_offsets_M = tokens_M.to(tl.int64) * out_strides[0] + heads_M * out_strides[1]
            tl.store(out + out_offsets_M[:, None] + dims_D[None, :], cast(out_MD, out.dtype.element_ty), mask=mask_MD)
        else:
            part_M = ((s * tl.num_programs(1) + kv_head) * partial_rows + rows_M).to(tl.int64) * partial_splits + split
            tl.store(partials + part_M[:, None] * HEAD_SIZE + dims_D[None, :], out_MD, mask=mask_MD)
            tl.store(partial_lse + part_M, lse_M, mask=real_M)


@triton.jit(do_not_specialize=["window", "partial_rows", "partial_splits"])
def _combine_kernel(
    partials, partial_lse, query_start_loc, seq_lens, out, partial_rows, partial_splits, out_strides, window,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, DECODE_TOKENS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (sequence, KV head, row): the mean of the splits' results, weighted by their sums of exponentials."""
    s, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row_start = tl.load(query_start_loc + s).to(tl.int32)
    query_len = tl.load(query_start_loc + s + 1).to(tl.int32) - row_start
    if (query_len > DECODE_TOKENS) | (row >= query_len * GROUP):
        return
    seq_len = tl.load(seq_lens + s).to(tl.int32)
    first_key = _first_key(seq_len - query_len, window, BLOCK_N, HAS_WINDOW)
    splits = tl.cdiv(seq_len - first_key, _keys_per_split(first_key, seq_len, BLOCK_N, MIN_SPLIT, MAX_SPLITS))
    if splits == 1:
        return
    splits_P, dims_D = tl.arange(0, MAX_SPLITS), tl.arange(0, PADDED_SIZE)
    part_P = ((s * tl.num_programs(1) + kv_head) * partial_rows + row).to(tl.int64) * partial_splits + splits_P
    lse_P = tl.load(partial_lse + part_P, mask=splits_P < splits, other=float("-inf"))
    weights_P = tl.exp2(lse_P - tl.max(lse_P, 0))
    mask_PD = (splits_P < splits)[:, None] & (dims_D < HEAD_SIZE)[None, :]
    parts_PD = tl.load(partials + part_P[:, None] * HEAD_SIZE + dims_D[None, :], mask=mask_PD, other=0.0)
    out_D = tl.sum(parts_PD * weights_P[:, None], 0) / tl.sum(weights_P, 0)
    token, head = (row_start + row // GROUP).to(tl.int64), kv_head * GROUP + row % GROUP
    pointers_D = out + token * out_strides[0] + head * out_strides[1] + dims_D
    tl.store(pointers_D, cast(out_D, out.dtype.element_ty), mask=dims_D < HEAD_SIZE)


def _decode_shape(group: int) -> tuple[int, int]:
    """Rows of a decode's tile, and how many tokens of a sequence fit in."""
    rows = max(DECODE_ROWS, triton.next_power_of_2(group))
    return rows, rows // group


def plan_attention(
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, num_heads: int, key_cache_NKBD: torch.Tensor
) -> GpuAttentionPlan:
    """As of `quire_kernels.plan_attention`. Where the lengths are on the device, this waits for it."""
    num_kv_heads, head_size = key_cache_NKBD.shape[1], key_cache_NKBD.shape[3]
    group = num_heads // num_kv_heads
    query_lens, lens = query_start_loc.cpu().diff(), seq_lens.cpu()
    is_decode = (query_lens > 0) & (query_lens <= _decode_shape(group)[1])
    rows = splits = 0
    if bool(is_decode.any()):
        rows = int(query_lens[is_decode].max()) * group
        splits = min(MAX_SPLITS, -(-int(lens[is_decode].max()) // MIN_SPLIT))
    parts = (len(lens), num_kv_heads, rows, splits if splits > 1 else 0)
    return GpuAttentionPlan(
        has_prefills=bool((query_lens > 0).logical_and_(~is_decode).any()),
        decode_rows=rows,
        max_splits=splits,
        partials=torch.empty(*parts, head_size, dtype=torch.float32, device=key_cache_NKBD.device),
        partial_lse=torch.empty(parts, dtype=torch.float32, device=key_cache_NKBD.device),
    )


def _prefill_tiles(element_size: int, padded_size: int, group: int) -> dict[str, int]:
    """Shape of the tiles; of nothing that changes with the batch, so that results do not either."""
    if element_size == 2:
        rows, keys, warps, stages = 128, 64, 8, 3 if padded_size <= 128 else 2
    else:
        rows, keys, warps, stages = (64, 32, 8, 2) if padded_size <= 128 else (32, 16, 8, 1)
    return {
        "BLOCK_M": max(rows, triton.next_power_of_2(group)), "BLOCK_N": keys, "num_warps": warps, "num_stages": stages,
    }  # fmt: skip


def paged_attention(
    query_THD: torch.Tensor,
    key_cache_NKBD: torch.Tensor,
    value_cache_NKBD: torch.Tensor,
    block_table_SM: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    plan: GpuAttentionPlan,
    window: int | None,
    soft_cap: float | None,
    key_scale: float,
    value_scale: float,
) -> torch.Tensor:
    """As of `quire_kernels.paged_attention`."""
    assert (
        query_THD.stride(2) == key_cache_NKBD.stride(3) == value_cache_NKBD.stride(3) == block_table_SM.stride(1) == 1
    )
    num_tokens, num_heads, head_size = query_THD.shape
    num_seqs, num_kv_heads, block_size = len(seq_lens), key_cache_NKBD.shape[1], key_cache_NKBD.shape[2]
    group, padded_size = num_heads // num_kv_heads, max(16, triton.next_power_of_2(head_size))
    out_THD = query_THD.new_empty(num_tokens, num_heads, head_size)
    decode_block, decode_tokens = _decode_shape(group)
    shared = {
        "GROUP": group, "HEAD_SIZE": head_size, "PADDED_SIZE": padded_size, "DECODE_TOKENS": decode_tokens,
        "HAS_WINDOW": window is not None,
    }  # fmt: skip
    both = {**shared, "BLOCK_SIZE": block_size, "HAS_SOFT_CAP": soft_cap is not None}
    tensors = (query_THD, key_cache_NKBD, value_cache_NKBD, block_table_SM, query_start_loc, seq_lens, out_THD)
    score_scale = scale * key_scale * (LOG2_E.value if soft_cap is None else 1.0)
    numbers = (
        query_THD.stride()[:2], _cache_strides(key_cache_NKBD), _cache_strides(value_cache_NKBD), out_THD.stride()[:2],
        block_table_SM.stride(0), score_scale, soft_cap or 0.0, window or 0, value_scale,
    )  # fmt: skip
    if plan.has_prefills:
        tiles = _prefill_tiles(query_THD.element_size(), padded_size, group)
        num_tiles = num_tokens // (tiles["BLOCK_M"] // group) + num_seqs
        _prefill_kernel[(num_tiles, num_kv_heads)](*tensors, num_seqs, *numbers, **both, **tiles)
    if plan.decode_rows:
        splits = {"MIN_SPLIT": MIN_SPLIT, "MAX_SPLITS": MAX_SPLITS, "BLOCK_N": 64 if padded_size <= 128 else 32}
        parts = (plan.partials, plan.partial_lse)
        part_sizes = (plan.decode_rows, plan.partials.shape[3])
        in_turns = min(plan.max_splits, max(1, math.ceil(ENOUGH_PROGRAMS / (num_seqs * num_kv_heads))))
        # Block ids and the keys and values that they lead to are stages of their own: of 5, two are of keys and values.
        _decode_kernel[(num_seqs, num_kv_heads, in_turns)](
            *tensors, *parts, *part_sizes, *numbers, **both, **splits, BLOCK_M=decode_block, num_warps=4,
            num_stages=5 if query_THD.element_size() == 2 else 3,
        )  # fmt: skip
        if plan.max_splits > 1:
            _combine_kernel[(num_seqs, num_kv_heads, plan.decode_rows)](
                *parts, query_start_loc, seq_lens, out_THD, *part_sizes, out_THD.stride()[:2], window or 0,
                **shared, **splits, num_warps=4,
            )  # fmt: skip
    return out_THD


def _cache_strides(cache_NKBD: torch.Tensor) -> tuple[int, int, int]:
    """Of a block, of a token within it, and of a head."""
    return cache_NKBD.stride(0), cache_NKBD.stride(2), cache_NKBD.stride(1)
