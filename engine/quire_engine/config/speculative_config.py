"""SpeculativeConfig: how tokens are drafted, under the keys of vLLM's `speculative_config`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Annotated, Any

from quire_engine.config.checks import SHARE, between, check, check_fields, one_of, positive
from quire_engine.errors import did_you_mean

LOOKUPS = ("ngram", "suffix")
ASSISTANT = "gemma4_assistant"
MODELS = ("draft_model", "eagle3", "medusa", "dflash", ASSISTANT)
"""Methods that run a checkpoint of their own, beside the model, on the rank that samples."""
WITHOUT_CACHE = ("medusa", ASSISTANT)
"""Those of them that keep nothing between steps."""
ONE_STAGE = ("eagle3", "dflash")
"""Those of them that read hidden states of several layers."""
MTP = "mtp"
"""The method that runs a layer of the model's own checkpoint there."""
MTP_ALIASES = ("deepseek_mtp", "gemma4_mtp", "glm4_moe_mtp", "mimo_mtp", "qwen3_5_mtp", "qwen3_next_mtp")
"""vLLM's names of it, by family. With a `model` it is that of an assistant."""
METHODS = (*LOOKUPS, *MODELS, MTP)
MAX_SPECULATIVE_TOKENS = 128
_NumTokens = Annotated[int, between(1, MAX_SPECULATIVE_TOKENS)]
DEFAULT_LOOKUP = 5
"""vLLM's, for both ends of the range of n."""
NGRAM_TOKENS = 16
"""Drafts of n-grams where `num_speculative_tokens` is unset: the scheduler cuts what does not pay off."""

MODEL_TOKENS = 8
"""The same for drafts of a model, each of which costs time."""

