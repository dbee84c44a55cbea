"""Families of decoders: what each reads in `config.json`, and the tensors that its checkpoints hold."""

import json
import math
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine import LLM, SamplingParams
from quire_engine.errors import CheckpointError
from quire_engine.frontend.tokenizer import load_tokenizer
from quire_engine.models import CheckpointConfig, check_checkpoint
from quire_engine.models.decoder import DecoderLayer
from quire_engine.models.families.deepseek import NAMES as DEEPSEEK_NAMES
from quire_engine.models.families.deepseek import mtp_names
from quire_engine.models.families.ernie import NAMES as ERNIE_NAMES
from quire_engine.models.families.gpt_oss import NAMES as GPT_OSS_NAMES
from quire_engine.models.families.hunyuan import NAMES as HUNYUAN_NAMES
from quire_engine.models.families.llama import MINIMAX_NAMES
from quire_engine.models.families.llama import MIXTRAL_NAMES as NAMES
from quire_engine.models.families.qwen import MIMO_NAMES
from quire_engine.models.loader import load_model
from quire_engine.models.options import (
    PRE_NORMS,
    AttentionOptions,
    ExpertsOptions,
    GroupedRouting,
    LatentAttentionOptions,
    LayerOptions,
    MLPOptions,
    ModelOptions,
    MTPOptions,
    NormOptions,
    RopeConfig,
)
from quire_engine.models.registry import ARCHITECTURES
from safetensors.torch import load_file, save_file
from support.checkpoints import CONFIG, changed_copy, edit_json, make_small_checkpoint
from support.oracle import generate_greedily, make_checkpoint, make_prompts
from transformers import AutoConfig, AutoModelForCausalLM

TINYPY = Path(__file__).parents[4] / "model_repository" / "tinypy" / "1" / "model"


ROPE = RopeConfig(original_max_position_embeddings=64)
MLP = MLPOptions(intermediate_size=24)


def layers(*mlps: MLPOptions | ExpertsOptions, **attention: Any) -> tuple[LayerOptions, ...]:
    """A layer with each of these feed-forwards."""
    return tuple(LayerOptions(AttentionOptions(**{"rope": ROPE, **attention}), mlp) for mlp in mlps)


EXPERTS = ExpertsOptions(num_experts=8, top_k=2, expert=MLP, norm_topk_prob=True)
LATENT = LatentAttentionOptions(
    rope=ROPE, scale=192**-0.5, bias=False, query_rank=None, kv_rank=512, rope_size=64, nope_size=128, value_size=128,
    interleaved=True,
)  # fmt: skip
YARN_SCALE = 0.1 * math.log(40) + 1
YARN = RopeConfig(
    rope_type="yarn", factor=40.0, original_max_position_embeddings=4096, attention_factor=YARN_SCALE
)  # fmt: skip


def deepseek_experts(num_experts: int, top_k: int, size: int, num_shared: int, **grouped: Any) -> ExpertsOptions:
    return ExpertsOptions(
        num_experts=num_experts, top_k=top_k, expert=MLPOptions(intermediate_size=size),
        norm_topk_prob=grouped["scoring"] == "sigmoid", shared=MLPOptions(intermediate_size=num_shared * size),
        shared_has_gate=False, grouped=GroupedRouting(**grouped),
    )  # fmt: skip


