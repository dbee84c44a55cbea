"""Families with recurrent layers: what each reads in `config.json`, and the tensors that its checkpoints hold."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine import LLM, SamplingParams
from quire_engine.errors import CheckpointError
from quire_engine.models import CheckpointConfig, check_checkpoint
from quire_engine.models.options import (
    AttentionOptions,
    ExpertsOptions,
    GatedDeltaOptions,
    LatentAttentionOptions,
    MLPOptions,
    RgLruOptions,
    ShortConvOptions,
)
from safetensors.torch import load_file, save_file
from support.checkpoints import edit_json, make_small_checkpoint
from transformers import AutoConfig

QWEN = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 8, "num_hidden_layers": 5,
    "head_dim": 8,
}  # fmt: skip
LFM = {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "num_hidden_layers": 3}
OLMO = {"architectures": ["OlmoHybridForCausalLM"], "model_type": "olmo_hybrid", "num_hidden_layers": 4}

KIMI = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "num_hidden_layers": 5, "head_dim": 72,
    "linear_attn_config": {
        "full_attn_layers": [4], "kda_layers": [1, 2, 3, 5], "head_dim": 8, "num_heads": 4, "short_conv_kernel_size": 3,
    },
    "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "mla_use_nope": True, "moe_intermediate_size": 12, "moe_layer_freq": 1, "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid", "num_expert_group": 1, "num_experts": 16, "num_experts_per_token": 8,
    "num_nextn_predict_layers": 0, "num_shared_experts": 1, "routed_scaling_factor": 2.446, "topk_group": 1,
    "use_grouped_topk": True, "model_max_length": 4096, "max_position_embeddings": None, "rope_scaling": None,
}  # fmt: skip
"""With the fields of the published file."""


def config_of(folder: Path, **fields: Any) -> CheckpointConfig:
    make_small_checkpoint(folder)
    edit_json(folder / "config.json", **fields)
    return CheckpointConfig.from_folder(folder)


def test_which_layers_of_qwen_attend(tmp_path: Path) -> None:
    config = config_of(tmp_path, **QWEN)
    assert [layer.attention is None for layer in config.options.layers] == [True, True, True, False, True]
    attention, delta = config.options.layers[3].attention, config.options.layers[0].state
    assert isinstance(attention, AttentionOptions)
    assert attention.output_gate
    assert attention.rope is not None
    assert attention.rope.partial_rotary_factor == 0.25
    assert delta == GatedDeltaOptions(
        num_key_heads=2, num_value_heads=4, key_size=4, value_size=8, conv_size=4, by_key_head=False
    )
    config = config_of(tmp_path, **QWEN, full_attention_interval=2)
    assert [layer.attention is None for layer in config.options.layers] == [True, False, True, False, True]


def test_heads_of_olmo_where_nothing_is_said(tmp_path: Path) -> None:
    config = config_of(tmp_path, **OLMO)
    assert config.options.layers[0].state == GatedDeltaOptions(
        num_key_heads=4, num_value_heads=4, key_size=3, value_size=6, conv_size=4, norm_eps=1e-5, beta_scale=2.0
    )
    attention = config.options.layers[3].attention
    assert isinstance(attention, AttentionOptions)
    assert attention.rope is not None
    config = config_of(tmp_path, **OLMO, rope_parameters={"rope_type": "default", "rope_theta": None})
    attention = config.options.layers[3].attention
    assert isinstance(attention, AttentionOptions)
    assert attention.rope is None


def test_kimi_as_it_is_published(tmp_path: Path) -> None:
    config = config_of(tmp_path, **KIMI)
    delta = GatedDeltaOptions(
        num_key_heads=4, num_value_heads=4, key_size=8, value_size=8, conv_size=3, gate_rank=8
    )  # fmt: skip
    assert [layer.state for layer in config.options.layers] == [delta, delta, delta, None, delta]
    latent = config.options.layers[3].attention
    assert isinstance(latent, LatentAttentionOptions)
    assert (latent.rope.rope_type, latent.query_rank, latent.scale) == ("none", None, 12**-0.5)
    dense, *others = (layer.mlp for layer in config.options.layers)
    assert isinstance(dense, MLPOptions)
    for experts in others:
        assert isinstance(experts, ExpertsOptions)
        assert (experts.num_experts, experts.top_k, experts.norm_topk_prob) == (16, 8, True)
        assert experts.grouped is not None
        assert experts.grouped.scale == 2.446
    assert config.max_position_embeddings == 4096


LFM3 = {
    "architectures": ["Lfm3ForCausalLM"], "model_type": "lfm3", "hidden_size": 2048, "num_hidden_layers": 6,
    "vocab_size": 512,
}  # fmt: skip
GRIFFIN = {
    "architectures": ["RecurrentGemmaForCausalLM"], "model_type": "recurrent_gemma", "hidden_size": 2560,
    "num_hidden_layers": 4, "num_attention_heads": 10, "num_key_value_heads": 1, "intermediate_size": 15360,
    "lru_width": 2560, "attention_window_size": 2048, "conv1d_width": 4, "logits_soft_cap": 30.0, "head_dim": 256,
    "block_types": ["recurrent", "recurrent", "attention"], "hidden_activation": "gelu_pytorch_tanh",
    "vocab_size": 256000, "rms_norm_eps": 1e-6, "w_init_variance_scale": 0.01, "attention_bias": False,
    "final_w_init_variance_scale": 0.0769, "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "eos_token_id": 1,
}  # fmt: skip
"""With the fields of the published file of 2B, and fewer layers."""


@pytest.mark.parametrize(("fields", "is_stored"), [(LFM3, False), (LFM3, True), (GRIFFIN, False), (GRIFFIN, True)])
def test_as_transformers_reads_it(fields: dict[str, Any], is_stored: bool, tmp_path: Path) -> None:
    """Of LFM3 all defaults."""
    theirs = AutoConfig.for_model(**fields)
    given = json.loads(theirs.to_json_string(use_diff=False)) if is_stored else {}
    (tmp_path / "config.json").write_text(json.dumps({**fields, **given}))
    config = CheckpointConfig.from_folder(tmp_path)
    for name in ("vocab_size", "hidden_size", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(config, name) == getattr(theirs, name)
    sizes = theirs.num_attention_heads, theirs.num_key_value_heads, theirs.head_dim
    assert (config.num_heads, config.num_kv_heads, config.head_size) == sizes
    kinds = theirs.layer_types
    assert len(config.options.layers) == theirs.num_hidden_layers == len(kinds)
    for layer, kind in zip(config.options.layers, kinds, strict=True):
        assert isinstance(layer.mlp, MLPOptions)
        assert (layer.attention is None) == (kind in ("conv", "linear_attention"))
        if isinstance(layer.attention, AttentionOptions):
            rope, own = layer.attention.rope, theirs.rope_parameters.get(kind, theirs.rope_parameters)
            assert layer.attention.window == (theirs.sliding_window if kind == "sliding_attention" else None)
            assert rope is not None
            assert (rope.rope_type, rope.rope_theta, rope.partial_rotary_factor) == (
                own["rope_type"], own["rope_theta"], own.get("partial_rotary_factor", 1.0),
            )  # fmt: skip
    first, mlp = config.options.layers[0].state, config.options.layers[0].mlp
    if fields is LFM3:
        assert first == ShortConvOptions(size=2048, conv_size=7)
        assert mlp == MLPOptions(intermediate_size=7680)
        assert config.max_position_embeddings == 128000
    else:
        assert first == RgLruOptions(width=2560, num_heads=10, conv_size=4, activation="gelu_tanh")
        assert mlp == MLPOptions(intermediate_size=7680, activation="gelu_tanh", bias=True)
        assert config.options.embedding_scale == torch.tensor(2560**0.5, dtype=torch.bfloat16).item() == 50.5
        assert (config.max_position_embeddings, config.options.logits_soft_cap) == (8192, 30.0)


def test_lfm_as_it_is_published(tmp_path: Path) -> None:
    """With the names that fields had at first."""
    config = config_of(
        tmp_path, **LFM, full_attn_idxs=[1], block_ff_dim=100, block_multiple_of=16, conv_L_cache=5, norm_eps=1e-4,
        tie_embedding=True, tie_word_embeddings=None, rms_norm_eps=None, rope_theta=None, theta=1000.0,
    )  # fmt: skip
    assert [layer.state for layer in config.options.layers] == [
        ShortConvOptions(size=16, conv_size=5), None, ShortConvOptions(size=16, conv_size=5)
    ]  # fmt: skip
    attention = config.options.layers[1].attention
    assert isinstance(attention, AttentionOptions)
    assert attention.rope is not None
    assert attention.rope.rope_theta == 1000.0
    assert config.options.layers[0].mlp == MLPOptions(intermediate_size=80)  # two thirds of 100, rounded up
    assert (config.tie_word_embeddings, config.rms_norm_eps) == (True, 1e-4)
    assert config.windows == (0, None, 0)
    assert config.state_tokens == 256, "more than keys and values of as many bytes"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({**QWEN, "layer_types": ["conv"] * 5}, "layer_types is .*; it must be linear_attention or full_attention for"),
        ({**QWEN, "linear_num_value_heads": 3}, "linear_num_value_heads is 3; it must be a multiple of linear_num_key"),
        ({**QWEN, "hidden_act": "gelu_pytorch_tanh"}, "hidden_act is 'gelu_pytorch_tanh'; it must be silu"),
        ({**QWEN, "linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0; it must be an integer from 1"),
        ({**LFM, "full_attn_idxs": ["1"]}, "full_attn_idxs is .'1'.; it must be a list of layers' numbers"),
        ({**LFM, "conv_bias": 1}, "conv_bias is 1; it must be true or false"),
        ({**OLMO, "linear_allow_neg_eigval": 2}, "linear_allow_neg_eigval is 2; it must be true or false"),
        ({**LFM3, "layer_types": ["linear_attention"] * 6}, "layer_types is .*; it must be conv or full_attention or"),
        ({**LFM3, "use_attention_gate": 1}, "use_attention_gate is 1; it must be true or false"),
        ({**GRIFFIN, "block_types": ["conv"]}, "block_types is .'conv'.; it must be a list of recurrent and attention"),
        ({**GRIFFIN, "lru_width": 2561}, "num_attention_heads is 10; it must be a divisor of lru_width=2561"),
        ({**GRIFFIN, "conv1d_width": 1}, "conv1d_width is 1; it must be an integer from 2"),
        ({**GRIFFIN, "hidden_activation": "tanh"}, "hidden_activation is 'tanh'; it must be one of"),
    ],
)
def test_what_cannot_be_is_rejected_by_name(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        config_of(tmp_path, **fields)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (QWEN, "linear_num_key_heads=2 is no multiple of it"),
        ({**LFM, "hidden_size": 18, "full_attn_idxs": [1]}, "hidden_size=18 is no multiple of it"),
    ],
)
def test_how_many_ranks_divide_the_states(fields: dict[str, Any], reason: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, **{"num_key_value_heads": 4, **fields})
    config.check_parallel(2)
    with pytest.raises(ValueError, match=f"tensor_parallel_size is 4; {reason}.*; for this model it must be 1 or 2"):
        config.check_parallel(4)


def test_a_checkpoint_as_qwen_publishes_it(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """All experts of a layer are one tensor, and there is a layer of multi-token prediction."""
    whole = checkpoint("qwen3-5-moe")
    for file in whole.iterdir():
        if file.name != "model.safetensors":
            (tmp_path / file.name).symlink_to(file)
    tensors = load_file(whole / "model.safetensors")
    stacked = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors[f"{prefix}.{i}.{name}_proj.weight"] for i in range(9)])
            for name in ("gate", "up", "down")
        )
        stacked |= {f"{prefix}.gate_up_proj": torch.cat((gate, up), 1), f"{prefix}.down_proj": down}
        stacked["mtp.layers.0.mlp.experts.gate_up_proj"] = torch.cat((gate, up), 1) + 1
    stacked["mtp.fc.weight"] = torch.ones(64, 128)
    save_file(stacked, tmp_path / "model.safetensors")
    results = []
    for folder in (whole, tmp_path):
        llm = LLM(folder, dtype="float32", max_model_len=64)
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        results.append(llm.generate([[5, 6, 7, 8]], params, use_tqdm=False)[0].outputs[0].token_ids)
        llm.shutdown()
    assert results[0] == results[1]
    save_file({**stacked, "mtx.fc.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"mtx\.fc\.weight has no place in this architecture"):
        check_checkpoint(tmp_path)


def test_a_convolution_in_one_tensor(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """As transformers has it, and of another size than the configuration asks for."""
    whole = checkpoint("olmo-hybrid")
    for file in whole.iterdir():
        if file.name != "model.safetensors":
            (tmp_path / file.name).symlink_to(file)
    tensors = load_file(whole / "model.safetensors")
    for layer in (0, 2, 3):
        prefix = f"model.layers.{layer}.linear_attn"
        parts = [tensors.pop(f"{prefix}.{name}_conv1d.weight") for name in "qkv"]
        tensors[f"{prefix}.conv1d.weight"] = torch.cat(parts)
    save_file(tensors, tmp_path / "model.safetensors")
    check_checkpoint(tmp_path)
    tensors["model.layers.0.linear_attn.conv1d.weight"] = torch.ones(8, 1, 4)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"conv1d\.weight has shape \(8, 1, 4\); config.json asks for 168 rows"):
        check_checkpoint(tmp_path)


def test_a_text_config_names_the_field(tmp_path: Path) -> None:
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": {**QWEN, "layer_types": "linear"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"text_config\.\w+ is"):
        CheckpointConfig.from_folder(tmp_path)
