"""One exporter for each engine of `data_parallel_size`, as one StatLogger.

Each has series of its own, with its own label `engine`: then a counter never goes back because another engine counts
less, and what one engine is doing can be told from what all do.
"""

import threading
from collections.abc import Callable, Sequence

from quire_engine.stats import IterationStats, SchedulerStats, StatLogger

from quire_monitoring.triton import TritonStatLogger

__all__ = ["ByEngine", "ReplicaStatLoggers"]


class ByEngine:
    """Gives each engine's statistics to its exporter.

    Args:
        loggers: by the engine's index.
    """

    def __init__(self, loggers: Sequence[StatLogger]) -> None:
        self._by_engine = list(loggers)

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
        """Record one step; returns at once."""
        self._by_engine[iteration_stats.engine_index].record(scheduler_stats, iteration_stats)


class ReplicaStatLoggers(ByEngine):
    """The server's custom metrics of all engines.

    Args:
        loggers: by the engine's index.
    """

    def __init__(self, loggers: Sequence[TritonStatLogger]) -> None:
        super().__init__(loggers)
        self._loggers = list(loggers)

    @property
    def enabled(self) -> bool:
        """Whether the server takes custom metrics; known once it has started."""
        return self._loggers[0].enabled

    def start(self, is_up: Callable[[int], bool], workers_up: Callable[[int], Sequence[bool]]) -> None:
        """Create all series, and start to write.

        Args:
            is_up: whether an engine is healthy, by its index.
            workers_up: the same for each of its ranks.
        """
        for index, logger in enumerate(self._loggers):
            logger.start(lambda index=index: is_up(index), lambda index=index: workers_up(index))  # type: ignore[misc]

    def stop(self) -> bool:
        """End all; see `TritonStatLogger.stop`. Returns whether all series were removed."""
        are_gone = [logger.stop() for logger in self._loggers]  # each of them, whatever comes of the others
        return all(are_gone)

    def record_rejection(self, slo_class: str | None = None) -> None:
        """Count a request that was refused before it reached an engine, with the first."""
        self._loggers[0].record_rejection(slo_class)

    def when_written(self, callback: Callable[[], None]) -> None:
        """Call back when the counters of all include what was recorded until now."""
        if len(self._loggers) == 1:
            self._loggers[0].when_written(callback)
            return
        lock, left = threading.Lock(), len(self._loggers)

        def one_is_written() -> None:
            nonlocal left
            with lock:
                left -= 1
                is_last = left == 0
            if is_last:
                callback()

        for logger in self._loggers:
            logger.when_written(one_is_written)
