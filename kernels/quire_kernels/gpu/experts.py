"""The routed experts of a feed-forward layer in the Triton language: two grouped products over sorted pairs.

A pair is a token and one of its experts. Pairs are sorted by expert, and each expert's pairs cut into tiles::

    expert_map[expert_ids] ─► sorted pairs   │ expert 0 │ expert 2      │ elsewhere │
                              tiles          │ 0        │ 1    │ 2      │             none are computed
    gate_up   program (tile, columns): x of the pairs' tokens · two sums, + bias, act(gate) · up ─► [pairs, I], sorted
    down      program (tile, columns): ·                              + bias                     ─► [pairs, E], by token
    combine   program (token, columns): Σ weight · result, in the order of the token's experts, in float32

There may be as many tiles as `pairs / BLOCK_M + experts`; programs beyond those that there are return at once. So the
host knows all sizes without waiting for the device, and a CUDA graph can hold the whole. Tiles always have the same
shape: a pair's result is the same in any batch. Weights are found by their addresses, as each expert has its own.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from quire_kernels.gpu.interpreter import cast, dot
from quire_kernels.gpu.linear import quantize_per_token
from quire_kernels.gpu.rows import gated

BLOCK_M, BLOCK_N = 64, 64
"""The height is that of one of Hopper's instructions: what fewer pairs take too."""
COLUMNS = 1024
"""Columns of a program that combines."""


