"""`linear` with adapters, on every instruction set of the machine (see conftest.py), against dense weights W + B · A."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from quire_kernels import LoraRows, LoraTable, LoraWeight, linear, pack_linear, pack_lora
from quire_kernels.activation import activate, activate_and_mul

RANKS = ([16], [1], [8, None, 3], [64, 5, 16], [None, 2], [256])
"""Of an adapter: a rank for each projection, or None."""


def make_pair(rank: int, size: int, in_features: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    a = torch.randn(rank, in_features, generator=generator) * in_features**-0.5
    return a, torch.randn(size, rank, generator=generator) * rank**-0.5


class Layer:
    """Projections with adapters in all slots but the last one, which is empty."""

    def __init__(self, sizes: Sequence[int], in_features: int, dtype: torch.dtype, max_loras: int = 5) -> None:
        self.generator = torch.Generator().manual_seed(sum(sizes) + in_features)
        self.sizes, self.dtype = sizes, dtype
        self.weight = (torch.randn(sum(sizes), in_features, generator=self.generator) * in_features**-0.5).to(dtype)
        self.bias = torch.randn(sum(sizes), generator=self.generator).to(dtype)
        self.table = LoraTable(sizes, in_features, dtype, max_loras=max_loras, max_rank=256)
        self.deltas = torch.zeros(max_loras + 1, sum(sizes), in_features, dtype=torch.float64)
        """B · A of each slot; then of no slot."""
        for slot in range(max_loras - 1):
            self.fill(slot, RANKS[slot % len(RANKS)])

    def fill(self, slot: int, ranks: Sequence[int | None]) -> None:
        weights: list[LoraWeight | None] = []
        deltas = self.deltas[slot].zero_().split(list(self.sizes))
        for i, (size, delta) in enumerate(zip(self.sizes, deltas, strict=True)):
            rank = ranks[i % len(ranks)]
            if rank is None:
                weights.append(None)
                continue
            pair = (one.to(self.dtype) for one in make_pair(rank, size, self.weight.shape[1], self.generator))
            a, b = pair
            weights.append(pack_lora(a, b, scaling=2.0))
            delta[:] = 2.0 * b.double() @ a.double()
        self.table.set_slot(slot, weights)

    def rows(self, index: torch.Tensor) -> LoraRows:
        return LoraRows(self.table, index)

    def expected(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        base = F.linear(x.double(), self.weight.double(), self.bias.double())
        return base + torch.einsum("tk,tnk->tn", x.double(), self.deltas[index])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "sizes", "in_features"),
    [(1, [32], 8), (7, [33], 16), (13, [40, 24, 8], 64), (40, [96, 32, 32], 130), (200, [7, 9], 300), (0, [8], 8)],
)
def test_equals_dense_weights(
    rows: int, sizes: list[int], in_features: int, dtype: torch.dtype, cpu_kernels: str
) -> None:
    layer = Layer(sizes, in_features, dtype)
    x = torch.randn(rows, in_features, generator=layer.generator).to(dtype)
    index = torch.randint(-1, layer.table.max_loras, (rows,), generator=layer.generator)
    packed = pack_linear(layer.weight, layer.bias)
    out = linear(x, packed, torch.float32, lora=layer.rows(index))
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(out.double(), layer.expected(x, index), rtol=tolerance, atol=tolerance)
    base = (index == -1) | (index == layer.table.max_loras - 1)
    assert torch.equal(out[base], linear(x, packed, torch.float32)[base])
    if rows > 1:
        assert not torch.equal(out, linear(x, packed, torch.float32))


@pytest.mark.parametrize("kind", ["gated", "activates"])
def test_adapters_come_before_the_activation(kind: str, cpu_kernels: str) -> None:
    layer = Layer([40, 40], 64, torch.float32)
    x = torch.randn(9, 64, generator=layer.generator)
    index = torch.tensor([0, -1, 2, 3, 2, 1, 4, 0, -1])
    out = linear(x, pack_linear(layer.weight, layer.bias, **{kind: True}), lora=layer.rows(index))
    apply = activate_and_mul if kind == "gated" else activate
    torch.testing.assert_close(out, apply(layer.expected(x, index).float(), "silu"), rtol=1e-4, atol=1e-4)
