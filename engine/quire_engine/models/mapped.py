"""Tensors in mappings of their own, not on the heap: unwritten pages take no memory, and freeing returns it all."""

import contextlib
import math
import mmap

import torch


def mapped_zeros(shape: tuple[int, ...], dtype: torch.dtype, *, huge_pages: bool = False) -> torch.Tensor:
    """Zero pages from the system, not yet written: `torch.zeros` writes all of them, which takes the memory at once.

    Args:
        shape: of the tensor.
        dtype: of the tensor.
        huge_pages: use them if the system has them; for tensors with scattered reads.
    """
    size = math.prod(shape) * dtype.itemsize
    if not size or torch.get_default_device().type != "cpu":
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge_pages:
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
