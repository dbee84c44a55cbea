"""The kernels that work row by row, on every instruction set that the machine has (see conftest.py)."""

import pytest
import torch
import torch.nn.functional as F
from quire_kernels import (
    add_residual,
    add_rms_norm,
    embedding,
    gelu_tanh_and_mul,
    load_rows,
    rms_norm,
    scale_rows,
    silu_and_mul,
    soft_cap,
    store_rows,
)
from quire_kernels.activation import activate_and_mul
from quire_kernels.linear import pack_linear, quantize_per_token

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
SHAPES = pytest.mark.parametrize("shape", [(1, 8), (5, 33), (3, 1024), (70, 2816)], ids=str)
EPS = 1e-5


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def strided(matrix: torch.Tensor) -> torch.Tensor:
    """The same rows, with something between them."""
    view = torch.cat((matrix, torch.full_like(matrix, 1e9)), dim=1)[:, : matrix.shape[1]]
    assert not view.is_contiguous() or len(view) == 1
    return view


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}


@DTYPES
@SHAPES
def test_rms_norm(shape: tuple[int, int], dtype: torch.dtype, cpu_kernels: str) -> None:
    hidden, weight = randn(*shape, dtype=dtype), randn(shape[1], dtype=dtype)
    exact = hidden.double()
    expected = weight.double() * exact / (exact.square().mean(1, keepdim=True) + EPS).sqrt()
    out = rms_norm(strided(hidden), weight, EPS)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, **tolerance(dtype))
    wide = torch.ones(shape[0], 3 * shape[1], dtype=dtype)
    middle = wide[:, shape[1] : 2 * shape[1]]
    assert rms_norm(strided(hidden), weight, EPS, out=middle) is middle
    assert torch.equal(wide, torch.cat((torch.ones_like(out), out, torch.ones_like(out)), dim=1))


@DTYPES
@SHAPES
def test_add_rms_norm_norms_the_sum_as_it_is_stored(
    shape: tuple[int, int], dtype: torch.dtype, cpu_kernels: str
) -> None:
    hidden, weight = randn(*shape, dtype=dtype), randn(shape[1], dtype=dtype)
    residual = strided(randn(*shape, dtype=dtype) * 3)
    total = hidden + residual
    out = add_rms_norm(strided(hidden), residual, weight, EPS)
    assert torch.equal(residual, total)
    assert torch.equal(out, rms_norm(total, weight, EPS))


@DTYPES
@SHAPES
def test_a_multiplied_row_is_added(shape: tuple[int, int], dtype: torch.dtype, cpu_kernels: str) -> None:
    hidden, weight = randn(*shape, dtype=dtype), randn(shape[1], dtype=dtype)
    residual = strided(randn(*shape, dtype=dtype) * 3)
    total, only_added = residual.double() + 0.22 * hidden.double(), residual.clone()
    out = add_rms_norm(strided(hidden), residual, weight, EPS, multiplier=0.22)
    torch.testing.assert_close(residual.double(), total, **tolerance(dtype))
    assert torch.equal(out, rms_norm(residual, weight, EPS))
    add_residual(strided(hidden), only_added, multiplier=0.22)
    assert torch.equal(only_added, residual)


@DTYPES
@SHAPES
def test_the_sum_is_scaled(shape: tuple[int, int], dtype: torch.dtype, cpu_kernels: str) -> None:
    hidden, weight = randn(*shape, dtype=dtype), randn(shape[1], dtype=dtype)
    residual = strided(randn(*shape, dtype=dtype) * 3)
    total, only_added = 0.7 * (residual.double() + 0.22 * hidden.double()), residual.clone()
    out = add_rms_norm(strided(hidden), residual, weight, EPS, multiplier=0.22, scale=0.7)
    torch.testing.assert_close(residual.double(), total, **tolerance(dtype))
    assert torch.equal(out, rms_norm(residual, weight, EPS))
    add_residual(strided(hidden), only_added, 0.22, 0.7)
    assert torch.equal(only_added, residual)


