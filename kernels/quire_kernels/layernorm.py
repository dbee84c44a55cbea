"""RMSNorm (Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467), alone and fused with the residual addition."""

import torch

__all__ = ["add_rms_norm", "rms_norm"]


def rms_norm(hidden_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """`hidden / rms(hidden) * weight`, with the statistics in float32.

    Returns:
        [T, E], a new tensor of `hidden_TE`'s dtype.
    """
    x = hidden_TE.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True).add_(eps))
    return weight_E * x.to(hidden_TE.dtype)


def add_rms_norm(
    hidden_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add `hidden_TE` to the residual stream in place, and return the normed sum.

    Returns:
        [T, E]. `residual_TE` holds the sum afterwards.
    """
    residual_TE.add_(hidden_TE)
    return rms_norm(residual_TE, weight_E, eps)
