"""Request: one generation as the scheduler sees it, and the check that it can be served at all."""

import enum
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from quire_engine.errors import RequestError
from quire_engine.sampling_params import SamplingParams
from quire_engine.snapshot import MAX_EVENTS, EventKind

if TYPE_CHECKING:
    from quire_engine.messages import PromptLogprobs
    from quire_engine.structured_output.grammar import Grammar

__all__ = ["FinishReason", "MultimodalHash", "Request", "RequestStatus", "validate_request"]


MultimodalHash = tuple[bytes, int, int]
"""An image or other input that takes the place of tokens: `(hash of its content, first position, number of tokens)`."""

MAX_OWN_EVENTS = MAX_EVENTS - 2
"""The frontend adds the arrival, and the first token when an engine had given it that is no more."""

MAX_PROMPT_LOGPROBS_ENTRIES = 500_000
"""Log-probabilities that one request may ask for of its prompt: each becomes an object where the caller is."""


class RequestStatus(enum.IntEnum):
    """Where a request is in its life.

    ::

        WAITING ──► RUNNING ──► FINISHED
         ▲ ▲           │
         │ └─ PREEMPTED◄
        WAITING_FOR_FSM: its grammar is being compiled
    """

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED = 3
    WAITING_FOR_FSM = 4


class FinishReason(enum.IntEnum):
    """Why a request ended; `str()` gives vLLM's (and OpenAI's) word for it."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


class Request:
    """The scheduler's state of one request.

    `all_token_ids` is the prompt followed by the output; `num_computed_tokens` says how many of them have their keys
    and values in the KV cache. The scheduler's whole task is to let the second number catch up with the first.

    With async scheduling it may pass it: the workers know the tokens that are in flight, though nobody else does yet.

    ::

        all_token_ids                    │ prompt │ output so far │  num_output_placeholders
                                         │ 5 8 77 │ 301 4 12      │ ? ?
        num_computed_tokens              └────────────────────────────▲  the last of these is still to compute
    """

    __slots__ = (
        "all_token_ids",
        "arrival",
        "block_hashes",
        "deadline_ms",
        "eos_token_ids",
        "events",
        "grammar",
        "is_replay",
        "lora_id",
        "max_tokens",
        "message_number",
        "mm_hashes",
        "needs_token_values",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_known_tokens",
        "num_output_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "prompt_logprobs",
        "queued_at",
        "request_id",
        "sampling_params",
        "scheduled_at",
        "settled_until",
        "status",
        "stop_token_ids",
        "void_until_step",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        eos_token_ids: Sequence[int] = (),
        max_model_len: int = 2**31,
        output_token_ids: Sequence[int] = (),
    ) -> None:
        self.request_id = request_id
        self.sampling_params = sampling_params
        self.all_token_ids = [*prompt_token_ids, *output_token_ids]
        self.num_prompt_tokens = len(prompt_token_ids)
        self.max_tokens = max_output_tokens(self.num_prompt_tokens, sampling_params, max_model_len)
        """Output tokens at most: `sampling_params.max_tokens`, or less where the context ends first."""
        self.eos_token_ids = frozenset(eos_token_ids)
        self.stop_token_ids = frozenset(sampling_params.stop_token_ids)
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_output_placeholders = 0
        """Tokens in flight that a step may follow on from before they are known; only with async scheduling."""
        self.needs_token_values = _needs_token_values(sampling_params)
        """Whether the engine has to know each token before the next is sampled: it never has a placeholder."""
        self.num_cached_tokens = 0
        """Prompt tokens found in the prefix cache when the request was first scheduled."""
        self.num_preemptions = 0
        self.is_replay = False
        """Whether an engine that is no more had taken it: then it is not refused for want of room."""
        wants_prompt_logprobs = sampling_params.prompt_logprobs is not None and not output_token_ids
        self.prompt_logprobs: list[PromptLogprobs] | None = [] if wants_prompt_logprobs else None
        """Those computed so far, until they are given out with the first token; None when there are none to give."""
        self.block_hashes: list[bytes] = []
        """Hash of each full block of `all_token_ids`, as far as it was needed so far."""
        self.queued_at = time.monotonic()
        self.scheduled_at: float | None = None
        self.grammar: Grammar | None = None
        """Where in its grammar the output is, once the grammar is compiled. Survives preemption, as the output does."""
        self.arrival = 0
        """The scheduler's number for it, in order of arrival."""
        self.message_number = 0
        """Of the message that brought it to this engine core."""
        self.deadline_ms: float | None = None
        """Milliseconds from `queued_at` in which it has to be finished."""
        self.lora_id: str | None = None
        """The adapter that its keys and values are computed with; part of the block hashes."""
        self.mm_hashes: list[MultimodalHash] = []
        """What stands behind placeholder tokens of the prompt; part of the hashes of the blocks they reach into."""
        self.settled_until = 0
        """Up to this many tokens the KVCacheManager has nothing to do: no block to add, none that has become full."""
        self.num_known_tokens = 0
        """Of its tokens, how many ranks that do not sample have been told of; counted only where there are such."""
        self.void_until_step = 0
        """Results of steps up to this number are not for it: they were scheduled before it was taken back, or came."""
        self.events: list[tuple[EventKind, float, int]] = []
        """What happened to it: kind, time of the scheduler's clock, number of tokens."""

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
        """Whether every prompt token has to be computed: its log-probabilities are still to be given out."""
        return self.prompt_logprobs is not None

    def add_output_placeholder(self) -> None:
        """Let the next step follow on from the token that is about to be sampled, if one can and there is to be one."""
        num_output_tokens = len(self.all_token_ids) - self.num_prompt_tokens + self.num_output_placeholders + 1
        if num_output_tokens < self.max_tokens and not self.needs_token_values:
            self.num_output_placeholders += 1

    def note_event(self, kind: EventKind, time: float, num_tokens: int) -> None:
        """Add to its timeline, of which the latest events are kept. Decodes are none: there would be one per step."""
        if len(self.events) >= MAX_OWN_EVENTS:
            del self.events[0]
        self.events.append((kind, time, num_tokens))

    def add_prompt_logprobs(self, chunk: "PromptLogprobs") -> None:
        """Take in the next chunk; one that begins at the prompt's beginning starts anew, after a preemption."""
        if self.prompt_logprobs is not None:
            if chunk.start == 1:
                self.prompt_logprobs.clear()
            self.prompt_logprobs.append(chunk)

    def take_prompt_logprobs(self) -> "list[PromptLogprobs] | None":
        """All of them, once."""
        taken, self.prompt_logprobs = self.prompt_logprobs, None
        return taken

    def check_stop(self) -> tuple[FinishReason, int | None] | None:
        """Whether the last token ends the request: `(reason, stop_token_id)`, where end-of-sequence has no stop id."""
        if self.grammar is not None and self.grammar.is_terminated():
            # Nothing can follow, whatever min_tokens and ignore_eos say.
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

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.name}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}, computed={self.num_computed_tokens})"
        )


