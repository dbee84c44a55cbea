"""Every metric, once: name, kind, help, labels and buckets.

Exporters read this table and nothing else, so that a metric has the same name and meaning wherever it is seen.
Times are in seconds, ratios from 0 to 1.
"""

import enum
from dataclasses import dataclass, field
from itertools import product

__all__ = ["METRICS", "OUTCOMES", "MetricDefinition", "MetricKind"]

OUTCOMES = ("stop", "length", "abort", "error", "rejected")
"""How a request ended: the engine's finish reasons, and `rejected` for one that never reached it or
that it had no place for."""

# vLLM's buckets, so that its dashboards fit, continued downwards: small models answer faster than their first bucket.
_FIRST_TOKEN_BUCKETS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
_PER_TOKEN_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
_REQUEST_BUCKETS = (
    0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip


class MetricKind(enum.Enum):
    """What a metric can do: be set, only grow, or count observations by size."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricDefinition:
    """One metric family. `model`, `version` and `engine` label every series besides its own labels."""

    name: str
    kind: MetricKind
    help: str
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Own labels with all their values; clients never add one, so the number of series is known."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets."""

    def label_sets(self) -> list[dict[str, str]]:
        """The own labels of every series; one empty set for a family without any."""
        return [dict(zip(self.labels, values, strict=True)) for values in product(*self.labels.values())]


def _gauge(name: str, text: str, **labels: tuple[str, ...]) -> MetricDefinition:
    return MetricDefinition(name=name, kind=MetricKind.GAUGE, help=text, labels=labels)


def _counter(name: str, text: str, **labels: tuple[str, ...]) -> MetricDefinition:
    return MetricDefinition(name=name, kind=MetricKind.COUNTER, help=text, labels=labels)


def _histogram(name: str, text: str, buckets: tuple[float, ...]) -> MetricDefinition:
    return MetricDefinition(name=name, kind=MetricKind.HISTOGRAM, help=text, buckets=buckets)


METRICS: tuple[MetricDefinition, ...] = (
    _gauge("quire_engine_up", "1 while the engine steps, 0 once it is gone"),
    _gauge("quire_requests_running", "Requests in the running batch"),
    _gauge("quire_requests_waiting", "Requests that wait to be scheduled", reason=("capacity", "grammar")),
    _gauge("quire_kv_blocks", "KV cache blocks: referred to by live requests, reusable by an equal prefix, or empty",
           state=("used", "cached", "free")),
    _gauge("quire_kv_cache_usage_ratio", "Share of the KV cache blocks that live requests hold"),
    _counter("quire_requests_total", "Requests that ended", outcome=OUTCOMES),
    _counter("quire_prompt_tokens_total", "Prompt tokens of requests whose first token came"),
    _counter("quire_prompt_tokens_cached_total", "Prompt tokens that were found in the prefix cache"),
    _counter("quire_generation_tokens_total", "Generated tokens"),
    _counter("quire_preemptions_total", "Times a running request was put back to wait"),
    _counter("quire_prefix_cache_queries_total", "Tokens looked up in the prefix cache"),
    _counter("quire_prefix_cache_hits_total", "Tokens found in the prefix cache"),
    _counter("quire_engine_restarts_total", "Times the engine was started again after a crash or a hang"),
    _counter("quire_requests_replayed_total", "Live requests that went on after a restart of the engine"),
    _histogram("quire_time_to_first_token_seconds", "From the request's arrival to its first token",
               _FIRST_TOKEN_BUCKETS),
    _histogram("quire_time_per_output_token_seconds", "Mean time per token after the first, per request",
               _PER_TOKEN_BUCKETS),
    _histogram("quire_e2e_request_latency_seconds", "From the request's arrival to its end", _REQUEST_BUCKETS),
    _histogram("quire_request_queue_time_seconds", "From the engine core's admission of the request to its first step",
               _REQUEST_BUCKETS),
)  # fmt: skip
