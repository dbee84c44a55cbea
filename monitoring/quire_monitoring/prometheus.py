"""PrometheusStatLogger: the same metrics by prometheus-client, for an `AsyncLLM` without tritonserver.

::

    stat_logger = PrometheusStatLogger({"model": "m", "version": "1", "engine": "0"})
    llm = AsyncLLM(config, [stat_logger])
    stat_logger.start(lambda: llm.is_healthy, llm.workers_up)
    prometheus_client.REGISTRY.register(stat_logger)
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from quire_engine.stats import IterationStats, SchedulerStats

from quire_monitoring.accumulator import Accumulator
from quire_monitoring.definitions import MetricDefinition, MetricKind, Series, make_aliases, make_metrics, series
from quire_monitoring.histograms import bucket_bound, cumulative_counts

__all__ = ["PrometheusStatLogger"]

Family = GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily

MAX_PENDING = 1000
"""Steps after which observations are added up, even without a scrape."""


class PrometheusStatLogger(Collector):
    """A `StatLogger`, and a collector for any prometheus-client registry.

    Args:
        labels: of every series: model, version and engine.
        slo_classes: the classes of the setting `slo`.
        num_ranks: processes that share the model.
        max_draft_tokens: of a request in a step; 0 without speculative decoding.
        expert_shape: layers and experts of a layer; None without experts.
        expert_metrics: whether each expert of each layer has a series of its own.
        aliases: whether there are series under vLLM's names, too.
    """

    def __init__(
        self,
        labels: Mapping[str, str],
        *,
        slo_classes: Iterable[str] = ("default",),
        num_ranks: int = 1,
        max_draft_tokens: int = 0,
        expert_shape: tuple[int, int] | None = None,
        expert_metrics: bool = False,
        aliases: bool = True,
    ) -> None:
        classes = tuple(slo_classes)
        metrics = make_metrics(classes, num_ranks, max_draft_tokens, expert_shape, expert_metrics)
        self._accumulator = Accumulator(
            classes, aliases=aliases, expert_shape=expert_shape, expert_metrics=expert_metrics
        )
        self._definitions = (*metrics, *(make_aliases(metrics) if aliases else ()))
        self._labels = dict(labels)
        self._lock = threading.Lock()
        self._num_pending = 0
        self._is_up: Callable[[], bool] = lambda: False
        self._workers_up: Callable[[], Sequence[bool]] = lambda: [False] * num_ranks
        self._counters: Counter[Series] = Counter()
        self._counts: dict[Series, list[int]] = {}
        self._sums: Counter[Series] = Counter()
        self._buckets = {
            series(definition.name, **own): definition.buckets
            for definition in self._definitions
            if definition.kind is MetricKind.HISTOGRAM
            for own in definition.label_sets()
        }
        for one, buckets in self._buckets.items():
            self._counts[one] = [0] * (len(buckets) + 1)

    def start(self, is_up: Callable[[], bool], workers_up: Callable[[], Sequence[bool]] | None = None) -> None:
        """Set the sources of health; see `TritonStatLogger.start`. Both are called at every scrape."""
        self._is_up = is_up
        self._workers_up = workers_up or (lambda: [is_up()])

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
        """Record one step; returns at once."""
        self._accumulator.record(scheduler_stats, iteration_stats)
        self._num_pending += 1
        if self._num_pending >= MAX_PENDING:
            with self._lock:
                self._add_up()

    def record_rejection(self, slo_class: str | None = None) -> None:
        """Count a request that was refused before it reached the engine; see `Accumulator.record_rejection`."""
        self._accumulator.record_rejection(slo_class)

    def collect(self) -> Iterator[Family]:
        """All families, each with all its series."""
        gauges = self._accumulator.gauges(self._is_up(), self._workers_up())
        with self._lock:
            self._add_up()
            families = [self._family(definition, gauges) for definition in self._definitions]
        yield from families

    def describe(self) -> Iterator[Family]:
        """Their names, for a registry that checks for duplicates."""
        for definition in self._definitions:
            yield _FAMILIES[definition.kind](definition.name, definition.help)

    def _add_up(self) -> None:
        self._num_pending = 0
        self._counters += self._accumulator.take_counters()
        for one, values in self._accumulator.take_observations().items():
            grown = cumulative_counts(self._buckets[one], values)
            self._counts[one] = [count + growth for count, growth in zip(self._counts[one], grown, strict=True)]
            self._sums[one] += sum(values)  # type: ignore[assignment]

    def _family(self, definition: MetricDefinition, gauges: Mapping[Series, float]) -> Family:
        label_sets = definition.label_sets()
        base = self._labels
        if definition.name.startswith("vllm:"):
            base = {**base, "model_name": base.get("model", "")}
        family = _FAMILIES[definition.kind](definition.name, definition.help, labels=[*base, *label_sets[0]])
        for own in label_sets:
            values = [*base.values(), *own.values()]
            one = series(definition.name, **own)
            if isinstance(family, HistogramMetricFamily):
                bounds = [bucket_bound(bound) for bound in (*definition.buckets, float("inf"))]
                buckets = list(zip(bounds, map(float, self._counts[one]), strict=True))
                family.add_metric(values, buckets, self._sums[one])
            elif isinstance(family, GaugeMetricFamily):
                family.add_metric(values, gauges[one])
            else:
                family.add_metric(values, self._counters[one])
        return family


_FAMILIES: dict[MetricKind, type[Family]] = {
    MetricKind.GAUGE: GaugeMetricFamily,
    MetricKind.COUNTER: CounterMetricFamily,
    MetricKind.HISTOGRAM: HistogramMetricFamily,
}