@DTYPES
@SHAPES
def test_rows_are_scaled(shape: tuple[int, int], dtype: torch.dtype, cpu_kernels: str) -> None:
    hidden, scale = randn(*shape, dtype=dtype), randn(shape[0])
    assert torch.equal(scale_rows(strided(hidden), scale), (hidden * scale[:, None]).to(dtype))
    with pytest.raises(ValueError, match=r"scale_T has shape \[\d+, 1\]"):
        scale_rows(hidden, scale[:, None])


@DTYPES
@SHAPES
def test_a_gate_apart_from_what_it_multiplies(shape: tuple[int, int], dtype: torch.dtype, cpu_kernels: str) -> None:
    gate, up = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype)
    out = activate_and_mul(strided(gate), "gelu_tanh", strided(up))
    assert torch.equal(out, activate_and_mul(torch.cat((gate, up), 1), "gelu_tanh"))
    with pytest.raises(ValueError, match="up is "):
        activate_and_mul(gate, "gelu_tanh", up[:-1])


@DTYPES
@SHAPES
def test_a_gate_that_multiplies_as_it_is_or_by_its_sigmoid(
    shape: tuple[int, int], dtype: torch.dtype, cpu_kernels: str
) -> None:
    gate, up = randn(*shape, dtype=dtype) * 4, randn(*shape, dtype=dtype)
    gate[:1, :3] = torch.tensor([0.0, -200.0, 200.0])  # the exponential's ends
    out = activate_and_mul(strided(gate), "sigmoid", strided(up))
    torch.testing.assert_close(out.double(), gate.double().sigmoid() * up.double(), **tolerance(dtype))
    out = activate_and_mul(strided(gate), "none", strided(up))
    torch.testing.assert_close(out.double(), gate.double() * up.double(), **tolerance(dtype))


@DTYPES
@pytest.mark.parametrize("activation", ["silu", "sigmoid", "none"])
@pytest.mark.parametrize("width", [2, 20, 128])
def test_a_gate_of_several_columns(width: int, activation: str, dtype: torch.dtype, cpu_kernels: str) -> None:
    gate, up = randn(5, 7, dtype=dtype) * 4, randn(5, 7 * width, dtype=dtype)
    out = activate_and_mul(strided(gate), activation, strided(up))
    assert torch.equal(out, activate_and_mul(gate.repeat_interleave(width, 1), activation, up))
    with pytest.raises(ValueError, match="up is "):
        activate_and_mul(gate, activation, up[:, 1:])


@SHAPES
def test_a_float32_weight_multiplies_before_the_result_is_rounded(shape: tuple[int, int], cpu_kernels: str) -> None:
    hidden, weight = randn(*shape, dtype=torch.bfloat16), randn(shape[1])
    exact = hidden.double()
    exact = weight.double() * exact / (exact.square().mean(1, keepdim=True) + EPS).sqrt()
    out = rms_norm(hidden, weight, EPS)
    assert out.dtype == torch.bfloat16
    assert (out == exact.bfloat16()).float().mean() > 0.999, "but for numbers halfway between two"
    residual = torch.zeros_like(hidden)
    assert torch.equal(add_rms_norm(hidden, residual, weight, EPS), out)


@pytest.mark.parametrize("value", [0.0, 1e-20, 1e18], ids=str)
def test_rms_norm_of_extreme_rows(value: float, cpu_kernels: str) -> None:
    hidden, weight = torch.full((2, 40), value), torch.ones(40)
    expected = torch.full((2, 40), value / (value**2 + EPS) ** 0.5)
    torch.testing.assert_close(rms_norm(hidden, weight, EPS), expected)


@DTYPES
@SHAPES
def test_silu_and_mul(shape: tuple[int, int], dtype: torch.dtype, cpu_kernels: str) -> None:
    gate, up = randn(*shape, dtype=dtype) * 4, randn(*shape, dtype=dtype).flip(1)
    gate[0, :4] = torch.tensor([0.0, -200.0, 200.0, -0.5])  # the exponential's ends
    expected = F.silu(gate.double()) * up.double()
    out = silu_and_mul(strided(torch.cat((gate, up), dim=1)))
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, **tolerance(dtype))


