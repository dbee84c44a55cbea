"""Rotary position embedding in the Triton language, fused with the norms before it and the KV-cache write after it.

Queries, keys and values are read once, from the merged projection's output, and written once, to their destinations::

    program (token, i)   i <  ceil(H / 8)   8 query heads:      [norm] ─ rotate ─► out
                         i >= ceil(H / 8)   8 KV heads, key:    [norm] ─ rotate ─► key cache
                                                        value:  [norm]         ─► value cache, if there is one
"""

import torch
import triton
import triton.language as tl

from quire_kernels.cpu import LARGEST
from quire_kernels.gpu.interpreter import cast
from quire_kernels.gpu.rows import normed

HEADS = 8
"""Heads per program: with 64 pairs in each head, 8 pairs for each of 64 threads."""
LARGEST_FP8 = LARGEST[torch.float8_e4m3fn]
"""Largest number of e4m3 (Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433, table 1)."""


@triton.jit
def _places(pairs_P, HEAD_SIZE: tl.constexpr, ROTARY_SIZE: tl.constexpr):
    """Where in a head the two features of each pair are: those that are rotated first, then the others in any pairs::

    pair      0 … R/2    R/2 … D/2
    first     0 … R/2      R … R/2 + D/2
    second  R/2 … R      R/2 + D/2 … D
    """
    if ROTARY_SIZE == HEAD_SIZE:
        return pairs_P, pairs_P + HEAD_SIZE // 2
    is_rotated_P = pairs_P < ROTARY_SIZE // 2
    first_P = pairs_P + tl.where(is_rotated_P, 0, ROTARY_SIZE // 2)
    return first_P, pairs_P + tl.where(is_rotated_P, ROTARY_SIZE // 2, HEAD_SIZE // 2)


@triton.jit
def _rotate(x_H1, norm, angles, pairs_P, real_HP, eps, HEAD_SIZE: tl.constexpr, ROTARY_SIZE: tl.constexpr):
    """Rotate the pairs of some heads, after norming them unless `norm` is None. Takes pointers to the heads, to the
    norm's weight, and to the cosines. Pairs that are not rotated have an angle of 0."""
    first_P, second_P = _places(pairs_P, HEAD_SIZE, ROTARY_SIZE)
    first_HP, second_HP = (
        tl.load(x_H1 + first_P[None, :], mask=real_HP, other=0.0),
        tl.load(x_H1 + second_P[None, :], mask=real_HP, other=0.0),
    )
    dtype: tl.constexpr = first_HP.dtype
    first_HP, second_HP = first_HP.to(tl.float32), second_HP.to(tl.float32)
    if norm is not None:
        mean_square_H1 = tl.sum(first_HP * first_HP + second_HP * second_HP, 1, keep_dims=True) / HEAD_SIZE
        in_half_P = pairs_P < HEAD_SIZE // 2
        weight_P = tl.load(norm + first_P, mask=in_half_P, other=0.0)
        first_HP = normed(first_HP, weight_P[None, :], mean_square_H1, eps, dtype).to(tl.float32)
        weight_P = tl.load(norm + second_P, mask=in_half_P, other=0.0)
        second_HP = normed(second_HP, weight_P[None, :], mean_square_H1, eps, dtype).to(tl.float32)
    is_rotated_P = pairs_P < ROTARY_SIZE // 2
    cos_HP = tl.load(angles + pairs_P, mask=is_rotated_P, other=1.0)[None, :]
    sin_HP = tl.load(angles + ROTARY_SIZE // 2 + pairs_P, mask=is_rotated_P, other=0.0)[None, :]
    rotated_HP = first_HP * cos_HP - second_HP * sin_HP
    return cast(rotated_HP, dtype), cast(second_HP * cos_HP + first_HP * sin_HP, dtype)


@triton.jit
def _store(cache, x, mask, IS_FP8: tl.constexpr, LARGEST_FP8: tl.constexpr):
    """Write to the cache; values too large for fp8 become its largest number."""
    if IS_FP8:
        x = tl.clamp(x.to(tl.float32), -LARGEST_FP8, LARGEST_FP8)
    tl.store(cache, cast(x.to(tl.float32), cache.dtype.element_ty), mask=mask)


@triton.jit
def _rope_kernel(
    query, key, value, query_norm, key_norm, value_norm, positions, cos_sin, slot_mapping, out, key_cache, value_cache,
    query_cos_sin,
    query_strides, key_strides, value_strides, key_cache_strides, value_cache_strides,
    eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, ROTARY_SIZE: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK_SIZE: tl.constexpr, IS_FP8: tl.constexpr, HEADS: tl.constexpr, LARGEST_FP8: tl.constexpr,
):  # fmt: skip
    """Program (token, group of heads)."""
    QUERY_PARTS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pairs_P = tl.arange(0, PAIRS)
    row = tl.load(positions + token) * ROTARY_SIZE
    first_P, second_P = _places(pairs_P, HEAD_SIZE, ROTARY_SIZE)
    if part < QUERY_PARTS:
        heads_H1 = (part * HEADS + tl.arange(0, HEADS))[:, None]
        real_HP = (heads_H1 < NUM_HEADS) & (pairs_P < HEAD_SIZE // 2)[None, :]
        query_H1 = query + token * query_strides[0] + heads_H1 * query_strides[1]
        first_HP, second_HP = _rotate(
            query_H1, query_norm, query_cos_sin + row, pairs_P, real_HP, eps, HEAD_SIZE, ROTARY_SIZE
        )  # fmt: skip
        out_H1 = out + (token * NUM_HEADS + heads_H1) * HEAD_SIZE
        tl.store(out_H1 + first_P[None, :], first_HP, mask=real_HP)
        tl.store(out_H1 + second_P[None, :], second_HP, mask=real_HP)
        return
    heads_H1 = ((part - QUERY_PARTS) * HEADS + tl.arange(0, HEADS))[:, None]
    slot = tl.load(slot_mapping + token)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE

    real_HP = (heads_H1 < NUM_KV_HEADS) & (pairs_P < HEAD_SIZE // 2)[None, :]
    key_H1 = key + token * key_strides[0] + heads_H1 * key_strides[1]
    first_HP, second_HP = _rotate(key_H1, key_norm, cos_sin + row, pairs_P, real_HP, eps, HEAD_SIZE, ROTARY_SIZE)
    key_cache += block * key_cache_strides[0] + offset * key_cache_strides[2]
    cache_H1 = key_cache + heads_H1 * key_cache_strides[1]
    _store(cache_H1 + first_P[None, :], first_HP, real_HP, IS_FP8, LARGEST_FP8)
    _store(cache_H1 + second_P[None, :], second_HP, real_HP, IS_FP8, LARGEST_FP8)
    if value is not None:
        dims_D = tl.arange(0, 2 * PAIRS)
        real_HD = (heads_H1 < NUM_KV_HEADS) & (dims_D < HEAD_SIZE)[None, :]
        value_HD = value + token * value_strides[0] + heads_H1 * value_strides[1] + dims_D[None, :]
        value_cache += block * value_cache_strides[0] + offset * value_cache_strides[2]
        cache_HD = value_cache + heads_H1 * value_cache_strides[1] + dims_D[None, :]
        value_HD = tl.load(value_HD, mask=real_HD, other=0.0)
        if value_norm is not None:
            wide_HD = value_HD.to(tl.float32)
            mean_square_H1 = tl.sum(wide_HD * wide_HD, 1, keep_dims=True) / HEAD_SIZE
            weight_D = tl.load(value_norm + dims_D, mask=dims_D < HEAD_SIZE, other=0.0)
            value_HD = normed(wide_HD, weight_D[None, :], mean_square_H1, eps, value_HD.dtype)
        _store(cache_HD, value_HD, real_HD, IS_FP8, LARGEST_FP8)


def rope_and_cache(
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor | None,
    positions_T: torch.Tensor,
    cos_sin: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    key_cache_NKBD: torch.Tensor,
    value_cache_NKBD: torch.Tensor | None,
    query_norm_D: torch.Tensor | None,
    key_norm_D: torch.Tensor | None,
    value_norm_D: torch.Tensor | None,
    eps: float,
    query_cos_sin: torch.Tensor,
) -> torch.Tensor:
    query_THD, key_TKD = (x if x.stride(-1) == 1 else x.contiguous() for x in (query_THD, key_TKD))
    if value_TKD is not None and value_TKD.stride(-1) != 1:
        value_TKD = value_TKD.contiguous()
    value_strides = None if value_TKD is None else value_TKD.stride()[:2]
    value_cache_strides = None if value_cache_NKBD is None else value_cache_NKBD.stride()[:3]
    num_tokens, num_heads, head_size = query_THD.shape
    num_kv_heads = key_TKD.shape[1]
    out_THD = query_THD.new_empty(num_tokens, num_heads, head_size)
    if num_tokens:
        parts = triton.cdiv(num_heads, HEADS) + triton.cdiv(num_kv_heads, HEADS)
        _rope_kernel[(num_tokens, parts)](
            query_THD, key_TKD, value_TKD, query_norm_D, key_norm_D, value_norm_D, positions_T, cos_sin, slot_mapping_T,
            out_THD, key_cache_NKBD, value_cache_NKBD, query_cos_sin,
            query_THD.stride()[:2], key_TKD.stride()[:2], value_strides,
            key_cache_NKBD.stride()[:3], value_cache_strides, eps,
            NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_SIZE=head_size, ROTARY_SIZE=cos_sin.shape[1],
            PAIRS=triton.next_power_of_2(head_size // 2), BLOCK_SIZE=key_cache_NKBD.shape[2],
            IS_FP8=key_cache_NKBD.element_size() == 1, HEADS=HEADS, LARGEST_FP8=LARGEST_FP8, num_warps=2,
        )  # fmt: skip
    return out_THD
