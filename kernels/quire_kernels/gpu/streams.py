"""Mixing of streams, and gates of which only large numbers count, in the Triton language."""

import torch
import triton
import triton.language as tl

from quire_kernels.gpu.interpreter import cast
from quire_kernels.gpu.rows import BLOCK


@triton.jit
def _mix_streams_kernel(
    base, inputs, routes, weight, out, base_stride, inputs_stride, offset,
    NUM_INPUTS: tl.constexpr, ROUTES: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, part of a stream, stream that is written)."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    stream, r = tl.program_id(2), tl.arange(0, PADDED)
    modes = tl.load(routes + row * ROUTES + r, mask=r < ROUTES, other=0.0)
    decay = tl.exp(-2.0 * tl.abs(modes))
    modes = tl.where(modes < 0, -1.0, 1.0) * (1.0 - decay) / (1.0 + decay)  # tanh
    total = tl.load(base + row * base_stride + stream * SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
    for p in range(NUM_INPUTS):
        weights = tl.load(weight + (stream * NUM_INPUTS + p) * ROUTES + r, mask=r < ROUTES, other=0.0)
        coefficient = offset + tl.sum(weights * modes, 0)
        x = tl.load(inputs + row * inputs_stride + p * SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
        total += coefficient * x
    pointers = out + (row * tl.num_programs(2) + stream) * SIZE + i
    tl.store(pointers, cast(total, out.dtype.element_ty), mask=i < SIZE)


def mix_streams(
    base_TQE: torch.Tensor, inputs_TPE: torch.Tensor, routes_TM: torch.Tensor, weight_QPM: torch.Tensor, offset: float
) -> torch.Tensor:
    rows, num_outputs, size = base_TQE.shape
    out_TQE, routes_size = base_TQE.new_empty(rows, num_outputs, size), weight_QPM.shape[2]
    if rows:
        _mix_streams_kernel[(rows, triton.cdiv(size, BLOCK), num_outputs)](
            base_TQE, inputs_TPE, routes_TM.contiguous(), weight_QPM.contiguous(), out_TQE, base_TQE.stride(0),
            inputs_TPE.stride(0), offset, inputs_TPE.shape[1], routes_size, triton.next_power_of_2(routes_size), size,
            BLOCK,
        )  # fmt: skip
    return out_TQE


@triton.jit
def _match_rms_kernel(
    hidden, like, out, hidden_stride, like_stride, out_stride, floor, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (row)."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = tl.load(hidden + row * hidden_stride + i, mask=i < SIZE, other=0.0).to(tl.float32)
    y = tl.load(like + row * like_stride + i, mask=i < SIZE, other=0.0).to(tl.float32)
    ratio = tl.sqrt(tl.sum(y * y, 0) / SIZE) / tl.sqrt(tl.maximum(tl.sum(x * x, 0) / SIZE, floor))
    tl.store(out + row * out_stride + i, cast(x * ratio, out.dtype.element_ty), mask=i < SIZE)


def match_rms(hidden_TE: torch.Tensor, like_TE: torch.Tensor, floor: float, out: torch.Tensor) -> torch.Tensor:
    rows, size = hidden_TE.shape
    if rows:
        _match_rms_kernel[(rows,)](
            hidden_TE, like_TE, out, hidden_TE.stride(0), like_TE.stride(0), out.stride(0), floor, size,
            triton.next_power_of_2(size),
        )  # fmt: skip
    return out


@triton.jit
def _row_moments_kernel(x, moments, row_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row)."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    values = tl.load(x + row * row_stride + i, mask=i < SIZE, other=0.0).to(tl.float32)
    mean = tl.sum(values, 0) / SIZE
    values = tl.where(i < SIZE, values - mean, 0.0)
    tl.store(moments + 2 * row, mean)
    tl.store(moments + 2 * row + 1, tl.sum(values * values, 0) / SIZE)


def row_moments(x_TI: torch.Tensor) -> torch.Tensor:
    rows, size = x_TI.shape
    moments_T2 = x_TI.new_empty(rows, 2, dtype=torch.float32)
    if rows:
        block = triton.next_power_of_2(size)
        _row_moments_kernel[(rows,)](
            x_TI, moments_T2, x_TI.stride(0), size, block, num_warps=min(16, max(1, block // 512))
        )
    return moments_T2


@triton.jit
def _gaussian_topk_kernel(x, moments, out, row_stride, multiplier, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row, part of it)."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    cutoff = tl.load(moments + 2 * row) + multiplier * tl.sqrt(tl.load(moments + 2 * row + 1))
    above = tl.load(x + row * row_stride + i, mask=i < SIZE, other=0.0).to(tl.float32) - cutoff
    above = tl.where(above < 0, 0.0, above)  # a NaN stays one
    tl.store(out + row * SIZE + i, cast(above, out.dtype.element_ty), mask=i < SIZE)


def gaussian_topk(x_TI: torch.Tensor, moments_T2: torch.Tensor, multiplier: float) -> torch.Tensor:
    rows, size = x_TI.shape
    out_TI = x_TI.new_empty(rows, size)
    if rows:
        _gaussian_topk_kernel[(rows, triton.cdiv(size, BLOCK))](
            x_TI, moments_T2, out_TI, x_TI.stride(0), multiplier, size, BLOCK
        )
    return out_TI
