"""The engine's statistics as an operator's metrics.

It knows the engine only by `quire_engine.stats`, and Triton Inference Server only by the shape of its custom metrics.
`quire_monitoring.prometheus`, which needs prometheus-client, is imported by those who want it.
"""

from quire_monitoring.definitions import METRICS, MetricDefinition, MetricKind, make_aliases, make_metrics
from quire_monitoring.triton import TritonStatLogger

__all__ = ["METRICS", "MetricDefinition", "MetricKind", "TritonStatLogger", "make_aliases", "make_metrics"]
