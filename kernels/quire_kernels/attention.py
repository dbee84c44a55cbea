"""PagedAttention (Kwon et al. 2023, https://arxiv.org/abs/2309.06180) over a ragged batch.

One call serves prefill chunks, decodes and anything between: sequence s owns the query rows
`query_start_loc[s] : query_start_loc[s+1]`, which are the last of its `seq_lens[s]` tokens.

::

    sequence s:   | context, already in the cache | query rows of this step |
                  |◄──────────────────── seq_lens[s] ─────────────────────►|
                                                  |◄── query_len ──────────►|
    row r of the step sees keys 0 … seq_lens[s] - query_len + r, or with a sliding window the last `window` of these;
    where attention is not causal, it sees as many from itself on
"""

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from quire_kernels.attention_plan import UNBOUNDED, AttentionPlan, CpuAttentionPlan, GpuAttentionPlan, StandingPlan
from quire_kernels.cpu import (
    HEAD_SIZE_STEP,
    check_tensor,
    launch,
    library,
    pointer,
    structure,
    uses_triton,
    with_dense_heads,
    with_dense_rows,
)
from quire_kernels.kv_cache import (
    check_caches,
    dequantize_rows,
    head_size_of,
    is_tiled,
    natural_key_order,
    natural_value_order,
    takes,
)

_AttentionCall = structure("AttentionCall")


def plan_attention(
    block_table_SM: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    num_heads: int,
    key_cache_NKBD: torch.Tensor,
    window: int | None = None,
    is_causal: bool = True,
) -> AttentionPlan | None:
    """Divide the work of a step: once, for all layers with these heads and this window. Raises TypeError or ValueError
    if the tensors do not fit each other.

    Args:
        block_table_SM: see `paged_attention`, also for the next two.
        query_start_loc: [S + 1] int64. For a cache on a GPU, pass the host's copies of it and of `seq_lens` if there
            are any: reading them from the GPU waits for it.
        seq_lens: [S] int64.
        num_heads: query heads.
        key_cache_NKBD: of any such layer.
        window: see `paged_attention`.
        is_causal: likewise.

    Returns:
        The plan for `paged_attention`; None if it does not need one.
    """
    _check_window(window, is_causal)
    if uses_triton(key_cache_NKBD):
        from quire_kernels.gpu import attention as gpu

        return gpu.plan_attention(query_start_loc, seq_lens, num_heads, key_cache_NKBD, window, is_causal)
    if library() is None or not is_tiled(key_cache_NKBD):
        return None
    block_table_SM = with_dense_rows(block_table_SM)
    query_start_loc, seq_lens = query_start_loc.contiguous(), seq_lens.contiguous()
    return standing_plan(block_table_SM, query_start_loc, seq_lens, num_heads, key_cache_NKBD, window, is_causal).plan


def standing_plan(
    block_table_SM: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    num_heads: int,
    key_cache_NKBD: torch.Tensor,
    window: int | None = None,
    is_causal: bool = True,
) -> StandingPlan:
    """`plan_attention` for a recording, which writes each step to these tensors: a plan to be made again. They are on
    the CPU, without gaps in a row, and the C++ kernels use the cache."""
    _, num_kv_heads, block_size, _ = key_cache_NKBD.shape
    num_seqs = seq_lens.numel()
    check_tensor("seq_lens", seq_lens, torch.int64, num_seqs)
    check_tensor("query_start_loc", query_start_loc, torch.int64, num_seqs + 1)
    if block_table_SM.dtype is not torch.int64 or not block_table_SM.is_cpu:
        raise TypeError(f"block_table_SM is {block_table_SM.dtype}; it must be torch.int64, and on the CPU")
    if block_table_SM.shape[0] < num_seqs:
        raise ValueError(f"block_table_SM has {block_table_SM.shape[0]} rows; there are {num_seqs} sequences")
    if num_heads % num_kv_heads:
        raise ValueError(f"there are {num_heads} query heads; they must be a multiple of the {num_kv_heads} key heads")
    shape = (num_heads, num_kv_heads, block_size, head_size_of(key_cache_NKBD))
    standing = StandingPlan(block_table_SM, query_start_loc, seq_lens, shape, window, is_causal)
    standing.plan_for(num_seqs)
    return standing


