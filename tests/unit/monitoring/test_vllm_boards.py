"""Metrics of vLLM that boards for it ask for are there, under their names and with their labels.

Not all that a board of vLLM's may show: `http_requests_total` is of its web framework, and `prompt_tokens_by_source`
and `num_requests_waiting_by_reason` have no equal here.
"""

import pytest
from quire_monitoring.definitions import MetricKind, MetricsConfig, make_aliases, make_cache_info, make_metrics

_HISTOGRAMS = (
    "e2e_request_latency_seconds", "time_to_first_token_seconds", "time_per_output_token_seconds",
    "inter_token_latency_seconds", "request_time_per_output_token_seconds", "request_queue_time_seconds",
    "request_inference_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
    "request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens", "request_params_n",
    "request_params_max_tokens",
    "request_prefill_kv_computed_tokens", "iteration_tokens_total",
)  # fmt: skip
_COUNTERS = {
    "prompt_tokens_total": set(), "generation_tokens_total": set(), "num_preemptions_total": set(),
    "request_success_total": {"finished_reason"}, "prefix_cache_queries_total": set(),
    "prefix_cache_hits_total": set(), "spec_decode_num_drafts_total": set(),
    "spec_decode_num_draft_tokens_total": set(), "spec_decode_num_accepted_tokens_total": set(),
    "spec_decode_num_accepted_tokens_per_pos_total": {"position"},
}  # fmt: skip
_GAUGES = {
    "num_requests_running": set(), "num_requests_waiting": set(), "kv_cache_usage_perc": set(),
    "gpu_cache_usage_perc": set(),
    "cache_config_info": {"block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching"},
    "lora_requests_info": {"max_lora", "running_lora_adapters", "waiting_lora_adapters"},
}  # fmt: skip
ASKED: dict[str, tuple[MetricKind, set[str]]] = {
    **{name: (MetricKind.HISTOGRAM, set()) for name in _HISTOGRAMS},
    **{name: (MetricKind.COUNTER, labels) for name, labels in _COUNTERS.items()},
    **{name: (MetricKind.GAUGE, labels) for name, labels in _GAUGES.items()},
}
CONFIG = {"block_size": "16", "num_gpu_blocks": "64", "cache_dtype": "auto", "enable_prefix_caching": "True"}
FOUND = {
    metric.name.removeprefix("vllm:"): metric
    for metric in make_aliases((*make_metrics(MetricsConfig(max_draft_tokens=2)), make_cache_info(CONFIG)))
}


@pytest.mark.parametrize("name", ASKED)
def test_a_metric_of_vllms_boards_is_there(name: str) -> None:
    kind, labels = ASKED[name]
    assert FOUND[name].kind is kind
    assert set(FOUND[name].labels) == labels
    assert kind is not MetricKind.HISTOGRAM or len(FOUND[name].buckets) > 3
