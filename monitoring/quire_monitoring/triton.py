"""TritonStatLogger: the engine's statistics as Triton custom metrics.

Each update of a Triton metric is a round trip to the server process (14 µs on an idle machine, more on a busy one), and
there is none that takes several values. So `record` only adds up in memory, and one thread writes what has changed:

* gauges and counters four times a second, each once, and again as soon as the engine is idle;
* histograms of requests one observation per finished request;
* counters and these at once when the end of a request waits for them (`when_written`), and nothing else before it is
  called back: all that end meanwhile share one flush, so that a request costs no round trips of its own for it;
* histograms of steps and tokens (`MetricDefinition.is_frequent`) once a second, in a number of round trips that does
  not depend on how much happened. Triton's own histograms cannot do that: theirs is one per observation, thousands a
  second. So these are three families of counters each, which make the same samples: `_bucket{le}`, `_sum`, `_count`.

It does not import Triton's Python module: the backend passes in a function that makes families.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from quire_engine.stats import IterationStats, SchedulerStats

from quire_monitoring.accumulator import Accumulator
from quire_monitoring.definitions import (
    DEFAULT_CONFIG,
    MetricDefinition,
    MetricKind,
    MetricsConfig,
    Series,
    series,
)
from quire_monitoring.totals import Totals, bucket_bound, cumulative_counts

logger = logging.getLogger(__name__)

SHORTEST_INTERVAL_SECONDS = 0.1
FLUSH_INTERVAL_SECONDS = 0.25
"""Between two flushes of a busy engine. An engine that becomes idle or is up again is written after the shortest
interval."""
FREQUENT_INTERVAL_SECONDS = 1.0
"""Between two flushes of metrics that change with every step."""
HEALTH_INTERVAL_SECONDS = 0.25
"""Seconds between checks of health and goodput while nothing else happens; and of the ranks' processes, at least."""
STOP_SECONDS = 10.0
"""Seconds that the last flush may take. It takes milliseconds, unless the server hangs."""
HEALTH = {"quire_engine_up", "quire_worker_up"}
"""Metrics that are written with every flush."""
WARNING_INTERVAL_SECONDS = 60.0
"""Seconds between two logged failures to write, at least."""


class MetricFamily(Protocol):
    """The part of `pb_utils.MetricFamily` that is used here."""

    def Metric(self, labels: dict[str, str], buckets: list[float] | None = ...) -> Any:  # noqa: N802
        """A series of this family, with `increment`, `set` or `observe`."""


