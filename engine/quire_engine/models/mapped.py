"""Tensors in mappings of their own, not on the heap: unwritten they take no memory, freed they leave none behind."""

import contextlib
import math
import mmap

import torch

__all__ = ["mapped_zeros"]


def mapped_zeros(shape: tuple[int, ...], dtype: torch.dtype, *, huge_pages: bool = False) -> torch.Tensor:
    """Zeros from the system, none of them written: `torch.zeros` writes them all, which makes every page real.

    Args:
        shape: of the tensor.
        dtype: of the tensor.
        huge_pages: where the system has them; for what is read all over at once.
    """
    size = math.prod(shape) * dtype.itemsize
    if not size or torch.get_default_device().type != "cpu":
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge_pages:
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
