"""GGUF files for tests: checkpoints of transformers as llama.cpp's conversion writes them, and headers by hand.

Names are the `gguf` package's; what is done to tensors is `convert_hf_to_gguf.py`'s.
"""

import json
import math
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

__all__ = ["ARCHITECTURES", "gguf_file", "random_blocks", "text", "write_gguf"]

ARCHITECTURES = {
    "bamba": "granitehybrid", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "falcon_h1": "falcon-h1",
    "falcon_mamba": "mamba", "gemma2": "gemma2", "gemma3_text": "gemma3", "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4", "glm4_moe": "glm4moe", "gpt_oss": "gpt-oss", "granite": "granite",
    "granitemoe": "granitemoe", "granitemoehybrid": "granitehybrid", "granitemoeshared": "granitemoe", "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe", "llama": "llama", "mamba": "mamba", "mamba2": "mamba2", "ministral3": "mistral3",
    "mixtral": "llama", "nemotron_h": "nemotron_h", "olmo2": "olmo2", "olmo3": "olmo2", "phi3": "phi3",
    "qwen2": "qwen2", "qwen2_moe": "qwen2moe", "qwen3": "qwen3", "qwen3_5_moe_text": "qwen35moe",
    "qwen3_5_text": "qwen35", "qwen3_moe": "qwen3moe", "qwen3_next": "qwen3next", "smollm3": "smollm3",
}  # fmt: skip
"""`model_type` → llama.cpp's name."""
_NEMOTRONS, _ALONE = ("nemotron_h", "nemotron_h_moe"), ("mamba", "mamba2")
_PERMUTED = ("llama", "granite", "granitehybrid", "granitemoe", "mistral3", "smollm3", *_NEMOTRONS)
_RECURRENT = {"conv", "linear_attention", "mamba"}
"""Kinds of layers."""
_TILED = ("qwen35", "qwen35moe")
_TILED_PARTS = (
    ".in_proj_qkv.weight", ".in_proj_z.weight", ".in_proj_b.weight", ".in_proj_a.weight", ".A_log", ".dt_bias",
    ".conv1d.weight",
)  # fmt: skip
"""Tensors with rows of heads of values, which are reordered in these architectures."""
_DELTA = (
    "linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads",
    "linear_value_head_dim",
)  # fmt: skip
_STATE_SIZES = {
    **dict.fromkeys(
        ("falcon-h1", "granitehybrid"),
        ("mamba_d_conv", "mamba_d_state", "mamba_n_groups", "mamba_n_heads", "mamba_d_head"),
    ),
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), _DELTA),
    **dict.fromkeys(_NEMOTRONS, ("conv_kernel", "ssm_state_size", "n_groups", "mamba_num_heads", "mamba_head_dim")),
    "mamba2": ("conv_kernel", "state_size", "n_groups", "num_heads", "head_dim"),
}  # fmt: skip
"""Of a configuration: the convolution's width, the state's size, groups, heads, and a head's size."""
_MTP_NAMES = {
    "fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head_norm",
}  # fmt: skip
"""Of Qwen's layer of multi-token prediction: in the checkpoint, and in a file."""
_SCALES = {  # where each type has numbers in float16
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (),
}  # fmt: skip


