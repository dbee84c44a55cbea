"""Metrics by OTLP: everything in `definitions`, as it is on `/metrics`, and three histograms of the GenAI conventions.

The engine's own metrics are not recorded here: `Totals` has them all, and each export is a reading of it, turned into
OTLP's data model. So whatever is added to the table of metrics goes out by OTLP as well. Names, labels and buckets are
those of `/metrics`; sums are monotonic and cumulative from the moment at which the exporter was made, which is also
what says that the counts began anew after a restart of the model's process.

Only vLLM's names are left out: OpenTelemetry allows no colon in a name.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    InMemoryMetricReader,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from quire_engine.stats import FinishedRequestStats

from quire_monitoring.definitions import MetricKind, version
from quire_monitoring.otel.exporters import EXPORT_TIMEOUT_SECONDS, MetricExporter
from quire_monitoring.totals import Family, Totals
from quire_monitoring.totals import Histogram as TotalHistogram

logger = logging.getLogger(__name__)

DURATION_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
PER_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)

_CUMULATIVE = AggregationTemporality.CUMULATIVE
_UNITS = (
    ("_seconds", "s"),
    ("_ratio", "1"),
    ("_tokens", "{token}"),
    ("_requests", "{request}"),
    ("_blocks", "{block}"),
)


def unit_of(name: str) -> str:
    """The unit of a metric by its name, as UCUM writes it; empty where there is none."""
    return next((unit for word, unit in _UNITS if f"{word}_" in f"{name}_"), "")


class GenAIHistograms:
    """What the conventions say that a model server measures of its requests."""

    def __init__(self, attributes: Mapping[str, str]) -> None:
        self._attributes = dict(attributes)
        self.reader = InMemoryMetricReader()
        self._provider = MeterProvider([self.reader], shutdown_on_exit=False)
        meter = self._provider.get_meter("quire", version())
        self._duration = meter.create_histogram(
            "gen_ai.server.request.duration", "s", "From the request's arrival to its end",
            explicit_bucket_boundaries_advisory=DURATION_BUCKETS,
        )  # fmt: skip
        self._first_token = meter.create_histogram(
            "gen_ai.server.time_to_first_token", "s", "From the request's arrival to its first token",
            explicit_bucket_boundaries_advisory=FIRST_TOKEN_BUCKETS,
        )  # fmt: skip
        self._per_token = meter.create_histogram(
            "gen_ai.server.time_per_output_token", "s", "Mean time per token after the first",
            explicit_bucket_boundaries_advisory=PER_TOKEN_BUCKETS,
        )  # fmt: skip

    def record(self, request: FinishedRequestStats, error: Mapping[str, str]) -> None:
        """Count an ended request.

        Args:
            request: its times.
            error: the attribute `error.type`, if it failed.
        """
        attributes = {**self._attributes, "gen_ai.operation.name": request.options.operation, **error}
        self._duration.record(request.e2e_seconds, attributes)
        if request.time_to_first_token_seconds is not None:
            self._first_token.record(request.time_to_first_token_seconds, attributes)
        if request.time_per_output_token_seconds is not None:
            self._per_token.record(request.time_per_output_token_seconds, attributes)

    def read(self) -> list[Metric]:
        """The present state; nothing while no request has ended."""
        data = self.reader.get_metrics_data()
        resources = [] if data is None else data.resource_metrics
        return [metric for resource in resources for scope in resource.scope_metrics for metric in scope.metrics]

    def shutdown(self) -> None:
        """Let the SDK go."""
        self._provider.shutdown()


class MetricSender:
    """Sends all metrics at an interval, from a thread of its own, and once more when it is stopped.

    Args:
        exporter: where to.
        resource: what sends.
        histograms: those of the conventions.
        totals: the engine's own metrics.
        interval_seconds: between two exports.
    """

    def __init__(
        self,
        exporter: MetricExporter,
        resource: Resource,
        histograms: GenAIHistograms,
        totals: Totals,
        interval_seconds: float,
    ) -> None:
        self._exporter, self._resource, self._totals, self._histograms = exporter, resource, totals, histograms
        self._interval_seconds = interval_seconds
        self._scope = InstrumentationScope("quire", version())
        self._start_time = time.time_ns()
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="quire-otel-metrics", daemon=True)
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """Send the last values, for some seconds at most, and end the thread."""
        self._is_stopping.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_stopping.wait(self._interval_seconds)
            try:
                self._exporter.export(self._read(), 1000 * EXPORT_TIMEOUT_SECONDS)
            except Exception:
                logger.exception("metrics could not be exported")
        self._exporter.shutdown()

    def _read(self) -> MetricsData:
        own = [self._metric(family, time.time_ns()) for family in self._totals.read()]
        # In one scope: of two with an equal name, the exporter sends the last alone.
        scope = ScopeMetrics(self._scope, [*own, *self._histograms.read()], "")
        return MetricsData([ResourceMetrics(self._resource, [scope], "")])

    def _metric(self, family: Family, now: int) -> Metric:
        definition = family.definition
        points: list[Any] = []
        for own, value in family.series:
            attributes = {**family.labels, **own}
            if isinstance(value, TotalHistogram):
                points.append(self._histogram_point(attributes, value, definition.buckets, now))
            else:
                points.append(NumberDataPoint(attributes, self._start_time, now, value))
        data: Gauge | Sum | Histogram
        if definition.kind is MetricKind.GAUGE:
            data = Gauge(points)
        elif definition.kind is MetricKind.COUNTER:
            data = Sum(points, _CUMULATIVE, is_monotonic=True)
        else:
            data = Histogram(points, _CUMULATIVE)
        return Metric(definition.name, definition.help, unit_of(definition.name), data)

    def _histogram_point(
        self, attributes: Mapping[str, str], value: TotalHistogram, bounds: Sequence[float], now: int
    ) -> HistogramDataPoint:
        counts = value.cumulative_counts
        return HistogramDataPoint(
            attributes=attributes,
            start_time_unix_nano=self._start_time,
            time_unix_nano=now,
            count=counts[-1],
            sum=value.sum,
            bucket_counts=[count - below for below, count in zip((0, *counts), counts, strict=False)],
            explicit_bounds=bounds,
            # OTLP has them optional; of everything since the start they say little.
            min=None,  # type: ignore[arg-type]
            max=None,  # type: ignore[arg-type]
        )
