"""Writes a checkpoint of checkpoints.py as a GGUF file in bf16: a Llama, a mixture like Qwen3's, a hybrid like Qwen3.5;
and the text model and the tower of a SmolVLM as two. Needs gguf and numpy only.

llama.cpp's own converter looks every tokenizer up in a list of known ones, which one that was trained here is not in.
"""

import json
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

__all__ = ["convert", "convert_tower"]

LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.out_proj": "ssm_out",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a",
}
ARCHITECTURES = {"llama": "llama", "qwen3_moe": "qwen3moe", "qwen3_5_text": "qwen35"}
WITHOUT_ENDING = ("ssm_dt.bias", "ssm_a")
FLOAT32_TENSORS = ("ffn_gate_inp.weight", "norm.weight", "ssm_conv1d.weight", "ssm_dt.bias", "ssm_a")
"""Ends of their names; llama.cpp wants them so."""
OTHER_TENSORS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
TOWER_TENSORS = {
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
OTHER_TOWER_TENSORS = {
    "model.vision_model.embeddings.patch_embedding": "v.patch_embd",
    "model.vision_model.embeddings.position_embedding": "v.position_embd",
    "model.vision_model.post_layernorm": "v.post_ln",
    "model.connector.modality_projection.proj": "mm.model.fc",
}
NORMAL, CONTROL = 1, 3
"""Types of tokens."""

Bfloat16Bits = npt.NDArray[np.uint16]


def convert(folder: Path, out: Path) -> None:
    """Write one file from a checkpoint's folder; of one that takes images, the text model."""
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config)
    architecture = ARCHITECTURES[config["model_type"]]
    is_hybrid = architecture == "qwen35"
    writer = gguf.GGUFWriter(str(out), architecture)
    _write_shape(writer, config)
    _write_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()), config["vocab_size"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors = {
        name.replace(".text_model.", "."): bits
        for name, bits in _read_bfloat16(folder / "model.safetensors").items()
        if ".vision_model." not in name and ".connector." not in name
    }
    for name, bits in _stack_experts(tensors).items():
        parts = name.removesuffix(".weight").split(".")
        if name.startswith("model.layers."):
            ours = LAYER_TENSORS[".".join(parts[3:])]
            if is_hybrid and ours == "ffn_norm":
                ours = "post_attention_norm"
            new_name = f"blk.{parts[2]}.{ours}{'' if ours in WITHOUT_ENDING else '.weight'}"
        else:
            new_name = f"{OTHER_TENSORS['.'.join(parts)]}.weight"
        if parts[-1] in heads and architecture == "llama":
            bits = _interleave(bits, heads[parts[-1]])
        if new_name.endswith(FLOAT32_TENSORS):
            values = (bits.astype(np.uint32) << 16).view(np.float32)
            if is_hybrid and new_name.endswith("norm.weight") and "ssm" not in new_name:
                values = values + 1  # transformers adds it when it computes
            writer.add_tensor(new_name, -np.exp(values) if new_name.endswith("ssm_a") else np.squeeze(values))
        else:
            raw = np.ascontiguousarray(bits).view(np.uint8)
            writer.add_tensor(new_name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    _close(writer)


def convert_tower(folder: Path, out: Path) -> None:
    """Write the tower of a SmolVLM, llama.cpp's `mmproj`."""
    config = json.loads((folder / "config.json").read_text())
    pixels = json.loads((folder / "preprocessor_config.json").read_text())
    vision = config["vision_config"]
    writer = gguf.GGUFWriter(str(out), "clip")
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(gguf.VisionProjectorType.IDEFICS3)
    writer.add_vision_projector_scale_factor(config["scale_factor"])
    writer.add_vision_projection_dim(config["text_config"]["hidden_size"])
    writer.add_vision_preproc_image_size(pixels["size"]["longest_edge"])
    writer.add_vision_image_size(vision["image_size"])
    writer.add_vision_patch_size(vision["patch_size"])
    writer.add_vision_embedding_length(vision["hidden_size"])
    writer.add_vision_feed_forward_length(vision["intermediate_size"])
    writer.add_vision_block_count(vision["num_hidden_layers"])
    writer.add_vision_head_count(vision["num_attention_heads"])
    writer.add_vision_attention_layernorm_eps(vision.get("layer_norm_eps", 1e-6))
    writer.add_vision_image_mean([0.5] * 3)
    writer.add_vision_image_std([0.5] * 3)
    writer.add_vision_use_gelu(True)
    for name, bits in _read_bfloat16(folder / "model.safetensors").items():
        module, _, kind = name.rpartition(".")
        if name.startswith("model.vision_model.encoder.layers."):
            _, _, _, _, number, layer = module.split(".", 5)
            new_name = f"v.blk.{number}.{TOWER_TENSORS[layer]}.{kind}"
        elif module in OTHER_TOWER_TENSORS:
            new_name = f"{OTHER_TOWER_TENSORS[module]}.{kind}"
        else:
            continue
        if bits.ndim == 1 or ".embeddings." in name:
            writer.add_tensor(new_name, (bits.astype(np.uint32) << 16).view(np.float32))
        else:
            raw = np.ascontiguousarray(bits).view(np.uint8)
            writer.add_tensor(new_name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    _close(writer)


def _close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_shape(writer: gguf.GGUFWriter, config: dict) -> None:
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    if config["model_type"] == "qwen3_moe":
        writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    rope = config.get("rope_parameters") or config
    writer.add_rope_dimension_count(int(head_size * rope.get("partial_rotary_factor", 1.0)))
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config["model_type"] == "qwen3_5_text":
        writer.add_rope_dimension_sections([11, 11, 10, 0])
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
        writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def _write_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict, vocab_size: int) -> None:
    model, added = tokenizer["model"], {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    ids = model["vocab"] | added
    tokens = sorted(ids, key=ids.__getitem__)
    tokens += [f"[PAD{number}]" for number in range(len(tokens), vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if i < 2 or token in added else NORMAL for i, token in enumerate(tokens)])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)


def _stack_experts(tensors: dict[str, Bfloat16Bits]) -> dict[str, Bfloat16Bits]:
    """`…mlp.experts.3.up_proj.weight` of all experts as one tensor, `…mlp.experts.up_proj.weight`."""
    stacked: dict[str, Bfloat16Bits] = {}
    experts: dict[str, dict[int, Bfloat16Bits]] = {}
    for name, bits in tensors.items():
        before, found, after = name.partition(".mlp.experts.")
        if found:
            number, _, rest = after.partition(".")
            experts.setdefault(f"{before}{found}{rest}", {})[int(number)] = bits
        else:
            stacked[name] = bits
    return stacked | {name: np.stack([parts[i] for i in range(len(parts))]) for name, parts in experts.items()}


def _interleave(bits: Bfloat16Bits, num_heads: int) -> Bfloat16Bits:
    """The rows of each head in the order of llama.cpp's rotary embedding, in which pairs are neighbours.

    ::

        Hugging Face   x0 x1 … | y0 y1 …        llama.cpp   x0 y0 x1 y1 …
    """
    rows, columns = bits.shape
    return bits.reshape(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _read_bfloat16(path: Path) -> dict[str, Bfloat16Bits]:
    """The tensors of a safetensors file, as the bits of their numbers: numpy knows no bfloat16. float32 is rounded.

    The file is 8 bytes (length of the header), the header (JSON: where each tensor is in the rest), the rest.
    """
    data = np.memmap(path, dtype=np.uint8, mode="r")
    header_end = 8 + int(data[:8].view(np.uint64)[0])
    header = json.loads(data[8:header_end].tobytes())
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            raw = data[header_end + begin : header_end + end].tobytes()
            if entry["dtype"] == "F32":
                bits = np.frombuffer(raw, dtype=np.uint32)
                values = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
            else:
                assert entry["dtype"] == "BF16", name
                values = np.frombuffer(raw, dtype=np.uint16)
            tensors[name] = values.reshape(entry["shape"])
    return tensors
