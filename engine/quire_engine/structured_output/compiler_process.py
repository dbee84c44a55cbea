"""CompilerProcess: the engine core's end of the grammar compiler. Decides what is compiled when, and for how long.

A thread of the engine core owns the process, so that the loop of steps never waits for it. The thread starts the
process, has it start jobs, takes their results, and starts it again, with all grammars that are not compiled yet, when
it has died or does not end a job in time.

How long a grammar takes is not known beforehand, and most take milliseconds. So each is tried in the order of arrival,
and stopped when it has used the first of `TRY_SECONDS` of CPU time. Then it is tried for longer, after all others in
that round, and at last to its end. Each round has `PLACES` of its own. Those of the last round are all that it has; the
others may use free places, as their jobs end soon::

    submit ──► round 0 ──► round 1 ──► round 2 ──► (ends)         or ends in any round
               0.05 s      0.5 s       the rest

So a quick grammar waits at most for the first of `TRY_SECONDS` of each that came before it, however slow they are; and
many quick ones do not keep slow ones from running.

A death of the process counts against the grammars that were being compiled, and at the `MAX_DEATHS`-th a grammar is
rejected. While there is a grammar with a death, one is compiled at a time, so that no other dies with it.

`concurrent.futures` would read results with pickle, from a process that has parsed what a client sent; its pool breaks
for all jobs when a process dies, and cannot cancel a running one.
"""

import contextlib
import logging
import math
import os
import select
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from quire_engine.scheduler.grammar import GrammarError
from quire_engine.structured_output.compiler_messages import (
    COMPILE_SECONDS,
    ENDED,
    KILL,
    MAX_CONTROL_BYTES,
    OUT_OF_MEMORY,
    READY,
    START,
    CompilerArguments,
    CompileRequest,
    CompileResult,
    memory_file,
    read_file,
)
from quire_engine.system import process_state
from quire_engine.system.child_process import start_module
from quire_engine.system.crash_loop import CrashLoop

if TYPE_CHECKING:
    from quire_engine.structured_output.xgrammar import SharedGrammar

logger = logging.getLogger(__name__)

TRY_SECONDS = (0.05, 0.5, math.inf)
"""CPU time of each round. Usual schemas take less than the first; with a large vocabulary, the second."""
PLACES = (2, 1, 2)
"""Grammars of each round that are compiled at once."""
MAX_DEATHS = 3
"""A grammar that was being compiled when the process died this often is not tried again."""
OVERDUE_SECONDS = COMPILE_SECONDS + 5.0
"""A job that has not ended after this time did not get its alarm: it, or the whole process, was stopped or hangs."""
START_SECONDS = 120.0
"""How long the process may take to start; usually some seconds."""
SHUTDOWN_SECONDS = 2.0
_NO_MEMORY_TO_FAIL = 127
"""Exit code of the dynamic loader when C++ raises an exception and there is no memory left to load what that takes."""
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
"""Signals that end a job because of its grammar. Others come from outside."""


@dataclass(slots=True)
class Job:
    """A grammar that is not compiled yet."""

    request: CompileRequest
    content: bytes = b""
    """The request in msgpack."""
    round: int = 0
    """How often it has exceeded its time."""
    descriptor: int | None = None
    """The file with the request and then the result; None: it waits."""
    started_at: float = 0.0
    is_cancelled: bool = False
    """It was running, and keeps its place until it has ended."""
    num_deaths: int = 0


def next_job(jobs: Iterable[Job]) -> Job | None:
    """The next job to start, if there is one and a place for it.

    Args:
        jobs: that wait or run; those of a round in the order in which they came to it.
    """
    running: list[int] = []
    waiting: dict[int, Job] = {}
    for job in jobs:
        if job.descriptor is not None:
            running.append(job.round)
        else:
            waiting.setdefault(job.round, job)
    if len(running) >= sum(PLACES):
        return None
    rounds = sorted(waiting)
    own = [number for number in rounds if running.count(number) < PLACES[number]]
    return next((waiting[number] for number in own or rounds if own or number + 1 < len(PLACES)), None)


