"""The Sampler."""

from dataclasses import dataclass

import torch
from quire_kernels import gumbel_noise

from quire_engine.messages import TokenLogprobs
from quire_engine.sampling.logits_processors import apply_min_p, apply_min_tokens, apply_top_k_top_p
from quire_engine.sampling.logprobs import gather_logprobs
from quire_engine.sampling.metadata import SamplingMetadata

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
    4. Greedy rows take the most likely token; if all rows are greedy, that was it.
    5. Divide by the temperature.
    6. Mask by min-p, top-k and top-p.
    7. Add Gumbel noise, a function of (seed, position, token id) alone, and take the largest: a draw from the softmax.
    """

    def __call__(self, logits_SV: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """Sample.

        Args:
            logits_SV: one row per request that is sampled in this step.
            metadata: the parameters of these rows.
        """
        logits_SV = logits_SV.float()
        rows_with_logprobs = [row for row, number in enumerate(metadata.num_logprobs) if number is not None]
        logprobs_SV = logits_SV[rows_with_logprobs].log_softmax(-1) if rows_with_logprobs else None
        apply_min_tokens(logits_SV, metadata.forbidden)
        token_ids_S = logits_SV.argmax(-1)
        if not metadata.all_greedy:
            random_rows = (metadata.temperature > 0).nonzero().squeeze(1)
            token_ids_S[random_rows] = self._sample(logits_SV[random_rows], metadata, random_rows)
        logprobs: list[TokenLogprobs | None] = [None] * len(metadata.num_logprobs)
        if logprobs_SV is not None:
            numbers = [metadata.num_logprobs[row] or 0 for row in rows_with_logprobs]
            gathered = gather_logprobs(logprobs_SV, token_ids_S[rows_with_logprobs], max(numbers))
            for row, number, entry in zip(rows_with_logprobs, numbers, gathered, strict=True):
                logprobs[row] = entry[: number + 1]
        return SamplerOutput(token_ids_S.tolist(), logprobs)

    def _sample(self, logits_RV: torch.Tensor, metadata: SamplingMetadata, rows: torch.Tensor) -> torch.Tensor:
        """Steps 5 to 7 for the random rows (R)."""
        vocab_size = logits_RV.shape[1]
        # Below their maximum, logits cannot overflow, however small the temperature.
        logits_RV = (logits_RV - logits_RV.amax(-1, keepdim=True)) / metadata.temperature[rows, None]
        min_p, top_k, top_p = metadata.min_p[rows], metadata.top_k[rows], metadata.top_p[rows]
        if bool((min_p > 0).any()):
            logits_RV = apply_min_p(logits_RV, min_p)
        if bool((top_p < 1).any()) or bool((top_k < vocab_size).any()):
            logits_RV = apply_top_k_top_p(logits_RV, top_k, top_p)
        noise_RV = gumbel_noise(metadata.seeds[rows], metadata.positions[rows], vocab_size)
        return (logits_RV + noise_RV).argmax(-1)
