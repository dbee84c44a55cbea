"""Log-probabilities of sampled and of most likely tokens."""

import torch

from quire_engine.messages import TokenLogprobs

__all__ = ["gather_logprobs"]


def gather_logprobs(logprobs_SV: torch.Tensor, token_ids_S: torch.Tensor, num_logprobs: int) -> list[TokenLogprobs]:
    """For each row the sampled token, then the `num_logprobs` most likely ones, each `(id, logprob, rank)`.

    The rank of a token is one more than the number of tokens that are more likely.
    """
    sampled = logprobs_SV.gather(1, token_ids_S[:, None])
    ranks = (logprobs_SV > sampled).sum(-1) + 1
    top = logprobs_SV.topk(num_logprobs, dim=-1)
    rows = zip(
        token_ids_S.tolist(), sampled[:, 0].tolist(), ranks.tolist(), top.indices.tolist(), top.values.tolist(),
        strict=True,
    )  # fmt: skip
    return [
        [(token_id, logprob, rank), *zip(top_ids, top_values, range(1, num_logprobs + 1), strict=True)]
        for token_id, logprob, rank, top_ids, top_values in rows
    ]
