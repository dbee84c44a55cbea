"""Which process listens on a port.

Two servers that are started at the same moment both find a port free, but only one gets it: the other one's probe would
be answered by the first.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from quire_cli import process

_LISTENS = "0A"
"""A state of TCP, as /proc/net/tcp writes it."""


def listens(session: int, port: int) -> bool:
    """Whether a process of a session listens on a TCP port.

    Args:
        session: id of the process that began the session.
        port: on any address.
    """
    wanted = set(_listening_sockets(port))
    return bool(wanted) and any(not wanted.isdisjoint(_sockets(pid)) for pid in _members(session))


def _listening_sockets(port: int) -> Iterator[str]:
    """Inodes of the sockets that listen there."""
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except FileNotFoundError:  # a kernel without IPv6
            continue
        for line in lines:
            words = line.split()
            if words[3] == _LISTENS and int(words[1].rpartition(":")[2], 16) == port:
                yield words[9]


def _members(session: int) -> Iterator[int]:
    """Processes of a session, its leader first, which usually is the one that listens."""
    yield session
    for pid in process.own_processes():
        with contextlib.suppress(ProcessLookupError):
            if pid != session and os.getsid(pid) == session:
                yield pid


def _sockets(pid: int) -> set[str]:
    """Inodes of a process's sockets; none if it has ended."""
    found: set[str] = set()
    with contextlib.suppress(FileNotFoundError, PermissionError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed since
                match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{name}"))
                found.update(match.groups() if match else ())
    return found
