"""Arguments of `quire_kernels.sample`, for the tests of each of its forms."""

from typing import Any

import torch

__all__ = ["MASKS", "columns", "logits_of"]

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


def logits_of(rows: int, vocab_size: int, scale: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[rows, vocab_size], normally distributed, always the same."""
    generator = torch.Generator().manual_seed(rows + vocab_size)
    return (torch.randn(rows, vocab_size, generator=generator) * scale).to(dtype)
