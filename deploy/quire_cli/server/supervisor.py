"""Service: runs tritonserver from start to end: starts it again when it or a stub dies or hangs, drains, cleans up.

    start ── wait until ready ── serve ── drain ── end
      ▲            │ died          │ died, hangs
      └─ clean up ─┴───────────────┘        the first start must succeed; later, five deaths in a row end it all

Signals are blocked and waited for (`sigtimedwait`), never handled: everything here happens in one thread, in order.
"""

import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire_engine.system.crash_loop import STABLE_SECONDS, CrashLoop
from quire_monitoring.request_file import note_death

from quire_cli import process
from quire_cli.console import Console, waiting_line
from quire_cli.errors import CommandError
from quire_cli.ports import Endpoint
from quire_cli.server.companion import Companion
from quire_cli.server.health import Health
from quire_cli.server.host_pressure import HostPressure
from quire_cli.server.loaded_models import LoadedModels
from quire_cli.server.run_directory import RunDirectory
from quire_cli.server.server_process import SIGNALS, VERBOSE, ServerProcess, StartError, StartWatch
from quire_cli.server.server_watch import LOOK_S, ServerWatch

if TYPE_CHECKING:
    from quire_cli.server.workarounds.triton_2_51 import Triton251

_READY_POLL_S = 0.05
# tritonserver counts its drain timeout in whole seconds, then ends its models.
_GRACE_S = 5.0


class blocked_signals:  # noqa: N801 (a context manager, used like a function)
    """Blocks signals until the supervisor waits for them: none can come between a start and the clean-up after it."""

    def __enter__(self) -> None:
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def __exit__(self, *_: object) -> None:
        # Drop pending signals: the run is over, and being killed by a second SIGTERM would hide its exit code.
        while signal.sigtimedwait(SIGNALS, 0):
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)


class ServerDiedError(CommandError):
    """The server, or a process without which it cannot serve, is gone. It can be started again."""


