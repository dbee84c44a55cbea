"""Companion: a process beside the server, for as long as `quire serve` runs. It outlives restarts of the server."""

import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence

from quire_cli import process
from quire_cli.ports import Endpoint

_STOP_S = 3.0
_START_S = 30.0
"""How long the ready line waits for a companion; the server is what matters."""


class Companion:
    """A process that listens on a port, started, watched and stopped with the context.

    Args:
        service: its name in the ready line.
        endpoint: where it listens.
        command: what is run.
        environment: all of its variables.
        niceness: of `process.lower_priority`, also for what is started in its place.
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
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._is_gone = False
        self._is_named = False

    @property
    def server_environment(self) -> Mapping[str, str]:
        """Variables that the server must be started with for it."""
        return {}

    def on_end(self, served_s: float) -> float | None:
        """Called from a thread when it has ended by itself.

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
        threading.Thread(target=self._watch, name=self._service, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        with self._lock:
            popen = self._popen
        popen.terminate()
        try:
            popen.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            popen.kill()
            popen.wait()

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
        if self._is_gone:
            return ""
        if not self._is_named:
            # The first call may come late: only once the server is ready, which may take minutes.
            self._is_named = self.is_listening()
            if not self._is_named:
                return None if time.monotonic() - self._first_start < _START_S else ""
        return f" {self._service}={self._endpoint}"

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal; no effect on one that has ended."""
        with self._lock:
            self._popen.send_signal(number)

    def _start(self) -> None:
        self._started_at = time.monotonic()
        self._popen = process.start(self._command, self._environment, signal_when_orphaned=signal.SIGKILL)
        if self._niceness:
            process.lower_priority(self._popen.pid, self._niceness)

    def _watch(self) -> None:
        while True:
            self._wait_for_end()
            if self._stopping.is_set():
                return
            delay_s = self.on_end(time.monotonic() - self._started_at)
            if delay_s is None:
                self._is_gone = True
                return
            if self._stopping.wait(delay_s):
                return
            with self._lock:
                if self._stopping.is_set():
                    return
                self._popen.wait()  # it has ended
                # From this thread, which lives as long as the process: it is killed when the thread ends that made it.
                self._start()

    def _wait_for_end(self) -> None:
        try:
            handle = os.pidfd_open(self._popen.pid)
        except ProcessLookupError:  # `__exit__` has collected it
            return
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.poll()
        os.close(handle)
