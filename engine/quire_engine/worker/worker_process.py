"""The process of one rank: `python -m quire_engine.worker.worker_process`, started only by `MultiProcExecutor`.

::

    stdin                 one line of JSON (`WorkerArguments`), then open until the parent ends
    queue of calls        WorkerRequest, the same to all ranks
    queue of responses    WorkerResponse: one when ready, the output or the error of a step, one to every other call

With async scheduling the main thread begins steps, and a `Responder` waits for their results; it then sends all
answers, in the order of the calls. Other calls are made only while no step is in flight::

    main thread    begin 1 ─► begin 2 ─────────► begin 3 ─► …
    responder               wait for 1, send ─► wait for 2, send ─► …

When there is nothing to do the process blocks in poll and uses no CPU. SIGUSR1 writes every thread's stack to stderr.
"""

import faulthandler
import logging
import os
import queue
import signal
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import torch

from quire_engine.device.placement import on_device, prepare_device
from quire_engine.distributed import ParallelState
from quire_engine.distributed.lockstep_group import LockstepGroup
from quire_engine.distributed.shared_memory import AbortFlag, SharedMemoryCommunicator, SharedMemoryGroup
from quire_engine.errors import AbortedError, EngineDeadError, EngineError, is_failure
from quire_engine.ipc.message_queue import MessageReader, MessageWriter
from quire_engine.messages import (
    ExecuteModel,
    ForgetGroups,
    SchedulerOutput,
    Shutdown,
    StepNanoseconds,
    WorkerRequest,
    WorkerResponse,
)
from quire_engine.models.served import read_checkpoint
from quire_engine.system.child_process import die_with_parent, end_with_stdin
from quire_engine.system.log_lines import log_to_stderr
from quire_engine.system.memory import freeze_imported
from quire_engine.worker.arguments import WorkerArguments, rank_state
from quire_engine.worker.rank_board import RankBoard
from quire_engine.worker.submitted_step import StepClock, SubmittedStep
from quire_engine.worker.worker import Worker

logger = logging.getLogger(__name__)

T = TypeVar("T")

NUM_TIMED_STEPS = 128
MAX_BEGUN_STEPS = 4
"""Steps that may wait for their end on a rank: more than are ever in flight, so that only a slow rank blocks."""


@dataclass(slots=True)
class _BegunStep:
    """A step that the worker has taken, and what the responder needs for its answer."""

    request: WorkerRequest
    step: SubmittedStep
    began_at: float
    waited_seconds: float
    """Time waited for other ranks while it was begun."""
    end: torch.cuda.Event | None
    """Recorded after its GPU work; None if waiting for the step's result is enough."""


class Responder(Generic[T]):
    """A thread that sends answers one by one; at most `max_waiting` are queued. If `respond` raises, this process ends:
    the answer would never come."""

    def __init__(self, respond: Callable[[T], None], max_waiting: int) -> None:
        self._respond = respond
        self._answers: queue.Queue[T] = queue.Queue(max_waiting)
        threading.Thread(target=self._run, name="responder", daemon=True).start()

    def put(self, answer: T) -> None:
        """Queue an answer; blocks while the queue is full."""
        self._answers.put(answer)

    def wait_until_idle(self) -> None:
        self._answers.join()

    def _run(self) -> None:
        while True:
            answer = self._answers.get()
            try:
                self._respond(answer)
            except BaseException:
                logger.exception("the result of a step cannot be sent")
                os._exit(1)
            self._answers.task_done()


