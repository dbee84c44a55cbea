"""Ops of recurrent layers: against plain torch, and to the bits the same however a sequence is divided among steps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quire_kernels import (
    causal_conv,
    cpu,
    gated_delta_rule,
    gated_rms_norm,
    head_linear,
    pack_head_linear,
    record,
    rg_lru,
    selective_scan,
    state_space,
)
from quire_kernels.cpu import get_num_threads, set_num_threads
from support.emulated_instructions import selected
from support.recurrences import OPS, Step, make_op, state_rows, whole
from transformers.models.mamba.configuration_mamba import MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.mamba2.configuration_mamba2 import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)
from transformers.models.recurrent_gemma.configuration_recurrent_gemma import RecurrentGemmaConfig
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

Once = Callable[[Any, Callable[[], Any]], Any]
NAMES = pytest.mark.parametrize("name", OPS)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
LENGTH = 29


def mixed_steps() -> tuple[list[Step], int]:
    """A replay that goes on in another block, a prompt, one that keeps its block, one with the source of another."""
    steps = [
        Step(10, 5, 2, 3, [(2, 6), (5, 3)], num_replayed=2),
        Step(0, 20, -1, 5, [(1, 1), (16, 7), (20, 5)]),
        Step(7, 1, 4, 4, [(1, 4)]),
        Step(10, 3, 2, 8, [(1, 8)], num_replayed=1),
        Step(9, 4, 9, 9, [(4, 9)], num_replayed=3),
    ]
    return steps, sum(step.num_rows for step in steps)


@NAMES
@DTYPES
def test_kernels_compute_what_torch_does(name: str, dtype: torch.dtype, cpu_kernels: str, once: Once) -> None:
    op, (steps, num_rows) = make_op(name), mixed_steps()

    def compute() -> tuple[torch.Tensor, ...]:
        caches = op.caches()
        return op(op.tokens(num_rows, 1, dtype), caches, steps), *caches

    def reference() -> tuple[torch.Tensor, ...]:
        with selected("torch"):
            return compute()

    expected, got = once("expected", reference), compute()
    assert got[0].dtype == dtype
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got[0], expected[0], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(got[1], expected[1], atol=1e-5, rtol=1e-5)
    assert torch.equal(got[2], expected[2]), "a ring has the inputs themselves"


@NAMES
@DTYPES
@pytest.mark.parametrize("chunks", [[1] * LENGTH, [7, 16, 1, 5], [8, 8, 8, 5], [28, 1]], ids=str)
def test_chunks_have_the_bits_of_the_whole(name: str, dtype: torch.dtype, chunks: list[int], cpu_kernels: str) -> None:
    op = make_op(name)
    tokens = op.tokens(LENGTH, 2, dtype)
    expected, expected_caches = whole(op, tokens, block=len(chunks) % 2)
    caches, outs, first = op.caches(), [], 0
    for number, length in enumerate(chunks):
        target = (number + 1) % 2
        source = -1 if first == 0 else 1 - target
        outs.append(
            op(tokens[first : first + length], caches, [Step(first, length, source, target, [(length, target)])])
        )
        first += length
    assert torch.equal(torch.cat(outs), expected)
    assert torch.equal(caches[0][len(chunks) % 2], expected_caches[0][len(chunks) % 2])


@NAMES
@DTYPES
def test_rejected_drafts_leave_no_trace(name: str, dtype: torch.dtype, cpu_kernels: str) -> None:
    """Steps of one or more tokens and drafts, of which any number is accepted and computed again."""
    op = make_op(name)
    tokens, wrong = op.tokens(LENGTH, 3, dtype), op.tokens(LENGTH, 4, dtype)
    expected, _ = whole(op, tokens)
    for is_in_place in (True, False):
        caches, outs, source = op.caches(), torch.empty_like(expected), -1
        known = replayed = 0  # tokens in the state, and those accepted since
        for new, drafts, accepted in ((3, 4, 0), (1, 4, 4), (1, 3, 1), (2, 4, 3), (1, 0, 0), (1, 2, 2), (2, 0, 0)):
            first, sure = known + replayed, known + replayed + new
            end = sure + accepted
            rows = torch.cat((tokens[first:end], wrong[end : sure + drafts]))
            target = source if is_in_place and source >= 0 else (source + 1) % 3
            step = Step(first, new + drafts, source, target, [(replayed + new, target)], num_replayed=replayed)
            outs[first:end] = op(rows, caches, [step])[: end - first]
            known, replayed, source = sure, accepted, target
        assert torch.equal(outs[: known + replayed], expected[: known + replayed])


@NAMES
@DTYPES
def test_a_sequence_goes_on_from_any_stored_block(name: str, dtype: torch.dtype, cpu_kernels: str) -> None:
    op = make_op(name)
    tokens = op.tokens(LENGTH, 5, dtype)
    caches = op.caches()
    expected = op(tokens, caches, [Step(0, LENGTH, -1, 4, [(1, 0), (9, 1), (16, 2), (28, 3), (LENGTH, 4)])])
    for length, block in ((1, 0), (9, 1), (16, 2), (28, 3)):
        step = Step(length, LENGTH - length, block, 5, [(LENGTH - length, 5)])
        assert torch.equal(op(tokens[length:], caches, [step]), expected[length:])
        assert torch.equal(caches[0][5], caches[0][4])


@NAMES
@DTYPES
def test_a_batch_has_the_bits_of_each_alone(name: str, dtype: torch.dtype, cpu_kernels: str) -> None:
    """With any number of threads, which divide the states in other ways."""
    op, (steps, num_rows) = make_op(name), mixed_steps()
    tokens, caches, num_threads = op.tokens(num_rows, 6, dtype), op.caches(), get_num_threads()
    expected = op(tokens, caches, steps)
    try:
        for threads in (1, 5):
            set_num_threads(threads)
            others, start = op.caches(), 0
            for step in steps:
                rows = slice(start, start + step.num_rows)
                assert torch.equal(op(tokens[rows], others, [step]), expected[rows])
                start += step.num_rows
            for one, other in zip(caches, others, strict=True):
                assert torch.equal(one, other)
    finally:
        set_num_threads(num_threads)


@NAMES
def test_recorded_ops_take_the_sequences_of_a_run(name: str) -> None:
    if cpu.library() is None:
        pytest.skip(cpu.status().reason)
    op, (steps, num_rows) = make_op(name), mixed_steps()
    tokens, caches = torch.empty_like(op.tokens(num_rows, 1, torch.bfloat16)), op.caches()
    standing = state_rows(steps)
    with torch.inference_mode(), record(num_rows) as recording:
        out = op.run(tokens, caches, standing)
    for count in (5, 1, 3):
        own = steps[:count]
        rows = sum(step.num_rows for step in own)
        given = op.tokens(rows, count, torch.bfloat16)
        others = tuple(one.clone() for one in caches)
        expected = op(given, others, own)
        tokens[:rows] = given
        recording.run(rows)
        assert torch.equal(out[:rows], expected)
        for one, other in zip(caches, others, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("name", "part", "shape", "error"),
    [
        ("delta", 0, (4, 1, 23), "query_TGD"),
        ("delta", 2, (5, 3, 40), "value_THV"),
        ("delta", 3, (4, 3, 2), "each have a gate, or 24, not 2"),
        ("space", 1, (4, 5), "dt_TH"),
        ("space", 2, (4, 4, 24), "6 heads must be a multiple of 4 groups"),
        ("mamba", 3, (4, 15), "c_TN"),
        ("lru", 0, (4, 40), "40 channels must be a multiple of 3 heads"),
        ("lru", 1, (4, 3, 25), "gates_THG"),
    ],
)
def test_inputs_that_do_not_fit_are_named(name: str, part: int, shape: tuple[int, ...], error: str) -> None:
    shapes = {
        "delta": [(4, 1, 24), (4, 1, 24), (4, 3, 40), (4, 3, 1), (4, 3)],
        "space": [(4, 6, 20), (4, 6), (4, 3, 24), (4, 3, 24)],
        "mamba": [(4, 37), (4, 37), (4, 16), (4, 16)],
        "lru": [(4, 39), (4, 3, 26)],
    }[name]
    parts = [torch.zeros(one) for one in [*shapes[:part], shape, *shapes[part + 1 :]]]
    ops = {"delta": gated_delta_rule, "space": state_space, "mamba": selective_scan, "lru": rg_lru}
    parameters = {"delta": 2, "space": 3, "mamba": 3, "lru": 2}[name]
    op, rows = make_op(name), state_rows([Step(0, 4, -1, 0, [(4, 0)])])
    with pytest.raises(ValueError, match=error):
        ops[name](*parts, *[torch.zeros(3)] * parameters, *op.caches(), rows)


@pytest.mark.parametrize("name", ["conv of 4", "delta", "space", "mamba", "lru"])
def test_caches_and_rows_that_do_not_fit_are_named(name: str) -> None:
    if cpu.library() is None:
        pytest.skip(cpu.status().reason)
    op, step = make_op(name), Step(0, 4, -1, 0, [(4, 0)])
    tokens, (state, ring) = op.tokens(4, 0, torch.float32), op.caches()
    with pytest.raises(TypeError, match="ring"):
        op(tokens, (state, ring.bfloat16()), [step])
    if name != "conv of 4":
        with pytest.raises(ValueError, match="state"):
            op(tokens, (state[..., 1:], ring), [step])
    with pytest.raises(ValueError, match="positions"):
        op(tokens[:3], (state, ring), [step])
    rows = state_rows([step])
    object.__setattr__(rows, "targets", rows.targets.int())
    with pytest.raises(TypeError, match="targets"):
        op.run(tokens, (state, ring), rows)


@pytest.mark.parametrize("compute", [torch_recurrent_gated_delta_rule, torch_chunk_gated_delta_rule])
def test_the_delta_rule_is_transformers(compute: Callable[..., Any], cpu_kernels: str) -> None:
    groups, heads, size, width, length = 2, 4, 24, 40, 70
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, length, groups, size, generator=generator)
    value = torch.randn(length, heads, width, generator=generator)
    gate, beta = torch.randn(2, length, heads, generator=generator)
    decay, bias = torch.rand(heads), torch.randn(heads, 1)
    state, ring = torch.zeros(1, heads, size, width), torch.zeros(1, 0, groups * size + heads * (width + 2))
    rows = state_rows([Step(0, length, -1, 0, [(length, 0)])])
    out = gated_delta_rule(query, key, value, gate[:, :, None], beta, decay, bias, state, ring, rows)
    expected, expected_state = compute(
        query[None], key[None], value[None], g=(-decay * F.softplus(gate + bias[:, 0]))[None],
        beta=beta.sigmoid()[None], output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    torch.testing.assert_close(out, expected[0], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(state, expected_state, atol=2e-5, rtol=1e-4)


def test_a_layer_of_mamba_2_is_transformers(cpu_kernels: str) -> None:
    """Convolution, state space and gated norm."""
    torch.manual_seed(0)
    config = Mamba2Config(
        hidden_size=24, num_heads=6, head_dim=12, state_size=24, n_groups=3, conv_kernel=3, expand=3, chunk_size=16,
        time_step_limit=(0.2, 1.0),
    )  # fmt: skip
    mixer = Mamba2Mixer(config, 0).eval()
    torch.nn.init.normal_(mixer.dt_bias)
    torch.nn.init.normal_(mixer.norm.weight)
    hidden = torch.randn(1, 40, 24)
    with torch.inference_mode():
        gate, mixed, dt = mixer.in_proj(hidden)[0].split([72, 72 + 2 * 72, 6], 1)
        rows = state_rows([Step(0, 40, -1, 0, [(40, 0)])])
        weight, bias = mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias
        mixed = causal_conv(mixed, weight, bias, torch.zeros(1, 2, 216), rows)
        x, b, c = mixed.split([72, 72, 72], 1)
        state, ring = torch.zeros(1, 6, 12, 24), torch.zeros(1, 0, 72 + 6 + 72)
        out = state_space(
            x.unflatten(1, (6, 12)), dt, b.unflatten(1, (3, 24)), c.unflatten(1, (3, 24)), mixer.A_log.exp(), mixer.D,
            mixer.dt_bias, state, ring, rows, config.time_step_limit,
        )  # fmt: skip
        normed = gated_rms_norm(out.flatten(1), gate, mixer.norm.weight, mixer.norm.variance_epsilon, 24, True)
        torch.testing.assert_close(mixer.out_proj(normed), mixer(hidden)[0], atol=2e-5, rtol=1e-4)


def test_a_layer_of_mamba_is_transformers(cpu_kernels: str) -> None:
    torch.manual_seed(0)
    config = MambaConfig(hidden_size=20, state_size=7, expand=2, conv_kernel=4, time_step_rank=5)
    mixer = MambaMixer(config, 0).eval()
    hidden = torch.randn(1, 40, 20)
    with torch.inference_mode():
        x, gate = mixer.in_proj(hidden)[0].chunk(2, 1)
        rows = state_rows([Step(0, 40, -1, 0, [(40, 0)])])
        weight, bias = mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias
        x = causal_conv(x, weight, bias, torch.zeros(1, 3, 40), rows)
        dt, b, c = mixer.x_proj(x).split([5, 7, 7], 1)
        dt = dt @ mixer.dt_proj.weight.T
        state, ring = torch.zeros(1, 40, 7), torch.zeros(1, 0, 2 * 40 + 7)
        out = selective_scan(x, dt, b, c, mixer.A_log.exp(), mixer.D, mixer.dt_proj.bias, state, ring, rows)
        torch.testing.assert_close(mixer.out_proj(out * F.silu(gate)), mixer(hidden)[0], atol=2e-5, rtol=1e-4)


def test_the_rg_lru_is_transformers(cpu_kernels: str) -> None:
    torch.manual_seed(0)
    heads, size, length = 3, 14, 40
    module = RecurrentGemmaRglru(RecurrentGemmaConfig(hidden_size=heads * size, num_attention_heads=heads)).eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, -2.0 if parameter.dim() == 1 else 0.0)
    x, rows = torch.randn(length, heads * size), state_rows([Step(0, length, -1, 0, [(length, 0)])])
    with torch.inference_mode():
        weight_HNK = torch.cat((module.input_gate_weight, module.recurrent_gate_weight), 2).transpose(1, 2)
        bias = torch.cat((module.input_gate_bias, module.recurrent_gate_bias), 1)
        gates, decay = head_linear(x.view(length, heads, size), pack_head_linear(weight_HNK)), module.recurrent_param
        state, ring = torch.zeros(1, heads * size), torch.zeros(1, 0, 3 * heads * size)
        out = rg_lru(x, gates, bias, 8 * F.softplus(decay), state, ring, rows)
        expected = module(x[None], torch.arange(length)[None])
    torch.testing.assert_close(out, expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state, module.recurrent_states, atol=1e-5, rtol=1e-5)


def test_softplus_and_decays_have_small_relative_errors(cpu_kernels: str) -> None:
    """Each head's first output is a softplus, and the second is the first times a decay."""
    inputs = torch.linspace(-80, 80, 4001)
    heads = len(inputs)
    x, ones = torch.tensor([1.0, 0.0])[:, None, None].expand(2, heads, 1), torch.ones(2, 1, 1)
    rows, ring = state_rows([Step(0, 2, -1, 0, [(2, 0)])]), torch.zeros(1, 0, 2 * heads + 1)
    for dt, decay, limits in ((inputs, 0.0, (0.0, 100.0)), (torch.zeros(heads), 1.0, (1.0, 1.0))):
        rate = decay * (inputs + 80) / 2
        state = torch.zeros(1, heads, 1, 1)
        out = state_space(
            x, dt.expand(2, -1), ones, ones, rate, None, torch.zeros(heads), state, ring, rows, limits
        ).double()[:, :, 0]  # fmt: skip
        expected = F.softplus(dt.double(), threshold=100).clamp(*limits)
        torch.testing.assert_close(out[0], expected, atol=0, rtol=1e-6)
        torch.testing.assert_close(out[1], expected * torch.exp(-rate.double() * expected), atol=0, rtol=1e-6)


