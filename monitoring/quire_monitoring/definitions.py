"""The table of all metrics: name, kind, help, labels, buckets, and vLLM's name.

All exporters use this table, so that a metric has the same name and meaning everywhere.
Times are in seconds, ratios from 0 to 1.
"""

import enum
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from importlib import metadata
from itertools import product

from quire_engine.config import TIERS
from quire_engine.slo import DEFAULT_CLASS, NO_TARGETS, SLOTargets
from quire_engine.timeline import RequestPhase


def version(package: str = "quire") -> str:
    """The version of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # its folder is on PYTHONPATH, and nothing is installed
        return "unknown"


BUILD: Mapping[str, str] = {"quire": version(), "python": platform.python_version(), "torch": version("torch")}
"""The labels of `quire_build_info`: `version` is the label of the model's version."""
DEFAULT_CLASSES: Mapping[str, SLOTargets] = {DEFAULT_CLASS: NO_TARGETS}
"""Where the setting `slo` says nothing."""
Series = tuple[str, tuple[tuple[str, str], ...]]
"""A metric's name and its own labels."""

OUTCOMES = ("stop", "length", "abort", "error", "rejected")
"""How a request ended: the engine's finish reasons, and `rejected` for one that never reached it or for which it had no
capacity."""
KV_CONNECTOR_OUTCOMES = ("saved", "loaded", "save_failed", "load_failed")
KV_TIERS = tuple(TIERS.values())
"""What may keep KV blocks beside the cache."""
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
"""vLLM's names, by the level."""
PHASES = ("schedule", "execute", "update")
REFUSALS = ("ttft", "queue_full", "queue_delay")
"""Why the engine had no capacity for a request: `EngineCoreOutput.refusal`."""
TARGETS = ("ttft", "tpot", "e2e")
WINDOWS = {"1m": 60.0, "5m": 300.0}
"""Windows of the goodput ratios, in seconds."""
VERDICTS = (("good", "none"), *(("miss", cause) for cause in (*TARGETS, "rejected", "error")))

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
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0,
    40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_STEP_BUCKETS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
_LENGTH_BUCKETS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_ERROR_BUCKETS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.0, 5.0)
_SEQUENCES_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)
_STEP_TOKENS_BUCKETS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)


class MetricKind(enum.Enum):
    """Whether a metric can be set, only grows, or counts observations by size."""

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
    is_frequent: bool = False
    """Whether a histogram is observed with every step or token, and not only with every request."""
    combinations: tuple[tuple[str, ...], ...] = ()
    """Combinations of the labels' values, if not all of them occur."""
    is_open: bool = False
    """Whether series come while the model serves, with values that its operators have given; see `MAX_ADAPTERS`."""

    def label_sets(self) -> list[dict[str, str]]:
        """The own labels of every series that is known from the start; one empty set for a family without any."""
        if self.is_open:
            return []
        if self.combinations:
            return [dict(zip(self.labels, values, strict=True)) for values in self.combinations]
        return [dict(zip(self.labels, values, strict=True)) for values in product(*self.labels.values())]


@lru_cache(1 << 16)
def series(name: str, **labels: str) -> Series:
    """One series of a metric."""
    return name, tuple(sorted(labels.items()))


def _gauge(name: str, text: str, **labels: tuple[str, ...]) -> MetricDefinition:
    return MetricDefinition(name=name, kind=MetricKind.GAUGE, help=text, labels=labels)


def _counter(name: str, text: str, **labels: tuple[str, ...]) -> MetricDefinition:
    return MetricDefinition(name=name, kind=MetricKind.COUNTER, help=text, labels=labels)


def _histogram(
    name: str, text: str, buckets: tuple[float, ...], is_frequent: bool = False, **labels: tuple[str, ...]
) -> MetricDefinition:
    return MetricDefinition(
        name=name, kind=MetricKind.HISTOGRAM, help=text, labels=labels, buckets=buckets, is_frequent=is_frequent
    )


_PHASES: Mapping[RequestPhase, str] = {  # without "encode", which is of models that take images
    "held": "Until an engine got the request, while there was none",
    "queue": "From the request's arrival to its first step, or to its end before that",
    "prefill": "From the request's first step to its first token",
    "decode": "From the request's first token to its end, without the phases below",
    "preempted": "From each loss of a request's blocks to its next token",
    "replayed": "From each hand-over of a request, after the death of an engine, to its next token",
}