def delay_after_death(crash_loop: CrashLoop, served_s: float, cause: str) -> float:
    """Seconds to wait before the next start, after one that was ready for so long.

    Raises:
        CommandError: it has happened too often.
    """
    delay = crash_loop.delay_after_death(served_s >= STABLE_SECONDS)
    if crash_loop.is_tripped:
        raise CommandError(
            f"{cause}; that was death {crash_loop.num_deaths} in a row, each within {STABLE_SECONDS:.0f} s of the "
            "server's being ready; mend the cause, then start it again"
        )
    return delay


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """tritonserver, over all starts of one run. Use `run` once, inside `blocked_signals`."""

    command: Callable[[], Sequence[str]]
    """Called for each start."""
    environment: Mapping[str, str]
    endpoints: Mapping[str, Endpoint]
    """By service, `http` among them: ready means that each of these answers."""
    ready_line: str
    drain_timeout_s: int
    console: Console
    what: str
    """What is being started, for the status line."""
    run_directory: RunDirectory
    """Entered. The stubs have their status pages in its temporary folder."""
    companions: Sequence[Companion] = ()
    """What runs beside it: each adds its word to the ready line, and drains first."""
    workarounds: "Triton251 | None" = None
    """What this release of tritonserver needs besides."""
    needs_stub: bool = True
    """Whether one of the models that are loaded at the start certainly runs in a stub."""
    silence_s: float = 120.0
    """For how long such a server may have no stub and write nothing to its log."""
    unnoticed_s: float = 25.0
    """Within how many seconds a server that starts notices the death of a stub, if ever."""
    show_whole_log: bool = False
    models: LoadedModels | None = None
    """Keeps track of loaded models, if they come and go while the server runs."""
    health: Health
    """Holds the server's state, always up to date."""
    pressure: HostPressure = field(default_factory=HostPressure)
    hung_s: float = 10.0
    """A server or stub that has not moved for so long is killed, and started again."""

    def run(self) -> int:
        """Start, serve and stop.

        Returns:
            The exit code: 0 after a clean stop.

        Raises:
            CommandError: the first start failed, the server ended by itself, or it died too often.
        """
        process.adopt_orphans()
        crash_loop = CrashLoop()
        is_first = True
        server = self._start()
        while True:
            ready_at = None
            self.health.write(["the server is being started"])
            try:
                if not self._wait_until_ready(server):
                    return 0
                ready_at = time.monotonic()
                with closing(self._watch(server)) as watch:
                    problems = self._look(watch, set())
                    self._announce(server)
                    self._serve(server, watch, problems)
                return self._drain(server, watch.given_up)
            except (ServerDiedError, StartError) as death:
                if isinstance(death, StartError) and is_first:
                    raise
                is_first = False
                cause = str(death)
                self.health.write([f"{cause}; the server is being started again"])
                # Before waiting for the end of its log, which its stubs hold open.
                server.kill()
                self.run_directory.clean_up()
                note_death(self.run_directory.temporary, cause)
            finally:
                server.close()
            if self.models is not None:
                self.models.start_again()
            served_s = 0.0 if ready_at is None else time.monotonic() - ready_at
            another = self._start_again(server, crash_loop, served_s, cause)
            if another is None:
                return 0
            server = another

    def _start_again(
        self, dead: ServerProcess, crash_loop: CrashLoop, served_s: float, cause: str
    ) -> ServerProcess | None:
        """Start another server, after a pause; None after a signal to stop."""
        while True:
            pause_s = delay_after_death(crash_loop, served_s, cause)
            when = f"in {pause_s:.0f} s" if pause_s else "now"
            self.console.line(f"quire: {cause}; starting the server again {when}, on the same ports")
            if self._pause(dead, pause_s):
                return None
            try:
                return self._start()
            except OSError as error:  # no process or descriptor is left
                cause, served_s = f"tritonserver cannot be started: {error.strerror}", 0.0

    def _start(self) -> ServerProcess:
        prepare = self.workarounds.prepare if self.workarounds else lambda: None
        return ServerProcess(
            self.command(), self.environment, self.console, show_whole_log=self.show_whole_log, prepare=prepare
        )

    def _announce(self, server: ServerProcess) -> None:
        server.log.release()
        self.console.announce(self.ready_line + (self._ready_words() or ""))

    def _ready_words(self) -> str | None:
        """The companions' part of the ready line; None while one of them does not know its own."""
        words = [companion.ready_word() for companion in self.companions]
        return None if None in words else "".join(word or "" for word in words)

    def _wait_until_ready(self, server: ServerProcess) -> bool:
        """Wait for the models; False after a signal to stop."""
        watch = StartWatch(server, needs_stub=self.needs_stub, silence_s=self.silence_s, unnoticed_s=self.unnoticed_s)
        # A server that is started again serves the models that it can load; the health address reports the others.
        with_all_models = self.models is None or not self.models.may_miss_some
        with waiting_line(self.console, self.what) as waiting:
            while not self._is_ready(server, watch, with_all_models):
                if self._wait(server, _READY_POLL_S):
                    return False
                if server.exit_code is not None:
                    server.log.finish()
                    raise StartError(
                        server.log.cause() or f"tritonserver {server.how_it_ended} before it was ready; {VERBOSE}"
                    )
                server.log.release_old()
                waiting.tick(server.log.loading_percent())
        return True

    def _is_ready(self, server: ServerProcess, watch: StartWatch, with_all_models: bool) -> bool:
        """Raises if it will never be ready."""
        try:
            if server.is_ready(self.endpoints, with_all_models=with_all_models) and self._ready_words() is not None:
                return True
            if server.exit_code is None:
                watch.look()
        except OSError:
            pass  # no descriptor is left here: nothing is known
        return False

    def _watch(self, server: ServerProcess) -> ServerWatch:
        return ServerWatch(
            server, self.endpoints["http"], self.run_directory.temporary,
            lambda text: self.console.line(f"quire: {text}"),
            hung_s=self.hung_s, models=self.models,
            stuck_unloads=self.workarounds.watch_unloads() if self.workarounds else None,
        )  # fmt: skip

    def _look(self, watch: ServerWatch, known: set[str]) -> set[str]:
        """Check the server and update its health; returns the problems that were logged.

        Raises:
            ServerDiedError: only a new one will serve again.
        """
        problems = watch.look()
        self.health.write([problem.text for problem in problems], watch.pages, self.pressure.look())
        for problem in problems:
            if problem.is_fatal:
                raise ServerDiedError(problem.text)
        news = {problem.text for problem in problems if problem.is_news}
        for text in sorted(news - known):
            self.console.line(f"quire: {text}")
        for text in sorted(known - news):
            self.console.line(f"quire: no longer: {text}")
        return news

    def _serve(self, server: ServerProcess, watch: ServerWatch, problems: set[str]) -> None:
        """Returns after a signal to stop."""
        while not self._wait(server, LOOK_S):
            if server.exit_code is not None:
                if server.exit_code < 0:
                    watch.note_what_was_loaded()
                    raise ServerDiedError(f"tritonserver {server.how_it_ended}")
                server.log.finish()
                raise CommandError(f"tritonserver {server.how_it_ended}; its log is above, start it again")
            problems = self._look(watch, problems)

    def _drain(self, server: ServerProcess, given_up: Collection[str]) -> int:
        self.console.line(
            f"quire: draining: running requests have {self.drain_timeout_s} s; a second signal stops at once"
        )
        self.health.write(["the server is draining: it takes no new requests"])
        for companion in self.companions:
            companion.drain()
        watch = None
        if self.workarounds:
            watch = self.workarounds.watch_drain(server, self.endpoints["http"], given_up)
        server.terminate()
        timeout = time.monotonic() + self.drain_timeout_s
        while server.exit_code is None:
            if self._wait(server, _READY_POLL_S):
                raise CommandError("stopped at once by a second signal; running requests were cut off")
            if watch is not None and watch.is_over():
                cut_off = watch.cut_off()
                server.kill()
                if cut_off is not None:
                    raise CommandError(f"{cut_off} while the server drained; the requests that it had were cut off")
                return 0
            if time.monotonic() > timeout + _GRACE_S:
                break
        # When its timeout expires it exits without cleaning up, sometimes by a crash: that is not reported.
        if server.exit_code is not None and server.exit_code < 0 and time.monotonic() < timeout:
            raise CommandError(f"tritonserver {server.how_it_ended} while it drained; running requests were cut off")
        if server.exit_code != 0:
            raise CommandError(
                f"not drained within {self.drain_timeout_s} s, what still ran was cut off; "
                "give it longer with --drain-timeout"
            )
        return 0

    def _wait(self, server: ServerProcess, timeout_s: float) -> bool:
        """Wait for a signal, and look at the companions; True after a signal to stop."""
        is_stopping = server.wait_for_signal(timeout_s)
        for companion in self.companions:
            companion.look()
        return is_stopping

    def _pause(self, server: ServerProcess, seconds: float) -> bool:
        """Wait so long; True after a signal to stop."""
        end = time.monotonic() + seconds
        while not self._wait(server, min(LOOK_S, max(0.0, end - time.monotonic()))):
            if time.monotonic() >= end:
                return False
        return True
