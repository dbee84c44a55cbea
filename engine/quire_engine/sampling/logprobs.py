"""Log-probabilities of the sampled and the most likely tokens, and of prompts in chunks of bounded memory."""

from collections.abc import Callable
from typing import TypeAlias

import torch

from quire_engine.messages import PromptLogprobs, TokenLogprobs

CHUNK_LOGITS = 2**22
"""Logits of a prompt that exist at a time: 16 MiB in float32, for a prompt of any length."""

TopLogprobs: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Token ids, log-probabilities and ranks, see `top_logprobs`."""


def top_logprobs(logprobs_SV: torch.Tensor, token_ids_S: torch.Tensor, num_logprobs: int) -> TopLogprobs:
    """For each row, the given token and then the `num_logprobs` most likely ones.

    Returns:
        Token ids [S, 1 + num_logprobs], their log-probabilities, and the rank [S] of the given token: one more than the
        number of tokens that are more likely. The others' ranks are 1, 2, …
    """
    given = logprobs_SV.gather(1, token_ids_S[:, None])
    ranks = (logprobs_SV > given).sum(-1) + 1
    top = logprobs_SV.topk(num_logprobs, dim=-1)
    return torch.cat((token_ids_S[:, None], top.indices), 1), torch.cat((given, top.values), 1), ranks


def to_entries(token_ids_SN: torch.Tensor, logprobs_SN: torch.Tensor, ranks_S: torch.Tensor) -> list[TokenLogprobs]:
    """What `top_logprobs` returns, on the host, as one list of `(id, logprob, rank)` for each row."""
    rows = zip(token_ids_SN.tolist(), logprobs_SN.tolist(), ranks_S.tolist(), strict=True)
    return [
        list(zip(token_ids, logprobs, [rank, *range(1, len(token_ids))], strict=True))
        for token_ids, logprobs, rank in rows
    ]


def compute_prompt_logprobs(
    compute_logits: Callable[[torch.Tensor], torch.Tensor | None],
    hidden_TE: torch.Tensor,
    token_ids_T: torch.Tensor,
    start: int,
    num_logprobs: int,
    vocab_size: int,
) -> PromptLogprobs | None:
    """Score prompt tokens by the hidden states of the positions before them; None if `compute_logits` returns None.

    Args:
        compute_logits: [T, E] → [T, V], or None on a rank that only takes part in the computation.
        hidden_TE: row i belongs to position `start - 1 + i`.
        token_ids_T: int64; token i is at position `start + i`, so row i predicts it.
        start: at least 1.
        num_logprobs: how many of the most likely tokens to add.
        vocab_size: V.
    """
    num_logprobs = min(num_logprobs, vocab_size)
    rows = max(1, CHUNK_LOGITS // vocab_size)
    chunks = []
    for i in range(0, len(token_ids_T), rows):
        logits = compute_logits(hidden_TE[i : i + rows])
        if logits is not None:
            chunks.append(top_logprobs(logits.float().log_softmax(-1), token_ids_T[i : i + rows], num_logprobs))
    if not chunks:
        return None
    token_ids, logprobs, ranks = (torch.cat(columns).cpu() for columns in zip(*chunks, strict=True))
    return PromptLogprobs(
        start=start,
        num_logprobs=num_logprobs,
        token_ids=token_ids.to(torch.int32).numpy().tobytes(),
        logprobs=logprobs.numpy().tobytes(),
        ranks=ranks.to(torch.int32).numpy().tobytes(),
    )
