"""TritonStatLogger: the engine's statistics as Triton custom metrics.

Each update of a Triton metric is a round trip to the server process (14 µs on an idle machine, more on a busy one).
So `record` only adds up in memory, and one thread writes what has changed, at most ten times a second: gauges once per
flush, counters as one increment, histograms one observation per finished request.

It does not import Triton's Python module: the backend passes in how a family is made.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from quire_engine.stats import IterationStats, SchedulerStats

from quire_monitoring.definitions import METRICS, MetricDefinition, MetricKind

__all__ = ["MetricFamily", "TritonStatLogger"]

logger = logging.getLogger(__name__)

FLUSH_INTERVAL_SECONDS = 0.1
HEALTH_INTERVAL_SECONDS = 1.0
"""How often `engine_up` is looked at while nothing else happens."""

WARNING_INTERVAL_SECONDS = 60.0
"""How often failed writes are told of, at most."""

Series = tuple[str, tuple[tuple[str, str], ...]]
"""A metric's name and its own labels."""


class MetricFamily(Protocol):
    """As much of `pb_utils.MetricFamily` as is needed here."""

    def Metric(self, labels: dict[str, str], buckets: list[float] | None = ...) -> Any:  # noqa: N802
        """A series of this family, with `increment`, `set` or `observe`."""
        ...


class TritonStatLogger:
    """A `StatLogger` that keeps the server's custom metrics up to date.

    Args:
        make_family: makes Triton's family of a definition, or None of a kind that the server does not have; it raises
            when the server has its metrics switched off. Either is noted once, and what is missing is not kept.
        labels: of every series, such as model, version and engine.
    """

    def __init__(
        self, make_family: Callable[[MetricDefinition], MetricFamily | None], labels: Mapping[str, str]
    ) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._stopping = threading.Event()
        self._is_up: Callable[[], bool] = lambda: False
        self._gauges: dict[Series, float] = {}
        self._increments: Counter[Series] = Counter()
        self._observations: list[tuple[Series, float]] = []
        self._totals = SchedulerStats()
        self._written: dict[Series, float] = {}
        self._next_warning = 0.0
        # A family that goes out of scope takes its series with it.
        self._families: list[MetricFamily] = []
        self._metrics: dict[Series, Any] = {}
        missing: set[str] = set()
        try:
            for definition in METRICS:
                family = make_family(definition)
                if family is None:
                    missing.add(definition.kind.value)
                else:
                    self._declare(family, definition, labels)
        except Exception as error:
            logger.warning("no custom metrics: %s", str(error).splitlines()[0])
            self._families, self._metrics = [], {}
        for kind in missing:
            logger.warning("no %s metrics: this server does not have them", kind)
        self._thread = threading.Thread(target=self._run, name="quire-metrics", daemon=True)

    @property
    def enabled(self) -> bool:
        """Whether the server takes custom metrics."""
        return bool(self._metrics)

    def start(self, is_up: Callable[[], bool]) -> None:
        """Begin to write.

        Args:
            is_up: whether the engine is healthy; called from the writing thread.
        """
        self._is_up = is_up
        if self.enabled:
            self._changed.set()
            self._thread.start()

    def stop(self) -> None:
        """Write what is left, the engine as gone, end the thread, and take the metrics away from the server."""
        self._is_up = lambda: False
        self._stopping.set()
        self._changed.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)
        # Each deregisters itself when it goes, through memory that the stub shares with the server: it crashes if they
        # live until the stub's interpreter ends.
        self._metrics = {}
        self._families = []

    # -- what happened ----------------------------------------------------------------------------------------------

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
        """Take note of one step; returns at once."""
        if not self._metrics:
            return
        with self._lock:
            if scheduler_stats is not None:
                self._record_scheduler(scheduler_stats)
            self._record_iteration(iteration_stats)
        self._changed.set()

    def record_rejection(self) -> None:
        """Count a request that was refused before it reached the engine."""
        if not self._metrics:
            return
        with self._lock:
            self._increments[_series("quire_requests_total", outcome="rejected")] += 1
        self._changed.set()

    def _record_scheduler(self, stats: SchedulerStats) -> None:
        self._gauges = {
            _RUNNING: stats.num_running,
            _WAITING: stats.num_waiting - stats.num_waiting_for_fsm,
            _WAITING_FOR_GRAMMAR: stats.num_waiting_for_fsm,
            _BLOCKS_USED: stats.num_blocks_used,
            _BLOCKS_CACHED: stats.num_blocks_cached,
            _BLOCKS_FREE: stats.num_blocks_free,
            _USAGE: stats.kv_cache_usage,
        }
        before, self._totals = self._totals, stats
        self._increments[_PREEMPTIONS] += _growth(before.num_preemptions, stats.num_preemptions)
        self._increments[_QUERIES] += _growth(before.prefix_cache_queries, stats.prefix_cache_queries)
        self._increments[_HITS] += _growth(before.prefix_cache_hits, stats.prefix_cache_hits)

    def _record_iteration(self, stats: IterationStats) -> None:
        self._increments[_PROMPT_TOKENS] += stats.num_prompt_tokens
        self._increments[_CACHED_TOKENS] += stats.num_cached_tokens
        self._increments[_GENERATION_TOKENS] += stats.num_generation_tokens
        self._increments[_RESTARTS] += stats.num_engine_restarts
        self._increments[_REPLAYED] += stats.num_requests_replayed
        observations = self._observations
        observations.extend((_FIRST_TOKEN, seconds) for seconds in stats.time_to_first_token_seconds)
        for request in stats.finished_requests:
            outcome = "rejected" if request.error_code == "unavailable" else request.finish_reason
            self._increments[_series("quire_requests_total", outcome=outcome)] += 1
            observations.append((_E2E, request.e2e_seconds))
            if request.queue_seconds is not None:
                observations.append((_QUEUE, request.queue_seconds))
            if request.time_per_output_token_seconds is not None:
                observations.append((_PER_TOKEN, request.time_per_output_token_seconds))

    # -- writing ----------------------------------------------------------------------------------------------------

    def _declare(self, family: MetricFamily, definition: MetricDefinition, labels: Mapping[str, str]) -> None:
        self._families.append(family)
        for own in definition.label_sets():
            arguments: dict[str, Any] = {"labels": {**labels, **own}}
            if definition.kind is MetricKind.HISTOGRAM:
                arguments["buckets"] = list(definition.buckets)
            self._metrics[_series(definition.name, **own)] = family.Metric(**arguments)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._changed.wait(HEALTH_INTERVAL_SECONDS)
            self._changed.clear()
            self._flush()
            self._stopping.wait(FLUSH_INTERVAL_SECONDS)
        self._flush()

    def _flush(self) -> None:
        with self._lock:
            gauges, increments, observations = self._gauges, self._increments, self._observations
            self._increments, self._observations = Counter(), []
        for series, count in increments.items():
            if count:
                self._write(series, "increment", count)
        for series, value in observations:
            self._write(series, "observe", value)
        # Last, so that whoever sees an idle engine finds all that it did in the counters.
        is_up = self._is_up()
        # Nothing runs or waits in an engine that is gone, and none of its blocks is there.
        for series, value in {_UP: 1.0, **gauges}.items():
            now = value if is_up else 0.0
            if self._written.get(series) != now and self._write(series, "set", now):
                self._written[series] = now

    def _write(self, series: Series, method: str, value: float) -> bool:
        """Write one value; False when that failed. A series that the server does not have is passed over."""
        if series not in self._metrics:
            return True
        try:
            getattr(self._metrics[series], method)(value)
            return True
        except Exception as error:
            if time.monotonic() >= self._next_warning:
                self._next_warning = time.monotonic() + WARNING_INTERVAL_SECONDS
                logger.warning("%s was not written: %s", series[0], error)
            return False


