"""Memory of a process and all that it has started. Linux."""

import contextlib
from pathlib import Path

__all__ = ["peak_memory_bytes", "process_tree"]

PROC = Path("/proc")


def process_tree(pid: int) -> list[int]:
    """The process and all its descendants that live."""
    parents = {}
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):  # gone meanwhile
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    tree = [pid]
    for parent in tree:  # grows as it goes
        tree += [child for child, its_parent in parents.items() if its_parent == parent]
    return tree


def peak_memory_bytes(pid: int) -> int:
    """The most memory that a process tree has held, at most: the sum of what its processes did, each at its own peak.

    ::

        peak of a process  =  Pss now           its memory, with its share of the pages that several processes map
                           +  VmHWM - VmRSS     how much more it held at its peak

    The kernel keeps these numbers anyway: nothing has to be sampled while the clock runs. Processes that have ended are
    not counted.
    """
    total = 0
    for member in process_tree(pid):
        with contextlib.suppress(OSError, KeyError):  # gone meanwhile
            status = _kilobytes(PROC / str(member) / "status")
            total += _kilobytes(PROC / str(member) / "smaps_rollup")["Pss"] + status["VmHWM"] - status["VmRSS"]
    return total * 1024


def _kilobytes(path: Path) -> dict[str, int]:
    """The fields of a file of /proc that are in kB."""
    fields = (line.partition(":") for line in path.read_text().splitlines())
    return {name: int(value.split()[0]) for name, _, value in fields if value.endswith(" kB")}
