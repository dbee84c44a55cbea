"""Tensors in mappings of their own, not on the heap: unwritten pages take no memory, and freeing returns it all.

What every step reads is in huge pages: small ones cost a third of a machine's memory bandwidth, as the processor looks
their addresses up in memory, too, and does not prefetch beyond their ends.
"""

import contextlib
import ctypes
import math
import mmap

import torch

HUGE_PAGE = 2 << 20
"""Bytes, on x86-64 and on ARM with pages of 4 KiB."""
REGION = 32 << 20
"""Bytes of the mappings that several small tensors share."""
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MAP_FAILED = 1, 2, ctypes.c_void_p(-1).value


def mapped_zeros(shape: tuple[int, ...], dtype: torch.dtype, *, huge_pages: bool = False) -> torch.Tensor:
    """Zero pages from the system, not yet written: `torch.zeros` writes all of them, which takes the memory at once.

    Args:
        shape: of the tensor.
        dtype: of the tensor.
        huge_pages: use them if the system has them; for tensors that every step reads.
    """
    size = math.prod(shape) * dtype.itemsize
    if not size or torch.get_default_device().type != "cpu":
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, size + huge_pages * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = 0
    if huge_pages:
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_PAGE
    return torch.frombuffer(memory, dtype=dtype, offset=start, count=math.prod(shape)).view(shape)


class HugePages:
    """Places for tensors, one after another in huge pages. A region is freed with the last tensor in it."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> torch.Tensor:
        """So many bytes, zero, at a multiple of 64."""
        if size > len(self._rest):
            length = -(-max(size, REGION) // HUGE_PAGE) * HUGE_PAGE
            self._rest = mapped_zeros((length,), torch.uint8, huge_pages=True)
        taken, self._rest = self._rest[:size], self._rest[-(-size // 64) * 64 :]
        return taken


def move_to_huge_pages(address: int, size: int) -> None:
    """Replace the pages of a private mapping by huge ones with the same contents, in place, while others read them.

    Each part is copied, and the copy takes the part's place in one system call: a thread that reads meanwhile sees the
    one or the other. Nobody may write. Ends that fill no huge page stay as they are.

    Raises:
        OSError: there is no memory.
    """
    libc = ctypes.CDLL(None, use_errno=True)  # its calls free the GIL
    libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
    first, end = -(-address // HUGE_PAGE) * HUGE_PAGE, (address + size) // HUGE_PAGE * HUGE_PAGE
    for place in range(first, end, REGION):
        length = min(REGION, end - place)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        spare = libc.mmap(None, ctypes.c_size_t(length + HUGE_PAGE), mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        if spare == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), "mmap")
        copy = -(-spare // HUGE_PAGE) * HUGE_PAGE
        libc.madvise(ctypes.c_void_p(copy), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)
        libc.memcpy(ctypes.c_void_p(copy), ctypes.c_void_p(place), ctypes.c_size_t(length))
        moved = libc.mremap(
            ctypes.c_void_p(copy), ctypes.c_size_t(length), ctypes.c_size_t(length),
            _MREMAP_MAYMOVE | _MREMAP_FIXED, ctypes.c_void_p(place),
        )  # fmt: skip
        error = ctypes.get_errno()
        kept = range(copy, copy + length) if moved == _MAP_FAILED else range(0)
        for begin, stop in ((spare, copy), (kept.start, kept.stop), (copy + length, spare + length + HUGE_PAGE)):
            if stop > begin:
                libc.munmap(ctypes.c_void_p(begin), ctypes.c_size_t(stop - begin))
        if kept:
            raise OSError(error, "mremap")
