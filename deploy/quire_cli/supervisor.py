"""Runs one tritonserver from start to end: ready, drained, and nothing left of it.

Signals are blocked and waited for (`sigtimedwait`), never handled: everything here happens in one thread, in order.
"""

import http.client
import os
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quire_cli import process
from quire_cli.console import Console, waiting_line
from quire_cli.errors import CommandError
from quire_cli.ports import Endpoint
from quire_cli.server_log import ServerLog

__all__ = ["Supervisor", "blocked_signals"]

_STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_SIGNALS = {*_STOP_SIGNALS, signal.SIGCHLD}
# What is asked of a service that speaks HTTP; of another one it is enough that it accepts a connection.
_PROBES = {"http": "/v2/health/ready", "metrics": "/metrics"}
_READY_POLL_S = 0.05
_SERVING_POLL_S = 1.0
_PROBE_TIMEOUT_S = 2.0
_STUB_NAME = "triton_python_backend_stub"[:15]
_ENGINE_MODULE = "quire_engine.core.process"
# tritonserver 2.51 puts a request's body on the stack of the thread that reads it, and parses JSON recursively: on the
# usual 8 MiB, 4.2 MB of body end it with SIGSEGV. Its threads take their size from this limit, and memory only as they
# use it.
_STACK_BYTES = 256 * 2**20
# How long a model whose engine died may take to tell its clients.
_LAST_WORDS_S = 1.0
# tritonserver counts its drain timeout in whole seconds, then ends its models.
_GRACE_S = 5.0


class blocked_signals:  # noqa: N801 (a context manager, used like a function)
    """Signals wait until the supervisor asks for them: none can come between a start and the tidying up after it."""

    def __enter__(self) -> None:
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)

    def __exit__(self, *_: object) -> None:
        # Drop what is still pending: the run is over, and being killed by its second SIGTERM would hide its exit code.
        while signal.sigtimedwait(_SIGNALS, 0):
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)


@dataclass(frozen=True, kw_only=True, slots=True)
class Supervisor:
    """Supervises one server. Use `run` once, inside `blocked_signals` and a `RunDirectory`."""

    command: Sequence[str]
    environment: Mapping[str, str]
    endpoints: Mapping[str, Endpoint]
    """By service, `http` among them: ready means that each of these answers."""
    ready_line: str
    drain_timeout_s: int
    console: Console
    what: str
    """What is being started, for the status line."""
    show_whole_log: bool = False
    watch_models: bool = True
    """Stop when a process of a model dies; not where models come and go while the server runs."""

    def run(self) -> int:
        """Start, serve and stop.

        Returns:
            The exit code: 0 after a clean stop.

        Raises:
            CommandError: the server or a process of a model failed.
        """
        process.adopt_orphans()
        server = self._start()
        assert server.stdout is not None
        log = ServerLog(server.stdout, self.console, everything=self.show_whole_log)
        try:
            if not self._wait_until_ready(server, log):
                return 0
            watched = _model_processes(server.pid) if self.watch_models else set()
            log.release()
            _print_line(self.ready_line)
            self._serve(server, log, watched)
            return self._drain(server)
        finally:
            if server.poll() is None:
                server.kill()
                server.wait()
            log.finish()

    def _start(self) -> subprocess.Popen[bytes]:
        parent = os.getpid()

        def in_child() -> None:
            # SIGTERM, not SIGKILL: an orphaned server then still ends its models itself.
            process.die_with_parent(parent, signal.SIGTERM)
            _raise_stack_limit()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

        return subprocess.Popen(
            self.command,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # A session of its own: Ctrl-C must reach this process alone, which then drains.
            start_new_session=True,
            preexec_fn=in_child,
        )

    def _wait_until_ready(self, server: subprocess.Popen[bytes], log: ServerLog) -> bool:
        """Wait for the models; False when asked to stop meanwhile."""
        with waiting_line(self.console, self.what) as waiting:
            while not self._is_ready():
                if _wait_for_signal(_READY_POLL_S, server):
                    return False
                if server.returncode is not None:
                    log.finish()
                    raise CommandError(
                        log.cause()
                        or f"tritonserver {_how_it_ended(server)} before it was ready; "
                        "see its whole log with: quire serve --verbose"
                    )
                waiting.tick()
        return True

    def _is_ready(self) -> bool:
        """Whether the models are loaded, and all ports open: tritonserver opens them one after the other."""
        return all(
            _answers(endpoint, _PROBES[service]) if service in _PROBES else _accepts(endpoint)
            for service, endpoint in self.endpoints.items()
        )

    def _serve(self, server: subprocess.Popen[bytes], log: ServerLog, watched: set[tuple[int, int]]) -> None:
        """Returns when asked to stop."""
        while not _wait_for_signal(_SERVING_POLL_S, server):
            if server.returncode is not None:
                log.finish()
                raise CommandError(f"tritonserver {_how_it_ended(server)}; its log is above, start it again")
            for pid, start_time in watched:
                if not process.is_alive(pid, start_time):
                    # tritonserver would go on, call itself ready, and refuse every request of this model.
                    time.sleep(_LAST_WORDS_S)
                    raise CommandError(f"the model process {pid} died; its log is above, start the server again")

    def _drain(self, server: subprocess.Popen[bytes]) -> int:
        self.console.line(
            f"quire: draining: running requests have {self.drain_timeout_s} s; a second signal stops at once"
        )
        server.terminate()
        timeout = time.monotonic() + self.drain_timeout_s
        while server.returncode is None:
            if _wait_for_signal(_READY_POLL_S, server):
                raise CommandError("stopped at once by a second signal; running requests were cut off")
            if time.monotonic() > timeout + _GRACE_S:
                break
        # When its timeout expires it leaves without tidying up, which now and then is a crash: that is no news.
        if server.returncode is not None and server.returncode < 0 and time.monotonic() < timeout:
            raise CommandError(f"tritonserver {_how_it_ended(server)} while it drained; running requests were cut off")
        if server.returncode != 0:
            raise CommandError(
                f"not drained within {self.drain_timeout_s} s, what still ran was cut off; "
                "give it longer with --drain-timeout"
            )
        return 0


