"""The Sampler."""

from dataclasses import dataclass

import torch
from quire_kernels import argmax, sample

from quire_engine.messages import TokenLogprobs
from quire_engine.sampling.grammar_bitmask import apply_grammar_bitmask
from quire_engine.sampling.logits_processors import apply_min_tokens
from quire_engine.sampling.logprobs import gather_logprobs
from quire_engine.sampling.metadata import SamplingMetadata
from quire_engine.sampling.penalties import apply_penalties
from quire_engine.sampling.token_constraints import apply_token_constraints

__all__ = ["Sampler", "SamplerOutput"]


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """One token per row."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


class Sampler:
    """Draws one token per row of logits:

    1. Take the logits as float32.
    2. Where asked for, keep their log-softmax: reported log-probabilities are the model's own, before any of the below.
    3. Mask the tokens that would stop a request before its `min_tokens`.
    4. Mask tokens that are not allowed or would complete a bad word; add the biases of `logit_bias`.
    5. Apply repetition, frequency and presence penalties.
    6. Mask the tokens that a row's grammar does not allow; last, so that nothing brings one back.
    7. Greedy rows take the most likely token.
    8. The others divide by the temperature, mask by min-p, top-k and top-p, add Gumbel noise, which is a function of
       (seed, position, token id) alone, and take the largest: a draw from the softmax.
    """

    def __call__(self, logits_SV: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """Sample.

        Args:
            logits_SV: one row per request that is sampled in this step.
            metadata: the parameters of these rows.
        """
        logits_SV = logits_SV.float()
        rows_with_logprobs = list(metadata.num_logprobs)
        logprobs_SV = logits_SV[rows_with_logprobs].log_softmax(-1) if rows_with_logprobs else None
        apply_min_tokens(logits_SV, metadata.forbidden)
        if metadata.token_constraints is not None:
            apply_token_constraints(logits_SV, metadata.token_constraints)
        if metadata.penalties is not None:
            apply_penalties(logits_SV, metadata.penalties)
        if metadata.grammar_bitmask is not None:
            apply_grammar_bitmask(logits_SV, *metadata.grammar_bitmask)
        token_ids_S = argmax(logits_SV) if metadata.all_greedy else self._draw(logits_SV, metadata)
        logprobs: list[TokenLogprobs | None] = [None] * len(logits_SV)
        if logprobs_SV is not None:
            gathered = gather_logprobs(
                logprobs_SV, token_ids_S[rows_with_logprobs], max(metadata.num_logprobs.values())
            )
            for (row, number), entry in zip(metadata.num_logprobs.items(), gathered, strict=True):
                logprobs[row] = entry[: number + 1]
        return SamplerOutput(token_ids_S.tolist(), logprobs)

    def _draw(self, logits_SV: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        return sample(
            logits_SV,
            metadata.temperature,
            metadata.min_p,
            metadata.top_k,
            metadata.top_p,
            metadata.seeds,
            metadata.positions,
        )
