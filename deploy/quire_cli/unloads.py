"""StuckUnloads: processes of models that tritonserver has unloaded and will never end.

tritonserver 2.51 never releases a gRPC request whose client cancelled just as its stream ended, nor the model of such a
request: after an unload it stays UNLOADING, after a reload its process stays beside the new one's, with its engine and
all their memory. Such a process gets no more requests and is never told to end, so it is ended from here; tritonserver
itself keeps little. First it is asked to end its engine: only the process can remove its metrics from the server, which
would otherwise show for ever that the engine is up.
"""

import contextlib
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from quire_backend.status_page import StubState, StubStatus
from quire_engine.system import process_state

from quire_cli import process
from quire_cli.server_process import Stub

IDLE_S = 0.8
"""By then all requests have arrived that were on their way to a stub whose model is being unloaded."""
REPLACED_S = 5.0
"""Until its successor has been warmed up, the server may still send requests to the one that it replaces."""
GRACE_S = 4.0
"""tritonserver asks a stub for its health for a second before it ends it, one instance after the other."""
_MAPPED = re.compile(r" (/dev/shm/quire-\S+)$", re.MULTILINE)


def left_behind(pages: Sequence[StubStatus], unloading: Collection[tuple[str, str]]) -> list[StubStatus]:
    """The stubs whose model was unloaded or loaded anew: they get no more requests.

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
        left += [page for page in stubs if name in unloading or page.is_leaving or page in replaced]
    return left


def _replaced(stubs: Sequence[StubStatus]) -> list[StubStatus]:
    """Those of one model's stubs that a later load has replaced: with all of its instances, or it may yet fail.

    ::

        m_0_0 of 1 │ m_0_1 of 2  m_0_0 of 2      a load starts its instances at once, so in any order
        m_0_0 of 2  m_0_1 of 2 │ m_0_1 of 2      one more, in place of one that died: not a whole load

    A load begins with a stub that the one before it has no room for: that has all of its own, or one of that name, or
    was to have another number.
    """
    alive = [page for page in stubs if process_state.is_alive(*page.stub)]
    first = 0
    names: set[str] = set()
    for number, page in enumerate(alive):
        size = alive[first].num_instances
        if page.num_instances != size or len(names) == size or page.instance in names:
            first, names = number, set()
        names.add(page.instance)
    is_whole = first and len(names) == alive[first].num_instances
    return [page for page in stubs if page.start_time < alive[first].start_time] if is_whole else []


class StuckUnloads:
    """Finds those that are idle and do not end, by their status pages.

    ::

        nothing in flight ── IDLE_S or REPLACED_S ── asked to end: no engine, no metrics ── GRACE_S ── to be killed
                 ▲                                                                            │
                 └── begins anew with each request, and while the server ends another one of the model

    Args:
        ask: asks a stub to end its engine and remove its metrics.
        clock: seconds, monotonic.
    """

    def __init__(self, ask: Callable[[StubStatus], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._clock = clock
        self._idle_since: dict[Stub, tuple[int, float]] = {}
        """With how many of the model's stubs were left then."""
        self._ending: dict[Stub, tuple[str, str]] = {}

    def find(self, left: Sequence[StubStatus], unloading: Collection[tuple[str, str]]) -> list[StubStatus]:
        """Ask those to end that have been idle since they were left; returns the ones to kill.

        Args:
            left: all stubs that are left.
            unloading: name and version of the models that tritonserver is unloading.
        """
        now, idle_since, stuck = self._clock(), {}, []
        # tritonserver ends the instances of a model one after the other, and waits for each one's process.
        self._ending |= {page.stub: (page.model, page.version) for page in left if page.state is StubState.ENDING}
        self._ending = {stub: name for stub, name in self._ending.items() if process_state.is_alive(*stub)}
        num_left = Counter((page.model, page.version) for page in left)
        for page in left:
            name = page.model, page.version
            if page.num_in_flight or name in self._ending.values():
                continue
            num, since = self._idle_since.get(page.stub, (num_left[name], now))
            idle_since[page.stub] = num_left[name], since if num == num_left[name] else now
            idle_s = now - idle_since[page.stub][1]
            wait_s = IDLE_S if name in unloading else REPLACED_S
            if idle_s > wait_s + GRACE_S:
                stuck.append(page)
            elif idle_s > wait_s and page.state is not StubState.RETIRED:
                self._ask(page)
        self._idle_since = idle_since
        return stuck


def end_stub(page: StubStatus, folder: Path) -> None:
    """Kill a stub with its engine, and remove its page and its shared memory."""
    try:
        mapped = set(_MAPPED.findall(Path(f"/proc/{page.pid}/maps").read_text()))
    except OSError:
        mapped = set()  # it has ended meanwhile
    if process.kill(page.pid, lambda pid: process_state.is_alive(pid, page.start_time)):
        for path in mapped:
            with contextlib.suppress(OSError):
                Path(path).unlink()
    (folder / page.file_name).unlink(missing_ok=True)
