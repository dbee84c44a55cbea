"""Sums of rows are exact, whatever is beside them."""

from itertools import pairwise

import pytest
import torch
from quire_kernels import sum_rows

GRID = 2.0**-26


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("size", [1, 8, 67, 768])
def test_sums_of_sequences(size: int, dtype: torch.dtype, cpu_kernels: str) -> None:
    torch.manual_seed(0)
    starts = torch.tensor([0, 1, 1, 70, 203])
    wide = torch.randn(205, size + 5) * torch.tensor([1e-8, 1e-3, 1.0, 300.0, 1e5]).repeat(41)[:, None]
    hidden = wide.to(dtype)[:, 2:-3]
    sums = sum_rows(hidden, starts)
    rounded = (hidden.double() / GRID).round() * GRID
    expected = torch.stack([rounded[first:end].sum(0) for first, end in pairwise(starts.tolist())])
    assert sums.dtype == torch.float64
    assert torch.equal(sums, expected)
    chunks = sum_rows(hidden, torch.tensor([70, 99, 203]))
    assert torch.equal(chunks[0] + chunks[1], sums[-1]), "depends on how the rows are cut"
    hidden[3, -1], hidden[80, 0] = torch.nan, torch.inf
    damaged = sum_rows(hidden, starts)
    assert torch.equal(damaged[:2], sums[:2])
    assert damaged[2, -1].isnan()
    assert damaged[3, 0].isinf()


@pytest.mark.parametrize("starts", [[0, 3, 2], [0, 5], [-1, 2]])
def test_sequences_that_are_not_there(starts: list[int], cpu_kernels: str) -> None:
    with pytest.raises(ValueError, match="query_start_loc"):
        sum_rows(torch.ones(4, 8), torch.tensor(starts))
    with pytest.raises(TypeError, match="query_start_loc"):
        sum_rows(torch.ones(4, 8), torch.tensor(starts, dtype=torch.int32))
