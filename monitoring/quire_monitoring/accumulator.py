"""Accumulator: turns the engine's statistics into gauges, growth of counters and observations, for exporters to take.

The meaning of each metric is defined here, once for all exporters. Every exporter has a `Reader` of its own, and gets
all that happened since it was made: what one has taken, the others still find. Recording costs the same for any number
of them, as growth is only handed out to all when one of them asks. Thread-safe.
"""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

from quire_engine.slo import DEFAULT_CLASS
from quire_engine.stats import (
    AdapterStats,
    DraftStats,
    ExpertLoadStats,
    FinishedRequestStats,
    IterationStats,
    KVConnectorStats,
    LiveRequestStats,
    SchedulerStats,
)

from quire_monitoring.definitions import (
    BUILD,
    DEFAULT_CONFIG,
    KV_CONNECTOR_OUTCOMES,
    LORA_INFO,
    MAX_ADAPTERS,
    OTHER_ADAPTERS,
    OUTCOMES,
    PHASES,
    REFUSALS,
    SLEEP_STATES,
    TARGETS,
    WINDOWS,
    MetricDefinition,
    MetricsConfig,
    Series,
    aliases_of,
    make_aliases,
    make_cache_info,
    make_metrics,
    series,
)
from quire_monitoring.goodput import Goodput

# What is counted of each kind of statistics: field → series.
_OF_SCHEDULER = {
    "num_preemptions": series("quire_preemptions_total"),
    "num_block_evictions": series("quire_kv_block_evictions_total"),
    "prefix_cache_queries": series("quire_prefix_cache_queries_total"),
    "prefix_cache_hits": series("quire_prefix_cache_hits_total"),
}
_OF_DRAFTS = {
    "num_drafts": series("quire_spec_decode_drafts_total"),
    "num_draft_tokens": series("quire_spec_decode_draft_tokens_total"),
    "num_accepted_tokens": series("quire_spec_decode_accepted_tokens_total"),
}
_OF_KV_CONNECTOR = {
    "queries": series("quire_external_prefix_cache_queries_total"),
    "hits": series("quire_external_prefix_cache_hits_total"),
    "num_loaded_blocks": series("quire_kv_connector_blocks_total", outcome="loaded"),
    "num_failed_blocks": series("quire_kv_connector_blocks_total", outcome="load_failed"),
    "num_saved_blocks": series("quire_kv_connector_blocks_total", outcome="saved"),
    "num_unsaved_blocks": series("quire_kv_connector_blocks_total", outcome="save_failed"),
    "num_loaded_bytes": series("quire_kv_connector_bytes_total", direction="load"),
    "num_saved_bytes": series("quire_kv_connector_bytes_total", direction="save"),
}
_OF_ADAPTERS = {
    "num_loads": series("quire_lora_loads_total", outcome="loaded"),
    "num_failed_loads": series("quire_lora_loads_total", outcome="failed"),
    "num_evictions": series("quire_lora_evictions_total"),
}
_OF_ITERATION = {
    "num_prompt_tokens": series("quire_prompt_tokens_total"),
    "num_cached_tokens": series("quire_prompt_tokens_cached_total"),
    "num_generation_tokens": series("quire_generation_tokens_total"),
    "num_engine_restarts": series("quire_engine_restarts_total"),
    "num_requests_replayed": series("quire_requests_replayed_total"),
    "num_requests_moved": series("quire_requests_moved_total"),
}
_GAUGES = {
    "num_running": series("quire_requests_running"),
    "num_waiting_for_fsm": series("quire_requests_waiting", reason="grammar"),
    "num_loading": series("quire_requests_waiting", reason="remote_kv"),
    "num_blocks_used": series("quire_kv_blocks", state="used"),
    "num_blocks_cached": series("quire_kv_blocks", state="cached"),
    "num_blocks_free": series("quire_kv_blocks", state="free"),
    "num_states_used": series("quire_state_blocks", state="used"),
    "num_states_cached": series("quire_state_blocks", state="cached"),
    "num_states_free": series("quire_state_blocks", state="free"),
    "kv_cache_usage": series("quire_kv_cache_usage_ratio"),
}
"""Field of `SchedulerStats` → gauge."""


