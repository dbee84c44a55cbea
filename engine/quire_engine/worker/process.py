"""The process of one rank: `python -m quire_engine.worker.process`, started by `MultiProcExecutor` alone.

::

    stdin                 one line of JSON (`WorkerArguments`), then open for as long as the parent lives
    queue of calls        WorkerCall, the same to all ranks
    queue of responses    WorkerResponse: one when ready, one per method called, and of steps the output or the error

When there is nothing to do it blocks in poll and uses no CPU. SIGUSR1 writes every thread's stack to stderr.
"""

import contextlib
import ctypes
import faulthandler
import gc
import logging
import os
import signal
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from quire_engine.distributed import ParallelState
from quire_engine.distributed.shared_memory import (
    AbortedError,
    AbortFlag,
    SharedMemoryCommunicator,
    SharedMemoryGroup,
)
from quire_engine.errors import EngineError
from quire_engine.executor.message_queue import MessageReader, MessageWriter
from quire_engine.messages import WorkerCall, WorkerResponse
from quire_engine.models.checkpoint import CheckpointConfig
from quire_engine.worker.busy_time import BusyTime
from quire_engine.worker.protocol import WorkerArguments
from quire_engine.worker.worker import Worker

__all__ = ["WorkerProcess"]

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
NUM_TIMED_STEPS = 128


class WorkerProcess:
    """A worker between its two queues."""

    def __init__(self, arguments: WorkerArguments) -> None:
        self._calls = MessageReader(arguments.calls, arguments.rank)
        self._responses = MessageWriter(arguments.responses)
        self._decoder = msgspec.msgpack.Decoder(WorkerCall)
        self._encoder = msgspec.msgpack.Encoder()
        self._abort = AbortFlag(arguments.abort)
        self._busy_time = BusyTime(arguments.config.parallel.world_size, arguments.busy_time)
        self._groups: list[SharedMemoryCommunicator] = []
        self._step_nanoseconds: deque[int] = deque(maxlen=NUM_TIMED_STEPS)
        """Of the last steps, without waits for other ranks: all ranks' steps end together, but one is the slow one."""
        self._state = self._make_state(arguments)
        try:
            checkpoint = CheckpointConfig.from_folder(Path(arguments.config.model.model))
            self._worker = Worker(arguments.config, checkpoint, arguments.max_model_len, self._state)
        except Exception as error:
            known = isinstance(error, EngineError | ValueError | OSError)
            logger.log(logging.ERROR, "cannot start: %s", error if known else traceback.format_exc())
            self._fail(WorkerCall(0, "start"), error)
            raise SystemExit(1) from None
        self._send(WorkerResponse(0))

    def _make_state(self, arguments: WorkerArguments) -> ParallelState:
        parallel = arguments.config.parallel
        state = ParallelState(
            rank=arguments.rank,
            tensor_parallel_size=parallel.tensor_parallel_size,
            pipeline_parallel_size=parallel.pipeline_parallel_size,
        )

        def join(group: SharedMemoryGroup | None, rank: int) -> SharedMemoryCommunicator | None:
            if group is None:
                return None
            self._groups.append(SharedMemoryCommunicator(group, rank, self._abort))
            return self._groups[-1]

        return replace(
            state,
            tensor_group=join(arguments.tensor_group, state.tensor_rank),
            pipeline_group=join(arguments.pipeline_group, state.stage),
        )

    def run(self) -> None:
        """Serve until told to stop."""
        gc.freeze()  # a full collection would walk all that the imports brought: 0.15 s in which no token comes
        while True:
            call = self._calls.read_with(self._decoder.decode)
            if call.method == "shutdown":
                return
            try:
                self._answer(call)
            except AbortedError as error:
                logger.info("%s: %s", call.method or "a step", error)
                self._fail(call, error)
            except Exception as error:
                logger.exception("%s failed", call.method or "a step")
                self._fail(call, error)

    def _answer(self, call: WorkerCall) -> None:
        if call.scheduler_output is not None:
            began_at, waited_before = time.perf_counter(), self._waited_seconds
            output = self._worker.execute_model(call.scheduler_output)
            own_seconds = time.perf_counter() - began_at - (self._waited_seconds - waited_before)
            own_nanoseconds = max(int(1e9 * own_seconds), 0)
            self._step_nanoseconds.append(own_nanoseconds)
            self._busy_time.add(self._state.rank, own_nanoseconds)
            if self._state.is_output_rank:
                self._send(WorkerResponse(call.call_id, output=output))
            return
        methods: dict[str, Callable[..., int | None]] = {
            "determine_num_blocks": self._worker.determine_num_blocks,
            "initialize_cache": self._worker.initialize_cache,
            "sleep": self._worker.sleep,
            "wake_up": self._worker.wake_up,
            "forget": self._forget,
            "step_nanoseconds": lambda: int(statistics.median(self._step_nanoseconds or (0,))),
        }
        result = methods[call.method](*call.arguments)
        self._send(WorkerResponse(call.call_id, result or 0))

    @property
    def _waited_seconds(self) -> float:
        """What other ranks have cost this one so far."""
        return sum(group.waited_seconds for group in self._groups)

    def _forget(self) -> None:
        """The executor is about to make the groups new."""
        for group in self._groups:
            group.forget()

    def _fail(self, call: WorkerCall, error: Exception) -> None:
        self._abort.set()  # before the answer: when all ranks have answered, the executor lowers it
        name = type(error).__name__
        # Of a method the caller gets the error as if it had been called there; of a step it is for a log.
        known = call.method != "" and isinstance(error, EngineError | ValueError | OSError)
        response = WorkerResponse(call.call_id, error=str(error) if known else f"{name}: {error}")
        response.error_type = name if known else ""
        response.is_aborted = isinstance(error, AbortedError)
        self._send(response)

    def _send(self, response: WorkerResponse) -> None:
        self._responses.write(self._encoder.encode(response))


def _die_with_parent(arguments: WorkerArguments) -> None:
    """End when the parent does, in two ways.

    The parent holds the other end of stdin and never writes to it again: its end means that the parent is gone. That
    needs a thread which gets to run; the kernel's signal reaches a process that is stopped, too.
    """

    def wait_for_end_of_stdin() -> None:
        while os.read(0, 4096):
            pass
        os._exit(0)

    threading.Thread(target=wait_for_end_of_stdin, name="die-with-parent", daemon=True).start()
    if arguments.kill_with_parent:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != arguments.parent_pid:
            os._exit(0)


def main() -> None:
    """Entry point of the child process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # both may reach the whole group; the parent decides
        signal.signal(number, signal.SIG_IGN)
    arguments = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerArguments)
    prefix = f"quire worker[rank {arguments.rank}, %(process)d]"
    logging.basicConfig(level=logging.INFO, format=f"{prefix} %(levelname)s: %(message)s")
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _die_with_parent(arguments)
    WorkerProcess(arguments).run()


if __name__ == "__main__":
    main()
