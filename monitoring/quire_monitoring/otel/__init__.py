"""OtelStatLogger: all metrics and one trace per request by OTLP, requests under OpenTelemetry's GenAI names.

It needs the extra `otel`. A request's spans are created when it has ended, from the times in its statistics::

    caller's context ─► request ─── queue ─── prefill ─── decode ─── preemption ─── decode ─►    each phase in its turn

`record` only puts ended requests into a queue. A thread of its own creates spans and measurements of them, another one
reads the engine's metrics and sends them, and the SDK's thread exports spans in batches, so that an exporter that hangs
blocks nothing. It is logged once when the collector cannot be reached, and once when it can again; meanwhile spans are
dropped as the SDK's buffer overflows, and metrics, which are totals, are only late.

Names: https://github.com/open-telemetry/semantic-conventions-genai (metrics of model servers, spans).
"""

import contextlib
import logging
import queue
import threading
import time
import uuid
from collections.abc import Mapping
from functools import partial

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from quire_engine.stats import FinishedRequestStats, IterationStats, SchedulerStats

from quire_monitoring.definitions import version
from quire_monitoring.otel.exporters import make_exporters
from quire_monitoring.otel.metrics import GenAIHistograms, MetricSender
from quire_monitoring.otel.traces import RequestTraces, error_type
from quire_monitoring.totals import Totals

__all__ = ["OtelStatLogger"]

logger = logging.getLogger(__name__)

STOP_SECONDS = 3.0
"""Seconds that the last export may take."""
MAX_PENDING = 10_000
"""Ended requests that may wait for their spans; more than that get none."""


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
        attributes = {
            "gen_ai.provider.name": "quire",
            "gen_ai.request.model": model, "gen_ai.response.model": model,
        }  # fmt: skip
        resource = make_resource(labels)
        spans, metrics = make_exporters(endpoint)
        self._tracer_provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(trace_sample_ratio)), resource=resource, shutdown_on_exit=False
        )
        delay_ms = 100 * export_interval_seconds
        self._tracer_provider.add_span_processor(BatchSpanProcessor(spans, schedule_delay_millis=delay_ms))
        self._traces = RequestTraces(self._tracer_provider.get_tracer("quire", version()), attributes)
        self._histograms = GenAIHistograms(attributes)
        self._sender: MetricSender | None = None
        self._make_sender = partial(
            MetricSender, metrics, resource, self._histograms, interval_seconds=export_interval_seconds
        )
        self._ended: queue.Queue[tuple[int, FinishedRequestStats] | None] = queue.Queue(MAX_PENDING)
        self._thread = threading.Thread(target=self._run, name="quire-otel", daemon=True)
        self._thread.start()

    def start(self, totals: Totals) -> None:
        """Begin to send metrics; unless this is called, only traces are sent.

        Args:
            totals: the engine's metrics, which another `StatLogger` records.
        """
        self._sender = self._make_sender(totals)

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
        """Record the ended requests; returns at once."""
        with contextlib.suppress(queue.Full):
            for request in iteration_stats.finished_requests:
                self._ended.put_nowait((time.time_ns(), request))

    def record_rejection(self, request: FinishedRequestStats) -> None:
        """The same for a request that was rejected before it reached the engine: its trace is one span."""
        self.record(None, IterationStats(finished_requests=[request]))

    def stop(self) -> None:
        """Export what is left, for a few seconds at most, and end all threads."""
        try:
            self._ended.put(None, timeout=STOP_SECONDS)
        except queue.Full:
            logger.warning("the last spans are lost")
        self._thread.join(STOP_SECONDS)
        # A collector that hangs must not delay the end; the threads are daemons.
        if self._sender is not None:
            self._sender.stop(STOP_SECONDS)
        self._histograms.shutdown()
        thread = threading.Thread(target=self._tracer_provider.shutdown, daemon=True)
        thread.start()
        thread.join(STOP_SECONDS)

    def _run(self) -> None:
        while (ended := self._ended.get()) is not None:
            self._export(*ended)

    def _export(self, end: int, request: FinishedRequestStats) -> None:
        try:
            self._histograms.record(request, error_type(request))
            self._traces.make(end, request)
        except Exception:
            logger.exception("the trace of a request could not be made")


def make_resource(labels: Mapping[str, str]) -> Resource:
    """What sends: OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES, where they are set, else names of ours.

    Each process of a model is an instance of its own, so that one that was started again is told from the one before.
    """
    own = {
        "service.name": "quire", "service.version": version(), "service.instance.id": str(uuid.uuid4()),
        **{f"quire.{name}": value for name, value in labels.items()},
    }  # fmt: skip
    return Resource.create(own).merge(OTELResourceDetector().detect())
