"""Log-probabilities of the sampled and the most likely tokens."""

from typing import TypeAlias

import torch

from quire_engine.messages import TokenLogprobs

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
