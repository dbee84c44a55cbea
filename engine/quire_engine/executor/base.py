"""Executor: the seam between one engine core and its workers."""

from typing import Protocol

from quire_engine.messages import ModelRunnerOutput, SchedulerOutput

__all__ = ["Executor"]


class Executor(Protocol):
    """Runs steps on all ranks."""

    def determine_num_blocks(self) -> int:
        """KV blocks that every rank has room for."""
        ...

    def initialize_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache on every rank."""
        ...

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step to its end."""
        ...

    def sleep(self, level: int) -> None:
        """Give the KV cache's memory back on every rank, and with level 2 the weights' as well. No step may follow."""
        ...

    def wake_up(self) -> None:
        """Have again what `sleep` gave back: the weights from the checkpoint, the KV cache empty."""
        ...

    def shutdown(self) -> None:
        """End all workers. Idempotent."""
        ...
