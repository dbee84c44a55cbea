"""The building blocks that architectures share."""

import math

import torch
from torch import nn

from quire_engine.models.checkpoint import RopeConfig

__all__ = ["Weight", "rope_cos_sin"]


class Weight(nn.Module):
    """A parameter that a `quire_kernels` op reads, such as the scale of a norm. Replicated on every rank.

    Args:
        shape: of the parameter.
        dtype: of the parameter, if it is not the default.
        offset: added to what the checkpoint holds.
    """

    def __init__(self, *shape: int, dtype: torch.dtype | None = None, offset: float = 0.0) -> None:
        super().__init__()
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


def rope_cos_sin(rope: RopeConfig, head_size: int, max_position: int) -> torch.Tensor:
    """The table that `quire_kernels.rope_and_cache` reads: [max_position, D] float32, cos of D/2 angles, then sin.

    Always computed on the CPU: a GPU's powers and quotients differ in their last bits, and positions of 100,000 and
    more multiply the difference.
    """
    with torch.device("cpu"):
        angles = torch.outer(torch.arange(max_position).float(), _inverse_frequencies(rope, head_size))
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    return cos_sin.to(torch.get_default_device())


def _inverse_frequencies(rope: RopeConfig, head_size: int) -> torch.Tensor:
    inv_freq = 1.0 / rope.rope_theta ** (torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size)
    if rope.rope_type == "linear":
        return inv_freq / rope.factor
    if rope.rope_type == "llama3":
        # Llama 3.1: wavelengths beyond the original context are stretched by `factor`, short ones stay the same, and
        # between the two bounds the factor is interpolated.
        wavelength = 2 * math.pi / inv_freq
        context = rope.original_max_position_embeddings
        smooth = (context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        smooth = smooth.clamp(0.0, 1.0)
        return (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq
    return inv_freq
