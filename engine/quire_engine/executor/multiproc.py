"""MultiProcExecutor: one process per rank on this machine, with queues in shared memory between.

::

                         ┌─ calls: one queue, every rank reads all of it ──► rank 0, 1, …
    EngineCore ── executor
                         └─ responses: one queue per rank ◄───────────────── rank i

Of a step only the output rank tells the result; any rank may tell an error. Other calls are answered by every rank.
While it waits for an answer, the executor looks after the processes: one that ends or is stopped ends the wait at once.
"""

import collections
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from quire_engine.config import EngineConfig
from quire_engine.distributed import ParallelState
from quire_engine.errors import CheckpointError, EngineDeadError, EngineError
from quire_engine.executor.message_queue import MessageQueueHandle, MessageReader, MessageWriter
from quire_engine.messages import ModelRunnerOutput, SchedulerOutput, WorkerCall, WorkerResponse
from quire_engine.semaphore import Waiter, Watch
from quire_engine.worker.protocol import WorkerArguments

__all__ = ["MultiProcExecutor"]

logger = logging.getLogger(__name__)

READY = 0
"""The call that a worker answers without having been called: it is ready."""
SHUTDOWN_SECONDS = 3.0
"""How long the workers may take to end by themselves before they are killed."""
ERRORS: dict[str, type[Exception]] = {"CheckpointError": CheckpointError, "ValueError": ValueError, "OSError": OSError}
"""Errors at start-up that keep their class; all others become an EngineError."""


