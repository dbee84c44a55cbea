"""SamplingParams: how one request's tokens are chosen, and the one validator of it.

The validator is `__post_init__`, so it runs wherever an instance comes to be: at the edge when a request is parsed,
and again in the engine core when its message is decoded. What depends on the model (vocabulary, context length) is
checked by `Request.validate`, at the same two places.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import msgspec

from quire_engine.errors import RequestError

__all__ = ["MAX_LOGPROBS", "MAX_STOP_STRINGS", "MAX_STOP_STRING_LENGTH", "SamplingParams", "convert_parameter"]

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_N = 128
"""Sequences of one request, as with OpenAI: each takes a place of its own in the batch."""
MAX_BEAM_LOGPROBS = 1024
MAX_CACHE_SALT_LENGTH = 1024


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sampling parameters under vLLM's names and with vLLM's defaults.

    Raises:
        RequestError: a value is out of its range; the message names the parameter and what is allowed.
    """

    temperature: float = 1.0
    """0 is greedy. Logits are divided by it."""
    top_p: float = 1.0
    """Nucleus sampling: the smallest set of tokens whose probabilities reach this sum, in (0, 1]."""
    top_k: int = 0
    """Only the k most likely tokens; 0 or -1 means all. Values above the vocabulary size mean all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one, in [0, 1]."""
    seed: int | None = None
    """Makes the sampled tokens reproducible, in any batch. Unset: a random seed per request."""
    max_tokens: int | None = 16
    """The most tokens to generate; unset: as many as the context holds."""
    min_tokens: int = 0
    """No end-of-sequence or stop token before this many tokens."""
    stop: list[str] = []
    """Strings that end the text; they are not part of it unless `include_stop_str_in_output`."""
    stop_token_ids: list[int] = []
    """Token ids that end the text, like end-of-sequence."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token."""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    logprobs: int | None = None
    """Log-probabilities of this many most likely tokens besides the sampled one's, at each position."""
    n: int = 1
    """Sequences to generate from the prompt, which is computed once. Sequence i samples with the seed `seed + i`."""
    priority: int = 0
    """Lower goes first; for `scheduling_policy` "priority" only."""
    cache_salt: str | None = None
    """Prefixes are shared only among requests with the same salt, so that nobody else can probe for them."""
    beam_width: int | None = None
    """Set by beam search for its steps, never by a client: lifts the limit of `logprobs` to what its beams need."""

    def __post_init__(self) -> None:
        """Check every range; each failure names the parameter, the value and what is allowed."""
        if isinstance(self.stop, str):  # vLLM takes one string too
            msgspec.structs.force_setattr(self, "stop", [self.stop])
        for name, kind in _FIELD_TYPES.items():
            _require_type(name, getattr(self, name), kind)
        _require(0.0 <= self.temperature <= 1e4, "temperature", self.temperature,
                 "a number from 0 (greedy) to 10000")  # fmt: skip
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "in (0, 1]")
        _require(-1 <= self.top_k < 2**63, "top_k", self.top_k, "-1 or 0 (all tokens), or from 1 to 2**63 - 1")
        _require(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "in [0, 1]")
        _require(self.seed is None or 0 <= self.seed < 2**64, "seed", self.seed, "an integer from 0 to 2**64 - 1")
        _require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "at least 0")
        if self.max_tokens is not None:
            _require(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens,
                     f"at most max_tokens={self.max_tokens}")  # fmt: skip
        _require(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"{len(self.stop)} strings",
                 f"at most {MAX_STOP_STRINGS} strings")  # fmt: skip
        for stop in self.stop:
            _require(_is_text(stop), "stop", ascii(stop), "of text that UTF-8 can encode")
            _require(0 < len(stop) <= MAX_STOP_STRING_LENGTH, "stop", f"a string of {len(stop)} characters",
                     f"strings of 1 to {MAX_STOP_STRING_LENGTH} characters")  # fmt: skip
        _require(len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS, "stop_token_ids", f"{len(self.stop_token_ids)} ids",
                 f"at most {MAX_STOP_TOKEN_IDS} ids")  # fmt: skip
        _require(self.beam_width is None or self.beam_width >= 1, "beam_width", self.beam_width, "at least 1")
        max_logprobs = MAX_LOGPROBS if self.beam_width is None else MAX_BEAM_LOGPROBS
        _require(self.logprobs is None or 0 <= self.logprobs <= max_logprobs, "logprobs", self.logprobs,
                 f"from 0 to {max_logprobs}")  # fmt: skip
        _require(1 <= self.n <= MAX_N, "n", self.n, f"from 1 to {MAX_N}")
        _require(self.n == 1 or not self.is_greedy, "n", self.n, "1 when sampling is greedy (temperature is 0)")
        _require(-(2**63) <= self.priority < 2**63, "priority", self.priority, "an integer of 64 bits")
        _require(self.cache_salt is None or 0 < len(self.cache_salt) <= MAX_CACHE_SALT_LENGTH, "cache_salt",
                 f"a string of {len(self.cache_salt or '')} characters",
                 f"a string of 1 to {MAX_CACHE_SALT_LENGTH} characters")  # fmt: skip

    @property
    def is_greedy(self) -> bool:
        """True when the most likely token is taken, with no randomness."""
        return self.temperature == 0.0

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """Build from decoded JSON or request parameters, converting what clients commonly send as strings.

        vllm_backend's clients send `{"temperature": "0.1", "max_tokens": "100"}`: numbers and booleans as strings
        are converted by the field's type. `stop` may be one string. null means unset.

        Raises:
            RequestError: a name is not known (the nearest known one is named), or a value has the wrong type or range.
        """
        converted = {name: convert_parameter(name, value) for name, value in values.items()}
        return cls(**{name: value for name, value in converted.items() if value is not None})