V3_ATTENTION = replace(LATENT, rope=YARN, scale=192**-0.5 * YARN_SCALE**2, query_rank=1536, interleaved=False)
V3_EXPERTS = deepseek_experts(
    256, 8, 2048, 1, num_groups=8, top_groups=4, scoring="sigmoid", has_bias=True, scale=2.5
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, ModelOptions(layers=layers(MLP, MLP))),
        ({"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True},
         ModelOptions(layers=layers(*[replace(MLP, bias=True)] * 2, qkv_bias=True, o_bias=True))),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096},
         ModelOptions(layers=layers(MLP, MLP, qkv_bias=True))),
        ({"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": False},
         ModelOptions(layers=layers(MLP, MLP, head_norms=True))),
        ({"architectures": ["MixtralForCausalLM"], "sliding_window": None},
         ModelOptions(layers=layers(EXPERTS, EXPERTS), renamed=NAMES)),
        ({"architectures": ["Qwen2MoeForCausalLM"], "qkv_bias": False, "num_experts": 3, "decoder_sparse_step": 2},
         ModelOptions(layers=layers(MLP, ExpertsOptions(
             num_experts=3, top_k=3, expert=MLPOptions(intermediate_size=1408), norm_topk_prob=False,
             shared=MLPOptions(intermediate_size=5632))))),
        ({"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [1], "norm_topk_prob": True},
         ModelOptions(layers=layers(ExpertsOptions(
             num_experts=128, top_k=8, expert=MLPOptions(intermediate_size=768), norm_topk_prob=True), MLP,
             head_norms=True))),
        ({"architectures": ["DeepseekV2ForCausalLM"], "num_experts_per_tok": 6, "q_lora_rank": None, "head_dim": None},
         ModelOptions(
             layers=(LayerOptions(LATENT, deepseek_experts(
                 64, 6, 1407, 2, num_groups=1, top_groups=1, scoring="softmax", has_bias=False, scale=1.0)),) * 2,
             renamed=DEEPSEEK_NAMES)),
        ({"architectures": ["DeepseekV3ForCausalLM"], "rope_interleave": False, "first_k_dense_replace": 1,
          "num_hidden_layers": 2, "rope_scaling": {"type": "yarn", "factor": 40, "mscale_all_dim": 1.0,
          "original_max_position_embeddings": 4096}},
         ModelOptions(
             layers=(LayerOptions(V3_ATTENTION, MLP), LayerOptions(V3_ATTENTION, V3_EXPERTS)),
             renamed=(*DEEPSEEK_NAMES, *mtp_names(2)), num_extra_layers=1,
             mtp=MTPOptions(layer=LayerOptions(V3_ATTENTION, V3_EXPERTS)))),
        ({"architectures": ["Ernie4_5_MoeForCausalLM"], "moe_num_experts": 3, "moe_num_shared_experts": 0,
          "moe_layer_interval": 2, "rope_theta": 10000.0, "max_position_embeddings": 64},
         ModelOptions(
             layers=layers(MLP, ExpertsOptions(
                 num_experts=3, top_k=3, expert=MLPOptions(intermediate_size=1536), norm_topk_prob=True,
                 shared_has_gate=False,
                 grouped=GroupedRouting(num_groups=1, top_groups=1, scoring="softmax", has_bias=True, scale=1.0),
             ), interleaved=True),
             renamed=ERNIE_NAMES, skipped=("mtp_",))),
        ({"architectures": ["Glm4MoeForCausalLM"], "num_mtp_layers": 2, "head_dim": 8, "rope_theta": 10000.0,
          "first_k_dense_replace": 2, "attention_bias": True},
         ModelOptions(
             layers=layers(MLP, MLP, qkv_bias=True, rope=replace(ROPE, partial_rotary_factor=0.5)),
             renamed=(*DEEPSEEK_NAMES, *mtp_names(2)), num_extra_layers=2,
             mtp=MTPOptions(layer=layers(MLP, qkv_bias=True, rope=replace(ROPE, partial_rotary_factor=0.5))[0]))),
        ({"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1},
         ModelOptions(
             layers=layers(MLP, MLP, qkv_bias=True), renamed=MIMO_NAMES,
             mtp=MTPOptions(layer=layers(MLP, qkv_bias=True)[0], embedding_first=False))),
        ({"architectures": ["GptOssForCausalLM"], "rope_scaling": {"rope_type": "default"}, "attention_bias": False,
          "num_local_experts": 3, "sliding_window": 7},
         ModelOptions(
             layers=tuple(LayerOptions(AttentionOptions(rope=ROPE, sinks=True, window=window), ExpertsOptions(
                 num_experts=3, top_k=3, expert=replace(MLP, activation="swigluoai", bias=True), norm_topk_prob=True,
                 stack="interleaved")) for window in (7, None)),
             norms=replace(PRE_NORMS, is_float32=True), renamed=GPT_OSS_NAMES)),
        ({"architectures": ["GraniteForCausalLM"], "logits_scaling": 8, "residual_multiplier": 0.22},
         ModelOptions(layers=layers(MLP, MLP, scale=1.0), logits_divisor=8.0, residual_multiplier=0.22)),
        ({"architectures": ["HunYuanMoEV1ForCausalLM"], "num_experts": 8, "moe_topk": [3, 3],
          "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}},
         ModelOptions(
             layers=layers(*[ExpertsOptions(
                 num_experts=8, top_k=3, expert=MLP, norm_topk_prob=True, shared=MLP, shared_has_gate=False)] * 2,
                 rope=replace(ROPE, rope_theta=1e10), head_norms=True, norms_after_rope=True),
             renamed=HUNYUAN_NAMES)),
        ({"architectures": ["MiniMaxM2ForCausalLM"], "num_local_experts": 3, "rotary_dim": 2, "rope_theta": 10000.0,
          "quantization_config": {"quant_method": "fp8", "fmt": "float8_e4m3fn", "weight_block_size": [128, 128]}},
         ModelOptions(
             layers=layers(*[ExpertsOptions(
                 num_experts=3, top_k=3, expert=MLP, norm_topk_prob=True,
                 grouped=GroupedRouting(num_groups=1, top_groups=1, scoring="sigmoid", has_bias=True, scale=1.0))] * 2,
                 rope=replace(ROPE, partial_rotary_factor=0.5), projection_norms=True),
             renamed=MINIMAX_NAMES)),
        ({"architectures": ["Olmo2ForCausalLM"]},
         ModelOptions(layers=layers(MLP, MLP, projection_norms=True), norms=NormOptions(
             after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm", is_float32=True))),
        ({"architectures": ["Phi3ForCausalLM"]}, ModelOptions(layers=layers(MLP, MLP), fused=(
            ("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))))),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [0, 1]},
         ModelOptions(layers=layers(MLP, rope=None) + layers(MLP))),
        ({"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 9},
         ModelOptions(layers=(layers(MLP, MLP, MLP) + layers(MLP, rope=None)) * 2 + layers(MLP))),
    ],
)  # fmt: skip
def test_a_family_reads_its_options(changes: dict[str, Any], options: ModelOptions, tmp_path: Path) -> None:
    folder = make_small_checkpoint(tmp_path)
    edit_json(folder / "config.json", **changes)
    assert CheckpointConfig.from_folder(folder).options == options


def rope_of(config: CheckpointConfig, layer: int) -> RopeConfig:
    rope = config.options.layers[layer].attention.rope
    assert rope is not None
    return rope


def attention_of(config: CheckpointConfig, layer: int) -> AttentionOptions:
    attention = config.options.layers[layer].attention
    assert isinstance(attention, AttentionOptions)
    return attention


def test_heads_of_qwen3_have_128_features_where_nothing_is_said(tmp_path: Path) -> None:
    folder = make_small_checkpoint(tmp_path)
    edit_json(folder / "config.json", architectures=["Qwen3ForCausalLM"], head_dim=None)
    assert CheckpointConfig.from_folder(folder).head_size == 128


@pytest.mark.parametrize(
    ("architecture", "defaults"),
    [
        ("LlamaForCausalLM", (1e-6, 2048, 10000.0, False)),
        ("Olmo2ForCausalLM", (1e-5, 2048, 10000.0, False)),
        ("Phi3ForCausalLM", (1e-5, 4096, 10000.0, False)),
        ("SmolLM3ForCausalLM", (1e-6, 32768, 2e6, True)),
    ],
)
def test_what_is_missing_is_what_transformers_takes(
    architecture: str, defaults: tuple[float, int, float, bool], tmp_path: Path
) -> None:
    folder = make_small_checkpoint(tmp_path)
    nothing = dict.fromkeys(("rms_norm_eps", "max_position_embeddings", "rope_theta", "tie_word_embeddings"))
    edit_json(folder / "config.json", architectures=[architecture], **nothing)
    config = CheckpointConfig.from_folder(folder)
    found = (
        config.rms_norm_eps,
        config.max_position_embeddings,
        rope_of(config, 0).rope_theta,
        config.tie_word_embeddings,
    )
    assert found == defaults
    theirs = AutoConfig.for_model(architecture.removesuffix("ForCausalLM").lower())
    assert found == (
        theirs.rms_norm_eps, theirs.max_position_embeddings, theirs.rope_parameters["rope_theta"],
        theirs.tie_word_embeddings,
    )  # fmt: skip


@pytest.mark.parametrize("architecture", [
    "ApertusForCausalLM", "ArceeForCausalLM", "Cohere2ForCausalLM", "CohereForCausalLM", "Exaone4ForCausalLM",
    "ExaoneForCausalLM", "ExaoneMoeForCausalLM", "FalconForCausalLM", "GPTNeoXForCausalLM", "GemmaForCausalLM",
    "HeliumForCausalLM", "MellumForCausalLM", "NemotronForCausalLM", "PhiForCausalLM", "PhimoeForCausalLM",
    "StableLmForCausalLM", "Starcoder2ForCausalLM", "VaultGemmaForCausalLM",
])  # fmt: skip
def test_sizes_alone_are_completed_as_transformers_does(architecture: str, tmp_path: Path) -> None:
    theirs = AutoConfig.for_model(ARCHITECTURES[architecture])
    sizes = ("hidden_size", "num_attention_heads", "vocab_size", "num_hidden_layers", "intermediate_size")
    given = {name: getattr(theirs, name) for name in sizes if hasattr(theirs, name)}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], **given}))
    config = CheckpointConfig.from_folder(tmp_path)
    eps = next(
        value
        for name in ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "layer_norm_epsilon", "norm_eps")
        if (value := getattr(theirs, name, None)) is not None
    )
    assert (config.rms_norm_eps, config.max_position_embeddings) == (eps, theirs.max_position_embeddings)
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    num_kv_heads = 1 if architecture == "FalconForCausalLM" else getattr(theirs, "num_key_value_heads", None)
    assert config.num_kv_heads == (num_kv_heads or theirs.num_attention_heads)
    assert config.head_size == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    ropes, rope = (
        theirs.rope_parameters,
        next(one for one in config.options.layers if one.attention.rope).attention.rope,
    )
    ropes = ropes.get("full_attention", ropes)
    assert rope is not None
    assert (rope.rope_theta, rope.rope_type) == (ropes["rope_theta"], ropes["rope_type"])
    assert rope.partial_rotary_factor == ropes.get("partial_rotary_factor", 1.0)
    mlp = config.options.layers[-1].mlp
    size = mlp.intermediate_size if isinstance(mlp, MLPOptions) else mlp.expert.intermediate_size
    names = ("moe_intermediate_size", "ffn_hidden_size", "intermediate_size")
    assert size == next(getattr(theirs, name) for name in names if hasattr(theirs, name))


def test_falcon_before_its_new_architecture(tmp_path: Path) -> None:
    """One norm, one KV head, and no biases; or a norm each and as many KV heads as heads."""
    fields = {
        "architectures": ["FalconForCausalLM"], "hidden_size": 80, "num_attention_heads": 5, "vocab_size": 32,
        "num_hidden_layers": 1, "num_kv_heads": 5,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = CheckpointConfig.from_folder(tmp_path)
    mlp = MLPOptions(intermediate_size=320, activation="gelu", is_gated=False)
    assert config.options.layers == (LayerOptions(attention_of(config, 0), mlp),)
    assert (attention_of(config, 0).fused_name, config.num_kv_heads) == ("query_key_value", 1)
    assert (config.options.norms.names, config.options.parallel_residual) == (["input_layernorm"], True)
    (tmp_path / "config.json").write_text(json.dumps({**fields, "parallel_attn": False, "multi_query": False}))
    config = CheckpointConfig.from_folder(tmp_path)
    assert (config.options.norms.names, config.options.parallel_residual) == (PRE_NORMS.names, False)
    assert config.num_kv_heads == 5


def test_layers_without_a_window_are_not_rotated(tmp_path: Path) -> None:
    folder = make_small_checkpoint(tmp_path)
    for architecture in ("Cohere2ForCausalLM", "Exaone4ForCausalLM"):
        edit_json(folder / "config.json", architectures=[architecture], sliding_window_pattern=2, sliding_window=7)
        config = CheckpointConfig.from_folder(folder)
        assert config.windows == (7, None)
        assert [one.attention.rope is None for one in config.options.layers] == [False, True]
    edit_json(folder / "config.json", sliding_window_pattern="GL", num_hidden_layers=4)
    assert CheckpointConfig.from_folder(folder).windows == (None, 7, None, None)
    edit_json(folder / "config.json", sliding_window=None, sliding_window_pattern=None)
    config = CheckpointConfig.from_folder(folder)
    assert config.windows == (None,) * 4
    assert all(one.attention.rope is not None for one in config.options.layers)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        (
            "Exaone4ForCausalLM",
            {"sliding_window_pattern": "LX"},
            "sliding_window_pattern is 'LX'; it must be a number, or",
        ),
        ("FalconForCausalLM", {"alibi": True}, "alibi is True; it must be false"),
        ("FalconForCausalLM", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn is 2; it must be 1, as new_dec"),
        (
            "MellumForCausalLM",
            {"mlp_layer_types": ["dense"]},
            "mlp_layer_types is ['dense']; it must be dense or sparse",
        ),
        (
            "PhimoeForCausalLM",
            {
                "rope_scaling": {
                    "type": "longrope",
                    "short_factor": [1.0] * 2,
                    "long_factor": [2.0] * 2,
                    "short_mscale": 1.2,
                    "long_mscale": 1.3,
                }
            },
            "rope_scaling.long_mscale is 1.3; it must be short_mscale=1.2",
        ),
        ("PhiForCausalLM", {"qk_layernorm": True}, "qk_layernorm is True; it must be false; or set model_impl"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, "no_rope_layers is [1]; it must be a list of 2 numbers"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, "x"]}, "it must be a list of 2 numbers"),
        ("GptOssForCausalLM", {"swiglu_limit": 5}, "swiglu_limit is 5; it must be 7.0"),
        ("GptOssForCausalLM", {}, "rope_scaling is None; it must be given"),
        ("GraniteForCausalLM", {"logits_scaling": 0}, "logits_scaling is 0; it must be a finite number above 0"),
        ("Olmo2ForCausalLM", {"hidden_act": "relu"}, "hidden_act is 'relu'; it must be one of silu, gelu_pytorch_tanh"),
    ],
)
def test_a_family_refuses_what_it_cannot_serve(
    architecture: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = make_small_checkpoint(tmp_path)
    edit_json(folder / "config.json", architectures=[architecture], **changes)
    with pytest.raises(CheckpointError) as refused:
        CheckpointConfig.from_folder(folder)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("family", "name", "message"),
    [
        ("phi3", "self_attn.qkv_proj.weight", r"has shape \(159, 96\); config.json asks for 160 rows"),
        ("gpt-oss", "mlp.experts.down_proj", r"has shape \(4, 44, 60\); config.json asks for \(5, 44, 60\)"),
    ],
)
def test_a_fused_tensor_of_another_size_is_refused(
    family: str, name: str, message: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    name = f"model.layers.1.{name}"
    changed_copy(checkpoint(family), tmp_path, lambda weights: weights.update({name: weights[name][1:].clone()}))
    with pytest.raises(CheckpointError, match=rf"tensor {name} {message}"):
        check_checkpoint(tmp_path)


def test_an_offset_of_norms_is_added_in_float32(tmp_path: Path) -> None:
    """Rounded to bfloat16, 1.01 would be 1.0078."""
    config = CheckpointConfig.from_folder(make_small_checkpoint(tmp_path))
    norms = replace(config.options.norms, offset=1.0, is_float32=True)
    config = replace(config, options=replace(config.options, norms=norms))
    model = load_model(tmp_path, config, torch.bfloat16, max_model_len=8)
    weights = [model.norm.weight]
    for layer in model.layers.values():
        assert isinstance(layer, DecoderLayer)
        weights += [norm.weight for name in PRE_NORMS.names if (norm := layer.norm(name)) is not None]
    assert len(weights) == 5
    for weight in weights:
        assert torch.equal(weight, torch.full((16,), 0.01) + 1.0)


def test_embeddings_are_scaled_and_logits_divided_and_capped(tmp_path: Path) -> None:
    config = CheckpointConfig.from_folder(make_small_checkpoint(tmp_path))
    options = replace(config.options, embedding_scale=2.1, logits_divisor=4.0, logits_soft_cap=0.5)
    plain, scaled = (
        load_model(tmp_path, one, torch.bfloat16, max_model_len=8) for one in (config, replace(config, options=options))
    )
    tokens, hidden = torch.tensor([3, 0, 7]), torch.randn(3, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    scale = torch.tensor(2.1, dtype=torch.bfloat16)
    assert torch.equal(scaled.embed(tokens), plain.embed(tokens) * scale)
    logits = plain.compute_logits(hidden)
    assert logits is not None
    expected = 0.5 * torch.tanh(logits / 4.0 / 0.5)
    torch.testing.assert_close(scaled.compute_logits(hidden), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_sequences_longer_than_the_original_length(tmp_path: Path) -> None:
    """A model that is served with longer ones than it was trained with has one table for all of them. transformers'
    own follows the length of the sequence: it is the same where a prompt is already longer."""
    folder = make_checkpoint(tmp_path, "phi3", load_tokenizer(TINYPY))
    edit_json(folder / "config.json", original_max_position_embeddings=16)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [prompt for prompt in make_prompts(24, 515, max_length=60) if len(prompt) > 16]
    expected = [generate_greedily(model, prompt, 12).token_ids for prompt in prompts]
    llm = LLM(folder, dtype="float32", max_model_len=128)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
    llm.shutdown()
    assert [output.outputs[0].token_ids for output in outputs] == expected


FULL, SLIDING = "full_attention", "sliding_attention"
QWEN = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": 0}


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"]}, (4096, 4096)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 7}, (7, 7)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, ()),
        (QWEN, (4096, 4096)),
        ({**QWEN, "sliding_window": None}, ()),
        ({**QWEN, "max_window_layers": 1, "sliding_window": 7}, (None, 7)),
        ({**QWEN, "max_window_layers": 2, "sliding_window": 7}, ()),
        ({**QWEN, "max_window_layers": None, "sliding_window": 7}, ()),
        ({**QWEN, "layer_types": [SLIDING, FULL], "sliding_window": 7}, (7, None)),
        ({**QWEN, "use_sliding_window": False, "layer_types": [FULL, FULL]}, ()),
        ({**QWEN, "architectures": ["Qwen3ForCausalLM"], "sliding_window": 7}, (7, 7)),
        ({"architectures": ["Gemma2ForCausalLM"]}, (4096, None)),
        ({"architectures": ["Gemma2ForCausalLM"], "layer_types": [FULL, SLIDING], "sliding_window": 7}, (None, 7)),
        ({"architectures": ["Gemma3ForCausalLM"]}, (4096, 4096)),
        ({"architectures": ["Gemma3ForCausalLM"], "sliding_window_pattern": 2}, (4096, None)),
        ({"architectures": ["Olmo3ForCausalLM"], "sliding_window": 7}, (7, 7)),
        ({"architectures": ["Phi3ForCausalLM"]}, ()),
        ({"architectures": ["Phi3ForCausalLM"], "sliding_window": 7}, (7, 7)),
        ({"architectures": ["SmolLM3ForCausalLM"], "sliding_window": 7}, ()),
        ({"architectures": ["SmolLM3ForCausalLM"], "sliding_window": 7, "use_sliding_window": True,
          "no_rope_layer_interval": 2}, (None, 7)),
    ],
)  # fmt: skip
def test_which_layers_have_a_window(changes: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path) -> None:
    folder = make_small_checkpoint(tmp_path)
    edit_json(folder / "config.json", **changes)
    config = CheckpointConfig.from_folder(folder)
    assert config.windows == (windows or (None, None))


def test_what_gemmas_are_where_nothing_is_said(tmp_path: Path) -> None:
    folder = make_small_checkpoint(tmp_path)
    absent = dict.fromkeys(("head_dim", "rope_theta", "tie_word_embeddings"))
    edit_json(folder / "config.json", architectures=["Gemma2ForCausalLM"], **absent)
    config = CheckpointConfig.from_folder(folder)
    assert (config.head_size, config.tie_word_embeddings, rope_of(config, 0).rope_theta) == (256, True, 10000.0)
    assert (attention_of(config, 0).soft_cap, config.options.logits_soft_cap) == (50.0, 30.0)
    assert attention_of(config, 0).scale == 1 / 16
    edit_json(folder / "config.json", attn_logit_softcapping=None, final_logit_softcapping=None)
    config = CheckpointConfig.from_folder(folder)
    assert (attention_of(config, 0).soft_cap, config.options.logits_soft_cap) == (None, None)
    edit_json(
        folder / "config.json",
        architectures=["Gemma3ForCausalLM"],
        attn_logit_softcapping=50.0,
        sliding_window_pattern=2,
    )
    config = CheckpointConfig.from_folder(folder)
    assert (rope_of(config, 1).rope_theta, rope_of(config, 0).rope_theta) == (1e6, 10000.0)
    assert (attention_of(config, 1).soft_cap, config.options.logits_soft_cap) == (None, None)
    edit_json(folder / "config.json", rope_theta=7.0, rope_local_base_freq=5.0, final_logit_softcapping=9.0)
    config = CheckpointConfig.from_folder(folder)
    assert (rope_of(config, 1).rope_theta, rope_of(config, 0).rope_theta) == (7.0, 5.0)
    assert config.options.logits_soft_cap == 9.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 0}, "sliding_window is 0; it must be an integer from 1 to"),
        ({"layer_types": [SLIDING]}, "layer_types is .*; it must be full_attention or sliding_attention for each of 2"),
        ({"layer_types": [SLIDING, "chunked_attention"]}, "it must be full_attention or sliding_attention"),
        ({"layer_types": [SLIDING, FULL], "use_sliding_window": False}, "sliding_window is .* above 0 and in use"),
        ({"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 0}, "attn_logit_softcapping is 0; it must"),
        (
            {"architectures": ["Gemma2ForCausalLM"], "use_bidirectional_attention": True},
            "bidirectional_attention is Tr",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "rope_parameters": {SLIDING: {"rope_type": "linear"}}},
            "rope_parameters.sliding_attention.rope_type is 'linear'; it must be default",
        ),
    ],
)
def test_windows_that_make_no_sense_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = make_small_checkpoint(tmp_path)
    edit_json(folder / "config.json", **{**QWEN, **changes})
    with pytest.raises(CheckpointError, match=message):
        CheckpointConfig.from_folder(folder)


