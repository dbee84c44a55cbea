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

__all__ = ["StuckUnloads", "end_stub"]

STUCK_S = 5.0
"""An instance of several waits while the one before it takes its metrics away and its process ends."""
_MAPPED = re.compile(r" (/dev/shm/quire-\S+)$", re.MULTILINE)


class StuckUnloads:
    """Finds them by their status pages.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._idle_since: dict[Stub, float] = {}

    def find(self, pages: Sequence[StubStatus], unloading: Collection[tuple[str, str]]) -> list[StubStatus]:
        """Those that have had nothing to do for `STUCK_S` since their model was unloaded, and do not end.

        Args:
            pages: of all stubs, in the order of their start.
            unloading: name and version of the models that tritonserver is unloading.
        """
        newest = {(page.model, page.version, page.instance): page for page in pages}
        # tritonserver ends the instances of a model one after the other: the next one is idle, and not forgotten.
        ending = {(page.model, page.version) for page in pages if page.state is StubState.ENDING}
        now, idle_since = self._clock(), {}
        for page in pages:
            is_left = newest[page.model, page.version, page.instance] is not page or (
                (page.model, page.version) in unloading
            )
            if is_left and not page.num_in_flight and (page.model, page.version) not in ending:
                stub = page.pid, page.start_time
                idle_since[stub] = self._idle_since.get(stub, now)
        self._idle_since = idle_since
        return [page for page in pages if now - idle_since.get((page.pid, page.start_time), now) > STUCK_S]


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
