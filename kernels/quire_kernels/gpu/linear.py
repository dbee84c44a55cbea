"""Linear layers over 8-bit weights in the Triton language: W8A8, int8 or fp8 (e4m3), activations quantised per token.

::

    quantize     x [T, K] ─► x8 [T, K], one scale per token
    multiply     program (tile of T, tile of N):  Σ x8 · w8 over K, in int32 or float32
                 then · token's scale · feature's scale + bias, and for a gated weight activation(gate) · up
                 of two sums, so that neither half is ever written

Unquantised weights have no kernel here: `torch.nn.functional.linear` uses cuBLAS for them.

Sums of int8 are exact, so their tiles may depend on the number of tokens. Sums of fp8 are rounded as they accumulate,
so their tiles all have the same length, and the height of one or two of the instructions that multiply 64 rows. A
token's result is then the same in any batch.
"""

import torch
import triton
import triton.language as tl

from quire_kernels.cpu import LARGEST
from quire_kernels.gpu.interpreter import cast, round_even
from quire_kernels.gpu.rows import gated

SUPERTILE = 8
"""Consecutive tiles of tokens that reuse a tile of the weight from the L2 cache."""


@triton.jit
def _quantize_kernel(x, out, scales, row_stride, largest, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row)."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    values = tl.load(x + row * row_stride + i, mask=i < SIZE, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(values), 0), 1e-10), largest)
    values = tl.div_rn(values, scale)
    values = round_even(values).to(tl.int8) if out.dtype.element_ty == tl.int8 else cast(values, out.dtype.element_ty)
    tl.store(out + row * SIZE + i, values, mask=i < SIZE)
    tl.store(scales + row, scale)


@triton.jit
def _scaled(sums_MN, x_scales_M, weight_scales, bias, features_N, inside_N, HAS_BIAS: tl.constexpr):
    scales_N = tl.load(weight_scales + features_N, mask=inside_N, other=0.0)
    y_MN = sums_MN.to(tl.float32) * x_scales_M[:, None] * scales_N[None, :]
    if HAS_BIAS:
        y_MN += tl.load(bias + features_N, mask=inside_N, other=0.0).to(tl.float32)[None, :]
    return y_MN


