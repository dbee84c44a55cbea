"""What tritonserver 2.51 needs besides, the release of the development wheel.

- It never releases a gRPC request whose client cancelled just as its stream ended, nor the model of such a request.
  After an unload that model stays UNLOADING; after a reload its process stays beside the new one's, with its engine and
  all their memory: `StuckUnloads`. (Mended in 25.04, 2.57.)
- At its end it waits for its whole timeout for such a request, and for those of a stub that died: `DrainWatch`.
- It puts a request's body on the stack of the thread that reads it, and parses JSON recursively: on the usual 8 MiB,
  4.2 MB of body end it with SIGSEGV. `Triton251.prepare` raises the limit. (`alloca` is gone since 25.10, 2.62; the
  parser is iterative since 26.05, 2.69.)

`quire_client` has the clients' part: what they do not cancel is not leaked.
"""

import contextlib
import http.client
import resource
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from quire_backend.status_page import StubState, StubStatus, ask_to_end, read_status_pages
from quire_engine.system import process_state

from quire_cli.ports import Endpoint
from quire_cli.server.loaded_models import ask_index
from quire_cli.server.server_process import ServerProcess, Stub

# Threads take the size of their stack from this limit, and memory only as they use it.
_STACK_BYTES = 256 * 2**20

# A server without requests in flight tells its models to end within a second. They may still send something.
_DRAINED_S = 1.5
# Once all stubs have ended, nothing is left to do.
_ALL_ENDED_S = 0.3
_INDEX_TIMEOUT_S = 1.0
_LOADED = ("READY", "LOADING", "UNLOADING")

IDLE_S = 0.8
"""By then all requests have arrived that were on their way to a stub whose model is being unloaded."""
REPLACED_S = 5.0
"""Until its successor has been warmed up, the server may still send requests to the one that it replaces."""
GRACE_S = 4.0
"""tritonserver asks a stub for its health for a second before it ends it, one instance after the other."""


class Triton251:
    """The workarounds for one run's servers.

    Args:
        folder: where the processes of the models have their status pages.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def prepare(self) -> None:
        """Call it in a new child, before it becomes the server."""
        soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
        wanted = _STACK_BYTES if hard == resource.RLIM_INFINITY else min(_STACK_BYTES, hard)
        # Not more with an unlimited stack: threads then get the platform's default of 2 MiB.
        if soft == resource.RLIM_INFINITY or soft < wanted:
            resource.setrlimit(resource.RLIMIT_STACK, (wanted, hard))

    def watch_unloads(self) -> "StuckUnloads":
        """For each server that loads and unloads models."""
        return StuckUnloads(partial(ask_to_end, self._folder))

    def watch_drain(self, server: ServerProcess, endpoint: Endpoint, given_up: Collection[str]) -> "DrainWatch":
        """For the drain, before the server's signal; the arguments are those of `DrainWatch`."""
        return DrainWatch(server, endpoint, self._folder, given_up)


class DrainWatch:
    """Detects that a server that drains has nothing left to do, by the status pages of its models' processes.

    Args:
        server: the server.
        endpoint: its HTTP endpoint.
        folder: where the processes of its models have their status pages.
        given_up: names of models whose process `quire serve` has ended.
    """

    def __init__(self, server: ServerProcess, endpoint: Endpoint, folder: Path, given_up: Collection[str] = ()) -> None:
        self._folder = folder
        self._given_up = given_up
        self._idle_since: float | None = None
        self._knows_all_models, self._unseen = False, set[Stub]()
        with contextlib.suppress(OSError):  # no descriptor is left: nothing is known, so wait for its end
            self._look_at_all(server, endpoint)

    def _look_at_all(self, server: ServerProcess, endpoint: Endpoint) -> None:
        """Check whether there are models without status pages."""
        pages = read_status_pages(self._folder)
        # A model of another backend may have requests that are not known here.
        models = _loaded_models(endpoint)
        self._knows_all_models = models is not None and models <= {page.model for page in pages} | set(self._given_up)
        self._unseen = server.stubs() - {page.stub for page in pages}
        """Stubs of another backend, and ours that are about to end: a page goes before its stub does."""

    def is_over(self) -> bool:
        """Whether no request was in flight for long enough, and no model was ending; call it often."""
        try:
            return self._is_over()
        except OSError:  # as above
            self._idle_since = None
            return False

    def _is_over(self) -> bool:
        pages = read_status_pages(self._folder)
        living = [page for page in pages if _lives(page)]
        is_busy = any(page.num_in_flight or page.state is StubState.ENDING for page in living)
        # Without pages all stubs have ended normally, and the server is about to.
        is_ending = not pages and not self._given_up
        sees_all = self._knows_all_models and not any(process_state.is_alive(*stub) for stub in self._unseen)
        if is_busy or is_ending or not sees_all:
            self._idle_since = None
            return False
        if self._idle_since is None:
            self._idle_since = time.monotonic()
        return time.monotonic() - self._idle_since > (_DRAINED_S if living else _ALL_ENDED_S)

    def cut_off(self) -> str | None:
        """The stub that died with requests in flight, if one did; a stub that ends normally removes its page."""
        for page in read_status_pages(self._folder):
            if page.num_in_flight and not _lives(page):
                return f"the stub process {page.pid} of model {page.model!r} died"
        return None


def _lives(page: StubStatus) -> bool:
    return process_state.is_alive(*page.stub)


def _loaded_models(endpoint: Endpoint) -> set[str] | None:
    """Names of the models that the server has; None if it does not answer."""
    connection = http.client.HTTPConnection(endpoint.client_host, endpoint.port, timeout=_INDEX_TIMEOUT_S)
    try:
        models = ask_index(connection)
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return None if models is None else {model.name for model in models if model.state in _LOADED}


def left_behind(pages: Sequence[StubStatus], unloading: Collection[tuple[str, str]]) -> list[StubStatus]:
    """The stubs whose model was unloaded or loaded anew: no more requests come to them.

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
    """Finds stubs of unloaded models that are idle and do not end, by their status pages.

    No more requests come to such a process, and the server never ends it. First `quire serve` asks it to end its
    engine: only the process can remove its metrics from the server, which would otherwise show for ever that the engine
    is up. ::

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

    def look(
        self, pages: Sequence[StubStatus], unloading: Collection[tuple[str, str]]
    ) -> tuple[list[StubStatus], list[StubStatus]]:
        """The stubs that are left behind, and those of them to kill; the arguments are those of `left_behind`."""
        left = left_behind(pages, unloading)
        return left, self.find(left, unloading)

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
