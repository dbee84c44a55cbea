"""What masks logits before a token is chosen."""

import torch
from quire_engine.sampling.token_constraints import apply_min_tokens


def kept(logits: torch.Tensor) -> list[set[int]]:
    return [set(torch.isfinite(row).nonzero().flatten().tolist()) for row in logits]


def test_min_tokens_masks_only_its_rows() -> None:
    logits = torch.zeros(3, 6)
    apply_min_tokens(logits, [(1, [0, 5])])
    assert kept(logits) == [set(range(6)), {1, 2, 3, 4}, set(range(6))]
