"""RMSNorm (Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467), alone and fused with the residual addition."""

import ctypes

import torch

from quire_kernels.cpu import Call, check_tensor, check_written_rows, launch, library_for, with_dense_rows
from quire_kernels.dispatch import uses_triton

__all__ = ["add_rms_norm", "rms_norm"]


class _NormCall(Call):
    """`NormCall` of kernels/csrc/calls.h."""

    _fields_ = (
        ("hidden", ctypes.c_void_p),
        ("hidden_stride", ctypes.c_int64),
        ("residual", ctypes.c_void_p),
        ("residual_stride", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("is_float", ctypes.c_int32),
    )


def rms_norm(
    hidden_TE: torch.Tensor, weight_E: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`hidden / rms(hidden) * weight`, with the statistics in float32.

    Args:
        hidden_TE: any strides.
        weight_E: of the same dtype.
        eps: added to the mean of the squares.
        out: [T, E] of the same dtype, to be written; its rows may be a part of longer ones.

    Returns:
        [T, E], `out` or a new tensor of `hidden_TE`'s dtype.

    Raises:
        TypeError: the weight or `out` is of another dtype, or not on the same device.
        ValueError: the weight or `out` is of another shape, or has gaps between the elements of a row.
    """
    if out is not None:
        check_written_rows("out", out, hidden_TE)
        if len(out) != len(hidden_TE):
            raise ValueError(f"out has {len(out)} rows; it must be as many as hidden_TE has, {len(hidden_TE)}")
    if uses_triton(hidden_TE):
        from quire_kernels.gpu import layernorm as gpu

        return gpu.rms_norm(with_dense_rows(hidden_TE), weight_E, eps, out)
    handle = library_for(hidden_TE, weight_E)
    if handle is None:
        normed = _rms_norm_torch(hidden_TE, weight_E, eps)
        return normed if out is None else out.copy_(normed)
    hidden_TE = with_dense_rows(hidden_TE)
    rows, size = hidden_TE.shape
    check_tensor("weight_E", weight_E, hidden_TE.dtype, size)
    out = torch.empty(rows, size, dtype=hidden_TE.dtype) if out is None else out
    call = _NormCall(
        hidden_TE.data_ptr(), hidden_TE.stride(0), None, 0, weight_E.data_ptr(), out.data_ptr(), out.stride(0), rows,
        size, eps, hidden_TE.dtype == torch.float32,
    )  # fmt: skip
    launch(handle.quire_rms_norm, call, out)
    return out


def add_rms_norm(
    hidden_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add `hidden_TE` to the residual stream in place, and return the normed sum.

    Returns:
        [T, E]. `residual_TE` holds the sum afterwards.
    """
    if uses_triton(hidden_TE) and residual_TE.stride(1) == 1:
        from quire_kernels.gpu import layernorm as gpu

        return gpu.add_rms_norm(with_dense_rows(hidden_TE), residual_TE, weight_E, eps)
    handle = library_for(hidden_TE, residual_TE, weight_E)
    if handle is None or residual_TE.stride(1) != 1:
        residual_TE.add_(hidden_TE)
        return rms_norm(residual_TE, weight_E, eps)
    hidden_TE = with_dense_rows(hidden_TE)
    rows, size = hidden_TE.shape
    if residual_TE.shape != hidden_TE.shape:
        raise ValueError(
            f"residual_TE has shape {list(residual_TE.shape)}; it must be that of hidden_TE, [{rows}, {size}]"
        )
    check_tensor("weight_E", weight_E, hidden_TE.dtype, size)
    out = torch.empty(rows, size, dtype=hidden_TE.dtype)
    call = _NormCall(
        hidden_TE.data_ptr(), hidden_TE.stride(0), residual_TE.data_ptr(), residual_TE.stride(0), weight_E.data_ptr(),
        out.data_ptr(), size, rows, size, eps, hidden_TE.dtype == torch.float32,
    )  # fmt: skip
    launch(handle.quire_rms_norm, call, out)
    return out


def _rms_norm_torch(hidden_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    x = hidden_TE.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True).add_(eps))
    return weight_E * x.to(hidden_TE.dtype)
