"""SiLU · mul in the Triton language: one pass over gate and up."""

import torch
import triton
import triton.language as tl

from quire_kernels.gpu.interpreter import cast

__all__ = ["silu", "silu_and_mul"]

BLOCK = 1024
"""Elements per program: 8 for each of 128 threads, which is one 16-byte load for 16-bit types."""


@triton.jit
def silu(x):
    """`x * sigmoid(x)`, of float32."""
    decay = tl.exp(-tl.abs(x))  # the argument is at most 0, so it cannot overflow
    return x * tl.where(x < 0, decay, 1.0) / (1.0 + decay)


@triton.jit
def _silu_and_mul_kernel(gate_up, out, row_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row, part of it)."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * row_stride + i, mask=i < SIZE, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + i, cast(silu(gate) * up, out.dtype.element_ty), mask=i < SIZE)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `quire_kernels.silu_and_mul`."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    if rows:
        _silu_and_mul_kernel[(rows, triton.cdiv(size, BLOCK))](gate_up, out, gate_up.stride(0), size, BLOCK)
    return out