def _needs_token_values(params: SamplingParams) -> bool:
    """Whether what may be sampled depends on which tokens were, in ways that the engine or the worker's host works out.

    These are grammars, penalties, and bad words of more than one token.
    """
    return (
        params.structured_outputs is not None
        or params.has_penalties
        or any(len(token_ids) > 1 for token_ids in params.bad_words_token_ids)
    )


def max_output_tokens(num_prompt_tokens: int, params: SamplingParams, max_model_len: int) -> int:
    """How many tokens may be generated: `max_tokens`, or fewer where the context ends first."""
    room = max_model_len - num_prompt_tokens
    return room if params.max_tokens is None else min(params.max_tokens, room)


def validate_request(
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    *,
    vocab_size: int,
    max_model_len: int,
    num_kv_cache_tokens: int,
    prompt_name: str = "input_ids",
    scheduling_policy: str = "fcfs",
) -> None:
    """Check what depends on the model; the edge and the core both call this.

    Args:
        prompt_token_ids: the prompt.
        params: already valid in themselves.
        vocab_size: token ids are in [0, vocab_size).
        max_model_len: tokens that prompt and output may have together.
        num_kv_cache_tokens: tokens that the whole KV cache holds.
        prompt_name: what the caller knows the prompt as, for the message.
        scheduling_policy: the engine's; only "priority" takes requests with a priority.

    Raises:
        RequestError: the request could never be served.
    """
    num_prompt = len(prompt_token_ids)
    if num_prompt == 0:
        raise RequestError(prompt_name, f"{prompt_name} is empty; it must hold at least one token")
    low, high = min(prompt_token_ids), max(prompt_token_ids)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise RequestError(prompt_name, f"{prompt_name} holds token id {bad}; ids must be in [0, {vocab_size})")
    if num_prompt >= max_model_len:
        raise RequestError(
            prompt_name,
            f"{prompt_name} has {num_prompt} tokens; with max_model_len={max_model_len} it must have fewer than that",
        )
    if params.max_tokens is not None and params.max_tokens > max_model_len:
        raise RequestError(
            "max_tokens", f"max_tokens is {params.max_tokens}; it must be at most max_model_len={max_model_len}"
        )
    if params.min_tokens > max_model_len - num_prompt:
        raise RequestError(
            "min_tokens",
            f"min_tokens is {params.min_tokens}; after a prompt of {num_prompt} tokens max_model_len={max_model_len} "
            f"leaves room for {max_model_len - num_prompt}",
        )
    _check_params(params, num_prompt, vocab_size)
    if params.priority != 0 and scheduling_policy != "priority":
        raise RequestError(
            "priority",
            f"priority is {params.priority}; it must be 0 unless the engine runs with scheduling_policy 'priority'",
        )
    # The last token's keys and values are never needed, so one token less has to fit.
    num_tokens = num_prompt + max_output_tokens(num_prompt, params, max_model_len) - 1
    if num_tokens > num_kv_cache_tokens:
        name = prompt_name if num_prompt > num_kv_cache_tokens else "max_tokens"
        raise RequestError(
            name,
            f"{name}: a prompt of {num_prompt} tokens with {num_tokens + 1 - num_prompt} to generate can never fit the "
            f"KV cache of {num_kv_cache_tokens} tokens; shorten it, lower max_tokens, or raise kv_cache_memory_bytes",
        )


def _check_params(params: SamplingParams, num_prompt: int, vocab_size: int) -> None:
    """Check the size of the prompt's log-probabilities, and that all token ids exist."""
    num_entries = num_prompt * (1 + params.prompt_logprobs) if params.prompt_logprobs is not None else 0
    if num_entries > MAX_PROMPT_LOGPROBS_ENTRIES:
        raise RequestError(
            "prompt_logprobs",
            f"prompt_logprobs is {params.prompt_logprobs}; for a prompt of {num_prompt} tokens these are {num_entries} "
            f"log-probabilities, and it must be at most {MAX_PROMPT_LOGPROBS_ENTRIES}",
        )
    _check_token_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_token_ids("logit_bias", params.logit_bias or (), vocab_size)
    _check_token_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    for token_ids in params.bad_words_token_ids:
        _check_token_ids("bad_words", token_ids, vocab_size)


def _check_token_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(name, f"{name} holds {token_id}; ids must be in [0, {vocab_size})")