def paged_attention(
    query_THD: torch.Tensor,
    key_cache_NKBD: torch.Tensor,
    value_cache_NKBD: torch.Tensor | None,
    block_table_SM: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    plan: AttentionPlan | None = None,
    *,
    value_size: int | None = None,
    window: int | None = None,
    is_causal: bool = True,
    soft_cap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    position_bias_HR: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of each query row to its own sequence's keys and values.

    Args:
        query_THD: queries. H is a multiple of K; query head h uses key head h // (H / K).
        key_cache_NKBD: keys, including those of this step.
        value_cache_NKBD: values, likewise; None: a token's value is a part of its key, as in latent attention
            (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1.2).
        block_table_SM: int64 block ids; entries past a sequence's blocks are ignored but must be valid ids.
        query_start_loc: [S + 1] int64, cumulative query lengths.
        seq_lens: [S] int64, context plus query tokens.
        scale: factor of the scores, usually D ** -0.5; above 0.
        plan: from `plan_attention` for the same `block_table_SM` and what follows it, and the same window and
            causality; made here if it is None.
        value_size: V, without a value cache: values are the last V features of the keys. With one, V is D.
        window: each row sees at most its last `window` keys (Beltagy et al. 2020, https://arxiv.org/abs/2004.05150,
            section 3.1), or if it is below 0, of the keys of its own chunk of `-window` those up to itself (as in
            Llama 4); None for all.
        is_causal: a row sees no key after its own. Else it sees all of them, or with a window as many as before: those
            at a distance below `window`.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)` (Gemma 2, https://arxiv.org/abs/2408.00118,
            section 2); None leaves them unchanged.
        sinks_H: float32, a logit for each query head that joins the softmax as one more key whose value is 0 (gpt-oss,
            https://arxiv.org/abs/2508.10925; Xiao et al. 2023, https://arxiv.org/abs/2309.17453); None: there are none.
        position_bias_HR: float32, R odd: what is added to a query head's scores, after the soft cap, by the position of
            the key minus that of the query, which is 0 at R // 2 (T5, https://arxiv.org/abs/1910.10683, section 2.1).
            The `HEAD_SIZE_STEP` numbers at each end of a row are equal, and hold for all distances beyond. None: there
            is none.

    Returns:
        [T, H, V], in the queries' dtype.

    Raises:
        TypeError: a tensor has a wrong dtype, or not all are on one device.
        ValueError: a tensor's shape does not match the others, or the plan's; R is even or too small; the window is 0,
            or the soft cap is not above 0; or there are a value cache and a value size, or neither, or the values are
            larger than the keys.
    """
    _check_window(window, is_causal)
    if (value_cache_NKBD is None) != (value_size is not None):
        raise ValueError(f"value_size is {value_size}; it must be given if and only if there is no value cache")
    if value_size is not None and not 0 < value_size <= head_size_of(key_cache_NKBD):
        raise ValueError(f"value_size is {value_size}; it must be above 0 and at most {head_size_of(key_cache_NKBD)}")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap is {soft_cap}; it must be above 0")
    if sinks_H is not None and (sinks_H.dtype != torch.float32 or sinks_H.shape != query_THD.shape[1:2]):
        raise ValueError(
            f"sinks_H is {sinks_H.dtype} of shape {list(sinks_H.shape)}; it must be torch.float32, one for each of the "
            f"{query_THD.shape[1]} query heads"
        )
    if position_bias_HR is not None:
        _check_bias(position_bias_HR, query_THD.shape[1])
    is_of_one_dtype = value_cache_NKBD is None or value_cache_NKBD.dtype == key_cache_NKBD.dtype
    has_cpu_kernel = not uses_triton(query_THD) and is_of_one_dtype and takes(key_cache_NKBD, query_THD)
    if uses_triton(query_THD) or has_cpu_kernel:
        plan = plan or plan_attention(
            block_table_SM, query_start_loc, seq_lens, query_THD.shape[1], key_cache_NKBD, window, is_causal
        )
    if uses_triton(query_THD):
        from quire_kernels.gpu import attention as gpu

        assert isinstance(plan, GpuAttentionPlan)
        if value_cache_NKBD is None:
            value_cache_NKBD = key_cache_NKBD[..., -value_size:]  # type: ignore[operator]
        return gpu.paged_attention(
            query_THD, key_cache_NKBD, value_cache_NKBD, block_table_SM, query_start_loc, seq_lens, scale, plan,
            window, is_causal, soft_cap, sinks_H, position_bias_HR,
        )  # fmt: skip
    caches = _Caches(key_cache_NKBD, value_cache_NKBD, value_size or head_size_of(key_cache_NKBD))
    masks = _Masks(window, is_causal, soft_cap, sinks_H, position_bias_HR)
    if has_cpu_kernel:
        assert isinstance(plan, CpuAttentionPlan)
        return _attend_cpu(query_THD, caches, plan, scale, masks)
    return _attend_torch(query_THD, caches, block_table_SM, query_start_loc, seq_lens, scale, masks)


def _check_window(window: int | None, is_causal: bool) -> None:
    if window is not None and (window == 0 or (window < 0 and not is_causal)):
        raise ValueError(f"window is {window}; it must be above 0, or where attention is causal below 0")


def _check_bias(position_bias_HR: torch.Tensor, num_heads: int) -> None:
    is_table = position_bias_HR.dim() == 2 and position_bias_HR.shape[1] % 2 == 1
    if not is_table or position_bias_HR.shape[0] != num_heads or position_bias_HR.shape[1] < 2 * HEAD_SIZE_STEP:
        raise ValueError(
            f"position_bias_HR is of shape {list(position_bias_HR.shape)}; it must have a row for each of the "
            f"{num_heads} query heads, and an odd number of columns above {2 * HEAD_SIZE_STEP}"
        )
    if position_bias_HR.dtype != torch.float32 or not position_bias_HR.is_contiguous():
        raise TypeError(f"position_bias_HR is {position_bias_HR.dtype}; it must be torch.float32, and contiguous")


@dataclass(frozen=True, slots=True)
class _Caches:
    keys: torch.Tensor
    values: torch.Tensor | None
    value_size: int

    def blocks(self, block_ids: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the blocks' keys, [n, K, B, D], and values, [n, K, B, V]."""
        keys = self._numbers(natural_key_order(self.keys[block_ids]), dtype)
        if self.values is None:
            return keys, keys[..., -self.value_size :]
        return keys, self._numbers(natural_value_order(self.values[block_ids]), dtype)

    def _numbers(self, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return (dequantize_rows(blocks) if self.keys.dtype is torch.int8 else blocks).to(dtype)


@dataclass(frozen=True, slots=True)
class _Masks:
    """As of `paged_attention`."""

    window: int | None
    is_causal: bool
    soft_cap: float | None
    sinks: torch.Tensor | None
    position_bias: torch.Tensor | None


def _attend_torch(
    query_THD: torch.Tensor,
    caches: _Caches,
    block_table_SM: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    masks: _Masks,
) -> torch.Tensor:
    out_THV = query_THD.new_empty(*query_THD.shape[:2], caches.value_size)
    query_lens = query_start_loc.diff()
    is_plain = all(one is None for one in (masks.window, masks.soft_cap, masks.sinks, masks.position_bias))
    single = (query_lens == 1) if is_plain else torch.zeros_like(query_lens, dtype=torch.bool)
    decodes = single.nonzero().squeeze(1)
    if len(decodes):
        rows = query_start_loc[decodes]
        out_THV[rows] = _attend_single(query_THD[rows], caches, block_table_SM[decodes], seq_lens[decodes], scale)
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()
    for s in ((query_lens > 0) & ~single).nonzero().squeeze(1).tolist():
        rows_s = slice(starts[s], starts[s + 1])
        out_THV[rows_s] = _attend_many(query_THD[rows_s], caches, block_table_SM[s], lens[s], scale, masks)
    return out_THV


def _attend_cpu(
    query_THD: torch.Tensor, caches: _Caches, plan: CpuAttentionPlan, scale: float, masks: _Masks
) -> torch.Tensor:
    """Each row's result is one chain of operations in the order of its keys: bit for bit, it does not depend on the
    batch, on how a prompt was cut into chunks, or on the number of threads.

    Values that are a part of the keys are computed in whole steps of features, of which the last are returned.
    """
    query_THD, token_stride, head_stride = with_dense_heads(query_THD)
    num_tokens, num_heads, head_size = query_THD.shape
    _, num_kv_heads, block_size, _ = caches.keys.shape
    cache_head_size = head_size_of(caches.keys)
    check_caches(caches.keys, caches.values)
    if not query_THD.is_cpu:
        raise TypeError(f"query_THD is on {query_THD.device}; it must be on the CPU, as keys and values are")
    shape = (num_heads, num_kv_heads, block_size, cache_head_size)
    if plan.shape != shape or head_size != cache_head_size or plan.num_tokens != num_tokens:
        raise ValueError(
            f"queries are {list(query_THD.shape)}, keys {list(caches.keys.shape)}; the plan is for "
            f"{plan.num_tokens} tokens, and for heads, key heads, block size and head size of {list(plan.shape)}"
        )
    if plan.window != masks.window:
        raise ValueError(f"window is {masks.window}; the plan is for a window of {plan.window}")
    if plan.is_causal != masks.is_causal:
        raise ValueError(f"is_causal is {masks.is_causal}; the plan is for {plan.is_causal}")
    if masks.sinks is not None:
        check_tensor("sinks_H", masks.sinks, torch.float32, num_heads)
    reach = 0
    if masks.position_bias is not None:
        reach = masks.position_bias.shape[1] // 2
        check_tensor("position_bias_HR", masks.position_bias, torch.float32, num_heads, 2 * reach + 1)
    columns = -(-caches.value_size // HEAD_SIZE_STEP) * HEAD_SIZE_STEP
    out_THV = query_THD.new_empty(num_tokens, num_heads, columns)
    call = _AttentionCall(
        query=query_THD.data_ptr(), query_token_stride=token_stride, query_head_stride=head_stride,
        key_cache=caches.keys.data_ptr(), value_cache=pointer(caches.values), out=out_THV.data_ptr(),
        sinks=pointer(masks.sinks), position_bias=pointer(masks.position_bias), bias_reach=reach,
        step=ctypes.addressof(plan.step), heads=num_heads, kv_heads=num_kv_heads, head_size=head_size,
        value_size=columns, block_size=block_size, window=masks.window or UNBOUNDED, is_causal=masks.is_causal,
        scale=scale, soft_cap=masks.soft_cap or 0.0, is_float=query_THD.dtype == torch.float32,
        cache_is_int8=caches.keys.dtype is torch.int8,
    )  # fmt: skip
    launch("quire_attention", call)
    return out_THV if columns == caches.value_size else out_THV[..., columns - caches.value_size :]


def _attend_single(
    query_SHD: torch.Tensor, caches: _Caches, block_table_SM: torch.Tensor, seq_lens: torch.Tensor, scale: float
) -> torch.Tensor:
    """One query row per sequence, all sequences at once, padded to the longest."""
    num_seqs, num_heads, head_size = query_SHD.shape
    num_kv_heads, block_size = caches.keys.shape[1:3]
    max_len = int(seq_lens.max())
    table = block_table_SM[:, : -(-max_len // block_size)]
    # [S, M, K, B, D] -> [S, K, M * B, D]: the tokens of a sequence in order.
    key, value = (
        blocks.view(*table.shape, *blocks.shape[1:])
        .transpose(1, 2)
        .reshape(num_seqs, num_kv_heads, -1, blocks.shape[3])
        for blocks in caches.blocks(table.flatten(), query_SHD.dtype)
    )
    query = query_SHD.reshape(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_size)
    scores = (query @ key.transpose(-1, -2)).float().mul_(scale)
    outside = torch.arange(key.shape[2], device=key.device) >= seq_lens[:, None]
    scores.masked_fill_(outside[:, None, None], float("-inf"))
    weights = scores.softmax(-1).to(value.dtype)
    # A weight of 0 does not exclude a value: padding may be another sequence's NaN or infinity.
    value.masked_fill_(outside[:, None, :, None], 0.0)
    return (weights @ value).reshape(num_seqs, num_heads, -1)


def _attend_many(
    query_QHD: torch.Tensor,
    caches: _Caches,
    block_table_M: torch.Tensor,
    seq_len: int,
    scale: float,
    masks: _Masks,
) -> torch.Tensor:
    """Several query rows (Q) of one sequence."""
    query_len = len(query_QHD)
    num_kv_heads, block_size = caches.keys.shape[1:3]
    table = block_table_M[: -(-seq_len // block_size)]
    # [M, K, B, D] -> [1, K, seq_len, D]
    key, value = (
        blocks.transpose(0, 1).reshape(1, num_kv_heads, -1, blocks.shape[3])[:, :, :seq_len]
        for blocks in caches.blocks(table, query_QHD.dtype)
    )
    keys = torch.arange(seq_len, device=key.device)
    window, soft_cap, sinks_H, bias_HR = masks.window, masks.soft_cap, masks.sinks, masks.position_bias
    positions = keys[seq_len - query_len :, None]
    visible = keys <= positions if masks.is_causal else (keys >= 0).expand(query_len, -1).clone()
    if window is not None:
        if window < 0:
            visible &= keys >= positions // -window * -window
        else:
            visible &= (keys > positions - window) & (keys < positions + window)
        seen = visible.any(0)[:, None]
        key, value = key.where(seen, 0.0), value.where(seen, 0.0)  # values before the window may be NaN or infinity
    query = query_QHD.transpose(0, 1).unsqueeze(0)
    if soft_cap is None and sinks_H is None and bias_HR is None:
        out_HQD = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scale, enable_gqa=True)
    else:
        group = query.shape[1] // num_kv_heads
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        scores = (query @ key.transpose(-1, -2)).float() * scale
        if soft_cap is not None:
            scores = (scores / soft_cap).tanh() * soft_cap
        if bias_HR is not None:
            reach = bias_HR.shape[1] // 2
            scores += bias_HR[:, (keys - positions).clamp(-reach, reach) + reach]
        scores.masked_fill_(~visible, float("-inf"))
        if sinks_H is not None:
            scores = torch.cat((sinks_H[:, None, None].expand(1, -1, query_len, 1), scores), -1)
        weights = scores.softmax(-1)[..., -seq_len:]
        out_HQD = weights.to(value.dtype) @ value
    return out_HQD[0].transpose(0, 1)
