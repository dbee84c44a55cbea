"""Activation · mul, the gate of a feed-forward block (Shazeer 2020, https://arxiv.org/abs/2002.05202).

The activation is SiLU, GELU (Hendrycks & Gimpel 2016, https://arxiv.org/abs/1606.08415), its approximation by tanh
(section 2), or `relu(x)²` (So et al. 2021, https://arxiv.org/abs/2109.08668, section 4). In gpt-oss
(https://arxiv.org/abs/2508.10925) gate and up are cut off at ±7, the gate only above, and `up + 1` multiplies
`gate * sigmoid(1.702 * gate)`; vLLM's name for it is `swigluoai`.
"""

import torch
import torch.nn.functional as F

from quire_kernels.cpu import launch, library_for, structure, uses_triton, with_dense_rows

ACTIVATIONS = {"silu": 1, "gelu_tanh": 2, "swigluoai": 3, "gelu": 4, "relu2": 5}
"""`Activation` of kernels/csrc/calls.h, by name."""
ALPHA, LIMIT = 1.702, 7.0
"""The constants of `swigluoai`."""

_ActivationCall = structure("ActivationCall")


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of a merged projection; see `activate_and_mul`."""
    return activate_and_mul(gate_up, "silu")


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`gelu_tanh(gate) * up` of a merged projection; see `activate_and_mul`."""
    return activate_and_mul(gate_up, "gelu_tanh")


def activate_and_mul(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """`activation(gate) * up` of a merged projection, [T, 2 * I] → [T, I], the gate's half first; or what `swigluoai`
    makes of both. Raises ValueError if the number of columns is odd, or there is no such activation."""
    check_activation(activation)
    if uses_triton(gate_up):
        from quire_kernels.gpu import rows as gpu

        return gpu.activate_and_mul(with_dense_rows(gate_up), activation)
    if library_for(gate_up) is None:
        gate, up = gate_up.chunk(2, dim=-1)
        if activation == "swigluoai":
            gate, up = gate.float().clamp(max=LIMIT), up.float().clamp(-LIMIT, LIMIT)
            return (gate * ALPHA).sigmoid().mul_(gate).mul_(up + 1).to(gate_up.dtype)
        return activate(gate, activation).mul_(up)
    gate_up = with_dense_rows(gate_up)
    rows, width = gate_up.shape
    if width % 2:
        raise ValueError(f"gate_up has {width} columns; they must be two halves")
    size = width // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype)
    call = _ActivationCall(
        gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), rows, size, gate_up.dtype == torch.float32,
        ACTIVATIONS[activation],
    )  # fmt: skip
    launch("quire_activate_and_mul", call, out)
    return out


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """`activation(x)` in plain torch; `linear` applies it to what it computes in C++."""
    if activation == "relu2":
        return F.relu(x).square()
    return F.silu(x) if activation == "silu" else F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def check_activation(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; it must be one of {', '.join(ACTIVATIONS)}")
