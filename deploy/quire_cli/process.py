"""Starts, finds and kills processes for `quire serve`.

Not psutil: the wait status of a child that is not its own, which /proc/PID/stat holds, is not part of it.
"""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from quire_engine.system.child_process import die_with_parent

_PR_SET_CHILD_SUBREAPER = 36
_BETWEEN_AUTOGROUPS_S = 0.15
"""The kernel takes one nice value of a session per 100 ms from all of its users together."""
_LISTENS = "0A"
"""A state of TCP in /proc/net/tcp."""
_libc = ctypes.CDLL(None, use_errno=True)


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    signal_when_orphaned: int,
    stdout: int = subprocess.DEVNULL,
    stderr: int | None = None,
    prepare: Callable[[], None] = lambda: None,
) -> "subprocess.Popen[bytes]":
    """Start a program in a session of its own: Ctrl-C reaches this process alone, which then stops the other.

    Args:
        command: what is run.
        environment: all of its variables.
        signal_when_orphaned: sent to it when the thread that calls this has ended.
        stdout: where its stdout goes.
        stderr: where its stderr goes; None: to this process's.
        prepare: called in the new process, before the program is run.
    """
    parent = os.getpid()

    def in_child() -> None:
        die_with_parent(parent, signal_when_orphaned)
        prepare()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # this process has blocked those that it waits for

    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True,
        preexec_fn=in_child,
    )  # fmt: skip


def own_processes() -> Iterator[int]:
    """Ids of all processes of this user."""
    user = os.geteuid()
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            try:
                if entry.stat().st_uid == user:
                    yield int(entry.name)
            except OSError:
                continue


def kill(pid: int, is_right: Callable[[int], bool]) -> bool:
    """SIGKILL one process, provided that `is_right` confirms it.

    The id is pinned by a pidfd before `is_right` looks, so that a new process that got the same id is never hit.

    Returns:
        True when the signal was sent.
    """
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not is_right(pid):
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies (instead of process 1)."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def lower_priority(niceness: int) -> None:
    """Call it in a new child that leads a session: lowers its priority, and that of its threads and children.

    Where the kernel groups processes by session (autogroup), each group has an equal share, and a nice value counts
    only among the processes of one group; the group has a nice value of its own.

    Args:
        niceness: with 10 it has a tenth of another process's share of the CPU, with 3 half; 0: no change.
    """
    if niceness <= os.getpriority(os.PRIO_PROCESS, 0):
        return
    os.setpriority(os.PRIO_PROCESS, 0, niceness)
    group = Path("/proc/self/autogroup")
    with contextlib.suppress(OSError):  # there are no such groups
        try:
            group.write_text(str(niceness))
        except BlockingIOError:  # EAGAIN: another one was set just before
            time.sleep(_BETWEEN_AUTOGROUPS_S)
            group.write_text(str(niceness))


def listens(session: int, port: int) -> bool:
    """Whether a process of a session listens on a TCP port, on any address.

    Two servers that start at the same moment both find a port free, but only one opens it: the other one's probe would
    be answered by the first.

    Args:
        session: id of the process that began the session.
        port: the port.
    """
    wanted = set(_listening_sockets(port))
    return bool(wanted) and any(not wanted.isdisjoint(_sockets(pid)) for pid in _session_members(session))


def _listening_sockets(port: int) -> Iterator[str]:
    """Inodes."""
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except FileNotFoundError:  # a kernel without IPv6
            continue
        for line in lines:
            words = line.split()
            if words[3] == _LISTENS and int(words[1].rpartition(":")[2], 16) == port:
                yield words[9]


def _session_members(session: int) -> Iterator[int]:
    """The leader first, which usually is the one that listens."""
    yield session
    for pid in own_processes():
        with contextlib.suppress(ProcessLookupError):
            if pid != session and os.getsid(pid) == session:
                yield pid


def _sockets(pid: int) -> set[str]:
    """Inodes; none if the process has ended."""
    found: set[str] = set()
    with contextlib.suppress(FileNotFoundError, PermissionError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed since
                match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{name}"))
                found.update(match.groups() if match else ())
    return found
