"""How many bytes the weights and the KV cache of a checkpoint are, and of what drafts for it, from the files alone."""

import json
import math
from pathlib import Path

__all__ = ["KV_DTYPE_BYTES", "bytes_of_a_step", "draft_bytes_per_token", "kv_bytes_per_token", "weight_bytes"]

KV_DTYPE_BYTES = 2
"""bf16."""
EAGLE3_LAYERS = 3
"""Of the target, whose hidden states an EAGLE-3 head reads."""


def kv_bytes_per_token(model: Path) -> int:
    """Of the KV cache in bf16, over all layers."""
    config = json.loads((model / "config.json").read_text())
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_size * KV_DTYPE_BYTES)


def draft_bytes_per_token(method: str, folder: Path, target: Path) -> int:
    """What a model that drafts takes in each KV block, by token: keys and values of its own, hidden states."""
    if method == "medusa":
        return 0
    num_bytes, config = kv_bytes_per_token(folder), json.loads((target / "config.json").read_text())
    if method == "eagle3":
        num_bytes += int(EAGLE3_LAYERS * config["hidden_size"] * KV_DTYPE_BYTES)
    elif method == "mtp":  # of one layer of the target's own
        num_bytes = num_bytes // config["num_hidden_layers"] + int(config["hidden_size"] * KV_DTYPE_BYTES)
    return num_bytes


def weight_bytes(model: Path, quantized: bool = False) -> int:
    """Of all weights in bf16, or with those of linears in int8, and of embeddings that are tied to the output head."""
    is_tied = json.loads((model / "config.json").read_text()).get("tie_word_embeddings", False)
    quantizable = ("_proj.weight", "lm_head.weight", *(["embed_tokens.weight"] if is_tied else []))
    total = 0
    for file in model.glob("*.safetensors"):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        for name, entry in header.items():
            if name != "__metadata__":
                is_int8 = quantized and name.endswith(quantizable)
                total += math.prod(entry["shape"]) * (1 if is_int8 else 2)
    return total


def bytes_of_a_step(model: Path, num_tokens: int, quantized: bool = False) -> float:
    """Of the weights of a mixture of experts that a step of so many tokens reads, if each expert is as likely."""
    config = json.loads((model / "config.json").read_text())
    num_experts, top_k = config.get("num_experts") or config["num_local_experts"], config["num_experts_per_tok"]
    expert = 3 * config["hidden_size"] * config["moe_intermediate_size"] * (1 if quantized else 2)
    not_hit = (1 - top_k / num_experts) ** num_tokens
    return weight_bytes(model, quantized) - config["num_hidden_layers"] * num_experts * expert * not_hit