class CompilerProcess:
    """Compiles in the background; `submit` never blocks. It refers to no user of it, so that one can be collected.

    Args:
        arguments: for the process.
    """

    def __init__(self, arguments: CompilerArguments) -> None:
        self._arguments = arguments
        self.finished: deque[tuple[int, SharedGrammar | GrammarError]] = deque()
        """Job ids and what came of them."""
        self.event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Becomes readable when there is something in `finished`."""
        self.may_import = threading.Event()
        """Set when the engine core's thread has finished its own imports."""
        self._tokenizer_info: Any = None
        self._lock = threading.Lock()
        self._jobs: dict[int, Job] = {}
        self._wake_up = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Tells the thread that there is something to start."""
        for descriptor in (self.event, self._wake_up):
            weakref.finalize(self, os.close, descriptor)
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    @property
    def pid(self) -> int | None:
        """Process id, while there is one."""
        process = self._process
        return None if process is None else process.pid

    def start(self) -> None:
        """Start the process, before there is anything to compile."""
        with self._lock:
            self._ensure_thread()

    def submit(self, request: CompileRequest) -> None:
        """Have a grammar compiled; starts the process if there is none. When this raises, nothing was submitted."""
        job = Job(request, msgspec.msgpack.encode(request))
        with self._lock:
            self._ensure_thread()
            self._jobs[request.job_id] = job
            os.eventfd_write(self._wake_up, 1)

    def cancel(self, job_id: int) -> None:
        """Cancel a job. No result comes of it, unless it is on its way already."""
        with self._lock:
            job = self._jobs.get(job_id)
            if job is None:
                return
            if job.descriptor is None:
                del self._jobs[job_id]
                os.eventfd_write(self._wake_up, 1)
            else:
                job.is_cancelled = True
                self._send(KILL.pack(job_id))

    def slow_jobs(self) -> list[int]:
        """Jobs that have exceeded their time, the slowest first, and the newest first among equals."""
        with self._lock:
            slow = [(job.round, job_id) for job_id, job in self._jobs.items() if job.round and not job.is_cancelled]
        return [job_id for _, job_id in sorted(slow, reverse=True)]

    def shutdown(self) -> None:
        """End the process and the thread. Idempotent."""
        self._closing.set()
        self.may_import.set()
        with self._lock:
            process, thread = self._process, self._thread
        if process is not None:
            process.kill()  # it has no state to save, and its jobs end with it
        if thread is not None and thread is not threading.current_thread():
            thread.join(SHUTDOWN_SECONDS)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _ensure_thread(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="grammar-compiler", daemon=True)
            thread.start()  # it waits for the lock
            self._thread = thread

    def _run(self) -> None:
        """Keep a process alive. If that fails, all jobs get an error, and the next request starts it again."""
        crash_loop, error = CrashLoop(), "the grammar compiler cannot start; the server's log says why"
        try:
            while (delay := self._run_process(crash_loop)) is not None:
                self._closing.wait(delay)
        except Exception:
            logger.exception("the grammar compiler's thread failed")
            error = "the grammar compiler failed; the server's log says why"
        with self._lock:
            failed, self._jobs, self._thread = self._jobs, {}, None
        for job_id, job in failed.items():
            _close(job)
            if not (job.is_cancelled or self._closing.is_set()):
                self._on_result(CompileResult(job_id, error=error, cacheable=False, is_our_fault=True))

    def _run_process(self, crash_loop: CrashLoop) -> float | None:
        """Start the process and serve until it ends. Returns after how many seconds to start it again, if at all."""
        self._requeue()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs, self._lock:
                if self._closing.is_set():
                    return None
                process = self._process = self._start(theirs.fileno())
                self._control = ours
            was_ready, error = False, None
            try:
                with contextlib.suppress(ConnectionError):  # it has died
                    error = self._await_ready(ours)
                    was_ready = error is None
                    if was_ready:
                        self._serve(process, ours)
            finally:
                process.kill()
                assert process.stdin is not None
                process.stdin.close()
                process.wait()
                with self._lock:
                    self._process = self._control = None
        if self._closing.is_set():
            return None
        delay = 0.0
        if error is None:
            how = process_state.how_it_ended(process.returncode)
            logger.warning("the grammar compiler %s; it is started again", how)
            delay = crash_loop.delay_after_death(was_ready)
            if crash_loop.is_tripped:
                error = f"it {how}, for the {crash_loop.num_deaths}th time in a row"
        if error is not None:
            logger.error("the grammar compiler cannot start: %s", error)
            return None
        return delay

    def _start(self, control: int) -> "subprocess.Popen[bytes]":
        # It forks, and so must not have threads.
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        module = "quire_engine.structured_output.compiler"
        return start_module(module, self._arguments, stdout=control, environment=threads)

    def _await_ready(self, control: socket.socket) -> str | None:
        """Wait until the process has started. Returns an error if it can never work. Raises ConnectionError if the
        process has died, or hangs."""
        self._on_start()
        control.settimeout(START_SECONDS)
        try:
            message, descriptors, *_ = socket.recv_fds(control, MAX_CONTROL_BYTES, 1)
        except TimeoutError:
            raise ConnectionAbortedError from None
        if message != READY:
            if not message:
                raise ConnectionResetError
            return message.decode(errors="replace")
        (vocabulary,) = descriptors
        try:
            return self._on_ready(read_file(vocabulary).decode())
        finally:
            os.close(vocabulary)

    def _serve(self, process: "subprocess.Popen[bytes]", control: socket.socket) -> None:
        """Have jobs started and take their results, until the process ends or hangs."""
        poller = select.poll()
        poller.register(control, select.POLLIN)
        poller.register(self._wake_up, select.POLLIN)
        while True:
            with self._lock:
                self._start_jobs()
                running = [job.started_at for job in self._jobs.values() if job.descriptor is not None]
            seconds_left = min(running, default=math.inf) + OVERDUE_SECONDS - time.monotonic()
            if seconds_left <= 0:
                logger.error("the grammar compiler was stopped, or hangs")
                control.shutdown(socket.SHUT_WR)  # it kills its jobs and ends, unless it is itself stopped
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(SHUTDOWN_SECONDS)
                return
            ready = [descriptor for descriptor, _ in poller.poll(1000 * seconds_left if running else None)]
            if self._wake_up in ready:
                os.eventfd_read(self._wake_up)
            if control.fileno() in ready:
                message = control.recv(MAX_CONTROL_BYTES)
                if not message:
                    return
                self._end_job(*ENDED.unpack(message))

    def _end_job(self, job_id: int, status: int) -> None:
        job, exit_code = self._jobs[job_id], os.waitstatus_to_exitcode(status)
        if not job.is_cancelled and exit_code == -signal.SIGPROF and job.round + 1 < len(TRY_SECONDS):
            with self._lock:
                _close(job)
                job.round += 1
                self._jobs[job_id] = self._jobs.pop(job_id)
            return
        if not job.is_cancelled:
            assert job.descriptor is not None
            if exit_code == 0:
                self._on_result(msgspec.msgpack.decode(read_file(job.descriptor), type=CompileResult))
            else:
                self._on_result(_explain(job.request, exit_code))
        with self._lock:
            _close(self._jobs.pop(job_id))

    def _on_start(self) -> None:
        self.may_import.wait()
        with contextlib.suppress(Exception):  # `_on_ready` fails of the same, and can report it
            import quire_engine.structured_output.xgrammar  # noqa: F401

    def _on_ready(self, tokenizer_info: str) -> str | None:
        """Take the vocabulary, which the process sends when it has started. Returns an error, if any."""
        try:
            from quire_engine.structured_output.xgrammar import xgrammar

            self._tokenizer_info = self._tokenizer_info or xgrammar.TokenizerInfo.deserialize_json(tokenizer_info)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def _on_result(self, result: CompileResult) -> None:
        grammar: SharedGrammar | GrammarError
        if result.error is not None:
            parameter = None if result.is_our_fault else "structured_outputs"
            grammar = GrammarError(result.error, parameter, cacheable=result.cacheable)
        else:
            try:
                from quire_engine.structured_output import xgrammar

                grammar = xgrammar.SharedGrammar.load(result.grammar, self._tokenizer_info)
            except Exception:
                logger.exception("a compiled grammar cannot be read")
                grammar = GrammarError("the compiled grammar cannot be read; the server's log says why", None)
        self.finished.append((result.job_id, grammar))
        os.eventfd_write(self.event, 1)

    def _requeue(self) -> None:
        """For a new process: all grammars wait again, those with the most deaths last."""
        with self._lock:
            for job in self._jobs.values():
                job.num_deaths += job.descriptor is not None
                _close(job)
            alive = [job for job in self._jobs.values() if not job.is_cancelled]
            given_up = [job.request for job in alive if job.num_deaths >= MAX_DEATHS]
            left = sorted((job for job in alive if job.num_deaths < MAX_DEATHS), key=lambda job: job.num_deaths)
            self._jobs = {job.request.job_id: job for job in left}
        for request in given_up:
            error = f"the grammar compiler died {MAX_DEATHS} times while it compiled this {request.kind}; simplify it"
            self._on_result(CompileResult(request.job_id, error=error, cacheable=False))

    # -- with the lock -------------------------------------------------------------------------------------------------

    def _start_jobs(self) -> None:
        is_serial = any(job.num_deaths for job in self._jobs.values())
        while (job := next_job(self._jobs.values())) is not None:
            if is_serial and any(other.descriptor is not None for other in self._jobs.values()):
                return
            job.descriptor, job.started_at = memory_file(job.content), time.monotonic()
            self._send(START.pack(job.request.job_id, TRY_SECONDS[job.round]), job.descriptor)

    def _send(self, message: bytes, *descriptors: int) -> None:
        """Never blocks for long: at most a START and a KILL of each place are on their way."""
        if self._control is not None:
            with contextlib.suppress(ConnectionError):  # the thread sees its death
                socket.send_fds(self._control, [message], descriptors)


def _close(job: Job) -> None:
    if job.descriptor is not None:
        os.close(job.descriptor)
        job.descriptor = None


def _explain(request: CompileRequest, exit_code: int) -> CompileResult:
    if exit_code == -signal.SIGALRM:
        error = f"the {request.kind} takes more than {COMPILE_SECONDS:g} s to compile; simplify it"
        return CompileResult(request.job_id, error=error, cacheable=False)
    if exit_code not in (OUT_OF_MEMORY, _NO_MEMORY_TO_FAIL) and -exit_code not in _CRASHES:
        how = process_state.how_it_ended(exit_code)
        error = f"the process that compiled the {request.kind} {how}; the server's log may say why"
        return CompileResult(request.job_id, error=error, cacheable=False, is_our_fault=True)
    error = f"the {request.kind} is too complex: compiling it takes too much memory or nests too deeply; simplify it"
    return CompileResult(request.job_id, error=error)
