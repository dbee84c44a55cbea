"""PrometheusStatLogger: the same metrics by prometheus-client, for an `AsyncLLM` without tritonserver.

::

    stat_logger = PrometheusStatLogger({"model": "m", "version": "1", "engine": "0"})
    llm = AsyncLLM(config, [stat_logger])
    stat_logger.start(lambda: llm.is_healthy, llm.workers_up, llm.cache_config_info())
    prometheus_client.REGISTRY.register(stat_logger)
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from quire_engine.slo import SLOTargets
from quire_engine.stats import IterationStats, SchedulerStats

from quire_monitoring.accumulator import Accumulator
from quire_monitoring.definitions import (
    DEFAULT_CLASSES,
    MetricDefinition,
    MetricKind,
    make_aliases,
    make_cache_info,
    make_metrics,
    series,
)
from quire_monitoring.totals import Family, Histogram, Totals, bucket_bound

MetricFamily = GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily

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
        settings: a short name for the model's settings; others have another.
        max_loras: LoRA adapters of one step; 0 without.
        takes_images: whether prompts may have images.
    """

    def __init__(
        self,
        labels: Mapping[str, str],
        *,
        slo_classes: Mapping[str, SLOTargets] = DEFAULT_CLASSES,
        num_ranks: int = 1,
        max_draft_tokens: int = 0,
        expert_shape: tuple[int, int] | None = None,
        expert_metrics: bool = False,
        aliases: bool = True,
        settings: str = "",
        max_loras: int = 0,
        takes_images: bool = False,
    ) -> None:
        self._aliases, self._max_loras = aliases, max_loras
        self._metrics = make_metrics(
            slo_classes,
            num_ranks,
            max_draft_tokens,
            expert_shape,
            expert_metrics,
            settings,
            max_loras,
            takes_images,
        )
        self._num_pending = 0
        self._is_up: Callable[[], bool] = lambda: False
        self._workers_up: Callable[[], Sequence[bool]] = lambda: [False] * num_ranks
        self._accumulator = Accumulator(
            slo_classes, expert_shape=expert_shape, expert_metrics=expert_metrics, settings=settings,
            max_loras=max_loras,
        )  # fmt: skip
        self._totals = Totals(
            self._accumulator,
            self._definitions(),
            labels,
            lambda: (self._is_up(), self._workers_up()),
            aliases=aliases,
        )

    def start(
        self,
        is_up: Callable[[], bool],
        workers_up: Callable[[], Sequence[bool]] | None = None,
        cache_config: Mapping[str, str] | None = None,
    ) -> None:
        """Set the sources of health; see `TritonStatLogger.start`. Both are called at every scrape."""
        self._accumulator.load_time = time.time()
        self._is_up = is_up
        self._workers_up = workers_up or (lambda: [is_up()])
        if cache_config is not None:
            info = make_cache_info(cache_config)
            self._accumulator.cache_info = series(info.name, **cache_config)
            self._totals.definitions = self._definitions(info)

    def _definitions(self, *more: MetricDefinition) -> tuple[MetricDefinition, ...]:
        metrics = (*self._metrics, *more)
        return (*metrics, *(make_aliases(metrics, self._max_loras) if self._aliases else ()))

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
