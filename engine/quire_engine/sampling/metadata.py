"""SamplingMetadata: the sampling parameters of a batch, column by column."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quire_engine.sampling.penalties import Penalties
from quire_engine.sampling.token_constraints import TokenConstraints


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
