"""BusyTime: how long each rank has computed so far, in shared memory.

::

    byte  0               64              128
          │ ns of rank 0  │ ns of rank 1  │ …      uint64 each, on a cache line of its own; only its rank writes it

Waits for other ranks are not counted, except on GPUs, which wait inside kernels. All ranks' steps end together and take
as long as the slowest rank's; these times show which rank that is. They are in memory rather than in messages so that
no step waits for them, and so that they can be read even if a rank hangs.
"""

import os
import time

from quire_engine.ipc.semaphore import WORD_BYTES, SharedMemory

__all__ = ["BusyTime", "StepClock"]


class StepClock:
    """Times the steps of a rank. A step may begin before the previous one ends; the overlap counts only once."""

    def __init__(self) -> None:
        self._last_end = 0.0

    def end(self, began_at: float) -> float:
        """End a step now.

        Args:
            began_at: when it began, on `time.perf_counter`.

        Returns:
            Seconds since it began, or since the previous step ended if that is later.
        """
        start, self._last_end = max(began_at, self._last_end), time.perf_counter()
        return self._last_end - start


class BusyTime:
    """One process's view of the memory.

    Args:
        num_ranks: number of ranks.
        descriptor: the memory's, inherited; unset: allocates new memory.
    """

    def __init__(self, num_ranks: int, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = SharedMemory.create("quire-busy-time", num_ranks * WORD_BYTES)
        self.descriptor = descriptor
        self._memory = SharedMemory(descriptor)
        self._words = self._memory.view[: num_ranks * WORD_BYTES].cast("Q")
        self._num_ranks = num_ranks

    def add(self, rank: int, nanoseconds: int) -> None:
        """Add to this rank's busy time."""
        self._words[rank * WORD_BYTES // 8] += nanoseconds

    def seconds(self) -> list[float]:
        """By rank, since the start."""
        return [self._words[rank * WORD_BYTES // 8] / 1e9 for rank in range(self._num_ranks)]

    def close(self) -> None:
        """Unmap the memory in this process. The object cannot be used afterwards."""
        self._words.release()
        self._memory.close()
        os.close(self.descriptor)
