"""Soft cap of logits (Bello et al. 2016, https://arxiv.org/abs/1611.09940, section 3; as in Gemma 2)."""

import torch

from quire_kernels.cpu import launch, library_for, structure

_SoftCapCall = structure("SoftCapCall")


def soft_cap(logits_SV: torch.Tensor, cap: float) -> torch.Tensor:
    """`cap * tanh(logits / cap)`, in place.

    Args:
        logits_SV: float32; rows may be strided.
        cap: above 0.

    Returns:
        `logits_SV`.

    Raises:
        TypeError: the logits are of another dtype.
        ValueError: they have another number of dimensions, or gaps between the elements of a row.
    """
    if logits_SV.dtype != torch.float32:
        raise TypeError(f"logits_SV is {logits_SV.dtype}; it must be {torch.float32}")
    if logits_SV.dim() != 2 or logits_SV.stride(1) != 1:
        raise ValueError(
            f"logits_SV has shape {list(logits_SV.shape)} and strides {list(logits_SV.stride())}; it must have two "
            "dimensions, and no gaps between the elements of a row"
        )
    handle = library_for(logits_SV)
    if handle is None:  # on a GPU too: three kernels of torch, once in a step
        return logits_SV.div_(cap).tanh_().mul_(cap)
    rows, size = logits_SV.shape
    launch(handle.quire_soft_cap, _SoftCapCall(logits_SV.data_ptr(), logits_SV.stride(0), rows, size, cap))
    return logits_SV
