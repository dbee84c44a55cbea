"""RequestOutput: the answer to a request. Plain data, and how deltas are merged."""

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from quire_engine.messages import ErrorCode
from quire_engine.pooling import Pooled
from quire_engine.stats import FinishedRequestStats

if TYPE_CHECKING:
    import torch


class Logprob(msgspec.Struct, omit_defaults=True):
    """One token's log-probability at one position. Its JSON omits unset fields."""

    logprob: float
    rank: int
    """1 is the most likely."""
    decoded_token: str | None
    """The token's own text; None if the request does not detokenize."""
    token_bytes: list[int] | None = msgspec.field(default=None, name="bytes")
    """The token's own bytes, if `decoded_token` cannot show them because they are a part of a character."""
    text_offset: int | None = None
    """Where an output token's text begins in the whole text, if nothing before is cut off."""


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence, or a delta of it."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    """Sum over all tokens so far, also in a delta; None unless log-probabilities were requested."""
    logprobs: list[dict[int, Logprob]] | None = None
    """One entry per token: the sampled token's, then the most likely ones'."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """Everything that a request has produced, or a delta of it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    """0 for each row of `prompt_embeds`."""
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    metrics: FinishedRequestStats | None = None
    """Set on the last output."""
    error: str | None = None
    """Why it failed, with finish_reason "error"."""
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    """One entry per prompt token, if requested: its own, then the most likely ones'. The first is None: nothing
    predicts it. In a stream, the first delta has it."""
    is_first: bool = False
    """Whether it holds the request's first output, or with `n` that of its first sequence."""
    error_parameter: str | None = None
    """The request's parameter that caused `error`, if the request was invalid; else None."""
    error_code: ErrorCode | None = None
    """The kind of error, if it is neither the request's nor the engine's fault."""
    retry_after_seconds: float | None = None
    """An estimate of when to try again, with `ErrorCode.UNAVAILABLE`."""
    pooled: Pooled | None = None
    """The result of a pooled request."""

    def merge(self, later: "RequestOutput") -> None:
        """Append a later delta to this one; each may hold some of the request's sequences."""
        known = {mine.index: mine for mine in self.outputs}
        for new in later.outputs:
            mine = known.get(new.index)
            if mine is None:
                insort(self.outputs, new, key=lambda output: output.index)
                continue
            mine.text += new.text
            mine.token_ids += new.token_ids
            mine.cumulative_logprob = new.cumulative_logprob
            if new.logprobs is not None:
                mine.logprobs = mine.logprobs if mine.logprobs is not None else []
                mine.logprobs += new.logprobs
            mine.finish_reason, mine.stop_reason = new.finish_reason, new.stop_reason
        self.finished, self.metrics, self.error = later.finished, later.metrics, later.error
        self.error_parameter = later.error_parameter
        self.num_cached_tokens = later.num_cached_tokens
        self.is_first = self.is_first or later.is_first
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        self.error_code, self.retry_after_seconds = later.error_code, later.retry_after_seconds
        self.pooled = self.pooled or later.pooled


@dataclass(frozen=True, slots=True, eq=False)
class PoolingOutput:
    """What was made of one prompt's hidden states, whatever the task."""

    data: "torch.Tensor | npt.NDArray[np.float32]"
    """[D] float32, or [tokens, D] of a task of tokens: a tensor from `LLM`; from `AsyncLLM`, which does not import
    torch, an array that is not writable."""


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """One prompt's embedding."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """The embedding's length."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """One prompt's classes."""

    probs: list[float]
    """In the order of the checkpoint's labels."""

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """How well two texts belong together."""

    score: float


PoolingResult = TypeVar("PoolingResult", PoolingOutput, EmbeddingOutput, ClassificationOutput, ScoringOutput)


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput(Generic[PoolingResult]):
    """The answer to one prompt that was not generated."""

    request_id: str
    outputs: PoolingResult
    prompt_token_ids: list[int]
    """0 for each row of `prompt_embeds`."""
    num_cached_tokens: int = 0
    finished: bool = True


OnOutput = Callable[[RequestOutput], None]
