"""EngineExporters: what exports the statistics of each engine of a model, to /metrics and by OTLP.

Engines come and leave while the model is served (`scale`, and those of other hosts by themselves). Each has a number,
which is the label `engine` of its series; they are there once it is up, and gone when it has left.
"""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from quire_engine.stats import FinishedRequestStats, StatLogger
from quire_monitoring import ByEngine, ReplicaStatLoggers, TritonStatLogger

from quire_backend.engine_number import EngineNumber

if TYPE_CHECKING:
    from quire_monitoring.otel import OtelStatLogger


class EngineExporters:
    """Numbers and exporters, by the engine's index.

    Args:
        make_number: takes the number of an engine, by its index.
        make_metrics: makes the exporter of one engine to /metrics, by the value of its label.
        make_otel: makes the exporter of one engine to OTLP; None without OTLP.
        sends_totals: whether OTLP gets metrics as well as traces.
        num_engines: the number of engines at the start.
    """

    def __init__(
        self,
        make_number: Callable[[int], EngineNumber],
        make_metrics: Callable[[str], TritonStatLogger],
        make_otel: "Callable[[str], OtelStatLogger | None]",
        *,
        sends_totals: bool,
        num_engines: int,
    ) -> None:
        self._make_number, self._make_metrics, self._make_otel = make_number, make_metrics, make_otel
        self._sends_totals = sends_totals
        self._numbers: dict[int, EngineNumber] = {}
        self._otels: dict[int, OtelStatLogger] = {}
        self.metrics = ReplicaStatLoggers([])
        self._traces = ByEngine([])
        self._started: set[int] = set()
        self._lock = threading.Lock()
        """Held while series are made or removed, which may take a while."""
        self._listing = threading.Lock()
        """Held only while it changes which engines there are: an event loop takes it."""
        self._has_stopped = False
        self.expect(range(num_engines))

    @property
    def stat_loggers(self) -> list[StatLogger]:
        """The loggers that record every step."""
        return [self.metrics, self._traces] if self._otels else [self.metrics]

    def expect(self, indices: Collection[int]) -> None:
        """Have exporters for these engines, before they are there: they only add up until `match`. Returns at once."""
        with self._listing:
            for index in indices:
                if index in self._numbers or self._has_stopped:
                    continue
                number = self._numbers[index] = self._make_number(index)
                self.metrics.add(index, self._make_metrics(number.label))
                otel = self._make_otel(number.label)
                if otel is not None:  # all have one, or none has
                    self._otels[index] = otel
                    self._traces.add(index, otel)

    def start(
        self,
        is_up: Callable[[int], bool],
        workers_up: Callable[[int], Sequence[bool]],
        cache_config: Callable[[int], Mapping[str, str]],
    ) -> None:
        """Create all series; see `ReplicaStatLoggers.start`."""
        with self._lock:
            self.metrics.start(is_up, workers_up, cache_config)
            self._start_otels()

    def match(self, indices: Callable[[], Collection[int]]) -> None:
        """Create the series of engines that have come, and remove those of engines that have left.

        Args:
            indices: returns the engines that are there now.
        """
        with self._lock:
            if self._has_stopped:
                return
            present = indices()
            self.expect(present)
            self._remove([index for index in list(self._numbers) if index not in present])
            self.metrics.start_added()
            self._start_otels()

    def _start_otels(self) -> None:
        if self._sends_totals:
            for index in [index for index in list(self._otels) if index not in self._started]:
                self._otels[index].start(self.metrics.totals(index))
        self._started = set(self._otels)

    def _remove(self, indices: Collection[int]) -> None:
        with self._listing:
            leaving = self.metrics.drop(indices)
            self._traces.drop(indices)
            otels = [self._otels.pop(index) for index in indices if index in self._otels]
            numbers = [self._numbers.pop(index) for index in indices]
        are_gone = [logger.stop(is_down=False) for logger in leaving]
        for otel in otels:
            otel.stop()
        for number, is_gone in zip(numbers, are_gone, strict=True):
            if is_gone:  # the next engine makes the same series
                number.release()
        self._started.difference_update(indices)

    def record_rejection(self, request: FinishedRequestStats) -> None:
        """Count a request that was rejected before it reached an engine; the first engine's series count it."""
        self.metrics.record_rejection(None if request.slo_verdict is None else request.options.slo.slo_class)
        if self._otels:
            self._otels[0].record_rejection(request)

    def stop(self) -> None:
        """End all, and remove all series. Again, if the server did not take the last of them before."""
        with self._lock:
            with self._listing:
                self._has_stopped = True
            are_gone = self.metrics.stop()
            while self._otels:
                self._otels.popitem()[1].stop()
            if are_gone:  # the next engine makes the same series
                for number in self._numbers.values():
                    number.release()  # or else the end of this process does it
