"""Memory of the machine and of processes: measured, limited and released. Linux."""

import atexit
import contextlib
import ctypes
import functools
import gc
import mmap
import re
import resource
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

_libc = ctypes.CDLL(None)
_CODE_OF_FILES = re.compile(
    rb"^(\w+)-(\w+) r-xp \w+ \S+ [1-9].*\n"  # address, permissions, offset, device, inode, path
    rb"(?:[A-Z].*\n)*?Anonymous: +0 kB$",
    re.MULTILINE,
)
"""In /proc/PID/smaps, mappings of unchanged code."""


def available_memory_bytes() -> int:
    """Memory available without swapping: the machine's, or the container's where that is less."""
    available = _status_bytes(Path("/proc/meminfo"), "MemAvailable")
    with contextlib.suppress(OSError, ValueError, KeyError):  # no cgroup v2, or no limit ("max")
        cgroup = Path("/sys/fs/cgroup")
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        # Page cache, such as a checkpoint's, is freed when memory is needed.
        used -= int(statistics["inactive_file"])
        available = min(available, limit - used)
    return max(available, 0)


def total_memory_bytes() -> int:
    """Memory of the machine, or the container's limit where that is less."""
    total = _status_bytes(Path("/proc/meminfo"), "MemTotal")
    with contextlib.suppress(OSError, ValueError):  # no cgroup v2, or no limit ("max")
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


def limit_memory_growth(num_bytes: int) -> None:
    """Limit this process to so many bytes more than it has now, or to the limit that it started with if that is lower.

    It leaves no core file when it reaches the limit, which is caused by a bad input, not by a bug.
    """
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used_bytes + num_bytes
    _, allowed = resource.getrlimit(resource.RLIMIT_AS)
    if allowed != resource.RLIM_INFINITY:
        limit = min(limit, allowed)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


_pauses_lock = threading.Lock()
_pauses: list[bool] = []
"""For each block in `paused_gc`: whether the collector ran when it began."""


@contextlib.contextmanager
def paused_gc() -> Iterator[None]:
    """Pause the garbage collector during a start, whose objects it would walk again and again. With several threads it
    runs again when the last block ends."""
    with _pauses_lock:
        _pauses.append(gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _pauses_lock:
            if len(_pauses) == 1 and _pauses[0]:
                gc.enable()
            _pauses.pop()


def freeze_imported() -> None:
    """Exempt what is alive now from collections: a full one would walk all that was imported, 0.1 s without a token."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # else Triton, if something has imported it, reports its objects as leaked


def peak_memory_growth(function: Callable[[], None]) -> int:
    """Run a function; returns by how many bytes the process's resident memory rose at its peak, without files' pages:
    weights that are mapped from a file become resident when they are read."""
    status = Path("/proc/self/status")
    with contextlib.suppress(OSError):  # resets the peak; without permission, the peak since the start is used
        Path("/proc/self/clear_refs").write_text("5")
    before, before_of_files = _status_bytes(status, "VmRSS"), _status_bytes(status, "RssFile")
    function()
    peak = max(_status_bytes(status, "VmHWM"), 0) or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return max(peak - before - max(_status_bytes(status, "RssFile") - before_of_files, 0), 0)


def resident_memory_bytes(pid: int | str = "self") -> int:
    """Resident memory of a process."""
    return _status_bytes(Path(f"/proc/{pid}/status"), "VmRSS")


def own_memory_bytes(pid: int) -> int:
    """Resident memory of a process without pages of files, which processes share."""
    status = Path(f"/proc/{pid}/status")
    return resident_memory_bytes(pid) - _status_bytes(status, "RssFile")


def release_pages(address: int, size: int) -> None:
    """Release the pages of a range that maps a file. Its content is read from the file again when it is needed."""
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE - begin
    if length > 0:
        _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_DONTNEED)


@functools.cache
def release_code_pages() -> None:
    """Release the pages of the program and its libraries, most of which only the start needs: about 80 MB with torch.
    Pages that are needed again come back from the page cache. Mappings with changed pages are left alone.

    A process does so once: the start of its next engine, or waking up, needs less of them than it would take to read.
    """
    with contextlib.suppress(OSError):  # the kernel has no smaps
        for mapping in _CODE_OF_FILES.finditer(Path("/proc/self/smaps").read_bytes()):
            begin, end = (int(address, 16) for address in mapping.groups())
            release_pages(begin, end - begin)


def mapped_ranges(paths: Iterable[Path]) -> list[range]:
    """The addresses at which this process maps some files."""
    names = {str(path.resolve()) for path in paths}
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, *_, name = line.split(maxsplit=5)
        if name in names:
            begin, end = (int(address, 16) for address in addresses.split("-"))
            ranges.append(range(begin, end))
    return ranges


def return_freed_memory() -> None:
    """Collect garbage, and return free memory to the system."""
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if was_frozen:
        gc.freeze()
    trim_heap()


def trim_heap() -> None:
    """Return freed memory, which the allocator would keep, to the system. Takes milliseconds."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        _libc.malloc_trim(0)


def _status_bytes(path: Path, field: str) -> int:
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return 0