def random_blocks(kind: str, rows: int, columns: int, seed: int, scale: float = 0.01) -> np.ndarray[Any, Any]:
    """[rows, bytes] of blocks whose numbers are some scales large."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (rows, columns // size, num_bytes), dtype=np.uint8)
    for at in _SCALES[kind]:
        numbers = generator.uniform(-scale, scale, blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = numbers[..., None].view(np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = generator.integers(118, 124, blocks.shape[:2])
    return blocks.reshape(rows, -1)


def write_gguf(
    folder: Path, file: Path, kinds: Mapping[str, str] | None = None, split: int = 0, *, latent_split: bool = True
) -> dict[str, torch.Tensor]:
    """Convert a checkpoint of transformers.

    Args:
        folder: the checkpoint.
        file: to write.
        kinds: by the end of a name in the checkpoint, the type to quantise to; F32 else.
        split: tensors of a file, if there are to be several.
        latent_split: DeepSeek's `kv_b_proj` is written as its two halves, as new files have it.

    Returns:
        The tensors of the checkpoint as the file has them, by their names there: those that are quantised, dequantised.
    """
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config)
    if config["model_type"] == "bamba":
        config["layer_types"] = ["mamba"] * config["num_hidden_layers"]
        for i in config["attn_layer_indices"]:
            config["layer_types"][i] = "attention"
    arch = ARCHITECTURES[config["model_type"]]
    if arch == "granitehybrid" and not _RECURRENT.intersection(config["layer_types"]):
        arch = "granitemoe" if config["num_local_experts"] else "granite"
    if arch == "nemotron_h" and "moe" in config["layers_block_type"]:
        arch = "nemotron_h_moe"
    writer = gguf.GGUFWriter(str(file), arch, split_max_tensors=split)
    split_name = "lfm2" if arch.startswith("lfm2") else "gpt-2"
    _write_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()), split_name)
    weights = load_file(folder / "model.safetensors")
    texts = {name: one for name, one in weights.items() if "vision" not in name}
    num_layers = len(config["layers_block_type"]) if arch in _NEMOTRONS else config["num_hidden_layers"]
    num_mtp = int(any(name.startswith(("mtp.", f"model.layers.{num_layers}.")) for name in weights))
    num_layers += num_mtp
    if num_mtp:
        writer.add_nextn_predict_layers(num_mtp)
    writer.add_block_count(num_layers)
    _write_config(writer, config, arch, num_mtp)
    names = gguf.get_tensor_name_map(
        next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), num_layers
    )
    entries: dict[str, tuple[torch.Tensor, str]] = {}
    stacks: dict[tuple[str, str], dict[int, torch.Tensor]] = {}

    def name_of(own: str) -> str:
        own = own.replace("language_model.", "")
        if ".mixer.experts." in own:
            own = own.replace("backbone.", "model.").replace("mixer", "mlp")
        elif arch in (*_NEMOTRONS, *_ALONE) and own.startswith("model."):
            own = own.replace("model.", "backbone.", 1)
        if own.startswith("mtp."):
            number, part = config["num_hidden_layers"], own.split(".")[1]
            if part in _MTP_NAMES:
                return f"blk.{number}.nextn.{_MTP_NAMES[part]}.weight"
            own = own.replace("mtp.layers.0", f"model.layers.{number}")
        own = re.sub(r"model\.(.*)(block_sparse_moe|feed_forward)\.experts", r"\1feed_forward.experts", own)
        return names.get_name(own, (".weight", ".bias")) or own

    for name, tensor in texts.items():
        kind = next((kind for end, kind in (kinds or {}).items() if name.endswith(end)), "F32")
        stored = tensor.float()
        if kind != "F32":
            stored, weights[name] = _quantised(tensor, kind, seed=sum(map(ord, name)))
        if name.endswith("linear_attn.out_proj.weight") and arch in _TILED:
            sizes = config["linear_num_key_heads"], config["linear_num_value_heads"] // config["linear_num_key_heads"]
            if kind == "F32":
                stored = _swapped(stored, 1, *sizes)
            else:
                weights[name] = _swapped(weights[name], 1, *sizes[::-1])
        if expert := re.fullmatch(r"(.*\.(?:experts|altup_(?:unembed_)?projections))\.(\d+)\.(.*)", name):
            stacks.setdefault((f"{expert[1]}.{expert[3]}", kind), {})[int(expert[2])] = stored
            continue
        for own, piece in _converted(name, stored, config, arch, latent_split):
            entries[name_of(own)] = piece, kind
    for (own, kind), experts in stacks.items():
        entries[name_of(own)] = torch.stack([experts[i] for i in range(len(experts))]), kind
    for name, (tensor, kind) in entries.items():
        dtype = None if kind == "F32" else gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, np.ascontiguousarray(tensor.numpy()), raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def _quantised(tensor: torch.Tensor, kind: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the file has, random where the type is quantised, and the numbers that it stands for."""
    dtype = gguf.GGMLQuantizationType[kind]
    if kind in ("F16", "BF16"):
        stored = gguf.quants.quantize(tensor.float().numpy(), dtype)
    else:
        rows, columns = math.prod(tensor.shape[:-1]), tensor.shape[-1]
        stored = random_blocks(kind, rows, columns, seed).reshape(*tensor.shape[:-1], -1)
    return torch.from_numpy(stored), torch.from_numpy(gguf.quants.dequantize(stored, dtype))


