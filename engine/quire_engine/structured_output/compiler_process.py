"""CompilerProcess: the engine core's end of the pipes to the grammar compiler.

Two threads of the engine core use it, so that the loop of steps never waits for a pipe: one writes requests (a pipe
holds less than a large schema), the other reads results. The reader owns the process: it starts it, watches it while
something is expected of it (`compiler_watch`), and starts it again when it has died, or was killed because it was
stopped or hung, with all requests that were not answered yet.

A death counts against a grammar only if it was being compiled. After one such death it is sent again when no other
grammar with a death is being compiled, so that one which really kills the process is soon the only one; at the
`MAX_DEATHS`-th it is refused.
"""

import contextlib
import logging
import os
import queue
import select
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO

import msgspec

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
from quire_engine.structured_output.compiler_watch import LOOK_SECONDS, CompilerWatch
from quire_engine.system.child_process import start_module
from quire_engine.system.crash_loop import CrashLoop
from quire_engine.system.process_state import how_it_ended

logger = logging.getLogger(__name__)

MAX_DEATHS = 3
"""A grammar that was being compiled when the process died this often is not tried again."""
SHUTDOWN_SECONDS = 2.0


@dataclass(slots=True)
class _Pending:
    request: CompileRequest
    frame: bytes
    is_running: bool = False
    num_tries: int = 0
    num_deaths: int = 0