class Accumulator:
    """Adds up in memory.

    Args:
        config: which series the model has.
        clock: seconds, monotonic; for the windows of the goodput.
        server_start_time: when the server's process started, in seconds since the epoch; None: now.
    """

    def __init__(
        self,
        config: MetricsConfig = DEFAULT_CONFIG,
        *,
        clock: Callable[[], float] = time.monotonic,
        server_start_time: float | None = None,
    ) -> None:
        self.definitions = make_metrics(config)
        """All metrics under their own names; `set_loaded` adds one."""
        self._config = config
        self._server_start_time = time.time() if server_start_time is None else server_start_time
        self._lock = threading.Lock()
        self._slo_classes = dict(config.slo_classes)
        self._readers: list[Reader] = []
        self._goodput = Goodput(self._slo_classes, WINDOWS, clock)
        self._scheduler_stats, self._live = SchedulerStats(), LiveRequestStats()
        self._loaded_at = 0.0
        self._load_time = series("quire_model_load_timestamp_seconds", settings=config.settings)
        self._cache_info: Series | None = None
        self._adapters = AdapterStats()
        """The last that came."""
        self._adapters_changed_at = self._server_start_time
        self._counted_adapters: set[str] = set()
        """Names that have series of their own."""
        self._expert_load: ExpertLoadStats | None = None
        """The last that came."""
        self._counters: Counter[Series] = Counter()
        self._observations: defaultdict[Series, list[float]] = defaultdict(list)

    @property
    def is_idle(self) -> bool:
        """Whether the engine had nothing left to do after the last step."""
        return not self._scheduler_stats.num_running and not self._scheduler_stats.num_waiting

    @property
    def definitions_with_aliases(self) -> tuple[MetricDefinition, ...]:
        """All metrics, with those under vLLM's names where the model has them."""
        aliases = make_aliases(self.definitions, self._config.max_loras) if self._config.aliases else ()
        return (*self.definitions, *aliases)

    def set_loaded(self, cache_config: Mapping[str, str] | None) -> None:
        """Note that the model is loaded now.

        Args:
            cache_config: the configuration of the KV cache under vLLM's names, which becomes a metric.
        """
        self._loaded_at = time.time()
        if cache_config is not None:
            info = make_cache_info(cache_config)
            self.definitions = (*self.definitions, info)
            self._cache_info = series(info.name, **cache_config)

    # -- in ---------------------------------------------------------------------------------------------------------

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
        """Record one step."""
        with self._lock:
            if scheduler_stats is not None:
                self._record_scheduler(scheduler_stats)
            self._record_iteration(iteration_stats)
            for request in iteration_stats.finished_requests:
                self._record_request(request)

    def record_rejection(self, slo_class: str | None = None) -> None:
        """Count a request that was rejected before it reached the engine.

        Args:
            slo_class: of the request, if it was rejected for lack of capacity, which is a miss; an unknown class counts
                as the default class. None: the request was invalid.
        """
        with self._lock:
            self._count("quire_requests_total", 1, outcome="rejected")
            if slo_class is not None:
                self._record_verdict(self._known(slo_class), "miss", "rejected")

    def _known(self, slo_class: str | None) -> str:
        """A class that there are series of."""
        return slo_class if slo_class is not None and slo_class in self._slo_classes else DEFAULT_CLASS

    def _record_scheduler(self, stats: SchedulerStats) -> None:
        before, self._scheduler_stats = self._scheduler_stats, stats
        self._count_growth(_OF_SCHEDULER, before, stats)
        self._count_each("quire_worker_busy_seconds_total", "rank", before.rank_busy_seconds, stats.rank_busy_seconds)
        if stats.drafts is not None:
            self._record_drafts(before.drafts or DraftStats(), stats.drafts)
        if stats.kv_connector is not None:
            self._record_kv_connector(before.kv_connector or KVConnectorStats(), stats.kv_connector)
        if stats.adapters is not None:
            self._record_adapters(self._adapters, stats.adapters)
            self._adapters = stats.adapters
        if stats.expert_load is not None:
            self._record_experts(self._expert_load, stats.expert_load)
            self._expert_load = stats.expert_load

    def _count(self, name: str, growth: float, **labels: str) -> None:
        self._counters[series(name, **labels)] += growth  # type: ignore[assignment]

    def _count_growth(self, table: Mapping[str, Series], before: Any, now: Any) -> None:
        for field, one in table.items():
            self._counters[one] += _growth(getattr(before, field), getattr(now, field))  # type: ignore[assignment]

    def _count_each(self, name: str, label: str, before: Iterable[float], now: Sequence[float], **labels: str) -> None:
        """Count the growth of each number under its place in the list; those that are missing before were 0."""
        for place, (known, value) in enumerate(zip(chain(before, repeat(0.0)), now)):  # noqa: B905 (it is longer)
            if value != known:
                self._count(name, _growth(known, value), **{label: str(place)}, **labels)

    def _record_adapters(self, before: AdapterStats, now: AdapterStats) -> None:
        self._count_growth(_OF_ADAPTERS, before, now)
        if (before.running.keys(), before.waiting.keys()) != (now.running.keys(), now.waiting.keys()):
            self._adapters_changed_at = time.time()

    def _record_experts(self, before: ExpertLoadStats | None, now: ExpertLoadStats) -> None:
        self._count_each(
            "quire_expert_rank_tokens_total", "rank", () if before is None else before.rank_tokens, now.rank_tokens
        )
        for layer, row in enumerate(now.tokens if self._config.expert_metrics else ()):
            known = () if before is None else before.tokens[layer]
            self._count_each("quire_expert_tokens_total", "expert", known, row, layer=str(layer))

    def _record_kv_connector(self, before: KVConnectorStats, now: KVConnectorStats) -> None:
        self._count_growth(_OF_KV_CONNECTOR, before, now)
        for tier, numbers in now.tiers.items():
            known = before.tiers.get(tier) or [0] * len(numbers)
            for outcome, old, new in zip(KV_CONNECTOR_OUTCOMES, known, numbers, strict=True):
                self._count("quire_kv_connector_tier_blocks_total", _growth(old, new), tier=tier, outcome=outcome)

    def _record_drafts(self, before: DraftStats, now: DraftStats) -> None:
        self._count_growth(_OF_DRAFTS, before, now)
        known, accepted = before.num_accepted_tokens_per_pos, now.num_accepted_tokens_per_pos
        self._count_each("quire_spec_decode_accepted_tokens_per_pos_total", "position", known, accepted)

    def _observe(self, name: str, *values: float, **labels: str) -> None:
        self._observations[series(name, **labels)] += values

    def _record_iteration(self, stats: IterationStats) -> None:
        for field, one in _OF_ITERATION.items():
            self._counters[one] += getattr(stats, field)
        first_tokens = zip(stats.first_token_slo_classes, stats.time_to_first_token_seconds, strict=True)
        for slo_class, seconds in first_tokens:
            self._observe("quire_time_to_first_token_seconds", seconds, slo=self._known(slo_class))
        for phase, seconds in stats.phases:
            self._observe(f"quire_request_{phase}_time_seconds", seconds)
        for slo_class, cause, _ in stats.misses:
            self._record_verdict(self._known(slo_class), "miss", cause)
        self._live = stats.live or self._live
        self._observe("quire_inter_token_latency_seconds", *stats.inter_token_seconds)
        self._observe("quire_cancel_to_free_seconds", *stats.cancel_to_free_seconds)
        images = stats.images
        if images is not None:
            num_queries = images.num_cached + images.num_failed + len(images.encode_seconds)
            self._count("quire_image_cache_queries_total", num_queries)
            self._count("quire_image_cache_hits_total", images.num_cached)
            self._count("quire_image_failures_total", images.num_failed)
            self._observe("quire_image_encode_seconds", *images.encode_seconds)
        step = stats.step
        if step is not None:
            self._observe("quire_iteration_tokens", step.num_tokens)
            for part in PHASES:
                self._observe("quire_step_seconds", getattr(step, f"{part}_seconds"), phase=part)

    def _record_request(self, request: FinishedRequestStats) -> None:
        outcome = "rejected" if request.error_code == "unavailable" else request.finish_reason
        if outcome in OUTCOMES:
            self._count("quire_requests_total", 1, outcome=outcome)
        if request.options.adapter is not None:
            name = self._counted_adapter(request.options.adapter.name)
            self._count("quire_lora_requests_total", 1, adapter=name)
            self._count("quire_lora_generation_tokens_total", request.num_output_tokens, adapter=name)
        observe, own = self._observe, request.options.slo.slo_class
        slo_class, first_token = self._known(own), request.time_to_first_token_seconds
        if not request.was_rejected_at_once:
            observe("quire_e2e_request_latency_seconds", request.e2e_seconds, slo=slo_class)
        if first_token is not None:
            observe("quire_request_generation_tokens", request.num_output_tokens)
            observe("quire_request_params_n", request.num_sequences)
            if request.params is not None and request.params.max_tokens is not None:
                observe("quire_request_params_max_tokens", request.params.max_tokens)
            observe("quire_request_longest_generation_tokens", request.num_longest_output_tokens)
        if first_token is not None or request.has_vector:
            seconds = request.phase_seconds
            inference_seconds = request.e2e_seconds - seconds["encode"] - seconds["held"] - seconds["queue"]
            observe("quire_request_prompt_tokens", request.num_prompt_tokens)
            observe("quire_request_inference_time_seconds", inference_seconds)
            observe("quire_request_computed_prompt_tokens", request.num_prompt_tokens - request.num_cached_tokens)
        if request.time_per_output_token_seconds is not None:
            observe("quire_time_per_output_token_seconds", request.time_per_output_token_seconds, slo=slo_class)
        if request.predicted_ttft_seconds is not None and first_token:
            error = abs(request.predicted_ttft_seconds - first_token)
            observe("quire_ttft_prediction_error_ratio", error / first_token)
        if own in self._slo_classes and request.refusal in REFUSALS:
            self._count("quire_requests_refused_total", 1, slo=own, reason=request.refusal)
        if own in self._slo_classes and request.slo_verdict and request.slo_cause:
            if not request.missed_live:
                self._record_verdict(own, request.slo_verdict, request.slo_cause)
            if request.slo_verdict == "good":
                self._count("quire_goodput_tokens_total", request.num_output_tokens, slo=own)

    def _counted_adapter(self, name: str) -> str:
        """The label's value: the name, which an operator has registered, unless there are too many."""
        if len(self._counted_adapters) < MAX_ADAPTERS:
            self._counted_adapters.add(name)
        return name if name in self._counted_adapters else OTHER_ADAPTERS

    def _record_verdict(self, slo_class: str, verdict: str, cause: str) -> None:
        self._count("quire_slo_requests_total", 1, slo=slo_class, verdict=verdict, cause=cause)
        self._goodput.record(slo_class, verdict == "good")

    # -- out --------------------------------------------------------------------------------------------------------

    @property
    def is_read(self) -> bool:
        """Whether an exporter reads what is recorded."""
        return bool(self._readers)

    def reader(self, *, aliases: bool = False) -> "Reader":
        """For one exporter, from now on.

        Args:
            aliases: whether series that vLLM has, too, are also there under its names.
        """
        with self._lock:
            self._hand_out()  # what was before is not its own
            reader = Reader(self, aliases)
            self._readers.append(reader)
        return reader

    def _hand_out(self) -> None:
        """Give all readers what has grown since it was last given to them."""
        for reader in self._readers:
            reader.counters.update(self._counters)
            for one, values in self._observations.items():
                reader.observations[one] += values
        self._counters.clear()
        self._observations.clear()

    def gauges(self, is_up: bool, workers_up: Sequence[bool], *, aliases: bool = False) -> dict[Series, float]:
        """The present state. While an engine is down, the figures of its core are 0. The frontend's figures stay: held
        and overdue requests, the times of the server's start and of the load, the settings, the build.

        Args:
            is_up: whether the engine runs.
            workers_up: the same for each rank.
            aliases: as in `reader`.
        """
        with self._lock:
            stats, live = self._scheduler_stats if is_up else SchedulerStats(), self._live
            ratios = self._goodput.ratios()
            adapters, changed_at = self._adapters if is_up else AdapterStats(), self._adapters_changed_at
            load = self._expert_load if stats.num_running or stats.num_waiting else None
        num_elsewhere = stats.num_waiting_for_fsm + stats.num_loading + adapters.num_waiting
        gauges: dict[Series, float] = {one: getattr(stats, field) for field, one in _GAUGES.items()}
        gauges |= {
            series("quire_engine_up"): float(is_up),
            series("quire_server_start_time_seconds"): self._server_start_time,
            series("quire_build_info", **BUILD): 1.0,
            self._load_time: self._loaded_at,
            # The adapters' number may be a little older.
            series("quire_requests_waiting", reason="queue"): max(0, stats.num_waiting - num_elsewhere),
            series("quire_requests_waiting", reason="adapter"): adapters.num_waiting,
            series("quire_requests_waiting", reason="held"): live.num_held,
        }
        for level, state in enumerate(SLEEP_STATES):
            one = series("quire_engine_sleep_state", sleep_state=state)
            gauges[one] = float(is_up and stats.sleep_level == level)
        if self._cache_info is not None:
            gauges[self._cache_info] = 1.0
        if aliases:
            gauges[_lora_info(self._config.max_loras, adapters)] = changed_at
            for one, value in list(gauges.items()):
                for alias in aliases_of(one):
                    gauges[alias] = gauges.get(alias, 0.0) + value
        if self._config.max_loras:
            gauges[series("quire_lora_adapters", state="ready")] = len(adapters.ready)
            gauges[series("quire_lora_adapters", state="in_use")] = len(adapters.in_use)
        if self._config.expert_shape is not None:
            gauges |= _imbalance(load)
        for rank, worker_is_up in enumerate(workers_up):
            gauges[series("quire_worker_up", rank=str(rank))] = float(worker_is_up)
        for slo_class, targets in self._slo_classes.items():
            gauges[series("quire_slo_objective_ratio", slo=slo_class)] = targets.objective
            for target in TARGETS:
                number = live.overdue.get((slo_class, target), 0)
                gauges[series("quire_requests_overdue", slo=slo_class, target=target)] = number
            for target, seconds in targets.seconds().items():
                gauges[series("quire_slo_target_seconds", slo=slo_class, target=target)] = seconds
        for (slo_class, window), ratio in ratios.items():
            gauges[series("quire_goodput_ratio", slo=slo_class, window=window)] = ratio
        return gauges


