"""CompilerProcess: the engine core's end of the grammar compiler. Decides what is compiled when, and for how long.

A thread of the engine core owns the process, so that the loop of steps never waits for it. The thread starts the
process, writes requests, reads results, watches the process while something is expected of it (`CompilerWatch`), and
starts it again when it has died, or was killed because it was stopped or hung, with all grammars that are not compiled
yet.

A death of the process counts against the grammars that were being compiled, and at the `MAX_DEATHS`-th a grammar is
rejected. While there is a grammar with a death, one is compiled at a time, so that no other dies with it.
"""

import contextlib
import logging
import os
import select
import signal
import subprocess
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from quire_engine.scheduler.grammar import GrammarError
from quire_engine.structured_output.compiler import COMPILE_SECONDS, OUT_OF_MEMORY
from quire_engine.structured_output.compiler_messages import (
    CompilerArguments,
    CompileRequest,
    CompileResult,
    CompilerReady,
    FrameReader,
    JobEnded,
    KillJob,
    StartJob,
    to_frame,
)
from quire_engine.structured_output.job_queue import TRY_SECONDS, JobQueue
from quire_engine.system import process_state
from quire_engine.system.child_process import start_module
from quire_engine.system.crash_loop import CrashLoop

if TYPE_CHECKING:
    from quire_engine.structured_output.xgrammar import SharedGrammar

logger = logging.getLogger(__name__)

MAX_DEATHS = 3
"""A grammar that was being compiled when the process died this often is not tried again."""
OVERDUE_SECONDS = COMPILE_SECONDS + 1.0
"""A job that still runs after this time did not get its alarm: it was stopped (SIGSTOP)."""
SHUTDOWN_SECONDS = 2.0
LOOK_SECONDS = 0.25
START_SECONDS = 120.0
"""How long the process may take to start; usually some seconds."""
SILENCE_SECONDS = 3 * OVERDUE_SECONDS
"""While the process has anything to compile, a job ends at least every `OVERDUE_SECONDS`."""
_NO_MEMORY_TO_FAIL = 127
"""Exit code of the dynamic loader when C++ raises an exception and there is no memory left to load what that takes."""
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
"""Signals that end a job because of its grammar. Others come from outside."""


class CompilerWatch:
    """Detects that the process is stopped or hung. (Its death closes its pipes.)

    Args:
        pid: the process.
        clock: seconds, monotonic.
        is_stopped: whether a process is stopped.
    """

    def __init__(
        self,
        pid: int,
        clock: Callable[[], float] = time.monotonic,
        is_stopped: Callable[[int], bool] = process_state.is_stopped,
    ) -> None:
        self._pid, self._clock, self._is_stopped = pid, clock, is_stopped
        self._was_stopped = False
        self._patience = START_SECONDS
        self._moved_at = clock()

    def moved(self) -> None:
        """The process has started, sent something, or has nothing to do."""
        self._patience = SILENCE_SECONDS
        self._moved_at = self._clock()

    def look(self) -> str | None:
        """What is wrong with the process; None: nothing yet. To be called `LOOK_SECONDS` apart."""
        was_stopped, self._was_stopped = self._was_stopped, self._is_stopped(self._pid)
        if was_stopped and self._was_stopped:
            return "was stopped (SIGSTOP)"
        seconds = self._clock() - self._moved_at
        return f"has said nothing for {seconds:.0f} s" if seconds > self._patience else None


