"""The grammar compiler's process: `python -m quire_engine.structured_output.compiler`, started by `CompilerProcess`.

It loads the tokenizer once and then forks for every grammar. So each has a time and a memory limit that the kernel
enforces, even inside the library's C++; one that exceeds them, or crashes, affects no other, and nothing has to be
loaded again::

    engine core ◄── pipes ──► this process: reads requests, waits for jobs ◄── pipe ── job: one grammar, then exits
                                                                           ◄── pipe ── job: …

When the engine core ends, however it ends, stdin ends; then this process kills its jobs and ends too.
"""

import contextlib
import os
import selectors
import signal
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quire_engine.errors import is_failure
from quire_engine.structured_output.compiler_messages import (
    CancelRequest,
    CompilerArguments,
    CompileRequest,
    CompileResult,
    CompilerReady,
    FrameReader,
    JobState,
    to_frame,
)
from quire_engine.structured_output.job_queue import TRY_SECONDS, JobQueue
from quire_engine.system.child_process import die_with_parent
from quire_engine.system.memory import limit_memory_growth
from quire_engine.system.process_state import how_it_ended, is_stopped

if TYPE_CHECKING:
    from quire_engine.structured_output.compile_job import GrammarCompiler

COMPILE_SECONDS = 5.0
"""How long one grammar may take; usual schemas take milliseconds."""
OVERDUE_SECONDS = COMPILE_SECONDS + 1.0
"""A job that still runs after so long did not get its alarm: it was stopped (SIGSTOP)."""
COMPILE_MEMORY_BYTES = 1 << 30
"""Memory that one grammar may take on top of this process's own."""
NICENESS = 5
"""Niceness of jobs: steps come first when there are not enough cores."""
_OUT_OF_MEMORY = 2
"""Exit code of a job that reached its memory limit after it had compiled."""
_NO_MEMORY_TO_FAIL = 127
"""Exit code of the dynamic loader when C++ raises an exception and there is no memory left to load what that takes."""
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
"""Signals that end a job because of its grammar. Others come from outside."""


@dataclass(slots=True)
class _Job:
    """One forked compilation."""

    request: CompileRequest
    job_round: int
    pid: int
    started_at: float
    result: bytearray = field(default_factory=bytearray)
    is_over: bool = False
    """It was killed, and its end is not reported."""


class CompilerServer:
    """Reads requests, forks jobs, passes their results on. One thread, which never compiles itself.

    Args:
        compiler: what a job runs.
        output: descriptor that results are written to.
        frames: the reader that has read the first message, and perhaps the beginning of the next.
        payloads: further messages that it has read.
    """

    def __init__(self, compiler: "GrammarCompiler", output: int, frames: FrameReader, payloads: list[bytes]) -> None:
        self._compiler = compiler
        self._output = output
        self._selector = selectors.DefaultSelector()
        self._jobs: dict[int, _Job] = {}
        """By the descriptor that its result comes from."""
        self._queue = JobQueue()
        self._stopped: set[int] = set()
        """Jobs that were stopped once."""
        self._frames = frames
        self._take(payloads)

    def run(self, requests: int) -> None:
        """Serve until the descriptor `requests` ends."""
        self._selector.register(requests, selectors.EVENT_READ)
        while True:
            now = time.monotonic()
            self._end_overdue(now)
            for job_id in self._queue.make_way():
                self._kill(job_id)
                self._send(JobState(job_id, is_running=False, num_tries=len(TRY_SECONDS)))
            while (taken := self._queue.take_next()) is not None:
                self._start(*taken, now)
            for key, _ in self._selector.select(self._seconds_until_due()):
                if key.fd in self._jobs:
                    self._read_result(key.fd)
                elif not self._read_requests(key.fd):
                    for job in self._jobs.values():
                        os.kill(job.pid, signal.SIGKILL)
                    return

    def _seconds_until_due(self) -> float | None:
        """How long to wait when nothing comes; None: until something does."""
        now = time.monotonic()
        due = [job.started_at + OVERDUE_SECONDS - now for job in self._jobs.values() if not job.is_over]
        return max(min(due), 0.0) if due else None

    def _read_requests(self, descriptor: int) -> bool:
        """Take in what has come; False at the end."""
        data = os.read(descriptor, 1 << 20)
        self._take(self._frames.feed(data))
        return bool(data)

    def _take(self, payloads: list[bytes]) -> None:
        for payload in payloads:
            request = msgspec.msgpack.decode(payload, type=CompileRequest | CancelRequest)
            if isinstance(request, CompileRequest):
                self._queue.add(request)
            elif self._queue.remove(request.job_id):
                self._kill(request.job_id)

    def _end_overdue(self, now: float) -> None:
        """Kill a job that its alarm has not ended. If it was stopped, that is not its grammar's fault."""
        for job in list(self._jobs.values()):
            job_id = job.request.job_id
            if job.is_over or now - job.started_at < OVERDUE_SECONDS:
                continue
            again = is_stopped(job.pid) and job_id not in self._stopped
            self._queue.remove(job_id)
            self._kill(job_id)
            if again:
                self._stopped.add(job_id)
                self._queue.add(job.request, job.job_round)
                self._send(JobState(job_id, is_running=False, num_tries=job.job_round))
            else:
                self._stopped.discard(job_id)
                self._send(_took_too_long(job.request))

    def _kill(self, job_id: int) -> None:
        """Kill a job whose result is not wanted any more; its pipe is read to the end like any other's."""
        for job in self._jobs.values():
            if job.request.job_id == job_id and not job.is_over:
                job.is_over = True
                os.kill(job.pid, signal.SIGKILL)

    def _start(self, request: CompileRequest, job_round: int, now: float) -> None:
        self._send(JobState(request.job_id, is_running=True, num_tries=job_round))
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(0)  # else the engine core would not see that this process has died before its jobs did
                os.close(self._output)
                _limit_job(TRY_SECONDS[job_round] if job_round < len(TRY_SECONDS) else None)
                _write_all(writer, msgspec.msgpack.encode(self._compiler.compile(request)))
                os._exit(0)
            except MemoryError:
                os._exit(_OUT_OF_MEMORY)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(writer)
        self._jobs[reader] = _Job(request, job_round, pid, now)
        self._selector.register(reader, selectors.EVENT_READ)

    def _read_result(self, descriptor: int) -> None:
        job = self._jobs[descriptor]
        data = os.read(descriptor, 1 << 20)
        job.result += data
        if data:
            return
        self._selector.unregister(descriptor)
        del self._jobs[descriptor]
        os.close(descriptor)
        _, status = os.waitpid(job.pid, 0)
        if job.is_over:
            return
        job_id, job_round = job.request.job_id, job.job_round
        self._queue.remove(job_id)
        if job_round < len(TRY_SECONDS) and os.waitstatus_to_exitcode(status) == -signal.SIGPROF:
            self._queue.add(job.request, job_round + 1)
            self._send(JobState(job_id, is_running=False, num_tries=job_round + 1))
            return
        self._stopped.discard(job_id)
        if status == 0:
            _write_all(self._output, to_frame(bytes(job.result)))
        else:
            self._send(_explain(job.request, status))

    def _send(self, message: JobState | CompileResult) -> None:
        _write_all(self._output, to_frame(message))


