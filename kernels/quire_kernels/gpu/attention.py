"""Paged attention in the Triton language.

FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691, section 3.1) over the blocks of a paged cache, and
Flash-Decoding (https://crfm.stanford.edu/2023/10/12/flashdecoding.html) where a sequence has few query rows.

Query heads that share a KV head are rows of one tile, so each key and value is read once for all of them. Row r of a
tile is head r % G of token r // G, with G = H / K. Each sequence goes one of two ways, independently of the others:

::

    more than DECODE_ROWS rows                         at most DECODE_ROWS rows
    a chain for each tile of rows and KV head          a chain for each split of the keys and KV head

              keys ─────────────────────────►                    keys ─────────────────────────────────►
    tile 0   │full│full│diag│ skipped                  rows     │  split 0   │  split 1   │  split 2  │
    tile 1   │full│full║full│full│diag│ skipped                   part, lse    part, lse    part, lse
    tile 2   │full│full║full│full│full║full│diag│                     └────────────┴────────────┘
                                                                        _combine ─► out
    full   every row sees every key: no mask; where attention is not causal, every tile is masked up to the last one
    diag   masked, row by row
    ║      every PREFILL_SPLIT keys a chain ends, and its result is merged with the previous ones

On the right a split holds at least `MIN_SPLIT` keys; the number of splits depends only on the sequence. The keys of all
splits of all sequences form one line, and each of a fixed number of programs takes an equal part of it. On the left one
program computes a tile's chains in order. If there are few tiles, as for a short prompt after a long cached prefix,
several programs share a tile and write parts, which `_merge_parts_kernel` merges in the same order.

So a row's result is the same in any batch, and with any number of programs. It is also the same however a prompt is cut
into chunks of more than DECODE_ROWS rows; but the two ways round differently.

Both launches cover all sequences, and skip those that go the other way: nothing is sorted, and the host only needs to
know what is in `GpuAttentionPlan`.
"""

import functools
import math

import torch
import triton
import triton.language as tl

from quire_kernels.attention_plan import GpuAttentionPlan
from quire_kernels.gpu.interpreter import cast, dot

LOG2_E = tl.constexpr(math.log2(math.e))
DECODE_ROWS = 16
"""Rows of the smallest tile that the tensor cores multiply."""
MIN_SPLIT = 512
"""Keys. On an H100, many sequences of 512 tokens take 0.8 times as long with it as with 256, and a single one 1.2 times
(`tests/benchmarks/gpu.py`, section splits)."""
MAX_SPLITS = 32
"""Per sequence: with 8 KV heads, enough for one program on each of 132 multiprocessors."""
DECODE_STAGES = 5
"""Pipeline stages. Loads of block ids and of the keys and values they point to are separate stages: of 5, two are for
keys and values."""
PREFILL_SPLIT = 1024
"""Keys. A suffix after a prefix of 8k tokens then has 8 chains for each KV head and tile."""
MAX_PREFILL_PARTS_BYTES = 64 << 20
"""Upper bound on the memory of prefills' parts; if they would need more, each tile has one program."""
PROGRAMS_EACH = 2
"""Programs per multiprocessor: its shared memory has room for two programs of a decode."""
MULTIPROCESSORS = 132
"""Used if there is no GPU: an H100's."""
MAX_KEY_TILE = 64
"""Keys of the largest tile."""
MERGED_ROWS = 16
"""Rows per program that merges parts."""
SEQUENCES = 256
"""Sequences that a decode program looks at in one iteration, to find its splits."""


@triton.jit
def _sequence_of_tile(tile, query_start_loc, num_seqs, TOKENS: tl.constexpr):
    """The last sequence s with `query_start_loc[s] // TOKENS + s <= tile`: each sequence has as many tiles as it can
    need, and the host can compute their sum without the lengths."""
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
    """Keys of a split, in whole tiles; depends only on the keys that the sequence's rows see."""
    return tl.cdiv(tl.maximum(tl.cdiv(seq_len - first_key, MAX_SPLITS), MIN_SPLIT), BLOCK_N) * BLOCK_N


