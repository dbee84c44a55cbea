"""How much memory there is, and how much a function takes at its peak. Linux."""

import contextlib
import ctypes
import gc
import mmap
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = [
    "available_memory_bytes",
    "limit_memory_growth",
    "paused_gc",
    "peak_memory_growth",
    "release_pages",
    "resident_memory_bytes",
    "return_freed_memory",
    "total_memory_bytes",
    "trim_heap",
]


def available_memory_bytes() -> int:
    """Memory that can still be had without swapping: of the machine, or of the container where that is less."""
    available = _status_bytes(Path("/proc/meminfo"), "MemAvailable")
    with contextlib.suppress(OSError, ValueError, KeyError):  # no cgroup v2, or no limit ("max")
        cgroup = Path("/sys/fs/cgroup")
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        used -= int(statistics["inactive_file"])  # page cache, such as a checkpoint's, that is given up when needed
        available = min(available, limit - used)
    return max(available, 0)


def total_memory_bytes() -> int:
    """Memory of the machine, or what its container may use where that is less."""
    total = _status_bytes(Path("/proc/meminfo"), "MemTotal")
    with contextlib.suppress(OSError, ValueError):  # no cgroup v2, or no limit ("max")
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


def limit_memory_growth(num_bytes: int) -> None:
    """Let this process take so much more than it has, or what it was allowed at its start where that is less.

    One that runs into the limit leaves no core file either, for it is somebody's bad input and no bug.
    """
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used_bytes + num_bytes
    _, allowed = resource.getrlimit(resource.RLIMIT_AS)
    if allowed != resource.RLIM_INFINITY:
        limit = min(limit, allowed)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@contextlib.contextmanager
def paused_gc() -> Iterator[None]:
    """For large imports, which make no garbage: the collector would walk all that they bring, time and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def peak_memory_growth(function: Callable[[], None]) -> int:
    """Run a function; returns by how many bytes the process's resident memory rose at its peak."""
    status = Path("/proc/self/status")
    with contextlib.suppress(OSError):  # resets the peak; without the right to, the peak since the start has to do
        Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes(status, "VmRSS")
    function()
    peak = max(_status_bytes(status, "VmHWM"), 0) or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return max(peak - before, 0)


def resident_memory_bytes(pid: int | str = "self") -> int:
    """Memory that a process holds at the moment."""
    return _status_bytes(Path(f"/proc/{pid}/status"), "VmRSS")


def release_pages(address: int, size: int) -> None:
    """Let go of a range of memory that maps a file, whose pages count as this process's while they are mapped.

    Its contents are gone afterwards, unless they are in the file still.
    """
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE - begin
    if length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_DONTNEED)


def return_freed_memory() -> None:
    """Give what is free, or only garbage, back to the system."""
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if was_frozen:
        gc.freeze()
    trim_heap()


def trim_heap() -> None:
    """Give what has been freed back to the system, which the allocator else keeps for later. Takes milliseconds."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc: its allocator decides
        ctypes.CDLL(None).malloc_trim(0)


def _status_bytes(path: Path, field: str) -> int:
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return 0