@dataclass(slots=True)
class _Pending:
    """A grammar that is not compiled yet."""

    request: CompileRequest
    content: bytes
    """The request in msgpack."""
    number: int = 0
    """Of the job that compiles it; 0: it waits."""
    started_at: float = 0.0
    job_round: int = 0
    """How often it has exceeded its time: see `job_queue`."""
    num_deaths: int = 0
    was_stopped: bool = False


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
        self._pending: dict[int, _Pending] = {}
        self._queue = JobQueue()
        self._num_started = 0
        self._outgoing = bytearray()
        self._wake_up = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Tells the thread that there is something to do."""
        for descriptor in (self.event, self._wake_up):
            weakref.finalize(self, os.close, descriptor)
        self._process: subprocess.Popen[bytes] | None = None
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
        pending = _Pending(request, msgspec.msgpack.encode(request))
        with self._lock:
            self._ensure_thread()
            self._pending[request.job_id] = pending
            self._queue.add(request)
            os.eventfd_write(self._wake_up, 1)

    def cancel(self, job_id: int) -> None:
        """Cancel a job. No result comes of it, unless it is on its way already."""
        with self._lock:
            pending = self._pending.pop(job_id, None)
            if pending is not None:
                self._stop(pending)
                os.eventfd_write(self._wake_up, 1)

    def slow_jobs(self) -> list[int]:
        """Jobs that have exceeded their time, the slowest first, and the newest first among equals."""
        with self._lock:
            slow = [(pending.job_round, job_id) for job_id, pending in self._pending.items() if pending.job_round]
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

    def _ensure_thread(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="grammar-compiler", daemon=True)
            thread.start()  # it waits for the lock
            self._thread = thread

    def _run(self) -> None:
        """Keep a process alive. If that fails, all jobs get an error, and the next request starts it again."""
        crash_loop, error = CrashLoop(), "the grammar compiler cannot start; the server's log says why"
        try:
            while self._run_process(crash_loop):
                pass
        except Exception:
            logger.exception("the grammar compiler's thread failed")
            error = "the grammar compiler failed; the server's log says why"
        with self._lock:
            process, self._process, self._thread = self._process, None, None
            failed, self._pending, self._queue = [*self._pending], {}, JobQueue()
        if process is not None:
            process.kill()
            process.wait()
        if not self._closing.is_set():
            for job_id in failed:
                self._on_result(CompileResult(job_id, error=error, cacheable=False, is_our_fault=True))

    def _run_process(self, crash_loop: CrashLoop) -> bool:
        """Start the process and serve until it ends. Returns whether to start it again."""
        with self._lock:
            if self._closing.is_set():
                return False
            self._requeue()
            process = self._process = self._start()
        was_ready, error = self._serve(process)
        self._process = None
        if self._closing.is_set():
            return False
        delay = 0.0
        if error is None:
            how = process_state.how_it_ended(process.returncode)
            logger.warning("the grammar compiler %s; it is started again", how)
            delay = crash_loop.delay_after_death(was_ready)
            if crash_loop.is_tripped:
                error = f"it {how}, for the {crash_loop.num_deaths}th time in a row"
        if error is not None:
            logger.error("the grammar compiler cannot start: %s", error)
            return False
        self._closing.wait(delay)
        return True

    def _start(self) -> "subprocess.Popen[bytes]":
        # It forks, and so must not have threads.
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        module = "quire_engine.structured_output.compiler"
        return start_module(module, self._arguments, stdout=subprocess.PIPE, environment=threads)

    def _serve(self, process: "subprocess.Popen[bytes]") -> tuple[bool, str | None]:
        """Serve until the process ends. Returns whether it had started, and an error if it can never work."""
        assert process.stdin is not None
        assert process.stdout is not None
        was_ready, error = False, None
        try:
            self._on_start()
            for payload in self._payloads(process):
                if was_ready:
                    self._take(msgspec.msgpack.decode(payload, type=JobEnded))
                    continue
                was_ready = True
                ready = msgspec.msgpack.decode(payload, type=CompilerReady)
                error = ready.error if ready.error is not None else self._on_ready(ready.tokenizer_info)
                if error is not None:
                    break
        finally:
            process.kill()
            process.stdin.close()
            process.stdout.close()
            process.wait()
        self._count_deaths()
        return was_ready, error

    def _payloads(self, process: "subprocess.Popen[bytes]") -> Iterator[bytes]:
        """The process's messages, until it ends or hangs. Once there was one, jobs are started."""
        assert process.stdin is not None
        assert process.stdout is not None
        frames, watch = FrameReader(), CompilerWatch(process.pid)
        requests, results = process.stdin.fileno(), process.stdout.fileno()
        os.set_blocking(requests, False)
        poller = select.poll()
        poller.register(results, select.POLLIN)
        poller.register(self._wake_up, select.POLLIN)
        is_ready = False
        while True:
            if is_ready:
                self._end_overdue()
            with self._lock:
                is_idle = is_ready and not self._pending
                if is_ready:
                    self._start_jobs()
                poller.register(requests, select.POLLOUT if self._outgoing else 0)
            ready = [descriptor for descriptor, _ in poller.poll(None if is_idle else 1000 * LOOK_SECONDS)]
            if is_idle:
                watch.moved()  # only now: a silence begins with the first job, however long there was none
            if self._wake_up in ready:
                os.eventfd_read(self._wake_up)
            if requests in ready:
                self._write(requests)
            if results in ready:
                data = os.read(results, 1 << 20)
                if not data:
                    return
                for payload in frames.feed(data):
                    is_ready = True
                    yield payload
                    watch.moved()
            elif (trouble := watch.look()) is not None:
                logger.error("the grammar compiler %s", trouble)
                return

    def _write(self, requests: int) -> None:
        """Write what there is room for: a pipe holds less than a large schema."""
        with self._lock, contextlib.suppress(BlockingIOError, BrokenPipeError):  # its death shows in the results' pipe
            while self._outgoing:
                num_written = os.write(requests, self._outgoing[: 1 << 16])
                del self._outgoing[:num_written]

    def _take(self, ended: JobEnded) -> None:
        with self._lock:
            pending = next((one for one in self._pending.values() if one.number == ended.number), None)
            if pending is None:
                return  # it was killed
            request, pending.number = pending.request, 0
            self._queue.remove(request.job_id)
            exit_code = os.waitstatus_to_exitcode(ended.status)
            if exit_code == -signal.SIGPROF and pending.job_round < len(TRY_SECONDS):
                pending.job_round += 1
                self._queue.add(request, pending.job_round)
                return
        self._finish(
            msgspec.msgpack.decode(ended.result, type=CompileResult) if exit_code == 0 else _explain(request, exit_code)
        )

    def _finish(self, result: CompileResult) -> None:
        self._on_result(result)
        with self._lock:
            self._pending.pop(result.job_id, None)

    def _end_overdue(self) -> None:
        """Kill jobs that their alarm has not ended. The first time that is not the grammar's fault: it was stopped."""
        now, failed = time.monotonic(), []
        with self._lock:
            for pending in self._pending.values():
                if pending.number and now - pending.started_at > OVERDUE_SECONDS:
                    self._stop(pending)
                    if pending.was_stopped:
                        failed.append(pending.request)
                    else:
                        pending.was_stopped = True
                        self._queue.add(pending.request, pending.job_round)
        for request in failed:
            self._finish(_explain(request, -signal.SIGALRM))

    # -- jobs: with the lock -------------------------------------------------------------------------------------------

    def _start_jobs(self) -> None:
        has_suspects = any(pending.num_deaths for pending in self._pending.values())
        while not (has_suspects and self._queue.num_running) and (taken := self._queue.take_next()) is not None:
            self._begin(*taken)

    def _begin(self, request: CompileRequest, job_round: int) -> None:
        pending = self._pending[request.job_id]
        self._num_started += 1
        pending.number, pending.job_round, pending.started_at = self._num_started, job_round, time.monotonic()
        cpu_seconds = TRY_SECONDS[job_round] if job_round < len(TRY_SECONDS) else None
        self._outgoing += to_frame(StartJob(pending.number, cpu_seconds, pending.content))

    def _kill(self, pending: _Pending) -> None:
        if pending.number:
            self._outgoing += to_frame(KillJob(pending.number))
            pending.number = 0

    def _stop(self, pending: _Pending) -> None:
        self._kill(pending)
        self._queue.remove(pending.request.job_id)

    def _count_deaths(self) -> None:
        """Reject grammars that were being compiled too often when the process died."""
        with self._lock:
            for pending in self._pending.values():
                pending.num_deaths += pending.number > 0
            given_up = [pending.request for pending in self._pending.values() if pending.num_deaths >= MAX_DEATHS]
        for request in given_up:
            error = f"the grammar compiler died {MAX_DEATHS} times while it compiled this {request.kind}; simplify it"
            self._finish(CompileResult(request.job_id, error=error, cacheable=False))

    def _requeue(self) -> None:
        """For a new process: all grammars wait again, those with the most deaths last."""
        self._outgoing, self._queue = bytearray(), JobQueue()
        for pending in sorted(self._pending.values(), key=lambda pending: pending.num_deaths):
            pending.number = 0
            self._queue.add(pending.request, pending.job_round)


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
