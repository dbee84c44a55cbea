"""`topk_softmax` and `routed_experts`, on every instruction set of the machine, against plain torch and `linear`."""

from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F
from quire_kernels import (
    ExpertsLora,
    LoraRows,
    LoraTable,
    LoraWeight,
    cpu,
    expert_results,
    grouped_topk,
    linear,
    pack_experts,
    pack_linear,
    pack_lora,
    record,
    routed_experts,
    sum_results,
    topk_softmax,
)
from quire_kernels.experts import ExpertsWeight
from transformers.models.phimoe.modeling_phimoe import sparsemixer

#         T   X  K   E    I: one token, odd shapes, several tiles per expert, more tokens than are sorted at once
SHAPES = [(1, 3, 1, 8, 4), (5, 6, 2, 36, 20), (70, 4, 3, 64, 100), (600, 9, 2, 16, 8)]
KINDS = pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8 float32", "int8 bfloat16"])


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def identity(num_experts: int) -> torch.Tensor:
    return torch.arange(num_experts)


class Layer:
    """Experts, and tokens that a router has divided among them."""

    def __init__(
        self, shape: tuple[int, int, int, int, int], kind: str, biased: bool = False, activation: str = "silu"
    ) -> None:
        tokens, self.num_experts, top_k, hidden, size = shape
        dtype = getattr(torch, kind.split()[-1])
        gated = activation != "relu2"
        self.gate_up = randn(self.num_experts, (2 if gated else 1) * size, hidden, dtype=dtype) * hidden**-0.5
        self.down = randn(self.num_experts, hidden, size, dtype=dtype) * size**-0.5
        quantize, self.activation = kind.startswith("int8"), activation
        self.biases = [
            randn(len(one), one.shape[1], dtype=dtype) * 4 if biased else [None] * len(one)
            for one in (self.gate_up, self.down)
        ]
        self.packed = [
            [
                pack_linear(one, bias, quantize=quantize, activation=activation, **options)
                for one, bias in zip(each, biases, strict=True)
            ]
            for each, biases, options in (
                (self.gate_up, self.biases[0], {"gated": gated, "activates": not gated}),
                (self.down, self.biases[1], {}),
            )
        ]
        self.x = randn(tokens, hidden, dtype=dtype)
        self.weights, self.ids = topk_softmax(randn(tokens, self.num_experts), top_k, renormalize=False)

    def experts(self, expert_map: torch.Tensor | None = None) -> ExpertsWeight:
        gate_up, down = self.packed
        if expert_map is None:
            return pack_experts(gate_up, down, identity(self.num_experts))
        here = [int(torch.nonzero(expert_map == place)) for place in range(int(expert_map.max()) + 1)]
        return pack_experts([gate_up[i] for i in here], [down[i] for i in here], expert_map)

    def exact(self) -> torch.Tensor:
        """In float64, without any rounding."""
        out = torch.zeros(self.x.shape, dtype=torch.float64)
        for expert in range(self.num_experts):
            tokens, places = torch.where(self.ids == expert)
            hidden = self._linear(0, expert, self.x[tokens].double())
            gate, up = hidden.chunk(2, -1)
            if self.activation == "silu":
                hidden = F.silu(gate) * up
            elif self.activation == "relu2":
                hidden = F.relu(hidden).square()
            else:
                gate = gate.clamp(max=7)
                hidden = (up.clamp(-7, 7) + 1) * gate * torch.sigmoid(1.702 * gate)
            out.index_add_(0, tokens, self.weights[tokens, places, None].double() * self._linear(1, expert, hidden))
        return out

    def _linear(self, which: int, expert: int, x: torch.Tensor) -> torch.Tensor:
        out, bias = x @ (self.gate_up, self.down)[which][expert].double().T, self.biases[which][expert]
        return out if bias is None else out + bias.double()


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("tokens", "num_experts", "top_k"), [(1, 1, 1), (5, 7, 3), (33, 128, 8), (4, 60, 20)])
def test_the_likeliest_experts(tokens: int, num_experts: int, top_k: int, renormalize: bool, cpu_kernels: str) -> None:
    logits = randn(tokens, num_experts) * 3
    weights, ids = topk_softmax(logits, top_k, renormalize)
    expected = torch.sort(logits.double().softmax(1), dim=1, descending=True, stable=True)
    likeliest = expected.values[:, :top_k]
    assert torch.equal(ids, expected.indices[:, :top_k])
    likeliest = likeliest / likeliest.sum(1, keepdim=True) if renormalize else likeliest
    torch.testing.assert_close(weights.double(), likeliest, rtol=1e-6, atol=1e-7)