class MultiProcExecutor:
    """Starts the workers, tells them what to do, and puts their answers together."""

    def __init__(self, config: EngineConfig, max_model_len: int) -> None:
        self._config = config
        parallel = config.parallel
        self._output_rank = next(
            rank for rank in range(parallel.world_size)
            if ParallelState(
                rank=rank,
                tensor_parallel_size=parallel.tensor_parallel_size,
                pipeline_parallel_size=parallel.pipeline_parallel_size,
            ).is_output_rank
        )  # fmt: skip
        self._next_call_id = READY + 1
        self._submitted: collections.deque[int] = collections.deque()
        self._answers: dict[int, dict[int, WorkerResponse]] = {}
        self._stopped_ranks: set[int] = set()
        self._dead: EngineDeadError | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(WorkerResponse)
        self._processes: list[subprocess.Popen[bytes]] = []
        calls = MessageQueueHandle.create(parallel.world_size)
        responses = [MessageQueueHandle.create(1) for _ in range(parallel.world_size)]
        self._handles = [calls, *responses]
        self._pidfds: list[int] = []
        self._finalizer = weakref.finalize(self, _end, self._processes, self._handles, self._pidfds)
        try:
            for rank in range(parallel.world_size):
                self._start(rank, max_model_len, calls, responses[rank])
            watch = Watch(self._pidfds, self._check_workers)
            self._calls = MessageWriter(calls, watch)
            self._responses = [MessageReader(handle, 0, watch) for handle in responses]
            self._waiter = Waiter([reader.filled for reader in self._responses], watch)
            self._wait_for_all(READY)
        except BaseException:
            self._finalizer()
            raise

    @property
    def max_concurrent_batches(self) -> int:
        """See `Executor`."""
        return self._config.parallel.pipeline_parallel_size

    @property
    def worker_pids(self) -> list[int]:
        """See `Executor`."""
        return [process.pid for process in self._processes]

    def determine_num_blocks(self) -> int:
        """See `Executor`. The least of all ranks: a block is a block on each of them."""
        return min(self.collective_rpc("determine_num_blocks"))

    def initialize_cache(self, num_blocks: int) -> None:
        """See `Executor`."""
        self.collective_rpc("initialize_cache", num_blocks)

    def sleep(self, level: int) -> None:
        """See `Executor`."""
        self.collective_rpc("sleep", level)

    def wake_up(self) -> None:
        """See `Executor`."""
        self.collective_rpc("wake_up")

    def submit(self, scheduler_output: SchedulerOutput) -> None:
        """See `Executor`."""
        self._submitted.append(self._call("", scheduler_output=scheduler_output))

    def collect(self) -> ModelRunnerOutput:
        """See `Executor`."""
        call_id = self._submitted.popleft()
        self._wait_until(lambda: self._has_output(call_id))
        for earlier in [earlier for earlier in self._answers if earlier < call_id]:
            del self._answers[earlier]  # of a rank that failed after it had done its part
        answers = self._answers.pop(call_id)
        self._raise_errors(answers)
        output = answers[self._output_rank].output
        assert output is not None
        return output

    def collective_rpc(self, method: str, *arguments: int) -> list[int]:
        """Call a method of the worker on all ranks, and return their results by rank.

        Raises:
            EngineDeadError: a rank died or hangs.
            Exception: what it raised on a rank: a ValueError, CheckpointError or OSError, or else an EngineError.
        """
        call_id = self._call(method, arguments)
        self._wait_for_all(call_id)
        answers = self._answers.pop(call_id)
        self._raise_errors(answers)
        return [answers[rank].result for rank in range(len(self._processes))]

    def shutdown(self) -> None:
        """See `Executor`. Workers that do not end when they are asked to are killed."""
        if not self._finalizer.alive:
            return
        if self._dead is None:
            with contextlib.suppress(EngineDeadError, TimeoutError, RuntimeError):
                self._calls.write(self._encoder.encode(WorkerCall(READY, "shutdown")), timeout=0.1)
                deadline = time.monotonic() + SHUTDOWN_SECONDS
                for process in self._processes:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(max(deadline - time.monotonic(), 0))
        self._finalizer()
        self._dead = self._dead or EngineDeadError("the executor was shut down")
        self._calls.close()
        for reader in self._responses:
            reader.close()

    # -- calls and answers ---------------------------------------------------------------------------------------------

    def _call(self, method: str, arguments: Sequence[int] = (), scheduler_output: SchedulerOutput | None = None) -> int:
        if self._dead is not None:
            raise self._dead
        call_id = self._next_call_id
        self._next_call_id += 1
        self._calls.write(self._encoder.encode(WorkerCall(call_id, method, list(arguments), scheduler_output)))
        return call_id

    def _wait_for_all(self, call_id: int) -> None:
        """Until all ranks have answered; when starting, until one has failed."""
        self._wait_until(
            lambda: (
                len(self._answers.get(call_id, ())) == len(self._processes)
                or (call_id == READY and self._has_error(call_id))
            )
        )

    def _has_output(self, call_id: int) -> bool:
        return self._output_rank in self._answers.get(call_id, ()) or self._has_error(call_id)

    def _has_error(self, call_id: int) -> bool:
        return any(answer.error is not None for answer in self._answers.get(call_id, {}).values())

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        def look() -> bool:
            self._take_answers()
            return ready()

        if self._dead is not None:
            raise self._dead
        self._waiter.wait_until(look)

    def _take_answers(self) -> bool:
        """Take in what has come, without waiting. Returns whether anything has."""
        any_came = False
        for rank, reader in enumerate(self._responses):
            while reader.filled.can_acquire():
                response = reader.read_with(self._decoder.decode)
                self._answers.setdefault(response.call_id, {})[rank] = response
                any_came = True
        return any_came

    def _raise_errors(self, answers: dict[int, WorkerResponse]) -> None:
        """Raise the first cause among the errors, if there are any."""
        failed = [(rank, answer) for rank, answer in sorted(answers.items()) if answer.error is not None]
        if failed:
            rank, answer = next((item for item in failed if not item[1].is_aborted), failed[0])
            kind = ERRORS.get(answer.error_type)
            if kind is not None:
                raise kind(answer.error)
            raise EngineError(answer.error if len(self._processes) == 1 else f"rank {rank}: {answer.error}")

    # -- processes -----------------------------------------------------------------------------------------------------

    def _start(self, rank: int, max_model_len: int, calls: MessageQueueHandle, responses: MessageQueueHandle) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "quire_engine.worker.process"],
            stdin=subprocess.PIPE,
            stdout=2,  # stderr: stdout may carry somebody's protocol; logs do not belong there
            env={
                "GOMP_SPINCOUNT": "20000",  # as for the process of an engine core; see `core.client`
                **os.environ,
                "PYTHONSAFEPATH": "1",
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            },
            pass_fds=[*calls.descriptors(rank), *responses.descriptors(0)],
        )
        self._processes.append(process)
        self._pidfds.append(os.pidfd_open(process.pid))
        arguments = WorkerArguments(
            config=self._config,
            max_model_len=max_model_len,
            rank=rank,
            calls=calls,
            responses=responses,
            parent_pid=os.getpid(),
            kill_with_parent=threading.current_thread() is threading.main_thread(),
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # died already: the wait for its answer tells
            process.stdin.write(msgspec.json.encode(arguments) + b"\n")
            process.stdin.flush()

    def _check_workers(self) -> None:
        """Raise when a worker has ended, or is stopped at two looks in a row: one may be a terminal's Ctrl-Z."""
        dead = self._find_dead()
        if dead is not None and not self._take_answers():  # its last words may tell more
            self._dead = EngineDeadError(dead)
            raise self._dead

    def _find_dead(self) -> str | None:
        for rank, process in enumerate(self._processes):
            who = f"worker rank {rank} (process {process.pid})"
            code = process.poll()
            if code is not None:
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                return f"{who} {how}"
        stopped = {rank for rank, process in enumerate(self._processes) if _is_stopped(process.pid)}
        hung, self._stopped_ranks = stopped & self._stopped_ranks, stopped
        for rank in hung:
            return f"worker rank {rank} (process {self._processes[rank].pid}) is stopped (SIGSTOP)"
        return None


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def _end(processes: "list[subprocess.Popen[bytes]]", handles: list[MessageQueueHandle], descriptors: list[int]) -> None:
    """Kill what still runs, and close every descriptor."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
    for handle in handles:
        handle.close()
    for descriptor in descriptors:
        os.close(descriptor)
