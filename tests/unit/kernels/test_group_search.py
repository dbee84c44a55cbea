"""`quantize_grouped` on every instruction set of the machine (see conftest.py)."""

import pytest
import torch
from quire_kernels import quantize_grouped
from quire_kernels.grouped import _quantize_torch

SHAPES = [(1, 16, 16), (3, 96, 32), (70, 192, 64), (5, 384, 128)]


def weights(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows + columns)
    numbers = torch.randn(rows, columns, generator=generator)
    return (numbers**3 * 0.02).to(dtype)


def nearest(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    """What the scale `largest / -8` gives, without a search."""
    groups = weight.float().view(len(weight), -1, group_size)
    extreme = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scale = extreme / -8
    return ((groups / scale).round().clamp(-8, 7) * scale).flatten(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "columns", "group_size"), SHAPES)
def test_is_the_reference_and_better_than_no_search(
    rows: int, columns: int, group_size: int, dtype: torch.dtype, cpu_kernels: str
) -> None:
    weight = torch.cat((weights(rows, columns, dtype), weights(1, 2 * columns, dtype)[:, columns:]), 0)
    wide = torch.cat((weight, weight), 1)[:, :columns]  # rows with something behind them
    importance = torch.rand(columns, generator=torch.Generator().manual_seed(0)) ** 2
    for given in (None, importance):
        found = quantize_grouped(wide, group_size, given)
        assert int(found.codes.max()) < 16
        _, scales = _quantize_torch(weight.float(), group_size, given)
        # Sums in another order may find another scale of the grid, one that is as good.
        error = ((found.dequantize() - weight) ** 2 * (1.0 if given is None else given)).sum(1)
        codes, expected = _quantize_torch(weight.float(), group_size, given)
        reference = ((codes.float() - 8).view(len(codes), -1, group_size) * expected.unsqueeze(2)).flatten(1)
        theirs = ((reference - weight) ** 2 * (1.0 if given is None else given)).sum(1)
        torch.testing.assert_close(error, theirs, rtol=1e-3, atol=1e-12)
        assert (found.group_scales() == scales).float().mean() > 0.9
    plain = ((nearest(weight, group_size) - weight) ** 2).sum()
    assert ((quantize_grouped(weight, group_size).dequantize() - weight) ** 2).sum() < plain


def test_scales_and_codes_at_the_limits(cpu_kernels: str) -> None:
    """Zeros, one number alone, numbers that float16 has no scale for, and the largest there are."""
    weight = torch.zeros(6, 32)
    weight[1, 5], weight[2, 0] = -0.75, 1e-30
    weight[3], weight[4], weight[5, 3] = 1e-7, 3e38, -1e6
    found = quantize_grouped(weight, 16)
    dequantized = found.dequantize()
    assert dequantized.isfinite().all()
    assert not dequantized[0].any()
    assert dequantized[1, 5] == -0.75
    assert int(dequantized[1].count_nonzero()) == 1
    assert (dequantized[4] > 1e5).all()
    assert dequantized[5, 3] < -5e5
    assert found.scales.dtype == torch.float16


def test_float16_and_bfloat16_both_hold_the_scales() -> None:
    for factor in (1.0, 1e-4, 1e-6):
        scales = quantize_grouped(weights(64, 128) * factor, 32).scales
        assert torch.equal(scales.to(torch.bfloat16).float(), scales.float())


def test_the_largest_number_is_met_with_either_sign(cpu_kernels: str) -> None:
    weight = torch.tensor([[1.0, *[-0.125, 0.25] * 7, 0.5]])
    assert torch.equal(quantize_grouped(weight, 16).dequantize(), weight)
    assert torch.equal(quantize_grouped(-weight, 16).dequantize(), -weight)


@pytest.mark.parametrize(
    ("columns", "group_size", "importance", "message"),
    [(48, 32, None, "32 of 48 columns"), (48, 24, None, "24 of 48"), (32, 32, 16, r"\[16\]; it must be \[32\]")],
)
def test_what_does_not_fit_is_rejected(columns: int, group_size: int, importance: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize_grouped(torch.ones(2, columns), group_size, None if importance is None else torch.ones(importance))
