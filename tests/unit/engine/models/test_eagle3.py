"""The EAGLE-3 head: what it computes over a paged cache, in which forms it is stored, and what is refused."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quire_engine.distributed import ParallelState
from quire_engine.errors import CheckpointError
from quire_engine.kv_cache import AttentionSpec
from quire_engine.models import CheckpointConfig
from quire_engine.models.eagle3 import Eagle3, Eagle3Checkpoint, load_eagle3
from quire_engine.models.layers.rope import rope_cos_sin
from quire_engine.models.loader import load_model
from quire_engine.models.options import RopeConfig
from quire_kernels import argmax, cpu, plan_attention, record
from quire_kernels.kv_cache import new_kv_cache
from safetensors.torch import load_file
from support.checkpoints import write_checkpoint
from support.drafting import context_of

Tensors = dict[str, torch.Tensor]
SIZE, VOCAB_SIZE, DRAFT_VOCAB_SIZE, HEADS, KV_HEADS, HEAD_SIZE = 64, 515, 96, 4, 2, 16
BLOCK_SIZE, EPS = 16, 1e-5
FIELDS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": SIZE, "intermediate_size": 80, "num_hidden_layers": 1,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "rms_norm_eps": EPS, "vocab_size": VOCAB_SIZE,
    "draft_vocab_size": DRAFT_VOCAB_SIZE, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]},
}  # fmt: skip
"""The targets have only two layers, and so no default layers."""


def make_tensors(own_embedding: bool = True) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "midlayer.self_attn.q_proj": (HEADS * HEAD_SIZE, 2 * SIZE),
        "midlayer.self_attn.k_proj": (KV_HEADS * HEAD_SIZE, 2 * SIZE),
        "midlayer.self_attn.v_proj": (KV_HEADS * HEAD_SIZE, 2 * SIZE),
        "midlayer.self_attn.o_proj": (SIZE, HEADS * HEAD_SIZE),
        "midlayer.mlp.gate_proj": (80, SIZE),
        "midlayer.mlp.up_proj": (80, SIZE),
        "midlayer.mlp.down_proj": (SIZE, 80),
        "fc": (SIZE, 3 * SIZE),
        "lm_head": (DRAFT_VOCAB_SIZE, SIZE),
    }
    if own_embedding:
        shapes["embed_tokens"] = (VOCAB_SIZE, SIZE)
    tensors = {f"{name}.weight": torch.randn(shape, generator=generator) / 8 for name, shape in shapes.items()}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"midlayer.{name}.weight"] = torch.rand(SIZE, generator=generator) + 0.5
    tensors["norm.weight"] = torch.rand(SIZE, generator=generator) + 0.5
    chosen = torch.randperm(VOCAB_SIZE, generator=generator)[:DRAFT_VOCAB_SIZE].sort().values
    tensors["d2t"] = chosen - torch.arange(DRAFT_VOCAB_SIZE)
    tensors["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill_(0, chosen, True)
    return tensors


class Reference:
    """The paper's head in plain torch, over a whole sequence at once."""

    def __init__(
        self, tensors: Tensors, embedding: torch.Tensor | None = None, variant: frozenset[str] = frozenset()
    ) -> None:
        self.variant = variant
        self.tensors = {name.removeprefix("midlayer."): tensor for name, tensor in tensors.items()}
        self.embedding = tensors["embed_tokens.weight"] if embedding is None else embedding

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"])

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (SIZE,), self.tensors[f"{name}.weight"], EPS)

    def __call__(self, token_ids_T: torch.Tensor, feature_TE: torch.Tensor) -> torch.Tensor:
        both = (self.norm(self.embedding[token_ids_T], "input_layernorm"), self.norm(feature_TE, "hidden_norm"))
        x = torch.cat(both, dim=-1)
        if "norm_before_residual" in self.variant:
            feature_TE = both[1]
        query, key, value = (
            self.linear(x, f"self_attn.{name}_proj").unflatten(-1, (-1, HEAD_SIZE)).transpose(0, 1) for name in "qkv"
        )
        query, key = self.rotated(query), self.rotated(key)
        key, value = (each.repeat_interleave(HEADS // KV_HEADS, dim=0) for each in (key, value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(0, 1).flatten(1)
        hidden = feature_TE + self.linear(attended, "self_attn.o_proj")
        x = self.norm(hidden, "post_attention_layernorm")
        gated = F.silu(self.linear(x, "mlp.gate_proj")) * self.linear(x, "mlp.up_proj")
        out = hidden + self.linear(gated, "mlp.down_proj")
        return self.norm(out, "norm") if "norm_output" in self.variant else out

    def features(self, states_TE: torch.Tensor) -> torch.Tensor:
        if "norm_before_fc" in self.variant:
            states_TE = F.rms_norm(states_TE, (3 * SIZE,), self.tensors["input_norm.weight"], EPS)
        if "fc_norm" in self.variant:
            parts = enumerate(states_TE.chunk(3, dim=-1))
            states_TE = torch.cat([self.norm(part, f"fc_norm.{i}") for i, part in parts], dim=-1)
        return self.linear(states_TE, "fc")

    def rotated(self, x_HTD: torch.Tensor) -> torch.Tensor:
        cos, sin = rope_cos_sin(RopeConfig(), HEAD_SIZE, x_HTD.shape[1]).chunk(2, dim=-1)
        x1, x2 = x_HTD.chunk(2, dim=-1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)

    def logits(self, out_SE: torch.Tensor) -> torch.Tensor:
        return self.linear(out_SE if "norm_output" in self.variant else self.norm(out_SE, "norm"), "lm_head")


@pytest.fixture
def target(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("untied-mha")


def load(
    folder: Path,
    target: Path,
    dtype: torch.dtype = torch.float32,
    quantization: str | None = None,
    parallel: ParallelState = ParallelState(),
) -> Eagle3:
    config = CheckpointConfig.from_folder(target)
    model = load_model(target, config, dtype, 64, parallel, quantization)
    return load_eagle3(folder, target, config, model, 64, quantization)


def refusal(folder: Path, target: CheckpointConfig) -> str:
    with pytest.raises(CheckpointError) as raised:
        Eagle3Checkpoint.from_folder(folder, target)
    message = str(raised.value)
    assert "\n" not in message
    return message


def new_cache(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    key, value = (new_kv_cache(6, KV_HEADS, BLOCK_SIZE, HEAD_SIZE, dtype) for _ in range(2))
    return key, value


@pytest.mark.parametrize(("variant", "dtype", "quantization", "largest_error"), [
    ("", torch.float32, None, 1e-5), ("", torch.bfloat16, None, 0.03), ("", torch.bfloat16, "int8", 0.06),
    ("norm_before_residual", torch.float32, None, 1e-5), ("fc_norm norm_output", torch.float32, None, 1e-5),
    ("norm_before_residual norm_before_fc norm_output", torch.float32, None, 1e-5),
])  # fmt: skip
@torch.inference_mode()
def test_positions_and_two_drafts_are_those_of_plain_torch(
    variant: str, dtype: torch.dtype, quantization: str | None, largest_error: float, target: Path, tmp_path: Path
) -> None:
    """Two sequences: the first in two steps, over a page's end; then each drafts two tokens."""
    tensors, names = make_tensors(), frozenset(variant.split())
    if "norm_before_fc" in names:
        tensors["input_norm.weight"] = torch.linspace(0.5, 1.5, 3 * SIZE)
    if "fc_norm" in names:
        tensors |= {f"fc_norm.{i}.weight": torch.linspace(0.5, 1.5 + i, SIZE) for i in range(3)}
    fields = {**FIELDS, **dict.fromkeys(names, True)}
    head = load(write_checkpoint(tmp_path, fields, tensors), target, dtype, quantization)
    reference, cache = Reference(tensors, variant=names), new_cache(dtype)
    generator = torch.Generator().manual_seed(1)
    states = [torch.randn(number, 3 * SIZE, generator=generator) for number in (19, 5)]
    token_ids = [torch.randint(VOCAB_SIZE, (number,), generator=generator) for number in (19, 5)]
    features = [reference.features(each) for each in states]

    def check(got: torch.Tensor, expected: torch.Tensor) -> None:
        error = (got.float() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
        assert error < largest_error

    first = head.features(states[0][:15].to(dtype))
    check(first, features[0][:15])
    head.run_layer(head.embed(token_ids[0][:15]), first, context_of([[4, 1]], [0], [15], BLOCK_SIZE), cache)
    rest = head.features(torch.cat((states[0][15:], states[1])).to(dtype))
    out = head.run_layer(
        head.embed(torch.cat((token_ids[0][15:], token_ids[1]))),
        rest,
        context_of([[4, 1], [2, 0]], [15, 0], [4, 5], BLOCK_SIZE),
        cache,
    )
    assert out.dtype == dtype
    expected = [reference(token_ids[i], features[i]) for i in range(2)]
    check(out, torch.cat((expected[0][15:], expected[1])))
    last, lengths = out[[3, 8]], [19, 5]
    for _ in range(2):
        logits = head.logits(last)
        assert (logits.shape, logits.dtype) == ((2, DRAFT_VOCAB_SIZE), torch.float32)
        check(logits, reference.logits(torch.stack([each[-1] for each in expected])))
        drafted = head.target_ids[logits.argmax(-1)]
        last = head.run_layer(
            head.embed(drafted), last.clone(), context_of([[4, 1], [2, 0]], lengths, [1, 1], BLOCK_SIZE), cache
        )
        for i in range(2):
            token_ids[i] = torch.cat((token_ids[i], drafted[i : i + 1]))
            features[i] = torch.cat((features[i], expected[i][-1:]))
            expected[i] = reference(token_ids[i], features[i])
            lengths[i] += 1
        check(last, torch.stack([each[-1] for each in expected]))


@torch.inference_mode()
def test_a_draft_of_each_sequence_can_be_recorded(target: Path, tmp_path: Path) -> None:
    if cpu.library() is None:
        pytest.skip(cpu.status().reason)
    head = load(write_checkpoint(tmp_path, FIELDS, make_tensors()), target)
    token_ids = torch.tensor([7, 8])
    first = torch.randn(2, SIZE, generator=torch.Generator().manual_seed(1))
    context, caches = context_of([[4], [2]], [0, 0], [1, 1], BLOCK_SIZE), [new_cache(torch.float32) for _ in range(2)]
    expected = head.run_layer(head.embed(token_ids), first.clone(), context, caches[0])
    plan = plan_attention(context.block_table, context.query_start_loc, context.seq_lens, HEADS, caches[1][0])
    assert plan is not None
    embedded, feature = torch.empty(2, SIZE), torch.empty(2, SIZE)
    with record(2) as recording:
        planned = replace(context, plans={head.state_specs[0]: plan})
        drafted = argmax(head.logits(head.run_layer(embedded, feature, planned, caches[1])))
    embedded[:], feature[:] = head.embed(token_ids), first
    recording.run(2)
    assert torch.equal(feature, expected)
    assert torch.equal(drafted, head.logits(expected).argmax(-1))


def test_it_says_what_the_worker_has_to_know(target: Path, tmp_path: Path) -> None:
    tensors = make_tensors()
    head = load(write_checkpoint(tmp_path, FIELDS, tensors), target)
    assert head.state_specs == [AttentionSpec(HEADS, KV_HEADS, HEAD_SIZE)]
    assert (head.hidden_size, head.dtype) == (SIZE, torch.float32)
    assert head.target_ids.tolist() == tensors["t2d"].nonzero().flatten().tolist()


def test_a_head_of_vllms_speculators_is_read(target: Path, tmp_path: Path) -> None:
    """Its decoder layer is described in an object of its own."""
    own = ("architectures", "draft_vocab_size")
    fields = {
        **{name: FIELDS[name] for name in own}, "architectures": ["Eagle3Speculator"], "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 1], "target_hidden_size": None, "speculators_model_type": "eagle3",
        "transformer_layer_config": {name: value for name, value in FIELDS.items() if name not in own},
    }  # fmt: skip
    tensors = make_tensors()
    folder = write_checkpoint(
        tmp_path, fields, {name.replace("midlayer.", "layers.0."): tensors[name] for name in tensors}
    )
    out = one_position(load(folder, target))
    expected = Reference(tensors, variant=frozenset(["norm_before_residual"]))(torch.tensor([7]), torch.ones(1, SIZE))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rename", [
    lambda name: f"model.{name}" if name != "lm_head.weight" else name,
    lambda name: name.replace("midlayer.", "layers.0."),
    lambda name: f"model.{name}".replace("midlayer.", "layers.0."),
])  # fmt: skip
def test_other_names_of_the_same_tensors_are_read(rename: Callable[[str], str], target: Path, tmp_path: Path) -> None:
    tensors = make_tensors()
    fields = {**FIELDS, "architectures": ["Eagle3LlamaForCausalLM"]}
    folder = write_checkpoint(tmp_path, fields, {rename(name): tensor for name, tensor in tensors.items()})
    out = one_position(load(folder, target))
    torch.testing.assert_close(out, Reference(tensors)(torch.tensor([7]), torch.ones(1, SIZE)), rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def one_position(head: Eagle3) -> torch.Tensor:
    out: torch.Tensor = head.run_layer(
        head.embed(torch.tensor([7])),
        torch.ones(1, SIZE),
        context_of([[0]], [0], [1], BLOCK_SIZE),
        new_cache(head.dtype),
    )
    return out


@pytest.mark.parametrize("name", ["untied-mha", "tied-gqa"])
@pytest.mark.parametrize(("ranks", "stages", "rank"), [(1, 1, 0), (2, 1, 0), (1, 2, 1)])
def test_without_an_embedding_it_uses_the_targets(
    ranks: int, stages: int, rank: int, name: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    target, tensors = checkpoint(name), make_tensors(own_embedding=False)
    parallel = ParallelState(rank=rank, tensor_parallel_size=ranks, pipeline_parallel_size=stages)
    head = load(write_checkpoint(tmp_path, FIELDS, tensors), target, parallel=parallel)
    is_there = ranks == 1 and (stages == 1 or name == "tied-gqa")
    assert hasattr(head, "embed_tokens") != is_there, "an embedding of its own only where the rank has not all of it"
    reference = Reference(tensors, load_file(target / "model.safetensors")["model.embed_tokens.weight"])
    expected = reference(torch.tensor([7]), torch.ones(1, SIZE))
    torch.testing.assert_close(one_position(head), expected, rtol=1e-4, atol=1e-4)


def test_a_head_of_the_whole_vocabulary_needs_no_map(target: Path, tmp_path: Path) -> None:
    tensors = {**make_tensors(), "lm_head.weight": torch.ones(VOCAB_SIZE, SIZE)}
    del tensors["d2t"], tensors["t2d"]
    head = load(write_checkpoint(tmp_path, {**FIELDS, "draft_vocab_size": None}, tensors), target)
    assert head.target_ids.tolist() == [*range(VOCAB_SIZE)]


@pytest.mark.parametrize(
    ("num_layers", "fields", "expected"),
    [
        (32, {}, (2, 16, 29)),
        (32, {"eagle_config": {}}, (2, 16, 29)),
        (32, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 4]}}, (3, 4)),
        (32, {"eagle_aux_hidden_state_layer_ids": [0, 31, 5]}, (0, 31, 5)),
        (94, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 46, 90]}}, (2, 47, 91)),
        (2, {}, "eagle_aux_hidden_state_layer_ids is None; it must be a list of integers from 0 to 1, layers of"),
        (32, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 32]}}, "layer_ids is [1, 32]; it must be"),
        (32, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, "layer_ids is []; it must be a list"),
        (32, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [True]}}, "layer_ids is [True]; it must be"),
        (32, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": 3}}, "config.eagle_aux_hidden_state_layer_ids is 3"),
    ],
    ids=str,
)
def test_the_layers_that_it_reads(
    num_layers: int, fields: dict[str, Any], expected: tuple[int, ...] | str, target: Path, tmp_path: Path
) -> None:
    config = CheckpointConfig.from_folder(target)
    config = replace(config, options=replace(config.options, layers=config.options.layers[:1] * num_layers))
    tensors = make_tensors()
    if isinstance(expected, tuple):
        tensors["fc.weight"] = torch.zeros(SIZE, len(expected) * SIZE)
    folder = write_checkpoint(tmp_path, {**FIELDS, "eagle_config": None, **fields}, tensors)
    if isinstance(expected, str):
        assert expected in refusal(folder, config)
    else:
        assert Eagle3Checkpoint.from_folder(folder, config).tapped_layers == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "unknown architecture 'LlamaForCausalLM'; known are LlamaForCausalLM"
         "Eagle3, Eagle3LlamaForCausalLM, Eagle3Speculator, Eagle3DraftModel"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2; it must be 1"),
        ({"vocab_size": 32000}, "vocab_size is 32000; it must be 515, as in the model that is drafted for"),
        ({"target_hidden_size": 63}, "target_hidden_size is 63; it must be 64, as in the model that is drafted for"),
        ({"draft_vocab_size": 516}, "draft_vocab_size is 516; it must be an integer from 1 to 515"),
        ({"draft_vocab_size": 95}, "tensor d2t has shape (96,); config.json asks for (95,)"),
        ({"intermediate_size": 81}, "has shape (64, 80); config.json asks for (64, 81)"),
        ({"norm_before_residual": 1}, "norm_before_residual is 1; it must be true or false"),
        ({"eagle_config": {**FIELDS["eagle_config"], "norm_before_fc": 1}}, "norm_before_fc is 1; it must be"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config.use_aux_hidden_state is False; it must be"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1; it must be a finite number above 0"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_configuration_that_does_not_fit_is_refused(
    changes: dict[str, Any], message: str, target: Path, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path, {**FIELDS, **changes}, make_tensors())
    assert message in refusal(folder, CheckpointConfig.from_folder(target))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("midlayer.self_attn.k_proj.weight", torch.zeros(32, 64), "has shape (32, 64); config.json asks for (32, 128)"),
        ("fc.weight", torch.zeros(SIZE, SIZE), "has shape (64, 64); config.json asks for (64, 192)"),
        ("d2t", torch.zeros(DRAFT_VOCAB_SIZE), "is F32; it must be I64"),
        ("midlayer.extra.weight", torch.zeros(3), "has no place in this architecture"),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_a_tensor_that_does_not_fit_is_refused(
    name: str, tensor: torch.Tensor, message: str, target: Path, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path, FIELDS, {**make_tensors(), name: tensor})
    assert f"model.safetensors: tensor {name} {message}" in refusal(folder, CheckpointConfig.from_folder(target))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("midlayer.hidden_norm.weight", "hold no layers.0.hidden_norm.weight"),
        ("lm_head.weight", "hold no lm_head.weight"),
        ("d2t", "hold no d2t, which draft_vocab_size=96 of vocab_size=515 needs"),
    ],
)
def test_a_tensor_that_is_missing_is_named(name: str, message: str, target: Path, tmp_path: Path) -> None:
    tensors = make_tensors()
    del tensors[name]
    folder = write_checkpoint(tmp_path, FIELDS, tensors)
    assert refusal(folder, CheckpointConfig.from_folder(target)).endswith(message)


def test_a_narrower_head_needs_an_embedding_of_its_own(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, FIELDS, make_tensors(own_embedding=False))
    message = refusal(folder, CheckpointConfig.from_folder(checkpoint("odd-sizes")))
    assert message.endswith("hold no embed_tokens.weight; the target's has hidden_size=60, and this head 64")


@pytest.mark.parametrize(("offset", "token"), [(-5, -5), (VOCAB_SIZE, VOCAB_SIZE)])
def test_a_map_to_tokens_that_there_are_not_is_refused(offset: int, token: int, target: Path, tmp_path: Path) -> None:
    tensors = make_tensors()
    tensors["d2t"][0] = offset
    with pytest.raises(CheckpointError, match=rf"tensor d2t leads to token {token}; it must be from 0 to 514"):
        load(write_checkpoint(tmp_path, FIELDS, tensors), target)


def test_weights_that_are_no_finite_numbers_are_refused(target: Path, tmp_path: Path) -> None:
    tensors = make_tensors()
    tensors["fc.weight"][5, 6] = math.inf
    with pytest.raises(CheckpointError, match=r"tensor fc\.weight holds inf; weights must be finite"):
        load(write_checkpoint(tmp_path, FIELDS, tensors), target)
