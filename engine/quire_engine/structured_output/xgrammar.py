"""The Grammar protocol over xgrammar (https://arxiv.org/abs/2411.15100), and the one place that imports that library.

xgrammar imports torch for the types of bitmasks and transformers for those of tokenizers. It is given numpy arrays, and
a `PlainTokenizer` or one of transformers, which is loaded then. So where one of the two is not loaded, a stand-in takes
its place while xgrammar is imported: the grammar compiler starts with 0.9 s of CPU time instead of 5 s, and an engine
core has xgrammar after 0.4 s instead of 0.9 s. In a process that has loaded both this is an import like any other.
"""

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from quire_engine.scheduler.grammar import GrammarError


class _Anything:
    """Stands for any class or function of a library that is not imported."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    names = [name for name in ("torch", "transformers") if name not in sys.modules]
    if not names:
        yield
        return
    before = {name: sys.modules.get(name) for name in ("torch", "transformers")}
    if "torch" in names:
        sys.modules["torch"] = None  # type: ignore[assignment]  # what xgrammar is built on knows to do without
        import tvm_ffi  # noqa: F401

        sys.modules["torch"] = _StandIn("torch")
    # Any other name of the real module would import torch.
    sys.modules["transformers"] = transformers = _StandIn("transformers")
    if (real := before["transformers"]) is not None:
        for name in ("PreTrainedTokenizerBase", "PreTrainedTokenizerFast"):
            setattr(transformers, name, getattr(real, name))
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


with _stand_ins():
    import xgrammar as xgrammar  # for importers too

SLOWEST_TOKEN_SECONDS = 0.1
"""Limit of the CPU time of one token of one request, as all requests share a step. Usual are microseconds to some
milliseconds; an ambiguous grammar such as `((a+)+)+b` has more ways to read its text with every token, and took 1 s per
token after 400 of them."""
MEAN_TOKEN_SECONDS = 0.005
ALLOWANCE_SECONDS = 0.5
"""All tokens together may take this and `MEAN_TOKEN_SECONDS` for each, of one request and of all with one grammar."""
DRAFT_SECONDS = 0.005
"""Limit of the CPU time of all drafts of one request in a step. Usual are some hundred-thousandths of a second."""
VERDICT_SECONDS = 30.0
"""For how long other requests with a grammar that took more are rejected."""


@dataclass(slots=True)
class SharedGrammar:
    """A compiled grammar, and the cost of all its requests together."""

    compiled: xgrammar.CompiledGrammar
    num_tokens: int = 0
    seconds: float = 0.0
    too_slow: str | None = None
    """Why requests with it are rejected, after one took too much time."""
    expires_at: float | None = None
    """When that expires, by `time.monotonic`."""

    @classmethod
    def load(cls, text: str, tokenizer_info: xgrammar.TokenizerInfo) -> "SharedGrammar":
        """From the compiler's process."""
        return cls(xgrammar.CompiledGrammar.deserialize_json(text, tokenizer_info))

    @property
    def memory_size_bytes(self) -> int:
        return int(self.compiled.memory_size_bytes)


class XGrammar:
    """One request's matcher (a `Grammar`), which accounts for the time that it takes."""

    def __init__(self, shared: SharedGrammar) -> None:
        self._shared = shared
        self._matcher = xgrammar.GrammarMatcher(shared.compiled)
        self._num_tokens = 0
        self._seconds = 0.0
        self._slowest_seconds = 0.0
        self.last_fill_seconds = 0.0
        self._is_slow_behind_drafts = False
        """Whether drafts took too long once: there are none any more."""

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        started = time.thread_time()
        accepted = all(not self._matcher.is_terminated() and self._matcher.accept_token(i) for i in token_ids)
        self._num_tokens += len(token_ids)
        self._shared.num_tokens += len(token_ids)
        self._account(started, len(token_ids))
        return accepted

    def fill_bitmask(self, bitmask: npt.NDArray[np.int32], row: int) -> None:
        self._check_time()
        started = time.thread_time()
        if not self._matcher.fill_next_token_bitmask(bitmask, row):
            bitmask[row] = -1  # every token may come
        self.last_fill_seconds = self._account(started, 1)
        if not bitmask[row].any():
            raise GrammarError("the grammar allows no token to come next, so no text can satisfy it from here on")

    def fill_behind(self, drafts: Sequence[int], bitmask: npt.NDArray[np.int32], first_row: int) -> int:
        if self._is_slow_behind_drafts:
            return 0
        started, num_accepted, num_filled = time.thread_time(), 0, 0
        for token_id in drafts:
            if not self._matcher.accept_token(token_id):
                break
            num_accepted += 1
            if self._matcher.is_terminated():
                break
            row = first_row + num_filled
            if not self._matcher.fill_next_token_bitmask(bitmask, row):
                bitmask[row] = -1
            self._is_slow_behind_drafts = time.thread_time() - started > DRAFT_SECONDS
            if self._is_slow_behind_drafts or not bitmask[row].any():
                break
            num_filled += 1
        self._matcher.rollback(num_accepted)
        return num_filled

    def is_terminated(self) -> bool:
        return bool(self._matcher.is_terminated())

    def _account(self, started: float, num_tokens: int) -> float:
        seconds = time.thread_time() - started
        self._seconds += seconds
        self._shared.seconds += seconds
        self._slowest_seconds = max(self._slowest_seconds, seconds / max(num_tokens, 1))
        return seconds

    def _check_time(self) -> None:
        shared = self._shared
        if shared.too_slow is None and (
            self._slowest_seconds > SLOWEST_TOKEN_SECONDS
            or self._seconds > ALLOWANCE_SECONDS + MEAN_TOKEN_SECONDS * self._num_tokens
            or shared.seconds > ALLOWANCE_SECONDS + MEAN_TOKEN_SECONDS * shared.num_tokens
        ):
            shared.too_slow = (
                f"the grammar is too ambiguous: after {self._num_tokens} tokens, finding out what may come next took "
                f"{self._slowest_seconds * 1e3:.0f} ms for one token and {shared.seconds:.1f} s in all"
            )
            shared.expires_at = time.monotonic() + VERDICT_SECONDS
        if shared.too_slow is not None:
            raise GrammarError(shared.too_slow)
