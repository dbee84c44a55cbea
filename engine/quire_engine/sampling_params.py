"""SamplingParams: how one request's tokens are chosen, and the one validator of it. RequestOptions: all else that a
caller says of a request.

The validator is `__post_init__`, so it runs wherever an instance is made: at the edge when a request is parsed, and
again in the engine core when its message is decoded. `validate_request` checks what depends on the model (vocabulary,
context length), at the same two places.
"""

import enum
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, get_args

import msgspec

from quire_engine.errors import RequestError, cut, did_you_mean, quote
from quire_engine.lora import Adapter
from quire_engine.pooling import PoolingParams
from quire_engine.slo import RequestSLO
from quire_engine.structured_outputs_params import StructuredOutputsParams

TEXT = "of text that UTF-8 can encode, without NUL"
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_N = 128
"""Sequences of one request, as with OpenAI: each takes a place of its own in the batch."""
MAX_BEAM_LOGPROBS = 1024
MAX_CACHE_SALT_LENGTH = 1024
MAX_LOGIT_BIAS = 1024
MAX_ABSOLUTE_BIAS = 10_000.0
MAX_ALLOWED_TOKEN_IDS = 65_536
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LENGTH = 256
MAX_BAD_WORD_TOKENS = 8 * MAX_BAD_WORD_LENGTH  # a character is at most four tokens, and there is room for a space
DEFAULT_OPERATION = "text_completion"