def _series(name: str, **labels: str) -> Series:
    return name, tuple(sorted(labels.items()))


def _growth(before: int, now: int) -> int:
    """How much a total grew; an engine that was started again counts from 0."""
    return now - before if now >= before else now


_UP = _series("quire_engine_up")
_RUNNING = _series("quire_requests_running")
_WAITING = _series("quire_requests_waiting", reason="capacity")
_WAITING_FOR_GRAMMAR = _series("quire_requests_waiting", reason="grammar")
_BLOCKS_USED = _series("quire_kv_blocks", state="used")
_BLOCKS_CACHED = _series("quire_kv_blocks", state="cached")
_BLOCKS_FREE = _series("quire_kv_blocks", state="free")
_USAGE = _series("quire_kv_cache_usage_ratio")
_PROMPT_TOKENS = _series("quire_prompt_tokens_total")
_CACHED_TOKENS = _series("quire_prompt_tokens_cached_total")
_GENERATION_TOKENS = _series("quire_generation_tokens_total")
_PREEMPTIONS = _series("quire_preemptions_total")
_QUERIES = _series("quire_prefix_cache_queries_total")
_HITS = _series("quire_prefix_cache_hits_total")
_RESTARTS = _series("quire_engine_restarts_total")
_REPLAYED = _series("quire_requests_replayed_total")
_FIRST_TOKEN = _series("quire_time_to_first_token_seconds")
_PER_TOKEN = _series("quire_time_per_output_token_seconds")
_E2E = _series("quire_e2e_request_latency_seconds")
_QUEUE = _series("quire_request_queue_time_seconds")
