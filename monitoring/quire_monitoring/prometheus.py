"""PrometheusStatLogger: the same metrics by prometheus-client, for an `AsyncLLM` without tritonserver.

::

    stat_logger = PrometheusStatLogger({"model": "m", "version": "1", "engine": "0"})
    llm = AsyncLLM(config, [stat_logger])
    stat_logger.start(lambda: llm.is_healthy, llm.workers_up, llm.cache_config_info())
    prometheus_client.REGISTRY.register(stat_logger)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from quire_engine.stats import IterationStats, SchedulerStats

from quire_monitoring.accumulator import Accumulator
from quire_monitoring.definitions import DEFAULT_CONFIG, MetricKind, MetricsConfig
from quire_monitoring.totals import Family, Histogram, Totals, bucket_bound

MetricFamily = GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily

MAX_PENDING = 1000
"""Steps after which observations are added up, even without a scrape."""


class PrometheusStatLogger(Collector):
    """A `StatLogger`, and a collector for any prometheus-client registry.

    Args:
        labels: of every series: model, version and engine.
        config: which series the model has.
    """

    def __init__(
        self,
        labels: Mapping[str, str],
        config: MetricsConfig = DEFAULT_CONFIG,
    ) -> None:
        self._num_pending = 0
        self._is_up: Callable[[], bool] = lambda: False
        self._workers_up: Callable[[], Sequence[bool]] = lambda: [False] * config.num_ranks
        self._accumulator = Accumulator(config)
        self._totals = Totals(
            self._accumulator,
            self._accumulator.definitions_with_aliases,
            labels,
            lambda: (self._is_up(), self._workers_up()),
            aliases=config.aliases,
        )

    def start(
        self,
        is_up: Callable[[], bool],
        workers_up: Callable[[], Sequence[bool]] | None = None,
        cache_config: Mapping[str, str] | None = None,
    ) -> None:
        """Set the sources of health; see `TritonStatLogger.start`. Both are called at every scrape."""
        self._is_up = is_up
        self._workers_up = workers_up or (lambda: [is_up()])
        self._accumulator.set_loaded(cache_config)
        self._totals.definitions = self._accumulator.definitions_with_aliases

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
        """Record one step; returns at once."""
        self._accumulator.record(scheduler_stats, iteration_stats)
        self._num_pending += 1
        if self._num_pending >= MAX_PENDING:
            self._num_pending = 0
            self._totals.add_up()

    def record_rejection(self, slo_class: str | None = None) -> None:
        """Count a request that was rejected before it reached the engine; see `Accumulator.record_rejection`."""
        self._accumulator.record_rejection(slo_class)

    def collect(self) -> Iterator[MetricFamily]:
        """All families, each with all its series."""
        self._num_pending = 0
        yield from map(_family, self._totals.read())

    def describe(self) -> Iterator[MetricFamily]:
        """Their names, for a registry that checks for duplicates."""
        for definition in self._totals.definitions:
            yield _FAMILIES[definition.kind](definition.name, definition.help)


def _family(found: Family) -> MetricFamily:
    definition = found.definition
    family = _FAMILIES[definition.kind](definition.name, definition.help, labels=[*found.labels, *definition.labels])
    for own, value in found.series:
        values = [*found.labels.values(), *(own[name] for name in definition.labels)]
        if isinstance(value, Histogram):
            assert isinstance(family, HistogramMetricFamily)
            bounds = [bucket_bound(bound) for bound in (*definition.buckets, float("inf"))]
            family.add_metric(values, list(zip(bounds, map(float, value.cumulative_counts), strict=True)), value.sum)
        else:
            assert not isinstance(family, HistogramMetricFamily)
            family.add_metric(values, value)
    return family


_FAMILIES: dict[MetricKind, type[MetricFamily]] = {
    MetricKind.GAUGE: GaugeMetricFamily,
    MetricKind.COUNTER: CounterMetricFamily,
    MetricKind.HISTOGRAM: HistogramMetricFamily,
}
