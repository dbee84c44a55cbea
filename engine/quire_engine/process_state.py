"""What the kernel says of a process."""

from pathlib import Path

__all__ = ["is_running", "is_stopped"]


def is_running(pid: int) -> bool:
    """Whether a process is there, and neither stopped nor dead."""
    return _state(pid) not in ("", "T", "Z", "X")


def is_stopped(pid: int) -> bool:
    """Whether a process is in state T (SIGSTOP), into which no process of an engine brings itself."""
    return _state(pid) == "T"


def _state(pid: int) -> str:
    """The kernel's letter for the state of a process; empty when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
