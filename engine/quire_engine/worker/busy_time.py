"""BusyTime: how long each rank has computed so far, in memory that the ranks share with whoever asks.

::

    byte  0               64              128
          │ ns of rank 0  │ ns of rank 1  │ …      uint64 each, on a cache line of its own, written by its rank alone

Waits for other ranks are not in it, but for those of GPUs, which wait inside of kernels. All ranks' steps end together,
and take as long as the slowest rank's; this is what tells which one that is. Memory, and not a message: no step waits
for it, and it can be read of a rank that hangs.
"""

import os
import time

from quire_engine.ipc.semaphore import WORD_BYTES, SharedMemory

__all__ = ["BusyTime", "StepClock"]


class StepClock:
    """Times the steps of a rank, each of which may begin before the one before has ended: no second counts twice."""

    def __init__(self) -> None:
        self._last_end = 0.0

    def end(self, began_at: float) -> float:
        """Seconds that a step which ends now, and began then by `time.perf_counter`, had the rank to itself."""
        start, self._last_end = max(began_at, self._last_end), time.perf_counter()
        return self._last_end - start


class BusyTime:
    """One process's view of the memory.

    Args:
        num_ranks: that there are.
        descriptor: of the memory, inherited; unset: new memory.
    """

    def __init__(self, num_ranks: int, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = SharedMemory.create("quire-busy-time", num_ranks * WORD_BYTES)
        self.descriptor = descriptor
        self._memory = SharedMemory(descriptor)
        self._words = self._memory.view[: num_ranks * WORD_BYTES].cast("Q")
        self._num_ranks = num_ranks

    def add(self, rank: int, nanoseconds: int) -> None:
        """This rank has computed for so much longer."""
        self._words[rank * WORD_BYTES // 8] += nanoseconds

    def seconds(self) -> list[float]:
        """By rank, since the start."""
        return [self._words[rank * WORD_BYTES // 8] / 1e9 for rank in range(self._num_ranks)]

    def close(self) -> None:
        """Let go of the memory, on this side. Nothing may be asked of it afterwards."""
        self._words.release()
        self._memory.close()
        os.close(self.descriptor)
