"""Activation · mul, the gate of a feed-forward block (Shazeer 2020, https://arxiv.org/abs/2002.05202).

The activation is SiLU, GELU (Hendrycks & Gimpel 2016, https://arxiv.org/abs/1606.08415), its approximation by tanh
(section 2), or `relu(x)²` (So et al. 2021, https://arxiv.org/abs/2109.08668, section 4). In gpt-oss
(https://arxiv.org/abs/2508.10925) gate and up are cut off at ±7, the gate only above, and `up + 1` multiplies
`gate * sigmoid(1.702 * gate)`; vLLM's name for it is `swigluoai`.
"""

from collections.abc import Collection

import torch
import torch.nn.functional as F

from quire_kernels.cpu import launch, library_for, structure, uses_triton, with_dense_rows

ACTIVATIONS = {"silu": 1, "gelu_tanh": 2, "swigluoai": 3, "gelu": 4, "relu2": 5}
"""`Activation` of kernels/csrc/calls.h, by name."""
GATES = {**ACTIVATIONS, "none": 0, "sigmoid": 6}
"""Those of `activate_and_mul`: a gate may also multiply as it is, or by its sigmoid alone."""
ALPHA, LIMIT = 1.702, 7.0
"""The constants of `swigluoai`."""

_ActivationCall = structure("ActivationCall")
_ScaleRowsCall = structure("ScaleRowsCall")
_XieluCall = structure("XieluCall")


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of a merged projection; see `activate_and_mul`."""
    return activate_and_mul(gate_up, "silu")


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`gelu_tanh(gate) * up` of a merged projection; see `activate_and_mul`."""
    return activate_and_mul(gate_up, "gelu_tanh")


def activate_and_mul(gate_up: torch.Tensor, activation: str, up: torch.Tensor | None = None) -> torch.Tensor:
    """`activation(gate) * up` of a merged projection, [T, 2 * I] → [T, I], the gate's half first; or what `swigluoai`
    makes of both. With `up`, [T, I], the first argument is the gate alone; it may have fewer columns, each of which is
    the gate of as many columns of `up`, such as those of a head. Raises ValueError if the number of columns is odd, or
    no divisor of that of `up`, or there is no such activation."""
    check_activation(activation, GATES)
    if up is None:
        if gate_up.shape[1] % 2:
            raise ValueError(f"gate_up has {gate_up.shape[1]} columns; they must be two halves")
        gate, up = gate_up.chunk(2, dim=-1)
    else:
        gate = gate_up
        fits = len(up) == len(gate) and up.shape[1] % max(gate.shape[1], 1) == 0
        if not fits or up.dtype != gate.dtype:
            raise ValueError(
                f"up is {up.dtype} of {list(up.shape)}; it must be {gate.dtype} of {list(gate.shape)}, or have a "
                "multiple of these columns"
            )
    width = up.shape[1] // max(gate.shape[1], 1)
    if uses_triton(gate_up):
        from quire_kernels.gpu import rows as gpu

        return gpu.activate_and_mul(with_dense_rows(gate), with_dense_rows(up), activation)
    if library_for(gate, up) is None:
        gate = gate if width == 1 else gate.repeat_interleave(width, 1)
        if activation == "swigluoai":
            gate, up = gate.float().clamp(max=LIMIT), up.float().clamp(-LIMIT, LIMIT)
            return (gate * ALPHA).sigmoid().mul_(gate).mul_(up + 1).to(gate_up.dtype)
        if activation in ("none", "sigmoid"):
            return up * (gate if activation == "none" else gate.float().sigmoid()).to(up.dtype)
        return activate(gate, activation).mul_(up)
    gate, up = with_dense_rows(gate), with_dense_rows(up)
    rows, size = up.shape
    out = torch.empty(rows, size, dtype=gate.dtype)
    call = _ActivationCall(
        gate.data_ptr(), gate.stride(0), up.data_ptr(), up.stride(0), out.data_ptr(), rows, size, width,
        gate.dtype == torch.float32, GATES[activation],
    )  # fmt: skip
    launch("quire_activate_and_mul", call)
    return out