def test_a_norm_that_is_missing_is_named(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.k_norm.weight"
    changed_copy(checkpoint("qwen3"), tmp_path, lambda weights: weights.pop(name))
    with pytest.raises(CheckpointError, match=r"hold no layers\.1\.self_attn\.k_norm\.weight$"):
        check_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9; it must be an integer from 1 to 8"),
        ({"num_experts": 0}, "num_experts is 0; it must be an integer from 1 to"),
        ({"mlp_only_layers": ["1"]}, "mlp_only_layers is .'1'.; it must be a list of layers' numbers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0; it must be"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1; it must be true or false"),
        ({"architectures": ["DeepseekV2ForCausalLM"]}, "num_experts_per_tok is missing"),
        (
            {"architectures": ["DeepseekV2ForCausalLM"], "norm_topk_prob": True},
            "norm_topk_prob is True; it must be false",
        ),
        ({"architectures": ["DeepseekV3ForCausalLM"], "n_group": 7}, "n_group is 7; it must be a divisor of n_routed"),
        (
            {"architectures": ["DeepseekV3ForCausalLM"], "topk_group": 9},
            "topk_group is 9; it must be at most n_group=8",
        ),
        ({"architectures": ["DeepseekV3ForCausalLM"], "qk_rope_head_dim": 7}, "qk_rope_head_dim is 7; it must be even"),
        ({"architectures": ["MixtralForCausalLM"], "sliding_window": 0}, "sliding_window is 0; it must be an integer"),
        (
            {"architectures": ["Glm4MoeLiteForCausalLM"], "mlp_layer_types": ["dense"]},
            "mlp_layer_types is .'dense'.; it must be dense or sparse for each of 2 layers",
        ),
        (
            {"architectures": ["Glm4MoeLiteForCausalLM"], "partial_rotary_factor": 0.5},
            "partial_rotary_factor is 0.5; it must be 1, as qk_rope_head_dim=64",
        ),
        ({"architectures": ["Ernie4_5_MoeForCausalLM"], "use_bias": True}, "use_bias is True; it must be false"),
        (
            {"architectures": ["HunYuanMoEV1ForCausalLM"], "moe_topk": [1, 2]},
            r"moe_topk is \[1, 2\]; it must be the same number for each layer",
        ),
        ({"architectures": ["HunYuanMoEV1ForCausalLM"], "moe_topk": [9, 9]}, "moe_topk is 9; it must be an integer"),
        ({"architectures": ["MiniMaxM2ForCausalLM"], "scoring_func": "softmax"}, "scoring_func is 'softmax'; it must"),
        ({"architectures": ["MiniMaxM2ForCausalLM"], "use_qk_norm": False}, "use_qk_norm is False; it must be true"),
        ({"architectures": ["MiniMaxM2ForCausalLM"], "shared_intermediate_size": 8}, "shared_intermediate_size is 8"),
        (
            {"architectures": ["StableLmForCausalLM"], "partial_rotary_factor": 1e308},
            "partial_rotary_factor is 1e.308; it must be an",
        ),
        ({"architectures": ["MiniMaxM2ForCausalLM"], "rotary_dim": 3}, "partial_rotary_factor is 0.75; it must be an"),
        ({"architectures": ["OlmoeForCausalLM"], "clip_qkv": 8.0}, "clip_qkv is 8.0; it must be null"),
        ({"architectures": ["Dots1ForCausalLM"]}, "n_routed_experts is missing"),
    ],
)
def test_experts_that_cannot_be_are_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = make_small_checkpoint(tmp_path)
    edit_json(folder / "config.json", **{"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, **fields})
    with pytest.raises(CheckpointError, match=message):
        CheckpointConfig.from_folder(folder)


@pytest.mark.parametrize(
    ("name", "ranks", "is_expert_parallel", "message"),
    [
        ("qwen2", 1, True, "enable_expert_parallel is True; a Qwen2ForCausalLM has no experts to divide"),
        ("mixtral", 4, True, None),
        ("qwen3-moe", 2, False, None),
        ("qwen3-moe", 4, False, "moe_intermediate_size=38 is no multiple of it; .* it must be 1 or 2$"),
        ("qwen3-moe", 4, True, None),
        ("qwen2-moe", 4, True, None),
    ],
)
def test_how_experts_can_be_divided(
    name: str, ranks: int, is_expert_parallel: bool, message: str | None, checkpoint: Callable[[str], Path]
) -> None:
    config = CheckpointConfig.from_folder(checkpoint(name))
    if message is None:
        config.check_parallel(ranks, enable_expert_parallel=is_expert_parallel)
        return
    with pytest.raises(ValueError, match=message):
        config.check_parallel(ranks, enable_expert_parallel=is_expert_parallel)


def test_layers_of_multi_token_prediction_may_be_in_the_file(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    whole, more = checkpoint("deepseek-v3"), {"model.layers.3.eh_proj.weight": torch.ones(2, 2)}
    check_checkpoint(changed_copy(whole, tmp_path, lambda weights: weights.update(more)))
    more = {"model.layers.4.eh_proj.weight": torch.ones(2, 2)}
    changed_copy(whole, tmp_path, lambda weights: weights.update(more))
    with pytest.raises(CheckpointError, match=r"layers\.4\.eh_proj\.weight has no place in this architecture"):
        check_checkpoint(tmp_path)


def test_heads_of_multi_token_prediction_may_be_in_the_file(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    more = {"model.mtp_emb_norm.0.weight": torch.ones(2)}
    check_checkpoint(changed_copy(checkpoint("ernie4-5-moe"), tmp_path, lambda weights: weights.update(more)))


def test_sparse_attention_ends_where_it_would_leave_out_keys(checkpoint: Callable[[str], Path]) -> None:
    """Though the positions go on."""
    folder = checkpoint("deepseek-v32")
    config = CheckpointConfig.from_folder(folder)
    assert (config.max_position_embeddings, config.longest_model_len) == (500, 500)
    with pytest.raises(ValueError, match=r"max_model_len is 501; .* end at 500 .* or index_topk of sparse attention"):
        LLM(folder, dtype="float32", max_model_len=501)


CONDITIONAL = (
    "gemma3-conditional", "gemma4-unified", "glm4v-moe", "mistral3-conditional", "qwen3-5-conditional", "qwen3-vl",
)  # fmt: skip


@pytest.mark.parametrize("name", CONDITIONAL)
@pytest.mark.parametrize("is_inner", [False, True])
def test_a_text_model_has_the_names_of_old_and_new_checkpoints(
    name: str, is_inner: bool, checkpoint: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(checkpoint(name), tmp_path, dirs_exist_ok=True)
    weights, num_others = {}, 0
    for one, tensor in load_file(tmp_path / "model.safetensors").items():
        own = one.replace("model.language_model.", "language_model.model.")
        num_others += "language_model" not in one and one != "lm_head.weight"
        if is_inner:
            own = own.replace("language_model.model.", "model.language_model.").removeprefix("language_model.")
        weights[own] = tensor
    save_file(weights, tmp_path / "model.safetensors")
    config = CheckpointConfig.from_folder(tmp_path)
    with caplog.at_level("INFO", "quire_engine"):
        model = load_model(tmp_path, config, torch.float32, max_model_len=8)
    (line,) = (line for line in caplog.messages if "of other parts" in line)
    assert f"the text model has {len(weights) - num_others} tensors; {num_others} of other parts are skipped" in line
    assert num_others > 3
    (embedding,) = (tensor for one, tensor in weights.items() if one.endswith("embed_tokens.weight"))
    assert torch.equal(model.embed(torch.arange(515)), embedding * model.embedding_scale)


@pytest.mark.parametrize(("gone", "added", "message"), [
    ("model.language_model.layers.1.mlp.up_proj.weight", None, r"hold no layers\.1\.mlp\.up_proj\.weight$"),
    ("model.visual.patch_embed.proj.weight", None, None),
    (None, "model.language_model.layers.0.mlp.up_proj.bias", r"tensor model\.language_model\.layers.* has no place"),
    (None, "model.visual.anything", None),
])  # fmt: skip
def test_tensors_of_a_text_model_are_checked_and_others_are_not(
    gone: str | None, added: str | None, message: str | None, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    def change(weights: dict[str, torch.Tensor]) -> None:
        if gone is not None:
            del weights[gone]
        if added is not None:
            weights[added] = torch.ones(2)

    changed_copy(checkpoint("qwen3-vl"), tmp_path, change)
    with nullcontext() if message is None else pytest.raises(CheckpointError, match=message):
        check_checkpoint(tmp_path)


GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16",
    "eos_token_id": [1, 106], "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
}  # fmt: skip
"""As it is published."""


@pytest.mark.parametrize("named", [{}, {"architectures": None}, {"architectures": []}])
def test_gemma3_as_it_is_published(named: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**GEMMA3_4B, **named}))
    config = CheckpointConfig.from_folder(tmp_path)
    theirs = AutoConfig.from_pretrained(tmp_path).text_config
    for name in ("vocab_size", "max_position_embeddings", "hidden_size", "rms_norm_eps"):
        assert getattr(config, name) == getattr(theirs, name)
    assert (config.num_heads, config.num_kv_heads, config.head_size) == (8, 4, 256)
    assert (theirs.num_attention_heads, theirs.num_key_value_heads, theirs.head_dim) == (8, 4, 256)
    assert (config.tie_word_embeddings, config.dtype, config.eos_token_ids) == (True, "bfloat16", (1, 106))
    assert (rope_of(config, 5).rope_theta, rope_of(config, 5).factor) == (1e6, 8.0)
    assert rope_of(config, 4).rope_theta == 10000.0
    assert config.windows[4:7] == (1024, None, 1024)


GEMMA4_E2B = {
    "hidden_size": 1536, "intermediate_size": 6144, "model_type": "gemma4_text", "num_hidden_layers": 35,
    "num_key_value_heads": 1, "num_kv_shared_layers": 20, "use_double_wide_mlp": True, "global_head_dim": 512,
    "layer_types": [*[SLIDING] * 4, FULL] * 7, "final_logit_softcapping": 30.0,
}  # fmt: skip
GEMMA4_MOE = {
    "hidden_size": 2816, "intermediate_size": 2112, "model_type": "gemma4_text", "num_hidden_layers": 30,
    "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2, "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8,
    "moe_intermediate_size": 704, "sliding_window": 1024,
}  # fmt: skip


@pytest.mark.parametrize("text", [GEMMA4_E2B, GEMMA4_MOE], ids=["small", "experts"])
@pytest.mark.parametrize("stored", [False, True], ids=["as published", "as transformers stores it"])
def test_gemma4_as_transformers_reads_it(text: dict[str, Any], stored: bool, tmp_path: Path) -> None:
    whole = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    theirs = AutoConfig.from_pretrained(tmp_path)
    if stored:
        theirs.save_pretrained(tmp_path)
    config, theirs = CheckpointConfig.from_folder(tmp_path), theirs.text_config
    for name in ("vocab_size", "max_position_embeddings", "hidden_size", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(config, name) == getattr(theirs, name)
    sharing = theirs.kv_sharing_modes
    for number, layer in enumerate(config.options.layers):
        attention, own = layer.attention, theirs.per_layer_config[number]
        assert isinstance(attention, AttentionOptions)
        assert (attention.head_size or config.head_size) == own.head_dim
        assert (attention.num_kv_heads or config.num_kv_heads) == own.num_key_value_heads
        assert attention.window == (theirs.sliding_window if theirs.layer_types[number] == SLIDING else None)
        assert attention.keys_are_values == (theirs.attention_k_eq_v and attention.window is None)
        assert (attention.cache_of is not None) == (sharing[number] == "reuse")
        if attention.cache_of is not None:
            assert sharing[attention.cache_of] == "store"
            assert theirs.layer_types[attention.cache_of] == theirs.layer_types[number]
        rope = theirs.rope_parameters[theirs.layer_types[number]]
        assert attention.rope is not None
        assert (attention.rope.rope_type, attention.rope.rope_theta) == (rope["rope_type"], rope["rope_theta"])
    inputs = config.options.layer_inputs
    assert (0 if inputs is None else inputs.size) == theirs.hidden_size_per_layer_input
    assert (config.expert_shape or (0, None))[1] == theirs.num_experts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'; it must be null or vision"),
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers is 3; it must be an integer from 0 to 2"),
        (
            {"num_kv_shared_layers": 2, "layer_types": [FULL, SLIDING, FULL]},
            "num_kv_shared_layers is 2; it must be less",
        ),
        (
            {"per_layer_config": {"2": {"intermediate_size": 8}}},
            "per_layer_config.2 is {'intermediate_size': 8}; it must",
        ),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config.0 is {'head_dim': 8}; it must be"),
        ({"enable_moe_block": True}, "num_experts is missing"),
        ({"rope_parameters": {FULL: {"rope_type": "axial"}}}, "full_attention.rope_type is 'axial'; it must be one of"),
        ({"num_key_value_heads": 3, "num_attention_heads": 4}, "num_attention_heads is 4; it must be a multiple of"),
    ],
)
def test_what_gemma4_does_not_know_is_rejected(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = {"architectures": ["Gemma4ForCausalLM"], **GEMMA4_E2B, "num_hidden_layers": 3, "num_kv_shared_layers": 0}
    (tmp_path / "config.json").write_text(json.dumps({**config, "layer_types": None, **changes}))
    with pytest.raises(CheckpointError) as rejected:
        CheckpointConfig.from_folder(tmp_path)
    assert message in str(rejected.value)


COHERE2_MOE = {
    "model_type": "cohere2_moe", "num_hidden_layers": 9, "hidden_size": 512, "num_attention_heads": 4,
    "intermediate_size": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"first_k_dense_replace": 2, "prefix_dense_intermediate_size": 96, "rope_theta": 5e4},
        {"first_k_dense_replace": 3, "prefix_dense_sliding_window_pattern": 3, "num_shared_experts": 2},
        {"num_shared_experts": 1, "shared_expert_combination_strategy": "sum", "rms_norm_eps": 1e-3,
         "expert_selection_fn": "sigmoid", "norm_topk_prob": False},
        {"mlp_layer_types": ["dense", *["sparse"] * 8], "layer_types": [*[FULL, SLIDING, FULL] * 3]},
    ],
    ids=["defaults", "rotated", "period", "sum", "types"],
)  # fmt: skip
@pytest.mark.parametrize("stored", [False, True], ids=["as published", "as transformers stores it"])
def test_cohere2_moe_as_transformers_reads_it(changes: dict[str, Any], stored: bool, tmp_path: Path) -> None:
    theirs, architectures = AutoConfig.for_model(**COHERE2_MOE, **changes), ["Cohere2MoeForCausalLM"]
    given = json.loads(theirs.to_json_string(use_diff=False)) if stored else {**COHERE2_MOE, **changes}
    (tmp_path / "config.json").write_text(json.dumps({**given, "architectures": architectures, "vocab_size": 256000}))
    config = CheckpointConfig.from_folder(tmp_path)
    for name in ("vocab_size", "max_position_embeddings", "hidden_size", "tie_word_embeddings"):
        assert getattr(config, name) == getattr(theirs, name)
    assert (config.num_kv_heads, config.head_size) == (theirs.num_key_value_heads, theirs.head_dim)
    assert config.rms_norm_eps == (theirs.rms_norm_eps or theirs.layer_norm_eps)
    assert config.options.norms.is_layer_norm == (theirs.rms_norm_eps is None)
    is_mean = bool(theirs.num_shared_experts) and theirs.shared_expert_combination_strategy == "average"
    assert dict(config.options.scaled) == ({".shared_expert.down_proj": 0.5} if is_mean else {})
    for number, layer in enumerate(config.options.layers):
        attention, mlp, kind = layer.attention, layer.mlp, theirs.mlp_layer_types[number]
        assert isinstance(attention, AttentionOptions)
        is_sliding = theirs.layer_types[number] == SLIDING
        assert attention.window == (theirs.sliding_window if is_sliding else None)
        forced = kind == "dense" and theirs.prefix_dense_sliding_window_pattern == 1
        assert (attention.rope is not None) == (is_sliding or forced)
        assert attention.rope is None or attention.rope.rope_theta == theirs.rope_parameters["rope_theta"]
        if kind == "dense":
            assert isinstance(mlp, MLPOptions)
            assert mlp.intermediate_size == (theirs.prefix_dense_intermediate_size or theirs.intermediate_size)
            continue
        assert isinstance(mlp, ExpertsOptions)
        assert (mlp.num_experts, mlp.top_k) == (theirs.num_experts, theirs.num_experts_per_tok)
        assert mlp.expert.intermediate_size == theirs.intermediate_size
        assert mlp.norm_topk_prob == (theirs.expert_selection_fn == "softmax" or theirs.norm_topk_prob)
        assert (mlp.shared.intermediate_size if mlp.shared else 0) == theirs.num_shared_experts * 64
        assert (mlp.grouped.scale if mlp.grouped else 1.0) == (0.5 if is_mean else 1.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types is ['dense']; it must be dense or sparse for each of 9"),
        ({"expert_selection_fn": "relu"}, "expert_selection_fn is 'relu'; it must be one of softmax, sigmoid"),
        ({"shared_expert_combination_strategy": "max"}, "it must be one of average, sum"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9; it must be an integer from 1 to 8"),
        ({"first_k_dense_replace": 10}, "first_k_dense_replace is 10; it must be an integer from 0 to 9"),
    ],
)
def test_what_cohere2_moe_does_not_know_is_rejected(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = {"architectures": ["Cohere2MoeForCausalLM"], **COHERE2_MOE, "vocab_size": 32, **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as rejected:
        CheckpointConfig.from_folder(tmp_path)
    assert message in str(rejected.value)


LLAMA4 = {
    "model_type": "llama4_text", "hidden_size": 5120, "num_attention_heads": 40, "num_hidden_layers": 48,
    "no_rope_layers": [], "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_local_experts": 128,
    "interleave_moe_layer_step": 2, "attention_chunk_size": 8192, "use_qk_norm": False,
    "rope_scaling": {
        "factor": 16.0, "rope_type": "llama3", "original_max_position_embeddings": 8192, "high_freq_factor": 1.0,
        "low_freq_factor": 1.0,
    },
}  # fmt: skip
"""As it is published, but for what transformers adds."""


@pytest.mark.parametrize("text", [LLAMA4, {"model_type": "llama4_text"}], ids=["published", "defaults"])
def test_llama4_as_transformers_reads_it(text: dict[str, Any], tmp_path: Path) -> None:
    whole = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    config, theirs = CheckpointConfig.from_folder(tmp_path), AutoConfig.from_pretrained(tmp_path).text_config
    for name in ("vocab_size", "max_position_embeddings", "hidden_size", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(config, name) == getattr(theirs, name)
    sizes = theirs.num_attention_heads, theirs.num_key_value_heads, theirs.head_dim
    assert (config.num_heads, config.num_kv_heads, config.head_size) == sizes
    for number, layer in enumerate(config.options.layers):
        attention, mlp, is_rotated = layer.attention, layer.mlp, bool(theirs.no_rope_layers[number])
        assert isinstance(attention, AttentionOptions)
        assert attention.rope is not None
        assert (attention.rope.rope_type == "none", attention.interleaved) == (not is_rotated, is_rotated)
        assert attention.unit_norms == (theirs.use_qk_norm and is_rotated)
        is_chunked = theirs.layer_types[number] == "chunked_attention"
        assert (attention.window, attention.is_chunked) == (8192 if is_chunked else None, is_chunked)
        assert isinstance(mlp, ExpertsOptions) == (number in theirs.moe_layers)
        if isinstance(mlp, ExpertsOptions):
            assert (mlp.num_experts, mlp.expert.intermediate_size) == (theirs.num_local_experts, 8192)
        else:
            assert mlp.intermediate_size == theirs.intermediate_size_mlp
    assert rope_of(config, 0).rope_type == ("llama3" if "rope_scaling" in text else "default")
    assert rope_of(config, 0).rope_theta == 500000.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 2}, "num_experts_per_tok is 2; it must be an integer from 1 to 1"),
        ({"layer_types": [FULL] * 47 + [SLIDING]}, "it must be full_attention or chunked_attention for each of 48"),
        (
            {"attention_chunk_size": None, "layer_types": ["chunked_attention"] * 48},
            "attention_chunk_size is None; it must",
        ),
        ({"moe_layers": [48]}, "moe_layers is [48]; it must be a list of numbers of the 48 layers"),
        ({"attn_scale": 0}, "attn_scale is 0; it must be a finite number above 0"),
    ],
)
def test_what_llama4_does_not_know_is_rejected(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Llama4ForCausalLM"], **LLAMA4, **changes}))
    with pytest.raises(CheckpointError) as rejected:
        CheckpointConfig.from_folder(tmp_path)
    assert message in str(rejected.value)


def test_layers_that_share_a_cache_are_one_stage(checkpoint: Callable[[str], Path]) -> None:
    config = CheckpointConfig.from_folder(checkpoint("gemma4-conditional"))
    config.check_parallel(1, 2)
    with pytest.raises(ValueError, match="must be at most 2, as the last 4 layers, which share caches, are one stage"):
        config.check_parallel(1, 3)


def test_gemma4_without_what_training_left(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Published checkpoints have keys and values of layers that use another's."""

    def change(weights: dict[str, torch.Tensor]) -> None:
        for name in ("k_proj", "v_proj", "k_norm"):
            key = f"model.language_model.layers.2.self_attn.{name}.weight"
            assert key.replace("layers.2", "layers.3") not in weights
            weights[key.replace("layers.2", "layers.3")] = weights[key].clone()

    check_checkpoint(changed_copy(checkpoint("gemma4-conditional"), tmp_path, change))


def test_gemma4_with_experts_one_by_one(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Quantisers save them so, and some of them with vLLM's names."""

    def change(weights: dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if ".experts." in name]:
            layer, stack = name.split(".experts.")
            for number, matrix in enumerate(weights.pop(name)):
                parts = ("gate_proj", "up_proj") if stack == "gate_up_proj" else (stack,)
                for part, one in zip(parts, matrix.chunk(len(parts)), strict=True):
                    weights[f"{layer}.moe.experts.{number}.{part}.weight"] = one.clone()

    check_checkpoint(changed_copy(checkpoint("gemma4-moe"), tmp_path, change))


@pytest.mark.parametrize(
    ("architecture", "text", "changes", "message"),
    [
        ("Gemma3", None, {}, "json: hidden_size is missing"),
        ("Gemma3", "text", {}, "text_config is 'text'; it must be an object"),
        ("Gemma3", {"model_type": "llama"}, {}, "text_config.model_type is 'llama'; it must be gemma3_text"),
        ("Mistral3", {"model_type": "qwen3"}, {}, "text_config.model_type is 'qwen3'; it must be one of mistral, min"),
        ("Mistral3", {"model_type": "ministral3"}, {}, "text_config.rope_parameters is None; it must be given"),
        ("Qwen3VL", {**CONFIG, "model_type": "qwen3_vl_text", "vocab_size": "x"}, {}, "text_config.vocab_size is 'x'"),
        (
            "Mistral3",
            {**CONFIG, "model_type": "mistral"},
            {"dtype": "int3"},
            "json: dtype is 'int3'; it must be one of",
        ),
        (
            "Mistral3",
            {**CONFIG, "model_type": "mistral", "rope_parameters": {"rope_type": "yarn", "factor": -1}},
            {},
            "text_config.rope_parameters.factor is -1; it must be a finite number above 0",
        ),
        (
            "Mistral3",
            {**CONFIG, "model_type": "mistral", "rope_scaling": {"type": "mrope"}},
            {},
            "text_config.rope_scaling.type is 'mrope'; it must be one of default,",
        ),
    ],
)
def test_errors_name_the_field_inside_text_config(
    architecture: str, text: object, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = {"architectures": [f"{architecture}ForConditionalGeneration"], "text_config": text, **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as rejected:
        CheckpointConfig.from_folder(tmp_path)
    assert message in str(rejected.value)


def test_an_expert_that_is_missing_is_named(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.6.down_proj.weight"
    changed_copy(checkpoint("qwen2-moe"), tmp_path, lambda weights: weights.pop(name))
    with pytest.raises(CheckpointError, match=r"hold no layers\.1\.mlp\.experts\.6\.down_proj\.weight$"):
        check_checkpoint(tmp_path)
