"""The Sampler, and the sampling parameters of a batch, column by column."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from quire_kernels import argmax, sample

from quire_engine.device.transfer import Download, upload
from quire_engine.messages import TokenLogprobs
from quire_engine.sampling.logprobs import TopLogprobs, to_entries, top_logprobs
from quire_engine.sampling.penalties import Penalties, apply_penalties
from quire_engine.sampling.rejection import verify_drafts
from quire_engine.sampling.token_constraints import (
    TokenConstraints,
    apply_grammar_bitmask,
    apply_min_tokens,
    apply_token_constraints,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftsToVerify:
    """Drafts that are accepted or rejected by chance; see `sampling/rejection.py`. R of the S rows."""

    rows: torch.Tensor
    """[R] int64."""
    token_ids: torch.Tensor
    """[R] int64, the draft in each row's place."""
    probabilities: torch.Tensor
    """[R, V] float32, what it was drawn from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingMetadata:
    """One entry per row of logits; S rows."""

    temperature: torch.Tensor
    """[S] float32; 0 is greedy."""
    top_p: torch.Tensor
    """[S] float32; 1 keeps all."""
    top_k: torch.Tensor
    """[S] int64; V keeps all."""
    min_p: torch.Tensor
    """[S] float32; 0 keeps all."""
    seeds: torch.Tensor
    """[S] int64, the 64 bits of each request's seed."""
    positions: torch.Tensor
    """[S] int64, the position that the sampled token will take."""
    num_logprobs: dict[int, int]
    """Rows that return log-probabilities, and how many besides their sampled token's."""
    forbidden: list[tuple[int, list[int]]]
    """Rows that may not stop yet, and the token ids that would stop them."""
    all_greedy: bool
    penalties: Penalties | None = None
    """None if no row uses any."""
    token_constraints: TokenConstraints | None = None
    """None if no row has any."""
    grammar_bitmask: tuple[list[int], npt.NDArray[np.int32]] | None = None
    """Rows with a grammar, and [R, ceil(V / 32)] the tokens that it allows; see `GrammarBitmask`."""
    drafts_to_verify: DraftsToVerify | None = None
    """None if there are none."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token per row, on the host."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


class SamplerOutput:
    """One token per row, on its way to the host.

    Args:
        token_ids_S: int64; must not change any more.
        logprobs: of the rows in `num_logprobs`, in that order; None if there are none.
        num_logprobs: see `SamplingMetadata`.
    """

    def __init__(
        self, token_ids_S: torch.Tensor, logprobs: TopLogprobs | None = None, num_logprobs: dict[int, int] | None = None
    ) -> None:
        self.token_ids_S = token_ids_S
        """On the device that sampled."""
        self._num_logprobs = num_logprobs or {}
        self._download = Download(token_ids_S, *(logprobs or ()))

    def wait(self) -> SampledTokens:
        """Wait for the transfer, and return the tokens."""
        token_ids_S, *top = self._download.wait()
        logprobs: list[TokenLogprobs | None] = [None] * len(token_ids_S)
        if top:
            for (row, number), entry in zip(self._num_logprobs.items(), to_entries(*top), strict=True):
                logprobs[row] = entry[: number + 1]
        return SampledTokens(token_ids_S.tolist(), logprobs)


class Sampler:
    """Draws one token per row of logits:

    1. Take the logits as float32.
    2. Keep their log-softmax if it is requested: reported log-probabilities are those before the steps below.
    3. Mask the tokens that would stop a request before its `min_tokens`.
    4. Mask tokens that are not allowed or would complete a bad word; add the biases of `logit_bias`.
    5. Apply repetition, frequency and presence penalties.
    6. Mask the tokens that a row's grammar does not allow; last, so that no other step unmasks one.
    7. Greedy rows take the most likely token.
    8. The others divide by the temperature, mask by min-p, top-k and top-p, add Gumbel noise, which is a function only
       of (seed, position, token id), and take the largest: a draw from the softmax.
    9. Where drafts are accepted by chance, their rows take the draft, or a token in its place.

    On a GPU the host does not wait for any of this.
    """

    def __call__(self, logits_SV: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """Sample.

        Args:
            logits_SV: one row per position that this step samples.
            metadata: the parameters of these rows.
        """
        logits_SV = logits_SV.float()
        logprobs_RV = rows_R = None
        if metadata.num_logprobs:
            rows = np.fromiter(metadata.num_logprobs, dtype=np.int64)
            (rows_R,) = upload(logits_SV.device, rows)
            logprobs_RV = logits_SV[rows_R].log_softmax(-1)
        apply_min_tokens(logits_SV, metadata.forbidden)
        if metadata.token_constraints is not None:
            apply_token_constraints(logits_SV, metadata.token_constraints)
        if metadata.penalties is not None:
            apply_penalties(logits_SV, metadata.penalties)
        if metadata.grammar_bitmask is not None:
            apply_grammar_bitmask(logits_SV, *metadata.grammar_bitmask)
        if metadata.all_greedy:
            token_ids_S = argmax(logits_SV)
        else:
            token_ids_S = sample(
                logits_SV, metadata.temperature, metadata.min_p, metadata.top_k, metadata.top_p, metadata.seeds,
                metadata.positions,
            )  # fmt: skip
        if metadata.drafts_to_verify is not None:
            _verify(logits_SV, metadata, metadata.drafts_to_verify, token_ids_S)
        if logprobs_RV is None or rows_R is None:
            return SamplerOutput(token_ids_S)
        top = top_logprobs(logprobs_RV, token_ids_S[rows_R], max(metadata.num_logprobs.values()))
        return SamplerOutput(token_ids_S, top, metadata.num_logprobs)


def _verify(
    logits_SV: torch.Tensor, metadata: SamplingMetadata, drafts: DraftsToVerify, token_ids_S: torch.Tensor
) -> None:
    rows = drafts.rows
    token_ids_S[rows] = verify_drafts(
        logits_SV[rows], metadata.temperature[rows], metadata.min_p[rows], metadata.top_k[rows], metadata.top_p[rows],
        metadata.seeds[rows], metadata.positions[rows], drafts.token_ids, drafts.probabilities,
    )  # fmt: skip