def scale_rows(hidden_TE: torch.Tensor, scale_T: torch.Tensor) -> torch.Tensor:
    """Each row times a number of its own, [T, E]. Raises TypeError or ValueError if a tensor does not fit the other.

    Args:
        hidden_TE: any strides.
        scale_T: float32.
    """
    rows, size = hidden_TE.shape
    if scale_T.dtype != torch.float32 or scale_T.device != hidden_TE.device:
        raise TypeError(f"scale_T is {scale_T.dtype} on {scale_T.device}; it must be float32 on {hidden_TE.device}")
    if scale_T.shape != (rows,):
        raise ValueError(f"scale_T has shape {list(scale_T.shape)}; it must be [{rows}]")
    if uses_triton(hidden_TE) or library_for(hidden_TE) is None:
        return (hidden_TE * scale_T[:, None]).to(hidden_TE.dtype)
    hidden_TE, scale_T = with_dense_rows(hidden_TE), scale_T.contiguous()
    out = torch.empty(rows, size, dtype=hidden_TE.dtype)
    call = _ScaleRowsCall(
        hidden_TE.data_ptr(), hidden_TE.stride(0), scale_T.data_ptr(), out.data_ptr(), rows, size,
        hidden_TE.dtype == torch.float32,
    )  # fmt: skip
    launch("quire_scale_rows", call)
    return out


def xielu(x_TI: torch.Tensor, alpha_p: torch.Tensor, alpha_n: torch.Tensor) -> torch.Tensor:
    """xIELU (Huang & Schlag 2025, https://arxiv.org/abs/2411.13010), [T, I] → [T, I]: with p and n the positive and the
    negative part of x, `a · p² + b · (exp(n) - 1 - n) + x / 2`, where a is the softplus of the learned `alpha_p`, and b
    that of `alpha_n`, plus ½. Raises TypeError or ValueError if these are not one number each.

    Args:
        x_TI: rows may be strided.
        alpha_p: [1] float32, where x is.
        alpha_n: likewise.
    """
    for name, alpha in (("alpha_p", alpha_p), ("alpha_n", alpha_n)):
        if (alpha.dtype, alpha.shape, alpha.device) != (torch.float32, (1,), x_TI.device):
            raise (ValueError if alpha.shape != (1,) else TypeError)(
                f"{name} is {alpha.dtype} of {list(alpha.shape)} on {alpha.device}; it must be torch.float32 of [1] on "
                f"{x_TI.device}"
            )
    if uses_triton(x_TI):
        from quire_kernels.gpu import rows as gpu

        return gpu.xielu(with_dense_rows(x_TI), alpha_p, alpha_n)
    if library_for(x_TI) is None:
        x, below = x_TI.float(), x_TI.float().clamp(max=0)
        y = F.softplus(alpha_p) * x.clamp(min=0).square() + 0.5 * x
        return (y + (F.softplus(alpha_n) + 0.5) * (below.expm1() - below)).to(x_TI.dtype)
    x_TI = with_dense_rows(x_TI)
    rows, size = x_TI.shape
    out = torch.empty(rows, size, dtype=x_TI.dtype)
    call = _XieluCall(
        x_TI.data_ptr(), x_TI.stride(0), alpha_p.data_ptr(), alpha_n.data_ptr(), out.data_ptr(), rows, size,
        x_TI.dtype == torch.float32,
    )  # fmt: skip
    launch("quire_xielu", call)
    return out


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """`activation(x)` in plain torch; `linear` applies it to what it computes in C++."""
    if activation == "relu2":
        return F.relu(x).square()
    return F.silu(x) if activation == "silu" else F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def check_activation(activation: str, known: Collection[str] = ACTIVATIONS.keys()) -> None:
    if activation not in known:
        raise ValueError(f"activation is {activation!r}; it must be one of {', '.join(known)}")
