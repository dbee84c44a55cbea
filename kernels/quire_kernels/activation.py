"""SiLU · mul, the gate of a SwiGLU feed-forward block (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

import torch
import torch.nn.functional as F

__all__ = ["silu_and_mul"]


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of a merged projection.

    Args:
        gate_up: [T, 2 * I], the gate's half first.

    Returns:
        [T, I].
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
