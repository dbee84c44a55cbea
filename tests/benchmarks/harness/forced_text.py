"""Forced text: a model computes everything as ever, but what it says is a text that is given.

Random weights say nothing that repeats, so that no draft is ever right. To measure what drafts gain on a certain text
with a model of realistic size, the token that the sampler returns is replaced by the token that the text has at that
position. It goes the way of any sampled token from there on: it is compared with the draft in its place, becomes the
next step's input, and is what the caller gets. This belongs to the benchmarks; the engine knows nothing of it.

A request finds its text by its seed, and its place in the text by the position that is sampled, which is known for the
rows behind drafts, too::

    prompt  5 8 9    text  31 4 7 2          known  5 8 9 31    drafts  4 7 6
    sampled          row 0 (position 4): 4   row 1 (5): 7   row 2 (6): 2   row 3 (7): beyond the text, as sampled

Only for an `LLM` that computes on the CPU, in this process.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from quire_engine import LLM
from quire_engine.sampling import Sampler, SamplerOutput, SamplingMetadata
from quire_engine.worker.batch.input_batch import InputBatch
from quire_engine.worker.batch.step_inputs import StepInputs
from quire_engine.worker.forward.eager import Forward
from quire_engine.worker.forward.recorded import RecordedForward

__all__ = ["ForcedTexts", "force_texts"]


class ForcedTexts(Sampler):
    """A sampler that samples, and then returns the texts' tokens for the requests that have one."""

    def __init__(self) -> None:
        self._texts: dict[int, tuple[int, Sequence[int]]] = {}

    def clear(self) -> None:
        """Forget all texts."""
        self._texts.clear()

    def add(self, seed: int, num_prompt_tokens: int, text: Sequence[int]) -> None:
        """Force the text of the requests with this seed, below 2**63."""
        self._texts[seed] = num_prompt_tokens, text

    def __call__(self, logits_SV: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """Sample, and replace."""
        output = super().__call__(logits_SV, metadata)
        if not self._texts:
            return output
        token_ids_S = output.token_ids_S.clone()
        self._replace(token_ids_S, metadata.seeds.tolist(), metadata.positions.tolist())
        return SamplerOutput(token_ids_S)

    def sample(
        self, recorded: Callable[[StepInputs], torch.Tensor], batch: InputBatch, inputs: StepInputs
    ) -> torch.Tensor:
        """The same of a step that is sampled from a recording."""
        token_ids_S = recorded(inputs)
        if self._texts:
            seeds = batch.seed[inputs.token_slots].view(np.int64)
            self._replace(token_ids_S, seeds.tolist(), (inputs.positions + 1).tolist())
        return token_ids_S

    def _replace(self, token_ids_S: torch.Tensor, seeds: list[int], positions: list[int]) -> None:
        for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
            start, text = self._texts.get(seed, (0, ()))
            if 0 <= position - start < len(text):
                token_ids_S[row] = text[position - start]


def force_texts(llm: LLM) -> ForcedTexts:
    """Replace the sampler of an engine; it forces nothing before a text is added.

    Log-probabilities are not returned any more.

    Raises:
        TypeError: the engine computes in other processes, or on a GPU.
    """
    worker = getattr(llm._core.executor, "_worker", None)
    if worker is None or worker.device.type != "cpu":
        raise TypeError("texts can be forced only where one rank computes on the CPU, in this process")
    runner = worker.runner
    runner.sampler = texts = ForcedTexts()
    forwards = runner._forwards

    def with_texts() -> list[Forward]:
        found: list[Forward] = forwards()
        for forward in found:
            if isinstance(forward, RecordedForward) and "sample" not in vars(forward):
                forward.sample = partial(texts.sample, forward.sample, runner.batch)  # type: ignore[method-assign]
        return found

    runner._forwards = with_texts
    return texts
