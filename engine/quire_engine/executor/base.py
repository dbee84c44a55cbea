"""Executor: the seam between one engine core and its workers."""

from typing import Protocol

from quire_engine.messages import ModelRunnerOutput, SchedulerOutput

__all__ = ["Executor"]


class Executor(Protocol):
    """Runs steps on all ranks.

    A step is submitted and collected; results come in the order of submission. An error that `collect` raises belongs
    to the oldest step, and the executor goes on, unless it is an `EngineDeadError`: then a rank is gone or hangs.
    """

    @property
    def max_concurrent_batches(self) -> int:
        """Steps that may be submitted before the first is collected: one per stage, or two with async scheduling."""
        ...

    @property
    def async_scheduling(self) -> bool:
        """Whether a step may be submitted that follows on from tokens of one that is not collected yet."""
        ...

    @property
    def worker_pids(self) -> list[int]:
        """Process ids by rank; empty when the worker is in this process."""
        ...

    @property
    def death_descriptors(self) -> list[int]:
        """Descriptors of which one becomes readable when a rank ends, for who waits for something else meanwhile."""
        ...

    def check_health(self) -> None:
        """Look after the ranks, without waiting.

        Raises:
            EngineDeadError: a rank died or hangs.
        """
        ...

    def determine_num_blocks(self) -> int:
        """KV blocks that every rank has room for."""
        ...

    def initialize_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache on every rank."""
        ...

    def submit(self, scheduler_output: SchedulerOutput) -> None:
        """Begin a step."""
        ...

    def collect(self) -> ModelRunnerOutput:
        """The result of the oldest step that was submitted and not collected; waits for it.

        Raises:
            EngineDeadError: a rank died or hangs; nothing more can be done with this executor but `shutdown`.
            AbortedError: the step failed because of another one in flight.
            Exception: the step failed.
        """
        ...

    def rank_step_seconds(self) -> list[float | None]:
        """Median time of each rank's own part of its last steps, without waits for others; empty where not known."""
        ...

    def busy_seconds(self) -> list[float]:
        """How long each rank has computed steps since it started, without waits for others; empty where not known."""
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