def test_weights_are_scaled_by_expert(cpu_kernels: str) -> None:
    logits, scale = randn(9, 21), randn(21)
    plain, ids = topk_softmax(logits, 5, renormalize=True)
    weights, same_ids = topk_softmax(logits, 5, renormalize=True, scale_X=scale)
    assert torch.equal(ids, same_ids)
    assert torch.equal(weights, plain * scale[ids])


@pytest.mark.parametrize("jitter", [0.01, 0.2])
def test_weights_of_sparse_mixer_are_those_of_phimoe(jitter: float, cpu_kernels: str) -> None:
    logits = randn(60, 16)
    weights, ids = topk_softmax(logits, 2, renormalize=False, jitter=jitter)
    expected, expected_ids = sparsemixer(logits, jitter_eps=jitter, training=False)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=2e-6, atol=0)
    assert ((weights > 0.5) & (weights < 1)).any(), "no expert was near to another"


def test_of_equal_logits_the_lower_id_comes_first(cpu_kernels: str) -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 2.0, 1.0], [0.0] * 6])
    weights, ids = topk_softmax(logits, 4, renormalize=True)
    assert ids.tolist() == [[1, 3, 4, 0], [0, 1, 2, 3]]
    assert weights[1].tolist() == [0.25] * 4


def test_ids_are_valid_whatever_the_logits(cpu_kernels: str) -> None:
    nan = float("nan")
    logits = torch.tensor([[nan] * 4, [1.0, nan, nan, 0.0], [float("-inf")] * 4, [-1e30, 1e30, 3.0, 2.0]])
    weights, ids = topk_softmax(logits, 3, renormalize=False)
    assert all(sorted(set(row)) == sorted(row) and set(row) <= {0, 1, 2, 3} for row in ids.tolist())
    assert weights[:3].isnan().all(), "a token that is not finite is not hidden"
    assert weights[3].tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    ("num_experts", "num_groups", "top_groups", "top_k"), [(6, 1, 1, 4), (12, 4, 2, 5), (64, 8, 3, 8), (5, 5, 3, 3)]
)
def test_the_best_experts_of_the_best_groups(
    num_experts: int, num_groups: int, top_groups: int, top_k: int, scoring: str, cpu_kernels: str
) -> None:
    logits, bias = randn(17, num_experts) * 2, randn(num_experts) * 0.3 if scoring == "sigmoid" else None
    weights, ids = grouped_topk(
        logits, top_k, scoring == "sigmoid", num_groups=num_groups, top_groups=top_groups, scoring=scoring,
        bias_X=bias, scale=2.5,
    )  # fmt: skip
    size = num_experts // num_groups
    for row, own_weights, own_ids in zip(logits.double(), weights, ids.tolist(), strict=True):
        scores = row.softmax(0) if scoring == "softmax" else row.sigmoid()
        keys = (scores if bias is None else scores + bias.double()).tolist()
        worth = [
            sum(sorted(keys[group * size : (group + 1) * size])[-2 if scoring == "sigmoid" else -1 :])
            for group in range(num_groups)
        ]
        best = sorted(range(num_groups), key=lambda group: -worth[group])[:top_groups]
        inside = [expert for expert in range(num_experts) if expert // size in best]
        assert own_ids == sorted(inside, key=lambda expert: -keys[expert])[:top_k]
        chosen = scores[own_ids]
        chosen = chosen / chosen.sum() if scoring == "sigmoid" else chosen
        torch.testing.assert_close(own_weights.double(), 2.5 * chosen, rtol=1e-5, atol=1e-7)


def test_ids_of_groups_are_valid_whatever_the_logits(cpu_kernels: str) -> None:
    nan = float("nan")
    logits = torch.tensor([[nan] * 4, [1.0, nan, nan, 0.0], [-1e30, 1e30, 3.0, 2.0]])
    weights, ids = grouped_topk(logits, 2, True, num_groups=2, top_groups=1, scoring="softmax")
    assert all(row in ([0, 1], [1, 0], [2, 3], [3, 2]) for row in ids.tolist())
    assert weights[:2].isnan().all(), "a token that is not finite is not hidden"
    assert weights[2].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("tokens", [1, 600])
def test_tokens_are_counted_by_expert_on_top_of_earlier_ones(tokens: int, cpu_kernels: str) -> None:
    logits, counts = randn(tokens, 12), torch.arange(12)
    chosen = [
        topk_softmax(logits, 3, renormalize=False, counts_X=counts)[1],
        grouped_topk(logits, 2, True, num_groups=4, top_groups=2, scoring="sigmoid", counts_X=counts)[1],
    ]
    expected = torch.arange(12) + torch.cat([ids.flatten() for ids in chosen]).bincount(minlength=12)
    assert counts.tolist() == expected.tolist()


@KINDS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_torch(shape: tuple[int, int, int, int, int], kind: str, cpu_kernels: str) -> None:
    layer = Layer(shape, kind)
    out = routed_experts(layer.x, layer.weights, layer.ids, layer.experts())
    assert out.dtype == layer.x.dtype
    exact = layer.exact()
    tolerance = {"float32": 1e-5, "bfloat16": 2e-2}.get(kind, 5e-2)
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)
    assert (out - exact).norm() / exact.norm() < tolerance


