"""The kernels that work row by row, against plain torch in float64."""

import pytest
import torch
import torch.nn.functional as F
from quire_kernels import (
    add_layer_norm,
    add_rms_norm,
    embedding,
    gelu_tanh_and_mul,
    layer_norm,
    rms_norm,
    silu_and_mul,
    store_rows,
    xielu,
)
from quire_kernels.activation import activate_and_mul
from quire_kernels.linear import pack_linear

SHAPES = pytest.mark.parametrize("shape", [(1, 8), (5, 33), (3, 1024), (9, 2816), (0, 64)], ids=str)
EPS = 1e-5


def randn(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def strided(matrix: torch.Tensor) -> torch.Tensor:
    """The same rows, with something between them."""
    return torch.cat((matrix, torch.full_like(matrix, 1e4)), dim=1)[:, : matrix.shape[1]]


def exact_rms_norm(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = hidden.double()
    return weight.double() * x / (x.square().mean(1, keepdim=True) + EPS).sqrt()


@SHAPES
def test_rms_norm(
    shape: tuple[int, int], device: torch.device, dtype: torch.dtype, tolerance: dict[str, float]
) -> None:
    hidden, weight = randn(device, dtype, *shape), randn(device, dtype, shape[1])
    out = rms_norm(strided(hidden), weight, EPS)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact_rms_norm(hidden, weight), **tolerance)
    wide = torch.ones(shape[0], 3 * shape[1], dtype=dtype, device=device)
    middle = wide[:, shape[1] : 2 * shape[1]]
    assert rms_norm(strided(hidden), weight, EPS, out=middle) is middle
    assert torch.equal(wide, torch.cat((torch.ones_like(out), out, torch.ones_like(out)), dim=1))


@SHAPES
def test_add_rms_norm_norms_the_sum_as_it_is_stored(
    shape: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> None:
    hidden, weight = randn(device, dtype, *shape), randn(device, dtype, shape[1])
    residual = strided(randn(device, dtype, *shape) * 3)
    total = hidden + residual
    out = add_rms_norm(strided(hidden), residual, weight, EPS)
    assert torch.equal(residual, total)
    assert torch.equal(out, rms_norm(total, weight, EPS))


@SHAPES
def test_a_multiplied_row_is_added(
    shape: tuple[int, int], device: torch.device, dtype: torch.dtype, tolerance: dict[str, float]
) -> None:
    hidden, weight = randn(device, dtype, *shape), randn(device, dtype, shape[1])
    residual = strided(randn(device, dtype, *shape) * 3)
    total = residual.double() + 0.22 * hidden.double()
    out = add_rms_norm(strided(hidden), residual, weight, EPS, multiplier=0.22, scale=0.7)
    torch.testing.assert_close(residual.double(), 0.7 * total, **tolerance)
    assert torch.equal(out, rms_norm(residual, weight, EPS))


@SHAPES
def test_a_float32_weight_multiplies_before_the_result_is_rounded(
    shape: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> None:
    hidden, weight = randn(device, dtype, *shape), randn(device, torch.float32, shape[1])
    out, exact = rms_norm(hidden, weight, EPS), exact_rms_norm(hidden, weight)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(dtype).eps / 2 + 1e-6, atol=1e-7)


@pytest.mark.parametrize("has_bias", [False, True])
@SHAPES
def test_layer_norm(
    shape: tuple[int, int], has_bias: bool, device: torch.device, dtype: torch.dtype, tolerance: dict[str, float]
) -> None:
    hidden, residual = randn(device, dtype, *shape) + 3, strided(randn(device, dtype, *shape))
    weight, bias = randn(device, torch.float32, shape[1]), randn(device, torch.float32, 2, shape[1])[1]
    bias = bias if has_bias else None
    doubles = (weight.double(), None if bias is None else bias.double())
    out = layer_norm(strided(hidden), weight, bias, EPS)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), F.layer_norm(hidden.double(), shape[1:], *doubles, EPS), **tolerance)
    total = hidden + residual
    out = add_layer_norm(strided(hidden), residual, weight, bias, EPS)
    assert torch.equal(residual, total)
    assert torch.equal(out, layer_norm(total, weight, bias, EPS))