def _limit_job(try_seconds: float | None) -> None:
    """Set limits of wall-clock time and memory, priority, no core file, and SIGKILL when the parent ends.

    A try also has a limit of CPU time, which does not depend on the machine's load; it ends with SIGPROF.
    """
    if try_seconds is not None:
        signal.setitimer(signal.ITIMER_PROF, try_seconds)
    os.nice(max(NICENESS - os.nice(0), 0))  # a process that was itself started nice may not lower its niceness
    die_with_parent(os.getppid(), signal.SIGKILL)
    signal.setitimer(signal.ITIMER_REAL, COMPILE_SECONDS)  # SIGALRM's default action ends the process, in C++ too
    limit_memory_growth(COMPILE_MEMORY_BYTES)


def _explain(request: CompileRequest, status: int) -> CompileResult:
    """The result of a job that died before it could report one."""
    exit_code = os.waitstatus_to_exitcode(status)
    if exit_code == -signal.SIGALRM:
        return _took_too_long(request)
    if exit_code not in (_OUT_OF_MEMORY, _NO_MEMORY_TO_FAIL) and -exit_code not in _CRASHES:
        error = f"the process that compiled the {request.kind} {how_it_ended(exit_code)}; the server's log may say why"
        return CompileResult(request.job_id, error=error, cacheable=False, is_our_fault=True)
    error = f"the {request.kind} is too complex: compiling it takes too much memory or nests too deeply; simplify it"
    return CompileResult(request.job_id, error=error)


def _took_too_long(request: CompileRequest) -> CompileResult:
    error = f"the {request.kind} takes more than {COMPILE_SECONDS:g} s to compile; simplify it"
    return CompileResult(request.job_id, error=error, cacheable=False)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def main() -> None:
    """Entry point of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the engine core decides
    output = os.dup(1)
    os.dup2(2, 1)  # prints must not go into our messages
    frames, payloads = FrameReader(), list[bytes]()
    while not payloads:
        data = os.read(0, 1 << 20)
        if not data:
            return
        payloads = frames.feed(data)
    arguments = msgspec.msgpack.decode(payloads.pop(0), type=CompilerArguments)
    os.nice(arguments.niceness)
    try:
        from quire_engine.frontend.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(Path(arguments.tokenizer_path))  # first: see `library`

        from quire_engine.structured_output.compile_job import GrammarCompiler

        compiler = GrammarCompiler(tokenizer, arguments)
    except BaseException as error:
        if not is_failure(error):
            raise
        _write_all(output, to_frame(CompilerReady(error=f"{type(error).__name__}: {error}")))
        return
    with contextlib.suppress(BrokenPipeError):  # the engine core has ended
        _write_all(output, to_frame(CompilerReady(compiler.tokenizer_info.serialize_json())))
        CompilerServer(compiler, output, frames, payloads).run(0)
    os._exit(0)  # libraries complain on stderr when Python takes them down, and there is nothing to save


if __name__ == "__main__":
    main()
