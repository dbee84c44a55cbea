"""`linear` over quantised weights, and the quantisation of activations, against float64."""

import pytest
import torch
import torch.nn.functional as F
from quire_kernels import head_linear, linear, pack_head_linear, pack_linear

#         T  N  K: one token, odd shapes, several tiles of tokens and of features
SHAPES = [(1, 32, 64), (3, 33, 48), (17, 100, 300), (70, 40, 2050), (140, 300, 96), (0, 8, 32)]
KINDS = pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])


def quantized(x: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers and scales, by definition; on the CPU, where torch divides by a number as it is written."""
    device, x = x.device, x.cpu()
    scales = x.float().abs().amax(1, keepdim=True).clamp(min=1e-10) / (127 if kind == torch.int8 else 448)
    numbers = x.float() / scales
    numbers = numbers.round() if kind == torch.int8 else numbers.to(kind)
    return numbers.double().to(device), scales.double().to(device)


def operands(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    rows, out_features, in_features = shape
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(rows, in_features, generator=generator)
    weight = torch.randn(out_features, in_features, generator=generator) * in_features**-0.5
    bias = torch.randn(out_features, generator=generator)
    return x.to(device, dtype), weight.to(device, dtype), bias.to(device, dtype)


@KINDS
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear(shape: tuple[int, int, int], gated: bool, kind: torch.dtype, device: torch.device) -> None:
    if gated:
        shape = (shape[0], 2 * (shape[1] // 2), shape[2])
    x, weight, bias = operands(shape, torch.bfloat16, device)
    packed = pack_linear(weight, bias, quantize=True, quantized_dtype=kind, gated=gated)
    assert packed.data.dtype == kind
    out = linear(x, packed, torch.float32)
    (x8, x_scales), (weight8, weight_scales) = quantized(x, kind), quantized(weight, kind)
    expected = (x8 @ weight8.t()) * x_scales * weight_scales.t() + bias.double()
    exact = F.linear(x.double(), weight.double(), bias.double())
    if gated:
        expected, exact = (F.silu(y[:, : y.shape[1] // 2]) * y[:, y.shape[1] // 2 :] for y in (expected, exact))
    tolerance = 1e-3 if kind != torch.int8 and device.type == "cuda" else 1e-5  # few bits within the tensor cores
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    if len(x):
        assert (out - exact).norm() / exact.norm() < (0.02 if kind == torch.int8 else 0.06)


@KINDS
def test_a_gate_of_another_activation(kind: torch.dtype, device: torch.device) -> None:
    x, weight, _ = operands((5, 34, 64), torch.bfloat16, device)
    packed = pack_linear(weight, quantize=True, quantized_dtype=kind, gated=True, activation="gelu_tanh")
    both = linear(x, pack_linear(weight, quantize=True, quantized_dtype=kind), torch.float32)
    expected = F.gelu(both[:, :17], approximate="tanh") * both[:, 17:]
    torch.testing.assert_close(linear(x, packed, torch.float32), expected, rtol=1e-5, atol=1e-5)


@KINDS
def test_the_result_is_rounded_once(kind: torch.dtype, device: torch.device, dtype: torch.dtype) -> None:
    x, weight, bias = operands((5, 40, 64), dtype, device)
    packed = pack_linear(weight, bias, quantize=True, quantized_dtype=kind)
    assert torch.equal(linear(x, packed), linear(x, packed, torch.float32).to(dtype))
    wide = torch.cat((x, x), dim=1)
    assert torch.equal(linear(wide[:, :64], packed), linear(x, packed)), "rows may be strided"


@KINDS
def test_weights_may_be_quantised_already(kind: torch.dtype, device: torch.device) -> None:
    x, weight, _ = operands((4, 40, 64), torch.bfloat16, device)
    numbers, scales = quantized(weight, kind)
    packed = pack_linear(numbers.to(kind), scales_N=scales[:, 0].float(), dtype=torch.bfloat16)
    again = pack_linear(weight, quantize=True, quantized_dtype=kind)
    assert torch.equal(linear(x, packed), linear(x, again))


@KINDS
def test_a_row_does_not_depend_on_its_batch(kind: torch.dtype, device: torch.device) -> None:
    x, weight, _ = operands((80, 70, 300), torch.bfloat16, device)
    packed = pack_linear(weight, quantize=True, quantized_dtype=kind)
    together = linear(x, packed, torch.float32)
    for rows in (slice(0, 1), slice(3, 20), slice(10, 74)):
        assert torch.equal(linear(x[rows], packed, torch.float32), together[rows])


def test_activations_are_rounded_to_the_nearest_even(device: torch.device) -> None:
    from quire_kernels.gpu.linear import quantize_per_token

    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0, 0.0], [0.0] * 8], device=device)
    out, scales = quantize_per_token(x, torch.int8)
    assert out.tolist() == [[127, 0, 2, 2, 0, -2, -127, 0], [0] * 8]
    assert scales.tolist() == pytest.approx([1.0, 1e-10 / 127])
    x = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)).to(device)
    out, scales = quantize_per_token(x, torch.float8_e4m3fn)
    assert torch.equal(out.float(), (x / scales[:, None]).to(torch.float8_e4m3fn).float())


def test_weights_that_are_not_quantised_are_those_of_torch(device: torch.device, dtype: torch.dtype) -> None:
    x, weight, bias = operands((5, 40, 64), dtype, device)
    assert torch.equal(linear(x, pack_linear(weight, bias)), F.linear(x, weight, bias))


def test_a_linear_for_each_head(device: torch.device, dtype: torch.dtype, tolerance: dict[str, float]) -> None:
    x, weight = torch.randn(5, 3, 12).to(device, dtype), torch.randn(3, 33, 12).to(device, dtype) * 12**-0.5
    out = head_linear(x, pack_head_linear(weight))
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), torch.einsum("thk,hnk->thn", x.double(), weight.double()), **tolerance)