class WorkerProcess:
    """A worker with its two queues."""

    def __init__(self, arguments: WorkerArguments) -> None:
        config = arguments.config
        self._calls = MessageReader(arguments.calls, arguments.rank)
        self._responses = MessageWriter(arguments.responses)
        self._decoder = msgspec.msgpack.Decoder(WorkerRequest)
        self._encoder = msgspec.msgpack.Encoder()
        self._abort = AbortFlag(arguments.abort)
        self._groups: list[SharedMemoryCommunicator] = []
        self._expert_group: LockstepGroup | None = None
        self._step_nanoseconds: deque[int] = deque(maxlen=NUM_TIMED_STEPS)
        """Times of the last steps, without waits for other ranks: all ranks' steps end together, so only these show
        which rank is slow."""
        self._step_clock = StepClock()
        try:
            checkpoint = read_checkpoint(Path(config.model.model), config.model.model_impl)
            self._device = prepare_device(config, checkpoint.dtype, arguments.rank)
            with on_device(self._device):
                self._state = self._make_state(arguments)
                self._board = RankBoard(config, checkpoint.expert_shape, arguments.board)
                self._worker = Worker(
                    config, checkpoint, arguments.max_model_len, self._state, self._device, self._board
                )
        except BaseException as error:
            if not is_failure(error):
                raise
            known = isinstance(error, EngineError | ValueError | OSError)
            logger.log(logging.ERROR, "cannot start: %s", error if known else traceback.format_exc())
            self._send(self._failure(None, error))
            raise SystemExit(1) from None
        self._responder: Responder[WorkerResponse | _BegunStep] | None = None
        if config.async_scheduling(uses_gpu=self._device.type == "cuda"):
            self._responder = Responder(self._respond, MAX_BEGUN_STEPS)
        self._send(WorkerResponse(0))

    def _make_state(self, arguments: WorkerArguments) -> ParallelState:
        """Join the groups of this rank, in shared memory or at the meeting place."""
        parallel = arguments.config.parallel
        if arguments.meeting_place is not None:
            # Imported here because torch.distributed takes a while to import, and a single rank does not need it.
            from quire_engine.distributed.torch_distributed import initialize_parallel_state

            return initialize_parallel_state(
                rank=arguments.rank,
                tensor_parallel_size=parallel.tensor_parallel_size,
                pipeline_parallel_size=parallel.pipeline_parallel_size,
                init_method=arguments.meeting_place.init_method,
                device=self._device,
            )
        state = rank_state(parallel, arguments.rank)

        def join(group: SharedMemoryGroup | None, rank: int) -> SharedMemoryCommunicator | None:
            if group is None:
                return None
            self._groups.append(SharedMemoryCommunicator(group, rank, self._abort))
            return self._groups[-1]

        if arguments.expert_group is not None:
            first = parallel.data_parallel_rank * parallel.tensor_parallel_size
            self._expert_group = LockstepGroup(arguments.expert_group, first + state.tensor_rank)
        return replace(
            state,
            tensor_group=join(arguments.tensor_group, state.tensor_rank),
            pipeline_group=join(arguments.pipeline_group, state.stage),
            expert_group=self._expert_group,
        )

    def run(self) -> None:
        """Serve until `Shutdown` comes."""
        freeze_imported()
        while True:
            request = self._calls.read_with(self._decoder.decode)
            if self._responder is not None and not isinstance(request.call, ExecuteModel):
                self._responder.wait_until_idle()
            if isinstance(request.call, Shutdown):
                self._worker.close()
                return
            try:
                with on_device(self._device):
                    answer = self._call(request)
            except Exception as error:
                answer = self._failure(request, error)
            if self._responder is not None:
                self._responder.put(answer)
            else:
                self._respond(answer)

    def _call(self, request: WorkerRequest) -> "WorkerResponse | _BegunStep":
        result = 0
        match request.call:
            case ExecuteModel(scheduler_output=scheduler_output):
                return self._begin(request, scheduler_output)
            case StepNanoseconds():
                result = int(statistics.median(self._step_nanoseconds or (0,)))
            case ForgetGroups():
                for group in self._groups:
                    group.forget()
            case Shutdown():
                raise AssertionError("`run` returns")
            case call:
                result = self._worker.call(call)
        return WorkerResponse(request.call_id, result)

    def _begin(self, request: WorkerRequest, scheduler_output: SchedulerOutput) -> _BegunStep:
        began_at, waited_before = time.perf_counter(), self._waited_seconds
        step = self._worker.submit_model(scheduler_output)
        end = None
        if self._device.type == "cuda" and not self._state.is_output_rank:
            end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            end.record()
        return _BegunStep(request, step, began_at, self._waited_seconds - waited_before, end)

    def _respond(self, answer: "WorkerResponse | _BegunStep") -> None:
        if isinstance(answer, WorkerResponse):
            self._send(answer)
            return
        try:
            with on_device(self._device):
                output = answer.step.result()
                if answer.end is not None:
                    answer.end.synchronize()
        except Exception as error:
            self._send(self._failure(answer.request, error))
            return
        own_nanoseconds = max(int(1e9 * (self._step_clock.end(answer.began_at) - answer.waited_seconds)), 0)
        self._step_nanoseconds.append(own_nanoseconds)
        self._board.add_busy(self._state.rank, own_nanoseconds)
        if self._state.is_output_rank:
            self._send(WorkerResponse(answer.request.call_id, output=output))

    @property
    def _waited_seconds(self) -> float:
        elsewhere = 0.0 if self._expert_group is None else self._expert_group.waited_seconds
        return sum((group.waited_seconds for group in self._groups), elsewhere)

    def _failure(self, request: WorkerRequest | None, error: BaseException) -> WorkerResponse:
        """The response to the error of a request, or of the start if that is None, which is logged already. First
        releases the ranks that wait for this one."""
        self._abort.set()  # the executor clears it when all ranks have answered
        is_aborted = isinstance(error, AbortedError)
        is_step = request is not None and isinstance(request.call, ExecuteModel)
        what = "a step" if request is None or is_step else type(request.call).__name__
        if is_aborted:
            logger.info("%s: %s", what, error)
        elif request is not None:
            logger.error("%s failed", what, exc_info=error)
        name = type(error).__name__
        # A step's error goes to a log; that of any other call is raised again in the caller.
        known = isinstance(error, EngineDeadError if is_step else EngineError | ValueError | OSError)
        response = WorkerResponse(
            0 if request is None else request.call_id, error=str(error) if known else f"{name}: {error}"
        )
        response.error_type = name if known else ""
        response.is_aborted = is_aborted
        return response

    def _send(self, response: WorkerResponse) -> None:
        self._responses.write(self._encoder.encode(response))


def _end_with_parent(arguments: WorkerArguments) -> None:
    """End when the parent does, in two ways.

    A thread notices the end of stdin, but only if it gets to run; the kernel's signal reaches a stopped process, too.
    """
    end_with_stdin()
    if arguments.kill_with_parent:
        die_with_parent(arguments.parent_pid, signal.SIGKILL)


def main() -> None:
    """Entry point of the child process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # both may reach the whole group; the parent decides
        signal.signal(number, signal.SIG_IGN)
    arguments = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerArguments)
    prefix = f"quire worker[rank {arguments.rank}, %(process)d]"
    log_to_stderr(f"{prefix} %(levelname)s: %(message)s")
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _end_with_parent(arguments)
    WorkerProcess(arguments).run()
    if arguments.meeting_place is not None:
        from quire_engine.distributed.torch_distributed import shutdown_parallel_state

        shutdown_parallel_state()
    os._exit(0)  # for Python to take torch down takes half a second of processor time, and there is nothing to save


if __name__ == "__main__":
    main()