@DTYPES
@SHAPES
def test_gelu_tanh_and_mul(shape: tuple[int, int], dtype: torch.dtype, cpu_kernels: str) -> None:
    gate, up = randn(*shape, dtype=dtype) * 4, randn(*shape, dtype=dtype).flip(1)
    gate[0, :8] = torch.tensor([0.0, -200.0, 200.0, -0.5, 1e-6, -1e14, 1e14, -5.0])  # cubes beyond float32
    expected = F.gelu(gate.double(), approximate="tanh") * up.double()
    out = gelu_tanh_and_mul(strided(torch.cat((gate, up), dim=1)))
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, **tolerance(dtype))


@DTYPES
@SHAPES
def test_swigluoai(shape: tuple[int, int], dtype: torch.dtype, cpu_kernels: str) -> None:
    gate, up = randn(*shape, dtype=dtype) * 4, randn(*shape, dtype=dtype).flip(1) * 4
    gate[0, :6] = torch.tensor(
        [0.0, -200.0, 200.0, 7.25, torch.nan, 1.0]
    )  # what is cut off, and the exponential's ends
    up[0, :6] = torch.tensor([-8.0, 100.0, -100.0, 7.25, 1.0, torch.nan])
    out = activate_and_mul(strided(torch.cat((gate, up), dim=1)), "swigluoai")
    assert out.dtype == dtype
    gate, up = gate.double().clamp(max=7), up.double().clamp(-7, 7)
    expected = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    torch.testing.assert_close(out.double(), expected, equal_nan=True, **tolerance(dtype))


@SHAPES
def test_soft_cap(shape: tuple[int, int], cpu_kernels: str) -> None:
    logits = randn(*shape) * 40
    logits[0, :5] = torch.tensor([0.0, 1e-6, -1e-6, torch.inf, -torch.inf])
    expected = torch.tanh(logits.double() / 30) * 30
    view = strided(logits)
    assert soft_cap(view, 30.0) is view
    torch.testing.assert_close(view.double(), expected, rtol=1e-6, atol=1e-12)
    assert soft_cap(torch.full((1, 9), torch.nan), 30.0).isnan().all()


@DTYPES
@SHAPES
def test_quantize_per_token(shape: tuple[int, int], dtype: torch.dtype, cpu_kernels: str) -> None:
    x = randn(*shape, dtype=dtype)
    x[0] = 0  # no scale to divide by
    x[-1, :7] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0])  # ties
    scales = x.float().abs().amax(1).clamp(min=1e-10) / 127
    out, got_scales = quantize_per_token(strided(x))
    assert torch.equal(got_scales, scales)
    assert out.dtype == torch.uint8
    assert torch.equal(out.float(), (x.float() / scales[:, None]).round() + 128)
    if len(x) > 1:
        assert out[-1, :7].tolist() == [255, 128, 130, 130, 128, 126, 1]


@DTYPES
@SHAPES
def test_quantize_per_token_with_zero_points(shape: tuple[int, int], dtype: torch.dtype, cpu_kernels: str) -> None:
    x = randn(*shape, dtype=dtype)
    x = torch.cat((torch.zeros_like(x[:1]), x, x[:1].abs(), torch.full_like(x[:1], torch.nan)))
    zeros = torch.empty(len(x), dtype=torch.int32)
    out, scales = quantize_per_token(strided(x), zeros_T=zeros)
    assert scales[-1].isnan()
    x, out, scales, zeros = (one[:-1].float() for one in (x, out, scales, zeros))
    spans = x.amax(1).clamp(min=0) - x.amin(1).clamp(max=0)
    assert torch.equal(scales, spans.clamp(min=1e-10) / 255)
    near = (out - zeros[:, None]) * scales[:, None]
    assert ((near - x).abs() <= 1.001 * scales[:, None] * torch.where(out == 255, 1, 0.5)).all()
    assert zeros[-1] == 0  # although no number of the row is
    assert out[0].count_nonzero() == zeros[0] == 0