_FIELD_TYPES: dict[str, type] = {
    "temperature": float, "top_p": float, "top_k": int, "min_p": float, "seed": int, "max_tokens": int,
    "min_tokens": int, "stop": list, "stop_token_ids": list, "ignore_eos": bool, "include_stop_str_in_output": bool,
    "skip_special_tokens": bool, "logprobs": int, "n": int, "priority": int, "cache_salt": str,
}  # fmt: skip


def _is_text(value: str) -> bool:
    """JSON can say half of a surrogate pair, which is no character."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


_OPTIONAL = ("seed", "max_tokens", "logprobs", "cache_salt")


def _require_type(name: str, value: object, kind: type) -> None:
    """Decoding has checked that already; a caller of the constructor may have passed anything."""
    if value is None and name in _OPTIONAL:
        return
    ok = isinstance(value, int | float if kind is float else kind) and (kind is bool or not isinstance(value, bool))
    if ok and isinstance(value, list):
        items = str if name == "stop" else int
        ok = all(isinstance(item, items) and not isinstance(item, bool) for item in value)
    wanted = {"stop": "a list of strings", "stop_token_ids": "a list of integers"}.get(name, f"of type {kind.__name__}")
    _require(ok, name, repr(value), wanted)


def _require(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise RequestError(name, f"{name} is {value}; it must be {allowed}")


def convert_parameter(name: str, value: Any) -> Any:
    """One value of JSON or of a request parameter, as the field's own type; null stays None and means unset.

    Raises:
        RequestError: the name is not known (the nearest known one is named), or the value has another type.
    """
    kind = _FIELD_TYPES.get(name)
    if kind is None:
        near = get_close_matches(name, _FIELD_TYPES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(sorted(_FIELD_TYPES))}"
        raise RequestError(name, f"unknown sampling parameter {name!r}{hint}")
    if value is None:
        return None
    if name == "stop":
        return _string_list(name, value)
    if name == "stop_token_ids":
        if not isinstance(value, list | tuple):
            raise RequestError(name, f"{name} is {value!r}; it must be a list of token ids")
        return [_number(name, item, int) for item in value]
    if kind is bool:
        return _boolean(name, value)
    if kind is str:
        if not isinstance(value, str):
            raise RequestError(name, f"{name} is {value!r}; it must be a string")
        return value
    return _number(name, value, kind)


def _string_list(name: str, value: Any) -> list[str]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise RequestError(name, f"{name} is {value!r}; it must be a string or a list of strings")
    return list(items)


def _boolean(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false", "1", "0"):
        return value.lower() in ("true", "1")
    raise RequestError(name, f"{name} is {value!r}; it must be true or false")


def _number(name: str, value: Any, kind: type) -> Any:
    """`value` as int or float; a float with a whole value is accepted for int, a bool never is."""
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise TypeError
        if isinstance(value, str) and "_" in value:  # a digit separator of Python's own
            raise ValueError
        if kind is float:
            return float(value)
        if isinstance(value, float):
            if not value.is_integer():
                raise ValueError
            return int(value)
        return int(value)
    except (TypeError, ValueError, OverflowError):
        wanted = "a number" if kind is float else "an integer"
        raise RequestError(name, f"{name} is {value!r}; it must be {wanted}") from None
