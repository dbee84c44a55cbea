"""`linear` with adapters, against dense weights W + B · A in float64."""

import pytest
import torch
import torch.nn.functional as F
from quire_kernels import LoraRows, LoraTable, LoraWeight, linear, pack_linear, pack_lora, stack_linear
from quire_kernels.activation import activate_and_mul

#          rows, output features of each projection, input features
SHAPES = [(1, [32], 64), (21, [40, 24, 8], 96), (40, [100, 7], 300), (0, [8], 32)]
RANKS: list[list[int | None]] = [[16, 3, 1], [8, None, 40], [None, None, None], [2, 64, 20]]
"""Of each slot and projection."""


class Layer:
    """Projections with adapters in some of four slots."""

    def __init__(self, sizes: list[int], in_features: int, dtype: torch.dtype, device: torch.device) -> None:
        self.generator, self.device, self.dtype = torch.Generator().manual_seed(sum(sizes)), device, dtype
        self.sizes, self.in_features = sizes, in_features
        self.weight, self.bias = self.random(sum(sizes), in_features), self.random(sum(sizes), 1)[:, 0]
        self.table = LoraTable(sizes, in_features, dtype, max_loras=len(RANKS), device=device)
        self.deltas = torch.zeros(len(RANKS) + 1, sum(sizes), in_features, dtype=torch.float64, device=device)
        """B · A of each slot; then of no slot."""
        for slot in range(len(RANKS)):
            self.fill(slot, RANKS[slot])

    def random(self, *shape: int) -> torch.Tensor:
        numbers = torch.randn(*shape, generator=self.generator) * shape[-1] ** -0.5
        return numbers.to(self.device, self.dtype)

    def fill(self, slot: int, ranks: list[int | None]) -> None:
        weights: list[LoraWeight | None] = []
        for size, rank, delta in zip(self.sizes, ranks, self.deltas[slot].split(self.sizes), strict=False):
            a, b = (None, None) if rank is None else (self.random(rank, self.in_features), self.random(size, rank))
            weights.append(None if a is None or b is None else pack_lora(a, b, scaling=2.0))
            delta[:] = 0.0 if a is None or b is None else 2.0 * b.double() @ a.double()
        self.table.set_slot(slot, weights)

    def index(self, rows: int) -> torch.Tensor:
        return torch.randint(-1, len(RANKS), (rows,), generator=self.generator).to(self.device)

    def expected(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        base = F.linear(x.double(), self.weight.double(), self.bias.double())
        return base + torch.einsum("tk,tnk->tn", x.double(), self.deltas[index])


@pytest.mark.parametrize(("rows", "sizes", "in_features"), SHAPES, ids=str)
def test_equals_dense_weights(
    rows: int, sizes: list[int], in_features: int, dtype: torch.dtype, device: torch.device, tolerance: dict[str, float]
) -> None:
    layer = Layer(sizes, in_features, dtype, device)
    x, index = layer.random(rows, in_features) * in_features**0.5, layer.index(rows)
    packed = pack_linear(layer.weight, layer.bias)
    out = linear(x, packed, lora=LoraRows(layer.table, index))
    tolerance = {name: 4 * value for name, value in tolerance.items()}  # hidden is rounded too
    torch.testing.assert_close(out.double(), layer.expected(x, index), **tolerance)
    assert torch.equal(out[index < 0], linear(x, packed)[index < 0])


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_quantised_weights(gated: bool, kind: torch.dtype, device: torch.device) -> None:
    layer = Layer([40, 40], 96, torch.bfloat16, device)
    x, index = layer.random(21, 96) * 10, layer.index(21)
    packed = pack_linear(layer.weight, layer.bias, quantize=True, quantized_dtype=kind, gated=gated)
    plain = pack_linear(layer.weight, layer.bias, quantize=True, quantized_dtype=kind)
    out = linear(x, packed, torch.float32, lora=LoraRows(layer.table, index))
    expected = linear(x, plain, torch.float32) + torch.einsum("tk,tnk->tn", x.double(), layer.deltas[index]).float()
    expected = activate_and_mul(expected, "silu") if gated else expected
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    assert torch.equal(out[index < 0], linear(x, packed, torch.float32)[index < 0])


def test_the_gate_of_a_weight_that_is_not_quantised(device: torch.device) -> None:
    layer = Layer([33, 33], 64, torch.float32, device)
    x, index = layer.random(9, 64) * 8, layer.index(9)
    out = linear(x, pack_linear(layer.weight, layer.bias, gated=True), lora=LoraRows(layer.table, index))
    expected = activate_and_mul(layer.expected(x, index).float(), "silu")
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_a_row_does_not_depend_on_its_batch(device: torch.device, dtype: torch.dtype) -> None:
    """Nor on what it stands beside; plain torch multiplies by the weight, so what is added is compared."""
    layer = Layer([40, 24, 8], 96, dtype, device)
    x, index = layer.random(50, 96) * 10, layer.index(50)
    zeros = pack_linear(torch.zeros_like(layer.weight))
    together = linear(x, zeros, lora=LoraRows(layer.table, index))
    for rows in (slice(0, 1), slice(3, 20), slice(17, 50)):
        assert torch.equal(linear(x[rows], zeros, lora=LoraRows(layer.table, index[rows])), together[rows])
    order = torch.randperm(50, generator=layer.generator).to(device)
    assert torch.equal(linear(x[order], zeros, lora=LoraRows(layer.table, index[order])), together[order])


def test_slots_change(device: torch.device) -> None:
    layer = Layer([40, 24, 8], 96, torch.float32, device)
    x, index = layer.random(12, 96), torch.arange(12, device=device) % len(RANKS)
    addresses = [one.data_ptr() for one in (layer.table.pairs, layer.table.ends)]
    layer.fill(0, [2, None, 33])
    packed = pack_linear(layer.weight, layer.bias)
    rows = LoraRows(layer.table, index)
    torch.testing.assert_close(linear(x, packed, lora=rows).double(), layer.expected(x, index), rtol=1e-4, atol=1e-4)
    layer.table.clear_slot(0)
    cleared = linear(x, packed, lora=rows)
    assert torch.equal(cleared[index == 0], linear(x, packed)[index == 0])
    assert [one.data_ptr() for one in (layer.table.pairs, layer.table.ends)] == addresses


def test_a_stack_of_weights(device: torch.device) -> None:
    layer = Layer([40, 24, 8], 96, torch.float32, device)
    x, index = layer.random(12, 96), layer.index(12)
    parts = zip(layer.weight.split(layer.sizes), layer.bias.split(layer.sizes), strict=True)
    stacked = stack_linear([pack_linear(weight, bias) for weight, bias in parts])
    out = linear(x, stacked, lora=LoraRows(layer.table, index))
    torch.testing.assert_close(out.double(), layer.expected(x, index), rtol=1e-4, atol=1e-4)
