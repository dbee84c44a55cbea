"""The Grammar protocol over xgrammar (https://arxiv.org/abs/2411.15100)."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire_engine.scheduler.grammar import GrammarError
from quire_engine.structured_output.library import xgrammar

SLOWEST_TOKEN_SECONDS = 0.1
"""CPU time that one token of one request may take in a step, which all requests share. Usual are microseconds to some
milliseconds; an ambiguous grammar such as `((a+)+)+b` has more ways to read its text with every token, and took 1 s per
token after 400 of them."""
MEAN_TOKEN_SECONDS = 0.005
ALLOWANCE_SECONDS = 0.5
"""All tokens together may take this and `MEAN_TOKEN_SECONDS` for each, of one request and of all with one grammar."""
DRAFT_SECONDS = 0.005
"""CPU time that all drafts of one request may take of a step. Usual is some hundred-thousandths of a second."""
VERDICT_SECONDS = 30.0
"""For how long other requests with a grammar that took more than that are refused."""


@dataclass(slots=True)
class SharedGrammar:
    """A compiled grammar, and the cost of all its requests together."""

    compiled: xgrammar.CompiledGrammar
    num_tokens: int = 0
    seconds: float = 0.0
    too_slow: str | None = None
    """Why requests with it are refused, after one took too much time."""
    expires_at: float | None = None
    """On `time.monotonic`: when that expires."""

    @property
    def memory_size_bytes(self) -> int:
        """What it takes while it is kept."""
        return int(self.compiled.memory_size_bytes)


class XGrammarBackend:
    """Loads what the compiler's process has compiled. Built and used in the compiler's reader thread."""

    def __init__(self, tokenizer_info: str) -> None:
        self._tokenizer_info = xgrammar.TokenizerInfo.deserialize_json(tokenizer_info)

    def load(self, text: str) -> SharedGrammar:
        """A compiled grammar, which any number of requests can share."""
        return SharedGrammar(xgrammar.CompiledGrammar.deserialize_json(text, self._tokenizer_info))


class XGrammar:
    """One request's matcher, and its account of the time it took."""

    def __init__(self, shared: SharedGrammar) -> None:
        self._shared = shared
        self._matcher = xgrammar.GrammarMatcher(shared.compiled)
        self._num_tokens = 0
        self._seconds = 0.0
        self._slowest_seconds = 0.0
        self.last_fill_seconds = 0.0
        self._is_slow_behind_drafts = False
        """Whether drafts took so long once that there are none any more."""

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
        """As of `Grammar`."""
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