@triton.jit
def _product(
    x_MK, in_rows_M, weight_KN, in_columns_N, SIZE: tl.constexpr, BLOCK_K: tl.constexpr, dtype: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    k_K = tl.arange(0, BLOCK_K)
    sums_MN = tl.zeros([BLOCK_M, BLOCK_N], dtype)
    for start in range(0, SIZE, BLOCK_K):
        inside_K = start + k_K < SIZE
        tile_MK = tl.load(x_MK + start, mask=in_rows_M[:, None] & inside_K[None, :], other=0.0)
        tile_KN = tl.load(weight_KN + start, mask=in_columns_N[None, :] & inside_K[:, None], other=0.0)
        if tile_MK.dtype.primitive_bitwidth == 8:
            sums_MN = tl.dot(tile_MK, tile_KN, sums_MN, max_num_imprecise_acc=BLOCK_K, out_dtype=dtype)
        else:
            sums_MN = dot(tile_MK, tile_KN, sums_MN)
    return sums_MN


@triton.jit
def _experts_kernel(
    x, x_scales, x_stride, pointers, biases, num_experts, pairs, starts, tile_starts, out, columns, TOP_K: tl.constexpr,
    SIZE: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (tile of pairs, tile of columns).

    With an activation, of the gate or without one of the result, x has a row per token, and out one per place among the
    sorted; else x has these, and out one per pair.
    """
    IS_FIRST: tl.constexpr = ACTIVATION is not None
    tile = tl.program_id(0)
    if tile >= tl.load(tile_starts + num_experts):
        return
    low, high = 0, num_experts  # the last expert whose tiles begin here or before
    while high - low > 1:
        middle = (low + high) // 2
        begins = tl.load(tile_starts + middle) <= tile
        low, high = tl.where(begins, middle, low), tl.where(begins, high, middle)
    expert = low
    places_M = tl.load(starts + expert) + (tile - tl.load(tile_starts + expert)) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows_M = places_M < tl.load(starts + expert + 1)
    pairs_M = tl.load(pairs + places_M, mask=in_rows_M, other=0)
    columns_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_columns_N, k_K = columns_N < columns, tl.arange(0, BLOCK_K)
    rows_M = pairs_M // TOP_K if IS_FIRST else places_M
    out_M = places_M if IS_FIRST else pairs_M

    IS_8BIT: tl.constexpr = x.dtype.element_ty.primitive_bitwidth == 8
    dtype: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    weight = tl.multiple_of(tl.load(pointers + expert).to(tl.pointer_type(x.dtype.element_ty)), 16)
    x_MK = x + rows_M[:, None] * x_stride + k_K[None, :]
    weight_KN = weight + columns_N.to(tl.int64)[None, :] * SIZE + k_K[:, None]
    y_MN = _product(x_MK, in_rows_M, weight_KN, in_columns_N, SIZE, BLOCK_K, dtype, BLOCK_M, BLOCK_N).to(tl.float32)
    if GATED:
        up_KN = weight_KN + columns.to(tl.int64) * SIZE
        up_MN = _product(x_MK, in_rows_M, up_KN, in_columns_N, SIZE, BLOCK_K, dtype, BLOCK_M, BLOCK_N).to(tl.float32)
    if IS_8BIT:
        scales = tl.load(pointers + num_experts + expert).to(tl.pointer_type(tl.float32))
        scales_M = tl.load(x_scales + rows_M, mask=in_rows_M, other=0.0)[:, None]
        y_MN = y_MN * scales_M * tl.load(scales + columns_N, mask=in_columns_N, other=0.0)[None, :]
        if GATED:
            up_MN = up_MN * scales_M * tl.load(scales + columns + columns_N, mask=in_columns_N, other=0.0)[None, :]
    if HAS_BIAS:
        bias = biases + expert * (2 * columns if GATED else columns) + columns_N
        y_MN += tl.load(bias, mask=in_columns_N, other=0.0)[None, :]
        if GATED:
            up_MN += tl.load(bias + columns, mask=in_columns_N, other=0.0)[None, :]
    if GATED:
        y_MN = gated(y_MN, up_MN, ACTIVATION)
    elif IS_FIRST:
        y_MN = gated(y_MN, 1.0, ACTIVATION)
    out_MN = out + out_M[:, None] * columns + columns_N[None, :]
    tl.store(out_MN, cast(y_MN, out.dtype.element_ty), mask=in_rows_M[:, None] & in_columns_N[None, :])


@triton.jit
def _combine_kernel(
    results, weights, places, shared, shared_gate, out, shared_stride, SIZE: tl.constexpr, TOP_K: tl.constexpr,
    HAS_SHARED: tl.constexpr, HAS_GATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (token, part of its row)."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for k in range(TOP_K):
        pair = row * TOP_K + k
        length = tl.where(tl.load(places + pair) >= 0, SIZE, 0)
        sums += tl.load(weights + pair) * tl.load(results + pair * SIZE + i, mask=i < length, other=0.0)
    if HAS_SHARED:
        value = tl.load(shared + row * shared_stride + i, mask=i < SIZE, other=0.0).to(tl.float32)
        if HAS_GATE:
            value = value / (1.0 + tl.exp(-tl.load(shared_gate + row)))
        sums += value
    tl.store(out + row * SIZE + i, cast(sums, out.dtype.element_ty), mask=i < SIZE)


def routed_experts(
    x_TE: torch.Tensor,
    weights_TK: torch.Tensor,
    expert_ids_TK: torch.Tensor,
    expert_map: torch.Tensor,
    pointers: tuple[torch.Tensor, torch.Tensor],
    biases: tuple[torch.Tensor, torch.Tensor] | None,
    kind: torch.dtype,
    activation: str,
    is_gated: bool,
    intermediate_size: int,
    shared_TE: torch.Tensor | None,
    shared_gate_T1: torch.Tensor | None,
) -> torch.Tensor:
    """`pointers` are of gate and up, and of down: int64 [2, experts], the addresses of weights and of scales; `biases`
    of both: float32 [experts, features]. `kind` is the weights' dtype. Tensors have no gaps, but for rows of x and of
    `shared_TE`."""
    out_TE = torch.empty_like(x_TE, memory_format=torch.contiguous_format)
    (rows, size), (num_pairs, top_k) = x_TE.shape, (expert_ids_TK.numel(), expert_ids_TK.shape[1])
    if not rows:
        return out_TE
    num_experts = pointers[0].shape[1]
    places_P = expert_map[expert_ids_TK.flatten()]
    sorted_P, pairs_P = torch.where(places_P < 0, num_experts, places_P).sort(stable=True)
    starts = torch.searchsorted(sorted_P, torch.arange(num_experts + 1, device=x_TE.device))
    counts = starts.diff()
    tile_starts = F.pad(((counts + BLOCK_M - 1) // BLOCK_M).cumsum(0), (1, 0))
    num_tiles = min(num_pairs, triton.cdiv(num_pairs, BLOCK_M) + num_experts)
    # Rows of pairs whose experts are elsewhere are never written, and quantised like all: they must be numbers.
    hidden_PI = (x_TE.new_zeros if kind.itemsize == 1 else x_TE.new_empty)(num_pairs, intermediate_size)
    results_PE = x_TE.new_empty(num_pairs, size, dtype=torch.float32)
    bias_XF = (None, None) if biases is None else biases
    for x, addresses, bias, out, activation_of in (
        (x_TE, pointers[0], bias_XF[0], hidden_PI, activation), (hidden_PI, pointers[1], bias_XF[1], results_PE, None),
    ):  # fmt: skip
        x_scales = None
        if kind.itemsize == 1:
            x, x_scales = quantize_per_token(x, kind)
        _experts_kernel[(num_tiles, triton.cdiv(out.shape[1], BLOCK_N))](
            x, x_scales, x.stride(0), addresses, bias, num_experts, pairs_P, starts, tile_starts, out, out.shape[1],
            TOP_K=top_k, SIZE=x.shape[1], HAS_BIAS=bias is not None, ACTIVATION=activation_of,
            GATED=activation_of is not None and is_gated, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
            BLOCK_K=128 // kind.itemsize, num_warps=4, num_stages=3,
        )  # fmt: skip
    _combine_kernel[(rows, triton.cdiv(size, COLUMNS))](
        results_PE, weights_TK, places_P, shared_TE, shared_gate_T1, out_TE,
        0 if shared_TE is None else shared_TE.stride(0), SIZE=size, TOP_K=top_k, HAS_SHARED=shared_TE is not None,
        HAS_GATE=shared_gate_T1 is not None, BLOCK=COLUMNS,
    )  # fmt: skip
    return out_TE
