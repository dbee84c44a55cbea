"""Statistics of the engine: plain data, and the protocol of those who receive it.

The engine knows no Prometheus and no OpenTelemetry; `quire_monitoring` implements `StatLogger` for them.
"""

from typing import Literal, Protocol

import msgspec

from quire_engine.sampling_params import NO_OPTIONS, RequestOptions, SamplingParams
from quire_engine.timeline import RequestPhase, phase_seconds

AbortedBy = Literal["client", "operator", "server"]
"""Who ended a request: its client, by leaving; an operator; the server, which unloads the model, or whose limit its
answer has reached."""


class DraftStats(msgspec.Struct, array_like=True):
    """What came of drafts: totals since the engine core's start."""

    num_drafts: int = 0
    """Times that a request had drafts in a step."""
    num_draft_tokens: int = 0
    """Tokens that were drafted, and computed."""
    num_accepted_tokens: int = 0
    """Of these, those that the model sampled in their place."""
    num_accepted_tokens_per_pos: list[int] = []
    """Accepted first, second, … tokens of a draft."""

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens that a step yields for a request with drafts: those accepted and one more. None without any."""
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
    """How the tokens of a mixture of experts are divided. A token counts once for each of its experts."""

    tokens: list[list[int]]
    """By layer and expert, since the engine core's start; empty for a layer without experts."""
    rank_tokens: list[int]
    """By rank, how many of them it computed, or a slice of them; since the same time. Of engines that share the
    experts, the ranks are those of all, engine by engine."""
    mean_over_ranks: float
    """The busiest rank's tokens of a layer per those of a rank on average, 1 or more; the mean of all layers, over what
    was computed since the last such numbers."""
    max_over_ranks: float
    """Likewise, in the layer where it is the most."""
    mean_over_experts: float
    """Likewise, of the busiest expert."""
    max_over_experts: float


class KVConnectorStats(msgspec.Struct, array_like=True):
    """KV blocks that were kept elsewhere. Counters are totals since the engine core's start."""

    num_loading: int = 0
    """Requests that wait for blocks to be loaded."""
    queries: int = 0
    """Tokens of new requests that were not in the prefix cache, and looked for elsewhere."""
    hits: int = 0
    """Those of them that were loaded."""
    num_loaded_blocks: int = 0
    """For new requests, and for those that were preempted."""
    num_failed_blocks: int = 0
    """Blocks that were to be loaded, and were not: gone, not sound, too late."""
    num_saved_blocks: int = 0
    num_unsaved_blocks: int = 0
    """Blocks that were to be saved, and were not: no room, no permission, no time."""
    num_loaded_bytes: int = 0
    num_saved_bytes: int = 0
    """Of all ranks' parts; so are the loaded ones."""
    tiers: dict[str, list[int]] = {}
    """Of several stores, by what they are called: blocks that were saved and loaded, and that could not be saved and
    loaded (`board.TierOutcome`)."""


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

    @property
    def kv_cache_usage(self) -> float:
        """Share of the blocks that live requests hold, 0 to 1."""
        total = self.num_blocks_used + self.num_blocks_cached + self.num_blocks_free
        return self.num_blocks_used / total if total else 0.0


