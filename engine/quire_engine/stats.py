"""Statistics of the engine: plain data, and the protocol of its receivers.

The engine knows no Prometheus and no OpenTelemetry; `quire_monitoring` implements `StatLogger` for them.
"""

from typing import Literal, Protocol

import msgspec

from quire_engine.sampling_params import NO_OPTIONS, RequestOptions, SamplingParams
from quire_engine.timeline import RequestPhase, phase_seconds

AbortedBy = Literal["client", "operator", "server"]
"""What ended a request: its client left; an operator; the server, at the model's end or at a limit of the answer."""


class DraftStats(msgspec.Struct, array_like=True):
    """Drafts and their acceptance: totals since the engine core's start."""

    num_drafts: int = 0
    """Pairs of a request and a step in which it had drafts."""
    num_draft_tokens: int = 0
    """Drafts that were computed."""
    num_accepted_tokens: int = 0
    """Drafts that equal the sampled token."""
    num_accepted_tokens_per_pos: list[int] = []
    """Accepted drafts by position: first, second, …"""

    @property
    def acceptance_length(self) -> float | None:
        """As in `acceptance_length`."""
        return acceptance_length(self.num_drafts, self.num_accepted_tokens)

    def copy(self) -> "DraftStats":
        """The present numbers."""
        return DraftStats(
            self.num_drafts,
            self.num_draft_tokens,
            self.num_accepted_tokens,
            self.num_accepted_tokens_per_pos.copy(),
        )

    def count(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Add a request's drafts of one step."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        per_pos = self.num_accepted_tokens_per_pos
        per_pos.extend([0] * (num_draft_tokens - len(per_pos)))
        for place in range(num_accepted_tokens):
            per_pos[place] += 1


class ExpertLoadStats(msgspec.Struct, array_like=True):
    """The load of experts. A token counts once for each of its experts."""

    tokens: list[list[int]]
    """By layer and expert, since the engine core's start; empty for a layer without experts."""
    rank_tokens: list[int]
    """By rank, how many of these it computed, whole or a slice. If engines share experts, the ranks of all, in
    order."""
    mean_over_ranks: float
    """The busiest rank's tokens of a layer, relative to the mean rank's; the mean of all layers, since the last
    report."""
    max_over_ranks: float
    """Likewise, in the layer with the largest ratio."""
    mean_over_experts: float
    """Likewise, for the busiest expert."""
    max_over_experts: float


class KVConnectorStats(msgspec.Struct, array_like=True):
    """KV blocks that are saved elsewhere. Counters are totals since the engine core's start."""

    num_loading: int = 0
    """Requests that wait for blocks to be loaded."""
    queries: int = 0
    """Tokens of new requests that were not in the prefix cache, and were looked up elsewhere."""
    hits: int = 0
    """Tokens of these that were loaded."""
    num_loaded_blocks: int = 0
    """For new and for preempted requests."""
    num_failed_blocks: int = 0
    """Blocks that could not be loaded: missing, damaged, too late."""
    num_saved_blocks: int = 0
    num_unsaved_blocks: int = 0
    """Blocks that could not be saved: no room, no permission, too late."""
    num_loaded_bytes: int = 0
    num_saved_bytes: int = 0
    """Bytes of all ranks' parts, like the loaded bytes."""
    tiers: dict[str, list[int]] = {}
    """By store, if there are several: blocks saved and loaded, and failures of both (`board.TierOutcome`)."""


class AdapterStats(msgspec.Struct, array_like=True):
    """LoRA adapters, of an engine core. Counters are totals since its start."""

    running: dict[str, int] = {}
    """By name, requests that have begun to run; names without any are left out."""
    waiting: dict[str, int] = {}
    """By name, the others."""
    num_waiting: int = 0
    """Requests that wait for their adapter: for its load, or for a slot."""
    ready: list[str] = []
    """Digests of the adapters in memory."""
    in_use: list[str] = []
    """Those of them that requests use."""
    loads: dict[str, int] = {}
    """By digest, how often it was loaded; adapters that left memory long ago may be left out."""
    num_loads: int = 0
    num_evictions: int = 0
    num_failed_loads: int = 0


class SchedulerStats(msgspec.Struct, array_like=True):
    """The engine core after a step. Counters are totals since its start, so that a lost message loses nothing."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks_used: int = 0
    """Blocks that live requests refer to."""
    num_blocks_cached: int = 0
    """Free blocks whose content can still be reused by an equal prefix."""
    num_blocks_free: int = 0
    """Free blocks that hold nothing."""
    prefix_cache_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_cache_hits: int = 0
    """Prompt tokens found there."""
    num_preemptions: int = 0
    num_failed_steps: int = 0
    """Steps that raised, and were computed again request by request."""
    num_waiting_for_fsm: int = 0
    """Those of `num_waiting` whose grammar is still being compiled."""
    num_loading: int = 0
    """Those of `num_waiting` whose blocks a KV connector loads."""
    drafts: DraftStats | None = None
    """None without speculative decoding."""
    rank_busy_seconds: list[float] = []
    """By rank, how long it has computed steps, without waits for other ranks; empty where that is not known."""
    num_block_evictions: int = 0
    """Cached blocks that lost their content because a request needed the room."""
    expert_load: ExpertLoadStats | None = None
    """About once a second, and with the last step before the engine is idle; else None, as it is without experts."""
    kv_connector: KVConnectorStats | None = None
    """None without a KV connector."""
    sleep_level: int = 0
    """0 while the engine is awake."""
    adapters: AdapterStats | None = None
    """Four times a second while requests run, and with the last step before the engine is idle; else None, as it is if
    nothing has changed, and unless `enable_lora` is set."""
    num_states_used: int = 0
    """Blocks of recurrent layers' states, counted like those of keys and values; of a model without keys and values
    they are `num_blocks_…`."""
    num_states_cached: int = 0
    num_states_free: int = 0

    @property
    def kv_cache_usage(self) -> float:
        """Share of the blocks that live requests hold, 0 to 1."""
        total = self.num_blocks_used + self.num_blocks_cached + self.num_blocks_free
        return self.num_blocks_used / total if total else 0.0


class StepStats(msgspec.Struct, array_like=True):
    """One step of the engine core. Its three times are by the core's clock, and add up to the step's."""

    schedule_seconds: float = 0.0
    execute_seconds: float = 0.0
    """Submission to the executor, and the wait for the oldest result."""
    update_seconds: float = 0.0
    num_requests: int = 0
    num_tokens: int = 0
    """Tokens that were computed."""
    num_prefill_tokens: int = 0
    """Tokens of prompts, and of recomputation after preemptions."""
    num_draft_tokens: int = 0
    """Drafts among the decode tokens."""

    @property
    def num_decode_tokens(self) -> int:
        """All tokens that are no prefill."""
        return self.num_tokens - self.num_prefill_tokens


class FinishedRequestStats(msgspec.Struct):
    """One ended request. Times are in seconds of the frontend's monotonic clock."""

    finish_reason: str
    """As in the request's output; `rejected` for a request that never reached the engine."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_drafts: int = 0
    """Steps in which it had drafts."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Drafts that equal the sampled token."""
    e2e_seconds: float = 0.0
    phases: list[tuple[RequestPhase, float]] = []
    """Its phases: each with its begin, in seconds from its arrival; empty for one that never reached the engine."""
    generation_seconds: float = 0.0
    """From the first token to the last."""
    time_to_first_token_seconds: float | None = None
    """None if it ended before its first token."""
    num_sequences: int = 1
    """Sequences that were generated side by side; output tokens are counted over all of them."""
    num_longest_output_tokens: int = 0
    """Output tokens of the longest of these."""
    error_code: str | None = None
    """Value of the `ErrorCode`, for a request that was rejected or missed its deadline."""
    slo_verdict: str | None = None
    """`good` or `miss`; None without a verdict: it was aborted, or invalid."""
    slo_cause: str | None = None
    """As in `SLOVerdict.cause`."""
    missed_live: bool = False
    """Whether it was counted as a miss before its end, when its target's time had passed."""
    options: RequestOptions = NO_OPTIONS
    predicted_ttft_seconds: float | None = None
    """The time to its first token that `scheduling_policy` "slo" predicted at its arrival, if it did."""
    refusal: str | None = None
    """Why it was rejected for lack of capacity, as in `EngineCoreOutput`."""
    request_id: str = ""
    """The engine's name for it, as in a snapshot; empty for one that never reached the engine."""
    params: SamplingParams | None = None
    prompt: str | None = None
    """None when it came as token ids."""
    error: str | None = None
    """The error that its client received."""
    aborted_by: AbortedBy | None = None
    num_replays: int = 0
    """How often it was replayed after the death of an engine."""
    grammar_seconds: float | None = None
    """Time from its admission until its grammar was compiled; None without one, or if it was cached."""
    prefill_chunks: list[tuple[float, int]] = []
    """The chunks of a prompt that took several steps: seconds since the first step, and tokens."""
    is_streamed: bool = False
    """Whether its client receives a stream; set by the server's frontend."""
    num_running_before: int = 0
    """Requests in the running batch when it arrived."""
    num_waiting_before: int = 0
    """Requests that waited when it arrived."""

    @property
    def acceptance_length(self) -> float | None:
        """As in `DraftStats`."""
        return acceptance_length(self.num_drafts, self.num_accepted_tokens)

    @property
    def time_per_output_token_seconds(self) -> float | None:
        """Mean time per token after the first of each sequence; None with fewer than two."""
        num_later_tokens = self.num_output_tokens - self.num_sequences
        return self.generation_seconds * self.num_sequences / num_later_tokens if num_later_tokens > 0 else None

    @property
    def phase_seconds(self) -> dict[RequestPhase, float]:
        """Time of each phase. Their sum is `e2e_seconds`; all are 0 if `phases` is empty."""
        return phase_seconds(self.phases, self.e2e_seconds)

    @property
    def has_vector(self) -> bool:
        """Whether it ended with a vector instead of tokens: it has no time to a first token, and none per token."""
        return self.options.pooling_params is not None and self.finish_reason == "stop"

    @property
    def was_rejected_at_once(self) -> bool:
        """Whether it was rejected for lack of capacity without a wait: its times would make a full queue look fast."""
        was_held = any(phase == "held" for phase, _ in self.phases)
        return self.error_code == "unavailable" and self.refusal != "queue_delay" and not was_held


def acceptance_length(num_drafts: int, num_accepted_tokens: int) -> float | None:
    """Mean tokens that a step yields for a request with drafts: those accepted and one more. None without any."""
    return 1 + num_accepted_tokens / num_drafts if num_drafts else None


class LiveRequestStats(msgspec.Struct):
    """The frontend's live requests of one engine, each sequence by itself, at one moment."""

    num_held: int = 0
    """Requests that no engine has."""
    overdue: dict[tuple[str, str], int] = {}
    """By class and target ("ttft", "tpot", "e2e"), requests with a late first token, next token, or end."""


class ImageStats(msgspec.Struct):
    """Images of prompts, since the last report."""

    num_cached: int = 0
    """Found among those that were encoded last."""
    num_failed: int = 0
    encode_seconds: list[float] = []
    """For each that was encoded: decoding and encoding, without the wait for others."""


class IterationStats(msgspec.Struct):
    """The frontend's counts for one message of the engine core, or for one look at the clock."""

    num_prompt_tokens: int = 0
    """Prompt tokens of requests that had their first token, or their vector."""
    num_cached_tokens: int = 0
    num_generation_tokens: int = 0
    time_to_first_token_seconds: list[float] = []
    first_token_slo_classes: list[str] = []
    """The classes of the same requests."""
    inter_token_seconds: list[float] = []
    phases: list[tuple[RequestPhase, float]] = []
    """Phases of requests that have ended, and their seconds."""
    misses: list[tuple[str, str, str]] = []
    """Live requests that became misses: class, cause as in `SLOVerdict`, and id."""
    live: LiveRequestStats | None = None
    """Set at a look at the clock."""
    finished_requests: list[FinishedRequestStats] = []
    num_engine_restarts: int = 0
    """Engine cores that replaced a dead one."""
    num_requests_replayed: int = 0
    """Live requests that continued with another engine core."""
    num_requests_moved: int = 0
    """Live requests that moved from an engine core that left."""
    step: StepStats | None = None
    """The step that sent the message; None if there was none."""
    cancel_to_free_seconds: list[float] = []
    """Seconds from each cancellation until the engine core confirmed that the blocks are free."""
    images: ImageStats | None = None
    """None if there were none since the last report."""
    engine_index: int = 0
    """The replica."""


class StatLogger(Protocol):
    """Receives the statistics of every step, in the frontend, on the output path: it must return at once."""

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
        """Record one step."""
        ...
