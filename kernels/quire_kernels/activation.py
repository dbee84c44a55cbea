"""Activation · mul, the gate of a feed-forward block (Shazeer 2020, https://arxiv.org/abs/2002.05202).

The activation is SiLU, GELU (Hendrycks & Gimpel 2016, https://arxiv.org/abs/1606.08415), or its approximation by tanh
(section 2). In gpt-oss (https://arxiv.org/abs/2508.10925) gate and up are cut off at ±7, the gate only above, and
`up + 1` multiplies `gate * sigmoid(1.702 * gate)`; vLLM's name for it is `swigluoai`.
"""

from collections.abc import Collection

import torch
import torch.nn.functional as F

from quire_kernels.cpu import launch, library_for, structure, uses_triton, with_dense_rows

ACTIVATIONS = {"silu": 1, "gelu_tanh": 2, "swigluoai": 3, "gelu": 4}
"""`Activation` of kernels/csrc/calls.h, by name."""
GATES = {**ACTIVATIONS, "none": 0, "sigmoid": 6}
"""Those of `activate_and_mul`: a gate may also multiply as it is, or by its sigmoid alone."""
ALPHA, LIMIT = 1.702, 7.0
"""The constants of `swigluoai`."""

_ActivationCall = structure("ActivationCall")


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of a merged projection; see `activate_and_mul`."""
    return activate_and_mul(gate_up, "silu")


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`gelu_tanh(gate) * up` of a merged projection; see `activate_and_mul`."""
    return activate_and_mul(gate_up, "gelu_tanh")


def activate_and_mul(gate_up: torch.Tensor, activation: str, up: torch.Tensor | None = None) -> torch.Tensor:
    """`activation(gate) * up` of a merged projection, [T, 2 * I] → [T, I], the gate's half first; or what `swigluoai`
    makes of both. With `up`, [T, I], the first argument is the gate alone. Raises ValueError if the number of columns
    is odd, or not that of `up`, or there is no such activation."""
    check_activation(activation, GATES)
    if up is None:
        if gate_up.shape[1] % 2:
            raise ValueError(f"gate_up has {gate_up.shape[1]} columns; they must be two halves")
        gate, up = gate_up.chunk(2, dim=-1)
    else:
        gate = gate_up
        if up.shape != gate.shape or up.dtype != gate.dtype:
            raise ValueError(f"up is {up.dtype} of {list(up.shape)}; it must be {gate.dtype} of {list(gate.shape)}")
    if uses_triton(gate_up):
        from quire_kernels.gpu import rows as gpu

        return gpu.activate_and_mul(with_dense_rows(gate), with_dense_rows(up), activation)
    if library_for(gate, up) is None:
        if activation == "swigluoai":
            gate, up = gate.float().clamp(max=LIMIT), up.float().clamp(-LIMIT, LIMIT)
            return (gate * ALPHA).sigmoid().mul_(gate).mul_(up + 1).to(gate_up.dtype)
        if activation in ("none", "sigmoid"):
            return up * (gate if activation == "none" else gate.float().sigmoid()).to(up.dtype)
        return activate(gate, activation).mul_(up)
    gate, up = with_dense_rows(gate), with_dense_rows(up)
    rows, size = gate.shape
    out = torch.empty(rows, size, dtype=gate.dtype)
    call = _ActivationCall(
        gate.data_ptr(), gate.stride(0), up.data_ptr(), up.stride(0), out.data_ptr(), rows, size,
        gate.dtype == torch.float32, GATES[activation],
    )  # fmt: skip
    launch("quire_activate_and_mul", call, out)
    return out


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """`activation(x)` in plain torch; `linear` applies it to what it computes in C++."""
    return F.silu(x) if activation == "silu" else F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def check_activation(activation: str, known: Collection[str] = ACTIVATIONS.keys()) -> None:
    if activation not in known:
        raise ValueError(f"activation is {activation!r}; it must be one of {', '.join(known)}")
