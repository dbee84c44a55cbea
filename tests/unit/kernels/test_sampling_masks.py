"""The plain torch masks of `sample`, against the textbook definition, row by row, and against a batch of one."""

import pytest
import torch
from quire_kernels.sampling import _apply_min_p, _apply_top_k_top_p


def kept(logits: torch.Tensor) -> list[set[int]]:
    return [set(torch.isfinite(row).nonzero().flatten().tolist()) for row in logits]


def plain_top_k_top_p(row: torch.Tensor, k: int, p: float) -> set[int]:
    """Sort, cut after k, renormalise, cut after the token with which the sum reaches p. No ties in the input."""
    order = row.double().argsort(descending=True)[:k]
    probabilities = row.double()[order].softmax(0)
    total, chosen = 0.0, set()
    for token, probability in zip(order.tolist(), probabilities.tolist(), strict=True):
        chosen.add(token)
        total += probability
        if p < 1.0 and total >= p:
            break
    return chosen


@pytest.mark.parametrize("vocab_size", [7, 300, 5000])
@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_top_k_top_p(vocab_size: int, scale: float) -> None:
    torch.manual_seed(0)
    settings = [(vocab_size, 1.0), (1, 1.0), (5, 1.0), (vocab_size, 0.01), (vocab_size, 0.5), (vocab_size, 0.999),
                (5, 0.7), (min(400, vocab_size), 0.9), (vocab_size + 10, 0.3)]  # fmt: skip
    logits = torch.randn(len(settings), vocab_size) * scale
    top_k, top_p = torch.tensor([k for k, _ in settings]), torch.tensor([p for _, p in settings])
    got = kept(_apply_top_k_top_p(logits, top_k, top_p))
    assert got == [plain_top_k_top_p(row, k, p) for row, (k, p) in zip(logits, settings, strict=True)]
    for row in range(len(settings)):
        alone = _apply_top_k_top_p(logits[row : row + 1], top_k[row : row + 1], top_p[row : row + 1])
        assert kept(alone) == [got[row]]


def test_ties_stay_together() -> None:
    logits = torch.tensor([[3.0, 2.0, 2.0, 2.0, 1.0]])
    assert kept(_apply_top_k_top_p(logits, torch.tensor([2]), torch.tensor([1.0]))) == [{0, 1, 2, 3}]
    assert kept(_apply_top_k_top_p(logits, torch.tensor([5]), torch.tensor([0.6]))) == [{0, 1, 2, 3}]


def test_min_p() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.4, 0.4, 0.1, 0.1]]).log()
    assert kept(_apply_min_p(logits, torch.tensor([0.2, 0.0]))) == [{0, 1, 2}, {0, 1, 2, 3}]
    assert kept(_apply_min_p(logits, torch.tensor([1.0, 0.9]))) == [{0}, {0, 1}]
