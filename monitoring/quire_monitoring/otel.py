"""OtelStatLogger: metrics and one trace per request by OTLP, under OpenTelemetry's GenAI names.

It needs the extra `otel`. A request's spans are created when it has ended, from the times in its statistics::

    caller's context ─► request ─┬─ queue ─┬─ prefill ─┬─ decode ───────────────────────►
                                 └─────────┴───────────┴──────── preemption ── …

`record` only puts ended requests into a queue. A thread of its own creates spans and measurements of them, and the
SDK's threads export these in batches, so that an exporter that hangs blocks nothing. It is logged once when the
collector cannot be reached, and once when it can again; meanwhile spans are dropped as the SDK's buffer overflows.

Names: https://opentelemetry.io/docs/specs/semconv/gen-ai/ (metrics of model servers, spans).
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Mapping
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from quire_engine.stats import FinishedRequestStats, IterationStats, SchedulerStats

__all__ = ["OtelStatLogger"]

logger = logging.getLogger(__name__)

EXPORT_TIMEOUT_SECONDS = 2.0
STOP_SECONDS = 3.0
"""Seconds that the last export may take."""
MAX_PENDING = 10_000
"""Ended requests that may wait for their spans; more than that get none."""
OPERATION = "text_completion"
REJECTED = "rejected"
DURATION_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
PER_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)

_EXPORTER_LOGGER = "opentelemetry.exporter.otlp.proto.grpc.exporter"
_PROCESSOR_LOGGER = "opentelemetry.sdk._shared_internal"


class _Outage:
    """Logs once that the collector cannot be reached, and once that it can again."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._is_out = False
        # The exporter logs every attempt, the processor every span that finds no room.
        logging.getLogger(_EXPORTER_LOGGER).addFilter(_is_nothing)
        logging.getLogger(_PROCESSOR_LOGGER).addFilter(_is_not_of_a_full_queue)

    def take_note(self, exported: bool) -> None:
        with self._lock:
            changed, self._is_out = self._is_out == exported, not exported
        if changed and not exported:
            logger.warning("nothing can be exported to the OTLP collector at %s; trying again quietly", self._endpoint)
        elif changed:
            logger.warning("the OTLP collector at %s takes exports again", self._endpoint)


def _is_nothing(record: logging.LogRecord) -> bool:
    return False