@pytest.mark.parametrize("activation", ["swigluoai", "relu2"])
@KINDS
def test_experts_with_biases_and_another_gate_or_none(kind: str, activation: str, cpu_kernels: str) -> None:
    layer = Layer((70, 4, 3, 64, 100), kind, biased=True, activation=activation)
    out, exact = routed_experts(layer.x, layer.weights, layer.ids, layer.experts()), layer.exact()
    tolerance = {"float32": 1e-5, "bfloat16": 2e-2}.get(kind, 5e-2)
    assert (out - exact).norm() / exact.norm() < tolerance
    if cpu_kernels != "torch":
        alone = [
            routed_experts(layer.x[i, None], layer.weights[i, None], layer.ids[i, None], layer.experts())
            for i in range(0, 70, 9)
        ]
        assert torch.equal(out[::9], torch.cat(alone))


@KINDS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_has_the_bits_of_each_tokens_own_linears(
    shape: tuple[int, int, int, int, int], kind: str, cpu_kernels: str
) -> None:
    if cpu_kernels == "torch":
        pytest.skip("plain torch promises no such thing")
    layer = Layer(shape, kind)
    together = routed_experts(layer.x, layer.weights, layer.ids, layer.experts())
    gate_up, down = layer.packed
    for token in range(0, len(layer.x), 7):
        row, total = layer.x[token : token + 1], torch.zeros(1, layer.x.shape[1])
        for weight, expert in zip(layer.weights[token].tolist(), layer.ids[token].tolist(), strict=True):
            result = linear(linear(row, gate_up[expert]), down[expert], torch.float32)
            total = torch.from_numpy((total.double() + weight * result.double()).numpy()).float()  # a fused one
        assert torch.equal(together[token : token + 1], total.to(layer.x.dtype))
        alone = routed_experts(row, layer.weights[token, None], layer.ids[token, None], layer.experts())
        assert torch.equal(together[token : token + 1], alone)


@KINDS
def test_experts_that_are_elsewhere_add_nothing(kind: str, cpu_kernels: str) -> None:
    layer = Layer((33, 5, 2, 64, 32), kind)
    maps = (torch.tensor([-1, 1, -1, 0, -1]), torch.tensor([0, -1, 2, -1, 1]))
    halves = [routed_experts(layer.x, layer.weights, layer.ids, layer.experts(one)).float() for one in maps]
    whole = routed_experts(layer.x, layer.weights, layer.ids, layer.experts())
    tolerance = 1e-6 if layer.x.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(sum(halves), whole.float(), rtol=tolerance, atol=tolerance)
    nothing = routed_experts(layer.x, layer.weights, torch.zeros_like(layer.ids), layer.experts(maps[0]))
    assert not nothing.any()


