"""Tests beside each other: when they may start `quire serve`, and when they may kill it.

One that starts sweeps: it removes what all dead runs of the user have left. So a test that kills one is alone with
it until all of it is gone, and a test that starts one finds nothing of another's::

    sweeping()     shared: any number of tests start a server at a time
    no_sweeps()    exclusive: none but this process, until the block is left

Both are locks of files, which the system takes back from a process that ends. An exclusive one holds the gate while it
waits, so that shared ones that keep coming do not keep it waiting.
"""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

__all__ = ["no_sweeps", "sweeping"]

_FOLDER = Path(tempfile.gettempdir())
_is_alone = False


@contextmanager
def sweeping() -> Iterator[None]:
    """No other process of tests has a dead run meanwhile."""
    if _is_alone:
        yield
        return
    with ExitStack() as held:
        with _locked("gate", fcntl.LOCK_EX):
            held.enter_context(_locked("sweeps", fcntl.LOCK_SH))
        yield


@contextmanager
def no_sweeps() -> Iterator[None]:
    """No other process of tests sweeps meanwhile."""
    global _is_alone
    if _is_alone:
        yield
        return
    with _locked("gate", fcntl.LOCK_EX), _locked("sweeps", fcntl.LOCK_EX):
        _is_alone = True
        try:
            yield
        finally:
            _is_alone = False


@contextmanager
def _locked(name: str, how: int) -> Iterator[None]:
    file = os.open(_FOLDER / f"quire-tests-{os.geteuid()}-{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, how)
        yield
    finally:
        os.close(file)
