"""EngineExporters: what exports the statistics of each engine of a model, to /metrics and by OTLP.

Engines come and leave while the model is served (`scale`). Each has a number, which is the label `engine` of its
series; they are there once it is up, and gone when it has left.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from quire_engine.stats import FinishedRequestStats, StatLogger
from quire_monitoring import ByEngine, ReplicaStatLoggers, TritonStatLogger

from quire_backend.engine_number import EngineNumber

if TYPE_CHECKING:
    from quire_monitoring.otel import OtelStatLogger

__all__ = ["EngineExporters"]


class EngineExporters:
    """Numbers and exporters, by the engine's index.

    Args:
        make_number: takes the next number.
        make_metrics: makes the exporter of one engine to /metrics, by the value of its label.
        make_otel: likewise by OTLP; None if nothing is to go there.
        sends_totals: whether metrics go by OTLP, too, and not traces alone.
        num_engines: that there are at first.
    """

    def __init__(
        self,
        make_number: Callable[[], EngineNumber],
        make_metrics: Callable[[str], TritonStatLogger],
        make_otel: "Callable[[str], OtelStatLogger | None]",
        *,
        sends_totals: bool,
        num_engines: int,
    ) -> None:
        self._make_number, self._make_metrics, self._make_otel = make_number, make_metrics, make_otel
        self._sends_totals = sends_totals
        self._numbers: list[EngineNumber] = []
        self._otels: list[OtelStatLogger] = []
        self.metrics = ReplicaStatLoggers([])
        self._traces = ByEngine([])
        self._num_started = 0
        self._lock = threading.Lock()
        self._has_stopped = False
        self.expect(num_engines)

    @property
    def stat_loggers(self) -> list[StatLogger]:
        """What is to hear of every step."""
        return [self.metrics, self._traces] if self._otels else [self.metrics]

    def expect(self, num_engines: int) -> None:
        """Have exporters for so many engines, before they are there: they only add up until `match`."""
        with self._lock:
            for _ in range(len(self._numbers), num_engines):
                number = self._make_number()
                self._numbers.append(number)
                self.metrics.add(self._make_metrics(number.label))
                otel = self._make_otel(number.label)
                if otel is not None:  # all have one, or none has
                    self._otels.append(otel)
                    self._traces.add(otel)

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

    def match(self, num_engines: int) -> None:
        """There are so many engines now: those that have come have series from here on, those that left have none."""
        with self._lock:
            if self._has_stopped:
                return
            self._remove(num_engines)
            self.metrics.start_added()
            self._start_otels()

    def _start_otels(self) -> None:
        if self._sends_totals:
            for index in range(self._num_started, len(self._otels)):
                self._otels[index].start(self.metrics.totals(index))
        self._num_started = len(self._otels)

    def _remove(self, num_left: int) -> None:
        are_gone = self.metrics.remove(num_left)
        self._traces.drop(num_left)
        for otel in self._otels[num_left:]:
            otel.stop()
        for number, is_gone in zip(self._numbers[num_left:], are_gone, strict=True):
            if is_gone:  # the next engine makes the same series
                number.release()
        del self._numbers[num_left:], self._otels[num_left:]
        self._num_started = min(self._num_started, num_left)

    def record_rejection(self, request: FinishedRequestStats) -> None:
        """Count a request that was refused before it reached an engine, with the first."""
        self.metrics.record_rejection(None if request.slo_verdict is None else request.slo_class)
        if self._otels:
            self._otels[0].record_rejection(request)

    def stop(self) -> None:
        """End all, and remove all series. Again, if the server did not take the last of them before."""
        with self._lock:
            self._has_stopped = True
            are_gone = self.metrics.stop()
            while self._otels:
                self._otels.pop().stop()
            if are_gone:  # the next engine makes the same series
                for number in self._numbers:
                    number.release()  # or else the end of this process does it