@pytest.mark.parametrize("gated", [False, True])
@KINDS
def test_what_all_tokens_share_is_added(kind: str, gated: bool, cpu_kernels: str) -> None:
    layer = Layer((9, 4, 2, 36, 20), kind)
    shared, gate = randn(9, 36, dtype=layer.x.dtype), randn(9, 1)
    gate[3] = float("nan")
    arguments = (layer.x, layer.weights, layer.ids, layer.experts())
    out = routed_experts(*arguments, shared, gate if gated else None)
    expected = routed_experts(*arguments).float() + (gate.sigmoid() if gated else 1) * shared.float()
    tolerance = 1e-6 if layer.x.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert out[3].isnan().all() == gated


@pytest.mark.parametrize("shares", [False, True])
@KINDS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_single_results_of_ranks_add_up_to_the_bits_of_one(
    shape: tuple[int, int, int, int, int], kind: str, shares: bool, cpu_kernels: str
) -> None:
    layer = Layer(shape, kind)
    shared = (randn(*layer.x.shape, dtype=layer.x.dtype), randn(len(layer.x), 1)) if shares else (None, None)
    together = routed_experts(layer.x, layer.weights, layer.ids, layer.experts(), *shared)
    results = torch.full((*layer.ids.shape, layer.x.shape[1]), float("nan"))
    for rank in range(2):
        here = [expert for expert in range(layer.num_experts) if expert % 2 == rank]
        expert_map = torch.full((layer.num_experts,), -1)
        expert_map[here] = torch.arange(len(here))
        rows, places = torch.where(layer.ids % 2 == rank)
        results[rows, places] = expert_results(layer.x[rows], layer.ids[rows, places], layer.experts(expert_map))
    total = sum_results(results, layer.weights, layer.x.dtype, *shared)
    assert total.dtype == together.dtype
    if cpu_kernels == "torch":  # which promises no bits
        tolerance = 1e-5 if kind == "float32" else 5e-2
        torch.testing.assert_close(total, together, rtol=tolerance, atol=tolerance)
    else:
        assert torch.equal(total, together)


def test_experts_that_are_not_chosen_are_not_read(cpu_kernels: str) -> None:
    """Zero times NaN is NaN: their numbers would be seen."""
    layer = Layer((5, 6, 2, 36, 20), "float32")
    expected = routed_experts(layer.x, layer.weights, layer.ids % 5, layer.experts())
    layer.packed[0][5].data.fill_(float("nan"))
    assert torch.equal(routed_experts(layer.x, layer.weights, layer.ids % 5, layer.experts()), expected)


def test_rows_may_be_strided(cpu_kernels: str) -> None:
    layer = Layer((7, 4, 2, 32, 16), "bfloat16")
    wide = torch.cat((layer.x, layer.x), dim=1)
    arguments = (layer.weights, layer.ids, layer.experts())
    assert torch.equal(routed_experts(wide[:, :32], *arguments), routed_experts(layer.x, *arguments))


@KINDS
def test_a_recording_computes_what_the_ops_do(kind: str) -> None:
    if cpu.library() is None:
        pytest.skip(cpu.status().reason)
    layer = Layer((8, 6, 2, 64, 32), kind)
    experts, router = layer.experts(), pack_linear(randn(6, 64, dtype=layer.x.dtype))

    def forward(x: torch.Tensor) -> torch.Tensor:
        weights, ids = topk_softmax(linear(x, router, torch.float32), 2, renormalize=True)
        return routed_experts(x, weights, ids, experts, shared_TE=x)

    hidden = torch.empty_like(layer.x)
    with record(8) as recording:
        out = forward(hidden)
    for rows in (1, 8, 3):
        hidden[:rows] = layer.x[:rows]
        recording.run(rows)
        assert torch.equal(out[:rows], forward(layer.x[:rows]))


def test_experts_that_are_not_alike_are_refused() -> None:
    gate_up, down = [pack_linear(randn(8, 4), gated=True)], [pack_linear(randn(4, 4))]
    for bad in (
        ([], [], identity(1)),
        (gate_up, down * 2, identity(1)),
        (gate_up * 2, [*down, pack_linear(randn(4, 4), quantize=True)], identity(2)),
        ([*gate_up, pack_linear(randn(8, 4), randn(8), gated=True)], down * 2, identity(2)),
        (down, down, identity(1)),
        (gate_up, [pack_linear(randn(4, 4), activates=True)], identity(1)),
        (gate_up, [pack_linear(randn(4, 8))], identity(1)),
        (gate_up, down, identity(2)),
        (gate_up, down, identity(1).int()),
    ):
        with pytest.raises(ValueError, match="must"):
            pack_experts(*bad)


