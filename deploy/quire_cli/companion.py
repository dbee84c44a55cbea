"""Companion: a process beside the server, for as long as `quire serve` runs. It outlives restarts of the server."""

import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from quire_cli import process
from quire_cli.ports import Endpoint

_STOP_S = 3.0


class Companion:
    """Starts, watches and stops one process that listens on a port.

    Args:
        endpoint: where it listens.
        command: what is run.
        environment: all of its variables.
        on_end: called from a thread when it has ended by itself, with the seconds that it ran; returns those after
            which it is started again, or None if it is not.
    """

    def __init__(
        self, endpoint: Endpoint, command: Sequence[str], environment: Mapping[str, str],
        on_end: Callable[[float], float | None],
    ) -> None:  # fmt: skip
        self._endpoint = endpoint
        self._command = command
        self._environment = environment
        self._on_end = on_end
        self._niceness = 0
        self._begin = self._started_at = time.monotonic()
        self._popen = self._start()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._gone = threading.Event()
        threading.Thread(target=self._watch, name="companion", daemon=True).start()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._popen.pid

    @property
    def is_gone(self) -> bool:
        """Whether it has ended for good."""
        return self._gone.is_set()

    @property
    def age_s(self) -> float:
        """Seconds since its first start."""
        return time.monotonic() - self._begin

    def is_listening(self) -> bool:
        """Whether it, and nothing else, listens on its port."""
        try:
            socket.create_connection((self._endpoint.client_host, self._endpoint.port), timeout=1.0).close()
            return process.listens(self._popen.pid, self._endpoint.port)
        except OSError:
            return False

    def lower_priority(self, niceness: int) -> None:
        """Let it, and what is started in its place, get less CPU time; see `process.lower_priority`."""
        with self._lock:
            self._niceness = niceness
            process.lower_priority(self._popen.pid, niceness)

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal; no effect on one that has ended."""
        with self._lock:
            self._popen.send_signal(number)

    def stop(self) -> None:
        """End it."""
        self._stopping.set()
        with self._lock:
            popen = self._popen
        popen.terminate()
        try:
            popen.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            popen.kill()
            popen.wait()

    def _start(self) -> "subprocess.Popen[bytes]":
        return process.start(self._command, self._environment, signal_when_orphaned=signal.SIGKILL)

    def _watch(self) -> None:
        while True:
            self._wait_for_end()
            if self._stopping.is_set():
                return
            delay_s = self._on_end(time.monotonic() - self._started_at)
            if delay_s is None:
                self._gone.set()
                return
            if self._stopping.wait(delay_s):
                return
            with self._lock:
                if self._stopping.is_set():
                    return
                self._popen.wait()  # it has ended
                # From this thread, which lives as long as the process: it is killed when the thread ends that made it.
                self._started_at = time.monotonic()
                self._popen = self._start()
                process.lower_priority(self._popen.pid, self._niceness)

    def _wait_for_end(self) -> None:
        try:
            handle = os.pidfd_open(self._popen.pid)
        except ProcessLookupError:  # `stop` has collected it
            return
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.poll()
        os.close(handle)
