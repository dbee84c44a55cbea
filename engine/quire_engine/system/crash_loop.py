"""CrashLoop: when a process that died is started again, and when it has died too often.

The engine core, the grammar compiler and tritonserver are each started again by it. They differ in what follows once it
has tripped: requests no longer wait for the engine, those that wait for a grammar end, `quire serve` ends.
"""

MAX_DEATHS = 5
MAX_DELAY_SECONDS = 30.0
STABLE_SECONDS = 30.0
"""A process that was ready for so long has worked, even if it had nothing to do."""


class CrashLoop:
    """Counts deaths in a row. The first is followed at once, the next after 1, 2, 4 … `MAX_DELAY_SECONDS`, for ever."""

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
            has_worked: whether the process that died had done its work; then the count starts afresh.
        """
        self.num_deaths = 0 if has_worked else self.num_deaths + 1
        return float(min(2 ** (self.num_deaths - 2), MAX_DELAY_SECONDS)) if self.num_deaths > 1 else 0.0