def test_the_numbers_of_experts_lie_where_the_logits_do() -> None:
    """On another device than the CPU, of which this one has no memory."""
    logits, numbers, counts = (
        torch.empty(shape, device="meta", dtype=dtype)
        for shape, dtype in (((3, 8), torch.float32), ((8,), torch.float32), ((8,), torch.int64))
    )
    grouped = {"num_groups": 4, "top_groups": 2, "scoring": "sigmoid", "bias_X": numbers}
    for weights, ids in (
        topk_softmax(logits, 2, True, counts, scale_X=numbers),
        grouped_topk(logits, 2, True, counts_X=counts, **grouped),
    ):
        assert weights.device.type == ids.device.type == "meta"
        assert weights.shape == ids.shape == (3, 2)


class Adapters:
    """Adapters of a layer's experts in two slots of three, of some of the experts and projections."""

    def __init__(self, layer: Layer, here: Sequence[int] | None = None) -> None:
        self.layer, self.here = layer, list(range(layer.num_experts)) if here is None else here
        self.changes = [torch.zeros(3, *one.shape, dtype=torch.float64) for one in (layer.gate_up, layer.down)]
        """B · A by slot and expert."""
        self.tables = [self._table(0, 2 if layer.gate_up.shape[1] > layer.down.shape[2] else 1), self._table(1, 1)]
        self.slots = torch.randint(-1, 3, (len(layer.x),), generator=torch.Generator().manual_seed(len(layer.x)))

    def _table(self, which: int, parts: int) -> LoraTable:
        _, rows, columns = (self.layer.gate_up, self.layer.down)[which].shape
        dtype, size = self.layer.x.dtype, rows // parts
        table = LoraTable([size] * parts, columns, dtype, max_loras=3, max_rank=40, num_experts=len(self.here))
        for slot in range(2):
            weights: list[LoraWeight | None] = []
            for expert in self.here:
                for part in range(parts):
                    rank = (0, 3, 16, 33)[(slot + expert + part) % 4]
                    a, b = randn(rank, columns + expert, dtype=dtype)[:, expert:], randn(size, rank, dtype=dtype)
                    b = b * (0.5 / max(rank, 1) ** 0.5 / columns**0.5)
                    own = slice(part * size, (part + 1) * size)
                    self.changes[which][slot, expert, own] = b.double() @ a.double()
                    weights.append(pack_lora(a, b) if rank else None)
            table.set_slot(slot, weights)
        return table

    def lora(self, rows: slice = slice(None)) -> ExpertsLora:
        return ExpertsLora(*self.tables, self.slots[rows].contiguous())