def _is_not_of_a_full_queue(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("Queue full")


class _SpanExporter(OTLPSpanExporter):
    """One that keeps quiet."""

    outage: _Outage

    def export(self, spans: Any) -> SpanExportResult:
        """See the base class."""
        result = super().export(spans)
        self.outage.take_note(result is SpanExportResult.SUCCESS)
        return result


class _MetricExporter(OTLPMetricExporter):
    """One that keeps quiet."""

    outage: _Outage

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> MetricExportResult:
        """See the base class."""
        result = super().export(metrics_data, timeout_millis, **kwargs)
        self.outage.take_note(result is MetricExportResult.SUCCESS)
        return result


class OtelStatLogger:
    """A `StatLogger` that exports.

    Args:
        endpoint: of the collector's gRPC receiver, as `host:port` or `http://host:port`; `https://` is encrypted.
        labels: model, version and engine.
        trace_sample_ratio: share of the requests that have a trace; a caller's own decision overrides it.
        export_interval_seconds: between two exports of the metrics; spans wait for a tenth of that.
    """

    def __init__(
        self,
        endpoint: str,
        labels: Mapping[str, str],
        *,
        trace_sample_ratio: float = 1.0,
        export_interval_seconds: float = 10.0,
    ) -> None:
        model = labels.get("model", "")
        self._attributes = {
            "gen_ai.operation.name": OPERATION, "gen_ai.provider.name": "quire",
            "gen_ai.request.model": model, "gen_ai.response.model": model,
        }  # fmt: skip
        self._span_name = f"{OPERATION} {model}"
        resource = Resource.create(
            {"service.name": "quire", **{f"quire.{name}": value for name, value in labels.items()}}
        )
        options: dict[str, Any] = {
            "endpoint": endpoint, "insecure": not endpoint.startswith("https://"), "timeout": EXPORT_TIMEOUT_SECONDS,
        }  # fmt: skip
        spans, metrics = _SpanExporter(**options), _MetricExporter(**options)
        spans.outage = metrics.outage = _Outage(endpoint)
        self._tracer_provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(trace_sample_ratio)), resource=resource, shutdown_on_exit=False
        )
        delay_ms = 100 * export_interval_seconds
        self._tracer_provider.add_span_processor(BatchSpanProcessor(spans, schedule_delay_millis=delay_ms))
        self._tracer: Tracer = self._tracer_provider.get_tracer("quire")
        reader = PeriodicExportingMetricReader(metrics, 1000 * export_interval_seconds, 1000 * EXPORT_TIMEOUT_SECONDS)
        self._meter_provider = MeterProvider([reader], resource, shutdown_on_exit=False)
        meter = self._meter_provider.get_meter("quire")
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
        self._propagator = TraceContextTextMapPropagator()
        self._ended: queue.Queue[tuple[int, FinishedRequestStats] | None] = queue.Queue(MAX_PENDING)
        self._thread = threading.Thread(target=self._run, name="quire-otel", daemon=True)
        self._thread.start()

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
        """Record the ended requests; returns at once."""
        with contextlib.suppress(queue.Full):
            for request in iteration_stats.finished_requests:
                self._ended.put_nowait((time.time_ns(), request))

    def record_rejection(self, request: FinishedRequestStats) -> None:
        """The same for a request that was refused before it reached the engine: its trace is one span."""
        self.record(None, IterationStats(finished_requests=[request]))

    def stop(self) -> None:
        """Export what is left, for a few seconds at most, and end all threads."""
        try:
            self._ended.put(None, timeout=STOP_SECONDS)
        except queue.Full:
            logger.warning("the last spans are lost")
        self._thread.join(STOP_SECONDS)
        # A collector that hangs must not delay the end; the threads are daemons.
        for shutdown in (self._tracer_provider.shutdown, self._meter_provider.shutdown):
            thread = threading.Thread(target=shutdown, daemon=True)
            thread.start()
            thread.join(STOP_SECONDS)

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (ended := self._ended.get()) is not None:
            self._export(*ended)

    def _export(self, end: int, request: FinishedRequestStats) -> None:
        try:
            self._measure(request)
            self._trace(end, request)
        except Exception:
            logger.exception("the trace of a request could not be made")

    def _measure(self, request: FinishedRequestStats) -> None:
        attributes = self._attributes | _error_type(request)
        self._duration.record(request.e2e_seconds, attributes)
        if request.time_to_first_token_seconds is not None:
            self._first_token.record(request.time_to_first_token_seconds, attributes)
        if request.time_per_output_token_seconds is not None:
            self._per_token.record(request.time_per_output_token_seconds, attributes)

    def _trace(self, end: int, request: FinishedRequestStats) -> None:
        """Create a request's spans.

        Args:
            end: when it ended, in nanoseconds of the wall clock; all else is counted back from that.
            request: its times.
        """
        start = end - int(1e9 * request.e2e_seconds)
        parent = Context()
        if request.traceparent is not None:
            parent = self._propagator.extract({"traceparent": request.traceparent}, parent)
        span = self._tracer.start_span(
            self._span_name, parent, SpanKind.SERVER, self._span_attributes(request), start_time=start
        )
        if span.is_recording():
            for error_type in _error_type(request).values():
                span.set_status(Status(StatusCode.ERROR, error_type))
            context = set_span_in_context(span, parent)
            for name, begin_seconds, end_seconds in _phases(request):
                child = self._tracer.start_span(name, context, start_time=start + int(1e9 * begin_seconds))
                child.end(start + int(1e9 * end_seconds))
        span.end(end)

    def _span_attributes(self, request: FinishedRequestStats) -> dict[str, Any]:
        optional = {
            "gen_ai.response.id": request.label,
            "quire.slo.class": request.slo_class,
            "quire.slo.verdict": request.slo_verdict,
            "quire.slo.cause": request.slo_cause,
        }
        attributes = {
            **self._attributes,
            **_error_type(request),
            **{name: value for name, value in optional.items() if value},
        }  # fmt: skip
        if request.finish_reason == REJECTED:
            return attributes
        return {
            **attributes,
            "gen_ai.request.choice.count": request.num_sequences,
            "gen_ai.response.finish_reasons": [request.finish_reason],
            "gen_ai.usage.input_tokens": request.num_prompt_tokens,
            "gen_ai.usage.output_tokens": request.num_output_tokens,
            "quire.num_cached_tokens": request.num_cached_tokens,
            "quire.num_preemptions": request.num_preemptions,
            **_drafts(request),
        }


def _error_type(request: FinishedRequestStats) -> dict[str, str]:
    """The attribute with the kind of error; none if there was no error."""
    if request.finish_reason not in ("error", REJECTED):
        return {}
    return {"error.type": request.error_code or "error"}


def _drafts(request: FinishedRequestStats) -> dict[str, float]:
    """The attributes of speculative decoding; none if the request had no drafts."""
    if request.acceptance_length is None:
        return {}
    return {
        "quire.num_draft_tokens": request.num_draft_tokens,
        "quire.num_accepted_tokens": request.num_accepted_tokens,
        "quire.acceptance_length": request.acceptance_length,
    }


def _phases(request: FinishedRequestStats) -> list[tuple[str, float, float]]:
    """`(name, begin, end)` of the child spans, in seconds from the request's arrival."""
    if request.finish_reason == REJECTED:
        return []
    first_token = request.time_to_first_token_seconds
    if first_token is None:  # it ended while it waited, or in its prefill
        return [("queue", 0.0, request.e2e_seconds)]
    prefill = max(first_token - request.prefill_seconds, 0.0)
    return [
        ("queue", 0.0, prefill),
        ("prefill", prefill, first_token),
        ("decode", first_token, first_token + request.decode_seconds),
        *(("preemption", begin, end) for begin, end in request.preemptions),
    ]