def _raise_stack_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    wanted = _STACK_BYTES if hard == resource.RLIM_INFINITY else min(_STACK_BYTES, hard)
    # Unlimited is no more: threads then get the platform's default of 2 MiB.
    if soft == resource.RLIM_INFINITY or soft < wanted:
        resource.setrlimit(resource.RLIMIT_STACK, (wanted, hard))


def _answers(endpoint: Endpoint, path: str) -> bool:
    connection = http.client.HTTPConnection(endpoint.client_host, endpoint.port, timeout=_PROBE_TIMEOUT_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _accepts(endpoint: Endpoint) -> bool:
    try:
        socket.create_connection((endpoint.client_host, endpoint.port), timeout=_PROBE_TIMEOUT_S).close()
        return True
    except OSError:
        return False


def _wait_for_signal(timeout_s: float, server: subprocess.Popen[bytes]) -> bool:
    """Sleep until a signal or the timeout; collect children that have died. True when asked to stop."""
    received = signal.sigtimedwait(_SIGNALS, timeout_s)
    # The server's exit code is for Popen to collect; orphans that this process adopted are nobody else's.
    while dead := _dead_child():
        if dead == server.pid:
            server.wait()
        else:
            os.waitpid(dead, 0)
    return received is not None and received.si_signo in _STOP_SIGNALS


def _dead_child() -> int | None:
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return found.si_pid if found else None


def _model_processes(server_pid: int) -> set[tuple[int, int]]:
    """Id and start time of each process without which a model cannot serve: the server's stubs, and their engines."""
    stats = {pid: stat for pid in process.own_processes() if (stat := process.process_stat(pid))}
    stubs = {pid for pid, stat in stats.items() if stat.parent == server_pid and stat.name == _STUB_NAME}
    engines = {
        pid for pid, stat in stats.items() if stat.parent in stubs and _ENGINE_MODULE in process.command_line(pid)
    }
    return {(pid, stats[pid].start_time) for pid in stubs | engines}


def _how_it_ended(server: subprocess.Popen[bytes]) -> str:
    code = server.returncode
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _print_line(text: str) -> None:
    try:
        print(text, flush=True)
    except OSError:  # nobody reads any more (`quire serve | head -1`); the server goes on
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
