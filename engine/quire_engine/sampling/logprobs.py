"""Log-probabilities of sampled and of most likely tokens."""

import torch

from quire_engine.messages import TokenLogprobs

__all__ = ["gather_logprobs", "top_logprobs"]


def top_logprobs(
    logprobs_SV: torch.Tensor, token_ids_S: torch.Tensor, num_logprobs: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each row the given token, then the `num_logprobs` most likely ones.

    Returns:
        Token ids [S, 1 + num_logprobs], their log-probabilities, and the rank [S] of the given token: one more than the
        number of tokens that are more likely. The others' ranks are 1, 2, …
    """
    given = logprobs_SV.gather(1, token_ids_S[:, None])
    ranks = (logprobs_SV > given).sum(-1) + 1
    top = logprobs_SV.topk(num_logprobs, dim=-1)
    return torch.cat((token_ids_S[:, None], top.indices), 1), torch.cat((given, top.values), 1), ranks


def gather_logprobs(logprobs_SV: torch.Tensor, token_ids_S: torch.Tensor, num_logprobs: int) -> list[TokenLogprobs]:
    """For each row the sampled token, then the `num_logprobs` most likely ones, each `(id, logprob, rank)`."""
    rows = zip(*(column.tolist() for column in top_logprobs(logprobs_SV, token_ids_S, num_logprobs)), strict=True)
    return [
        list(zip(token_ids, logprobs, [rank, *range(1, num_logprobs + 1)], strict=True))
        for token_ids, logprobs, rank in rows
    ]
