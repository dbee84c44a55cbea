"""RMSNorm (Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467) and LayerNorm (Ba et al. 2016,
https://arxiv.org/abs/1607.06450), alone and fused with the residual addition; and this addition alone.

A weight is of the rows' dtype, or float32, in which it multiplies before the result is rounded; LayerNorm's is float32.
"""

import torch
import torch.nn.functional as F

from quire_kernels.cpu import (
    Call,
    check_tensor,
    check_written_rows,
    launch,
    library_for,
    pointer,
    structure,
    uses_triton,
    with_dense_rows,
)

_NormCall, _GatedNormCall = structure("NormCall"), structure("GatedNormCall")


def rms_norm(
    hidden_TE: torch.Tensor, weight_E: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`hidden / rms(hidden) * weight`, with the statistics in float32. Raises TypeError or ValueError if a tensor does
    not fit the others.

    Args:
        hidden_TE: any strides.
        weight_E: of the same dtype, or float32.
        eps: added to the mean of the squares.
        out: [T, E] of the same dtype, to be written; its rows may be a part of longer ones. None: a new tensor.
    """
    if out is not None:
        check_written_rows("out", out, hidden_TE)
        if len(out) != len(hidden_TE):
            raise ValueError(f"out has {len(out)} rows; it must be as many as hidden_TE has, {len(hidden_TE)}")
    if uses_triton(hidden_TE):
        from quire_kernels.gpu import rows as gpu

        return gpu.rms_norm(with_dense_rows(hidden_TE), weight_E, eps, out)
    if library_for(hidden_TE) is None:
        normed = _rms_norm_torch(hidden_TE, weight_E, eps)
        return normed if out is None else out.copy_(normed)
    hidden_TE = with_dense_rows(hidden_TE)
    out = torch.empty(hidden_TE.shape, dtype=hidden_TE.dtype) if out is None else out
    launch("quire_rms_norm", _norm_call(hidden_TE, None, weight_E, out, eps))
    return out


def add_rms_norm(
    hidden_TE: torch.Tensor,
    residual_TE: torch.Tensor,
    weight_E: torch.Tensor,
    eps: float,
    multiplier: float = 1.0,
    scale: float = 1.0,
) -> torch.Tensor:
    """`add_residual`, and return the normed stream, [T, E]."""
    if uses_triton(hidden_TE) and residual_TE.stride(1) == 1:
        from quire_kernels.gpu import rows as gpu

        return gpu.add_rms_norm(with_dense_rows(hidden_TE), residual_TE, weight_E, eps, multiplier, scale)
    if library_for(hidden_TE, residual_TE) is None or residual_TE.stride(1) != 1:
        _add_torch(hidden_TE, residual_TE, multiplier, scale)
        return rms_norm(residual_TE, weight_E, eps)
    hidden_TE = with_dense_rows(hidden_TE)
    out = torch.empty(hidden_TE.shape, dtype=hidden_TE.dtype)
    launch("quire_rms_norm", _norm_call(hidden_TE, residual_TE, weight_E, out, eps, multiplier, scale))
    return out


def gated_rms_norm(
    hidden_TE: torch.Tensor,
    gate_TE: torch.Tensor,
    weight_E: torch.Tensor,
    eps: float,
    group_size: int,
    gates_first: bool,
) -> torch.Tensor:
    """RMSNorm of each group of features, and a gate: `rms_norm(hidden · silu(gate)) · weight` as in Mamba-2, or
    `rms_norm(hidden) · weight · silu(gate)` as in Gated DeltaNet, [T, E], in float32 and rounded once. Raises TypeError
    or ValueError if a tensor does not fit the others.

    Args:
        hidden_TE: any strides.
        gate_TE: likewise, of the same dtype.
        weight_E: float32, [E], or [group_size] for all groups.
        eps: added to the mean of the squares.
        group_size: features that are normed together.
        gates_first: whether the gate multiplies before the norm.
    """
    rows, size = hidden_TE.shape
    if gate_TE.shape != hidden_TE.shape or size % group_size or weight_E.shape not in ((size,), (group_size,)):
        raise ValueError(
            f"gate_TE has shape {list(gate_TE.shape)} and weight_E {list(weight_E.shape)}; they must be "
            f"{[rows, size]}, and {size} or {group_size}, groups of {group_size} in rows of {size}"
        )
    hidden_TE, gate_TE = with_dense_rows(hidden_TE), with_dense_rows(gate_TE)
    if uses_triton(hidden_TE):
        from quire_kernels.gpu import rows as gpu

        return gpu.gated_rms_norm(hidden_TE, gate_TE, weight_E, eps, group_size, gates_first)
    if library_for(hidden_TE, gate_TE) is not None:
        check_tensor("weight_E", weight_E, torch.float32, len(weight_E))
        out = torch.empty(rows, size, dtype=hidden_TE.dtype)
        call = _GatedNormCall(
            hidden_TE.data_ptr(), hidden_TE.stride(0), gate_TE.data_ptr(), gate_TE.stride(0), weight_E.data_ptr(),
            out.data_ptr(), rows, size, group_size, len(weight_E), eps, gates_first, hidden_TE.dtype == torch.float32,
        )  # fmt: skip
        launch("quire_gated_rms_norm", call)
        return out
    hidden, gate = hidden_TE.float(), F.silu(gate_TE.float())
    grouped = (hidden * gate if gates_first else hidden).reshape(rows, -1, group_size)
    normed = (grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)).view(rows, size)
    normed *= weight_E.repeat(size // len(weight_E))
    return (normed if gates_first else normed * gate).to(hidden_TE.dtype)


def layer_norm(
    hidden_TE: torch.Tensor, weight_E: torch.Tensor, bias_E: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """`(hidden - mean) / deviation * weight + bias`, [T, E], with the statistics in float32. Raises TypeError or
    ValueError if a tensor does not fit the others.

    Args:
        hidden_TE: any strides.
        weight_E: float32, [E]; or [H, E / H], and each row has H parts that are normed one by one.
        bias_E: float32, of that shape, or None.
        eps: added to the variance.
    """
    return _layer_norm(hidden_TE, None, weight_E, bias_E, eps)


def add_layer_norm(
    hidden_TE: torch.Tensor,
    residual_TE: torch.Tensor,
    weight_E: torch.Tensor,
    bias_E: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Add to the residual stream in place, and return `layer_norm` of the sum."""
    return _layer_norm(hidden_TE, residual_TE, weight_E, bias_E, eps)


def _layer_norm(
    hidden_TE: torch.Tensor,
    residual_TE: torch.Tensor | None,
    weight_E: torch.Tensor,
    bias_E: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    for name, values_E in (("weight_E", weight_E), ("bias_E", bias_E)):
        fits = values_E is None or (values_E.numel() == hidden_TE.shape[1] and values_E.shape == weight_E.shape)
        if values_E is not None and not (fits and values_E.dtype == torch.float32 and values_E.dim() in (1, 2)):
            raise (TypeError if values_E.dtype != torch.float32 else ValueError)(
                f"{name} is {values_E.dtype} of {list(values_E.shape)}; it must be torch.float32, of the rows' size"
            )
    size = weight_E.shape[-1]
    is_in_place = residual_TE is None or residual_TE.stride(1) == 1
    if uses_triton(hidden_TE) and is_in_place:
        from quire_kernels.gpu import rows as gpu

        return gpu.layer_norm(with_dense_rows(hidden_TE), residual_TE, weight_E, bias_E, eps)
    both = (hidden_TE,) if residual_TE is None else (hidden_TE, residual_TE)
    if library_for(*both) is None or not is_in_place:
        x = hidden_TE if residual_TE is None else residual_TE.add_(hidden_TE)
        normed = F.layer_norm(x.float().view(len(x), -1, size), (size,), eps=eps) * weight_E
        return (normed if bias_E is None else normed + bias_E).flatten(1).to(x.dtype)
    hidden_TE = with_dense_rows(hidden_TE)
    out = torch.empty(hidden_TE.shape, dtype=hidden_TE.dtype)
    weight_E = weight_E.contiguous()
    call = _norm_call(hidden_TE, residual_TE, weight_E.view(-1), out, eps)
    call.size, call.heads = size, hidden_TE.shape[1] // size
    if bias_E is not None:
        check_tensor("bias_E", bias_E, torch.float32, *weight_E.shape)
        call.bias = bias_E.data_ptr()
    launch("quire_layer_norm", call)
    return out


def add_residual(
    hidden_TE: torch.Tensor, residual_TE: torch.Tensor, multiplier: float = 1.0, scale: float = 1.0
) -> None:
    """Add `multiplier * hidden_TE` to the residual stream, and multiply the sum by `scale`; in place."""
    if uses_triton(hidden_TE) or library_for(hidden_TE, residual_TE) is None or residual_TE.stride(1) != 1:
        _add_torch(hidden_TE, residual_TE, multiplier, scale)
        return
    hidden_TE = with_dense_rows(hidden_TE)
    launch("quire_rms_norm", _norm_call(hidden_TE, residual_TE, None, None, 0.0, multiplier, scale))


def _norm_call(
    hidden_TE: torch.Tensor,
    residual_TE: torch.Tensor | None,
    weight_E: torch.Tensor | None,
    out_TE: torch.Tensor | None,
    eps: float,
    multiplier: float = 1.0,
    scale: float = 1.0,
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
        0 if residual_TE is None else residual_TE.stride(0), pointer(weight_E), None, pointer(out_TE),
        0 if out_TE is None else out_TE.stride(0), rows, size, eps, multiplier, scale,
        hidden_TE.dtype == torch.float32, weight_is_float, 1,
    )  # fmt: skip


def _add_torch(hidden_TE: torch.Tensor, residual_TE: torch.Tensor, multiplier: float, scale: float) -> None:
    residual_TE.add_(hidden_TE, alpha=multiplier)
    if scale != 1:
        residual_TE.mul_(scale)


def _rms_norm_torch(hidden_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    x = hidden_TE.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True).add_(eps))
    return (weight_E * x.to(weight_E.dtype)).to(hidden_TE.dtype)
