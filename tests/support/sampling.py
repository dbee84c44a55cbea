"""Arguments of `quire_kernels.sample`, for the tests of each of its forms."""

from typing import Any

import torch

__all__ = ["MASKS", "columns", "distribution", "extreme_rows", "logits_of", "p_value", "without_noise"]

MASKS = {
    "none": {},
    "top-k": {"top_k": 50},
    "large top-k": {"top_k": 3000},
    "top-p": {"top_p": 0.9},
    "small top-p": {"top_p": 0.01},
    "large top-p": {"top_p": 0.9999},
    "min-p": {"min_p": 0.05},
    "all": {"top_k": 100, "top_p": 0.8, "min_p": 0.001},
}
DEFAULTS = {"temperature": 1.0, "min_p": 0.0, "top_k": 10**6, "top_p": 1.0, "seeds": 5, "positions": 3}
INTEGERS = ("top_k", "seeds", "positions")


def columns(rows: int, **values: Any) -> dict[str, torch.Tensor]:
    """The arguments of `sample` beside the logits; a scalar holds for all rows."""
    dtypes = {name: torch.int64 if name in INTEGERS else torch.float32 for name in DEFAULTS}
    return {
        name: torch.as_tensor(values.get(name, default), dtype=dtypes[name]).expand(rows)
        for name, default in DEFAULTS.items()
    }


def without_noise(rows: int, **values: Any) -> dict[str, torch.Tensor]:
    """The arguments of `probabilities` beside the logits: those of `sample` without seeds and positions."""
    return {name: column for name, column in columns(rows, **values).items() if name not in ("seeds", "positions")}


def logits_of(rows: int, vocab_size: int, scale: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[rows, vocab_size], normally distributed, always the same."""
    generator = torch.Generator().manual_seed(rows + vocab_size)
    return (torch.randn(rows, vocab_size, generator=generator) * scale).to(dtype)


def extreme_rows() -> torch.Tensor:
    """[9, 1000] logits at the edges of what `sample` takes."""
    logits = logits_of(9, 1000, 1.0)
    logits[0] = -float("inf")  # all masked
    logits[1] = -float("inf")
    logits[1, 700] = -5.0  # one left
    logits[2] = 3.25  # all equal
    logits[3, 123] = float("inf")
    logits[4, 500:] = -float("inf")
    logits[5] = logits[5].round()  # ties
    logits[6] *= 1e30
    logits[7, 9] = 1e30
    logits[8, 5] = float("nan")
    return logits


def distribution(logits_V: torch.Tensor, top_k: int = 10**6, top_p: float = 1.0, min_p: float = 0.0) -> torch.Tensor:
    """[V] float64, by the textbook: sort, cut after k, renormalise, cut after the token with which the sum reaches p.

    Args:
        logits_V: divided by the temperature.
        top_k, top_p, min_p: see `sample`.
    """
    probabilities = logits_V.double().softmax(0)
    kept = probabilities >= min_p * probabilities.max()
    order = probabilities.argsort(descending=True)
    kept[order[int(top_k) :]] = False
    probabilities = (probabilities * kept) / (probabilities * kept).sum()
    before = probabilities[order].cumsum(0) - probabilities[order]
    kept[order] &= before < top_p
    return (probabilities * kept) / (probabilities * kept).sum()


def p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """How likely draws are at least as far from the distribution, by Pearson's chi-square test.

    Args:
        counts: how often each outcome was drawn, in any shape.
        probabilities: of the outcomes, in the same shape. Those expected less than 10 times count as one outcome.

    Returns:
        0 if an outcome of probability 0 was drawn.
    """
    counts, probabilities = counts.flatten().double(), probabilities.flatten().double()
    if counts[probabilities == 0].any():
        return 0.0
    expected = probabilities / probabilities.sum() * counts.sum()
    is_rare = expected < 10
    expected = torch.cat((expected[~is_rare], expected[is_rare].sum()[None]))
    observed = torch.cat((counts[~is_rare], counts[is_rare].sum()[None]))
    observed, expected = observed[expected > 0], expected[expected > 0]
    if len(expected) == 1:
        return 1.0
    chi_square = ((observed - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc((expected.new_tensor(len(expected) - 1)) / 2, chi_square / 2))
