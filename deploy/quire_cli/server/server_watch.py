"""ServerWatch: the true state of a server that serves, and whether it has to be replaced.

tritonserver calls itself ready while a model's process hangs or its engine is down. So its own state and that of its
models' processes is read in /proc, each model's process shows on its status page that it moves, and a thread probes
over HTTP whether the server's own event loop turns.

A silence counts only as far as this process itself was on time: on a machine so busy that nothing runs, nothing
is taken to hang.
"""

import contextlib
import http.client
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quire_backend.status_page import StubState, StubStatus, read_status_pages
from quire_engine.system import process_state

from quire_cli import process
from quire_cli.ports import Endpoint
from quire_cli.server.loaded_models import IndexedModel, LoadedModels, ask_index
from quire_cli.server.server_process import ServerProcess, Stub

if TYPE_CHECKING:
    from quire_cli.server.workarounds.triton_2_51 import StuckUnloads

LOOK_S = 0.2
NOTICE_S = 1.5
"""A silence is reported after so long."""
_PROBE_INTERVAL_S = 0.5
_PROBE_TIMEOUT_S = 1.0
"""A call that loads a model holds up the connections that share its thread; another connection has another thread."""
_LOADS_S = 60.0
"""Where models are loaded over HTTP, several such calls can hold up all threads for as long as a load takes."""
_INDEX_S = 3.0
"""How long a stub's death waits for a repository index that is younger."""
_MAPPED = re.compile(r" (/dev/shm/quire-\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Problem:
    """A reason why requests are not served."""

    text: str
    is_fatal: bool = False
    """Whether only a new server helps."""
    is_news: bool = True
    """Whether it has to be logged here, as no other process logs it."""


class Patience:
    """Measures for how long something has not moved, by name.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[object, tuple[float, object, float]] = {}
        """By name: when it was looked at, its sign, its silence."""

    def silence_s(self, name: object, sign: object) -> float:
        """For how long nothing has moved; call it every `LOOK_S`.

        Args:
            name: of what is watched.
            sign: something that changes as long as it moves; None: it does not move.
        """
        now = self._clock()
        looked_at, last_sign, silence_s = self._last.get(name, (now, None, 0.0))
        moved = sign is not None and sign != last_sign
        silence_s = 0.0 if moved else silence_s + min(now - looked_at, 2 * LOOK_S)
        self._last[name] = now, sign, silence_s
        return silence_s


class LiveProbe:
    """Asks a server over HTTP whether it is live, and if need be for its models, in a thread of its own.

    It keeps one connection for as long as it lasts: a server that has no descriptor left for another may still serve
    its clients.
    """

    def __init__(self, endpoint: Endpoint, *, asks_for_models: bool) -> None:
        self._endpoint = endpoint
        self._asks_for_models = asks_for_models
        self._stopping = threading.Event()
        self.num_answers = 0
        self.says_live = True
        self.index: list[IndexedModel] | None = None
        """Its last repository index."""
        self.is_fresh = False
        """Whether it answers."""
        self.asked_at = 0.0
        """When, in seconds since the machine started."""
        self.num_indexes = 0
        threading.Thread(target=self._run, name="live-probe", daemon=True).start()

    def close(self) -> None:
        """Stop. The thread ends by itself, at the latest with the answer that it waits for."""
        self._stopping.set()

    def _run(self) -> None:
        host, port = self._endpoint.client_host, self._endpoint.port
        connection = http.client.HTTPConnection(host, port, timeout=_PROBE_TIMEOUT_S)
        while not self._stopping.wait(_PROBE_INTERVAL_S):
            self._ask(connection)
        connection.close()

    def _ask(self, connection: http.client.HTTPConnection) -> None:
        try:
            connection.request("GET", "/v2/health/live")
            answer = connection.getresponse()
            answer.read()
            self.says_live = answer.status == http.client.OK
            self.num_answers += 1
            if self._asks_for_models:
                asked_at = time.clock_gettime(time.CLOCK_BOOTTIME)
                self.index, self.asked_at = ask_index(connection), asked_at
                self.num_indexes += 1
            self.is_fresh = True
        except (OSError, http.client.HTTPException):
            self.is_fresh = False
            connection.close()  # the next question opens it again


def without_past_unloads(
    index: Sequence[IndexedModel], pages: Sequence[StubStatus], asked_at: float
) -> list[IndexedModel]:
    """The index without the unloads that are over: a stub of that model was started since the index was read.

    Args:
        index: the server's.
        pages: of all stubs.
        asked_at: when the index was requested, in seconds since the machine started.
    """
    asked_at_ticks = asked_at * os.sysconf("SC_CLK_TCK")
    loaded_since = {(page.model, page.version) for page in pages if page.start_time > asked_at_ticks}
    return [one for one in index if one.state != "UNLOADING" or (one.name, one.version) not in loaded_since]


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


class ServerWatch:
    """Watches one server that is ready.

    Args:
        server: the server.
        endpoint: its HTTP endpoint.
        folder: where the processes of its models have their status pages.
        tell: logs a line about what was done.
        hung_s: a silence of so long is a hang.
        models: keeps track of the loaded models; None where they neither come nor go, so that the end of any stub is a
            death.
        stuck_unloads: finds the stubs that the server does not end; None: it ends them all.
    """

    def __init__(
        self, server: ServerProcess, endpoint: Endpoint, folder: Path, tell: Callable[[str], None], *,
        hung_s: float, models: LoadedModels | None, stuck_unloads: "StuckUnloads | None",
    ) -> None:  # fmt: skip
        self._server = server
        self._folder = folder
        self._tell = tell
        self._hung_s = hung_s
        self._models = models
        self._stubs: set[Stub] = server.stubs() if models is None else set()
        self._patience = Patience()
        self._stuck_unloads = stuck_unloads
        self._died_at_index: dict[Stub, int] = {}
        self._probe = LiveProbe(endpoint, asks_for_models=models is not None)
        self.pages: list[StubStatus] = []
        """The status pages at the last look."""
        self.given_up: set[str] = set()
        """Models whose process was ended from here, though the server still has them."""

    def close(self) -> None:
        """Stop watching."""
        self._probe.close()

    def look(self) -> list[Problem]:
        """All problems of this moment; call it every `LOOK_S`."""
        try:
            return self._look()
        except OSError as error:
            # No descriptor or no memory is left here: nothing is known, and in particular no death.
            return [Problem(f"quire serve cannot see how its server is: {error.strerror}")]

    def note_what_was_loaded(self) -> None:
        """The server has just died: note what it had loaded since the last look, from the pages that are left."""
        if self._models is not None:
            pages = read_status_pages(self._folder)
            self._models.wanted.update(page.model for page in pages if not page.is_leaving)

    def _look(self) -> list[Problem]:
        self.pages = read_status_pages(self._folder)
        problems = self._look_at_server()
        left: set[Stub] = set()
        if self._models is not None:
            index = self._probe.index
            if index is not None:
                index = without_past_unloads(index, self.pages, self._probe.asked_at)
            # A server that is held up may have loaded anew what it was unloading when it last answered.
            left = self._look_at_unloads(index if index is not None and self._probe.is_fresh else [])
            self._models.update(self.pages, index)
            problems += [Problem(text) for text in self._models.problems]
        named = {page.stub: page for page in self.pages}
        for stub in sorted(self._stubs | named.keys()):
            problems += self._look_at_stub(stub, named.get(stub), is_left=stub in left)
        return problems

    def _look_at_unloads(self, index: Sequence[IndexedModel]) -> set[Stub]:
        """End what does not end by itself; returns the stubs whose model has been unloaded, or loaded anew."""
        unloading = {(model.name, model.version) for model in index if model.state == "UNLOADING"}
        if self._stuck_unloads is None:
            return {page.stub for page in self.pages if page.is_leaving or (page.model, page.version) in unloading}
        left, stuck = self._stuck_unloads.look(self.pages, unloading)
        for page in stuck:
            self._end(
                page,
                f"model {page.model!r} version {page.version} was unloaded, and tritonserver does not end its stub "
                f"process {page.pid}, which has nothing to do: it is ended",
            )
        return {page.stub for page in left}

    def _end(self, page: StubStatus, why: str) -> None:
        end_stub(page, self._folder)
        self.pages.remove(page)
        self.given_up.add(page.model)
        self._tell(why)

    def _look_at_server(self) -> list[Problem]:
        stopped = process_state.is_stopped(self._server.pid)
        silence_s = self._patience.silence_s("server", None if stopped else self._probe.num_answers)
        if stopped:
            return [self._silent("tritonserver has been stopped (SIGSTOP)", silence_s)]
        if silence_s > (self._hung_s if self._models is None else max(self._hung_s, _LOADS_S)):
            return [Problem(f"tritonserver has not answered /v2/health/live for {silence_s:.0f} s", is_fatal=True)]
        if silence_s > NOTICE_S:
            return [Problem("tritonserver does not answer /v2/health/live")]
        return [] if self._probe.says_live else [Problem("tritonserver says that it is not live")]

    def _look_at_stub(self, stub: Stub, page: StubStatus | None, *, is_left: bool) -> list[Problem]:
        pid, start_time = stub
        name = f"the stub process {pid} of " + (f"model {page.model!r}" if page else "a model")
        if not process_state.is_alive(pid, start_time):
            # tritonserver (2.51) would go on, call itself ready, and reject every request of this model.
            return self._look_at_dead(stub, page, f"{name} died", is_left=is_left)
        stopped = process_state.is_stopped(pid)
        silence_s = 0.0
        if stopped or page is not None:
            silence_s = self._patience.silence_s(stub, None if stopped or page is None else page.beats)
        if page is not None:
            # The number of a response stays the same while the server does not take it.
            silence_s = max(silence_s, self._patience.silence_s((stub, "sending"), page.sending or object()))
        if stopped or silence_s > NOTICE_S:
            text = f"{name} has been stopped (SIGSTOP)" if stopped else f"{name} does not move"
            if page is not None and is_left and not page.num_in_flight and silence_s > self._hung_s:
                self._end(page, f"{text} for {silence_s:.0f} s, and its model was unloaded: it is ended")
                return []
            return [self._silent(text, silence_s)]
        if page is None or page.state is StubState.UP or is_left:
            return []
        return [Problem(page.problem, page.state is StubState.DEAD, is_news=False)]

    def _look_at_dead(self, stub: Stub, page: StubStatus | None, text: str, *, is_left: bool) -> list[Problem]:
        if page is None or self._models is None:
            return [Problem(text, is_fatal=True)]
        if is_left:
            text = f"{text} while its model was being unloaded"
            if page.num_in_flight:  # the server will never end them: their clients would wait for ever
                return [Problem(text, is_fatal=True)]
            self._end(page, text)
            return []
        # The last index may be older than an unload; the next one is not.
        since = self._died_at_index.setdefault(stub, self._probe.num_indexes)
        if self._probe.num_indexes < since + 2 and self._patience.silence_s((stub, "dead"), None) < _INDEX_S:
            return [Problem(text, is_news=False)]
        index = self._probe.index
        loaded = {(model.name, model.version) for model in index or () if model.state == "READY"}
        if index is not None and (page.model, page.version) not in loaded:
            self._end(page, f"{text} before its model was loaded")
            return []
        return [Problem(text, is_fatal=True)]

    def _silent(self, text: str, silence_s: float) -> Problem:
        if silence_s > self._hung_s:
            return Problem(f"{text} for {silence_s:.0f} s", is_fatal=True)
        return Problem(text)
