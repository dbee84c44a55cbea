"""One exporter for each replica of the engine, as one StatLogger.

Each has series of its own, with its own label `engine`: then a counter never goes back because another engine counts
less, and what one engine is doing can be told from what all do. Engines may come and leave meanwhile.
"""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from quire_engine.stats import IterationStats, SchedulerStats, StatLogger

from quire_monitoring.totals import Totals
from quire_monitoring.triton import TritonStatLogger


class ByEngine:
    """Gives each engine's statistics to its exporter. What comes late of one that has left is not counted.

    Exporters may come and leave in another thread than `record`, so what holds them is never changed, but replaced.

    Args:
        loggers: by the engine's index.
    """

    def __init__(self, loggers: Sequence[StatLogger]) -> None:
        self._by_engine = dict(enumerate(loggers))

    def add(self, index: int, logger: StatLogger) -> None:
        """There will be one more engine."""
        self._by_engine = {**self._by_engine, index: logger}

    def drop(self, indices: Collection[int]) -> None:
        """These are not there any more."""
        self._by_engine = {index: logger for index, logger in self._by_engine.items() if index not in indices}

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
        """Record one step; returns at once."""
        logger = self._by_engine.get(iteration_stats.engine_index)
        if logger is not None:
            logger.record(scheduler_stats, iteration_stats)


class ReplicaStatLoggers:
    """The server's custom metrics of all engines.

    Args:
        loggers: by the engine's index.
    """

    def __init__(self, loggers: Sequence[TritonStatLogger]) -> None:
        self._loggers = dict(enumerate(loggers))
        self._by_engine = ByEngine(loggers)
        self._started: set[int] = set()
        self._is_up: Callable[[int], bool] = lambda index: False
        self._workers_up: Callable[[int], Sequence[bool]] = lambda index: ()
        self._cache_config: Callable[[int], Mapping[str, str]] = lambda index: {}

    @property
    def enabled(self) -> bool:
        """Whether the server takes custom metrics; known once it has started."""
        return self._loggers[0].enabled

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
        """Record one step; returns at once."""
        self._by_engine.record(scheduler_stats, iteration_stats)

    def totals(self, index: int) -> Totals:
        """An engine's metrics, for another exporter; see `TritonStatLogger.totals`."""
        return self._loggers[index].totals()

    def add(self, index: int, logger: TritonStatLogger) -> None:
        """There will be one more engine; what it does is added up, and has series after `start_added`."""
        self._loggers = {**self._loggers, index: logger}
        self._by_engine.add(index, logger)

    def start(
        self,
        is_up: Callable[[int], bool],
        workers_up: Callable[[int], Sequence[bool]],
        cache_config: Callable[[int], Mapping[str, str]],
    ) -> None:
        """Create all series, and start to write.

        Args:
            is_up: whether an engine is healthy, by its index.
            workers_up: the same for each of its ranks.
            cache_config: how its KV cache is made; see `TritonStatLogger.start`.
        """
        self._is_up, self._workers_up, self._cache_config = is_up, workers_up, cache_config
        self.start_added()

    def start_added(self) -> None:
        """The same for those that were added since."""
        for index, logger in self._loggers.items():
            if index not in self._started:
                try:
                    config = self._cache_config(index)
                except IndexError:  # it is not there yet: whoever adds it calls this again
                    continue
                self._started.add(index)
                logger.start(partial(self._is_up, index), partial(self._workers_up, index), config)

    def drop(self, indices: Collection[int]) -> list[TritonStatLogger]:
        """These engines are not there any more. Returns their exporters, for the caller to `stop(is_down=False)`."""
        leaving = [logger for index, logger in self._loggers.items() if index in indices]
        self._loggers = {index: logger for index, logger in self._loggers.items() if index not in indices}
        self._by_engine.drop(indices)
        self._started.difference_update(indices)
        return leaving

    def stop(self) -> bool:
        """End all; see `TritonStatLogger.stop`. Returns whether all series were removed."""
        are_gone = [logger.stop() for logger in self._loggers.values()]  # each of them, whatever comes of the others
        return all(are_gone)

    def record_rejection(self, slo_class: str | None = None) -> None:
        """Count a request that was rejected before it reached an engine, with the first."""
        self._loggers[0].record_rejection(slo_class)

    def when_written(self, callback: Callable[[], None]) -> None:
        """Call back when the counters of all include what was recorded until now."""
        loggers = list(self._loggers.values())
        if len(loggers) == 1:
            loggers[0].when_written(callback)
            return
        lock, left = threading.Lock(), len(loggers)

        def one_is_written() -> None:
            nonlocal left
            with lock:
                left -= 1
                is_last = left == 0
            if is_last:
                callback()

        for logger in loggers:
            logger.when_written(one_is_written)