class Reader:
    """What one exporter has not taken yet; made by `Accumulator.reader`."""

    def __init__(self, accumulator: Accumulator, aliases: bool) -> None:
        self._accumulator = accumulator
        self._aliases = aliases
        self.counters: Counter[Series] = Counter()
        self.observations: defaultdict[Series, list[float]] = defaultdict(list)

    def take(self) -> tuple[Counter[Series], dict[Series, list[float]]]:
        """How much each counter has grown since this was last called, and what was observed of each histogram."""
        owner = self._accumulator
        with owner._lock:
            owner._hand_out()
            counters, self.counters = self.counters, Counter()
            observations, self.observations = self.observations, defaultdict(list)
        grown = Counter({one: growth for one, growth in counters.items() if growth})
        observed = {one: values for one, values in observations.items() if values}
        if self._aliases:
            for one, growth in list(grown.items()):
                for alias in aliases_of(one):
                    grown[alias] += growth
            for one, values in list(observed.items()):
                for alias in aliases_of(one):
                    observed[alias] = observed.get(alias, []) + values  # of all classes
        return grown, observed

    def close(self) -> None:
        """Take nothing any more, and keep nothing."""
        with self._accumulator._lock:
            if self in self._accumulator._readers:
                self._accumulator._readers.remove(self)


def _imbalance(load: ExpertLoadStats | None) -> dict[Series, float]:
    return {
        series("quire_expert_imbalance_ratio", over=over, layers=layers): (
            0.0 if load is None else getattr(load, f"{layers}_over_{over}")
        )
        for over in ("experts", "ranks")
        for layers in ("mean", "max")
    }


def _lora_info(max_loras: int, adapters: AdapterStats) -> Series:
    running, waiting = (",".join(sorted(names)[:MAX_ADAPTERS]) for names in (adapters.running, adapters.waiting))
    return series(LORA_INFO.name, max_lora=str(max_loras), running_lora_adapters=running, waiting_lora_adapters=waiting)


def _growth(before: float, now: float) -> float:
    """The growth of a total; an engine that was started again counts from 0."""
    return now - before if now >= before else now
