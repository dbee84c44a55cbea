"""CompilerProcess: the engine core's end of the pipes to the grammar compiler.

Two threads of the engine core attend to it, so that the loop of steps never waits for a pipe: one writes requests (a
pipe holds less than a large schema), the other reads results. The reader owns the process: it starts it with the first
request, and starts it anew when it dies, with all that was not yet answered.
"""

import contextlib
import logging
import queue
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

import msgspec

from quire_engine.child_process import start_module
from quire_engine.structured_output.protocol import (
    CancelRequest,
    CompilerArguments,
    CompileRequest,
    CompileResult,
    CompilerReady,
    read_frame,
    to_frame,
)

__all__ = ["CompilerProcess"]

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 2
"""A grammar that was being compiled when the process died this often is not tried again."""
SHUTDOWN_SECONDS = 2.0


@dataclass(slots=True)
class _Pending:
    frame: bytes
    attempts: int = 0


class CompilerProcess:
    """Compiles in the background. `submit` never blocks; results come in the reader's thread.

    Args:
        arguments: for the process.
        on_start: called when the process is starting, which takes seconds that the caller can use.
        on_ready: gets the tokenizer's information, each time that the process has started; returns what is wrong with
            it, if anything.
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
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._closing = False

    @property
    def pid(self) -> int | None:
        """Process id, while there is one."""
        process = self._process
        return None if process is None else process.pid

    def submit(self, request: CompileRequest) -> None:
        """Have a grammar compiled; starts the process if there is none. When this raises, nothing was submitted."""
        frame = to_frame(request)
        with self._lock:
            if self._reader is None:
                reader = threading.Thread(target=self._run, name="grammar-compiler", daemon=True)
                reader.start()  # it waits for the lock
                self._reader = reader
            self._pending[request.job_id] = _Pending(frame)
            self._outbox.put(frame)

    def cancel(self, job_id: int) -> None:
        """Nobody waits for a job any more. No result comes of it, but for one that is on its way already."""
        with self._lock:
            if self._pending.pop(job_id, None) is not None:
                self._outbox.put(to_frame(CancelRequest(job_id)))

    def shutdown(self) -> None:
        """End the process and the threads. Idempotent."""
        with self._lock:
            self._closing = True
            process, reader = self._process, self._reader
        if process is not None:
            process.kill()  # it holds nothing worth saving, and its jobs end with their time limit at the latest
        if reader is not None and reader is not threading.current_thread():
            reader.join(SHUTDOWN_SECONDS)

    # -- the reader's thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Whatever goes wrong here, nobody is left waiting, and the next request starts anew."""
        try:
            self._keep_alive()
        except Exception as error:
            logger.exception("the grammar compiler's thread failed")
            with self._lock:
                process, self._process, self._reader = self._process, None, None
                failed, self._pending = {} if self._closing else self._pending, {}
            if process is not None:
                process.kill()
                process.wait()
            for job_id in failed:
                self._fail(job_id, f"the grammar compiler failed: {error!r}")

    def _keep_alive(self) -> None:
        """Keep a process alive for as long as there is something to compile or to wait for."""
        while True:
            with self._lock:
                if self._closing:
                    return
                self._resubmit()
                process = self._process = self._start()
            error = self._serve(process)
            with self._lock:
                if self._closing:
                    return
                self._process = None
                if error is None:
                    logger.warning("the grammar compiler died (exit code %s)", process.returncode)
                if error is not None or not self._pending:
                    self._reader = None  # the next request starts it again
                    failed, self._pending = self._pending, {}
                    break
        for job_id in failed:
            self._fail(job_id, f"the grammar compiler cannot start: {error}")

    def _resubmit(self) -> None:
        """A new outbox with what is not answered yet."""
        self._outbox = queue.SimpleQueue()
        for pending in self._pending.values():
            self._outbox.put(pending.frame)

    def _start(self) -> "subprocess.Popen[bytes]":
        # It forks, and so must not have threads.
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        return start_module("quire_engine.structured_output.compiler", stdout=subprocess.PIPE, environment=threads)

    def _serve(self, process: "subprocess.Popen[bytes]") -> str | None:
        """Pass everything on until the process ends. Returns why it cannot work at all, if so."""
        assert process.stdin is not None
        assert process.stdout is not None
        outbox = self._outbox
        writer = threading.Thread(target=_write, args=(process.stdin, outbox, self._arguments), daemon=True)
        writer.start()
        error = None
        try:
            self._on_start()
            payload = read_frame(process.stdout)
            if payload is not None:
                ready = msgspec.msgpack.decode(payload, type=CompilerReady)
                error = ready.error
                if error is None:
                    error = self._on_ready(ready.tokenizer_info)
            while payload is not None and error is None:
                payload = read_frame(process.stdout)
                if payload is not None:
                    self._take(msgspec.msgpack.decode(payload, type=CompileResult))
        finally:
            outbox.put(None)
            process.kill()
            writer.join()
            process.stdout.close()
            process.wait()
        self._count_attempts()
        return error

    def _take(self, result: CompileResult) -> None:
        with self._lock:
            known = result.job_id in self._pending
        if known:
            self._on_result(result)
            with self._lock:
                self._pending.pop(result.job_id, None)

    def _count_attempts(self) -> None:
        """Give up what has seen the process die too often."""
        with self._lock:
            for pending in self._pending.values():
                pending.attempts += 1
            given_up = [job_id for job_id, pending in self._pending.items() if pending.attempts >= MAX_ATTEMPTS]
            for job_id in given_up:
                del self._pending[job_id]
        for job_id in given_up:
            self._fail(job_id, "the grammar compiler died repeatedly")

    def _fail(self, job_id: int, error: str) -> None:
        self._on_result(CompileResult(job_id, error=error, cacheable=False, is_our_fault=True))


def _write(stdin: IO[bytes], outbox: "queue.SimpleQueue[bytes | None]", arguments: CompilerArguments) -> None:
    """The writer's thread."""
    with contextlib.suppress(OSError):  # it died: the reader sees that too
        stdin.write(to_frame(arguments))
        stdin.flush()
        while (frame := outbox.get()) is not None:
            stdin.write(frame)
            stdin.flush()
    with contextlib.suppress(OSError):
        stdin.close()
