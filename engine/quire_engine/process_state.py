"""What the kernel says of a process."""

import signal
from pathlib import Path

__all__ = ["how_it_ended", "is_running", "is_stopped"]


def how_it_ended(exit_code: int) -> str:
    """In words; negative: the signal that killed it."""
    return f"was killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with exit code {exit_code}"


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
