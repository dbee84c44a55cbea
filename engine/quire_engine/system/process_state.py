"""The state of a process, from /proc/PID/stat, and its priority."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

BACKGROUND_NICENESS = 5
"""A core that also computes steps gives such a thread a quarter of its time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessStat:
    """The content of /proc/PID/stat."""

    name: str
    """At most 15 characters of the program's name."""
    state: str
    """`R`, `S`, `D`, …; `Z` and `X` are dead."""
    parent: int
    start_time: int
    """In clock ticks since the machine started. Together with the id it identifies a process: ids are reused."""
    cpu_ticks: int
    """CPU time in clock ticks, user and system."""
    wait_status: int
    """Wait status of a dead process, as of `os.waitpid`."""

    @property
    def is_dead(self) -> bool:
        """True also for a zombie."""
        return self.state in "ZX"

    @property
    def is_stopped(self) -> bool:
        """True after SIGSTOP."""
        return self.state == "T"


def process_stat(pid: int, proc: Path = Path("/proc")) -> ProcessStat | None:
    """The state of a process, or None if this user can see none with that id.

    Args:
        pid: of the process.
        proc: the mount point of procfs.

    Raises:
        OSError: it cannot be read, for example because this process has no descriptor left.
    """
    try:
        text = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The name is in parentheses and may contain any character, parentheses too.
    name_end = text.rindex(")")
    rest = text[name_end + 2 :].split()
    return ProcessStat(
        name=text[text.index("(") + 1 : name_end],
        state=rest[0],
        parent=int(rest[1]),
        start_time=int(rest[19]),
        cpu_ticks=int(rest[11]) + int(rest[12]),
        wait_status=int(rest[49]),
    )


def started_at(pid: int) -> float | None:
    """When a process was started, in seconds since the epoch; None if this user cannot see it."""
    found = _stat_or_none(pid)
    if found is None:
        return None
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - found.start_time / os.sysconf("SC_CLK_TCK")
    # Whole seconds, as values are compared and two readings of the two clocks differ by a little.
    return float(round(time.time() - age_s))


def is_alive(pid: int, start_time: int) -> bool:
    """Whether the process with this id and start time has not ended."""
    now = process_stat(pid)
    return now is not None and not now.is_dead and now.start_time == start_time


def is_running(pid: int) -> bool:
    """Whether a process exists and is neither stopped nor dead. False if that cannot be read."""
    now = _stat_or_none(pid)
    return now is not None and not now.is_dead and not now.is_stopped


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by SIGSTOP, not by a debugger. False if that cannot be read."""
    now = _stat_or_none(pid)
    return now is not None and now.is_stopped


def lower_priority(niceness: int = BACKGROUND_NICENESS) -> None:
    """Let the calling thread, and those that it starts, give way to others on the same cores. A higher niceness stays:
    only root may lower it."""
    os.setpriority(os.PRIO_PROCESS, 0, max(niceness, os.getpriority(os.PRIO_PROCESS, 0)))


def how_it_ended(exit_code: int) -> str:
    """In words; a negative code is the signal that killed it."""
    return f"was killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with exit code {exit_code}"


def _stat_or_none(pid: int) -> ProcessStat | None:
    try:
        return process_stat(pid)
    except OSError:
        return None
