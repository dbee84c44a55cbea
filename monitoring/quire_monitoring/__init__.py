"""The engine's statistics as an operator's metrics.

It knows the engine only by `quire_engine.stats`, and Triton Inference Server only by the shape of its custom metrics.
"""

from quire_monitoring.definitions import METRICS, MetricDefinition, MetricKind
from quire_monitoring.triton import TritonStatLogger

__all__ = ["METRICS", "MetricDefinition", "MetricKind", "TritonStatLogger"]
