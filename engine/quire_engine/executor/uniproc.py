"""UniProcExecutor: one worker, in the engine core's own process."""

import time

from quire_engine.config import EngineConfig
from quire_engine.messages import ModelRunnerOutput, SchedulerOutput
from quire_engine.models.checkpoint import CheckpointConfig
from quire_engine.worker import Worker
from quire_engine.worker.device import on_device, prepare_device

__all__ = ["UniProcExecutor"]


class UniProcExecutor:
    """Calls the worker directly."""

    def __init__(self, config: EngineConfig, checkpoint: CheckpointConfig, max_model_len: int) -> None:
        self._device = prepare_device(config, checkpoint, rank=0)
        with on_device(self._device):
            self._worker = Worker(config, checkpoint, max_model_len, device=self._device)
        self._submitted: SchedulerOutput | None = None
        self._busy_seconds = 0.0

    @property
    def max_concurrent_batches(self) -> int:
        """See `Executor`."""
        return 1

    @property
    def worker_pids(self) -> list[int]:
        """See `Executor`."""
        return []

    @property
    def death_descriptors(self) -> list[int]:
        """See `Executor`."""
        return []

    def check_health(self) -> None:
        """See `Executor`. It lives and dies with this process."""

    def determine_num_blocks(self) -> int:
        """See `Executor`."""
        with on_device(self._device):
            return self._worker.determine_num_blocks()

    def initialize_cache(self, num_blocks: int) -> None:
        """See `Executor`."""
        with on_device(self._device):
            self._worker.initialize_cache(num_blocks)

    def submit(self, scheduler_output: SchedulerOutput) -> None:
        """See `Executor`. It runs when it is collected: an error belongs there."""
        self._submitted = scheduler_output

    def collect(self) -> ModelRunnerOutput:
        """See `Executor`."""
        scheduler_output, self._submitted = self._submitted, None
        assert scheduler_output is not None
        began_at = time.perf_counter()
        with on_device(self._device):
            output = self._worker.execute_model(scheduler_output)
        self._busy_seconds += time.perf_counter() - began_at
        return output

    def rank_step_seconds(self) -> list[float | None]:
        """See `Executor`. Not known here."""
        return []

    def busy_seconds(self) -> list[float]:
        """See `Executor`."""
        return [self._busy_seconds]

    def sleep(self, level: int) -> None:
        """See `Executor`."""
        with on_device(self._device):
            self._worker.sleep(level)

    def wake_up(self) -> None:
        """See `Executor`."""
        with on_device(self._device):
            self._worker.wake_up()

    def shutdown(self) -> None:
        """See `Executor`."""
