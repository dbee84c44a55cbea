"""Tensors in mappings of their own, not on the heap: unwritten pages take no memory, and freeing returns it all.

What every step reads is in huge pages: small ones cost a third of a machine's memory bandwidth, as the processor looks
their addresses up in memory, too, and does not prefetch beyond their ends.
"""

import contextlib
import ctypes
import math
import mmap

import torch

ALIGNMENT = 64
"""Bytes of a cache line; torch's allocator aligns tensors so."""
HUGE_PAGE = 2 << 20
"""Bytes, on x86-64 and on ARM with pages of 4 KiB."""
REGION = 32 << 20
"""Bytes of the mappings that several small tensors share."""
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MAP_FAILED = 1, 2, ctypes.c_void_p(-1).value


def aligned(number: int, unit: int = ALIGNMENT) -> int:
    """The next multiple of a number of bytes."""
    return -(-number // unit) * unit


def mapped_zeros(shape: tuple[int, ...], dtype: torch.dtype, *, huge_pages: bool = False) -> torch.Tensor:
    """Zero pages from the system, not yet written: `torch.zeros` writes all of them, which takes the memory at once.
    Use huge pages for tensors that every step reads; they take effect if the system has them and the tensor fills
    one."""
    size = math.prod(shape) * dtype.itemsize
    if not size or torch.get_default_device().type != "cpu":
        return torch.empty(shape, dtype=dtype)
    huge_pages = huge_pages and size >= HUGE_PAGE
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
        """So many zero bytes at a multiple of `ALIGNMENT`."""
        if size > len(self._rest):
            length = aligned(max(size, REGION), HUGE_PAGE)
            self._rest = mapped_zeros((length,), torch.uint8, huge_pages=True)
        taken, self._rest = self._rest[:size], self._rest[aligned(size) :]
        return taken


def move_to_huge_pages(address: int, size: int) -> None:
    """Replace the pages of a private mapping by huge ones with the same contents, in place, while others read them.

    Each part is copied, and the copy takes the part's place in one system call: a thread that reads meanwhile sees the
    one or the other. They must not be written meanwhile. Ends that fill no huge page stay as they are.

    Raises:
        OSError: there is no memory.
    """
    libc = ctypes.CDLL(None, use_errno=True)  # its calls free the GIL
    libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
    first, end = aligned(address, HUGE_PAGE), (address + size) // HUGE_PAGE * HUGE_PAGE
    for place in range(first, end, REGION):
        length = min(REGION, end - place)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        spare = libc.mmap(None, ctypes.c_size_t(length + HUGE_PAGE), mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        if spare == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), "mmap")
        copy = aligned(spare, HUGE_PAGE)
        libc.madvise(ctypes.c_void_p(copy), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)
        libc.memcpy(ctypes.c_void_p(copy), ctypes.c_void_p(place), ctypes.c_size_t(length))
        moved = libc.mremap(
            ctypes.c_void_p(copy), ctypes.c_size_t(length), ctypes.c_size_t(length),
            _MREMAP_MAYMOVE | _MREMAP_FIXED, ctypes.c_void_p(place),
        )  # fmt: skip
        error, behind = ctypes.get_errno(), copy + length
        libc.munmap(ctypes.c_void_p(spare), ctypes.c_size_t(copy - spare))  # of nothing it is an error without effect
        libc.munmap(ctypes.c_void_p(behind), ctypes.c_size_t(spare + length + HUGE_PAGE - behind))
        if moved == _MAP_FAILED:
            libc.munmap(ctypes.c_void_p(copy), ctypes.c_size_t(length))
            raise OSError(error, "mremap")
