"""Companion: a process beside the server, for as long as `quire serve` runs. It outlives restarts of the server."""

import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import partial

from quire_cli import process
from quire_cli.ports import Endpoint

_STOP_S = 3.0
_RETRY_S = 1.0
_START_S = 30.0
"""How long the ready line waits for a companion; the server is what matters."""


class Companion:
    """A process that listens on a port, started and stopped with the context, and between them as `on_end` says.

    Args:
        service: its name in the ready line.
        endpoint: where it listens.
        command: what is run.
        environment: all of its variables.
        niceness: of `process.lower_priority`.
    """

    def __init__(
        self, service: str, endpoint: Endpoint, command: Sequence[str], environment: Mapping[str, str],
        niceness: int = 0,
    ) -> None:  # fmt: skip
        self._service = service
        self._endpoint = endpoint
        self._command = command
        self._environment = environment
        self._niceness = niceness
        self._restart_at: float | None = None
        """Set once it has ended; infinite if it is not started again."""
        self._is_named = False

    @property
    def server_environment(self) -> Mapping[str, str]:
        """Variables that the server must be started with for it."""
        return {}

    def on_end(self, served_s: float) -> float | None:
        """It has ended by itself.

        Args:
            served_s: how long it ran.

        Returns:
            Seconds after which it is started again, or None if it is not.
        """
        raise NotImplementedError

    def drain(self) -> None:
        """Called before the server drains."""

    def __enter__(self) -> "Companion":
        self._first_start = time.monotonic()
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._popen.terminate()
        try:
            self._popen.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()

    def look(self) -> None:
        """Start it again if it has ended; call it often."""
        now = time.monotonic()
        if self._restart_at is None and self._popen.poll() is not None:
            delay_s = self.on_end(now - self._started_at)
            self._restart_at = float("inf") if delay_s is None else now + delay_s
        if self._restart_at is not None and now >= self._restart_at:
            try:
                self._start()
            except OSError:  # no descriptor or process is left, which must not end the server
                self._restart_at = now + _RETRY_S

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._popen.pid

    def is_listening(self) -> bool:
        """Whether it, and nothing else, listens on its port."""
        try:
            socket.create_connection((self._endpoint.client_host, self._endpoint.port), timeout=1.0).close()
            return process.listens(self._popen.pid, self._endpoint.port)
        except OSError:
            return False

    def ready_word(self) -> str | None:
        """Its part of the ready line: None while that is not known yet, empty when it does not listen."""
        self.look()
        if self._restart_at == float("inf"):
            return ""
        if not self._is_named:
            # The first call may come late: only once the server is ready, which may take minutes.
            self._is_named = self.is_listening()
            if not self._is_named:
                return None if time.monotonic() - self._first_start < _START_S else ""
        return f" {self._service}={self._endpoint}"

    def _start(self) -> None:
        prepare = partial(process.lower_priority, self._niceness)
        self._popen = process.start(
            self._command, self._environment, signal_when_orphaned=signal.SIGKILL, prepare=prepare
        )
        self._restart_at, self._started_at = None, time.monotonic()