def _swapped(tensor: torch.Tensor, dim: int, first: int, second: int) -> torch.Tensor:
    """Of so many units that have so many parts, the first part of each unit, then the second parts, and so on."""
    return tensor.unflatten(dim, (first, second, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)


def _multiplied(name: str, tensor: torch.Tensor, config: Mapping[str, Any]) -> torch.Tensor:
    """With the multipliers of Falcon-H1."""
    into, gate, down = config["attention_in_multiplier"], *config["mlp_multipliers"]
    if name.endswith(".in_proj.weight"):
        inner, groups = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        sizes = torch.tensor([inner, inner, groups, groups, config["mamba_n_heads"]])
        rows = torch.tensor(config["ssm_multipliers"]).repeat_interleave(sizes)
        return tensor * config["ssm_in_multiplier"] * rows[:, None]
    factors = {
        "q_proj": into, "k_proj": into * config["key_multiplier"], "v_proj": into,
        "o_proj": config["attention_out_multiplier"], "gate_proj": gate, "down_proj": down,
        "out_proj": config["ssm_out_multiplier"], "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }  # fmt: skip
    return tensor * factors.get(name.split(".")[-2], 1.0)


def _converted(
    name: str, tensor: torch.Tensor, config: Mapping[str, Any], arch: str, latent_split: bool
) -> list[tuple[str, torch.Tensor]]:
    if arch == "falcon-h1":
        tensor = _multiplied(name, tensor, config)
    layer = name.rpartition(".self_attn.")[0] or name.rpartition(".mlp.")[0]
    heads = {"q_proj": config.get("num_attention_heads"), "k_proj": config.get("num_key_value_heads")}
    part = name.split(".")[-2]
    if part in heads and arch in _PERMUTED:
        return [(name, tensor.unflatten(0, (heads[part], 2, -1)).transpose(1, 2).flatten(0, 2))]
    has_offset = arch in ("gemma2", "gemma3", "qwen3next", *_TILED) and not name.endswith("linear_attn.norm.weight")
    if has_offset and name.endswith(("norm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")):
        return [(name, tensor + 1)]
    if arch in _TILED and name.endswith(_TILED_PARTS):
        num_keys, keys = config["linear_num_key_heads"], 0
        if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
            keys = 2 * num_keys * config["linear_key_head_dim"]
        each = config["linear_num_value_heads"] // num_keys
        tensor = torch.cat((tensor[:keys], _swapped(tensor[keys:], 0, num_keys, each)))
    if name.endswith("experts.gate_up_proj") and arch == "gemma4":
        return [(f"{name}.weight", tensor)]
    if name.endswith("experts.gate_up_proj") and arch == "qwen35moe":
        place = name.removesuffix("gate_up_proj")
        return [
            (f"{place}{one}_proj.weight", half) for one, half in zip(("gate", "up"), tensor.chunk(2, 1), strict=True)
        ]
    if name.endswith("experts.down_proj") and arch in ("gemma4", "qwen35moe"):
        return [(f"{name}.weight", tensor)]
    if part == "kv_b_proj" and latent_split:
        nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
        keys, values = tensor.unflatten(0, (config["num_attention_heads"], nope + value)).split([nope, value], dim=1)
        return [(f"{layer}.self_attn.k_b_proj.weight", keys.transpose(1, 2)),
                (f"{layer}.self_attn.v_b_proj.weight", values)]  # fmt: skip
    if arch == "gpt-oss" and ".experts." in name:
        kind = "bias" if name.endswith("_bias") else "weight"
        tensor = tensor if kind == "bias" else tensor.transpose(1, 2)
        if ".down_proj" in name:
            return [(f"{layer}.mlp.experts.down_proj.{kind}", tensor)]
        return [(f"{layer}.mlp.experts.{one}_proj.{kind}", tensor[:, i::2]) for i, one in enumerate(("gate", "up"))]
    if name.endswith(("conv.conv.weight", "conv1d.weight")):
        return [(name, tensor.squeeze(1))]
    if name.endswith("A_log"):
        tensor = -tensor.exp()
    if arch in ("falcon-h1", "granitehybrid", "mamba2", *_NEMOTRONS) and name.endswith((".A_log", ".D")):
        return [(name, tensor[:, None])]
    if name.endswith("dt_bias"):
        return [(name.replace("dt_bias", "dt_proj.bias"), tensor)]
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        return [(name, tensor.view(config[_STATE_SIZES[arch][2]], -1))]
    if part == "in_proj_qkvz":
        keys, values = config["linear_key_head_dim"], config["linear_value_head_dim"]
        values *= config["linear_num_value_heads"] // config["linear_num_key_heads"]
        by_head = tensor.unflatten(0, (config["linear_num_key_heads"], -1))
        kinds = [one.flatten(0, 1) for one in by_head.split([keys, keys, values, values], dim=1)]
        place = name.partition("in_proj")[0]
        return [(f"{place}in_proj_qkv.weight", torch.cat(kinds[:3])), (f"{place}in_proj_z.weight", kinds[3])]
    if name.endswith("_linear.weight"):  # Granite's
        place = name.rpartition("_linear")[0].replace("block_sparse_moe", "mlp.experts")
        is_alone = not config.get("num_local_experts")
        place = place.replace("shared_mlp", "mlp" if is_alone else "mlp.shared_expert")
        place, _, side = place.rpartition(".")
        parts = ("gate_proj", "up_proj") if side == "input" else ("down_proj",)
        pieces = tensor.chunk(len(parts), dim=-2)
        return [(f"{place}.{part}.weight", piece) for part, piece in zip(parts, pieces, strict=True)]
    if name.endswith("expert_bias"):
        return [(f"{name}.bias", tensor)]
    if name.endswith(".sinks"):
        return [(f"{name}.weight", tensor)]
    if name.endswith("e_score_correction_bias"):
        return [(name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor)]
    if name.endswith(("layer_scalar", ".correct_output_scale")):
        return [(f"{name}.weight", tensor)]
    if name.endswith((".router.scale", ".per_expert_scale")):
        layer = name.partition(".router.")[0].replace("model.layers", "blk")
        return [(f"{layer}.{'ffn_gate_inp' if name.endswith('.router.scale') else 'ffn_down_exps'}.scale", tensor)]
    if name.endswith("shared_expert_gate.weight"):
        return [(name, tensor[0])]
    return [(name, tensor)]


def _write_config(writer: gguf.GGUFWriter, config: Mapping[str, Any], arch: str, num_mtp: int) -> None:
    heads, latent = config.get("num_attention_heads", 0), arch == "deepseek2"
    has_no_length = arch in ("granitehybrid", *_ALONE)
    writer.add_context_length(1 << 20 if has_no_length else config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(heads)
    if arch in ("granitehybrid", "lfm2", "lfm2moe"):
        kv_heads = config["num_key_value_heads"]
        writer.add_head_count_kv([0 if kind in _RECURRENT else kv_heads for kind in config["layer_types"]])
    elif arch in _NEMOTRONS:
        kv_heads = config["num_key_value_heads"]
        writer.add_head_count_kv([kv_heads * (kind == "full_attention") for kind in config["layers_block_type"]])
    elif arch not in ("gemma4", *_ALONE):
        writer.add_head_count_kv(1 if latent else config.get("num_key_value_heads", heads))
    if arch in _STATE_SIZES:
        conv, state, groups, heads_of_states, head_size = (config[name] for name in _STATE_SIZES[arch])
        writer.add_ssm_conv_kernel(conv)
        writer.add_ssm_state_size(state)
        writer.add_ssm_group_count(groups)
        writer.add_ssm_time_step_rank(heads_of_states)
        writer.add_ssm_inner_size(heads_of_states * head_size)
    if arch == "mamba":
        writer.add_ssm_conv_kernel(config["conv_kernel"])
        writer.add_ssm_state_size(config["state_size"])
        writer.add_ssm_time_step_rank(config["time_step_rank"])
        writer.add_ssm_inner_size(config["intermediate_size"])
        writer.add_ssm_dt_b_c_rms(config["model_type"] == "falcon_mamba")
    if arch == "granitehybrid":
        writer.add_rope_scaling_finetuned(config["model_type"] == "bamba")
    if arch in _TILED:
        is_recurrent = [kind in _RECURRENT for kind in config["layer_types"]] + [False] * num_mtp
        writer.add_array(f"{arch}.attention.recurrent_layers", is_recurrent)
        writer.add_rope_dimension_sections([*config["rope_parameters"]["mrope_section"], 0])
    if arch == "qwen3next":
        writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
    if arch in ("lfm2", "lfm2moe"):
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    if arch == "lfm2moe":
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    size = config.get("intermediate_size") or 0
    if config.get("block_auto_adjust_ff_dim"):
        multiple, factor = config["block_multiple_of"], config["block_ffn_dim_multiplier"]
        size = -(-int(factor * int(2 * size / 3)) // multiple) * multiple
    if arch == "gemma4":
        size = _write_gemma4(writer, config)
    if arch == "gemma3n":
        _write_gemma3n(writer, config)
    if arch in _NEMOTRONS:
        size = _write_nemotron(writer, config, arch)
    if size or arch in _ALONE:
        writer.add_feed_forward_length(0 if arch in _ALONE else size)
    writer.add_layer_norm_rms_eps(
        next(config[name] for name in ("norm_eps", "layer_norm_epsilon", "rms_norm_eps") if name in config)
    )
    if arch in _ALONE:
        return
    if config.get("head_dim") and not latent and arch != "gemma4":
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if arch not in _NEMOTRONS:
        _write_rope(writer, config, arch)
    for name, add in (
        ("num_experts_per_tok", writer.add_expert_used_count), ("top_k_experts", writer.add_expert_used_count),
        ("sliding_window", writer.add_sliding_window),
        ("moe_intermediate_size", writer.add_expert_feed_forward_length),
        ("shared_expert_intermediate_size", writer.add_expert_shared_feed_forward_length),
        ("shared_intermediate_size", writer.add_expert_shared_feed_forward_length),
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("attention_multiplier", writer.add_attention_scale), ("embedding_multiplier", writer.add_embedding_scale),
        ("residual_multiplier", writer.add_residual_scale), ("logits_scaling", writer.add_logit_scale),
    ):  # fmt: skip
        if config.get(name) is not None and (arch, name) != ("falcon-h1", "embedding_multiplier"):
            add(config[name])
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if config.get(name):
            writer.add_expert_count(config[name])
            break
    if arch == "gpt-oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if arch in ("deepseek2", "glm4moe"):
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    if arch in ("deepseek2", "glm4moe", "nemotron_h_moe"):
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    if arch in ("glm4moe", "nemotron_h_moe"):
        writer.add_expert_weights_norm(config["norm_topk_prob"])
    if arch == "glm4moe":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if latent:
        rope, nope, value = (config[name] for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
        if config["q_lora_rank"] is not None:
            writer.add_q_lora_rank(config["q_lora_rank"])
        writer.add_kv_lora_rank(config["kv_lora_rank"])
        writer.add_key_length(config["kv_lora_rank"] + rope)
        writer.add_value_length(config["kv_lora_rank"])
        writer.add_key_length_mla(nope + rope)
        writer.add_value_length_mla(value)
        is_v3 = config["model_type"] == "deepseek_v3"
        writer.add_expert_weights_norm(config["norm_topk_prob"] if is_v3 else False)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if is_v3 else gguf.ExpertGatingFuncType.SOFTMAX)


def _write_nemotron(writer: gguf.GGUFWriter, config: Mapping[str, Any], arch: str) -> list[int]:
    """The fields that only Nemotron-H has. Returns the sizes of feed-forwards."""
    kind, size = ("moe", "moe_intermediate_size") if arch == "nemotron_h_moe" else ("mlp", "intermediate_size")
    if kind == "moe":
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        if config["moe_latent_size"] is not None:
            writer.add_moe_latent_size(config["moe_latent_size"])
    return [config[size] * (one == kind) for one in config["layers_block_type"]]


def _write_gemma3n(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """The fields that only Gemma 3n has."""
    writer.add_altup_active_idx(config["altup_active_idx"])
    writer.add_altup_num_inputs(config["altup_num_inputs"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    shares = torch.tensor(config["activation_sparsity_pattern"])
    writer.add_activation_sparsity_scale(torch.distributions.Normal(0, 1).icdf(shares).tolist())
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])


def _write_gemma4(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> list[int] | int:
    """The fields that only Gemma 4 has. Returns the sizes of feed-forwards."""
    kinds, (full, *_) = config["layer_types"], config["per_layer_config"].values()
    number, size, shared = len(kinds), config["intermediate_size"], config["num_kv_shared_layers"]
    kv_heads = config["num_key_value_heads"]
    full_heads = full.get("num_key_value_heads", kv_heads)
    is_same = full_heads == kv_heads
    writer.add_head_count_kv(
        kv_heads if is_same else [full_heads if kind == "full_attention" else kv_heads for kind in kinds]
    )
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    for add, own in (
        (writer.add_key_length, full["head_dim"]), (writer.add_value_length, full["head_dim"]),
        (writer.add_key_length_swa, config["head_dim"]), (writer.add_value_length_swa, config["head_dim"]),
        (writer.add_rope_dimension_count_swa, config["head_dim"]),
    ):  # fmt: skip
        add(own)
    turned = int(full["head_dim"] * config["rope_parameters"]["full_attention"]["partial_rotary_factor"] / 2)
    writer.add_tensor("rope_freqs.weight", np.array([1] * turned + [1e30] * (full["head_dim"] // 2 - turned), "f4"))
    return [size * (1 + (i >= number - shared)) for i in range(number)] if config["use_double_wide_mlp"] else size


def _write_rope(writer: gguf.GGUFWriter, config: Mapping[str, Any], arch: str) -> None:
    rope = config["rope_parameters"]
    if "sliding_attention" in rope:
        if arch in ("gemma3", "gemma3n", "gemma4"):
            writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rotated = config["qk_rope_head_dim"] if arch == "deepseek2" else head_size
    if arch == "gemma4":
        rotated, rope = next(iter(config["per_layer_config"].values()))["head_dim"], {"rope_theta": rope["rope_theta"]}
    writer.add_rope_dimension_count(int(rotated * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rope["rope_theta"])
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if rope.get("mscale_all_dim"):
            writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"] * (0.1 if arch == "deepseek2" else 1))
        if rope.get("llama_4_scaling_beta"):
            writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if kind == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        factor, original = rope["factor"], rope["original_max_position_embeddings"]
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(factor) / math.log(original)))
        for end in ("long", "short"):
            writer.add_tensor(f"rope_factors_{end}.weight", np.array(rope[f"{end}_factor"], dtype=np.float32))
    if kind == "llama3":
        inverse = rope["rope_theta"] ** -(torch.arange(0, head_size, 2).float() / head_size)
        length, original = 2 * math.pi / inverse, rope["original_max_position_embeddings"]
        low, high, factor = (rope[name] for name in ("low_freq_factor", "high_freq_factor", "factor"))
        smooth = ((original / length - low) / (high - low)).clamp(0, 1)
        writer.add_tensor("rope_freqs.weight", (1 / ((1 - smooth) / factor + smooth)).float().numpy())


def _write_tokenizer(writer: gguf.GGUFWriter, tokenizer: Mapping[str, Any], split_name: str) -> None:
    model, special = tokenizer["model"], {one["id"] for one in tokenizer["added_tokens"] if one["special"]}
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split_name)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i in special else 1 for i in range(len(tokens))])
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)


def text(value: str | bytes) -> bytes:
    """A string of a header."""
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def gguf_file(
    values: Mapping[str, bytes] | list[tuple[str, bytes]],
    tensors: list[bytes],
    data: bytes = b"",
    *,
    counts: tuple[int, int] | None = None,
    version: int = 3,
    align: Callable[[int], int] = lambda size: -size % 32,
) -> bytes:
    """A file of parts made by hand.

    Args:
        values: type and value by key.
        tensors: their descriptions.
        data: what follows.
        counts: of tensors and of values, if they are others.
        version: of the format.
        align: how many bytes are between the header and the data.
    """
    pairs = list(values.items()) if isinstance(values, Mapping) else values
    numbers = struct.pack("<IQQ", version, *(counts or (len(tensors), len(pairs))))
    header = b"GGUF" + numbers + b"".join(text(key) + value for key, value in pairs) + b"".join(tensors)
    return header + bytes(align(len(header))) + data
