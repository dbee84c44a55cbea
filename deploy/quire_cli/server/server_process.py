"""One tritonserver as a process: started, asked whether it is ready, its stubs found, killed.

A stub is the process that runs one model in Python: tritonserver forks a shell, which becomes the stub.
"""

import http.client
import mmap
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from quire_engine.system import process_state

from quire_cli import process
from quire_cli.console import Console
from quire_cli.errors import CommandError
from quire_cli.ports import Endpoint
from quire_cli.server.private_memory import keep_memory_private
from quire_cli.server.server_log import ServerLog

STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
SIGNALS = {*STOP_SIGNALS, signal.SIGCHLD}
_STUB_NAME = "triton_python_backend_stub"[:15]
# Paths of services that speak HTTP; others only have to accept a connection.
_PROBES = {"http": "/v2/health/ready", "metrics": "/metrics"}
# A server with a model that cannot be loaded is not ready. It opens its ports once it has tried to load all of them.
_PROBES_OF_SOME = {**_PROBES, "http": "/v2/health/live"}
_PROBE_TIMEOUT_S = 2.0
_START_LOOK_S = 0.2

Stub = tuple[int, int]
"""Id and start time of a process."""
VERBOSE = "see its whole log with: quire serve --verbose"


class StartError(CommandError):
    """The server did not become ready."""


class ServerProcess:
    """A tritonserver that has been started. `close` it in the end.

    Args:
        command: what is run.
        environment: all of its variables.
        console: shows its log.
        show_whole_log: whether the log is shown without a filter.
        prepare: called in the new process, before the program is run.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], console: Console, *, show_whole_log: bool,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        is_private = mmap.mmap(-1, 1)  # which the child shares

        def in_child() -> None:
            prepare()
            is_private[0] = keep_memory_private()

        self._popen = process.start(
            command,
            environment,
            signal_when_orphaned=signal.SIGTERM,  # not SIGKILL: an orphaned server then still ends its models itself
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            prepare=in_child,
        )
        if not is_private[0]:
            console.line(
                "quire: this system has no seccomp filter for the server: each time a model starts, other users of the "
                "machine can open its shared memory for about a second"
            )
        assert self._popen.stdout is not None
        self.log = ServerLog(self._popen.stdout, console, everything=show_whole_log)

    def close(self) -> None:
        """Kill it if it still runs, and read the rest of its log."""
        self.kill()
        self.log.finish()

    def kill(self) -> None:
        """Kill it if it still runs."""
        if self._popen.poll() is None:
            self._popen.kill()
            self._popen.wait()

    def terminate(self) -> None:
        """Ask it to drain and end."""
        self._popen.terminate()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """None while `wait_for_signal` has not seen its end; negative: the signal that killed it."""
        return self._popen.returncode

    @property
    def how_it_ended(self) -> str:
        """In words, once it has."""
        return process_state.how_it_ended(self._popen.returncode)

    def is_ready(self, endpoints: Mapping[str, Endpoint], *, with_all_models: bool = True) -> bool:
        """Whether the models are loaded and this server has opened all its ports, which it does one after the other.

        Args:
            endpoints: by service.
            with_all_models: whether it is only ready if all models could be loaded.
        """
        probes = _PROBES if with_all_models else _PROBES_OF_SOME
        return all(_answers(endpoint, probes.get(service)) for service, endpoint in endpoints.items()) and all(
            process.listens(self._popen.pid, endpoint.port) for endpoint in endpoints.values()
        )

    def stubs(self) -> set[Stub]:
        """The live stubs."""
        children = self._children()
        return {(pid, stat.start_time) for pid, stat in children if stat.name == _STUB_NAME and not stat.is_dead}

    def dead_children(self) -> dict[int, int]:
        """Children that have died and that tritonserver has not noticed: id → wait status."""
        return {pid: stat.wait_status for pid, stat in self._children() if stat.is_dead}

    def wait_for_signal(self, timeout_s: float) -> bool:
        """Sleep until a signal or the timeout; collect children that have died. True after a signal to stop."""
        received = signal.sigtimedwait(SIGNALS, timeout_s)
        # Popen collects the server's exit code; orphans that this process adopted are collected here.
        while dead := _dead_child():
            if dead == self._popen.pid:
                self._popen.wait()
            else:
                os.waitpid(dead, 0)
        return received is not None and received.si_signo in STOP_SIGNALS

    def _children(self) -> list[tuple[int, process_state.ProcessStat]]:
        stats = ((pid, process_state.process_stat(pid)) for pid in process.own_processes())
        return [(pid, stat) for pid, stat in stats if stat is not None and stat.parent == self._popen.pid]


class StartWatch:
    """Detects a start that will never end.

    tritonserver (2.51 to 26.07, at least) waits for ever for the first stub of a model, if that dies while it completes
    the model's configuration.

    Args:
        server: the server.
        needs_stub: whether one of the models that are loaded at the start certainly runs in a stub.
        silence_s: for how long such a server may have no stub and write nothing to its log.
        unnoticed_s: within how many seconds tritonserver notices every other death of a stub.
    """

    def __init__(self, server: ServerProcess, *, needs_stub: bool, silence_s: float, unnoticed_s: float) -> None:
        self._server = server
        self._needs_stub, self._silence_s, self._unnoticed_s = needs_stub, silence_s, unnoticed_s
        self._dead_since: dict[int, float] = {}
        self._next_look = 0.0

    def look(self) -> None:
        """Call it often.

        Raises:
            StartError: the start will never end.
        """
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _START_LOOK_S
        dead = self._server.dead_children()
        self._dead_since = {pid: self._dead_since.get(pid, now) for pid in dead}
        for pid, since in self._dead_since.items():
            if now - since >= self._unnoticed_s:
                how = process_state.how_it_ended(os.waitstatus_to_exitcode(dead[pid]))
                words = self._server.log.last_words
                raise StartError(
                    f"a model's process {how} while it started{f', saying {words!r}' if words else ''}, "
                    f"and tritonserver would wait for it for ever; {VERBOSE}"
                )
        if self._needs_stub:  # a look at all processes of a busy machine takes milliseconds
            self._needs_stub = not self._server.stubs()
        if self._needs_stub and self._server.log.silent_s() > self._silence_s:
            raise StartError(
                f"tritonserver has started no process for a model, and its log has been silent for "
                f"{self._silence_s:.0f} s; {VERBOSE}"
            )


def _answers(endpoint: Endpoint, path: str | None) -> bool:
    """Without a path: whether it accepts a connection."""
    connection = http.client.HTTPConnection(endpoint.client_host, endpoint.port, timeout=_PROBE_TIMEOUT_S)
    try:
        connection.connect()
        if path is None:
            return True
        connection.request("GET", path)
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _dead_child() -> int | None:
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return found.si_pid if found else None
