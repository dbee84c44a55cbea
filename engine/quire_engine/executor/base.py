"""Executor: the seam between one engine core and its workers."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from quire_engine.messages import (
    DetermineNumBlocks,
    InitializeCache,
    ModelRunnerOutput,
    SchedulerOutput,
    WorkerCall,
)
from quire_engine.worker.rank_board import RankBoard

Int64Array: TypeAlias = npt.NDArray[np.int64]


class Executor(ABC):
    """Runs steps on all ranks.

    A step is submitted and collected; results come in the order of submission. An error that `collect` raises belongs
    to the oldest step, and the executor goes on, unless it is an `EngineDeadError`: then a rank is gone or hangs.

    Attributes:
        async_scheduling: whether a step may be submitted that continues tokens of a step that is not collected yet.
        num_stages: of the model.
        board: the ranks' figures; None if they share no memory with this process, or have ended.
    """

    async_scheduling: bool
    num_stages: int = 1
    board: RankBoard | None = None

    @property
    def max_concurrent_batches(self) -> int:
        """Steps that may be submitted before the first is collected: one per stage, or two with async scheduling."""
        return 2 if self.async_scheduling else self.num_stages

    @abstractmethod
    def submit(self, scheduler_output: SchedulerOutput) -> None:
        """Begin a step."""

    @abstractmethod
    def collect(self) -> ModelRunnerOutput:
        """The result of the oldest step that was submitted and not collected; waits for it.

        Raises:
            EngineDeadError: a rank died or hangs; nothing more can be done with this executor but `shutdown`.
            AbortedError: the step failed because of another one in flight.
            Exception: the step failed.
        """

    @abstractmethod
    def collective_rpc(self, call: WorkerCall) -> list[int]:
        """Call all ranks between two steps, and return their answers by rank (`Worker.call`).

        Raises:
            EngineDeadError: a rank died or hangs.
            Exception: what it raised on a rank.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """End all workers. Idempotent."""

    def determine_num_blocks(self) -> int:
        """KV blocks that every rank has room for: the minimum, as each block needs memory on all ranks."""
        return min(self.collective_rpc(DetermineNumBlocks()))

    def initialize_cache(self, num_blocks: int) -> int:
        """Allocate the KV cache on every rank. Returns how many bytes of the machine's memory it may take."""
        return sum(self.collective_rpc(InitializeCache(num_blocks)))

    @property
    def clock(self) -> Callable[[], float]:
        """Seconds, to compare the costs of steps. Where the thread that submits a step also computes it, this is its
        CPU time, so that other programs on the machine do not count."""
        return time.perf_counter

    # -- of ranks with processes that this one watches -----------------------------------------------------------------

    @property
    def worker_pids(self) -> list[int]:
        """Process ids by rank; empty if there are none, or they may be on other machines."""
        return []

    @property
    def death_descriptors(self) -> list[int]:
        """Descriptors, one of which becomes readable when a rank ends."""
        return []

    def check_health(self) -> None:  # noqa: B027  # by default there is nothing to check
        """Check the ranks, without waiting.

        Raises:
            EngineDeadError: a rank died or hangs.
        """

    def rank_step_seconds(self) -> list[float | None]:
        """Median time of each rank's own part of its last steps, without waits for others; empty if unknown."""
        return []

    def busy_seconds(self) -> list[float]:
        """Time that each rank has computed steps since it started, without waits for others; empty if unknown."""
        return [] if self.board is None else self.board.busy_seconds()

    def expert_tokens(self) -> Int64Array | None:
        """[layers, experts], the number of tokens sent to each expert so far; None if unknown, or without experts."""
        return None if self.board is None or self.board.expert_tokens is None else self.board.expert_tokens.copy()
