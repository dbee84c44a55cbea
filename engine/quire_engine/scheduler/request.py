"""Request: one generation as the scheduler sees it."""

import enum
import time
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field

from quire_engine.messages import EngineCoreRequest, FinishReason, PromptLogprobs, PromptPart
from quire_engine.sampling_params import RequestOptions, SamplingParams
from quire_engine.scheduler.grammar import Grammar
from quire_engine.scheduler.validation import max_output_tokens
from quire_engine.slo import SLOTargets
from quire_engine.snapshot import MAX_EVENTS, EventKind, Phase, RequestEvent, RequestSnapshot

MAX_OWN_EVENTS = MAX_EVENTS - 2
"""The frontend adds the arrival, and the first token of a request that is replayed."""


class RequestStatus(enum.IntEnum):
    """State of a request.

    ::

        WAITING ──► RUNNING ──► FINISHED
         ▲ ▲           │
         │ └─ PREEMPTED◄
        WAITING_FOR_FSM: its grammar is being compiled
        WAITING_FOR_REMOTE_KVS: blocks of it are being loaded; then it waits again
    WAITING_FOR_ADAPTER: its LoRA adapter is being loaded, or has no slot yet
    """

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED = 3
    WAITING_FOR_FSM = 4
    WAITING_FOR_REMOTE_KVS = 5
    WAITING_FOR_ADAPTER = 6


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """The scheduler's state of one request.

    `all_token_ids` is the prompt followed by the output; `num_computed_tokens` of them have keys and values in the KV
    cache. The scheduler lets this number catch up with the number of tokens.

    With async scheduling it may exceed it: only the workers know the tokens in flight. So may it with drafts, until the
    step's result reports how many were accepted.

    ::

        all_token_ids                    │ prompt │ output so far │  num_output_placeholders
                                         │ 5 8 77 │ 301 4 12      │ ? ?
        num_computed_tokens              └────────────────────────────▲  the last of these is still to compute

    Args:
        message: the request as it came; it describes the fields of the same name.
        eos: end-of-sequence tokens of the model.
        max_model_len: of the model.
        message_number: of the message.
    """

    message: InitVar[EngineCoreRequest]
    eos: InitVar[Sequence[int]] = ()
    max_model_len: InitVar[int] = 2**31
    message_number: int = 0
    request_id: str = field(init=False)
    sampling_params: SamplingParams = field(init=False)
    options: RequestOptions = field(init=False)
    slo_targets: SLOTargets = field(init=False)
    prompt_parts: list[PromptPart] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    all_token_ids: list[int] = field(init=False)
    max_tokens: int = field(init=False)
    """Upper bound on output tokens: `sampling_params.max_tokens`, the context's end, or `max_new_tokens`."""
    eos_token_ids: frozenset[int] = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)
    allowed_token_ids: frozenset[int] | None = field(init=False)
    """If it has any. An adapter's own head may have none of them; then what is sampled is not one of these."""
    needs_token_values: bool = field(init=False)
    """Whether the host has to know each token before the next is sampled; then there are no placeholders."""
    is_replay: bool = False
    was_prefilled: bool = False
    num_preemptions: int = 0
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_output_placeholders: int = 0
    """Tokens in flight that the next step may continue from before they are known; only with async scheduling."""
    is_drafted: bool = False
    """Whether tokens are drafted for it: then a step may sample several positions."""
    waits_for_drafts: bool = False
    """Whether drafts are proposed before its next step: they follow its last token, so there are no placeholders."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when the request was first scheduled."""
    prompt_logprobs: list[PromptLogprobs] | None = None
    """Those computed so far, until they are returned with the first token; None if none were requested."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Hash of each full block of `all_token_ids`, computed as needed."""
    queued_at: float = field(init=False)
    scheduled_at: float | None = None
    grammar: Grammar | None = None
    """The output's state in its grammar, once that is compiled. It survives preemption, like the output."""
    grammar_seconds: float | None = None
    """Time from its arrival until its grammar was compiled; None if that was cached, or is not compiled."""
    arrival: int = 0
    """The scheduler's number for it, in order of arrival."""
    age_seconds: float = 0.0
    """How long before `queued_at` it arrived."""
    lora_id: str | None = None
    """The digest of its LoRA adapter; part of the block hashes."""
    adapter_slot: int = -1
    """The adapter's, once it does not wait for one; -1: none."""
    no_allocation_until: int = 0
    """Up to this many tokens `allocate_slots` adds no block, and no block becomes full."""
    was_looked_up: bool = False
    """Whether a KV connector has looked for its blocks."""
    num_known_tokens: int = 0
    """How many of its tokens were sent to the ranks that do not sample, if there are any."""
    last_stale_step: int = 0
    """Results of steps up to this number are stale: the request was added or preempted after them."""
    events: list[tuple[EventKind, float, int]] = field(default_factory=list)
    """Its timeline: kind of event, time on the scheduler's clock, number of tokens."""

    def __post_init__(self, message: EngineCoreRequest, eos: Sequence[int], max_model_len: int) -> None:
        self.request_id, self.sampling_params = message.request_id, message.sampling_params
        self.options, self.slo_targets, self.prompt_parts = message.options, message.slo_targets, message.prompt_parts
        self.is_replay, self.was_prefilled = message.is_replay, message.was_prefilled
        self.num_preemptions = message.num_preemptions
        self.lora_id = None if self.options.adapter is None else self.options.adapter.digest
        self.all_token_ids = [*message.prompt_token_ids, *message.output_token_ids]
        self.num_prompt_tokens = len(message.prompt_token_ids)
        self.max_tokens = max_output_tokens(self.num_prompt_tokens, self.sampling_params, max_model_len)
        if message.max_new_tokens is not None:
            self.max_tokens = min(self.max_tokens, len(message.output_token_ids) + message.max_new_tokens)
        ends = eos if message.eos_token_id is None else (*eos, message.eos_token_id)
        self.eos_token_ids, self.stop_token_ids = frozenset(ends), frozenset(self.sampling_params.stop_token_ids)
        allowed = self.sampling_params.allowed_token_ids
        self.allowed_token_ids = None if allowed is None else frozenset(allowed)
        self.needs_token_values = _needs_token_values(self.sampling_params)
        if self.sampling_params.prompt_logprobs is not None and not message.output_token_ids:
            self.prompt_logprobs = []
        self.queued_at = time.monotonic()
        if message.arrived_at:
            self.age_seconds = self.queued_at - message.arrived_at

    @property
    def needs_grammar(self) -> bool:
        """Whether it waits for its grammar to be compiled."""
        return self.grammar is None and self.sampling_params.structured_outputs is not None

    def with_whole_parts(self, start: int, num_tokens: int, limit: int) -> int:
        """How many tokens from `start` on a step computes instead of `num_tokens`, so that it does not end within a
        part that is bidirectional: at most `limit`, to the part's end; else to its start, which may be none."""
        end = start + num_tokens
        for part in self.prompt_parts:
            if part.is_bidirectional and part.start < end < part.end:
                return part.end - start if part.end - start <= limit else max(part.start - start, 0)
        return num_tokens

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far."""
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def ending_token_ids(self) -> frozenset[int]:
        """Tokens that end the request, once `min_tokens` allows it."""
        return self.stop_token_ids if self.sampling_params.ignore_eos else self.eos_token_ids | self.stop_token_ids

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Whether every prompt token has to be computed: for its log-probabilities, or for a pool that reads all."""
        pooling = self.options.pooling_params
        return self.prompt_logprobs is not None or (pooling is not None and pooling.needs_every_token)

    def add_output_placeholder(self) -> None:
        """Let the next step continue from the token about to be sampled, if the request allows it and goes on."""
        num_output_tokens = len(self.all_token_ids) - self.num_prompt_tokens + self.num_output_placeholders + 1
        if num_output_tokens < self.max_tokens and not (self.needs_token_values or self.waits_for_drafts):
            self.num_output_placeholders += 1

    def note_event(self, kind: EventKind, time: float, num_tokens: int) -> None:
        """Add to its timeline, which keeps the latest events. Decode steps are no events: there are too many."""
        if len(self.events) >= MAX_OWN_EVENTS:
            del self.events[0]
        self.events.append((kind, time, num_tokens))

    def add_prompt_logprobs(self, chunk: PromptLogprobs) -> None:
        """Add the next chunk. After a preemption the first chunk comes again, and replaces all chunks."""
        if self.prompt_logprobs is not None:
            if chunk.start == 1:
                self.prompt_logprobs.clear()
            self.prompt_logprobs.append(chunk)

    def take_prompt_logprobs(self) -> list[PromptLogprobs] | None:
        """Return all chunks, once."""
        taken, self.prompt_logprobs = self.prompt_logprobs, None
        return taken

    def check_stop(self) -> tuple[FinishReason, int | None] | None:
        """`(reason, stop_token_id)` if the last token ends the request; end-of-sequence has no stop id."""
        if self.grammar is not None and self.grammar.is_terminated():
            # No token may follow, whatever min_tokens and ignore_eos say.
            return FinishReason.STOP, None
        last = self.all_token_ids[-1]
        num_output_tokens = len(self.all_token_ids) - self.num_prompt_tokens
        if last in self.eos_token_ids or last in self.stop_token_ids:
            params = self.sampling_params
            if num_output_tokens >= params.min_tokens:
                if not params.ignore_eos and last in self.eos_token_ids:
                    return FinishReason.STOP, None
                if last in self.stop_token_ids:
                    return FinishReason.STOP, last
        if num_output_tokens >= self.max_tokens:
            return FinishReason.LENGTH, None
        return None

    def snapshot(self, now: float, num_blocks: int, outlook: tuple[float | None, float | None]) -> RequestSnapshot:
        """The request for operators.

        Args:
            now: time on the scheduler's clock.
            num_blocks: the blocks that it refers to.
            outlook: `SchedulingPolicy.outlook` of it.
        """
        return RequestSnapshot(
            id=self.request_id,
            phase=self._phase(),
            num_prompt_tokens=self.num_prompt_tokens,
            num_computed_tokens=self.num_computed_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=self.num_output_tokens,
            max_tokens=self.max_tokens,
            num_blocks=num_blocks,
            num_preemptions=self.num_preemptions,
            priority=self.sampling_params.priority,
            adapter="" if self.options.adapter is None else self.options.adapter.name,
            start_slack_seconds=outlook[0],
            predicted_start_seconds=outlook[1],
            queue_seconds=None if self.scheduled_at is None else self.scheduled_at - self.queued_at,
            events=[RequestEvent(kind, now - time, num_tokens) for kind, time, num_tokens in self.events],
        )

    def _phase(self) -> Phase:
        if self.status is RequestStatus.WAITING_FOR_FSM:
            return "grammar"
        if self.status is RequestStatus.WAITING_FOR_ADAPTER:
            return "adapter"
        if self.status is RequestStatus.PREEMPTED:
            return "preempted"
        if self.status in (RequestStatus.WAITING, RequestStatus.WAITING_FOR_REMOTE_KVS):
            return "waiting"
        # Recomputation after a preemption is a prefill.
        has_next_token = self.num_output_tokens > 0 and self.num_tokens - self.num_computed_tokens <= 1
        return "decode" if has_next_token else "prefill"

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.name}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}, computed={self.num_computed_tokens})"
        )


def _needs_token_values(params: SamplingParams) -> bool:
    """Whether the host computes how sampling depends on earlier tokens: grammars, penalties, bad words of several
    tokens.
    """
    return (
        params.structured_outputs is not None
        or params.has_penalties
        or any(len(token_ids) > 1 for token_ids in params.bad_words_token_ids)
    )
