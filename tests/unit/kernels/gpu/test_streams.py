"""Mixing of streams, and gates of which only large numbers count, against plain torch in float64."""

import pytest
import torch
from quire_kernels import gaussian_topk, match_rms, mix_streams, row_moments

SHAPES = pytest.mark.parametrize("shape", [(1, 8), (5, 33), (3, 1024), (4, 1500), (0, 64)], ids=str)


def randn(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


@pytest.mark.parametrize("num_streams", [2, 3, 4])
@SHAPES
def test_mix_streams(
    shape: tuple[int, int], num_streams: int, device: torch.device, dtype: torch.dtype, tolerance: dict[str, float]
) -> None:
    rows, size = shape
    wide = randn(device, dtype, rows, num_streams * size + 3)
    base, inputs = wide[:, 1:-2].unflatten(1, (num_streams, size)), randn(device, dtype, rows, 2, size)
    routes = randn(device, torch.float32, rows, num_streams)
    coefs = randn(device, torch.float32, num_streams, 2, num_streams)
    out = mix_streams(base, inputs, routes, coefs, 1.0)
    assert out.dtype == dtype
    c = torch.einsum("qpm,tm->tqp", coefs.double(), routes.double().tanh()) + 1.0
    torch.testing.assert_close(out.double(), base.double() + c @ inputs.double(), **tolerance)
    if rows:
        assert torch.equal(mix_streams(base[-1:], inputs[-1:], routes[-1:], coefs, 1.0), out[-1:])


@SHAPES
def test_match_rms(
    shape: tuple[int, int], device: torch.device, dtype: torch.dtype, tolerance: dict[str, float]
) -> None:
    hidden, like = randn(device, dtype, *shape) * 5, randn(device, dtype, *shape).flip(1)
    hidden[:1] = 0
    out = match_rms(hidden, like, 1e-5)
    own, wanted = (x.double().square().mean(1, keepdim=True) for x in (hidden, like))
    torch.testing.assert_close(out.double(), hidden.double() * (wanted / own.clamp(min=1e-5)).sqrt(), **tolerance)
    assert torch.equal(match_rms(hidden, hidden, 2.0**-126), hidden), "a row is its own model"


@SHAPES
def test_gaussian_topk(
    shape: tuple[int, int], device: torch.device, dtype: torch.dtype, tolerance: dict[str, float]
) -> None:
    x = (randn(device, dtype, shape[0], shape[1] + 3) + 3)[:, 1:-2]
    moments, exact = row_moments(x), x.double()
    mean = exact.mean(1, keepdim=True)
    variance = (exact - mean).square().mean(1, keepdim=True)
    torch.testing.assert_close(moments.double(), torch.cat((mean, variance), 1), rtol=1e-5, atol=1e-6)
    out = gaussian_topk(x, moments, 0.7)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), (exact - mean - 0.7 * variance.sqrt()).relu(), **tolerance)
