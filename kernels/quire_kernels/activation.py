"""SiLU · mul, the gate of a SwiGLU feed-forward block (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

import ctypes

import torch
import torch.nn.functional as F

from quire_kernels.cpu import Call, launch, library_for, with_dense_rows
from quire_kernels.dispatch import uses_triton

__all__ = ["silu_and_mul"]


class _ActivationCall(Call):
    """`ActivationCall` of kernels/csrc/calls.h."""

    _fields_ = (
        ("gate_up", ctypes.c_void_p),
        ("gate_up_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("is_float", ctypes.c_int32),
    )


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of a merged projection.

    Args:
        gate_up: [T, 2 * I], the gate's half first.

    Returns:
        [T, I].

    Raises:
        ValueError: the number of columns is odd.
    """
    if uses_triton(gate_up):
        from quire_kernels.gpu import activation as gpu

        return gpu.silu_and_mul(with_dense_rows(gate_up))
    handle = library_for(gate_up)
    if handle is None:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
    gate_up = with_dense_rows(gate_up)
    rows, width = gate_up.shape
    if width % 2:
        raise ValueError(f"gate_up has {width} columns; they must be two halves")
    size = width // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype)
    is_float = gate_up.dtype == torch.float32
    call = _ActivationCall(gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), rows, size, is_float)
    launch(handle.quire_silu_and_mul, call, out)
    return out