def test_layer_norm_of_parts(device: torch.device, dtype: torch.dtype, tolerance: dict[str, float]) -> None:
    hidden, weight, bias = randn(device, dtype, 5, 120), *randn(device, torch.float32, 2, 3, 40)
    out = layer_norm(strided(hidden), weight, bias, EPS)
    expected = F.layer_norm(hidden.double().unflatten(1, (3, 40)), (40,), eps=EPS) * weight.double() + bias.double()
    torch.testing.assert_close(out.double(), expected.flatten(1), **tolerance)


@SHAPES
def test_xielu(shape: tuple[int, int], device: torch.device, dtype: torch.dtype, tolerance: dict[str, float]) -> None:
    x, (alpha_p, alpha_n) = randn(device, dtype, *shape) * 8, torch.tensor([[0.3], [-2.0]], device=device)
    x[:1, :4] = torch.tensor([0.0, -200.0, 200.0, torch.nan])
    above, below = x.double().clamp(min=0), x.double().clamp(max=0)
    expected = F.softplus(alpha_p.double()) * above.square() + 0.5 * x.double()
    expected += (F.softplus(alpha_n.double()) + 0.5) * (below.expm1() - below)
    out = xielu(strided(x), alpha_p, alpha_n)
    torch.testing.assert_close(out.double(), expected, equal_nan=True, **tolerance)


@pytest.mark.parametrize("value", [0.0, 1e-20, 1e18], ids=str)
def test_rms_norm_of_extreme_rows(value: float, device: torch.device) -> None:
    hidden, weight = torch.full((2, 40), value, device=device), torch.ones(40, device=device)
    expected = torch.full_like(hidden, value / (value**2 + EPS) ** 0.5)
    torch.testing.assert_close(rms_norm(hidden, weight, EPS), expected)


@SHAPES
def test_silu_and_mul(
    shape: tuple[int, int], device: torch.device, dtype: torch.dtype, tolerance: dict[str, float]
) -> None:
    gate, up = randn(device, dtype, *shape) * 4, randn(device, dtype, *shape).flip(1)
    gate[:1, :4] = torch.tensor([0.0, -200.0, 200.0, -0.5])  # the exponential's ends
    out = silu_and_mul(strided(torch.cat((gate, up), dim=1)))
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), F.silu(gate.double()) * up.double(), **tolerance)


@SHAPES
def test_gelu_tanh_and_mul(
    shape: tuple[int, int], device: torch.device, dtype: torch.dtype, tolerance: dict[str, float]
) -> None:
    gate, up = randn(device, dtype, *shape) * 4, randn(device, dtype, *shape).flip(1)
    gate[:1, :4] = torch.tensor([0.0, -200.0, 200.0, -0.5])  # the exponential's ends
    out = gelu_tanh_and_mul(strided(torch.cat((gate, up), dim=1)))
    torch.testing.assert_close(out.double(), F.gelu(gate.double(), approximate="tanh") * up.double(), **tolerance)


@SHAPES
def test_gelu_and_mul(
    shape: tuple[int, int], device: torch.device, dtype: torch.dtype, tolerance: dict[str, float]
) -> None:
    gate, up = randn(device, dtype, *shape) * 4, randn(device, dtype, *shape).flip(1)
    gate[:1, :4] = torch.tensor([0.0, -200.0, 200.0, -0.5])
    out = activate_and_mul(strided(torch.cat((gate, up), dim=1)), "gelu")
    torch.testing.assert_close(out.double(), F.gelu(gate.double()) * up.double(), **tolerance)


@SHAPES
def test_relu2_and_mul(
    shape: tuple[int, int], device: torch.device, dtype: torch.dtype, tolerance: dict[str, float]
) -> None:
    gate, up = randn(device, dtype, *shape) * 4, randn(device, dtype, *shape).flip(1)
    gate[:1, :4] = torch.tensor([0.0, -torch.inf, 200.0, torch.nan])
    out = activate_and_mul(strided(torch.cat((gate, up), dim=1)), "relu2")
    torch.testing.assert_close(out.double(), F.relu(gate.double()).square() * up.double(), equal_nan=True, **tolerance)


