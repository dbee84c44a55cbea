"""Small seeded checkpoints of decoders that have no family of our own."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

__all__ = ["DECODERS", "make_decoder"]

VOCAB_SIZE = 515
WINDOW = 24
SIZES: dict[str, Any] = {
    "hidden_size": 60, "intermediate_size": 101, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": None,
}  # fmt: skip
DECODERS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 60, "n_layer": 3, "n_head": 6, "n_positions": 512},
    "gpt_bigcode": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "rotary_dim": 8},
    "gpt_neox": {**SIZES, "hidden_size": 96, "rotary_pct": 0.25},
    "opt": {
        "hidden_size": 60, "ffn_dim": 101, "num_hidden_layers": 2, "num_attention_heads": 6, "init_std": 0.2,
        "max_position_embeddings": 512, "word_embed_proj_dim": 32, "pad_token_id": None,
    },
    "starcoder2": {**SIZES, "sliding_window": WINDOW},
    "cohere2": {
        **SIZES, "head_dim": 16, "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "stablelm": {**SIZES, "hidden_size": 96, "partial_rotary_factor": 0.25},
    "glm": {**SIZES, "head_dim": 12},
    "nemotron": {**SIZES, "head_dim": 10},
    "granitemoehybrid": {
        **SIZES, "hidden_size": 96, "layer_types": ["attention"] * 3, "num_local_experts": 0, "mamba_n_heads": 12,
        "mamba_d_head": 16, "shared_intermediate_size": 101, "position_embedding_type": "rope",
    },
    "hunyuan_v1_moe": {
        **SIZES, "hidden_size": 96, "head_dim": 16, "intermediate_size": 64, "num_experts": 4, "moe_topk": 2,
    },
    "llama": {**SIZES, "hidden_size": 96},
}  # fmt: skip
"""Learned positions, fused projections and a head that is tied; one KV head; parallel residuals and partly rotated
heads; positions that begin at 2, and a hidden size that is not the layers'; windows of all and of some layers; a
model that may have recurrent layers and has none; experts with a router whose weight the code reads; and families of
our own, GLM, Hunyuan and Llama, which can run so too."""


def make_decoder(folder: Path, name: str, tokenizer: PreTrainedTokenizerFast, **changes: Any) -> Path:
    """Write a checkpoint in float32.

    Args:
        folder: where.
        name: the model type.
        tokenizer: goes with it.
        changes: of the configuration.
    """
    settings = {"vocab_size": VOCAB_SIZE, "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.2}
    config = AutoConfig.for_model(name, **{**settings, **DECODERS.get(name, {}), **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith(".bias"):  # which begin as zeros
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
