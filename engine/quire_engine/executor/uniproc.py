"""UniProcExecutor: one worker, in the engine core's own process."""

from quire_engine.config import EngineConfig
from quire_engine.messages import ModelRunnerOutput, SchedulerOutput
from quire_engine.models.checkpoint import CheckpointConfig
from quire_engine.worker import Worker

__all__ = ["UniProcExecutor"]


class UniProcExecutor:
    """Calls the worker directly."""

    def __init__(self, config: EngineConfig, checkpoint: CheckpointConfig, max_model_len: int) -> None:
        self._worker = Worker(config, checkpoint, max_model_len)

    def determine_num_blocks(self) -> int:
        """See `Executor`."""
        return self._worker.determine_num_blocks()

    def initialize_cache(self, num_blocks: int) -> None:
        """See `Executor`."""
        self._worker.initialize_cache(num_blocks)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """See `Executor`."""
        return self._worker.execute_model(scheduler_output)

    def sleep(self, level: int) -> None:
        """See `Executor`."""
        self._worker.sleep(level)

    def wake_up(self) -> None:
        """See `Executor`."""
        self._worker.wake_up()

    def shutdown(self) -> None:
        """See `Executor`."""
