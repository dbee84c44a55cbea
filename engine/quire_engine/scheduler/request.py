"""Request: one generation as the scheduler sees it."""

import enum
import time
from collections.abc import Sequence

from quire_engine.messages import EngineCoreRequest, FinishReason, PromptLogprobs
from quire_engine.pooling import POOLS
from quire_engine.sampling_params import SamplingParams
from quire_engine.scheduler.grammar import Grammar
from quire_engine.scheduler.validation import max_output_tokens
from quire_engine.snapshot import MAX_EVENTS, EventKind, Phase, RequestEvent, RequestSnapshot

MAX_OWN_EVENTS = MAX_EVENTS - 2
"""The frontend adds the arrival, and the first token if an earlier engine sampled it."""


class RequestStatus(enum.IntEnum):
    """State of a request.

    ::

        WAITING ──► RUNNING ──► FINISHED
         ▲ ▲           │
         │ └─ PREEMPTED◄
        WAITING_FOR_FSM: its grammar is being compiled
        WAITING_FOR_REMOTE_KVS: blocks of it are being loaded; then it waits again
    """

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED = 3
    WAITING_FOR_FSM = 4
    WAITING_FOR_REMOTE_KVS = 5


class Request:
    """The scheduler's state of one request.

    `all_token_ids` is the prompt followed by the output; `num_computed_tokens` says how many of them have their keys
    and values in the KV cache. The scheduler's whole task is to let this number catch up with the number of tokens.

    With async scheduling it may exceed it: only the workers know the tokens in flight. With drafts it may too, until
    the step's result says how many of them were accepted.

    ::

        all_token_ids                    │ prompt │ output so far │  num_output_placeholders
                                         │ 5 8 77 │ 301 4 12      │ ? ?
        num_computed_tokens              └────────────────────────────▲  the last of these is still to compute

    Args:
        message: brought the request to this engine core; describes the fields that it has, too.
        eos_token_ids: of the model.
        max_model_len: of the model.
        message_number: of the message.
    """

    __slots__ = (
        "age_seconds",
        "all_token_ids",
        "arrival",
        "block_hashes",
        "eos_token_ids",
        "events",
        "grammar",
        "grammar_seconds",
        "is_drafted",
        "is_replay",
        "last_stale_step",
        "lora_id",
        "max_tokens",
        "message_number",
        "needs_token_values",
        "no_allocation_until",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_known_tokens",
        "num_output_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "options",
        "prompt_logprobs",
        "prompt_parts",
        "queued_at",
        "request_id",
        "sampling_params",
        "scheduled_at",
        "slo_targets",
        "status",
        "stop_token_ids",
        "waits_for_drafts",
        "was_looked_up",
        "was_prefilled",
    )

    def __init__(
        self,
        message: EngineCoreRequest,
        eos_token_ids: Sequence[int] = (),
        max_model_len: int = 2**31,
        message_number: int = 0,
    ) -> None:
        self.request_id = message.request_id
        self.sampling_params = sampling_params = message.sampling_params
        self.options, self.slo_targets = message.options, message.slo_targets
        self.prompt_parts, self.num_preemptions = message.prompt_parts, message.num_preemptions
        self.is_replay, self.was_prefilled = message.is_replay, message.was_prefilled
        self.message_number = message_number
        self.all_token_ids = [*message.prompt_token_ids, *message.output_token_ids]
        self.num_prompt_tokens = len(message.prompt_token_ids)
        self.max_tokens = max_output_tokens(self.num_prompt_tokens, sampling_params, max_model_len)
        """Upper bound on output tokens: `sampling_params.max_tokens`, or fewer if the context ends first, or an earlier
        end is wanted now."""
        if message.max_new_tokens is not None:
            self.max_tokens = min(self.max_tokens, len(message.output_token_ids) + message.max_new_tokens)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.stop_token_ids = frozenset(sampling_params.stop_token_ids)
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_output_placeholders = 0
        """Tokens in flight after which the next step may go on before they are known; only with async scheduling."""
        self.needs_token_values = _needs_token_values(sampling_params)
        """Whether the engine has to know each token before the next is sampled; then there are no placeholders."""
        self.is_drafted = False
        """Whether tokens are drafted for it: then a step may sample several of its positions."""
        self.waits_for_drafts = False
        """Whether drafts are proposed before it goes on: they follow its last token, so there are no placeholders."""
        self.num_cached_tokens = 0
        """Prompt tokens found in the prefix cache when the request was first scheduled."""
        wants_prompt_logprobs = sampling_params.prompt_logprobs is not None and not message.output_token_ids
        self.prompt_logprobs: list[PromptLogprobs] | None = [] if wants_prompt_logprobs else None
        """Those computed so far, until they are returned with the first token; None if there are none to return."""
        self.block_hashes: list[bytes] = []
        """Hash of each full block of `all_token_ids`, as far as needed so far."""
        self.queued_at = time.monotonic()
        self.scheduled_at: float | None = None
        self.grammar: Grammar | None = None
        """The output's position in its grammar, once the grammar is compiled. Survives preemption, like the output."""
        self.grammar_seconds: float | None = None
        """Time from its arrival until the grammar was compiled; None if that was cached, or is not done."""
        self.arrival = 0
        """The scheduler's number for it, in order of arrival."""
        self.age_seconds = self.queued_at - message.arrived_at if message.arrived_at else 0.0
        """How long before `queued_at` it arrived."""
        self.lora_id: str | None = None
        """The adapter that its keys and values are computed with; part of the block hashes."""
        self.no_allocation_until = 0
        """Up to this many tokens `allocate_slots` has nothing to do: no block to add, and none that becomes full."""
        self.was_looked_up = False
        """Whether a KV connector has looked for its blocks."""
        self.num_known_tokens = 0
        """How many of its tokens were sent to the ranks that do not sample; counted only if there are such ranks."""
        self.last_stale_step = 0
        """Results of steps up to this number are stale: the request was added or preempted after them."""
        self.events: list[tuple[EventKind, float, int]] = []
        """What happened to it: kind, time on the scheduler's clock, number of tokens."""

    @property
    def needs_grammar(self) -> bool:
        """Whether it cannot run yet because its grammar is still being compiled."""
        return self.grammar is None and self.sampling_params.structured_outputs is not None

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
        """Whether every prompt token has to be computed: its log-probabilities are still to be returned, or it is
        pooled."""
        pooling = self.options.pooling_params
        return self.prompt_logprobs is not None or (pooling is not None and POOLS[pooling.task].needs_every_token)

    def add_output_placeholder(self) -> None:
        """Let the next step go on after the token about to be sampled, if it may and more tokens are to come."""
        num_output_tokens = len(self.all_token_ids) - self.num_prompt_tokens + self.num_output_placeholders + 1
        if num_output_tokens < self.max_tokens and not (self.needs_token_values or self.waits_for_drafts):
            self.num_output_placeholders += 1

    def note_event(self, kind: EventKind, time: float, num_tokens: int) -> None:
        """Add to its timeline, which keeps the latest events. Decodes are not recorded: there would be one per step."""
        if len(self.events) >= MAX_OWN_EVENTS:
            del self.events[0]
        self.events.append((kind, time, num_tokens))

    def add_prompt_logprobs(self, chunk: PromptLogprobs) -> None:
        """Add the next chunk. After a preemption the first chunk comes again, and replaces all."""
        if self.prompt_logprobs is not None:
            if chunk.start == 1:
                self.prompt_logprobs.clear()
            self.prompt_logprobs.append(chunk)

    def take_prompt_logprobs(self) -> list[PromptLogprobs] | None:
        """Return all chunks, once."""
        taken, self.prompt_logprobs = self.prompt_logprobs, None
        return taken

    def check_stop(self) -> tuple[FinishReason, int | None] | None:
        """Whether the last token ends the request: `(reason, stop_token_id)`, where end-of-sequence has no stop id."""
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
        """Its state, for operators.

        Args:
            now: time on the scheduler's clock.
            num_blocks: blocks that it refers to.
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
            start_slack_seconds=outlook[0],
            predicted_start_seconds=outlook[1],
            queue_seconds=None if self.scheduled_at is None else self.scheduled_at - self.queued_at,
            events=[RequestEvent(kind, now - time, num_tokens) for kind, time, num_tokens in self.events],
        )

    def _phase(self) -> Phase:
        if self.status is RequestStatus.WAITING_FOR_FSM:
            return "grammar"
        if self.status is RequestStatus.PREEMPTED:
            return "preempted"
        if self.status in (RequestStatus.WAITING, RequestStatus.WAITING_FOR_REMOTE_KVS):
            return "waiting"
        # Computing its tokens again after a preemption is a prefill like any other.
        has_next_token = self.num_output_tokens > 0 and self.num_tokens - self.num_computed_tokens <= 1
        return "decode" if has_next_token else "prefill"

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.name}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}, computed={self.num_computed_tokens})"
        )


def _needs_token_values(params: SamplingParams) -> bool:
    """Whether sampling depends on earlier tokens in a way that the host has to compute: for grammars, penalties, and
    bad words of more than one token.
    """
    return (
        params.structured_outputs is not None
        or params.has_penalties
        or any(len(token_ids) > 1 for token_ids in params.bad_words_token_ids)
    )
