"""RMSNorm (Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467), alone and fused with the residual addition; and
this addition alone.

A weight is of the rows' dtype, or float32, in which it multiplies before the result is rounded.
"""

import torch

from quire_kernels.cpu import (
    Call,
    check_tensor,
    check_written_rows,
    launch,
    library_for,
    pointer,
    structure,
    with_dense_rows,
)
from quire_kernels.dispatch import uses_triton

_NormCall = structure("NormCall")


def rms_norm(
    hidden_TE: torch.Tensor, weight_E: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`hidden / rms(hidden) * weight`, with the statistics in float32.

    Args:
        hidden_TE: any strides.
        weight_E: of the same dtype, or float32.
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
    handle = library_for(hidden_TE)
    if handle is None:
        normed = _rms_norm_torch(hidden_TE, weight_E, eps)
        return normed if out is None else out.copy_(normed)
    hidden_TE = with_dense_rows(hidden_TE)
    out = torch.empty(hidden_TE.shape, dtype=hidden_TE.dtype) if out is None else out
    launch(handle.quire_rms_norm, _norm_call(hidden_TE, None, weight_E, out, eps, 1.0), out)
    return out


def add_rms_norm(
    hidden_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float, multiplier: float = 1.0
) -> torch.Tensor:
    """Add `multiplier * hidden_TE` to the residual stream in place, and return the normed sum.

    Returns:
        [T, E]. `residual_TE` holds the sum afterwards.
    """
    if uses_triton(hidden_TE) and residual_TE.stride(1) == 1:
        from quire_kernels.gpu import layernorm as gpu

        return gpu.add_rms_norm(with_dense_rows(hidden_TE), residual_TE, weight_E, eps, multiplier)
    handle = library_for(hidden_TE, residual_TE)
    if handle is None or residual_TE.stride(1) != 1:
        residual_TE.add_(hidden_TE, alpha=multiplier)
        return rms_norm(residual_TE, weight_E, eps)
    hidden_TE = with_dense_rows(hidden_TE)
    out = torch.empty(hidden_TE.shape, dtype=hidden_TE.dtype)
    launch(handle.quire_rms_norm, _norm_call(hidden_TE, residual_TE, weight_E, out, eps, multiplier), out)
    return out


def add_residual(hidden_TE: torch.Tensor, residual_TE: torch.Tensor, multiplier: float = 1.0) -> None:
    """Add `multiplier * hidden_TE` to the residual stream, in place."""
    handle = None if uses_triton(hidden_TE) else library_for(hidden_TE, residual_TE)
    if handle is None or residual_TE.stride(1) != 1:
        residual_TE.add_(hidden_TE, alpha=multiplier)
        return
    hidden_TE = with_dense_rows(hidden_TE)
    launch(handle.quire_rms_norm, _norm_call(hidden_TE, residual_TE, None, None, 0.0, multiplier))


def _norm_call(
    hidden_TE: torch.Tensor,
    residual_TE: torch.Tensor | None,
    weight_E: torch.Tensor | None,
    out_TE: torch.Tensor | None,
    eps: float,
    multiplier: float,
) -> Call:
    rows, size = hidden_TE.shape
    if residual_TE is not None and residual_TE.shape != hidden_TE.shape:
        raise ValueError(
            f"residual_TE has shape {list(residual_TE.shape)}; it must be that of hidden_TE, [{rows}, {size}]"
        )
    weight_is_float = weight_E is not None and weight_E.dtype == torch.float32
    if weight_E is not None:
        check_tensor("weight_E", weight_E, torch.float32 if weight_is_float else hidden_TE.dtype, size)
    return _NormCall(
        hidden_TE.data_ptr(), hidden_TE.stride(0), pointer(residual_TE),
        0 if residual_TE is None else residual_TE.stride(0), pointer(weight_E), pointer(out_TE),
        0 if out_TE is None else out_TE.stride(0), rows, size, eps, multiplier, hidden_TE.dtype == torch.float32,
        weight_is_float,
    )  # fmt: skip


def _rms_norm_torch(hidden_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    x = hidden_TE.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True).add_(eps))
    return (weight_E * x.to(weight_E.dtype)).to(hidden_TE.dtype)
