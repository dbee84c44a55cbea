"""SubmittedStep: a step that was begun, and what comes of it.

::

    submit N     batch: count the token of each row        device: sample, and keep the tokens for step N + 1
    submit N+1   batch: count another one                   device: takes the tokens of N from there
    result N     batch: which tokens they are, if the slots are still those requests'
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire_engine.messages import ModelRunnerOutput, PromptLogprobs
from quire_engine.sampling import SamplerOutput
from quire_engine.worker.input_batch import InputBatch

__all__ = ["SampledRows", "SubmittedStep"]

Int64Array = npt.NDArray[np.int64]


class SampledRows:
    """The requests of a step that are sampled, and the tokens that come for them.

    Made before the batch counts the tokens, under the lock that keeps others from changing it.
    """

    def __init__(
        self,
        batch: InputBatch,
        lock: threading.Lock,
        request_ids: list[str],
        slots: Int64Array,
        tokens: SamplerOutput,
    ) -> None:
        self._batch = batch
        self._lock = lock
        self._request_ids = request_ids
        self._slots = slots
        self._tokens = tokens
        self._positions = batch.num_tokens[slots]
        self._generation = batch.generation[slots]

    def fill(self, output: ModelRunnerOutput) -> None:
        """Wait for the tokens, and tell the batch and the output of them."""
        sampled = self._tokens.wait()
        token_ids = np.array(sampled.token_ids, dtype=np.int64)
        with self._lock:
            is_same = self._batch.generation[self._slots] == self._generation
            self._batch.settle_tokens(self._slots[is_same], self._positions[is_same], token_ids[is_same])
        output.sampled_token_ids = {
            request_id: [token_id] for request_id, token_id in zip(self._request_ids, sampled.token_ids, strict=True)
        }
        output.logprobs = {
            request_id: [logprobs]
            for request_id, logprobs in zip(self._request_ids, sampled.logprobs, strict=True)
            if logprobs is not None
        }


@dataclass(slots=True)
class SubmittedStep:
    """What `ModelRunner.submit` returns."""

    rows: SampledRows | None = None
    """None where nothing is sampled, or another rank does."""
    prompt_logprobs: dict[str, PromptLogprobs] = field(default_factory=dict)
    on_result: Callable[[ModelRunnerOutput], None] | None = None
    """Told of the result before anybody else is."""

    def result(self) -> ModelRunnerOutput:
        """Wait for what came of the step: once, and in the order of submission. Any thread may call it.

        Raises:
            Exception: the step failed on the device.
        """
        output = ModelRunnerOutput({}, prompt_logprobs=self.prompt_logprobs)
        if self.rows is not None:
            self.rows.fill(output)
        if self.on_result is not None:
            self.on_result(output)
        return output