@triton.jit
def _first_visible(positions, window):
    """The first key that a row at a position sees; with a window below 0 that of its chunk."""
    return tl.where(window < 0, positions // -window * -window, tl.maximum(positions - window + 1, 0))


@triton.jit
def _first_key(position, window, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Start of the first tile of keys that the row at a position sees."""
    first = 0
    if HAS_WINDOW:
        first = _first_visible(position, window) // BLOCK_N * BLOCK_N
    return first


@triton.jit
def _end_key(position, seq_len, window, HAS_WINDOW: tl.constexpr, IS_CAUSAL: tl.constexpr):
    """End of the keys that the row at a position sees."""
    end = seq_len
    if IS_CAUSAL:
        end = position + 1
    elif HAS_WINDOW:
        end = tl.minimum(seq_len, position + window)
    return end


@triton.jit
def _attend_tiles(
    query_MD, positions_M, bias_M, max_M, sum_M, out_MV, first_key, end_key,
    key_head, value_head, block_ids, key_strides, value_strides, scale, soft_cap, window, bias_reach,
    HEAD_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_SOFT_CAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Online softmax (Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867) over the keys `first_key : end_key`.

    Takes and returns its state: each row's maximum, sum, and weighted sum of values. Scores are base-2 logarithms, as
    `exp2` is one instruction; `scale` converts them, unless a soft cap or a bias has to be applied in between.

    A key's weight is the same, bit for bit, whether its tile is masked or not: else a row's result would depend on
    which rows share its tile. So multiplying by the scale and subtracting the maximum is an explicit fused operation.
    The compiler would fuse the two only if no mask comes in between.
    """
    dims_D: tl.constexpr = query_MD.shape[1]
    dims = tl.arange(0, dims_D)
    in_head_D = dims < HEAD_SIZE if dims_D > HEAD_SIZE else tl.full([dims_D], True, tl.int1)
    dims_V: tl.constexpr = out_MV.shape[1]
    value_dims = tl.arange(0, dims_V)
    in_value_V = value_dims < VALUE_SIZE if dims_V > VALUE_SIZE else tl.full([dims_V], True, tl.int1)
    for start in range(first_key, end_key, BLOCK_N):
        keys_N = start + tl.arange(0, BLOCK_N)
        # Stale values of other sequences must not be loaded at all: a weight of 0 does not cancel NaN.
        inside_N = keys_N < end_key if MASKED else tl.full([BLOCK_N], True, tl.int1)
        if HAS_WINDOW:
            inside_N &= keys_N >= _first_visible(tl.min(positions_M, 0), window)
        blocks_N = tl.load(block_ids + keys_N // BLOCK_SIZE, mask=inside_N, other=0)
        key_offsets_N = blocks_N * key_strides[0] + keys_N % BLOCK_SIZE * key_strides[1]
        mask = inside_N[None, :] & in_head_D[:, None]
        key_DN = tl.load(key_head + key_offsets_N[None, :] + dims[:, None], mask=mask, other=0.0)
        product_MN = dot(query_MD, key_DN.to(query_MD.dtype), tl.zeros([query_MD.shape[0], BLOCK_N], tl.float32))
        if HAS_SOFT_CAP:  # soft_cap * tanh(product * scale / soft_cap)
            decay_MN = tl.exp(tl.abs(product_MN * scale) * (-2.0 / soft_cap))
            product_MN = tl.where(product_MN < 0, -soft_cap, soft_cap) * ((1.0 - decay_MN) / (1.0 + decay_MN))
            factor = LOG2_E
        elif HAS_BIAS:
            product_MN *= scale
            factor = LOG2_E
        else:
            factor = scale
        if HAS_BIAS:
            distances_MN = tl.minimum(tl.maximum(keys_N[None, :] - positions_M[:, None], -bias_reach), bias_reach)
            product_MN += tl.load(bias_M[:, None] + distances_MN)
        scores_MN = product_MN * factor
        if MASKED:
            visible_MN = tl.broadcast_to(inside_N[None, :], [query_MD.shape[0], BLOCK_N])
            if IS_CAUSAL:
                visible_MN &= keys_N[None, :] <= positions_M[:, None]
            if HAS_WINDOW:
                visible_MN &= keys_N[None, :] >= _first_visible(positions_M, window)[:, None]
                if not IS_CAUSAL:
                    visible_MN &= keys_N[None, :] < positions_M[:, None] + window
            scores_MN = tl.where(visible_MN, scores_MN, float("-inf"))
        new_max_M = tl.maximum(max_M, tl.max(scores_MN, 1))
        # A row that has seen no key yet has no maximum to subtract.
        base_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M) if MASKED else new_max_M
        weights_MN = tl.exp2(tl.fma(product_MN, factor, -base_M[:, None]))
        if MASKED:
            weights_MN = tl.where(visible_MN, weights_MN, 0.0)
        shrink_M = tl.exp2(max_M - base_M)
        value_offsets_N = blocks_N * value_strides[0] + keys_N % BLOCK_SIZE * value_strides[1]
        mask = inside_N[:, None] & in_value_V[None, :]
        value_NV = tl.load(value_head + value_offsets_N[:, None] + value_dims[None, :], mask=mask, other=0.0)
        sum_M = sum_M * shrink_M + tl.sum(weights_MN, 1)
        value_NV = value_NV.to(query_MD.dtype)
        out_MV = dot(cast(weights_MN, query_MD.dtype), value_NV, out_MV * shrink_M[:, None])
        max_M = new_max_M
    return max_M, sum_M, out_MV


@triton.jit
def _attend(
    query_MD, positions_M, bias_M, first_key, end_key,
    key_head, value_head, block_ids, key_strides, value_strides, scale, soft_cap, window, bias_reach,
    HEAD_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, PADDED_VALUE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, HAS_BIAS: tl.constexpr,
    MASKS_ALL: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of rows to the keys `first_key : end_key`; `first_key` begins a tile of keys.

    With `MASKS_ALL` one loop masks every tile, those that need none too: loads never pause between two loops.

    Returns:
        The mean of the values, weighted by exponentials of the scores, and the base-2 logarithm of the weights' sum;
        0 and -infinity for a row that sees none of these keys.
    """
    max_M = tl.full([query_MD.shape[0]], float("-inf"), tl.float32)
    sum_M = tl.zeros([query_MD.shape[0]], tl.float32)
    out_MV = tl.zeros([query_MD.shape[0], PADDED_VALUE], tl.float32)
    first_masked = first_key
    if not MASKS_ALL:
        seen_by_all = tl.minimum(tl.min(positions_M, 0) + 1, end_key) // BLOCK_N * BLOCK_N
        first_masked = tl.maximum(first_key, seen_by_all)
        max_M, sum_M, out_MV = _attend_tiles(
            query_MD, positions_M, bias_M, max_M, sum_M, out_MV, first_key, first_masked,
            key_head, value_head, block_ids, key_strides, value_strides, scale, soft_cap, window, bias_reach,
            HEAD_SIZE, VALUE_SIZE, BLOCK_SIZE, BLOCK_N, False, HAS_WINDOW, IS_CAUSAL, HAS_SOFT_CAP, HAS_BIAS,
        )  # fmt: skip
    max_M, sum_M, out_MV = _attend_tiles(
        query_MD, positions_M, bias_M, max_M, sum_M, out_MV, first_masked, end_key,
        key_head, value_head, block_ids, key_strides, value_strides, scale, soft_cap, window, bias_reach,
        HEAD_SIZE, VALUE_SIZE, BLOCK_SIZE, BLOCK_N, True, HAS_WINDOW, IS_CAUSAL, HAS_SOFT_CAP, HAS_BIAS,
    )  # fmt: skip
    some_M = tl.where(sum_M > 0, sum_M, 1.0)
    return out_MV * (1.0 / some_M)[:, None], tl.where(sum_M > 0, max_M + tl.log2(some_M), float("-inf"))


@triton.jit
def _merge(out_MV, lse_M, part_MV, part_lse_M):
    """Merge two results of `_attend`. A part that saw no keys changes no bit. Multiply-adds are explicitly fused, not
    left to the compiler, so that two kernels compute the same."""
    base_M = tl.maximum(lse_M, part_lse_M)
    is_seen_M = part_lse_M != float("-inf")
    base_M = tl.where(is_seen_M, base_M, 0.0)
    old_M, new_M = tl.exp2(lse_M - base_M), tl.exp2(part_lse_M - base_M)
    share_M = 1.0 / tl.where(is_seen_M, old_M + new_M, 1.0)
    merged_MV = tl.fma(part_MV, (new_M * share_M)[:, None], out_MV * (old_M * share_M)[:, None])
    merged_lse_M = base_M + tl.log2(tl.where(is_seen_M, old_M + new_M, 1.0))
    return tl.where(is_seen_M[:, None], merged_MV, out_MV), tl.where(is_seen_M, merged_lse_M, lse_M)


@triton.jit
def _share_beside_sinks(lse, sinks, heads):
    """The part of the sum of exponentials that is the keys', where a sink of the head is added to it."""
    return 1.0 / (1.0 + tl.exp2(tl.minimum(tl.load(sinks + heads) * LOG2_E - lse, 126.0)))


@triton.jit
def _tile_of_prefill(tile, query_start_loc, num_seqs, TOKENS: tl.constexpr):
    """The tile's sequence s, the sequence's first row, its number of rows, and the tile's first token within it."""
    s = _sequence_of_tile(tile, query_start_loc, num_seqs, TOKENS)
    row_start = tl.load(query_start_loc + s).to(tl.int32)
    query_len = tl.load(query_start_loc + s + 1).to(tl.int32) - row_start
    return s, row_start, query_len, (tile - row_start // TOKENS - s) * TOKENS


@triton.jit(do_not_specialize=["num_seqs", "window", "partial_splits"])
def _prefill_kernel(
    query, key_cache, value_cache, block_table, query_start_loc, seq_lens, out, sinks, bias, num_seqs,
    parts, parts_lse, partial_splits,
    query_strides, key_strides, value_strides, out_strides, block_table_stride, scale, soft_cap, window, bias_reach,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr, PADDED_VALUE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DECODE_TOKENS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr, IN_PARTS: tl.constexpr,
):  # fmt: skip
    """Program (tile, KV head, part of the chains). A sequence's last tiles see the most keys, and so come first."""
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    tile, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    s, row_start, query_len, first_token = _tile_of_prefill(tile, query_start_loc, num_seqs, TOKENS)
    if (query_len <= DECODE_TOKENS) | (first_token >= query_len):
        return
    seq_len = tl.load(seq_lens + s).to(tl.int32)
    first_position = seq_len - query_len + first_token

    rows_M, dims_D, dims_V = tl.arange(0, BLOCK_M), tl.arange(0, PADDED_SIZE), tl.arange(0, PADDED_VALUE)
    tokens_M, heads_M = first_token + rows_M // GROUP, kv_head * GROUP + rows_M % GROUP
    real_M = (rows_M < TOKENS * GROUP) & (tokens_M < query_len)
    mask_MD = real_M[:, None] & (dims_D < HEAD_SIZE)[None, :]
    mask_MV = real_M[:, None] & (dims_V < VALUE_SIZE)[None, :]
    tokens_M += row_start
    query_offsets_M = tokens_M.to(tl.int64) * query_strides[0] + heads_M * query_strides[1]
    query_MD = tl.load(query + query_offsets_M[:, None] + dims_D[None, :], mask=mask_MD, other=0.0)

    # Rows past the end see the same keys as the last row.
    num_tokens = tl.minimum(TOKENS, query_len - first_token)
    positions_M = first_position + tl.minimum(rows_M // GROUP, num_tokens - 1)
    bias_M = bias + heads_M * (2 * bias_reach + 1) + bias_reach  # of distance 0; read only if there are any
    end_key = _end_key(first_position + num_tokens - 1, seq_len, window, HAS_WINDOW, IS_CAUSAL)
    first_key = _first_key(first_position, window, BLOCK_N, HAS_WINDOW)
    first_split = first_key // SPLIT
    lse_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    out_MV = tl.zeros([BLOCK_M, PADDED_VALUE], tl.float32)
    for split in range(first_split + tl.program_id(2), tl.cdiv(end_key, SPLIT), tl.num_programs(2)):
        part_MV, part_lse_M = _attend(
            query_MD, positions_M, bias_M,
            tl.maximum(first_key, split * SPLIT), tl.minimum(end_key, (split + 1) * SPLIT),
            key_cache + kv_head * key_strides[2], value_cache + kv_head * value_strides[2],
            block_table + s * block_table_stride, key_strides, value_strides, scale, soft_cap, window, bias_reach,
            HEAD_SIZE, VALUE_SIZE, PADDED_VALUE, BLOCK_SIZE, BLOCK_N, HAS_WINDOW, IS_CAUSAL, HAS_SOFT_CAP, HAS_BIAS,
            HAS_WINDOW or not IS_CAUSAL,
        )  # fmt: skip
        if IN_PARTS:
            num_heads = tl.num_programs(1) * GROUP
            part_M = (tokens_M.to(tl.int64) * num_heads + heads_M) * partial_splits + (split - first_split)
            tl.store(parts + part_M[:, None] * VALUE_SIZE + dims_V[None, :], part_MV, mask=mask_MV)
            tl.store(parts_lse + part_M, part_lse_M, mask=real_M)
        else:
            out_MV, lse_M = _merge(out_MV, lse_M, part_MV, part_lse_M)
    if not IN_PARTS:
        if HAS_SINKS:
            out_MV *= _share_beside_sinks(lse_M, sinks, heads_M)[:, None]
        out_offsets_M = tokens_M.to(tl.int64) * out_strides[0] + heads_M * out_strides[1]
        tl.store(out + out_offsets_M[:, None] + dims_V[None, :], cast(out_MV, out.dtype.element_ty), mask=mask_MV)


@triton.jit(do_not_specialize=["num_seqs", "window", "partial_splits"])
def _merge_parts_kernel(
    parts, parts_lse, query_start_loc, seq_lens, out, sinks, num_seqs, partial_splits, out_strides, window,
    GROUP: tl.constexpr, VALUE_SIZE: tl.constexpr, PADDED_VALUE: tl.constexpr,
    TILE_TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, DECODE_TOKENS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_SINKS: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Program (tile, KV head, rows of it): merges the parts as `_prefill_kernel` does when it does not write them."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    s, row_start, query_len, first_token = _tile_of_prefill(tile, query_start_loc, num_seqs, TILE_TOKENS)
    if (query_len <= DECODE_TOKENS) | (first_token >= query_len):
        return
    seq_len = tl.load(seq_lens + s).to(tl.int32)
    first_position = seq_len - query_len + first_token
    num_tokens = tl.minimum(TILE_TOKENS, query_len - first_token)
    rows_M, dims_V = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED_VALUE)
    real_M = rows_M < num_tokens * GROUP
    mask_MV = real_M[:, None] & (dims_V < VALUE_SIZE)[None, :]
    tokens_M, heads_M = (row_start + first_token + rows_M // GROUP).to(tl.int64), kv_head * GROUP + rows_M % GROUP
    first_part_M = (tokens_M * (tl.num_programs(1) * GROUP) + heads_M) * partial_splits

    first_split = _first_key(first_position, window, BLOCK_N, HAS_WINDOW) // SPLIT
    lse_M = tl.full([ROWS], float("-inf"), tl.float32)
    out_MV = tl.zeros([ROWS, PADDED_VALUE], tl.float32)
    end_key = _end_key(first_position + num_tokens - 1, seq_len, window, HAS_WINDOW, IS_CAUSAL)
    for i in range(tl.cdiv(end_key, SPLIT) - first_split):
        part_M = first_part_M + i
        part_MV = tl.load(parts + part_M[:, None] * VALUE_SIZE + dims_V[None, :], mask=mask_MV, other=0.0)
        part_lse_M = tl.load(parts_lse + part_M, mask=real_M, other=float("-inf"))
        out_MV, lse_M = _merge(out_MV, lse_M, part_MV, part_lse_M)
    if HAS_SINKS:
        out_MV *= _share_beside_sinks(lse_M, sinks, heads_M)[:, None]
    out_offsets_M = tokens_M * out_strides[0] + heads_M * out_strides[1]
    tl.store(out + out_offsets_M[:, None] + dims_V[None, :], cast(out_MV, out.dtype.element_ty), mask=mask_MV)


@triton.jit
def _decode_lengths(
    s, num_seqs, query_start_loc, seq_lens, window,
    BLOCK_N: tl.constexpr, DECODE_TOKENS: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """For sequence s, or for several: the first row, the number of rows, the number of tokens, the first key that is
    seen, and the number of tiles of keys from there on, which is 0 for sequences that go the other way."""
    row_start = tl.load(query_start_loc + s, mask=s < num_seqs, other=0).to(tl.int32)
    query_len = tl.load(query_start_loc + s + 1, mask=s < num_seqs, other=0).to(tl.int32) - row_start
    seq_len = tl.load(seq_lens + s, mask=s < num_seqs, other=0).to(tl.int32)
    first_key = _first_key(seq_len - query_len, window, BLOCK_N, HAS_WINDOW)
    is_decode = (query_len > 0) & (query_len <= DECODE_TOKENS)
    return row_start, query_len, seq_len, first_key, tl.where(is_decode, tl.cdiv(seq_len - first_key, BLOCK_N), 0)


@triton.jit(do_not_specialize=["num_seqs", "window", "partial_rows", "partial_splits"])
def _decode_kernel(
    query, key_cache, value_cache, block_table, query_start_loc, seq_lens, out, sinks, bias, num_seqs,
    partials, partial_lse, partial_rows, partial_splits,
    query_strides, key_strides, value_strides, out_strides, block_table_stride, scale, soft_cap, window, bias_reach,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr, PADDED_VALUE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DECODE_TOKENS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Program (part of the line, KV head): the splits that begin in it.

    ::

        tiles of keys, of all sequences    │ s = 0 │ 1 │ 2                         │ 3   │
        splits                             ├───┬───┼───┼─────────┬─────────┬───────┼───┬─┤
        programs                           │ 0       │ 1         │ 2         │ 3         │

    A part's length is the line's length divided by the number of programs; the host does not need to know it.
    """
    kv_head = tl.program_id(1)
    total = 0
    for start in range(0, num_seqs, SEQUENCES):
        _, _, _, _, tiles_S = _decode_lengths(
            start + tl.arange(0, SEQUENCES), num_seqs, query_start_loc, seq_lens, window,
            BLOCK_N, DECODE_TOKENS, HAS_WINDOW,
        )  # fmt: skip
        total += tl.sum(tiles_S, 0)
    first = (tl.program_id(0).to(tl.int64) * total // tl.num_programs(0)).to(tl.int32)
    end = ((tl.program_id(0) + 1).to(tl.int64) * total // tl.num_programs(0)).to(tl.int32)
    if first >= end:
        return

    # The sequence with the program's first tile, and the number of tiles before it.
    s, tile, counted = 0, 0, 0
    for start in range(0, num_seqs, SEQUENCES):
        _, _, _, _, tiles_S = _decode_lengths(
            start + tl.arange(0, SEQUENCES), num_seqs, query_start_loc, seq_lens, window,
            BLOCK_N, DECODE_TOKENS, HAS_WINDOW,
        )  # fmt: skip
        ends_S = counted + tl.cumsum(tiles_S, 0)
        s += tl.sum((ends_S <= first).to(tl.int32), 0)
        tile = tl.maximum(tile, tl.max(tl.where(ends_S <= first, ends_S, 0), 0))
        counted += tl.sum(tiles_S, 0)

    rows_M, dims_D, dims_V = tl.arange(0, BLOCK_M), tl.arange(0, PADDED_SIZE), tl.arange(0, PADDED_VALUE)
    heads_M = kv_head * GROUP + rows_M % GROUP
    bias_M = bias + heads_M * (2 * bias_reach + 1) + bias_reach  # as in `_prefill_kernel`
    while tile < end:
        row_start, query_len, seq_len, first_key, tiles = _decode_lengths(
            s, num_seqs, query_start_loc, seq_lens, window, BLOCK_N, DECODE_TOKENS, HAS_WINDOW
        )
        if tiles > 0:
            tokens_M, real_M = row_start + rows_M // GROUP, rows_M < query_len * GROUP
            mask_MD = real_M[:, None] & (dims_D < HEAD_SIZE)[None, :]
            mask_MV = real_M[:, None] & (dims_V < VALUE_SIZE)[None, :]
            query_offsets_M = tokens_M.to(tl.int64) * query_strides[0] + heads_M * query_strides[1]
            query_MD = tl.load(query + query_offsets_M[:, None] + dims_D[None, :], mask=mask_MD, other=0.0)
            positions_M = seq_len - query_len + tl.minimum(rows_M // GROUP, query_len - 1)
            keys_each = _keys_per_split(first_key, seq_len, BLOCK_N, MIN_SPLIT, MAX_SPLITS)
            splits, tiles_each = tl.cdiv(seq_len - first_key, keys_each), keys_each // BLOCK_N
            first_split = tl.cdiv(tl.maximum(first - tile, 0), tiles_each)
            for split in range(first_split, tl.minimum(tl.cdiv(end - tile, tiles_each), splits)):
                start = first_key + split * keys_each
                out_MV, lse_M = _attend(
                    query_MD, positions_M, bias_M, start, tl.minimum(start + keys_each, seq_len),
                    key_cache + kv_head * key_strides[2], value_cache + kv_head * value_strides[2],
                    block_table + s * block_table_stride, key_strides, value_strides, scale, soft_cap, window,
                    bias_reach, HEAD_SIZE, VALUE_SIZE, PADDED_VALUE, BLOCK_SIZE, BLOCK_N, HAS_WINDOW, IS_CAUSAL,
                    HAS_SOFT_CAP, HAS_BIAS, True,
                )  # fmt: skip
                if splits == 1:
                    if HAS_SINKS:
                        out_MV *= _share_beside_sinks(lse_M, sinks, heads_M)[:, None]
                    out_M = out + (tokens_M.to(tl.int64) * out_strides[0] + heads_M * out_strides[1])
                    tl.store(out_M[:, None] + dims_V[None, :], cast(out_MV, out.dtype.element_ty), mask=mask_MV)
                else:
                    part_M = (s * tl.num_programs(1) + kv_head).to(tl.int64) * partial_rows + rows_M
                    part_M = part_M * partial_splits + split
                    tl.store(partials + part_M[:, None] * VALUE_SIZE + dims_V[None, :], out_MV, mask=mask_MV)
                    tl.store(partial_lse + part_M, lse_M, mask=real_M)
        tile += tiles
        s += 1


@triton.jit(do_not_specialize=["window", "partial_rows", "partial_splits"])
def _combine_kernel(
    partials, partial_lse, query_start_loc, seq_lens, out, sinks, partial_rows, partial_splits, out_strides, window,
    GROUP: tl.constexpr, VALUE_SIZE: tl.constexpr, PADDED_VALUE: tl.constexpr,
    BLOCK_N: tl.constexpr, DECODE_TOKENS: tl.constexpr, HAS_WINDOW: tl.constexpr, IS_CAUSAL: tl.constexpr,
    HAS_SINKS: tl.constexpr, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr,
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
    splits_P, dims_V = tl.arange(0, MAX_SPLITS), tl.arange(0, PADDED_VALUE)
    part_P = ((s * tl.num_programs(1) + kv_head) * partial_rows + row).to(tl.int64) * partial_splits + splits_P
    lse_P = tl.load(partial_lse + part_P, mask=splits_P < splits, other=float("-inf"))
    weights_P = tl.exp2(lse_P - tl.max(lse_P, 0))
    mask_PV = (splits_P < splits)[:, None] & (dims_V < VALUE_SIZE)[None, :]
    parts_PV = tl.load(partials + part_P[:, None] * VALUE_SIZE + dims_V[None, :], mask=mask_PV, other=0.0)
    out_V = tl.sum(parts_PV * weights_P[:, None], 0) / tl.sum(weights_P, 0)
    token, head = (row_start + row // GROUP).to(tl.int64), kv_head * GROUP + row % GROUP
    if HAS_SINKS:
        out_V *= _share_beside_sinks(tl.max(lse_P, 0) + tl.log2(tl.sum(weights_P, 0)), sinks, head)
    pointers_V = out + token * out_strides[0] + head * out_strides[1] + dims_V
    tl.store(pointers_V, cast(out_V, out.dtype.element_ty), mask=dims_V < VALUE_SIZE)


def _decode_shape(group: int) -> tuple[int, int]:
    """Rows of a decode's tile, and how many tokens of a sequence fit into it."""
    rows = max(DECODE_ROWS, triton.next_power_of_2(group))
    return rows, rows // group


@functools.cache
def _num_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return PROGRAMS_EACH * MULTIPROCESSORS
    return PROGRAMS_EACH * int(torch.cuda.get_device_properties(device).multi_processor_count)


def plan_attention(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    num_heads: int,
    key_cache_NKBD: torch.Tensor,
    window: int | None,
    is_causal: bool,
) -> GpuAttentionPlan:
    """If the lengths are on the device, this waits for it."""
    num_kv_heads, head_size = key_cache_NKBD.shape[1], key_cache_NKBD.shape[3]
    group = num_heads // num_kv_heads
    query_lens, lens = query_start_loc.cpu().diff(), seq_lens.cpu()
    # Keys that some row sees, and those before them in a tile of keys.
    seen = lens
    if window is not None:
        seen = lens.minimum(query_lens + (abs(window) if is_causal else 2 * window) + MAX_KEY_TILE)
    decode_tokens = _decode_shape(group)[1]
    is_decode, is_prefill = (query_lens > 0) & (query_lens <= decode_tokens), query_lens > decode_tokens
    rows = splits = prefill_programs = prefill_splits = 0
    if bool(is_decode.any()):
        rows = int(query_lens[is_decode].max()) * group
        splits = min(MAX_SPLITS, -(-int(seen[is_decode].max()) // MIN_SPLIT))
    num_tokens = int(query_lens.sum())
    if bool(is_prefill.any()):
        tokens = _prefill_tiles(max(2, key_cache_NKBD.element_size()), _padded(head_size), group)["BLOCK_M"] // group
        num_tiles = int((-(-query_lens[is_prefill] // tokens)).sum())
        most_splits = -(-int(lens[is_prefill].max()) // PREFILL_SPLIT)
        if window is not None:  # which begins anywhere in a split
            most_splits = min(most_splits, -(-int(seen[is_prefill].max()) // PREFILL_SPLIT) + 1)
        wanted = -(-_num_programs(key_cache_NKBD.device) // (num_tiles * num_kv_heads))
        prefill_programs = min(wanted, most_splits)
        if num_tokens * num_heads * most_splits * (head_size + 1) * 4 > MAX_PREFILL_PARTS_BYTES:
            prefill_programs = 1
        prefill_splits = most_splits if prefill_programs > 1 else 0
    parts = (len(lens), num_kv_heads, rows, splits if splits > 1 else 0)
    prefill_parts = (num_tokens, num_heads, prefill_splits)
    new_empty = functools.partial(torch.empty, dtype=torch.float32, device=key_cache_NKBD.device)
    return GpuAttentionPlan(
        prefill_programs=prefill_programs, decode_rows=rows, max_splits=splits, partials=new_empty(*parts, head_size),
        partial_lse=new_empty(parts), prefill_parts=new_empty(*prefill_parts, head_size),
        prefill_parts_lse=new_empty(prefill_parts),
    )  # fmt: skip


def _padded(head_size: int) -> int:
    return max(16, int(triton.next_power_of_2(head_size)))


def _prefill_tiles(element_size: int, padded_size: int, group: int) -> dict[str, int]:
    """Shape of the tiles. It does not depend on the batch, so that results do not either."""
    if element_size == 2:
        # Registers hold two results per row at the same time, which is too much for 128 rows of 256.
        rows, keys, warps, stages = (128, 64, 8, 5) if padded_size <= 128 else (64, 32, 8, 2)
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
    is_causal: bool,
    soft_cap: float | None,
    sinks_H: torch.Tensor | None,
    position_bias_HR: torch.Tensor | None,
) -> torch.Tensor:
    assert (
        query_THD.stride(2) == key_cache_NKBD.stride(3) == value_cache_NKBD.stride(3) == block_table_SM.stride(1) == 1
    )
    num_tokens, num_heads, head_size = query_THD.shape
    value_size = value_cache_NKBD.shape[3]
    num_seqs, num_kv_heads, block_size = len(seq_lens), key_cache_NKBD.shape[1], key_cache_NKBD.shape[2]
    group, padded_size = num_heads // num_kv_heads, _padded(head_size)
    out_THV = query_THD.new_empty(num_tokens, num_heads, value_size)
    decode_block, decode_tokens = _decode_shape(group)
    shared = {
        "GROUP": group, "VALUE_SIZE": value_size, "PADDED_VALUE": _padded(value_size), "DECODE_TOKENS": decode_tokens,
        "HAS_WINDOW": window is not None, "IS_CAUSAL": is_causal, "HAS_SINKS": sinks_H is not None,
    }  # fmt: skip
    both = {
        **shared, "HEAD_SIZE": head_size, "PADDED_SIZE": padded_size, "BLOCK_SIZE": block_size,
        "HAS_SOFT_CAP": soft_cap is not None, "HAS_BIAS": position_bias_HR is not None,
    }  # fmt: skip
    sinks = out_THV if sinks_H is None else sinks_H  # read only if there are any
    bias, reach = (out_THV, 0) if position_bias_HR is None else (position_bias_HR, position_bias_HR.shape[1] // 2)
    tensors = (
        query_THD, key_cache_NKBD, value_cache_NKBD, block_table_SM, query_start_loc, seq_lens, out_THV, sinks, bias,
    )  # fmt: skip
    score_scale = scale * (LOG2_E.value if soft_cap is None and position_bias_HR is None else 1.0)
    numbers = (
        query_THD.stride()[:2], _cache_strides(key_cache_NKBD), _cache_strides(value_cache_NKBD), out_THV.stride()[:2],
        block_table_SM.stride(0), score_scale, soft_cap or 0.0, window or 0, reach,
    )  # fmt: skip
    if plan.prefill_programs:
        tiles = _prefill_tiles(query_THD.element_size(), padded_size, group)
        tile_tokens = tiles["BLOCK_M"] // group
        num_tiles, in_parts = num_tokens // tile_tokens + num_seqs, plan.prefill_programs > 1
        prefill_parts = (plan.prefill_parts, plan.prefill_parts_lse)
        _prefill_kernel[(num_tiles, num_kv_heads, plan.prefill_programs)](
            *tensors, num_seqs, *prefill_parts, plan.prefill_parts.shape[2], *numbers, **both, **tiles,
            SPLIT=PREFILL_SPLIT, IN_PARTS=in_parts,
        )  # fmt: skip
        if in_parts:
            _merge_parts_kernel[(num_tiles, num_kv_heads, tiles["BLOCK_M"] // MERGED_ROWS)](
                *prefill_parts, query_start_loc, seq_lens, out_THV, sinks, num_seqs, plan.prefill_parts.shape[2],
                out_THV.stride()[:2], window or 0, **shared, TILE_TOKENS=tile_tokens,
                BLOCK_N=tiles["BLOCK_N"], SPLIT=PREFILL_SPLIT, ROWS=MERGED_ROWS, num_warps=4,
            )  # fmt: skip
    if plan.decode_rows:
        splits = {"MIN_SPLIT": MIN_SPLIT, "MAX_SPLITS": MAX_SPLITS, "BLOCK_N": 64 if padded_size <= 128 else 32}
        parts = (plan.partials, plan.partial_lse)
        part_sizes = (plan.decode_rows, plan.partials.shape[3])
        programs = min(max(1, _num_programs(query_THD.device) // num_kv_heads), num_seqs * plan.max_splits)
        _decode_kernel[(programs, num_kv_heads)](
            *tensors, num_seqs, *parts, *part_sizes, *numbers, **both, **splits, BLOCK_M=decode_block,
            SEQUENCES=SEQUENCES, num_warps=4, num_stages=DECODE_STAGES if query_THD.element_size() == 2 else 3,
        )  # fmt: skip
        if plan.max_splits > 1:
            _combine_kernel[(num_seqs, num_kv_heads, plan.decode_rows)](
                *parts, query_start_loc, seq_lens, out_THV, sinks, *part_sizes, out_THV.stride()[:2], window or 0,
                **shared, **splits, num_warps=4,
            )  # fmt: skip
    return out_THV


def _cache_strides(cache_NKBD: torch.Tensor) -> tuple[int, int, int]:
    return cache_NKBD.stride(0), cache_NKBD.stride(2), cache_NKBD.stride(1)