_PREFIXES = {"ngram": "prompt_lookup_", "suffix": "suffix_decoding_"}
"""Prefixes of the keys that only one method has."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "draft_tensor_parallel_size": (1,),
    "disable_logprobs": (False,),
    "enforce_eager": (True, False),
    "disable_padded_drafter_batch": (True, False),
    "disable_by_batch_size": (),
    "rejection_sample_method": ("strict",),
}
"""vLLM's keys that change nothing here → their neutral values. `disable_by_batch_size` may have any: the scheduler
decides in each step whether drafts are worth their cost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculativeConfig:
    """Which method drafts tokens, and how many at most. Only `acceptance` can change a token of the output."""

    method: Annotated[str, one_of(*METHODS)]
    """`ngram` drafts what followed where the request's last tokens occurred in it before (prompt lookup). `suffix` does
    so for the longest such match, in recent outputs of other requests too, and takes what followed most often. With the
    others a model drafts: `draft_model` is a smaller one with the same vocabulary; `eagle3` and `medusa` are heads
    trained for the model, which read its hidden states; `mtp` is such a head that its own checkpoint has (multi-token
    prediction); `dflash` is a few layers that read its hidden states and draft all tokens in one pass;
    `gemma4_assistant` is a small model that reads Gemma 4's keys and values."""
    model: str | None = None
    """The checkpoint folder of the model that drafts, for all methods that have one but `mtp`."""
    acceptance: Annotated[str, one_of("exact", "rejection")] = "exact"
    """`exact`: a draft is accepted if it is the token that the model samples in its place anyway. `rejection`, for the
    methods that have a model: by chance, such that the output is distributed as without drafts (rejection sampling);
    more drafts are accepted, and the tokens of sampled requests are others."""
    num_speculative_tokens: _NumTokens | None = None
    """The most tokens drafted for a request in one step. Unset: 16 for `ngram`; for `suffix` what the tree depth has
    room for beside the match, which is 12; 8 for a model."""
    prompt_lookup_max: _NumTokens | None = None
    """`ngram`: the most tokens that are looked up. Unset: `prompt_lookup_min`, or 5 if that is unset, too."""
    prompt_lookup_min: _NumTokens | None = None
    """`ngram`: the least. Unset: `prompt_lookup_max`, or 5."""
    suffix_decoding_max_tree_depth: Annotated[int, between(2, 2 * MAX_SPECULATIVE_TOKENS)] = 24
    """`suffix`: the most tokens of a match and the draft after it together."""
    suffix_decoding_max_cached_requests: Annotated[int, between(0)] = 10_000
    """`suffix`: outputs of other requests that are kept, at most; 0: none."""
    suffix_decoding_max_spec_factor: Annotated[float, positive("a number above 0")] = 1.0
    """`suffix`: drafts are at most this many times as long as the match."""
    suffix_decoding_min_token_prob: Annotated[float, SHARE] = 0.1
    """`suffix`: a draft ends before the first token that is less likely than this, by what followed so far."""

    def __post_init__(self) -> None:
        check_fields(self, "speculative_config: ")
        if self.method in MODELS:
            is_path = isinstance(self.model, str) and self.model != ""
            _check(is_path, "model", self.model, f"the path of a checkpoint folder, with method {self.method!r}")
        elif self.method == MTP:
            _check(self.model is None, "model", self.model,
                   "left out with method 'mtp': the layer is in the checkpoint of the model itself")  # fmt: skip
        else:
            _check(self.model is None, "model", self.model, f"left out with method {self.method!r}: it has none")
            _check(self.acceptance == "exact", "acceptance", self.acceptance,
                  f"'exact' with method {self.method!r}: its drafts have no distribution")  # fmt: skip
        shortest, longest = self.lookup_range
        _check(shortest <= longest, "prompt_lookup_min", shortest, f"at most prompt_lookup_max={longest}")

    @property
    def max_draft_tokens(self) -> int:
        """`num_speculative_tokens`, or what it is when unset."""
        if self.method == "suffix":
            depth, factor = self.suffix_decoding_max_tree_depth, self.suffix_decoding_max_spec_factor
            longest = longest_suffix_drafts(depth, factor)[-1]
            return min(self.num_speculative_tokens or MAX_SPECULATIVE_TOKENS, max(1, longest))
        return self.num_speculative_tokens or (NGRAM_TOKENS if self.method == "ngram" else MODEL_TOKENS)

    @property
    def checkpoint(self) -> tuple[str, str | None] | None:
        """The method and its checkpoint folder, which is None for the target's own; None if nothing is loaded."""
        return None if self.method in LOOKUPS else (self.method, self.model)

    @property
    def lookup_range(self) -> tuple[int, int]:
        """`prompt_lookup_min` and `prompt_lookup_max`, or what they are when unset."""
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        return shortest or longest or DEFAULT_LOOKUP, longest or shortest or DEFAULT_LOOKUP

    @classmethod
    def from_value(cls, value: object) -> "SpeculativeConfig | None":
        """From a decoded JSON object; None if it is empty.

        Raises:
            ValueError: it is no object, lacks `method`, has an unknown key (the nearest known one is named), or a bad
                value.
        """
        if not isinstance(value, Mapping):
            raise ValueError(f"speculative_config is {value!r}; it must be an object, such as {{'method': 'suffix'}}")
        if not value:
            return None
        known = [item.name for item in fields(cls)]
        settings = {}
        for name, setting in value.items():
            if name in _NEUTRAL:
                allowed = _NEUTRAL[name]
                _check(setting is None or not allowed or setting in allowed, name, setting,
                       f"left out, or {' or '.join(repr(item) for item in allowed)}")  # fmt: skip
            elif name not in known:
                hint = did_you_mean(str(name), known, else_all=True)
                raise ValueError(f"speculative_config: unknown key {name!r}{hint}")
            elif setting is not None:
                settings[name] = setting
        if "method" not in settings and "model" in settings:
            settings["method"] = "draft_model"
        if settings.get("method") in MTP_ALIASES:
            settings["method"] = MTP
        if settings.get("method") == MTP and "model" in settings:  # as in vLLM
            settings["method"] = ASSISTANT
        if "method" not in settings:
            raise ValueError(f"speculative_config: method is missing; it must be one of {', '.join(METHODS)}")
        for name in settings:
            for method, prefix in _PREFIXES.items():
                _check(not name.startswith(prefix) or settings["method"] == method, name, settings[name],
                       f"left out with method {settings['method']!r}: it is of {method!r}")  # fmt: skip
        return cls(**settings)


def longest_suffix_drafts(max_tree_depth: int, max_spec_factor: float) -> list[int]:
    """The most tokens that suffix decoding drafts, by the length of the match: from 0 to `max_tree_depth`.

    A part of a long match may leave more room in the tree than the whole.
    """
    lengths = range(max_tree_depth + 1)
    limits = (int(min(length * max_spec_factor + 1e-6, max_tree_depth - length)) for length in lengths)
    return list(accumulate(limits, max))


def _check(ok: bool, name: str, value: object, allowed: str) -> None:
    check(ok, f"speculative_config: {name}", value, allowed)
