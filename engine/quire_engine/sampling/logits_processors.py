"""What masks logits before a token is chosen. Min-p, top-k and top-p are part of choosing: `quire_kernels.sampling`."""

import torch

__all__ = ["apply_min_tokens"]


def apply_min_tokens(logits_SV: torch.Tensor, forbidden: list[tuple[int, list[int]]]) -> None:
    """Mask in place, for the given rows, the tokens that would end the request."""
    for row, token_ids in forbidden:
        logits_SV[row, token_ids] = float("-inf")