@SHAPES
def test_a_gate_that_multiplies_as_it_is_or_by_its_sigmoid(
    shape: tuple[int, int], device: torch.device, dtype: torch.dtype, tolerance: dict[str, float]
) -> None:
    gate, up = randn(device, dtype, *shape) * 4, randn(device, dtype, *shape).flip(1)
    gate[:1, :3] = torch.tensor([0.0, -200.0, 200.0])
    out = activate_and_mul(strided(gate), "sigmoid", strided(up))
    torch.testing.assert_close(out.double(), gate.double().sigmoid() * up.double(), **tolerance)
    out = activate_and_mul(strided(gate), "none", strided(up))
    torch.testing.assert_close(out.double(), gate.double() * up.double(), **tolerance)


@pytest.mark.parametrize("width", [20, 128])
def test_a_gate_of_several_columns(
    width: int, device: torch.device, dtype: torch.dtype, tolerance: dict[str, float]
) -> None:
    gate, up = randn(device, dtype, 5, 12), randn(device, dtype, 5, 12 * width)
    out = activate_and_mul(strided(gate), "sigmoid", strided(up))
    expected = gate.double().sigmoid().repeat_interleave(width, 1) * up.double()
    torch.testing.assert_close(out.double(), expected, **tolerance)


@SHAPES
def test_swigluoai(
    shape: tuple[int, int], device: torch.device, dtype: torch.dtype, tolerance: dict[str, float]
) -> None:
    gate, up = randn(device, dtype, *shape) * 4, randn(device, dtype, *shape).flip(1) * 4
    gate[:1, :6] = torch.tensor(
        [0.0, -200.0, 200.0, 7.25, torch.nan, 1.0]
    )  # what is cut off, and the exponential's ends
    up[:1, :6] = torch.tensor([-8.0, 100.0, -100.0, 7.25, 1.0, torch.nan])
    out = activate_and_mul(strided(torch.cat((gate, up), dim=1)), "swigluoai")
    gate, up = gate.double().clamp(max=7), up.double().clamp(-7, 7)
    expected = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    torch.testing.assert_close(out.double(), expected, equal_nan=True, **tolerance)


@pytest.mark.parametrize("size", [8, 33, 1500])
def test_embedding(size: int, device: torch.device, dtype: torch.dtype) -> None:
    table = strided(randn(device, dtype, 50, size))
    token_ids = torch.tensor([49, 0, 7, 7] * 3, device=device)
    assert torch.equal(embedding(token_ids, table), table[token_ids])
    assert embedding(token_ids[:0], table).shape == (0, size)


@pytest.mark.parametrize("quantize", [False, True], ids=["as-is", "int8"])
def test_embedding_of_a_packed_table(quantize: bool, device: torch.device, dtype: torch.dtype) -> None:
    table = randn(device, dtype, 100, 96)
    token_ids = torch.tensor([31, 32, 99, 0], device=device)
    out = embedding(token_ids, pack_linear(table, quantize=quantize))
    assert out.dtype == dtype
    expected = table
    if quantize:
        scales = (table.float().abs().amax(1, keepdim=True).cpu() / 127).to(device)
        expected = ((table.float() / scales).round() * scales).to(dtype)
    assert torch.equal(out, expected[token_ids])


@SHAPES
def test_store_rows(shape: tuple[int, int], device: torch.device, dtype: torch.dtype) -> None:
    num_tokens, size = shape
    rows, table = randn(device, dtype, *shape), randn(device, dtype, num_tokens + 9, 3 * size)
    slots = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))[:num_tokens].to(device)
    expected = table.clone()
    expected[slots, size : 2 * size] = rows
    store_rows(strided(rows), slots, table[:, size : 2 * size])
    assert torch.equal(table, expected)


def test_a_row_does_not_depend_on_its_batch(device: torch.device, dtype: torch.dtype) -> None:
    x, weight = randn(device, dtype, 7, 1000), randn(device, dtype, 1000)
    for together, alone in (
        (rms_norm(x, weight, EPS), [rms_norm(row[None], weight, EPS) for row in x]),
        (silu_and_mul(x), [silu_and_mul(row[None]) for row in x]),
    ):
        assert torch.equal(together, torch.cat(alone))
