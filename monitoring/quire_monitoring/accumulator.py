"""Accumulator: turns the engine's statistics into gauges, growth of counters and observations, for exporters to take.

The meaning of each metric is defined here, once for all exporters. Every exporter has a `Reader` of its own, and gets
all that happened since it was made: what one has taken, the others still find. Recording costs the same for any number
of them, as growth is only handed out to all when one of them asks. Thread-safe.
"""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TypeVar

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
from quire_engine.timeline import REQUEST_PHASES

from quire_monitoring.definitions import (
    BUILD,
    DEFAULT_CONFIG,
    KV_CONNECTOR_OUTCOMES,
    KV_TIERS,
    LORA_INFO,
    MAX_ADAPTERS,
    OTHER_ADAPTERS,
    OUTCOMES,
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

_Number = TypeVar("_Number", int, float)


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
            self._counters[_OUTCOMES["rejected"]] += 1
            if slo_class is not None:
                self._record_verdict(self._known(slo_class), "miss", "rejected")

    def _known(self, slo_class: str | None) -> str:
        """A class that there are series of."""
        return slo_class if slo_class is not None and slo_class in self._slo_classes else DEFAULT_CLASS

    def _record_scheduler(self, stats: SchedulerStats) -> None:
        before, self._scheduler_stats = self._scheduler_stats, stats
        counters = self._counters
        counters[_PREEMPTIONS] += _growth(before.num_preemptions, stats.num_preemptions)
        counters[_EVICTIONS] += _growth(before.num_block_evictions, stats.num_block_evictions)
        counters[_QUERIES] += _growth(before.prefix_cache_queries, stats.prefix_cache_queries)
        counters[_HITS] += _growth(before.prefix_cache_hits, stats.prefix_cache_hits)
        for rank, busy in enumerate(stats.rank_busy_seconds):
            busy_before = before.rank_busy_seconds[rank] if before.rank_busy_seconds else 0.0
            counters[_busy(rank)] += _growth(busy_before, busy)  # type: ignore[assignment]
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

    def _record_adapters(self, before: AdapterStats, now: AdapterStats) -> None:
        self._counters[_LORA_LOADS["loaded"]] += _growth(before.num_loads, now.num_loads)
        self._counters[_LORA_LOADS["failed"]] += _growth(before.num_failed_loads, now.num_failed_loads)
        self._counters[_LORA_EVICTIONS] += _growth(before.num_evictions, now.num_evictions)
        if (before.running.keys(), before.waiting.keys()) != (now.running.keys(), now.waiting.keys()):
            self._adapters_changed_at = time.time()

    def _record_experts(self, before: ExpertLoadStats | None, now: ExpertLoadStats) -> None:
        ranks_before = [0] * len(now.rank_tokens) if before is None else before.rank_tokens
        for rank, (known, tokens) in enumerate(zip(ranks_before, now.rank_tokens, strict=True)):
            self._counters[_expert_rank(rank)] += _growth(known, tokens)
        if not self._config.expert_metrics:
            return
        for layer, row in enumerate(now.tokens):
            row_before = (before.tokens[layer] if before is not None else []) or [0] * len(row)
            for expert, (known, tokens) in enumerate(zip(row_before, row, strict=bool(row))):
                if tokens != known:
                    self._counters[_expert(layer, expert)] += _growth(known, tokens)

    def _record_kv_connector(self, before: KVConnectorStats, now: KVConnectorStats) -> None:
        counters = self._counters
        counters[_EXTERNAL_QUERIES] += _growth(before.queries, now.queries)
        counters[_EXTERNAL_HITS] += _growth(before.hits, now.hits)
        counters[_KV_BLOCKS["loaded"]] += _growth(before.num_loaded_blocks, now.num_loaded_blocks)
        counters[_KV_BLOCKS["load_failed"]] += _growth(before.num_failed_blocks, now.num_failed_blocks)
        counters[_KV_BLOCKS["saved"]] += _growth(before.num_saved_blocks, now.num_saved_blocks)
        counters[_KV_BLOCKS["save_failed"]] += _growth(before.num_unsaved_blocks, now.num_unsaved_blocks)
        counters[_KV_LOADED_BYTES] += _growth(before.num_loaded_bytes, now.num_loaded_bytes)
        counters[_KV_SAVED_BYTES] += _growth(before.num_saved_bytes, now.num_saved_bytes)
        for tier, numbers in now.tiers.items():
            known = before.tiers.get(tier) or [0] * len(numbers)
            for outcome, old, new in zip(KV_CONNECTOR_OUTCOMES, known, numbers, strict=True):
                counters[_KV_TIER_BLOCKS[tier, outcome]] += _growth(old, new)

    def _record_drafts(self, before: DraftStats, now: DraftStats) -> None:
        counters = self._counters
        counters[_DRAFTS] += _growth(before.num_drafts, now.num_drafts)
        counters[_DRAFT_TOKENS] += _growth(before.num_draft_tokens, now.num_draft_tokens)
        counters[_ACCEPTED] += _growth(before.num_accepted_tokens, now.num_accepted_tokens)
        known = before.num_accepted_tokens_per_pos
        for place, accepted in enumerate(now.num_accepted_tokens_per_pos):
            counters[_accepted_at(place)] += _growth(known[place] if place < len(known) else 0, accepted)

    def _record_iteration(self, stats: IterationStats) -> None:
        counters, observations = self._counters, self._observations
        counters[_PROMPT_TOKENS] += stats.num_prompt_tokens
        counters[_CACHED_TOKENS] += stats.num_cached_tokens
        counters[_GENERATION_TOKENS] += stats.num_generation_tokens
        counters[_RESTARTS] += stats.num_engine_restarts
        counters[_REPLAYED] += stats.num_requests_replayed
        counters[_MOVED] += stats.num_requests_moved
        first_tokens = zip(stats.first_token_slo_classes, stats.time_to_first_token_seconds, strict=True)
        for slo_class, seconds in first_tokens:
            observations[_of_class(_FIRST_TOKEN, self._known(slo_class))].append(seconds)
        for phase, seconds in stats.phases:
            observations[_PHASES[phase]].append(seconds)
        for slo_class, cause, _ in stats.misses:
            self._record_verdict(self._known(slo_class), "miss", cause)
        self._live = stats.live or self._live
        if stats.inter_token_seconds:
            observations[_INTER_TOKEN] += stats.inter_token_seconds
        if stats.cancel_to_free_seconds:
            observations[_CANCEL_TO_FREE] += stats.cancel_to_free_seconds
        images = stats.images
        if images is not None:
            num_queries = images.num_cached + images.num_failed + len(images.encode_seconds)
            counters[_IMAGE_QUERIES] += num_queries
            counters[_IMAGE_HITS] += images.num_cached
            counters[_IMAGE_FAILURES] += images.num_failed
            observations[_IMAGE_ENCODE] += images.encode_seconds
        step = stats.step
        if step is not None:
            observations[_STEP_TOKENS].append(step.num_tokens)
            observations[_SCHEDULE].append(step.schedule_seconds)
            observations[_EXECUTE].append(step.execute_seconds)
            observations[_UPDATE].append(step.update_seconds)

    def _record_request(self, request: FinishedRequestStats) -> None:
        outcome = "rejected" if request.error_code == "unavailable" else request.finish_reason
        if outcome in _OUTCOMES:
            self._counters[_OUTCOMES[outcome]] += 1
        if request.options.adapter is not None:
            name = self._counted_adapter(request.options.adapter.name)
            self._counters[series("quire_lora_requests_total", adapter=name)] += 1
            tokens = series("quire_lora_generation_tokens_total", adapter=name)
            self._counters[tokens] += request.num_output_tokens
        observations, own = self._observations, request.options.slo.slo_class
        slo_class = self._known(own)
        if not request.was_rejected_at_once:
            observations[_of_class(_E2E, slo_class)].append(request.e2e_seconds)
        if request.time_to_first_token_seconds is not None:
            observations[_REQUEST_GENERATION].append(request.num_output_tokens)
            observations[_SEQUENCES].append(request.num_sequences)
            if request.params is not None and request.params.max_tokens is not None:
                observations[_MAX_TOKENS].append(request.params.max_tokens)
            observations[_LONGEST].append(request.num_longest_output_tokens)
        if request.time_to_first_token_seconds is not None or request.has_vector:
            seconds = request.phase_seconds
            observations[_REQUEST_PROMPT].append(request.num_prompt_tokens)
            observations[_INFERENCE].append(
                request.e2e_seconds - seconds["encode"] - seconds["held"] - seconds["queue"]
            )
            observations[_COMPUTED_PROMPT].append(request.num_prompt_tokens - request.num_cached_tokens)
        if request.time_per_output_token_seconds is not None:
            observations[_of_class(_PER_TOKEN, slo_class)].append(request.time_per_output_token_seconds)
        if request.predicted_ttft_seconds is not None and request.time_to_first_token_seconds:
            error = abs(request.predicted_ttft_seconds - request.time_to_first_token_seconds)
            observations[_PREDICTION_ERROR].append(error / request.time_to_first_token_seconds)
        if own in self._slo_classes and request.refusal in REFUSALS:
            refused = series("quire_requests_refused_total", slo=own, reason=request.refusal)
            self._counters[refused] += 1
        if own in self._slo_classes and request.slo_verdict and request.slo_cause:
            if not request.missed_live:
                self._record_verdict(own, request.slo_verdict, request.slo_cause)
            if request.slo_verdict == "good":
                tokens = series("quire_goodput_tokens_total", slo=own)
                self._counters[tokens] += request.num_output_tokens

    def _counted_adapter(self, name: str) -> str:
        """The label's value: the name, which an operator has registered, unless there are too many."""
        if len(self._counted_adapters) < MAX_ADAPTERS:
            self._counted_adapters.add(name)
        return name if name in self._counted_adapters else OTHER_ADAPTERS

    def _record_verdict(self, slo_class: str, verdict: str, cause: str) -> None:
        self._counters[series("quire_slo_requests_total", slo=slo_class, verdict=verdict, cause=cause)] += 1
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
        gauges: dict[Series, float] = {
            _UP: float(is_up),
            _START_TIME: self._server_start_time,
            _BUILD_INFO: 1.0,
            self._load_time: self._loaded_at,
            _RUNNING: stats.num_running,
            _QUEUED: max(0, stats.num_waiting - num_elsewhere),  # the adapters' number may be a little older
            _WAITING_FOR_ADAPTER: adapters.num_waiting,
            _WAITING_FOR_GRAMMAR: stats.num_waiting_for_fsm,
            _LOADING: stats.num_loading,
            _HELD: live.num_held,
            _BLOCKS_USED: stats.num_blocks_used,
            _BLOCKS_CACHED: stats.num_blocks_cached,
            _BLOCKS_FREE: stats.num_blocks_free,
            _STATES_USED: stats.num_states_used,
            _STATES_CACHED: stats.num_states_cached,
            _STATES_FREE: stats.num_states_free,
            _USAGE: stats.kv_cache_usage,
        }
        for level, one in enumerate(_SLEEP_STATES):
            gauges[one] = float(is_up and stats.sleep_level == level)
        if self._cache_info is not None:
            gauges[self._cache_info] = 1.0
        if aliases:
            gauges[_lora_info(self._config.max_loras, adapters)] = changed_at
            for one, value in list(gauges.items()):
                for alias in aliases_of(one):
                    gauges[alias] = gauges.get(alias, 0.0) + value
        if self._config.max_loras:
            gauges[_LORA_READY], gauges[_LORA_IN_USE] = len(adapters.ready), len(adapters.in_use)
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


@cache
def _busy(rank: int) -> Series:
    return series("quire_worker_busy_seconds_total", rank=str(rank))


@cache
def _accepted_at(place: int) -> Series:
    return series("quire_spec_decode_accepted_tokens_per_pos_total", position=str(place))


@cache
def _of_class(name: str, slo_class: str) -> Series:
    return series(name, slo=slo_class)


@cache
def _expert_rank(rank: int) -> Series:
    return series("quire_expert_rank_tokens_total", rank=str(rank))


@cache
def _expert(layer: int, expert: int) -> Series:
    return series("quire_expert_tokens_total", layer=str(layer), expert=str(expert))


def _imbalance(load: ExpertLoadStats | None) -> dict[Series, float]:
    values = [("experts", "mean", 0.0), ("experts", "max", 0.0), ("ranks", "mean", 0.0), ("ranks", "max", 0.0)]
    if load is not None:
        values = [
            ("experts", "mean", load.mean_over_experts),
            ("experts", "max", load.max_over_experts),
            ("ranks", "mean", load.mean_over_ranks),
            ("ranks", "max", load.max_over_ranks),
        ]
    return {series("quire_expert_imbalance_ratio", over=over, layers=which): value for over, which, value in values}


def _lora_info(max_loras: int, adapters: AdapterStats) -> Series:
    running, waiting = (",".join(sorted(names)[:MAX_ADAPTERS]) for names in (adapters.running, adapters.waiting))
    return series(LORA_INFO.name, max_lora=str(max_loras), running_lora_adapters=running, waiting_lora_adapters=waiting)


def _growth(before: _Number, now: _Number) -> _Number:
    """The growth of a total; an engine that was started again counts from 0."""
    return now - before if now >= before else now


_UP = series("quire_engine_up")
_SLEEP_STATES = [series("quire_engine_sleep_state", sleep_state=state) for state in SLEEP_STATES]
_BUILD_INFO = series("quire_build_info", **BUILD)
_START_TIME = series("quire_server_start_time_seconds")
_RUNNING = series("quire_requests_running")
_QUEUED = series("quire_requests_waiting", reason="queue")
_WAITING_FOR_GRAMMAR = series("quire_requests_waiting", reason="grammar")
_LOADING = series("quire_requests_waiting", reason="remote_kv")
_HELD = series("quire_requests_waiting", reason="held")
_BLOCKS_USED = series("quire_kv_blocks", state="used")
_BLOCKS_CACHED = series("quire_kv_blocks", state="cached")
_BLOCKS_FREE = series("quire_kv_blocks", state="free")
_STATES_USED = series("quire_state_blocks", state="used")
_STATES_CACHED = series("quire_state_blocks", state="cached")
_STATES_FREE = series("quire_state_blocks", state="free")
_USAGE = series("quire_kv_cache_usage_ratio")
_OUTCOMES = {outcome: series("quire_requests_total", outcome=outcome) for outcome in OUTCOMES}
_PROMPT_TOKENS = series("quire_prompt_tokens_total")
_CACHED_TOKENS = series("quire_prompt_tokens_cached_total")
_GENERATION_TOKENS = series("quire_generation_tokens_total")
_PREEMPTIONS = series("quire_preemptions_total")
_EVICTIONS = series("quire_kv_block_evictions_total")
_QUERIES = series("quire_prefix_cache_queries_total")
_HITS = series("quire_prefix_cache_hits_total")
_EXTERNAL_QUERIES = series("quire_external_prefix_cache_queries_total")
_EXTERNAL_HITS = series("quire_external_prefix_cache_hits_total")
_KV_BLOCKS = {outcome: series("quire_kv_connector_blocks_total", outcome=outcome) for outcome in KV_CONNECTOR_OUTCOMES}
_KV_TIER_BLOCKS = {
    (tier, outcome): series("quire_kv_connector_tier_blocks_total", tier=tier, outcome=outcome)
    for tier in KV_TIERS
    for outcome in KV_CONNECTOR_OUTCOMES
}
_KV_SAVED_BYTES = series("quire_kv_connector_bytes_total", direction="save")
_KV_LOADED_BYTES = series("quire_kv_connector_bytes_total", direction="load")
_RESTARTS = series("quire_engine_restarts_total")
_REPLAYED = series("quire_requests_replayed_total")
_MOVED = series("quire_requests_moved_total")
_DRAFTS = series("quire_spec_decode_drafts_total")
_DRAFT_TOKENS = series("quire_spec_decode_draft_tokens_total")
_ACCEPTED = series("quire_spec_decode_accepted_tokens_total")
_FIRST_TOKEN = "quire_time_to_first_token_seconds"
_INTER_TOKEN = series("quire_inter_token_latency_seconds")
_PER_TOKEN = "quire_time_per_output_token_seconds"
_E2E = "quire_e2e_request_latency_seconds"
_IMAGE_QUERIES, _IMAGE_HITS, _IMAGE_FAILURES = map(
    series, ("quire_image_cache_queries_total", "quire_image_cache_hits_total", "quire_image_failures_total")
)
_IMAGE_ENCODE = series("quire_image_encode_seconds")
_PHASES = {phase: series(f"quire_request_{phase}_time_seconds") for phase in REQUEST_PHASES}
_REQUEST_PROMPT = series("quire_request_prompt_tokens")
_REQUEST_GENERATION = series("quire_request_generation_tokens")
_SEQUENCES = series("quire_request_params_n")
_MAX_TOKENS = series("quire_request_params_max_tokens")
_INFERENCE = series("quire_request_inference_time_seconds")
_COMPUTED_PROMPT = series("quire_request_computed_prompt_tokens")
_LONGEST = series("quire_request_longest_generation_tokens")
_STEP_TOKENS = series("quire_iteration_tokens")
_SCHEDULE = series("quire_step_seconds", phase="schedule")
_EXECUTE = series("quire_step_seconds", phase="execute")
_UPDATE = series("quire_step_seconds", phase="update")
_PREDICTION_ERROR = series("quire_ttft_prediction_error_ratio")
_CANCEL_TO_FREE = series("quire_cancel_to_free_seconds")
_WAITING_FOR_ADAPTER = series("quire_requests_waiting", reason="adapter")
_LORA_READY = series("quire_lora_adapters", state="ready")
_LORA_IN_USE = series("quire_lora_adapters", state="in_use")
_LORA_LOADS = {outcome: series("quire_lora_loads_total", outcome=outcome) for outcome in ("loaded", "failed")}
_LORA_EVICTIONS = series("quire_lora_evictions_total")