class TritonStatLogger:
    """A `StatLogger` that keeps the server's custom metrics up to date.

    Args:
        make_family: makes Triton's family of a definition, or None of a kind that the server does not have; it raises
            when the server has its metrics switched off. Either is noted once, and what is missing is not kept.
        labels: of every series: model, version and engine.
        config: which series the model has.
        server_start_time: when the server's process started, in seconds since the epoch; None: now.
    """

    def __init__(
        self,
        make_family: Callable[[MetricDefinition], MetricFamily | None],
        labels: Mapping[str, str],
        config: MetricsConfig = DEFAULT_CONFIG,
        *,
        server_start_time: float | None = None,
    ) -> None:
        self._make_family, self._labels = make_family, dict(labels)
        self._aliases = config.aliases
        self._accumulator = Accumulator(config, server_start_time=server_start_time)
        self._reader = self._accumulator.reader(aliases=config.aliases)
        self._all_down = [False] * config.num_ranks
        self._is_up: Callable[[], bool] = lambda: False
        self._workers_up: Callable[[], Sequence[bool]] = lambda: self._all_down
        self._condition = threading.Condition()
        self._has_changed = False
        self._is_urgent = False
        self._stopping = False
        self._is_writing = False
        self._waiting: list[Callable[[], None]] = []
        # Of the writing thread:
        self._flushed_at = self._workers_looked_at = -FLUSH_INTERVAL_SECONDS
        self._health: tuple[bool, Sequence[bool]] = (False, ())
        """Health of the engine and the ranks at the last check."""
        self._written: dict[Series, float] = {}
        self._pending: dict[Series, list[float]] = {}
        """Observations of frequent histograms that are not written yet."""
        self._next_frequent = 0.0
        self._next_warning = 0.0
        # A family that goes out of scope takes its series with it.
        self._families: list[MetricFamily] = []
        self._metrics: dict[Series, Any] = {}
        self._open: dict[str, tuple[MetricDefinition, MetricFamily, Mapping[str, str]]] = {}
        """Metrics whose series come while the model serves: definition, family, and labels of every series."""
        self._open_gauges: dict[Series, MetricFamily] = {}
        """The gauges among them, each with a family of its own: the server removes a series with its family alone."""
        self._frequent: dict[Series, tuple[float, ...]] = {}
        """The buckets of the histograms that are written as counters."""
        self._thread = threading.Thread(target=self._run, name="quire-metrics", daemon=True)

    @property
    def enabled(self) -> bool:
        """Whether the server takes custom metrics; known once it has started."""
        return bool(self._metrics)

    def totals(self) -> Totals:
        """The same metrics, without vLLM's names, for another exporter; also where the server itself takes none. Those
        that are known when this is called."""
        return Totals(
            self._accumulator, self._accumulator.definitions, self._labels, lambda: (self._is_up(), self._workers_up())
        )

    def start(
        self,
        is_up: Callable[[], bool],
        workers_up: Callable[[], Sequence[bool]] | None = None,
        cache_config: Mapping[str, str] | None = None,
    ) -> None:
        """Create all series, and start to write. Before, while the model loads, they would have nothing to show.

        Args:
            is_up: whether the engine is healthy; called from the writing thread.
            workers_up: the same for each rank; unset: there is one, which is up if the engine is.
            cache_config: how the KV cache is made, under vLLM's names, for a metric that says so.
        """
        self._accumulator.set_loaded(cache_config)
        self._is_up = is_up
        self._workers_up = workers_up or (lambda: [is_up()])
        self._declare_all()
        if self.enabled:
            self._is_writing = True
            self._thread.start()
        else:
            self._reader.close()

    def stop(self, *, is_down: bool = True) -> bool:
        """Write the last values, end the thread, and remove the metrics from the server.

        No other engine may have the same labels before that: the first one that removes a series removes it for all.

        Args:
            is_down: whether the engine is shown as down in the moment before; else as it was.

        Returns:
            Whether they were removed; not if the server did not take the last values.
        """
        with self._condition:
            self._stopping = True
            if is_down:
                self._is_up, self._workers_up = lambda: False, lambda: self._all_down
            self._condition.notify()
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS)
        self._reader.close()
        if self._thread.is_alive():
            logger.warning("the server does not take the last of the metrics, and keeps them as they are")
            return False
        # Each deregisters itself when it goes, through memory that the stub shares with the server: it crashes if they
        # live until the stub's interpreter ends.
        self._metrics = {}
        self._open, self._open_gauges = {}, {}
        self._families = []
        return True

    # -- what happened ----------------------------------------------------------------------------------------------

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
        """Record one step; returns at once."""
        if not self._accumulator.is_read:
            return
        self._accumulator.record(scheduler_stats, iteration_stats)
        self._note_change(is_urgent=self._accumulator.is_idle or iteration_stats.num_engine_restarts > 0)

    def record_rejection(self, slo_class: str | None = None) -> None:
        """Count a request that was rejected before it reached the engine; see `Accumulator.record_rejection`."""
        if not self._accumulator.is_read:
            return
        self._accumulator.record_rejection(slo_class)
        self._note_change(is_urgent=self._accumulator.is_idle)

    def when_written(self, callback: Callable[[], None]) -> None:
        """Call back, from the writing thread, when the counters include all that was recorded until now; at once if
        nothing is written."""
        with self._condition:
            if self._is_writing:
                self._waiting.append(callback)
                self._condition.notify()
                return
        callback()

    def _note_change(self, is_urgent: bool) -> None:
        if self._has_changed and (self._is_urgent or not is_urgent):
            return  # it is known already
        with self._condition:
            self._has_changed = True
            self._is_urgent = self._is_urgent or is_urgent
            self._condition.notify()

    # -- writing ----------------------------------------------------------------------------------------------------

    def _declare_all(self) -> None:
        missing: set[str] = set()
        try:
            for definition in self._accumulator.definitions_with_aliases:
                if not self._declare(definition):
                    missing.add(definition.kind.value)
        except Exception as error:
            logger.warning("no custom metrics: %s", str(error).splitlines()[0])
            self._families, self._metrics, self._open = [], {}, {}
        for kind in missing:
            logger.warning("no %s metrics: this server does not have them", kind)

    def _declare(self, definition: MetricDefinition) -> bool:
        """Create the series of one metric. Returns False if the server does not have metrics of this kind."""
        labels = self._labels
        if definition.name.startswith("vllm:"):
            labels = {**labels, "model_name": labels.get("model", "")}
        if definition.is_frequent:
            return self._declare_frequent(definition, labels)
        family = self._make_family(definition)
        if family is None:
            return False
        self._families.append(family)
        if definition.is_open:
            self._open[definition.name] = definition, family, labels
        for own in definition.label_sets():
            arguments: dict[str, Any] = {"labels": {**labels, **own}}
            if definition.kind is MetricKind.HISTOGRAM:
                arguments["buckets"] = list(definition.buckets)
            self._metrics[series(definition.name, **own)] = family.Metric(**arguments)
        return True

    def _declare_frequent(self, definition: MetricDefinition, labels: Mapping[str, str]) -> bool:
        bounds = [bucket_bound(bound) for bound in (*definition.buckets, float("inf"))]
        for suffix, bound_labels in (
            ("_bucket", [{"le": bound} for bound in bounds]),
            ("_sum", [{}]),
            ("_count", [{}]),
        ):
            part = replace(definition, name=definition.name + suffix, kind=MetricKind.COUNTER, buckets=())
            family = self._make_family(part)
            if family is None:
                return False
            self._families.append(family)
            for own in definition.label_sets():
                for bound_label in bound_labels:
                    metric = family.Metric(labels={**labels, **own, **bound_label})
                    self._metrics[series(part.name, **own, **bound_label)] = metric
        for own in definition.label_sets():
            self._frequent[series(definition.name, **own)] = definition.buckets
        return True

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = not self._wait()
            try:
                self._flush(is_last)
            except Exception as error:
                self._flushed_at = time.monotonic()
                self._warn("metrics were not written: %s", error)
            with self._condition:
                self._is_writing = not is_last
        _call_all(self._take_waiting())

    def _wait(self) -> bool:
        """Sleep until something has to be written. Returns False if that is for the last time."""
        with self._condition:
            while not (self._stopping or self._waiting):
                rest = self._flushed_at + self._interval - time.monotonic()
                if rest <= 0:
                    break
                self._condition.wait(rest)
            self._has_changed = self._is_urgent = False
            return not self._stopping

    @property
    def _interval(self) -> float:
        if not self._has_changed:
            return HEALTH_INTERVAL_SECONDS
        return SHORTEST_INTERVAL_SECONDS if self._is_urgent else FLUSH_INTERVAL_SECONDS

    def _flush(self, is_last: bool = False) -> None:
        """Write what is due: growth always; what changes all the time, at its intervals and when the engine is idle."""
        waiting, now = self._take_waiting(), time.monotonic()
        try:
            # Read first and written last, so that the counters include all that an engine did which is shown as idle.
            is_idle = self._accumulator.is_idle or is_last
            gauges = self._accumulator.gauges(*self._look(now), aliases=self._aliases)
            self._set({one: value for one, value in gauges.items() if one[0] in HEALTH})
            self._write_growth()
        finally:
            _call_all(waiting)
        if is_idle or now >= self._next_frequent:
            self._write_pending(is_last)
            if not self._pending:
                self._next_frequent = now + FREQUENT_INTERVAL_SECONDS
        if is_idle or now >= self._flushed_at + FLUSH_INTERVAL_SECONDS:
            self._flushed_at = now
            self._set(gauges)
            for gone in self._open_gauges - gauges.keys():
                del self._metrics[gone], self._open_gauges[gone]
                self._written.pop(gone, None)

    def _look(self, now: float) -> tuple[bool, Sequence[bool]]:
        """Whether the engine and the ranks are up. Checking a rank reads the state of its process, and thousands of
        requests may end in a second. So ranks are checked at an interval, and when the engine has died or is back."""
        is_up = self._is_up()
        if is_up != self._health[0] or now >= self._workers_looked_at + HEALTH_INTERVAL_SECONDS or self._stopping:
            self._workers_looked_at = now
            self._health = (is_up, self._workers_up())
        return self._health

    def _set(self, gauges: Mapping[Series, float]) -> None:
        """Write those that have changed since they were last written."""
        for one, value in gauges.items():
            if self._written.get(one) != value and self._write(one, "set", value):
                self._written[one] = value

    def _take_waiting(self) -> list[Callable[[], None]]:
        with self._condition:
            waiting, self._waiting = self._waiting, []
        return waiting

    def _write_growth(self) -> None:
        counters, observations = self._reader.take()
        for one, growth in counters.items():
            self._write(one, "increment", growth)
        for one, values in observations.items():
            if one in self._frequent:
                self._pending.setdefault(one, []).extend(values)
                continue
            for value in values:
                self._write(one, "observe", value)

    def _write_pending(self, is_last: bool) -> None:
        """Write the frequent histograms: whatever was observed, one increment for each bucket that grew.

        After each of them, the end of a request that has come meanwhile goes first, and the next flush goes on.
        """
        while self._pending:
            name, labels = next(iter(self._pending))
            self._write_histogram(name, dict(labels), self._pending.pop((name, labels)), self._frequent[name, labels])
            if self._waiting and not is_last:
                return

    def _write_histogram(self, name: str, own: dict[str, str], values: list[float], buckets: Sequence[float]) -> None:
        for bound, growth in zip((*buckets, float("inf")), cumulative_counts(buckets, values), strict=True):
            if growth:
                self._write(series(name + "_bucket", **own, le=bucket_bound(bound)), "increment", growth)
        if (total := sum(values)) > 0:
            self._write(series(name + "_sum", **own), "increment", total)
        self._write(series(name + "_count", **own), "increment", len(values))

    def _write(self, one: Series, method: str, value: float) -> bool:
        """Write one value. Returns False if that failed. Ignores series that the server does not have."""
        if one not in self._metrics and one[0] not in self._open:
            return True
        try:
            if one not in self._metrics:
                self._create(one)
            getattr(self._metrics[one], method)(value)
            return True
        except Exception as error:
            self._warn("%s was not written: %s", one[0], error)
            return False

    def _create(self, one: Series) -> None:
        name, own = one
        definition, family, labels = self._open[name]
        if definition.kind is MetricKind.GAUGE:
            family = self._open_gauges[one] = self._make_family(definition) or family
        self._metrics[one] = family.Metric(labels={**labels, **dict(own)})

    def _warn(self, message: str, *args: object) -> None:
        if time.monotonic() >= self._next_warning:
            self._next_warning = time.monotonic() + WARNING_INTERVAL_SECONDS
            logger.warning(message, *args)


def _call_all(callbacks: Iterable[Callable[[], None]]) -> None:
    for callback in callbacks:
        try:
            callback()
        except Exception:  # noqa: PERF203  the others have to be called all the same
            logger.exception("a callback after writing the counters failed")
