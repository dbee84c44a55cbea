"""EngineExporters: what exports the statistics of each engine of a model, to /metrics and by OTLP.

Each engine has series of its own, with its number as the label `engine`: then a counter never goes back because another
engine counts less, and what one engine is doing can be told from what all do. Engines come and leave while the model is
served (`scale`, and those of other hosts by themselves). Their series are there once they are up, and gone when they
have left.
"""

import contextlib
import hashlib
import os
import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from quire_engine.stats import FinishedRequestStats, IterationStats, SchedulerStats
from quire_monitoring.triton import TritonStatLogger

if TYPE_CHECKING:
    from quire_monitoring.otel import OtelStatLogger

MAX_ENGINES = 64
"""Engines of one model in one server. If all numbers are taken, or sockets fail, the process id is used."""


class EngineNumber:
    """The value of the label `engine`, which no two living engines of a model share. Takes a number, until `release`.

    A reload starts the new engine before it ends the old one, `instance_group` may ask for several at once, and every
    engine has a stub process of its own. Two that wrote one series would overwrite each other's state. Worse:
    tritonserver counts references to a series per stub, so the first stub that removes it frees what the other still
    writes to, and the server dies.

    So each engine takes its index among the replicas of its model, or else the lowest number that is free among the
    engines of its model in its server: nearly always 0, 1 for its replacement, and then 0 again. A number is taken by
    binding an address in the kernel's abstract socket namespace, which is freed when the process ends, however it ends,
    and leaves no file.

    Args:
        model: the model's name.
        version: its version.
        index: of the engine, the number that it takes if that is free.
    """

    def __init__(self, model: str, version: str, index: int = 0) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        # The stub's parent is the server. Containers that share a network share addresses, but not process ids.
        namespace = os.stat("/proc/self/ns/pid").st_ino
        name = hashlib.blake2b(f"{model}/{version}".encode(), digest_size=16).hexdigest()
        for number in (index, *range(MAX_ENGINES)):
            with contextlib.suppress(OSError):
                self._socket.bind(f"\0quire-engine-{namespace}-{os.getppid()}-{name}-{number}")
                self.label = str(number)
                """The number, as the label's value."""
                return
        self.label = f"p{os.getpid()}"

    def release(self) -> None:
        """Free the number. Idempotent."""
        self._socket.close()


@dataclass(slots=True)
class _Engine:
    """What one engine has."""

    number: EngineNumber
    metrics: TritonStatLogger
    otel: "OtelStatLogger | None"
    is_started: bool = False


class EngineExporters:
    """The `StatLogger` of all engines of a model.

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
        self._engines: Mapping[int, _Engine] = {}
        """By index. It is replaced and never changed, as other threads read it."""
        self._lock = threading.Lock()
        """Held while series are made or removed, which may take a while."""
        self._listing = threading.Lock()
        """Held only while it changes which engines there are: an event loop takes it."""
        self._has_stopped = False
        self.expect(range(num_engines))

    def expect(self, indices: Collection[int]) -> None:
        """Have exporters for these engines, before they are there: they only add up until `match`. Returns at once."""
        with self._listing:
            for index in indices:
                if index not in self._engines and not self._has_stopped:
                    number = self._make_number(index)
                    engine = _Engine(number, self._make_metrics(number.label), self._make_otel(number.label))
                    self._engines = {**self._engines, index: engine}

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
            cache_config: how its KV cache is made, see `TritonStatLogger.start`; raises IndexError of one that is not
                there yet.
        """
        with self._lock:
            self._is_up, self._workers_up, self._cache_config = is_up, workers_up, cache_config
            self._start_expected()

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
            with self._listing:
                leaving = [engine for index, engine in self._engines.items() if index not in present]
                self._engines = {index: engine for index, engine in self._engines.items() if index in present}
            for engine in leaving:
                _end(engine, is_down=False)
            self._start_expected()

    def _start_expected(self) -> None:
        for index, engine in self._engines.items():
            if engine.is_started:
                continue
            try:
                config = self._cache_config(index)
            except IndexError:  # `match` is called once it is there
                continue
            engine.is_started = True
            engine.metrics.start(partial(self._is_up, index), partial(self._workers_up, index), config)
            if engine.otel is not None and self._sends_totals:
                engine.otel.start(engine.metrics.totals())

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
        """Record one step; returns at once. What comes late of an engine that has left is not counted."""
        engine = self._engines.get(iteration_stats.engine_index)
        if engine is not None:
            engine.metrics.record(scheduler_stats, iteration_stats)
            if engine.otel is not None:
                engine.otel.record(scheduler_stats, iteration_stats)

    def record_lost(self, requests: Sequence[FinishedRequestStats]) -> None:
        """Count requests that an earlier server has lost. They have no traces."""
        self._engines[0].metrics.record(None, IterationStats(finished_requests=list(requests)))

    def record_rejection(self, request: FinishedRequestStats) -> None:
        """Count a request that was rejected before it reached an engine; the first engine's series count it."""
        first = self._engines[0]
        first.metrics.record_rejection(None if request.slo_verdict is None else request.options.slo.slo_class)
        if first.otel is not None:
            first.otel.record_rejection(request)

    def when_written(self, callback: Callable[[], None]) -> None:
        """Call back when the counters of all engines include what was recorded until now."""
        engines = list(self._engines.values())
        left = iter(range(len(engines))[::-1])

        def one_is_written() -> None:
            if next(left) == 0:  # a call of C: no other thread comes in between
                callback()

        for engine in engines:
            engine.metrics.when_written(one_is_written)

    def stop(self) -> None:
        """End all, and remove all series. Again, if the server did not take the last of them before."""
        with self._lock:
            with self._listing:
                self._has_stopped = True
            for engine in self._engines.values():
                _end(engine, is_down=True)


def _end(engine: _Engine, *, is_down: bool) -> None:
    is_gone = engine.metrics.stop(is_down=is_down)
    otel, engine.otel = engine.otel, None
    if otel is not None:
        otel.stop()
    if is_gone:  # the next engine makes the same series
        engine.number.release()  # or else the end of this process does it
