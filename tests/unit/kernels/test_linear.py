"""`linear` over packed weights, on every instruction set of the machine (see conftest.py), against plain torch."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from quire_kernels.activation import ACTIVATIONS, activate, activate_and_mul
from quire_kernels.linear import head_linear, linear, pack_head_linear, pack_linear, quantize_per_token
from support.full import pairs

SHAPES = [(1, 32, 8), (3, 33, 16), (12, 96, 64), (13, 100, 68), (64, 1000, 128), (200, 40, 2816)]


def operands(rows: int, out_features: int, in_features: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows * out_features + in_features)
    x = torch.randn(rows, in_features, generator=generator).to(dtype)
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype) * in_features**-0.5
    return x, weight, torch.randn(out_features, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "out_features", "in_features"), SHAPES)
def test_equals_torch(rows: int, out_features: int, in_features: int, dtype: torch.dtype, cpu_kernels: str) -> None:
    x, weight, bias = operands(rows, out_features, in_features, dtype)
    expected = F.linear(x.double(), weight.double(), bias.double())
    out = linear(x, pack_linear(weight, bias))
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    # Rounded once, at the end.
    exact = linear(x, pack_linear(weight), torch.float32)
    tolerance = 1e-2 if cpu_kernels == "torch" else 1e-4  # plain torch rounds in between
    torch.testing.assert_close(exact.double(), F.linear(x.double(), weight.double()), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "heads", "out_features", "in_features"),
    [(0, 2, 8, 8), (1, 1, 5, 2), (1, 16, 33, 24), (13, 3, 64, 10), (5, 2, 40, 7), (300, 2, 96, 1024)],
)
def test_a_linear_for_each_head(
    rows: int, heads: int, out_features: int, in_features: int, dtype: torch.dtype, cpu_kernels: str
) -> None:
    """Of heads within longer rows; odd features of bfloat16 have no kernel in C++, and long rows go in blocks."""
    _, weight, _ = operands(rows, heads * out_features, in_features, dtype)
    x = torch.randn(rows, heads, in_features + 3).to(dtype)[..., 2 : in_features + 2]
    weight_HNK = weight.view(heads, out_features, in_features)
    out = head_linear(x, pack_head_linear(weight_HNK))
    assert out.shape == (rows, heads, out_features)
    assert out.dtype == dtype
    expected = torch.einsum("thk,hnk->thn", x.double(), weight_HNK.double())
    torch.testing.assert_close(out.double(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    if cpu_kernels != "torch":
        for head, own in enumerate(weight_HNK):
            assert torch.equal(out[:, head], linear(x[:, head], pack_linear(own))) or in_features % 2


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu2"])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
def test_the_result_is_activated(kind: str, activation: str, cpu_kernels: str) -> None:
    """Without a gate, over the whole range of the activation."""
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    x, weight, bias = operands(13, 100, 68, dtype)
    x, tolerance = x * 4, {"fp32": 2e-6, "bf16": 1e-2, "int8": 2e-6}[kind]
    options = {"quantize": kind == "int8"}
    plain = linear(x, pack_linear(weight, bias, **options), torch.float32)
    out = linear(x, pack_linear(weight, bias, activation=activation, activates=True, **options))
    tolerance *= 4 if cpu_kernels == "torch" else 1  # which rounds before
    torch.testing.assert_close(out.float(), activate(plain, activation), rtol=tolerance, atol=tolerance)


def test_an_activation_has_one_place() -> None:
    weight = torch.zeros(4, 8)
    for options in ({"gated": True}, {"activation": "swigluoai"}):
        with pytest.raises(ValueError, match="activates"):
            pack_linear(weight, activates=True, **options)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("half", [1, 16, 17, 40])
def test_gated_is_activation_and_mul_of_the_halves(half: int, activation: str, cpu_kernels: str) -> None:
    x, weight, _ = operands(5, 2 * half, 64, torch.float32)
    out = linear(x, pack_linear(weight, gated=True, activation=activation))
    torch.testing.assert_close(out, activate_and_mul(F.linear(x, weight), activation), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize(("rows", "out_features", "in_features"), SHAPES)
def test_int8_is_exact_in_its_integers(
    rows: int, out_features: int, in_features: int, bits: int, cpu_kernels: str
) -> None:
    x, weight, bias = operands(rows, out_features, in_features, torch.bfloat16)
    scales = weight.float().abs().amax(1) / 127
    quantized = (weight.float() / scales[:, None]).round()
    x_unsigned, x_scales = quantize_per_token(x, bits)
    x_quantized = ((x_unsigned.double() - 128) * x_scales.unsqueeze(-1).double()).view(rows, -1, in_features).sum(1)
    expected = x_quantized @ quantized.double().t() * scales.double() + bias.double()
    out = linear(x, pack_linear(weight, bias, quantize=True, activation_bits=bits), torch.float32)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    # And near the unquantised result.
    error = (out - F.linear(x.float(), weight.float(), bias.float())).norm() / out.norm()
    assert error < 0.02


@pytest.mark.parametrize(("rows", "out_features", "in_features"), SHAPES)
def test_int8_with_a_zero_point_is_exact_in_its_integers(
    rows: int, out_features: int, in_features: int, cpu_kernels: str
) -> None:
    x, weight, bias = operands(rows, out_features, in_features, torch.float32)
    x = F.gelu(x)  # which reaches further above 0 than below it
    scales = weight.abs().amax(1) / 127
    quantized = (weight / scales[:, None]).round().double()
    zeros = torch.empty(rows, dtype=torch.int32)
    x_unsigned, x_scales = quantize_per_token(x, zeros_T=zeros)
    expected = (x_unsigned.double() - zeros[:, None]) * x_scales[:, None].double() @ quantized.t() * scales.double()
    packed = pack_linear(weight, bias, quantize=True, asymmetric=True)
    out = linear(x, packed)
    torch.testing.assert_close(out.double(), expected + bias.double(), rtol=1e-5, atol=1e-5)
    alone = torch.cat([linear(row[None], packed) for row in x[:: rows // 3 + 1]])
    assert torch.equal(alone, out[:: rows // 3 + 1])
    exact = F.linear(x, (quantized * scales[:, None]).float(), bias)
    both = [linear(x, pack_linear(weight, bias, quantize=True, asymmetric=one)) for one in (True, False)]
    errors = [(one - exact).norm() for one in both]
    assert errors[0] < 0.8 * errors[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_columns_of_activations_are_multiplied_and_those_of_the_weight_divided(
    dtype: torch.dtype, cpu_kernels: str
) -> None:
    x, weight, bias = operands(9, 70, 36, dtype)
    x[:, 5] *= 50
    weight[:, 5] /= 50
    factors = torch.ones(36)
    factors[5] = 1 / 32
    options = {"quantize": True, "asymmetric": True}
    out, plain = (linear(x, pack_linear(weight, bias, column_factors_K=own, **options)) for own in (factors, None))
    assert torch.equal(out, linear(x * factors.to(dtype), pack_linear(weight / factors.to(dtype), bias, **options)))
    exact = F.linear(x.float(), weight.float(), bias.float())
    assert (out - exact).norm() < (plain - exact).norm()
    for wrong in ({"column_factors_K": torch.ones(35), **options}, {"column_factors_K": factors, "quantize": True}):
        with pytest.raises(ValueError, match="column_factors_K"):
            pack_linear(weight, bias, **wrong)


def test_a_zero_point_needs_8_bits(cpu_kernels: str) -> None:
    for options in ({}, {"quantize": True, "activation_bits": 16}):
        with pytest.raises(ValueError, match="asymmetric"):
            pack_linear(torch.ones(32, 32), asymmetric=True, **options)


@pytest.mark.parametrize(("rows", "out_features", "in_features"), SHAPES)
def test_activations_of_16_bits_lose_next_to_nothing(
    rows: int, out_features: int, in_features: int, cpu_kernels: str
) -> None:
    x, weight, bias = operands(rows, out_features, in_features, torch.float32)
    x[0] *= 1e6
    scales = weight.abs().amax(1, keepdim=True) / 127
    expected = F.linear(x.double(), (weight / scales).round().double() * scales.double(), bias.double())
    errors = [
        ((linear(x, pack_linear(weight, bias, quantize=True, activation_bits=bits)) - expected).norm(dim=1)).max()
        / expected.norm(dim=1).max()
        for bits in (8, 16)
    ]
    assert errors[1] < 1e-4 < 1e-3 < errors[0]


def test_activations_of_16_bits_are_gated_too(cpu_kernels: str) -> None:
    x, weight, _ = operands(5, 80, 64, torch.float32)
    weight = (weight * 40).round().clamp(-127, 127)
    weight[:, 0] = 127  # so that the weights' quantisation loses nothing
    out = linear(x, pack_linear(weight, quantize=True, activation_bits=16, gated=True))
    torch.testing.assert_close(out, activate_and_mul(F.linear(x, weight), "silu"), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("bits", [None, 8, 16])
def test_a_row_does_not_depend_on_its_batch(bits: int | None, cpu_kernels: str) -> None:
    if cpu_kernels == "torch":
        pytest.skip("plain torch promises no such thing")
    x, weight, bias = operands(64, 1000, 512, torch.bfloat16)
    packed = pack_linear(weight, bias, quantize=bits is not None, activation_bits=bits or 8)
    together = linear(x, packed, torch.float32)
    alone = torch.cat([linear(row[None], packed, torch.float32) for row in x])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("rows", [1, 15, 17, 32])
def test_a_row_does_not_depend_on_its_batch_behind_the_last_tile(rows: int, cpu_kernels: str) -> None:
    if cpu_kernels == "torch":
        pytest.skip("plain torch promises no such thing")
    x, weight, _ = operands(50, 40, 70, torch.bfloat16)
    packed = pack_linear(weight)
    assert torch.equal(linear(x[-rows:], packed, torch.float32), linear(x, packed, torch.float32)[-rows:])


def test_rows_may_be_strided(cpu_kernels: str) -> None:
    x, weight, _ = operands(7, 48, 96, torch.bfloat16)
    wide = torch.cat((x, x), dim=1)
    assert torch.equal(linear(wide[:, :96], pack_linear(weight)), linear(x, pack_linear(weight)))


@pytest.mark.parametrize(
    ("features", "kind", "gated"),
    pairs(
        product(
            [(8, 4), (64, 100), (70, 72), (514, 2816)],
            ["bfloat16", "float32", "int8", "quantized bfloat16", "quantized float32"],
            [False, True],
        )
    ),
)
def test_every_weight_is_where_the_panels_have_it(
    features: tuple[int, int], kind: str, gated: bool, cpu_kernels: str
) -> None:
    out_features, in_features = features
    if cpu_kernels == "torch":
        pytest.skip("plain torch packs nothing")
    quantize, name = kind.startswith("quantized"), kind.split()[-1]
    weight = torch.randn(out_features, in_features + 8)[:, :in_features] * 50  # rows with gaps between them
    weight = weight.to(getattr(torch, name))
    scales = torch.rand(out_features) if name == "int8" else None
    dtype = None if name != "int8" else torch.float32
    packed = pack_linear(weight, scales_N=scales, dtype=dtype, quantize=quantize, gated=gated)
    if quantize:
        scales = weight.float().abs().amax(1) / 127
        weight = (weight.float() / scales[:, None]).round().to(torch.int8)

    half, places = out_features // 2, [*range(out_features)]
    if gated:  # 16 features of the gate, then 16 of what it gates
        places = [row % half // 16 * 32 + row % half % 16 + row // half * 16 for row in range(out_features)]
    expected = torch.zeros(packed.data.shape[0] * 32, in_features, dtype=weight.dtype)
    expected[places] = weight
    unpacked = packed.data.transpose(1, 2).reshape(-1, in_features)
    assert packed.data.shape[-1] == 4 // weight.itemsize
    assert torch.equal(unpacked, expected)
    if scales is not None:
        assert packed.scales is not None
        assert packed.offsets is not None
        assert torch.equal(packed.scales[places], scales)
        assert torch.equal(packed.offsets, expected.int().sum(1).int() * 128)


@pytest.mark.parametrize("gated", [False, True])
def test_fp8_is_plain_torch(gated: bool, cpu_kernels: str) -> None:
    x, weight, bias = operands(5, 40, 64, torch.float32)
    before = weight.clone()
    packed = pack_linear(weight, bias, quantize=True, quantized_dtype=torch.float8_e4m3fn, gated=gated)
    assert torch.equal(weight, before), "the weight is the caller's"
    rounded = [
        (y / (scales := y.abs().amax(1, keepdim=True) / 448)).to(torch.float8_e4m3fn).double() * scales.double()
        for y in (x, weight)
    ]
    expected = F.linear(rounded[0], rounded[1], bias.double())
    if gated:
        expected = F.silu(expected[:, :20]) * expected[:, 20:]
    torch.testing.assert_close(linear(x, packed).double(), expected, rtol=1e-5, atol=1e-5)