class StepStats(msgspec.Struct, array_like=True):
    """One step of the engine core. Its three times are by the core's clock, and together all that the step took."""

    schedule_seconds: float = 0.0
    execute_seconds: float = 0.0
    """Handing batches to the executor, and waiting for the oldest result."""
    update_seconds: float = 0.0
    num_requests: int = 0
    num_tokens: int = 0
    """Tokens that were computed for these requests."""
    num_prefill_tokens: int = 0
    """Of these, all that were not a request's next token alone: prompts, and what a preemption made it forget."""
    num_draft_tokens: int = 0
    """Of the others, drafts."""

    @property
    def num_decode_tokens(self) -> int:
        """The others."""
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
    """Steps that it had drafts in."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Of its draft tokens, those that the model sampled in their place."""
    e2e_seconds: float = 0.0
    phases: list[tuple[RequestPhase, float]] = []
    """What its time went to: each phase and its begin, in seconds from its arrival; the last one ends with it. Empty
    for one that never reached the engine."""
    generation_seconds: float = 0.0
    """From the first token to the last."""
    time_to_first_token_seconds: float | None = None
    """None when it ended before its first token."""
    num_sequences: int = 1
    """Sequences that were generated side by side; the number of output tokens is that of all."""
    num_longest_output_tokens: int = 0
    """Output tokens of the longest of these."""
    error_code: str | None = None
    """Value of the `ErrorCode`, for a request that was refused or missed its deadline."""
    slo_verdict: str | None = None
    """`good` or `miss`; None when there was no verdict: it was aborted, or could never have been served."""
    slo_cause: str | None = None
    """As in `SLOVerdict.cause`."""
    missed_live: bool = False
    """Whether it was counted as a miss when its target's time had passed, before its end."""
    options: RequestOptions = NO_OPTIONS
    predicted_ttft_seconds: float | None = None
    """The time to its first token as `scheduling_policy` "slo" predicted it when it came; None if it did not."""
    refusal: str | None = None
    """Why it was refused for lack of capacity, as in `EngineCoreOutput`."""
    request_id: str = ""
    """The engine's name for it, as in a snapshot; empty for one that never reached the engine."""
    params: SamplingParams | None = None
    prompt: str | None = None
    """None when it came as token ids."""
    error: str | None = None
    """What its client was told."""
    aborted_by: AbortedBy | None = None
    num_replays: int = 0
    """Deaths of the engine that it was replayed after."""
    grammar_seconds: float | None = None
    """From the engine core's admission until its grammar was compiled; None without one, or if it was known."""
    prefill_chunks: list[tuple[float, int]] = []
    """Of a prompt that took several steps: seconds from the first step to each chunk, and its tokens."""
    is_streamed: bool = False
    """Whether its client gets the text as it comes; the server's frontend says so."""
    num_running_before: int = 0
    """Requests in the running batch when it arrived."""
    num_waiting_before: int = 0
    """Requests that had arrived before it, and waited then."""

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
        """What each phase took. Their sum is `e2e_seconds`; all are 0 where `phases` is empty."""
        return phase_seconds(self.phases, self.e2e_seconds)

    @property
    def was_rejected_at_once(self) -> bool:
        """Whether it was rejected for lack of capacity without a wait: its times would make a full queue look fast."""
        was_held = any(phase == "held" for phase, _ in self.phases)
        return self.error_code == "unavailable" and self.refusal != "queue_delay" and not was_held


def acceptance_length(num_drafts: int, num_accepted_tokens: int) -> float | None:
    """Mean tokens that a step yields for a request with drafts: those accepted and one more. None without any."""
    return 1 + num_accepted_tokens / num_drafts if num_drafts else None


class LiveRequestStats(msgspec.Struct):
    """The frontend's live requests of one engine, each sequence by itself, as they are by the clock."""

    num_held: int = 0
    """Those that no engine has at the moment."""
    overdue: dict[tuple[str, str], int] = {}
    """By class and target ("ttft", "tpot", "e2e"), those whose time is up: the first token, the next one, or the end
    has not come."""


class IterationStats(msgspec.Struct):
    """What the frontend counted for one message of the engine core, or at one look at the clock."""

    num_prompt_tokens: int = 0
    """Prompt tokens of requests whose first token came."""
    num_cached_tokens: int = 0
    num_generation_tokens: int = 0
    time_to_first_token_seconds: list[float] = []
    first_token_slo_classes: list[str] = []
    """Of the same requests."""
    inter_token_seconds: list[float] = []
    phases: list[tuple[RequestPhase, float]] = []
    """Phases of requests that have ended, and their seconds."""
    misses: list[tuple[str, str]] = []
    """Live requests whose target's time has passed: class, and cause as in `SLOVerdict`."""
    live: LiveRequestStats | None = None
    """None unless the clock was looked at."""
    finished_requests: list[FinishedRequestStats] = []
    num_engine_restarts: int = 0
    """Engine cores that were started in the place of one that had died."""
    num_requests_replayed: int = 0
    """Live requests that went on with another engine core."""
    num_requests_moved: int = 0
    """Live requests that an engine core took over from one that left."""
    step: StepStats | None = None
    """The step that the message came from; None if it was not sent by a step."""
    cancel_to_free_seconds: list[float] = []
    """Seconds from each cancellation until the engine core confirmed that the blocks are free."""
    engine_index: int = 0
    """Which replica it is about."""


class StatLogger(Protocol):
    """Gets the statistics of every step, in the frontend. Must return at once: it is called on the output path."""

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
        """Record one step."""
        ...
