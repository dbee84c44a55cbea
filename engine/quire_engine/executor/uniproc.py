"""UniProcExecutor: one worker, in the engine core's own process."""

import gc
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from quire_engine.config import EngineCoreConfig
from quire_engine.device.placement import on_device, prepare_device
from quire_engine.distributed import ParallelState
from quire_engine.distributed.lockstep_group import LockstepGroup
from quire_engine.errors import EngineDeadError
from quire_engine.executor.base import Executor
from quire_engine.ipc.lockstep import LockstepHandle
from quire_engine.messages import ModelRunnerOutput, SchedulerOutput, WorkerCall
from quire_engine.models import ServedCheckpoint
from quire_engine.system.memory import trim_heap
from quire_engine.worker import Worker
from quire_engine.worker.rank_board import RankBoard
from quire_engine.worker.submitted_step import StepClock, SubmittedStep


@dataclass(slots=True)
class _StepAhead:
    """A step that began when it was submitted, or failed to."""

    began_at: float
    step: SubmittedStep | Exception


class UniProcExecutor(Executor):
    """Calls the worker directly.

    With async scheduling a step begins when it is submitted, else when it is collected. `collect` raises its error
    either way.
    """

    def __init__(
        self,
        config: EngineCoreConfig,
        checkpoint: ServedCheckpoint,
        max_model_len: int,
        expert_group: LockstepHandle | None = None,
    ) -> None:
        self._device = prepare_device(config, checkpoint.dtype, rank=0)
        self._expert_group = None
        if expert_group is not None:
            self._expert_group = LockstepGroup(expert_group, config.parallel.data_parallel_rank)
        self.board = board = RankBoard(config, checkpoint.expert_shape)
        parallel = ParallelState(expert_group=self._expert_group)
        try:
            with on_device(self._device):
                self._the_worker: Worker | None = Worker(
                    config, checkpoint, max_model_len, parallel, self._device, board
                )
        except BaseException:
            board.close()
            raise
        self.async_scheduling = config.async_scheduling(uses_gpu=self._device.type == "cuda")
        self._submitted: deque[SchedulerOutput | _StepAhead] = deque()
        self._step_clock = StepClock()
        self._busy_seconds = 0.0

    @property
    def _worker(self) -> Worker:
        if self._the_worker is None:
            raise EngineDeadError("the engine was shut down")
        return self._the_worker

    @property
    def clock(self) -> Callable[[], float]:
        return self._worker.clock

    def submit(self, scheduler_output: SchedulerOutput) -> None:
        self._submitted.append(self._begin(scheduler_output) if self.async_scheduling else scheduler_output)

    def collect(self) -> ModelRunnerOutput:
        submitted = self._submitted.popleft()
        begun = self._begin(submitted) if isinstance(submitted, SchedulerOutput) else submitted
        try:
            if isinstance(begun.step, Exception):
                raise begun.step
            with on_device(self._device):
                return begun.step.result()
        finally:
            self._busy_seconds += self._step_clock.end(begun.began_at)

    def _begin(self, scheduler_output: SchedulerOutput) -> _StepAhead:
        began_at = time.perf_counter()
        try:
            with on_device(self._device):
                return _StepAhead(began_at, self._worker.submit_model(scheduler_output))
        except Exception as error:
            return _StepAhead(began_at, error)

    def collective_rpc(self, call: WorkerCall) -> list[int]:
        with on_device(self._device):
            return [self._worker.call(call)]

    def busy_seconds(self) -> list[float]:
        waited = 0.0 if self._expert_group is None else self._expert_group.waited_seconds
        return [self._busy_seconds - waited]

    def shutdown(self) -> None:
        """Frees the weights, the KV cache, captured graphs or recordings, and steps in flight."""
        if self._the_worker is None:
            return
        self._the_worker.close()
        self._the_worker = None
        self._submitted.clear()
        if self.board is not None:
            self.board.close()
            self.board = None
        gc.collect()  # there are cycles of references
        trim_heap()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
