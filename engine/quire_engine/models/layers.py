"""The building blocks that architectures share."""

import torch
from torch import nn

__all__ = ["Weight"]


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