class CompilerProcess:
    """Compiles in the background. `submit` never blocks; results come in the reader's thread.

    Args:
        arguments: for the process.
        on_start: called while the process starts, which takes seconds that the caller can use.
        on_ready: gets the tokenizer's information each time that the process has started; returns an error, if any.
        on_result: gets each result.
    """

    def __init__(
        self,
        arguments: CompilerArguments,
        on_start: Callable[[], None],
        on_ready: Callable[[str], str | None],
        on_result: Callable[[CompileResult], None],
    ) -> None:
        self._arguments = arguments
        self._on_start = on_start
        self._on_ready = on_ready
        self._on_result = on_result
        self._lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._suspect: int | None = None
        """The one job that was sent of those with a death."""
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._wake_up = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Tells the reader that something is expected now."""
        weakref.finalize(self, os.close, self._wake_up)
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._keeps_warm = False
        self._closing = threading.Event()

    @property
    def pid(self) -> int | None:
        """Process id, while there is one."""
        process = self._process
        return None if process is None else process.pid

    def start(self) -> None:
        """Start the process before there is anything to compile, and again whenever it dies."""
        with self._lock:
            self._keeps_warm = True
            self._ensure_reader()

    def submit(self, request: CompileRequest) -> None:
        """Have a grammar compiled; starts the process if there is none. When this raises, nothing was submitted."""
        frame = to_frame(request)
        with self._lock:
            self._ensure_reader()
            self._pending[request.job_id] = _Pending(request, frame)
            self._outbox.put(frame)
            os.eventfd_write(self._wake_up, 1)

    def cancel(self, job_id: int) -> None:
        """Cancel a job. No result comes of it, unless it is on its way already."""
        with self._lock:
            if self._pending.pop(job_id, None) is not None:
                self._outbox.put(to_frame(CancelRequest(job_id)))
                self._send_next_suspect(job_id)

    def slow_jobs(self) -> list[int]:
        """Jobs that have exceeded their time, the slowest first, and the newest first among equals."""
        with self._lock:
            slow = [(pending.num_tries, job_id) for job_id, pending in self._pending.items() if pending.num_tries]
        return [job_id for _, job_id in sorted(slow, reverse=True)]

    def shutdown(self) -> None:
        """End the process and the threads. Idempotent."""
        self._closing.set()
        with self._lock:
            process, reader = self._process, self._reader
        if process is not None:
            process.kill()  # it has no state to save, and its jobs end with their time limit at the latest
        if reader is not None and reader is not threading.current_thread():
            reader.join(SHUTDOWN_SECONDS)

    # -- the reader's thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """If anything fails here, all jobs get an error, and the next request starts the process again."""
        try:
            self._keep_alive()
        except Exception:
            logger.exception("the grammar compiler's thread failed")
            with self._lock:
                process, self._process, self._reader = self._process, None, None
                failed, self._pending = {} if self._closing.is_set() else self._pending, {}
            if process is not None:
                process.kill()
                process.wait()
            for job_id in failed:
                self._fail(job_id, "the grammar compiler failed; the server's log says why")

    def _keep_alive(self) -> None:
        """Keep a process alive for as long as there is something to compile, or always when it is to be warm."""
        crash_loop = CrashLoop()
        while True:
            with self._lock:
                if self._closing.is_set():
                    return
                self._resubmit()
                process = self._process = self._start()
            was_ready, error = self._serve(process)
            delay = 0.0
            with self._lock:
                if self._closing.is_set():
                    return
                self._process = None
                if error is None:
                    logger.warning("the grammar compiler %s; it is started again", how_it_ended(process.returncode))
                    delay = crash_loop.delay_after_death(was_ready)
                    if crash_loop.is_tripped:
                        error = (
                            f"it {how_it_ended(process.returncode)}, for the {crash_loop.num_deaths}th time in a row"
                        )
                if error is not None or not (self._pending or self._keeps_warm):
                    self._reader = None  # the next request starts it again
                    failed, self._pending = self._pending, {}
                    break
            self._closing.wait(delay)
        if error is not None:
            logger.error("the grammar compiler cannot start: %s", error)
        for job_id in failed:
            self._fail(job_id, "the grammar compiler cannot start; the server's log says why")

    def _ensure_reader(self) -> None:
        if self._reader is None:
            reader = threading.Thread(target=self._run, name="grammar-compiler", daemon=True)
            reader.start()  # it waits for the lock
            self._reader = reader

    def _resubmit(self) -> None:
        """Make a new outbox with all requests that are not answered yet."""
        self._outbox = queue.SimpleQueue()
        self._suspect = None
        for pending in self._pending.values():
            pending.is_running = False
            if not pending.num_deaths:
                self._outbox.put(pending.frame)
        self._send_next_suspect(None)

    def _send_next_suspect(self, ended: int | None) -> None:
        """If that job was the suspect, send the next one: that with the fewest deaths."""
        if self._suspect != ended:
            return
        suspects = [pending for pending in self._pending.values() if pending.num_deaths]
        suspect = min(suspects, key=lambda pending: pending.num_deaths, default=None)
        self._suspect = None if suspect is None else suspect.request.job_id
        if suspect is not None:
            self._outbox.put(suspect.frame)

    def _start(self) -> "subprocess.Popen[bytes]":
        # It forks, and so must not have threads.
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        return start_module("quire_engine.structured_output.compiler", stdout=subprocess.PIPE, environment=threads)

    def _serve(self, process: "subprocess.Popen[bytes]") -> tuple[bool, str | None]:
        """Serve until the process ends. Returns whether it had started, and an error if it can never work."""
        assert process.stdin is not None
        assert process.stdout is not None
        outbox = self._outbox
        writer = threading.Thread(target=_write, args=(process.stdin, outbox, self._arguments), daemon=True)
        writer.start()
        was_ready, error = False, None
        try:
            self._on_start()
            for payload in self._payloads(process):
                if not was_ready:
                    was_ready = True
                    ready = msgspec.msgpack.decode(payload, type=CompilerReady)
                    error = ready.error if ready.error is not None else self._on_ready(ready.tokenizer_info)
                    if error is not None:
                        break
                else:
                    self._take(msgspec.msgpack.decode(payload, type=JobState | CompileResult))
        finally:
            outbox.put(None)
            process.kill()
            writer.join()
            process.stdout.close()
            process.wait()
        self._count_deaths()
        return was_ready, error

    def _payloads(self, process: "subprocess.Popen[bytes]") -> Iterator[bytes]:
        """The process's messages, until it ends or hangs."""
        assert process.stdout is not None
        frames, watch = FrameReader(), CompilerWatch(process.pid)
        output = process.stdout.fileno()
        poller = select.poll()
        poller.register(output, select.POLLIN)
        poller.register(self._wake_up, select.POLLIN)
        was_ready = False
        while True:
            is_idle = was_ready and not self._pending
            ready = poller.poll(None if is_idle else 1000 * LOOK_SECONDS)
            if is_idle:
                watch.moved()  # only now: a silence begins with the first job, however long there was none
            descriptors = [descriptor for descriptor, _ in ready]
            if self._wake_up in descriptors:
                os.eventfd_read(self._wake_up)
            if output in descriptors:
                data = os.read(output, 1 << 20)
                if not data:
                    return
                for payload in frames.feed(data):
                    was_ready = True
                    yield payload
                    watch.moved()
            elif (trouble := watch.look()) is not None:
                logger.error("the grammar compiler %s", trouble)
                return

    def _take(self, message: JobState | CompileResult) -> None:
        with self._lock:
            pending = self._pending.get(message.job_id)
            if pending is not None and isinstance(message, JobState):
                pending.is_running, pending.num_tries = message.is_running, message.num_tries
        if pending is not None and isinstance(message, CompileResult):
            self._on_result(message)
            with self._lock:
                self._pending.pop(message.job_id, None)
                self._send_next_suspect(message.job_id)

    def _count_deaths(self) -> None:
        """Refuse grammars that were being compiled too often when the process died."""
        with self._lock:
            for pending in self._pending.values():
                pending.num_deaths += pending.is_running
            given_up = [pending.request for pending in self._pending.values() if pending.num_deaths >= MAX_DEATHS]
            for request in given_up:
                del self._pending[request.job_id]
        for request in given_up:
            error = f"the grammar compiler died {MAX_DEATHS} times while it compiled this {request.kind}; simplify it"
            self._on_result(CompileResult(request.job_id, error=error, cacheable=False))

    def _fail(self, job_id: int, error: str) -> None:
        self._on_result(CompileResult(job_id, error=error, cacheable=False, is_our_fault=True))


def _write(stdin: IO[bytes], outbox: "queue.SimpleQueue[bytes | None]", arguments: CompilerArguments) -> None:
    """The writer's thread."""
    with contextlib.suppress(OSError):  # it died, which the reader notices, too
        stdin.write(to_frame(arguments))
        stdin.flush()
        while (frame := outbox.get()) is not None:
            stdin.write(frame)
            stdin.flush()
    with contextlib.suppress(OSError):
        stdin.close()
