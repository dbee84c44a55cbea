"""SubmittedStep: a step that was begun, and its result.

::

    submit N     batch: count the token of each request     device: sample, and keep the tokens for step N + 1
    submit N+1   batch: count another one                    device: takes the tokens of N from there
    result N     batch: which tokens they are, if the slots are still those requests'

For a request with drafts nothing is counted before the result, as only the result has the number of tokens. A
draft is accepted if it is the token that the model samples in its place. The first draft that is not is replaced by the
sampled token, and what was sampled after it is dropped. If all are accepted, there is one more token after the last::

    known   drafts        sampled         result
    5 8     31  4  9      31  4  7  2     31 4 7
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import compress

import numpy as np
import numpy.typing as npt
import torch

from quire_engine.messages import ModelRunnerOutput, PromptLogprobs
from quire_engine.pooling import Pooled
from quire_engine.sampling import SamplerOutput
from quire_engine.worker.batch.input_batch import InputBatch
from quire_engine.worker.batch.step_inputs import SampledRows

Int64Array = npt.NDArray[np.int64]


class PendingTokens:
    """The requests of a step that are sampled, and the tokens that will come for them.

    Must be created before the batch counts the tokens, with the batch locked.
    """

    def __init__(self, batch: InputBatch, sampled: SampledRows, tokens: SamplerOutput) -> None:
        self._batch = batch
        self._sampled = sampled
        self._tokens = tokens
        self._starts = sampled.starts
        self._slots = sampled.slots[self._starts]
        self._positions = batch.num_tokens[self._slots]
        self._generation = batch.generation[self._slots]

    def fill(self, output: ModelRunnerOutput) -> None:
        """Wait for the tokens, and write them to the batch and to the output."""
        tokens, request_ids, batch = self._tokens.wait(), self._sampled.request_ids, self._batch
        if self._sampled.drafts:
            rows = self._rows_that_count(tokens.token_ids)
            token_ids = [tokens.token_ids[own] for own in rows]
            logprobs = [[entry for entry in tokens.logprobs[own] if entry is not None] for own in rows]
        else:
            token_ids = [[token_id] for token_id in tokens.token_ids]
            logprobs = [[] if entry is None else [entry] for entry in tokens.logprobs]
        with batch.lock:
            is_same = batch.generation[self._slots] == self._generation
            if self._sampled.drafts:
                own_ids = list(compress(token_ids, is_same.tolist()))
                batch.settle_lists(self._slots[is_same], self._positions[is_same], own_ids)
            else:
                last_ids = np.array(tokens.token_ids, dtype=np.int64)
                batch.settle_tokens(self._slots[is_same], self._positions[is_same], last_ids[is_same])
        output.sampled_token_ids = dict(zip(request_ids, token_ids, strict=True))
        output.logprobs = {request_id: own for request_id, own in zip(request_ids, logprobs, strict=True) if own}

    def _rows_that_count(self, token_ids: list[int]) -> list[slice]:
        """For each request, the rows up to and including the first whose token is not the draft in its place."""
        rows = []
        for request_id, start in zip(self._sampled.request_ids, self._starts.tolist(), strict=True):
            own = self._sampled.drafts.get(request_id, ())
            rows.append(slice(start, start + 1 + count_accepted(own, token_ids[start : start + len(own)])))
        return rows


def count_accepted(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """How many drafts equal the token sampled in their place, up to the first that does not."""
    count = 0
    while count < len(drafts) and drafts[count] == sampled[count]:
        count += 1
    return count


@dataclass(slots=True)
class SubmittedStep:
    """What `ModelRunner.submit` returns."""

    pending: PendingTokens | None = None
    """None if nothing is sampled, or another rank samples."""
    prompt_logprobs: dict[str, PromptLogprobs] = field(default_factory=dict)
    pooled: dict[str, torch.Tensor] = field(default_factory=dict)
    """By request, [D] or [rows, D], float32."""
    draft: Callable[[ModelRunnerOutput], None] | None = None
    """Adds drafts to the result."""
    on_result: Callable[[ModelRunnerOutput], None] | None = None
    """Called with the result before it is returned."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the result; raises if the step failed on the device. Call it once per step, in the order of
        submission, from any thread."""
        output = ModelRunnerOutput({}, prompt_logprobs=self.prompt_logprobs)
        if self.pooled:
            output.pooled = {
                request_id: Pooled(one.cpu().numpy().tobytes(), tuple(one.shape))
                for request_id, one in self.pooled.items()
            }
        if self.pending is not None:
            self.pending.fill(output)
        if self.draft is not None:
            self.draft(output)
        if self.on_result is not None:
            self.on_result(output)
        return output


class StepClock:
    """Times the steps of a rank. A step may begin before the previous one ends; the overlap counts only once."""

    def __init__(self) -> None:
        self._last_end = 0.0

    def end(self, began_at: float) -> float:
        """End a step now that began on `time.perf_counter`. Returns the seconds since then, or since the previous step
        ended if that is later."""
        start, self._last_end = max(began_at, self._last_end), time.perf_counter()
        return self._last_end - start