_ENGINE: tuple[MetricDefinition, ...] = (
    _gauge("quire_engine_up", "1 while the engine steps, 0 once it is gone"),
    _gauge("quire_engine_sleep_state", "1 for the state that the engine is in: awake, sleep level 1 or sleep level 2",
           sleep_state=SLEEP_STATES),
    _gauge("quire_server_start_time_seconds", "When the server's process was started, in seconds since the epoch"),
    _gauge("quire_build_info", "Always 1; the labels are the versions of Quire, Python and torch",
           **{name: (value,) for name, value in BUILD.items()}),
    _gauge("quire_requests_running", "Requests in the running batch"),
    _gauge("quire_requests_waiting", "Requests that wait to be scheduled, or (held) for an engine",
           reason=("queue", "grammar", "remote_kv", "adapter", "held")),
    _gauge("quire_kv_blocks", "KV cache blocks: referred to by live requests, reusable by an equal prefix, or empty",
           state=("used", "cached", "free")),
    _gauge("quire_state_blocks", "States of recurrent layers, like quire_kv_blocks; of models with both kinds",
           state=("used", "cached", "free")),
    _gauge("quire_kv_cache_usage_ratio", "Share of the KV cache blocks that live requests hold"),
    _counter("quire_requests_total", "Requests that ended", outcome=OUTCOMES),
    _counter("quire_prompt_tokens_total", "Prompt tokens of requests whose first token came"),
    _counter("quire_prompt_tokens_cached_total", "Prompt tokens that were found in the prefix cache"),
    _counter("quire_generation_tokens_total", "Generated tokens"),
    _counter("quire_preemptions_total", "Times a running request was put back to wait"),
    _counter("quire_kv_block_evictions_total", "Cached blocks that were given to a request for other content"),
    _counter("quire_prefix_cache_queries_total", "Tokens looked up in the prefix cache"),
    _counter("quire_prefix_cache_hits_total", "Tokens found in the prefix cache"),
    _counter("quire_external_prefix_cache_queries_total",
             "Tokens of new requests that were not in the prefix cache, and looked for in what a KV connector keeps"),
    _counter("quire_external_prefix_cache_hits_total", "Tokens of new requests that a KV connector loaded"),
    _counter("quire_kv_connector_blocks_total", "KV blocks that a connector saved or loaded, or could not",
             outcome=KV_CONNECTOR_OUTCOMES),
    _counter("quire_kv_connector_bytes_total", "Bytes of KV blocks that a connector saved and loaded, of all ranks",
             direction=("save", "load")),
    _counter("quire_kv_connector_tier_blocks_total", "KV blocks that each of several connectors saved or loaded, or "
             "could not", tier=KV_TIERS, outcome=KV_CONNECTOR_OUTCOMES),
    _counter("quire_engine_restarts_total", "Times the engine was started again after a crash or a hang"),
    _counter("quire_requests_replayed_total", "Live requests that went on after a restart of the engine"),
    _counter("quire_requests_moved_total", "Live requests that were taken over from a replica that left"),
    _counter("quire_spec_decode_drafts_total", "Times that a request had drafts in a step"),
    _counter("quire_spec_decode_draft_tokens_total", "Tokens that were drafted, and computed along with known ones"),
    _counter("quire_spec_decode_accepted_tokens_total", "Drafted tokens that the model sampled in their place"),
    _histogram("quire_inter_token_latency_seconds", "From one token of a request to its next", _PER_TOKEN_BUCKETS,
               is_frequent=True),
    *(_histogram(f"quire_request_{phase}_time_seconds", text, _REQUEST_BUCKETS) for phase, text in _PHASES.items()),
    _histogram("quire_request_prompt_tokens", "Prompt tokens per request", _LENGTH_BUCKETS),
    _histogram("quire_request_generation_tokens", "Generated tokens per request", _LENGTH_BUCKETS),
    _histogram("quire_request_params_n", "Sequences per request", _SEQUENCES_BUCKETS),
    # vLLM's boards ask for these; by sums once a second they cost few round trips, however many requests end.
    _histogram("quire_request_inference_time_seconds", "The request's time in engines, without queues",
               _REQUEST_BUCKETS, is_frequent=True),
    _histogram("quire_request_params_max_tokens", "Tokens that the request may generate, where it says so",
               _LENGTH_BUCKETS, is_frequent=True),
    _histogram("quire_request_computed_prompt_tokens", "Prompt tokens per request that were not found in the cache",
               _LENGTH_BUCKETS, is_frequent=True),
    _histogram("quire_request_longest_generation_tokens", "Generated tokens of the longest sequence, per request",
               _LENGTH_BUCKETS, is_frequent=True),
    _histogram("quire_iteration_tokens", "Tokens computed per step", _STEP_TOKENS_BUCKETS, is_frequent=True),
    _histogram("quire_step_seconds", "What a step of the engine core took, by phase", _STEP_BUCKETS, is_frequent=True,
               phase=PHASES),
    _histogram("quire_ttft_prediction_error_ratio",
               "How far the time to first token was from what was predicted, as a share of it", _ERROR_BUCKETS),
    _histogram("quire_cancel_to_free_seconds", "From a request's cancellation to the release of its blocks",
               _FIRST_TOKEN_BUCKETS),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsConfig:
    """Which series a model has."""

    slo_classes: Mapping[str, SLOTargets] = field(default_factory=lambda: DEFAULT_CLASSES)
    """The classes of the setting `slo`."""
    num_ranks: int = 1
    """Processes that share the model."""
    max_draft_tokens: int = 0
    """Most draft tokens of a request in a step; 0 without speculative decoding."""
    expert_shape: tuple[int, int] | None = None
    """Layers, and experts per layer; None without experts."""
    expert_metrics: bool = False
    """Whether each expert of each layer has a series."""
    settings: str = ""
    """A short name of the model's settings, which differs for different settings."""
    max_loras: int = 0
    """LoRA adapters of one step; 0 without LoRA."""
    takes_images: bool = False
    """Whether prompts may have images."""
    aliases: bool = True
    """Whether there are series under vLLM's names, too."""


def _of_experts(shape: tuple[int, int], ranks: tuple[str, ...], each: bool) -> list[MetricDefinition]:
    layers, experts = (tuple(map(str, range(number))) for number in shape)
    return [
        _gauge("quire_expert_imbalance_ratio", "Tokens of the busiest expert or rank per those of one on average",
               over=("experts", "ranks"), layers=("mean", "max")),
        _counter("quire_expert_rank_tokens_total", "Tokens that the rank computed experts for, once for each expert",
                 rank=ranks),
        *([_counter("quire_expert_tokens_total", "Tokens that a layer sent to the expert",
                    layer=layers, expert=experts)] if each else []),
    ]  # fmt: skip


def _of_adapters() -> list[MetricDefinition]:
    return [
        _gauge("quire_lora_adapters", "LoRA adapters in memory, and those of them that requests use",
               state=("ready", "in_use")),
        _counter("quire_lora_loads_total", "LoRA adapters that were loaded into memory, or could not be",
                 outcome=("loaded", "failed")),
        _counter("quire_lora_evictions_total", "LoRA adapters that left memory because another needed the room"),
        replace(_counter("quire_lora_requests_total", "Requests with the LoRA adapter that ended", adapter=()),
                is_open=True),
        replace(_counter("quire_lora_generation_tokens_total", "Tokens that these had generated", adapter=()),
                is_open=True),
    ]  # fmt: skip


def _of_images() -> list[MetricDefinition]:
    return [
        _counter("quire_image_cache_queries_total", "Images of prompts, looked up among those that were encoded last"),
        _counter("quire_image_cache_hits_total", "Images of prompts that were found there"),
        _counter("quire_image_failures_total", "Images of prompts that could not be decoded or encoded"),
        _histogram("quire_image_encode_seconds", "Decoding and encoding of an image, without the wait for others",
                   _REQUEST_BUCKETS),
        _histogram("quire_request_encode_time_seconds", "From the request's arrival until its images were encoded",
                   _REQUEST_BUCKETS),
    ]  # fmt: skip


DEFAULT_CONFIG = MetricsConfig()


def make_metrics(config: MetricsConfig = DEFAULT_CONFIG) -> tuple[MetricDefinition, ...]:
    """All metrics of a model under their own names."""
    classes, ranks = tuple(config.slo_classes), tuple(map(str, range(config.num_ranks)))
    positions = tuple(map(str, range(config.max_draft_tokens)))
    targets = tuple((name, target) for name, of_class in config.slo_classes.items() for target in of_class.seconds())
    return (
        *_ENGINE,
        _gauge("quire_model_load_timestamp_seconds", "When the model was loaded, in seconds since the epoch",
               settings=(config.settings,)),
        _gauge("quire_worker_up", "1 while the rank's process runs", rank=ranks),
        _counter("quire_worker_busy_seconds_total", "What the rank computed for, without waits for other ranks",
                 rank=ranks),
        *([_counter("quire_spec_decode_accepted_tokens_per_pos_total", "Accepted tokens, by their place in the draft",
                    position=positions)] if positions else []),
        *(_of_experts(config.expert_shape, ranks, config.expert_metrics) if config.expert_shape is not None else []),
        *(_of_adapters() if config.max_loras else []),
        *(_of_images() if config.takes_images else []),
        _histogram("quire_time_to_first_token_seconds", "From the request's arrival to its first token",
                   _FIRST_TOKEN_BUCKETS, slo=classes),
        _histogram("quire_time_per_output_token_seconds", "Mean time per token after the first, per request",
                   _PER_TOKEN_BUCKETS, slo=classes),
        _histogram("quire_e2e_request_latency_seconds",
                   "From the request's arrival to its end, unless it was rejected at once", _REQUEST_BUCKETS,
                   slo=classes),
        _gauge("quire_slo_objective_ratio", "Share of the requests that is promised to meet their objectives",
               slo=classes),
        *([MetricDefinition(
            name="quire_slo_target_seconds", kind=MetricKind.GAUGE, help="The longest time that is good",
            labels={"slo": classes, "target": TARGETS}, combinations=targets,
        )] if targets else []),
        _gauge("quire_goodput_ratio", "Share of the requests that met their objectives, of those judged lately",
               slo=classes, window=tuple(WINDOWS)),
        _gauge("quire_requests_overdue", "Live requests whose first token, next token or end is later than the target",
               slo=classes, target=TARGETS),
        _counter("quire_requests_refused_total", "Requests that the engine had no capacity for, by the reason",
                 slo=classes, reason=REFUSALS),
        _counter("quire_goodput_tokens_total", "Generated tokens of requests that met their objectives", slo=classes),
        MetricDefinition(
            name="quire_slo_requests_total",
            kind=MetricKind.COUNTER,
            help="Requests that were judged by their objectives, with the first objective that was missed",
            labels={"slo": classes, "verdict": ("good", "miss"), "cause": tuple(cause for _, cause in VERDICTS)},
            combinations=tuple((name, *verdict) for name in classes for verdict in VERDICTS),
        ),
    )  # fmt: skip


def make_cache_info(labels: Mapping[str, str]) -> MetricDefinition:
    """The metric that is always 1, whose labels say how the KV cache is made.

    Args:
        labels: under vLLM's names.
    """
    return _gauge("quire_cache_config_info", "How the KV cache is made", **{k: (v,) for k, v in labels.items()})


METRICS = make_metrics()
"""All metrics of a model with one rank and no classes of objectives but the default one."""


# -- vLLM's names -----------------------------------------------------------------------------------------------------

_ALIASES = {
    "quire_engine_sleep_state": "vllm:engine_sleep_state",
    "quire_requests_running": "vllm:num_requests_running",
    "quire_requests_waiting": "vllm:num_requests_waiting",
    "quire_kv_cache_usage_ratio": "vllm:kv_cache_usage_perc",
    "quire_requests_total": "vllm:request_success_total",
    "quire_prompt_tokens_total": "vllm:prompt_tokens_total",
    "quire_prompt_tokens_cached_total": "vllm:prompt_tokens_cached_total",
    "quire_generation_tokens_total": "vllm:generation_tokens_total",
    "quire_preemptions_total": "vllm:num_preemptions_total",
    "quire_prefix_cache_queries_total": "vllm:prefix_cache_queries_total",
    "quire_prefix_cache_hits_total": "vllm:prefix_cache_hits_total",
    "quire_image_cache_queries_total": "vllm:mm_cache_queries_total",
    "quire_image_cache_hits_total": "vllm:mm_cache_hits_total",
    "quire_external_prefix_cache_queries_total": "vllm:external_prefix_cache_queries_total",
    "quire_external_prefix_cache_hits_total": "vllm:external_prefix_cache_hits_total",
    "quire_spec_decode_drafts_total": "vllm:spec_decode_num_drafts_total",
    "quire_spec_decode_accepted_tokens_per_pos_total": "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "quire_spec_decode_draft_tokens_total": "vllm:spec_decode_num_draft_tokens_total",
    "quire_spec_decode_accepted_tokens_total": "vllm:spec_decode_num_accepted_tokens_total",
    "quire_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "quire_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "quire_time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "quire_e2e_request_latency_seconds": "vllm:e2e_request_latency_seconds",
    "quire_request_queue_time_seconds": "vllm:request_queue_time_seconds",
    "quire_request_prefill_time_seconds": "vllm:request_prefill_time_seconds",
    "quire_request_decode_time_seconds": "vllm:request_decode_time_seconds",
    "quire_request_prompt_tokens": "vllm:request_prompt_tokens",
    "quire_request_generation_tokens": "vllm:request_generation_tokens",
    "quire_request_params_n": "vllm:request_params_n",
    "quire_iteration_tokens": "vllm:iteration_tokens_total",
    "quire_request_inference_time_seconds": "vllm:request_inference_time_seconds",
    "quire_request_params_max_tokens": "vllm:request_params_max_tokens",
    "quire_request_computed_prompt_tokens": "vllm:request_prefill_kv_computed_tokens",
    "quire_request_longest_generation_tokens": "vllm:request_max_num_generation_tokens",
    "quire_cache_config_info": "vllm:cache_config_info",
}
"""Our name → vLLM's, of a metric that means the same. (`iteration_tokens_total` is a histogram there, too.)"""
_OLD_ALIASES = {
    "quire_inter_token_latency_seconds": "vllm:time_per_output_token_seconds",
    "quire_kv_cache_usage_ratio": "vllm:gpu_cache_usage_perc",
    "quire_prefix_cache_queries_total": "vllm:gpu_prefix_cache_queries_total",
    "quire_prefix_cache_hits_total": "vllm:gpu_prefix_cache_hits_total",
}
"""Earlier names of vLLM's. vllm_backend and many dashboards still use them."""
LORA_INFO = MetricDefinition(
    name="vllm:lora_requests_info",
    kind=MetricKind.GAUGE,
    help="Last change of the LoRA adapters of running and of waiting requests, in seconds since the epoch",
    labels={"max_lora": ("0",), "running_lora_adapters": ("",), "waiting_lora_adapters": ("",)},
)
"""Only under vLLM's name: gateways of Kubernetes ask for it. Its value is a time there, too. With LoRA it is open, and
has one series at a time."""
MAX_ADAPTERS = 64
"""Names of adapters in the values of one label; the requests of others are counted together."""
OTHER_ADAPTERS = "other"

_ALIAS_LABELS: Mapping[str, Mapping[str, str]] = {
    "quire_requests_waiting": {},
    "quire_requests_total": {"outcome": "finished_reason"},
    "quire_time_to_first_token_seconds": {},
    "quire_time_per_output_token_seconds": {},
    "quire_e2e_request_latency_seconds": {},
}
"""Where the labels differ, what becomes of each; one that is not there is summed over."""
_WITHOUT_ALIAS = {series("quire_requests_total", outcome="rejected")}


@cache
def aliases_of(of: Series) -> tuple[Series, ...]:
    """The series of vLLM's that a series is part of."""
    name, labels = of
    if of in _WITHOUT_ALIAS:
        return ()
    renamed: Mapping[str, str] = _ALIAS_LABELS.get(name, {label: label for label, _ in labels})
    own = {renamed[label]: value for label, value in labels if label in renamed}
    return tuple(series(table[name], **own) for table in (_ALIASES, _OLD_ALIASES) if name in table)


def make_aliases(metrics: Sequence[MetricDefinition], max_loras: int = 0) -> tuple[MetricDefinition, ...]:
    """The metrics that vLLM has too, under its names. Their series also have the label `model_name`."""
    aliases = []
    for metric in metrics:
        found: dict[str, list[dict[str, str]]] = {}
        for own in metric.label_sets():
            for name, labels in aliases_of(series(metric.name, **own)):
                found.setdefault(name, []).append(dict(labels))
        for name, label_sets in found.items():
            values = {label: tuple(dict.fromkeys(own[label] for own in label_sets)) for label in label_sets[0]}
            aliases.append(replace(metric, name=name, labels=values, combinations=()))
    return (*aliases, replace(LORA_INFO, is_open=max_loras > 0))
