"""Exporters that say once that the collector cannot be reached, and once that it can again."""

import logging
import threading
from typing import Any

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData
from opentelemetry.sdk.trace.export import SpanExportResult

logger = logging.getLogger(__name__)

EXPORT_TIMEOUT_SECONDS = 2.0
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


class SpanExporter(OTLPSpanExporter):
    """One that keeps quiet."""

    outage: _Outage

    def export(self, spans: Any) -> SpanExportResult:
        """See the base class."""
        result = super().export(spans)
        self.outage.take_note(result is SpanExportResult.SUCCESS)
        return result


class MetricExporter(OTLPMetricExporter):
    """One that keeps quiet."""

    outage: _Outage

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> MetricExportResult:
        """See the base class."""
        result = super().export(metrics_data, timeout_millis, **kwargs)
        self.outage.take_note(result is MetricExportResult.SUCCESS)
        return result


def make_exporters(endpoint: str) -> tuple[SpanExporter, MetricExporter]:
    """Both for one collector, of whose outage one line tells.

    Args:
        endpoint: of its gRPC receiver, as `host:port` or `http://host:port`; `https://` is encrypted.
    """
    options: dict[str, Any] = {
        "endpoint": endpoint, "insecure": not endpoint.startswith("https://"), "timeout": EXPORT_TIMEOUT_SECONDS,
    }  # fmt: skip
    spans, metrics = SpanExporter(**options), MetricExporter(**options)
    spans.outage = metrics.outage = _Outage(endpoint)
    return spans, metrics
