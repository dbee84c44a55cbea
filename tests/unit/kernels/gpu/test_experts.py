"""`routed_experts` against float64, and against itself in other batches."""

import pytest
import torch
import torch.nn.functional as F
from quire_kernels import pack_experts, pack_linear, routed_experts, topk_softmax
from quire_kernels.experts import ExpertsWeight

#         T   X  K  E   I: one token, odd shapes, an expert with several tiles of tokens
SHAPES = [(1, 3, 1, 8, 4), (5, 6, 2, 36, 20), (80, 2, 1, 70, 100), (0, 3, 2, 8, 4)]
Layer = tuple[torch.Tensor, torch.Tensor, torch.Tensor, ExpertsWeight, torch.Tensor]


def make_layer(
    shape: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    kind: torch.dtype | None = None,
    biased: bool = False,
    activation: str = "silu",
) -> Layer:
    """Tokens, their weights and ids, the experts, and what they are to give."""
    gated = activation != "relu2"
    tokens, num_experts, top_k, hidden, size = shape
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    gate_up = (torch.randn(num_experts, (2 if gated else 1) * size, hidden, generator=generator) * hidden**-0.5).to(
        dtype
    )
    down = (torch.randn(num_experts, hidden, size, generator=generator) * size**-0.5).to(dtype)
    biases = [torch.randn(one.shape[:2], generator=generator).to(dtype) * biased for one in (gate_up, down)]
    weights, ids = topk_softmax(torch.randn(tokens, num_experts, generator=generator), top_k, renormalize=True)
    expected = torch.zeros(tokens, hidden, dtype=torch.float64)
    for token in range(tokens):
        for weight, expert in zip(weights[token], ids[token], strict=True):
            whole = gate_up[expert].double() @ x[token].double() + biases[0][expert].double()
            gate, up = whole.chunk(2)
            hidden = {
                "silu": F.silu(gate) * up,
                "swigluoai": (up.clamp(-7, 7) + 1) * gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7)),
                "relu2": F.relu(whole).square(),
            }[activation]
            expected[token] += weight * (down[expert].double() @ hidden + biases[1][expert].double())
    packed = [
        [
            pack_linear(one.to(device), bias.to(device) if biased else None, quantize=kind is not None,
                        quantized_dtype=kind or torch.int8, activation=activation, **options)
            for one, bias in zip(each, biases_of_each, strict=True)
        ]
        for each, biases_of_each, options in (
            (gate_up, biases[0], {"gated": gated, "activates": not gated}), (down, biases[1], {}),
        )
    ]  # fmt: skip
    experts = pack_experts(packed[0], packed[1], torch.arange(num_experts))
    return x.to(device), weights.to(device), ids.to(device), experts, expected


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_routed_experts(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device, tolerance: dict[str, float]
) -> None:
    *arguments, expected = make_layer(shape, dtype, device)
    out = routed_experts(*arguments)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double().cpu(), expected, **{name: 3 * size for name, size in tolerance.items()})


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_quantised(shape: tuple[int, int, int, int, int], kind: torch.dtype, device: torch.device) -> None:
    *arguments, expected = make_layer(shape, torch.bfloat16, device, kind)
    out = routed_experts(*arguments).double().cpu()
    assert (out - expected).norm() / expected.norm() < (0.04 if kind == torch.int8 else 0.12)


@pytest.mark.parametrize("kind", [None, torch.int8], ids=["bf16", "int8"])
def test_shared_experts_and_experts_elsewhere(kind: torch.dtype | None, device: torch.device) -> None:
    x, weights, ids, experts, expected = make_layer((9, 4, 2, 36, 20), torch.bfloat16, device, kind)
    shared, gate = x.flip(0), torch.linspace(-2, 2, 9, device=device)[:, None]
    out = torch.zeros_like(x, dtype=torch.float64)
    for here in ([0, 2], [3, 1]):
        expert_map = torch.full((4,), -1)
        expert_map[here] = torch.arange(2)
        part = pack_experts([experts.gate_up[i] for i in here], [experts.down[i] for i in here], expert_map)
        shared_arguments = (shared, gate) if here == [3, 1] else (None, None)
        out += routed_experts(x, weights, ids, part, *shared_arguments).double()
    expected += (gate.double().sigmoid() * shared.double()).cpu()
    assert (out.cpu() - expected).norm() / expected.norm() < 0.03


@pytest.mark.parametrize("activation", ["swigluoai", "relu2"])
@pytest.mark.parametrize("kind", [None, torch.int8], ids=["bf16", "int8"])
def test_experts_with_biases_and_another_gate_or_none(
    kind: torch.dtype | None, activation: str, device: torch.device
) -> None:
    *arguments, expected = make_layer((5, 6, 2, 36, 20), torch.bfloat16, device, kind, True, activation)
    out = routed_experts(*arguments).double().cpu()
    assert (out - expected).norm() / expected.norm() < (0.01 if kind is None else 0.04)


@pytest.mark.parametrize("kind", [None, torch.int8], ids=["bf16", "int8"])
def test_a_token_does_not_depend_on_its_batch(kind: torch.dtype | None, device: torch.device) -> None:
    x, weights, ids, experts, _ = make_layer((80, 3, 2, 70, 40), torch.bfloat16, device, kind)
    together = routed_experts(x, weights, ids, experts)
    for rows in (slice(0, 1), slice(10, 74)):
        assert torch.equal(routed_experts(x[rows], weights[rows], ids[rows], experts), together[rows])
