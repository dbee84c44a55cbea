"""Activation · mul in the Triton language: one pass over gate and up."""

import torch
import triton
import triton.language as tl

from quire_kernels.gpu.interpreter import cast

BLOCK = 1024
"""Elements per program: 8 for each of 128 threads, which is one 16-byte load for 16-bit types."""


@triton.jit
def gated(x, up, ACTIVATION: tl.constexpr):
    """Of float32, gate and up. SiLU is `x * sigmoid(x)`, and GELU by tanh is `x * sigmoid(2u)`, where u is
    √(2/π) · (x + 0.044715 x³)."""
    z = x
    if ACTIVATION == "gelu_tanh":
        z = 1.5957691216 * (x + 0.044715 * x * x * x)
    elif ACTIVATION == "swigluoai":
        x = tl.where(x > 7.0, 7.0, x)  # unlike a minimum, a NaN stays one
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
        z = 1.702 * x
    decay = tl.exp(-tl.abs(z))  # the argument is at most 0, so it cannot overflow
    return x * tl.where(z < 0, decay, 1.0) / (1.0 + decay) * up


@triton.jit
def _activate_and_mul_kernel(
    gate_up, out, row_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr
):  # fmt: skip
    """Program (row, part of it)."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * row_stride + i, mask=i < SIZE, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + i, cast(gated(gate, up, ACTIVATION), out.dtype.element_ty), mask=i < SIZE)


def activate_and_mul(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    if rows:
        grid = (rows, triton.cdiv(size, BLOCK))
        _activate_and_mul_kernel[grid](gate_up, out, gate_up.stride(0), size, BLOCK, activation)
    return out