@KINDS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_adapters_of_experts_change_their_weights(
    shape: tuple[int, int, int, int, int], kind: str, cpu_kernels: str
) -> None:
    layer = Layer(shape, kind)
    adapters = Adapters(layer)
    arguments = (layer.x, layer.weights, layer.ids, layer.experts())
    base, out = routed_experts(*arguments), routed_experts(*arguments, lora=adapters.lora())
    is_changed = (adapters.slots == 0) | (adapters.slots == 1)
    if cpu_kernels == "torch":
        torch.testing.assert_close(out[~is_changed], base[~is_changed], rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(out[~is_changed], base[~is_changed])
    tolerance = {"float32": 1e-5, "bfloat16": 2e-2}.get(kind, 5e-2)
    for slot in range(2):
        rows = torch.where(adapters.slots == slot)[0]
        merged = Layer(shape, kind)
        merged.gate_up = layer.gate_up.double() + adapters.changes[0][slot]
        merged.down = layer.down.double() + adapters.changes[1][slot]
        merged.x, merged.weights, merged.ids = layer.x[rows], layer.weights[rows], layer.ids[rows]
        exact = merged.exact()
        assert (out[rows] - exact).norm() <= tolerance * exact.norm()
    assert len(layer.x) < 5 or not torch.equal(out, base)


@KINDS
@pytest.mark.parametrize("activation", ["silu", "relu2"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_adapters_of_experts_have_the_bits_of_each_tokens_own_linears(
    shape: tuple[int, int, int, int, int], activation: str, kind: str, cpu_kernels: str
) -> None:
    if cpu_kernels == "torch":
        pytest.skip("plain torch promises no such thing")
    layer = Layer(shape, kind, biased=True, activation=activation)
    adapters, (gate_up, down) = Adapters(layer), layer.packed
    together = routed_experts(layer.x, layer.weights, layer.ids, layer.experts(), lora=adapters.lora())
    for token in range(0, len(layer.x), 7):
        own, slot = slice(token, token + 1), int(adapters.slots[token])
        total = torch.zeros(1, layer.x.shape[1])
        for weight, expert in zip(layer.weights[token].tolist(), layer.ids[token].tolist(), strict=True):
            slots = torch.tensor([-1 if slot < 0 else expert * 3 + slot])
            of_gate_up, of_down = (LoraRows(table, slots) for table in adapters.tables)
            hidden = linear(layer.x[own], gate_up[expert], lora=of_gate_up)
            result = linear(hidden, down[expert], torch.float32, lora=of_down)
            total = torch.from_numpy((total.double() + weight * result.double()).numpy()).float()  # a fused one
        assert torch.equal(together[own], total.to(layer.x.dtype))
        alone = routed_experts(
            layer.x[own], layer.weights[own], layer.ids[own], layer.experts(), lora=adapters.lora(own)
        )
        assert torch.equal(together[own], alone)


@KINDS
def test_adapters_of_experts_that_are_elsewhere_add_nothing(kind: str, cpu_kernels: str) -> None:
    layer = Layer((33, 5, 2, 64, 32), kind)
    maps = (torch.tensor([-1, 1, -1, 0, -1]), torch.tensor([0, -1, 2, -1, 1]))
    halves = [
        routed_experts(layer.x, layer.weights, layer.ids, layer.experts(one), lora=Adapters(layer, here).lora()).float()
        for one, here in zip(maps, ([3, 1], [0, 4, 2]), strict=True)
    ]
    whole = routed_experts(layer.x, layer.weights, layer.ids, layer.experts(), lora=Adapters(layer).lora())
    tolerance = 1e-5 if layer.x.dtype == torch.float32 else 4e-2
    torch.testing.assert_close(sum(halves), whole.float(), rtol=tolerance, atol=tolerance)


@KINDS
def test_recordings_follow_the_adapters_of_experts(kind: str) -> None:
    if cpu.library() is None:
        pytest.skip(cpu.status().reason)
    layer = Layer((8, 6, 2, 64, 32), kind)
    adapters, experts, given = Adapters(layer), layer.experts(), torch.full((8,), -1)
    arguments = (layer.x, layer.weights, layer.ids, experts)
    with record(8) as recording:
        out = routed_experts(*arguments, lora=ExpertsLora(*adapters.tables, given))
    for slot in (-1, 0, 1, 2):
        given[:] = slot
        recording.run(8)
        assert torch.equal(out, routed_experts(*arguments, lora=ExpertsLora(*adapters.tables, given)))
    adapters.tables[0].set_slot(2, [None] * 12)
    for table in adapters.tables:
        table.clear_slot(0)
    given[:] = 0
    recording.run(8)
    assert torch.equal(out, routed_experts(*arguments))


def test_adapters_that_do_not_fit_the_experts_are_rejected(cpu_kernels: str) -> None:
    layer = Layer((5, 6, 2, 36, 20), "float32")
    arguments, (gate_up, down, slots) = (layer.x, layer.weights, layer.ids, layer.experts()), Adapters(layer).lora()
    for bad, message in (
        (ExpertsLora(gate_up, down, slots[:4]), "lora.slots has shape"),
        (ExpertsLora(down, down, slots), r"lora.gate_up is of \(6, 36, 20, torch.float32\)"),
        (ExpertsLora(gate_up, LoraTable([36], 20, torch.float32, max_loras=3), slots), r"must be of \(6, 36, 20"),
    ):
        with pytest.raises(ValueError, match=message):
            routed_experts(*arguments, lora=bad)
