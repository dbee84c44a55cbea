"""The queries behind the figures of the overview, in the browser and in the terminal."""

from collections.abc import Callable

from quire_dashboard.queries import Gauge, Quantile, Query, Rate, Ratio

ENDED = Rate(name="quire_requests_total")
FAILED = Ratio(part=Rate(name="quire_requests_total", among=("outcome", ("error", "rejected"))), whole=ENDED)
TTFT = Quantile(name="quire_time_to_first_token_seconds", q=0.95)
QUEUE = Quantile(name="quire_request_queue_time_seconds", q=0.95)
PREFILL = Quantile(name="quire_request_prefill_time_seconds", q=0.95)
BETWEEN = Quantile(name="quire_inter_token_latency_seconds", q=0.95)
E2E = Quantile(name="quire_e2e_request_latency_seconds", q=0.95)
TOKENS = Rate(name="quire_generation_tokens_total")
PROMPT_TOKENS = Rate(name="quire_prompt_tokens_total")
RUNNING = Gauge(name="quire_requests_running")
WAITING = Gauge(name="quire_requests_waiting")
USAGE = Gauge(name="quire_kv_cache_usage_ratio", how="max")
RESTARTS = Gauge(name="quire_engine_restarts_total")
ADAPTERS = Gauge(name="quire_lora_adapters", by="state")
ADAPTER_LOADS = Rate(name="quire_lora_loads_total", by="outcome")
ADAPTER_REQUESTS = Rate(name="quire_lora_requests_total", by="adapter")
ADAPTER_TOKENS = Rate(name="quire_lora_generation_tokens_total", by="adapter")


def gives_vectors(now: Callable[[Query], float | None]) -> bool:
    """Whether the last minute's prompts became vectors alone: there is no first token, and no time between tokens.

    Args:
        now: the present result of a query.
    """
    return not now(TOKENS) and bool(now(PROMPT_TOKENS))


def goodput(own: tuple[tuple[str, str], ...], by: str = "") -> Ratio:
    """The share of good requests of all that were judged.

    Args:
        own: labels, such as that of a class.
        by: label with one value each.
    """
    return Ratio(
        part=Rate(name="quire_slo_requests_total", labels=(*own, ("verdict", "good")), by=by),
        whole=Rate(name="quire_slo_requests_total", labels=own, by=by),
    )