@triton.jit
def _with_lora(y_MN, delta, rows_M, has_M, columns_N, in_columns_N, columns, IS_GATED: tl.constexpr):
    """What adapters add to the rows that have one; the others keep their bits."""
    stride = 2 * columns if IS_GATED else columns
    delta_MN = delta + rows_M.to(tl.int64)[:, None] * stride + columns_N[None, :]
    added_MN = y_MN + tl.load(delta_MN, mask=has_M[:, None] & in_columns_N[None, :], other=0.0)
    return tl.where(has_M[:, None], added_MN, y_MN)


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x, weight, bias, x_scales, weight_scales, lora_index, lora_delta, out, rows, columns,
    IN_FEATURES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LORA: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SUPERTILE: tl.constexpr,
):  # fmt: skip
    """Program (tile of the result), in this order::

    0 2 4 │ 12 …     tiles of tokens downwards, of columns to the right; SUPERTILE = 2
    1 3 5 │
    ──────┘
    6 8 10
    """
    tiles_M, tiles_N = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    first_M = tl.program_id(0) // (SUPERTILE * tiles_N) * SUPERTILE
    height, i = tl.minimum(tiles_M - first_M, SUPERTILE), tl.program_id(0) % (SUPERTILE * tiles_N)
    rows_M = (first_M + i % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns_N = i // height * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows_M, in_columns_N, k_K = rows_M < rows, columns_N < columns, tl.arange(0, BLOCK_K)
    x_MK = x + rows_M.to(tl.int64)[:, None] * IN_FEATURES + k_K[None, :]
    weight_KN = weight + columns_N.to(tl.int64)[None, :] * IN_FEATURES + k_K[:, None]
    up_offset = columns.to(tl.int64) * IN_FEATURES

    dtype: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    sums_MN, up_MN = tl.zeros([BLOCK_M, BLOCK_N], dtype), tl.zeros([BLOCK_M, BLOCK_N], dtype)
    for start in range(0, IN_FEATURES, BLOCK_K):
        inside_K = start + k_K < IN_FEATURES if IN_FEATURES % BLOCK_K else tl.full([BLOCK_K], True, tl.int1)
        mask = in_columns_N[None, :] & inside_K[:, None]
        tile_MK = tl.load(x_MK + start, mask=in_rows_M[:, None] & inside_K[None, :], other=0.0)
        # The tensor cores add fp8 products with few bits, so they never add more than one tile of them.
        tile_KN = tl.load(weight_KN + start, mask=mask, other=0.0)
        sums_MN = tl.dot(tile_MK, tile_KN, sums_MN, max_num_imprecise_acc=BLOCK_K, out_dtype=dtype)
        if ACTIVATION is not None:
            tile_KN = tl.load(weight_KN + up_offset + start, mask=mask, other=0.0)
            up_MN = tl.dot(tile_MK, tile_KN, up_MN, max_num_imprecise_acc=BLOCK_K, out_dtype=dtype)

    scales_M = tl.load(x_scales + rows_M, mask=in_rows_M, other=0.0)
    y_MN = _scaled(sums_MN, scales_M, weight_scales, bias, columns_N, in_columns_N, HAS_BIAS)
    has_M = in_rows_M
    if HAS_LORA:
        has_M = tl.load(lora_index + rows_M, mask=in_rows_M, other=-1) >= 0
        y_MN = _with_lora(y_MN, lora_delta, rows_M, has_M, columns_N, in_columns_N, columns, ACTIVATION is not None)
    if ACTIVATION is not None:
        up_MN = _scaled(up_MN, scales_M, weight_scales, bias, columns + columns_N, in_columns_N, HAS_BIAS)
        if HAS_LORA:
            up_MN = _with_lora(up_MN, lora_delta + columns, rows_M, has_M, columns_N, in_columns_N, columns, True)
        y_MN = gated(y_MN, up_MN, ACTIVATION)
    out_MN = out + rows_M.to(tl.int64)[:, None] * columns + columns_N[None, :]
    tl.store(out_MN, cast(y_MN, out.dtype.element_ty), mask=in_rows_M[:, None] & in_columns_N[None, :])


def quantize_per_token(x_TK: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric quantisation with one scale per row: [T, K] of `dtype`, int8 or float8_e4m3fn, and [T] float32, the
    scales."""
    rows, size = x_TK.shape
    out, scales = x_TK.new_empty(rows, size, dtype=dtype), x_TK.new_empty(rows, dtype=torch.float32)
    block = triton.next_power_of_2(size)
    if rows:
        _quantize_kernel[(rows,)](
            x_TK, out, scales, x_TK.stride(0), LARGEST[dtype], size, block, num_warps=min(16, max(1, block // 512))
        )
    return out, scales


def _tiles(rows: int, is_gated: bool, dtype: torch.dtype) -> dict[str, int]:
    """Few tokens: as many programs as possible read the weight, once. Many: large tiles, for the tensor cores."""
    if rows > 64:
        return {"BLOCK_M": 128, "BLOCK_N": 64 if is_gated else 128, "BLOCK_K": 128, "num_warps": 8, "num_stages": 3}
    if dtype != torch.int8:
        return {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4}
    height = max(16, triton.next_power_of_2(rows))
    return {"BLOCK_M": height, "BLOCK_N": 32, "BLOCK_K": 128 if is_gated else 256, "num_warps": 4, "num_stages": 4}


def linear(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    scales_N: torch.Tensor,
    bias_N: torch.Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype,
    lora: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """The product with a quantised weight, which is gated if there is an activation. `lora` is the slot of each row and
    what is added before to those that have one, [T] int64 and [T, N] float32."""
    rows, in_features = x_TK.shape
    assert weight_NK.is_contiguous()
    is_gated = activation is not None
    columns = len(weight_NK) // 2 if is_gated else len(weight_NK)
    out = x_TK.new_empty(rows, columns, dtype=out_dtype)
    if rows:
        x8_TK, x_scales_T = quantize_per_token(x_TK, weight_NK.dtype)
        tiles = _tiles(rows, is_gated, weight_NK.dtype)
        num_tiles = triton.cdiv(rows, tiles["BLOCK_M"]) * triton.cdiv(columns, tiles["BLOCK_N"])
        _linear_kernel[(num_tiles,)](
            x8_TK, weight_NK, bias_N, x_scales_T, scales_N, *(lora or (None, None)), out, rows, columns,
            IN_FEATURES=in_features, HAS_BIAS=bias_N is not None, HAS_LORA=lora is not None, ACTIVATION=activation,
            SUPERTILE=SUPERTILE, **tiles,
        )  # fmt: skip
    return out