@DTYPES
@SHAPES
def test_quantize_per_token_to_16_bits(shape: tuple[int, int], dtype: torch.dtype, cpu_kernels: str) -> None:
    x = randn(*shape, dtype=dtype)
    x[0] = 0
    x[-1, :5] = torch.tensor([127.0, 0.5, 1.5, -0.5, 1 / 256])  # what rounding leaves of 0.5 is more than 127 of 256ths
    eight, scales = quantize_per_token(x)
    out, both_scales = quantize_per_token(strided(x), 16)
    assert torch.equal(out[:, 0], eight)
    assert torch.equal(both_scales, torch.stack((scales, scales / 256), 1))
    rest = x.float() / scales[:, None] - (eight.float() - 128)
    assert torch.equal(out[:, 1].float(), ((rest * 256).round() + 128).clamp(max=255))
    assert out[-1, 1, :5].tolist() == [128, 255, 0, 0, 129]


@DTYPES
@pytest.mark.parametrize("quantize", [False, True], ids=["as-is", "int8"])
@pytest.mark.parametrize("size", [4, 8, 36, 1024])
def test_embedding_of_a_packed_table(size: int, quantize: bool, dtype: torch.dtype, cpu_kernels: str) -> None:
    table = randn(100, size, dtype=dtype)
    token_ids = torch.cat((torch.arange(100), torch.tensor([31, 32, 99, 0] * 8)))
    out = embedding(token_ids, pack_linear(table, quantize=quantize))
    assert out.dtype == dtype
    expected = table
    if quantize:
        scales = table.float().abs().amax(1, keepdim=True) / 127
        expected = ((table.float() / scales).round() * scales).to(dtype)
    assert torch.equal(out, expected[token_ids])


@DTYPES
@pytest.mark.parametrize("size", [8, 33, 1024])
def test_embedding_of_a_plain_table(size: int, dtype: torch.dtype, cpu_kernels: str) -> None:
    table = strided(randn(50, size, dtype=dtype))
    token_ids = torch.tensor([49, 0, 7, 7] * 20)
    assert torch.equal(embedding(token_ids, table), table[token_ids])
    assert embedding(token_ids[:0], table).shape == (0, size)


@DTYPES
@SHAPES
def test_store_rows(shape: tuple[int, int], dtype: torch.dtype, cpu_kernels: str) -> None:
    num_tokens, size = shape
    rows, table = randn(*shape, dtype=dtype), randn(num_tokens + 9, 3 * size, dtype=dtype)
    slots = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))[:num_tokens]
    expected = table.clone()
    expected[slots, size : 2 * size] = rows
    store_rows(strided(rows), strided(slots[:, None])[:, 0], table[:, size : 2 * size])
    assert torch.equal(table, expected)
    store_rows(rows[:0], slots[:0], table[:, :size])
    assert torch.equal(table, expected)


@DTYPES
@SHAPES
def test_load_rows(shape: tuple[int, int], dtype: torch.dtype, cpu_kernels: str) -> None:
    num_tokens, size = shape
    table = randn(num_tokens + 9, 3 * size, dtype=dtype)
    rows = torch.randint(0, len(table), (num_tokens,), generator=torch.Generator().manual_seed(0))
    middle = table[:, size : 2 * size]
    out = load_rows(middle, strided(rows[:, None])[:, 0])
    assert out.is_contiguous()
    assert torch.equal(out, middle[rows])
    assert load_rows(middle, rows[:0]).shape == (0, size)


@DTYPES
def test_a_row_does_not_depend_on_its_batch(dtype: torch.dtype, cpu_kernels: str) -> None:
    if cpu_kernels == "torch":
        pytest.skip("plain torch promises no such thing")
    x, weight = randn(64, 1000, dtype=dtype), randn(1000, dtype=dtype)
    for together, alone in (
        (rms_norm(x, weight, EPS), [rms_norm(row[None], weight, EPS) for row in x]),
        (silu_and_mul(x), [silu_and_mul(row[None]) for row in x]),
        (gelu_tanh_and_mul(x), [gelu_tanh_and_mul(row[None]) for row in x]),
        (soft_cap(x.float(), 30.0), [soft_cap(row[None].float(), 30.0) for row in x]),
    ):
        assert torch.equal(together, torch.cat(alone))
