"""An OTLP collector that keeps what it gets: the gRPC services of opentelemetry-proto, on a free port of loopback."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

__all__ = ["Collector", "attributes_of", "collect", "samples_of"]


class Collector:
    """What has come."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        self.metrics: dict[str, Any] = {}
        """Name → the latest state of it: they are cumulative."""
        self.num_exports = 0
        """Of metrics."""
        self.changed = threading.Condition()

    def wait_for(self, condition: Any, timeout: float = 60.0) -> None:
        """Wait until something holds of what has come."""
        with self.changed:
            assert self.changed.wait_for(condition, timeout), (self.spans, self.metrics)


class _Traces(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        with self._collector.changed:
            for resource_spans in request.resource_spans:
                self._collector.resources.append(attributes_of(resource_spans.resource))
                for scope_spans in resource_spans.scope_spans:
                    self._collector.spans += scope_spans.spans
            self._collector.changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        with self._collector.changed:
            self._collector.num_exports += 1
            for resource_metrics in request.resource_metrics:
                self._collector.resources.append(attributes_of(resource_metrics.resource))
                for scope_metrics in resource_metrics.scope_metrics:
                    self._collector.metrics.update({metric.name: metric for metric in scope_metrics.metrics})
            self._collector.changed.notify_all()
        return metrics_service_pb2.ExportMetricsServiceResponse()


@contextmanager
def collect(address: str = "127.0.0.1:0") -> Iterator[Collector]:
    """A collector that listens."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(max_workers=4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Traces(collector), server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_Metrics(collector), server)
    port = server.add_insecure_port(address)
    collector.endpoint = f"http://127.0.0.1:{port}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(grace=None).wait()


def attributes_of(item: Any) -> dict[str, Any]:
    """The attributes of a span, a data point or a resource."""

    def value_of(value: Any) -> Any:
        kind = value.WhichOneof("value")
        if kind == "array_value":
            return [value_of(one) for one in value.array_value.values]
        return getattr(value, kind)

    return {attribute.key: value_of(attribute.value) for attribute in item.attributes}


def samples_of(metric: Any) -> Iterator[tuple[str, dict[str, str], float]]:
    """What a scrape of Prometheus would show of a metric: the name, labels and value of each of its samples."""
    kind = metric.WhichOneof("data")
    for point in getattr(metric, kind).data_points:
        labels = attributes_of(point)
        if kind != "histogram":
            yield metric.name, labels, point.as_double if point.HasField("as_double") else point.as_int
            continue
        yield metric.name + "_count", labels, point.count
        yield metric.name + "_sum", labels, point.sum
        total = 0
        for bound, count in zip((*point.explicit_bounds, float("inf")), point.bucket_counts, strict=True):
            total += count
            yield metric.name + "_bucket", {**labels, "le": "+Inf" if bound == float("inf") else f"{bound:g}"}, total