@DTYPES
@pytest.mark.parametrize("gates_first", [False, True])
@pytest.mark.parametrize(("groups", "group_size", "shares_weight"), [(3, 37, True), (2, 128, False), (1, 5, False)])
def test_gated_rms_norm(
    groups: int, group_size: int, shares_weight: bool, gates_first: bool, dtype: torch.dtype, cpu_kernels: str
) -> None:
    """Of parts of longer rows; a row has the bits that it has alone."""
    generator = torch.Generator().manual_seed(0)
    size = groups * group_size
    hidden, gate = torch.randn(6, 2 * size + 3, generator=generator).to(dtype)[:, 1:-2].split(size, 1)
    weight = torch.randn(group_size if shares_weight else size, generator=generator)
    out = gated_rms_norm(hidden, gate, weight, 1e-5, group_size, gates_first)
    assert out.dtype == dtype
    x, silu = hidden.double(), F.silu(gate.double())
    x = (x * silu if gates_first else x).unflatten(1, (groups, group_size))
    x = (x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(1) * weight.repeat(size // len(weight))
    tolerance = 8e-3 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out.double(), x if gates_first else x * silu, atol=tolerance, rtol=tolerance)
    assert torch.equal(gated_rms_norm(hidden[2:3], gate[2:3], weight, 1e-5, group_size, gates_first), out[2:3])
    with pytest.raises(ValueError, match="gate_TE"):
        gated_rms_norm(hidden, gate[:, 1:], weight, 1e-5, group_size, gates_first)
    with pytest.raises(ValueError, match="weight_E"):
        gated_rms_norm(hidden, gate, weight[1:], 1e-5, group_size, gates_first)
