"""StuckUnloads: the processes of models that tritonserver has unloaded, and that nobody will end.

tritonserver 2.51 keeps a gRPC request for good whose client cancelled just as its stream ended. The model of such a
request is never let go of: after an unload it stays UNLOADING, after a reload its process stays beside the new one's,
with its engine and all their memory. Such a process gets no request any more and will never be told to end, so it is
ended from here; what tritonserver itself keeps is little.
"""

import contextlib
import re
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from quire_backend.status_page import StubState, StubStatus

from quire_cli import process
from quire_cli.server_process import Stub

__all__ = ["StuckUnloads", "end_stub", "left_behind"]

STUCK_S = 5.0
"""An instance of several waits while the one before it takes its metrics away and its process ends."""
_MAPPED = re.compile(r" (/dev/shm/quire-\S+)$", re.MULTILINE)


def left_behind(pages: Sequence[StubStatus], unloading: Collection[tuple[str, str]]) -> list[StubStatus]:
    """The stubs whose model has been unloaded, or loaded anew: they get no request any more.

    Args:
        pages: of all stubs, in the order of their start.
        unloading: name and version of the models that tritonserver is unloading.
    """
    versions: dict[tuple[str, str], list[StubStatus]] = {}
    for page in pages:
        versions.setdefault((page.model, page.version), []).append(page)
    left: list[StubStatus] = []
    for name, stubs in versions.items():
        replaced = [] if name in unloading else _replaced(stubs)
        left += [page for page in stubs if name in unloading or page.state is StubState.ENDING or page in replaced]
    return left


def _replaced(stubs: Sequence[StubStatus]) -> list[StubStatus]:
    """Those of one model's stubs that a later load has replaced: with all of its instances, or it may yet fail."""
    order = {(page.pid, page.start_time): number for number, page in enumerate(stubs)}
    alive = [page for page in stubs if process.is_alive(page.pid, page.start_time)]
    newest = {page.instance: order[page.pid, page.start_time] for page in alive}
    replaced = [page for page in stubs if order[page.pid, page.start_time] < newest.get(page.instance, 0)]
    successors = {newest[page.instance] for page in replaced}
    # An older instance that has no successor yet waits for one.
    is_whole = all(number in successors or number > min(successors, default=0) for number in newest.values())
    return replaced if is_whole else []


class StuckUnloads:
    """Finds those that have nothing to do and do not end, by their status pages.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._idle_since: dict[Stub, float] = {}
        self._ending: dict[Stub, tuple[str, str]] = {}

    def find(self, left: Sequence[StubStatus]) -> list[StubStatus]:
        """Those that have had nothing to do for `STUCK_S` since they were left behind.

        Args:
            left: all that are.
        """
        now, idle_since = self._clock(), {}
        # tritonserver ends the instances of a model one after the other, and waits for each one's process.
        self._ending |= {
            (page.pid, page.start_time): (page.model, page.version) for page in left if page.state is StubState.ENDING
        }
        self._ending = {stub: name for stub, name in self._ending.items() if process.is_alive(*stub)}
        ending = self._ending.values()
        for page in left:
            if not page.num_in_flight and (page.model, page.version) not in ending:
                stub = page.pid, page.start_time
                idle_since[stub] = self._idle_since.get(stub, now)
        self._idle_since = idle_since
        return [page for page in left if now - idle_since.get((page.pid, page.start_time), now) > STUCK_S]


def end_stub(page: StubStatus, folder: Path) -> None:
    """Kill a stub, its engine with it, and remove what it had: its page and its shared memory."""
    try:
        mapped = set(_MAPPED.findall(Path(f"/proc/{page.pid}/maps").read_text()))
    except OSError:
        mapped = set()  # it has ended meanwhile
    if process.kill(page.pid, lambda pid: process.is_alive(pid, page.start_time)):
        for path in mapped:
            with contextlib.suppress(OSError):
                Path(path).unlink()
    (folder / page.file_name).unlink(missing_ok=True)
