"""When something that failed is tried again.

* `CrashLoop`: a process that died. The engine core, the grammar compiler and tritonserver are each started again by it.
  They differ in what follows once it has tripped: requests no longer wait for the engine, those that wait for a grammar
  end, `quire serve` ends.
* `CircuitBreaker`: a store of KV blocks, which is done without meanwhile.
"""

import time
from collections.abc import Callable

MAX_DEATHS = 5
MAX_DELAY_SECONDS = 30.0
STABLE_SECONDS = 30.0
"""A process that was ready for so long counts as one that has worked."""


class CrashLoop:
    """Counts deaths in a row. After the first the process is started at once, then after 1, 2, 4 …
    `MAX_DELAY_SECONDS`."""

    def __init__(self) -> None:
        self.num_deaths = 0
        """In a row, of processes that had not worked."""

    @property
    def is_tripped(self) -> bool:
        """Whether there were too many."""
        return self.num_deaths >= MAX_DEATHS

    def delay_after_death(self, has_worked: bool) -> float:
        """Seconds to wait before the next start.

        Args:
            has_worked: whether the process that died had worked; then the count starts again.
        """
        self.num_deaths = 0 if has_worked else self.num_deaths + 1
        return float(min(2 ** (self.num_deaths - 2), MAX_DELAY_SECONDS)) if self.num_deaths > 1 else 0.0


class CircuitBreaker:
    """Open after a failure, for a pause in which nothing is tried. Any thread may use it.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._closes_at = clock()

    @property
    def is_open(self) -> bool:
        """Whether to go on without."""
        return self._clock() < self._closes_at

    def trip(self, seconds: float) -> None:
        """Record a failure.

        Args:
            seconds: the pause. 0 ends the present one.
        """
        self._closes_at = self._clock() + seconds
