"""`linear` with adapters, on every instruction set of the machine (see conftest.py), against weights W + B · A."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quire_kernels import (
    GroupedCodes,
    LinearWeight,
    LoraRows,
    LoraTable,
    LoraWeight,
    cpu,
    embedding,
    linear,
    pack_grouped,
    pack_linear,
    pack_lora,
    quantize_grouped,
    record,
    rescale_lora,
    stack_linear,
    weight_rows,
)
from quire_kernels.activation import activate, activate_and_mul
from quire_kernels.lora import shrink

RANKS: Sequence[Sequence[int | None]] = ([16], [1], [8, None, 3], [64, 5, 16], [None, 2], [256, 33], [17, 31, 40])
"""Of each adapter: a rank for each projection, or None."""
#          rows, output features of each projection, input features
SHAPES = [(1, [32], 8), (7, [33], 16), (13, [40, 24, 8], 64), (40, [96, 32, 32], 130), (70, [7, 9], 300), (0, [8], 8)]
KINDS = ("fp32", "bf16", "int8", "int8 of 16 bits", "4 bits", "8 bits", "table", "stack")


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Layer:
    """Projections with adapters in all slots but the last one, which is empty."""

    def __init__(self, sizes: Sequence[int], in_features: int, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(sum(sizes) + in_features)
        self.sizes, self.dtype, self.in_features = list(sizes), dtype, in_features
        self.weight = (self.random(sum(sizes), in_features) * in_features**-0.5).to(dtype)
        self.bias = self.random(sum(sizes)).to(dtype)
        self.empty = len(RANKS)
        self.table = LoraTable(sizes, in_features, dtype, max_loras=self.empty + 1, max_rank=256)
        self.deltas = torch.zeros(self.empty + 2, sum(sizes), in_features, dtype=torch.float64)
        """B · A of each slot; then of no slot."""
        self.scales = torch.ones(self.empty + 2, sum(sizes), dtype=torch.float64)
        for slot, ranks in enumerate(RANKS):
            self.fill(slot, ranks)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def fill(self, slot: int, ranks: Sequence[int | None], is_scaled: bool = False) -> None:
        weights: list[LoraWeight | None] = []
        for i, (size, delta) in enumerate(zip(self.sizes, self.deltas[slot].zero_().split(self.sizes), strict=True)):
            rank = ranks[i % len(ranks)]
            if rank is None:
                weights.append(None)
                continue
            a = (self.random(rank, self.in_features) * self.in_features**-0.5).to(self.dtype)
            b = (self.random(size, rank) * rank**-0.5).to(self.dtype)
            scales = self.random(size).abs() + 0.5 if is_scaled else None
            weights.append(pack_lora(a, b, scaling=2.0, scales_N=scales))
            delta[:] = 2.0 * b.double() @ a.double()
            if scales is not None:
                self.scales[slot].split(self.sizes)[i][:] = scales
        self.table.set_slot(slot, weights)

    def batch(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Activations, and the slot of each row."""
        index = torch.randint(-1, self.empty + 1, (rows,), generator=self.generator)
        return self.random(rows, self.in_features).to(self.dtype), index

    def rows(self, index: torch.Tensor) -> LoraRows:
        return LoraRows(self.table, index)

    def added(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return torch.einsum("tk,tnk->tn", x.double(), self.deltas[index])

    def has_none(self, index: torch.Tensor) -> torch.Tensor:
        return (index == -1) | (index == self.empty)


def pack(layer: Layer, kind: str, **options: Any) -> LinearWeight:
    weight, bias = layer.weight, layer.bias
    if kind == "stack":
        parts = zip(weight.split(layer.sizes), bias.split(layer.sizes), strict=True)
        return stack_linear([pack_linear(one, its, quantize=i == 1) for i, (one, its) in enumerate(parts)])
    if kind.startswith("int8"):
        return pack_linear(weight, bias, quantize=True, activation_bits=16 if "16" in kind else 8, **options)
    if kind in ("4 bits", "8 bits", "table"):
        codes = quantize_grouped(weight, 32)
        if kind == "8 bits":
            wide = torch.randint(0, 256, weight.shape, generator=layer.generator).to(torch.uint8)
            codes = GroupedCodes(codes=wide, bits=8, group_size=32, scales=codes.scales / 16, zero=128)
        if kind == "table":
            table = torch.arange(0, 256, 16).to(torch.uint8)
            dense = torch.randint(0, 16, weight.shape, generator=layer.generator).to(torch.uint8)
            codes = GroupedCodes(codes=dense, bits=4, group_size=32, scales=codes.scales / 16, zero=120, table=table)
        return pack_grouped(codes, bias, dtype=layer.dtype, **options)
    return pack_linear(weight, bias, **options)


def layer_of(kind: str, sizes: Sequence[int], in_features: int) -> Layer:
    return Layer(sizes, in_features, torch.float32 if kind == "fp32" else torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("rows", "sizes", "in_features"), SHAPES, ids=str)
def test_equals_dense_weights(
    rows: int, sizes: list[int], in_features: int, dtype: torch.dtype, cpu_kernels: str
) -> None:
    layer = Layer(sizes, in_features, dtype)
    x, index = layer.batch(rows)
    packed = pack_linear(layer.weight, layer.bias)
    base = linear(x, packed, torch.float32)
    out = linear(x, packed, torch.float32, lora=layer.rows(index))
    expected = F.linear(x.double(), layer.weight.double(), layer.bias.double()) + layer.added(x, index)
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-5  # hidden is rounded
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    has_none = layer.has_none(index)
    assert torch.equal(out[has_none], base[has_none])
    assert rows < 7 or not torch.equal(out, base)
    assert torch.equal(linear(x, packed, torch.float32, lora=layer.rows(torch.full_like(index, -1))), base)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_weight(kind: str, cpu_kernels: str) -> None:
    """What is added is what it is beside any weight; rows without adapter keep their bits."""
    layer = layer_of(kind, [48, 24, 8], 128)
    x, index = layer.batch(37)
    packed = pack(layer, kind)
    base = linear(x, packed, torch.float32)
    out = linear(x, packed, torch.float32, lora=layer.rows(index))
    tolerance = 1e-5 if kind == "fp32" else 3e-2
    torch.testing.assert_close((out - base).double(), layer.added(x, index), rtol=tolerance, atol=tolerance)
    has_none = layer.has_none(index)
    assert torch.equal(out[has_none], base[has_none])
    assert linear(x, packed, lora=layer.rows(index)).dtype == layer.dtype


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_batch(kind: str, cpu_kernels: str) -> None:
    if cpu_kernels == "torch":
        pytest.skip("plain torch promises no such thing")
    layer = layer_of(kind, [48, 24, 8], 128)
    x, index = layer.batch(60)
    index[20:45] = 3  # more than a tile of AMX, one after another
    packed = pack(layer, kind)
    together = linear(x, packed, torch.float32, lora=layer.rows(index))
    alone = [linear(x[i : i + 1], packed, torch.float32, lora=layer.rows(index[i : i + 1])) for i in range(60)]
    assert torch.equal(torch.cat(alone), together)
    order = torch.randperm(60, generator=layer.generator)
    assert torch.equal(linear(x[order], packed, torch.float32, lora=layer.rows(index[order])), together[order])


def test_rows_whose_adapter_leaves_the_layer_alone_are_left_out(cpu_kernels: str) -> None:
    layer = Layer([33], 16, torch.float32)
    x, index = layer.batch(70)
    slots = layer.table.slots
    changed = [i for i, slot in enumerate(index.tolist()) if slot >= 0 and slots[slot] != [None]]
    assert set(index[changed].tolist()) < set(range(layer.empty))
    found = shrink(x, layer.rows(index)).sorted
    if found is None:
        pytest.skip("plain torch sorts no rows")
    assert sorted(found[1 : 1 + int(found[0])].tolist()) == changed


def test_scales_that_are_known_later(cpu_kernels: str) -> None:
    for dtype, rank, size in ((torch.float32, 5, 37), (torch.bfloat16, 16, 64), (torch.bfloat16, 3, 7)):
        a, b, scales = torch.randn(rank, 32).to(dtype), torch.randn(size, rank).to(dtype), torch.rand(size) + 0.5
        weight = pack_lora(a, b.clone(), scales_N=torch.ones(size))
        rescale_lora(weight, scales)
        expected = pack_lora(a, (b * scales[:, None]).to(dtype), scales_N=scales)
        assert all(map(torch.equal, weight.unpacked(), expected.unpacked()))
        assert weight.scales is not None
        assert expected.scales is not None
        assert torch.equal(weight.scales, expected.scales)
    with pytest.raises(ValueError, match="give scales_N to pack_lora"):
        rescale_lora(pack_lora(a, b), scales)


@pytest.mark.parametrize("kind", KINDS)
def test_scales_multiply_the_rest_but_for_the_bias(kind: str, cpu_kernels: str) -> None:
    layer = layer_of(kind, [48, 24, 7, 18], 128)
    x, index = layer.batch(37)
    packed = pack(layer, kind)
    before = linear(x, packed, torch.float32, lora=layer.rows(index))
    for slot in (2, 3, 5):
        layer.fill(slot, RANKS[slot], is_scaled=True)
    base, out = linear(x, packed, torch.float32), linear(x, packed, torch.float32, lora=layer.rows(index))
    bias, scales = layer.bias.double(), layer.scales[index]
    expected = (base.double() - bias) * scales + bias + layer.added(x, index)
    tolerance = 1e-5 if kind == "fp32" else 3e-2
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    is_scaled = (index == 2) | (index == 3) | (index == 5)
    assert is_scaled.any()
    if cpu_kernels == "torch":
        return
    assert torch.equal(out[~is_scaled], before[~is_scaled])
    alone = [linear(x[i : i + 1], packed, torch.float32, lora=layer.rows(index[i : i + 1])) for i in range(37)]
    assert torch.equal(torch.cat(alone), out)


@pytest.mark.parametrize("half", [16, 17, 40])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8", "4 bits"])
def test_scales_come_before_the_gate(kind: str, half: int, cpu_kernels: str) -> None:
    layer = layer_of(kind, [half, half], 64)
    for slot in (0, 4):
        layer.fill(slot, RANKS[slot], is_scaled=True)
    x, index = layer.batch(19)
    bias, sums = layer.bias.double(), linear(x, pack(layer, kind), torch.float32).double()
    sums = (sums - bias) * layer.scales[index] + bias + layer.added(x, index)
    out = linear(x, pack(layer, kind, gated=True), torch.float32, lora=layer.rows(index))
    tolerance = 1e-4 if kind == "fp32" else 8e-2
    torch.testing.assert_close(out, activate_and_mul(sums.float(), "silu"), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("half", [16, 17, 40])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8", "4 bits"])
def test_rows_of_a_packed_weight_are_found(kind: str, gated: bool, half: int, cpu_kernels: str) -> None:
    layer = layer_of(kind, [half, half], 64)
    packed, ids = pack(layer, kind, gated=gated), torch.randperm(2 * half)
    rows = embedding(weight_rows(packed, ids), packed).float()
    error = (rows - layer.weight[ids].float()).norm() / layer.weight.float().norm()
    assert error <= {"fp32": 0, "bf16": 0, "int8": 1e-2, "4 bits": 0.15}[kind]


@pytest.mark.parametrize("half", [16, 17, 40])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8", "4 bits"])
def test_adapters_come_before_the_gate(kind: str, half: int, cpu_kernels: str) -> None:
    layer = layer_of(kind, [half, half], 64)
    x, index = layer.batch(19)
    sums = linear(x, pack(layer, kind), torch.float32).double() + layer.added(x, index)
    packed = pack(layer, kind, gated=True)
    out = linear(x, packed, torch.float32, lora=layer.rows(index))
    tolerance = 1e-4 if kind == "fp32" else 8e-2
    torch.testing.assert_close(out, activate_and_mul(sums.float(), "silu"), rtol=tolerance, atol=tolerance)
    has_none = layer.has_none(index)
    assert torch.equal(out[has_none], linear(x, packed, torch.float32)[has_none])


def test_adapters_come_before_the_activation(cpu_kernels: str) -> None:
    layer = Layer([40, 24], 64, torch.float32)
    x, index = layer.batch(19)
    sums = linear(x, pack_linear(layer.weight, layer.bias)).double() + layer.added(x, index)
    packed = pack_linear(layer.weight, layer.bias, activates=True, activation="gelu")
    out = linear(x, packed, lora=layer.rows(index))
    torch.testing.assert_close(out, activate(sums.float(), "gelu"), rtol=1e-4, atol=1e-4)


def test_many_rows(cpu_kernels: str) -> None:
    """Several blocks of rows, and more of one adapter than a thread takes at a time."""
    layer = Layer([40], 1024, torch.bfloat16)
    x, index = layer.batch(450)
    index[100:400] = 0
    packed = pack_linear(layer.weight)
    out = linear(x, packed, torch.float32, lora=layer.rows(index))
    base = linear(x, packed, torch.float32)
    torch.testing.assert_close((out - base).double(), layer.added(x, index), rtol=3e-2, atol=3e-2)


def test_a_head_with_more_output_features(cpu_kernels: str) -> None:
    """A rank's slice of a vocabulary may have padding behind it; activations may be strided."""
    layer = Layer([70], 64, torch.bfloat16)
    x, index = layer.batch(5)
    wide, packed = torch.cat((x, x), 1), pack_linear(F.pad(layer.weight, (0, 0, 0, 26)))
    out = linear(wide[:, :64], packed, torch.float32, lora=layer.rows(index))
    base = linear(x, packed, torch.float32)
    assert torch.equal(out[:, 70:], base[:, 70:])
    torch.testing.assert_close((out - base)[:, :70].double(), layer.added(x, index), rtol=3e-2, atol=3e-2)


def test_a_may_multiply_other_columns(cpu_kernels: str) -> None:
    """Of a weight whose columns are in an order of their own."""
    layer = Layer([40], 64, torch.float32)
    x, index = layer.batch(9)
    order = torch.randperm(64, generator=layer.generator)
    out = linear(x[:, order], pack_linear(layer.weight[:, order]), lora=layer.rows(index), lora_x_TK=x)
    torch.testing.assert_close(out, linear(x, pack_linear(layer.weight), lora=layer.rows(index)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_recordings_follow_the_slots(kind: str, cpu_kernels: str) -> None:
    if cpu_kernels == "torch":
        pytest.skip("plain torch is not recorded")
    layer = layer_of(kind, [48, 24, 8], 128)
    packed, size = pack(layer, kind), 24
    given, index = torch.empty(size, 128, dtype=layer.dtype), torch.full((size,), -1)
    with record(size) as recording:
        out = linear(given, packed, torch.float32, lora=layer.rows(index))
    for step, rows in enumerate((1, size, 17, 17, 5)):
        x, slots = layer.batch(rows)
        layer.fill(step % layer.empty, RANKS[(step + 3) % len(RANKS)])
        if step == 3:
            slots[:] = -1
        given[:rows], index[:rows] = x, slots
        recording.run(rows)
        assert torch.equal(out[:rows], linear(x, packed, torch.float32, lora=layer.rows(slots)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rank", [1, 15, 16, 33, 64])
def test_what_is_packed_can_be_unpacked(rank: int, dtype: torch.dtype, cpu_kernels: str) -> None:
    a, b = torch.randn(rank, 70).to(dtype), torch.randn(37, rank).to(dtype)
    packed = pack_lora(a, b)
    assert all(torch.equal(one, other) for one, other in zip(packed.unpacked(), (a, b), strict=True))
    assert packed.is_packed == (cpu_kernels != "torch")
    assert packed.num_bytes >= a.nbytes + b.nbytes


@pytest.mark.parametrize("in_features", [33, 34])
def test_weights_without_a_kernel(in_features: int, cpu_kernels: str) -> None:
    """Odd columns of bfloat16, and columns of int8 that fill no 32 bits, beside adapters that may be packed."""
    layer = Layer([40, 24], in_features, torch.bfloat16)
    x, index = layer.batch(19)
    packed = pack_linear(layer.weight, layer.bias, quantize=True)
    base, out = linear(x, packed, torch.float32), linear(x, packed, torch.float32, lora=layer.rows(index))
    torch.testing.assert_close((out - base).double(), layer.added(x, index), rtol=3e-2, atol=3e-2)
    has_none = layer.has_none(index)
    assert torch.equal(out[has_none], base[has_none])


def test_threads_share_the_work(cpu_kernels: str) -> None:
    layer = Layer([96, 64, 64], 512, torch.bfloat16)
    x, index = layer.batch(40)
    packed, threads = pack_linear(layer.weight), cpu.get_num_threads()
    results = []
    try:
        for count in (1, 4):
            cpu.set_num_threads(count)
            results.append(linear(x, packed, lora=layer.rows(index)))
    finally:
        cpu.set_num_threads(threads)
    assert torch.equal(*results)


def test_what_does_not_fit_is_rejected() -> None:
    def pair(rank: int = 4, size: int = 8, columns: int = 16, dtype: torch.dtype = torch.float32) -> LoraWeight:
        return pack_lora(torch.zeros(rank, columns, dtype=dtype), torch.zeros(size, rank, dtype=dtype))

    with pytest.raises(ValueError, match=r"A has rank 257; it must be between 1 and 256"):
        pair(257)
    with pytest.raises(ValueError, match=r"A is \[4, 16\] beside B of \[8, 5\]"):
        pack_lora(torch.zeros(4, 16), torch.zeros(8, 5))
    with pytest.raises(TypeError, match="they must match"):
        pack_lora(torch.zeros(4, 16), torch.zeros(8, 4, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"scales are torch.float32 \[7\] on cpu; they must be torch.float32 \[8\]"):
        pack_lora(torch.zeros(4, 16), torch.zeros(8, 4), scales_N=torch.ones(7))
    with pytest.raises(ValueError, match="max_rank is 300"):
        LoraTable([8], 16, torch.float32, max_loras=1, max_rank=300)
    with pytest.raises(ValueError, match="max_loras is 0"):
        LoraTable([8], 16, torch.float32, max_loras=0)
    table = LoraTable([8], 16, torch.float32, max_loras=2, max_rank=8)
    with pytest.raises(ValueError, match="slot is 2; it must be at least 0 and below max_loras, 2"):
        table.set_slot(2, [pair()])
    with pytest.raises(ValueError, match="one for each projection"):
        table.set_slot(0, [pair(), None])
    with pytest.raises(ValueError, match=r"\[9, 16\]; it must be of \[8, 16\]"):
        table.set_slot(0, [pair(size=9)])
    with pytest.raises(ValueError, match="rank 9; it must be at most max_rank, 8"):
        table.set_slot(0, [pair(9)])
    with pytest.raises(TypeError, match=r"must be torch\.float32"):
        table.set_slot(0, [pair(dtype=torch.bfloat16)])
    packed, x = pack_linear(torch.zeros(8, 16)), torch.zeros(3, 16)
    with pytest.raises(ValueError, match=r"slots of rows are torch\.int32 \[3\]"):
        linear(x, packed, lora=LoraRows(table, torch.zeros(3, dtype=torch.int32)))
    with pytest.raises(ValueError, match=r"are torch\.int64 \[2\]; they must be torch\.int64 \[3\]"):
        linear(x, packed, lora=LoraRows(table, torch.zeros(2, dtype=torch.int64)))
    with pytest.raises(ValueError, match="the weight has 7"):
        linear(x, pack_linear(torch.zeros(7, 16)), lora=LoraRows(table, torch.zeros(3, dtype=torch.int64)))
