"""What the kernel says of a process."""

import contextlib
from pathlib import Path

__all__ = ["is_stopped"]


def is_stopped(pid: int) -> bool:
    """Whether a process is in state T (SIGSTOP), into which no process of an engine brings itself."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False