class RequestOutputKind(enum.Enum):
    """What each output of a stream holds."""

    CUMULATIVE = 0
    """Everything so far."""
    DELTA = 1
    """What is new since the output before."""
    FINAL_ONLY = 2
    """There is one output, when the request has finished."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sampling parameters under vLLM's names and with vLLM's defaults.

    Raises:
        RequestError: a value is out of its range; the message names the parameter and what is allowed.
    """

    temperature: float = 1.0
    """0 is greedy. Logits are divided by it."""
    top_p: float = 1.0
    """Nucleus sampling: the smallest set of tokens whose probabilities reach this sum, in [0, 1]. 0 sets `temperature`
    to 0."""
    top_k: int = 0
    """Only the k most likely tokens; 0 or -1 means all. Values above the vocabulary size mean all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one, in [0, 1]."""
    seed: int | None = None
    """Makes the tokens reproducible in any batch, except with rejection sampling of drafts. Unset, or -1: a random
    seed."""
    max_tokens: int | None = 16
    """The most tokens to generate; unset: up to the context's end."""
    min_tokens: int = 0
    """No end-of-sequence or stop token before this many tokens."""
    stop: list[str] = []
    """Strings that end the text; they are part of it only with `include_stop_str_in_output`."""
    stop_token_ids: list[int] = []
    """Token ids that end the text, like end-of-sequence."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token."""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    logprobs: int | None = None
    """Log-probabilities of the sampled token and of this many most likely ones, at each position."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that the output contains, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time that the output contains it, in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides the positive logits, and multiplies the negative ones, of all tokens of the prompt and the output. 1 has
    no effect, more discourages repetition (https://arxiv.org/abs/1909.05858)."""
    logit_bias: dict[int, float] | None = None
    """Token id → the number that is added to its logit."""
    allowed_token_ids: list[int] | None = None
    """Only these tokens may be sampled."""
    bad_words: list[str] = []
    """Texts that must not be generated: the token that would complete one is not sampled."""
    bad_words_token_ids: list[list[int]] = []
    """`bad_words` as token ids. Set by the edge, which has the tokenizer; not for clients."""
    prompt_logprobs: int | None = None
    """Log-probabilities of each prompt token and of this many most likely ones in its place, without the prefix
    cache."""
    truncate_prompt_tokens: int | None = None
    """Keep only this many last tokens of the prompt; -1: as many as leave room for `max_tokens`."""
    detokenize: bool = True
    """Return the output's text; without it there are only token ids, and no stop strings."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What each output of `AsyncLLM.generate` holds. `LLM.generate` returns final ones."""
    structured_outputs: StructuredOutputsParams | None = None
    """The format of the text; may also be given as a mapping of the same shape."""
    n: int = 1
    """Sequences to generate from the prompt, which is computed once. Sequence i samples with the seed `seed + i`."""
    priority: int = 0
    """Lower goes first; for `scheduling_policy` "priority" only."""
    cache_salt: str | None = None
    """Only requests with the same salt share prefixes, so that no other client can probe for them."""
    num_speculative_tokens: int | None = None
    """The most tokens to draft in a step, if the engine drafts; unset: its setting. It changes the speed, not the
    tokens."""
    beam_width: int | None = None
    """Set by beam search for its steps, not by clients: raises the limit of `logprobs` for its beams."""

    def __post_init__(self) -> None:
        """Check every range; each error names the parameter, the value and what is allowed.

        As in vLLM, None stands for an empty list, and one stop string or bad word need not be in a list.
        """
        for name in ("stop", "bad_words", "stop_token_ids"):
            value = getattr(self, name)
            if value is None or isinstance(value, str):
                msgspec.structs.force_setattr(self, name, [] if value is None else [value])
        if self.seed == -1:
            msgspec.structs.force_setattr(self, "seed", None)
        if self.top_p == 0.0:
            msgspec.structs.force_setattr(self, "temperature", 0.0)
            msgspec.structs.force_setattr(self, "top_p", 1.0)
        if isinstance(self.structured_outputs, Mapping):
            structured_outputs = StructuredOutputsParams.from_value(self.structured_outputs)
            msgspec.structs.force_setattr(self, "structured_outputs", structured_outputs)
        for name, kind in _FIELD_TYPES.items():
            _require_type(name, getattr(self, name), kind)
        max_logprobs = MAX_LOGPROBS if self.beam_width is None else MAX_BEAM_LOGPROBS
        keep = self.truncate_prompt_tokens
        for name, is_good, allowed in (
            ("temperature", 0.0 <= self.temperature <= 1e4, "a number from 0 (greedy) to 10000"),
            ("top_p", 0.0 < self.top_p <= 1.0, "in [0, 1]"),
            ("top_k", -1 <= self.top_k < 2**63, "-1 or 0 (all tokens), or from 1 to 2**63 - 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "in [0, 1]"),
            ("seed", self.seed is None or 0 <= self.seed < 2**64, "an integer from 0 to 2**64 - 1"),
            ("max_tokens", self.max_tokens is None or 1 <= self.max_tokens < 2**63, "at least 1, and less than 2**63"),
            ("min_tokens", self.min_tokens >= 0, "at least 0"),
            ("beam_width", self.beam_width is None or self.beam_width >= 1, "at least 1"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= max_logprobs, f"from 0 to {max_logprobs}"),
            ("prompt_logprobs", self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= MAX_LOGPROBS,
             f"from 0 to {MAX_LOGPROBS}"),
            ("truncate_prompt_tokens", keep is None or keep == -1 or keep >= 1,
             "-1 (as many as there is room for), or at least 1"),
            ("n", 1 <= self.n <= MAX_N, f"from 1 to {MAX_N}"),
            ("num_speculative_tokens", self.num_speculative_tokens is None or self.num_speculative_tokens >= 0,
             "at least 0 (no drafts)"),
            ("priority", -(2**63) <= self.priority < 2**63, "an integer of 64 bits"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "in [-2, 2]"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "in [-2, 2]"),
            ("repetition_penalty", 1e-4 <= self.repetition_penalty <= 1e4, "greater than 0: from 0.0001 to 10000"),
        ):  # fmt: skip
            _require(is_good, name, getattr(self, name), allowed)
        if self.max_tokens is not None:
            _require(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens,
                     f"at most max_tokens={self.max_tokens}")  # fmt: skip
        if self.structured_outputs is not None and self.structured_outputs.choice is not None:
            # Each token is at least a byte of the text.
            longest = max(len(choice.encode()) for choice in self.structured_outputs.choice)
            _require(self.min_tokens <= longest, "min_tokens", self.min_tokens,
                     f"at most {longest}, the bytes of the longest structured_outputs choice")  # fmt: skip
        _require(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"{len(self.stop)} strings",
                 f"at most {MAX_STOP_STRINGS} strings")  # fmt: skip
        for stop in self.stop:
            _require(is_text(stop), "stop", ascii(stop), TEXT)
            _require(0 < len(stop) <= MAX_STOP_STRING_LENGTH, "stop", f"a string of {len(stop)} characters",
                     f"strings of 1 to {MAX_STOP_STRING_LENGTH} characters")  # fmt: skip
        _require(len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS, "stop_token_ids", f"{len(self.stop_token_ids)} ids",
                 f"at most {MAX_STOP_TOKEN_IDS} ids")  # fmt: skip
        _require(self.detokenize or not self.stop, "stop", f"{len(self.stop)} strings",
                 "empty when detokenize is false: without text there is nothing to look for it in")  # fmt: skip
        _require(self.cache_salt is None or is_text(self.cache_salt), "cache_salt", ascii(self.cache_salt),
                 TEXT)  # fmt: skip
        _require(self.cache_salt is None or 0 < len(self.cache_salt) <= MAX_CACHE_SALT_LENGTH, "cache_salt",
                 f"a string of {len(self.cache_salt or '')} characters",
                 f"a string of 1 to {MAX_CACHE_SALT_LENGTH} characters")  # fmt: skip
        self._check_token_constraints()

    def _check_token_constraints(self) -> None:
        """Check parameters that name tokens or words. `validate_request` checks that the ids exist."""
        if self.logit_bias is not None:
            _require(len(self.logit_bias) <= MAX_LOGIT_BIAS, "logit_bias", f"{len(self.logit_bias)} entries",
                     f"at most {MAX_LOGIT_BIAS} entries")  # fmt: skip
            for token_id, bias in self.logit_bias.items():
                _require(abs(bias) <= MAX_ABSOLUTE_BIAS, "logit_bias", f"{bias} for token {token_id}",
                         f"from {-MAX_ABSOLUTE_BIAS:.0f} to {MAX_ABSOLUTE_BIAS:.0f}")  # fmt: skip
        if self.allowed_token_ids is not None:
            _require(0 < len(self.allowed_token_ids) <= MAX_ALLOWED_TOKEN_IDS, "allowed_token_ids",
                     f"{len(self.allowed_token_ids)} ids", f"from 1 to {MAX_ALLOWED_TOKEN_IDS} ids")  # fmt: skip
        _require(len(self.bad_words) <= MAX_BAD_WORDS, "bad_words", f"{len(self.bad_words)} words",
                 f"at most {MAX_BAD_WORDS} words")  # fmt: skip
        for word in self.bad_words:
            _require(is_text(word), "bad_words", ascii(word), TEXT)
            _require(0 < len(word) <= MAX_BAD_WORD_LENGTH, "bad_words", f"a word of {len(word)} characters",
                     f"words of 1 to {MAX_BAD_WORD_LENGTH} characters")  # fmt: skip
        _require(len(self.bad_words_token_ids) <= 2 * MAX_BAD_WORDS, "bad_words_token_ids",
                 f"{len(self.bad_words_token_ids)} sequences", f"at most {2 * MAX_BAD_WORDS} sequences")  # fmt: skip
        for token_ids in self.bad_words_token_ids:
            _require(0 < len(token_ids) <= MAX_BAD_WORD_TOKENS, "bad_words_token_ids",
                     f"a sequence of {len(token_ids)} ids", f"sequences of 1 to {MAX_BAD_WORD_TOKENS} ids")  # fmt: skip

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, without randomness."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens so far."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """Build from decoded JSON or request parameters, with the conversions that clients rely on.

        vllm_backend's clients send `{"temperature": "0.1", "max_tokens": "100"}`: strings become numbers and booleans
        by the field's type, and so do token ids that are keys of a JSON object. `stop` may be one string. null means
        unset.

        Raises:
            RequestError: a name is not known (the nearest known one is named), or a value has the wrong type or range.
        """
        return cls(**convert_parameters(values))


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a caller says of a request besides its prompt and sampling parameters. It travels whole: from the server's
    frontend through the journal to the scheduler, and into the statistics of the request's end.
    """

    deadline_ms: float | None = None
    """Milliseconds within which it has to finish, from its arrival; in a message to an engine core, from when that is
    sent. Unset: no deadline."""
    slo: RequestSLO = RequestSLO()
    """Its class of objectives, and its own targets."""
    traceparent: str | None = None
    """The trace that it is part of, in W3C's format; ignored if it is malformed."""
    label: str = ""
    """The caller's name for it, which need not be unique."""
    operation: str = DEFAULT_OPERATION
    """As OpenTelemetry names it."""
    response_id: str = ""
    """The name of the answer, where a gateway gives it one."""
    pooling_params: PoolingParams | None = None
    """Set if it returns a pooled vector instead of tokens."""
    adapter: Adapter | None = None
    """Set if it is computed with a LoRA adapter."""


NO_OPTIONS = RequestOptions()
_FIELD_TYPES: dict[str, Any] = {field.name: field.type for field in msgspec.structs.fields(SamplingParams)}
"""Read once: this takes longer than all checks of an instance."""
_NOT_FOR_CLIENTS = ("bad_words_token_ids", "beam_width")


def _without_none(kind: Any) -> Any:
    """`int | None` → `int`."""
    (kind,) = set(get_args(kind)) - {NoneType} if isinstance(kind, UnionType) else {kind}
    return kind


PARAMETER_TYPES: dict[str, Any] = {
    name: _without_none(kind) for name, kind in _FIELD_TYPES.items() if name not in _NOT_FOR_CLIENTS
}
"""Name → type of each parameter for clients, all optional."""

_NEUTRAL: dict[str, bool | float | None] = {
    "best_of": 1, "use_beam_search": False, "early_stopping": False, "length_penalty": 1.0,
    "spaces_between_special_tokens": True, "flat_logprobs": False, "logits_processors": None,
    "guided_decoding": None, "extra_args": None,
}  # fmt: skip
"""vLLM's parameters that are not supported here, with their neutral values, which some clients send."""


def is_text(value: str) -> bool:
    """Whether a request parameter of Triton can hold it: JSON may have half of a surrogate pair, which is no character,
    and Triton cuts a parameter off at NUL.
    """
    return "\0" not in value and not any("\ud800" <= character <= "\udfff" for character in value)


def _require_type(name: str, value: object, kind: Any) -> None:
    """Check a type: decoding does so already, but callers of the constructor may pass anything."""
    if isinstance(value, enum.Enum | msgspec.Struct):
        return
    try:
        msgspec.convert(value, kind)
    except (msgspec.ValidationError, OverflowError) as error:
        raise RequestError.of(name, f"is {quote(value)}: {error}") from None


def _require(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise RequestError.of(name, f"is {cut(str(value))}; it must be {allowed}")


def convert_parameters(values: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that are not null, converted by `convert_parameter`."""
    converted = {name: convert_parameter(name, value) for name, value in values.items()}
    return {name: value for name, value in converted.items() if value is not None}


def convert_parameter(name: str, value: Any) -> Any:
    """One value of JSON or of a request parameter, as the field's own type; null stays None and means unset.

    The neutral value of a parameter that only vLLM has becomes None, too.

    Raises:
        RequestError: the name is not known (the nearest known one is named), the value has another type, or it asks for
            what is not offered.
    """
    kind = PARAMETER_TYPES.get(name)
    if name in _NEUTRAL:
        return _check_neutral(name, value)
    if kind is None:
        hint = did_you_mean(name, PARAMETER_TYPES, else_all=True)
        raise RequestError(name, f"unknown sampling parameter {quote(name)}{hint}")
    if value is None:
        return None
    if kind == list[str]:
        return _string_list(name, value)
    if kind == list[int]:
        if not isinstance(value, list | tuple):
            raise RequestError.of(name, f"is {quote(value)}; it must be a list of token ids")
        return [_number(name, item, int) for item in value]
    if kind == dict[int, float]:
        return _bias_of_token_ids(name, value)
    if kind is RequestOutputKind:
        return _output_kind(name, value)
    if kind is StructuredOutputsParams:
        return StructuredOutputsParams.from_value(value)
    if kind is bool:
        return _boolean(name, value)
    if kind is str:
        if not isinstance(value, str):
            raise RequestError.of(name, f"is {quote(value)}; it must be a string")
        return value
    return _number(name, value, kind)


def _check_neutral(name: str, value: Any) -> None:
    """Accept only the neutral value of a parameter that is not supported."""
    neutral = _NEUTRAL[name]
    if value is None:
        return
    if neutral is None:
        is_neutral = False
    elif isinstance(neutral, bool):
        is_neutral = _boolean(name, value) is neutral
    else:
        is_neutral = _number(name, value, float) == neutral
    if not is_neutral:
        allowed = "null" if neutral is None else str(neutral).lower()
        raise RequestError.of(name, f"is {quote(value)}; it is not offered here: leave it out, or {allowed}")


def _string_list(name: str, value: Any) -> list[str]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise RequestError.of(name, f"is {quote(value)}; it must be a string or a list of strings")
    # An input tensor cannot be empty over HTTP: clients that want none, such as TensorRT-LLM's, send one empty string.
    return [] if list(items) == [""] else list(items)


def _bias_of_token_ids(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise RequestError.of(name, f"is {quote(value)}; it must be an object of token id and bias")
    converted = {_number(name, token_id, int): _number(name, bias, float) for token_id, bias in value.items()}
    if len(converted) < len(value):
        raise RequestError.of(name, f"is {quote(value)}; it must be an object that holds each token id once")
    return converted


def _output_kind(name: str, value: Any) -> RequestOutputKind:
    if isinstance(value, RequestOutputKind):
        return value
    if isinstance(value, str) and value.upper() in RequestOutputKind.__members__:
        return RequestOutputKind[value.upper()]
    try:
        return RequestOutputKind(_number(name, value, int))
    except ValueError:
        kinds = ", ".join(f"{kind.name} ({kind.value})" for kind in RequestOutputKind)
        raise RequestError.of(name, f"is {quote(value)}; it must be one of {kinds}") from None


def _boolean(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false", "1", "0"):
        return value.lower() in ("true", "1")
    raise RequestError.of(name, f"is {quote(value)}; it must be true or false")


def _number(name: str, value: Any, kind: type) -> Any:
    """`value` as int or float; a float with a whole value is accepted for int, a bool never is."""
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise TypeError
        if isinstance(value, str) and "_" in value:  # Python's digit separator
            raise ValueError
        if kind is float:
            return float(value)
        if isinstance(value, float):
            # A larger float may not be what the client wrote: tritonserver converts long integers to floats.
            if not value.is_integer() or abs(value) > 2**53:
                raise ValueError
            return int(value)
        return int(value)
    except (TypeError, ValueError, OverflowError):
        wanted = "a number" if kind is float else "an integer"
        if wanted == "an integer" and isinstance(value, float) and abs(value) > 2**53:
            wanted = "an integer, and one of so many digits has to come as a string"
        raise RequestError.of(name, f"is {quote(value)}; it must be {wanted}") from None
