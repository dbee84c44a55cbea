"""A process for untrusted programs and data, with the kernel's limits of time and memory.

An operation inside a library cannot be interrupted from within its process, so it runs in another one::

    LimitedProcess ── stdin: one job per line, JSON ──► `serve`: runs them, one after the other
                   ◄─ stdout: an empty line, then ────  ends when a limit is hit, or with stdin
                      one result per line

The time limit is one of CPU time, which does not depend on the machine's load. The process is started with the first
job or before it, and again whenever it has ended. The empty line says that it has imported what it needs.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection
from typing import Any, Protocol, TypeVar

import msgspec

from quire_engine.system.child_process import start_module
from quire_engine.system.memory import limit_memory_growth


class _Timed(Protocol):
    seconds: float


_JobT = TypeVar("_JobT", bound=_Timed)

WALL_SECONDS = 60.0
"""A process that does not answer within this time is killed: it may be stopped, which uses no CPU time."""
START_SECONDS = 600.0
"""The same of a process that was started, until it has imported what it needs."""


class LimitedProcess:
    """Starts the process and passes jobs to it. Thread-safe: one job runs at a time.

    Args:
        module: dotted name of the module whose `main` calls `serve`.
        arguments: written to its stdin as the first line; None: nothing is written.
        pass_fds: descriptors that it inherits under the same numbers.
        wall_seconds: a process that does not answer within this time is killed.
    """

    def __init__(
        self,
        module: str,
        arguments: object = None,
        pass_fds: Collection[int] = (),
        wall_seconds: float = WALL_SECONDS,
    ) -> None:
        self._module = module
        self._arguments = arguments
        self._pass_fds = pass_fds
        self._wall_seconds = wall_seconds
        self._is_closed = False
        self._is_starting = False
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[Any, Any] | None = None
        self._return_code: int | None = None

    def start(self) -> None:
        """Start the process unless it runs, and do not wait for it."""
        with self._lock:
            if not self._is_closed and not self._is_running():
                self._start()

    def ask(self, job: bytes) -> bytes:
        """The answer to a job; empty if the process died.

        Args:
            job: JSON in one line.
        """
        with self._lock:
            return self._ask(job)

    @property
    def was_killed(self) -> bool:
        """Whether the process that died last was killed by neither a limit nor `shutdown`: its job may succeed in
        another."""
        return not self._is_closed and self._return_code == -signal.SIGKILL

    @property
    def is_job_at_fault(self) -> bool:
        """Whether the process that died last was ended by its job: by a limit, or by a crash."""
        return self._return_code is not None and self._return_code < 0 and self._return_code != -signal.SIGKILL

    def shutdown(self) -> None:
        """End the process, even in the middle of a job; none is started again. Idempotent."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._stop()

    def _ask(self, job: bytes) -> bytes:
        if not self._is_closed and not self._is_running():
            self._start()
        if self._is_closed:  # perhaps while it was started
            self._stop()
            return b""
        if self._is_starting and not self._exchange(b"", START_SECONDS):
            return b""
        self._is_starting = False
        return self._exchange(job + b"\n", self._wall_seconds)

    def _exchange(self, sent: bytes, seconds: float) -> bytes:
        """The line that the process writes next; empty if it died."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        began_at = time.monotonic()
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        answer = b""
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(sent)
                process.stdin.flush()
            answer = process.stdout.readline()
        finally:
            timer.cancel()
            if not answer.endswith(b"\n"):  # dead or interrupted: its answer must not be taken for the next job's
                self._stop()
                was_late = time.monotonic() - began_at >= seconds
                self._return_code = None if was_late else process.returncode
        return answer if answer.endswith(b"\n") else b""

    def _is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _start(self) -> None:
        self._stop()
        self._is_starting = True
        self._process = start_module(self._module, self._arguments, stdout=subprocess.PIPE, pass_fds=self._pass_fds)
        self._end = weakref.finalize(self, _end, self._process)

    def _stop(self) -> None:
        self._process = None
        if self._end is not None:
            self._end()


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        with contextlib.suppress(BrokenPipeError):
            stream.close()
    process.wait()


def serve(job_type: type[_JobT], run: Callable[[_JobT], msgspec.Struct], memory_bytes: int | None = None) -> None:
    """The process's side: run jobs until stdin ends.

    Args:
        job_type: of a job; its field `seconds` is the limit of its CPU time; 0: there is none.
        run: turns a job into its result.
        memory_bytes: limit of the process's memory on top of what it has now; None: there is none.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # both may reach the whole group; the parent decides
        signal.signal(number, signal.SIG_IGN)
    if memory_bytes is not None:
        limit_memory_growth(memory_bytes)
    decoder = msgspec.json.Decoder(job_type)
    _write(b"\n")
    for line in sys.stdin.buffer:
        job = decoder.decode(line)
        signal.setitimer(signal.ITIMER_PROF, job.seconds)  # its signal is not handled, and ends the process
        answer = msgspec.json.encode(run(job))
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(answer + b"\n")


def _write(line: bytes) -> None:
    try:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
    except BrokenPipeError:  # the parent has ended
        os._exit(0)
