"""The oracle of the token-exactness tests: Hugging Face transformers, and small seeded checkpoints for both sides.

What transformers generates is stored in `oracle_results/`, since it takes minutes to compute for all checkpoints; so is
what Triton's compiler makes of the kernels. A result is used if it was made of the same weights, prompts and version of
transformers, or of the same sources and version of Triton; else it is computed.
QUIRE_TESTS_STORE=1 stores what was computed.
"""

import hashlib
import inspect
import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from quire_engine.outputs import RequestOutput
from safetensors.torch import load_file, save_file
from support.checkpoints import edit_json
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

__all__ = [
    "CHECKPOINTS", "Expected", "assert_exact", "expected_outputs", "generate_greedily", "load_reference",
    "make_checkpoint", "make_prompts", "stored",
]  # fmt: skip

RESULTS = Path(__file__).with_name("oracle_results")
STORE_VARIABLE = "QUIRE_TESTS_STORE"

VOCAB_SIZE = 515
MINISTRAL_ROPE = {
    "rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4,
}  # fmt: skip
GLM_VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 2, "image_size": 8,
    "out_hidden_size": 64,
}  # fmt: skip
LAYER_NORMS = ("layernorm.weight", "layer_norm.weight", "ln_attn.weight", "ln_mlp.weight", "norm.weight", "ln_f.weight")
LAYER_NORM_FAMILIES = (
    "aya_vision", "cohere", "cohere2", "cohere2_moe", "cohere2_vision", "falcon", "gpt_neox", "nemotron", "phi",
    "phimoe", "stablelm", "starcoder2",
)  # fmt: skip
"""Whose norms have random weights too."""
SMALL_VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
QWEN_HYBRID = {
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 48, "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 12, "linear_value_head_dim": 20,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5, "mrope_interleaved": True,
        "mrope_section": [4, 4, 4],
    },
}  # fmt: skip
QWEN_EXPERTS = {
    "num_experts": 9, "num_experts_per_tok": 4, "moe_intermediate_size": 38, "shared_expert_intermediate_size": 36,
}  # fmt: skip
QWEN_VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 2, "out_hidden_size": 64,
    "num_position_embeddings": 16,
}  # fmt: skip
GRANITE = {
    "embedding_multiplier": 3.0, "attention_multiplier": 0.1, "residual_multiplier": 0.7, "logits_scaling": 1.5,
}  # fmt: skip
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "tied-gqa": {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "untied-mha": {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False},
    "odd-sizes": {
        "hidden_size": 60, "intermediate_size": 101, "num_attention_heads": 6, "num_key_value_heads": 1,
        "head_dim": 20, "num_hidden_layers": 3, "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True,
    },
    "biased-mqa": {
        "hidden_size": 60, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 20, "num_hidden_layers": 3,
        "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True,
    },
    "llama3-rope": {
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "yarn-rope": {
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 64,
        },
    },
    "apertus": {
        "model_type": "apertus", "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96,
        "intermediate_size": 100, "num_hidden_layers": 3, "attention_bias": True, "dtype": "float32",
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "arcee": {
        "model_type": "arcee", "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20, "hidden_size": 60,
        "intermediate_size": 100, "num_hidden_layers": 3, "mlp_bias": True, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 64,
        },
    },
    "aya-vision": {
        "model_type": "aya_vision", "tie_word_embeddings": True, "text_config": {
            "model_type": "cohere2", "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4,
            "sliding_window": 17, "logit_scale": 1.0, "layer_norm_eps": 1e-3,  # transformers leaves out another scale
        },
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
        },
    },
    "cohere": {
        "model_type": "cohere", "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 120,
        "intermediate_size": 100, "num_hidden_layers": 3, "attention_bias": True, "logit_scale": 0.3,
        "use_qk_norm": True,
    },
    "cohere2": {
        "model_type": "cohere2", "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 72,
        "intermediate_size": 100, "num_hidden_layers": 5, "sliding_window": 19, "logit_scale": 0.25,
        "layer_norm_eps": 1e-3,
    },
    "cohere2-moe": {  # the mean with shared experts, and a dense layer that is rotated and has no window
        "model_type": "cohere2_moe", "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
        "num_hidden_layers": 5, "sliding_window": 19, "logit_scale": 0.8, "layer_norm_eps": 1e-3,
        "intermediate_size": 36, "prefix_dense_intermediate_size": 100, "num_experts": 7, "num_experts_per_tok": 3,
        "num_shared_experts": 2, "expert_selection_fn": "sigmoid", "sliding_window_pattern": 3,
        "mlp_layer_types": ["dense", *["sparse"] * 4],
        "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention", "sliding_attention"],
    },
    "cohere2-moe-sum": {  # RMSNorms, a softmax, and the sum
        "model_type": "cohere2_moe", "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
        "num_hidden_layers": 4, "sliding_window": 23, "logit_scale": 1.0, "rms_norm_eps": 1e-4,
        "intermediate_size": 44, "num_experts": 5, "num_experts_per_tok": 2, "num_shared_experts": 1,
        "shared_expert_combination_strategy": "sum", "prefix_dense_sliding_window_pattern": 2,
        "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "cohere2-vision": {
        "model_type": "cohere2_vision", "tie_word_embeddings": True, "text_config": {
            "model_type": "cohere2", "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 4,
            "sliding_window": 23, "logit_scale": 1.0,
        },
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
        },
    },
    "exaone": {
        "model_type": "exaone", "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3,
        "intermediate_size": 100, "tie_word_embeddings": False,
    },
    "exaone4": {
        "model_type": "exaone4", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
        "num_hidden_layers": 5, "sliding_window": 21, "sliding_window_pattern": 3, "tie_word_embeddings": False,
    },
    "exaone4-conditional": {
        "model_type": "exaone4_5", "tie_word_embeddings": False, "text_config": {
            "model_type": "exaone4", "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4,
            "sliding_window": 17,
        },
        "vision_config": {
            "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "num_key_value_heads": 1,
            "patch_size": 2, "out_hidden_size": 64, "fullatt_block_indexes": [0], "window_size": 8,
        },
    },
    "exaone-moe": {  # one layer without experts between two with
        "model_type": "exaone_moe", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
        "num_hidden_layers": 3, "sliding_window": 21, "sliding_window_pattern": "LLG", "num_experts": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "num_experts_per_tok": 3, "moe_intermediate_size": 28, "n_group": 2, "topk_group": 1,
        "mlp_layer_types": ["sparse", "dense", "sparse"], "tie_word_embeddings": False,
    },
    "gemma": {
        "model_type": "gemma", "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32,
        "num_hidden_layers": 3,
    },
    "helium": {
        "model_type": "helium", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "num_hidden_layers": 3, "attention_bias": True, "mlp_bias": True,
    },
    "mellum": {
        "model_type": "mellum", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
        "num_hidden_layers": 4, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 28,
        "sliding_window": 19, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"], "tie_word_embeddings": False,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn", "factor": 4.0, "rope_theta": 1000.0, "original_max_position_embeddings": 128,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "vaultgemma": {
        "model_type": "vaultgemma", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "num_hidden_layers": 3, "sliding_window": 17, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 8.0,
    },
    "falcon": {
        "model_type": "falcon", "num_attention_heads": 6, "num_kv_heads": 2, "hidden_size": 72,
        "ffn_hidden_size": 100, "num_hidden_layers": 3, "new_decoder_architecture": True, "bias": True,
    },
    "falcon-old": {
        "model_type": "falcon", "num_attention_heads": 5, "hidden_size": 80, "num_hidden_layers": 3,
    },
    "gpt-neox": {
        "model_type": "gpt_neox", "num_attention_heads": 6, "hidden_size": 96, "intermediate_size": 100,
        "num_hidden_layers": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0,
        "partial_rotary_factor": 0.25},
    },
    "nemotron": {
        "model_type": "nemotron", "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20,
        "hidden_size": 60, "intermediate_size": 100, "num_hidden_layers": 3, "attention_bias": True,
    },
    "phimoe": {
        "model_type": "phimoe", "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64,
        "num_local_experts": 7, "intermediate_size": 44, "num_hidden_layers": 3, "attention_bias": True,
        "lm_head_bias": True, "sliding_window": 47, "router_jitter_noise": 0.1, "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 500.0, "original_max_position_embeddings": 512,
            "short_mscale": 1.2, "long_mscale": 1.2,
            "short_factor": [1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 5.0], "long_factor": [9.0] * 8,
        },
    },
    "phi": {
        "model_type": "phi", "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96,
        "intermediate_size": 100, "num_hidden_layers": 3,
    },
    "stablelm": {
        "model_type": "stablelm", "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3,
        "use_qkv_bias": True, "partial_rotary_factor": 0.25,
    },
    "stablelm-parallel": {
        "model_type": "stablelm", "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 3,
        "use_parallel_residual": True, "partial_rotary_factor": 0.5,
    },
    "starcoder2": {
        "model_type": "starcoder2", "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 72,
        "intermediate_size": 100, "num_hidden_layers": 3, "sliding_window": 27,
    },
    "granite": {
        "model_type": "granite", "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 72,
        "intermediate_size": 100, "num_hidden_layers": 3, "tie_word_embeddings": False, "attention_bias": True,
        "mlp_bias": True, "embedding_multiplier": 3.0, "attention_multiplier": 0.1, "residual_multiplier": 0.7,
        "logits_scaling": 1.5,
    },
    "bamba": {
        "model_type": "bamba", "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 72,
        "intermediate_size": 100, "num_hidden_layers": 4, "attn_layer_indices": [1], "mamba_n_heads": 6,
        "mamba_d_head": 24, "mamba_n_groups": 2, "mamba_d_state": 20, "attention_bias": True, "mamba_proj_bias": True,
        "tie_word_embeddings": False, "pad_token_id": None, "head_dim": 20,
    },
    "falcon-h1": {
        "model_type": "falcon_h1", "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 72,
        "intermediate_size": 100, "num_hidden_layers": 3, "head_dim": 20, "mamba_d_ssm": 96, "mamba_n_heads": 6,
        "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 20, "lm_head_multiplier": 0.7,
        "embedding_multiplier": 2.5, "mlp_multipliers": [0.8, 0.9], "key_multiplier": 0.6,
        "attention_out_multiplier": 0.9, "attention_in_multiplier": 1.1, "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.8, "ssm_multipliers": [0.9, 0.7, 0.5, 1.3, 0.6], "tie_word_embeddings": False,
        "pad_token_id": None,
    },
    "falcon-h1-norm": {
        "model_type": "falcon_h1", "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 72,
        "intermediate_size": 100, "num_hidden_layers": 2, "mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_head": 16,
        "mamba_d_state": 20, "mamba_rms_norm": True, "attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True,
        "projectors_bias": False, "key_multiplier": 0.6, "attention_out_multiplier": 0.9, "tie_word_embeddings": True,
        "pad_token_id": None,
    },
    "falcon-mamba": {
        "model_type": "falcon_mamba", "hidden_size": 60, "num_hidden_layers": 3, "state_size": 12,
        "tie_word_embeddings": False, "use_bias": True, "pad_token_id": None,
    },
    "jamba": {
        "model_type": "jamba", "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 72,
        "intermediate_size": 44, "num_hidden_layers": 4, "attn_layer_period": 3, "attn_layer_offset": 1,
        "num_experts": 5, "mamba_d_state": 12, "mamba_dt_rank": 7, "tie_word_embeddings": False, "pad_token_id": None,
    },
    "mamba": {
        "model_type": "mamba", "hidden_size": 60, "num_hidden_layers": 3, "state_size": 12, "time_step_rank": 9,
        "pad_token_id": None,
    },
    "mamba2": {
        "model_type": "mamba2", "hidden_size": 72, "num_hidden_layers": 3, "num_heads": 6, "head_dim": 24,
        "n_groups": 2, "state_size": 20, "pad_token_id": None,
    },
    "granite-moe": {
        "model_type": "granitemoe", "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 72,
        "num_hidden_layers": 3, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 44,
        "tie_word_embeddings": False, **GRANITE,
    },
    "granite-moe-shared": {
        "model_type": "granitemoeshared", "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 72,
        "num_hidden_layers": 3, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 44,
        "shared_intermediate_size": 28, "tie_word_embeddings": True, **GRANITE,
    },
    "granite-hybrid": {
        "model_type": "granitemoehybrid", "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 72,
        "num_hidden_layers": 4, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 44,
        "shared_intermediate_size": 28, "tie_word_embeddings": False, "mamba_n_heads": 6, "mamba_d_head": 24,
        "mamba_d_state": 20, "layer_types": ["mamba", "mamba", "attention", "mamba"], **GRANITE,
    },
    "granite-hybrid-dense": {
        "model_type": "granitemoehybrid", "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 72,
        "num_hidden_layers": 2, "num_local_experts": 0, "shared_intermediate_size": 100, "tie_word_embeddings": True,
        "mamba_n_heads": 6, "position_embedding_type": "rope", "layer_types": ["attention"] * 2, **GRANITE,
    },
    "nemotron-h": {
        "model_type": "nemotron_h", "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 72,
        "head_dim": 20, "intermediate_size": 100, "hybrid_override_pattern": "M-ME*EM", "n_routed_experts": 8,
        "num_experts_per_tok": 3, "moe_intermediate_size": 44, "moe_shared_expert_intermediate_size": 28, "n_group": 2,
        "routed_scaling_factor": 1.5, "time_step_min": 1e-9, "mamba_num_heads": 6, "mamba_head_dim": 20,
        "ssm_state_size": 24, "n_groups": 2, "tie_word_embeddings": False, "pad_token_id": None,
    },
    "nemotron-h-latent": {
        "model_type": "nemotron_h", "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 72,
        "head_dim": 20, "intermediate_size": 100, "hybrid_override_pattern": "ME*E", "n_routed_experts": 8,
        "num_experts_per_tok": 3, "moe_intermediate_size": 44, "moe_shared_expert_intermediate_size": 28,
        "moe_latent_size": 40, "time_step_min": 1e-9, "mamba_num_heads": 6, "mamba_head_dim": 20,
        "ssm_state_size": 24, "n_groups": 2, "tie_word_embeddings": False, "pad_token_id": None,
    },
    "olmo2": {
        "model_type": "olmo2", "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 72,
        "intermediate_size": 100, "num_hidden_layers": 3, "tie_word_embeddings": False, "attention_bias": True,
    },
    "phi3": {
        "model_type": "phi3", "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96,
        "intermediate_size": 100, "num_hidden_layers": 3, "tie_word_embeddings": False, "pad_token_id": None,
        "sliding_window": 45, "original_max_position_embeddings": 512, "partial_rotary_factor": 0.75,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 500.0, "factor": 4.0, "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 512,
            "short_factor": [1.0, 1.1, 1.25, 1.5, 2.0, 3.0], "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 9.0],
        },
    },
    "smollm3": {
        "model_type": "smollm3", "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4,
        "intermediate_size": 100, "no_rope_layer_interval": 2, "attention_bias": True, "mlp_bias": True,
        "pad_token_id": None, "tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 29,
    },
    "qwen2": {
        "model_type": "qwen2", "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "qwen3": {
        "model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "num_hidden_layers": 3, "tie_word_embeddings": False,
    },
    "mimo": {
        "model_type": "qwen2", "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3,
        "tie_word_embeddings": False, "num_nextn_predict_layers": 1,
    },
    "mixtral": {
        "model_type": "mixtral", "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 5,
        "num_experts_per_tok": 2, "tie_word_embeddings": False, "sliding_window": 23,
    },
    "qwen2-moe": {  # one layer with experts between two without
        "model_type": "qwen2_moe", "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 7,
        "num_experts_per_tok": 3, "moe_intermediate_size": 44, "shared_expert_intermediate_size": 36,
        "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3], "tie_word_embeddings": True,
        "use_sliding_window": True, "sliding_window": 27, "max_window_layers": 2,
    },
    "qwen3-moe": {
        "model_type": "qwen3_moe", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "num_local_experts": 9, "num_experts_per_tok": 4, "moe_intermediate_size": 38, "norm_topk_prob": True,
        "num_hidden_layers": 3, "tie_word_embeddings": False,
    },
    "deepseek-v2": {
        "model_type": "deepseek_v2", "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 3,
        "q_lora_rank": None, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 20,
        "n_routed_experts": 6, "num_experts_per_tok": 3, "n_shared_experts": 2, "moe_intermediate_size": 20,
        "first_k_dense_replace": 1, "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2,
        "routed_scaling_factor": 1.5, "tie_word_embeddings": False,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 3,
        "q_lora_rank": 28, "kv_lora_rank": 36, "qk_rope_head_dim": 12, "qk_nope_head_dim": 20, "v_head_dim": 16,
        "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1, "moe_intermediate_size": 28,
        "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "rope_theta": 1000.0, "original_max_position_embeddings": 128,
            "mscale": 0.7, "mscale_all_dim": 0.9,
        },
    },
    "deepseek-v32": {
        "model_type": "deepseek_v32", "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 3,
        "q_lora_rank": 28, "kv_lora_rank": 36, "qk_rope_head_dim": 12, "qk_nope_head_dim": 20, "v_head_dim": 16,
        "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1, "moe_intermediate_size": 28,
        "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "tie_word_embeddings": False,
        "index_topk": 500, "index_head_dim": 16, "index_n_heads": 3,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "rope_theta": 1000.0, "original_max_position_embeddings": 128,
            "mscale": 0.7, "mscale_all_dim": 0.9,
        },
    },
    "dots1": {
        "model_type": "dots1", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
        "num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2,
        "moe_intermediate_size": 20, "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5,
        "attention_bias": True, "sliding_window": 25, "max_window_layers": 2, "tie_word_embeddings": False,
    },
    "ernie4-5": {
        "model_type": "ernie4_5", "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20,
        "num_hidden_layers": 3, "use_bias": True, "pad_token_id": None,
    },
    "ernie4-5-moe": {  # one layer with experts between two without
        "model_type": "ernie4_5_moe", "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4,
        "moe_num_experts": 7, "moe_k": 3, "moe_intermediate_size": 28, "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1, "moe_layer_end_index": 2, "pad_token_id": None,
    },
    "glm": {
        "model_type": "glm", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 100, "pad_token_id": None, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.75,
        },
    },
    "glm4": {
        "model_type": "glm4", "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 24,
        "num_hidden_layers": 3, "intermediate_size": 100, "pad_token_id": None,
    },
    "glm4-moe": {
        "model_type": "glm4_moe", "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 24,
        "num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 28,
        "routed_scaling_factor": 1.5, "n_group": 2, "topk_group": 1, "use_qk_norm": True, "attention_bias": True,
    },
    "glm4-moe-lite": {
        "model_type": "glm4_moe_lite", "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 3,
        "q_lora_rank": 28, "kv_lora_rank": 36, "qk_rope_head_dim": 12, "qk_nope_head_dim": 20, "v_head_dim": 24,
        "n_routed_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 28,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
    },
    "glm-moe-dsa": {  # the second layer has no indexer
        "model_type": "glm_moe_dsa", "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 3,
        "q_lora_rank": 28, "kv_lora_rank": 36, "qk_rope_head_dim": 12, "qk_nope_head_dim": 20, "v_head_dim": 24,
        "n_routed_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 28, "first_k_dense_replace": 1,
        "index_topk": 500, "index_head_dim": 16, "index_n_heads": 3, "indexer_types": ["full", "shared", "full"],
    },
    "glm46v": {
        "model_type": "glm46v", "tie_word_embeddings": False, "text_config": {
            "model_type": "glm4v_text", "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
            },
        },
        "vision_config": GLM_VISION,
    },
    "glm4v": {
        "model_type": "glm4v", "tie_word_embeddings": False, "text_config": {
            "model_type": "glm4v_text", "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 2, 1],
            },
        },
        "vision_config": GLM_VISION,
    },
    "glm4v-moe": {
        "model_type": "glm4v_moe", "tie_word_embeddings": False, "text_config": {
            "model_type": "glm4v_moe_text", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
            "num_hidden_layers": 3, "n_routed_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 28,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 2, 2],
            },
        },
        "vision_config": GLM_VISION,
    },
    "hunyuan-dense": {
        "model_type": "hunyuan_v1_dense", "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20,
        "num_hidden_layers": 3, "attention_bias": True, "tie_word_embeddings": True, "pad_token_id": None,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 1.0, "alpha": 10.0},
    },
    "hunyuan-moe": {
        "model_type": "hunyuan_v1_moe", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
        "num_experts": 5, "moe_topk": 2, "intermediate_size": 44, "pad_token_id": None,
    },
    "minicpm3": {
        "model_type": "minicpm3", "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 3,
        "q_lora_rank": 28, "kv_lora_rank": 36, "qk_rope_head_dim": 12, "qk_nope_head_dim": 20, "scale_emb": 3,
        "dim_model_base": 32,
    },
    "minimax-m2": {
        "model_type": "minimax_m2", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
        "rotary_dim": 12, "num_local_experts": 7, "num_experts_per_tok": 3, "intermediate_size": 44,
    },
    "olmoe": {
        "model_type": "olmoe", "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 7,
        "num_experts_per_tok": 3, "intermediate_size": 44, "pad_token_id": None,
    },
    "seed-oss": {
        "model_type": "seed_oss", "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20,
        "num_hidden_layers": 3, "mlp_bias": True, "attention_out_bias": True, "pad_token_id": None,
    },
    "gpt-oss": {
        "model_type": "gpt_oss", "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20, "hidden_size": 60,
        "num_hidden_layers": 3, "num_local_experts": 5, "num_experts_per_tok": 3, "intermediate_size": 44,
        "sliding_window": 19, "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 8.0, "rope_theta": 1000.0, "original_max_position_embeddings": 64,
            "truncate": False,
        },
    },
    "gemma3-conditional": {  # has no vocab_size: the tokenizer's is set in all
        "model_type": "gemma3", "mm_tokens_per_image": 4, "text_config": {
            "model_type": "gemma3_text", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
            "num_hidden_layers": 4, "sliding_window": 17, "sliding_window_pattern": 3, "query_pre_attn_scalar": 20,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
        "vision_config": {
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 28, "patch_size": 14,
        },
    },
    "ministral3": {
        "model_type": "ministral3", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
        "tie_word_embeddings": False, "rope_parameters": MINISTRAL_ROPE,
    },
    "idefics3": {
        "model_type": "idefics3", "tie_word_embeddings": False, "text_config": {
            "model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
        },
        "vision_config": SMALL_VISION,
    },
    "internvl": {
        "model_type": "internvl", "tie_word_embeddings": False, "text_config": {
            "model_type": "qwen2", "num_attention_heads": 4, "num_key_value_heads": 2,
        },
        "vision_config": {
            **SMALL_VISION, "model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [14, 14],
        },
    },
    "llava": {
        "model_type": "llava", "tie_word_embeddings": False, "text_config": {
            "model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2,
        },
        "vision_config": {**SMALL_VISION, "model_type": "clip_vision_model"},
    },
    "llava-next": {
        "model_type": "llava_next", "tie_word_embeddings": False, "image_grid_pinpoints": [[28, 56]], "text_config": {
            "model_type": "mistral", "num_attention_heads": 4, "num_key_value_heads": 2,
        },
        "vision_config": {**SMALL_VISION, "model_type": "clip_vision_model"},
    },
    "llava-onevision": {
        "model_type": "llava_onevision", "tie_word_embeddings": True, "image_grid_pinpoints": [[28, 56]],
        "text_config": {
            "model_type": "qwen2", "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
        },
        "vision_config": {**SMALL_VISION, "model_type": "siglip_vision_model"},
    },
    "smolvlm": {
        "model_type": "smolvlm", "tie_word_embeddings": True, "text_config": {
            "model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
        },
        "vision_config": SMALL_VISION,
    },
    "mistral3-conditional": {
        "model_type": "mistral3", "tie_word_embeddings": False, "text_config": {
            "model_type": "ministral3", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
            "num_hidden_layers": 3, "rope_parameters": MINISTRAL_ROPE,
        },
        "vision_config": {
            "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
            "num_attention_heads": 2, "head_dim": 8, "image_size": 28, "patch_size": 14,
        },
    },
    "qwen2-5-vl": {
        "model_type": "qwen2_5_vl", "tie_word_embeddings": False, "text_config": {
            "model_type": "qwen2_5_vl_text", "num_attention_heads": 4, "num_key_value_heads": 2,
            "num_hidden_layers": 3, "rope_parameters": {
                "rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 3, 3],
            },
        },
        "vision_config": {
            "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 2,
            "out_hidden_size": 64, "window_size": 8, "fullatt_block_indexes": [0],
        },
    },
    "qwen2-vl": {
        "model_type": "qwen2_vl", "tie_word_embeddings": True, "text_config": {
            "model_type": "qwen2_vl_text", "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [3, 3, 2]},
        },
        "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2, "patch_size": 2},
    },
    "qwen3-vl-moe": {
        "model_type": "qwen3_vl_moe", "tie_word_embeddings": False, "text_config": {
            "model_type": "qwen3_vl_moe_text", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
            "num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 28,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1000.0, "mrope_interleaved": True, "mrope_section": [6, 5, 5],
            },
        },
        "vision_config": {
            "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 2,
            "out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
        },
    },
    "qwen3-vl": {
        "model_type": "qwen3_vl", "tie_word_embeddings": True, "text_config": {
            "model_type": "qwen3_vl_text", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
            "num_hidden_layers": 3, "rope_parameters": {
                "rope_type": "default", "rope_theta": 1000.0, "mrope_interleaved": True, "mrope_section": [6, 5, 5],
            },
        },
        "vision_config": {
            "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 2,
            "out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
        },
    },
    "mistral": {
        "model_type": "mistral", "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
        "sliding_window": 21,
    },
    "qwen2-windows": {
        "model_type": "qwen2", "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3,
        "tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1,
    },
    "qwen3-windows": {
        "model_type": "qwen3", "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
        "num_hidden_layers": 4, "tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "qwen3-5": {"model_type": "qwen3_5_text", **QWEN_HYBRID, "tie_word_embeddings": True, "linear_conv_kernel_dim": 3},
    "qwen3-5-conditional": {
        "model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text", **QWEN_HYBRID},
        "vision_config": QWEN_VISION,
    },
    "qwen3-5-moe": {"model_type": "qwen3_5_moe_text", **QWEN_HYBRID, **QWEN_EXPERTS},
    "qwen3-5-moe-conditional": {
        "model_type": "qwen3_5_moe", "text_config": {"model_type": "qwen3_5_moe_text", **QWEN_HYBRID, **QWEN_EXPERTS},
        "vision_config": QWEN_VISION,
    },
    "qwen3-next": {"model_type": "qwen3_next", **QWEN_HYBRID, **QWEN_EXPERTS, "mlp_only_layers": [1]},
    "olmo-hybrid": {
        "model_type": "olmo_hybrid", "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        # As many queries as values: `save_pretrained` cuts the convolution into thirds.
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 28,
        "linear_value_head_dim": 14, "pad_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": None},
    },
    "kimi-linear": {  # one dense layer, and latent attention in every second
        "model_type": "kimi_linear", "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 4,
        "kv_lora_rank": 36, "qk_rope_head_dim": 12, "qk_nope_head_dim": 20, "v_head_dim": 16, "linear_head_dim": 12,
        "linear_num_heads": 4, "linear_conv_kernel_dim": 3, "num_local_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 28, "n_group": 4, "topk_group": 2, "pad_token_id": None,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "lfm2": {
        "model_type": "lfm2", "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4,
        "hidden_size": 72, "conv_bias": True, "conv_L_cache": 4, "block_multiple_of": 10,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        "block_ffn_dim_multiplier": 1.3, "tie_word_embeddings": False, "pad_token_id": None,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
    },
    "lfm2-moe": {
        "model_type": "lfm2_moe", "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4,
        "num_dense_layers": 1, "num_experts": 9, "num_experts_per_tok": 4, "moe_intermediate_size": 38,
        "pad_token_id": None, "layer_types": ["conv", "full_attention", "conv", "conv"],
    },
    "lfm3": {
        "model_type": "lfm3", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "num_hidden_layers": 5, "conv_L_cache": 4, "sliding_window": 17, "pad_token_id": None,
        "layer_types": ["conv", "sliding_attention", "conv", "full_attention", "conv"], "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.4, "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "lfm3-plain": {  # no gates and no norms of outputs
        "model_type": "lfm3", "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 20,
        "num_hidden_layers": 3, "sliding_window": 33, "conv_bias": True, "attention_bias": True, "pad_token_id": None,
        "layer_types": ["conv", "full_attention", "sliding_attention"], "use_sandwich_norm": False,
        "use_attention_gate": False, "tie_word_embeddings": False,
    },
    "recurrent-gemma": {  # the recurrence is wider than the residual stream
        "model_type": "recurrent_gemma", "num_attention_heads": 4, "num_key_value_heads": 1, "lru_width": 104,
        "intermediate_size": 200, "num_hidden_layers": 4, "attention_window_size": 17,
        "block_types": ["recurrent", "attention"], "logits_soft_cap": 8.0, "pad_token_id": None,
    },
    "zamba2": {  # two blocks of three layers that see them, of which the first has two
        "model_type": "zamba2", "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 32,
        "intermediate_size": 100, "num_hidden_layers": 5, "n_mamba_heads": 4, "mamba_ngroups": 2, "mamba_d_state": 20,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid"],
        "num_mem_blocks": 2, "use_shared_attention_adapter": True, "adapter_rank": 12, "use_mem_rope": True,
        "time_step_min": 1e-9, "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        "tie_word_embeddings": True, "pad_token_id": None, "initializer_range": 0.1,
    },
    "zamba2-plain": {
        "model_type": "zamba2", "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 72,
        "intermediate_size": 100, "num_hidden_layers": 3, "n_mamba_heads": 6, "mamba_d_state": 20,
        "layers_block_type": ["hybrid", "linear_attention", "hybrid"], "adapter_rank": 12, "add_bias_linear": True,
        "time_step_min": 1e-9, "tie_word_embeddings": True, "pad_token_id": None, "initializer_range": 0.1,
    },
    "gemma2": {
        "model_type": "gemma2", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "num_hidden_layers": 3, "sliding_window": 17, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 8.0,
    },
    "gemma3": {
        "model_type": "gemma3_text", "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32,
        "num_hidden_layers": 4, "sliding_window": 17, "sliding_window_pattern": 3, "query_pre_attn_scalar": 20,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "gemma3n": {  # half of the layers have sparse gates, and the last two use the caches of others
        "model_type": "gemma3n_text", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "num_hidden_layers": 6, "hidden_size": 60, "intermediate_size": [96, 88, 96, 104, 96, 96], "sliding_window": 17,
        "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": VOCAB_SIZE - 20, "num_kv_shared_layers": 2,
        "layer_types": [*["sliding_attention", "full_attention"] * 2, "sliding_attention", "full_attention"],
        "activation_sparsity_pattern": [0.95, 0.5, 0.8, 0.0, 0.0, 0.0], "altup_num_inputs": 3, "altup_active_idx": 1,
        "laurel_rank": 10, "final_logit_softcapping": 8.0, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "gemma3n-conditional": {  # `add_other_parts` makes it one
        "model_type": "gemma3n_text", "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16,
        "num_hidden_layers": 4, "sliding_window": 17, "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": VOCAB_SIZE, "num_kv_shared_layers": 1, "laurel_rank": 8,
        "activation_sparsity_pattern": [0.9, 0.9, 0.0, 0.0], "altup_correct_scale": False,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    },
    "gemma4": {  # the numbers of KV heads and the head sizes differ, and keys are values in layers without a window
        "model_type": "gemma4_text", "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20,
        "num_hidden_layers": 5, "hidden_size": 60, "sliding_window": 17, "attention_k_eq_v": True,
        "global_head_dim": 36, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
        "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention", "full_attention"],
        "final_logit_softcapping": 8.0, "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.4, "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "gemma4-moe": {
        "model_type": "gemma4_text", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "num_hidden_layers": 3, "sliding_window": 17, "attention_k_eq_v": True, "global_head_dim": 32,
        "num_global_key_value_heads": 2, "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 7,
        "top_k_experts": 3, "moe_intermediate_size": 44,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "gemma4-conditional": {  # each layer has an input of its own, and the last two use the caches of others
        "model_type": "gemma4", "text_config": {
            "model_type": "gemma4_text", "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16,
            "num_hidden_layers": 5, "sliding_window": 17, "global_head_dim": 32, "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": VOCAB_SIZE, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
            "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 2, "full_attention"],
        },
        "vision_config": {
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 16,
        },
    },
    "gemma4-unified": {
        "model_type": "gemma4_unified", "text_config": {
            "model_type": "gemma4_unified_text", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "num_hidden_layers": 3, "sliding_window": 17, "global_head_dim": 32, "num_global_key_value_heads": 1,
            "attention_k_eq_v": True, "use_bidirectional_attention": "vision",
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
        "vision_config": {"patch_size": 4, "mm_embed_dim": 16, "mm_posemb_size": 8, "output_proj_dims": 64},
    },
    "llama4": {  # one layer with experts between two without
        "model_type": "llama4_text", "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20,
        "hidden_size": 60, "intermediate_size": 44, "intermediate_size_mlp": 100, "num_hidden_layers": 3,
        "num_local_experts": 5, "moe_layers": [1], "no_rope_layers": [1, 0, 1], "attention_chunk_size": 19,
        "floor_scale": 16, "attn_scale": 0.3, "pad_token_id": None, "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama4-conditional": {
        "model_type": "llama4", "tie_word_embeddings": False, "text_config": {
            "model_type": "llama4_text", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "intermediate_size": 44, "intermediate_size_mlp": 100, "num_hidden_layers": 4, "num_local_experts": 4,
            "interleave_moe_layer_step": 2, "attention_chunk_size": 33, "use_qk_norm": False, "pad_token_id": None,
            "attn_temperature_tuning": False,
        },
        "vision_config": {
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 28, "patch_size": 14, "vision_output_dim": 16, "projector_input_dim": 16,
            "projector_output_dim": 16,
        },
    },
    "olmo3": {
        "model_type": "olmo3", "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4,
        "sliding_window": 19, "tie_word_embeddings": False,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn", "factor": 4.0, "rope_theta": 1000.0, "original_max_position_embeddings": 128,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        },
    },
}  # fmt: skip
_HYBRID = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": []}
for _name, _changes in {
    "deepseek-v3": {"num_nextn_predict_layers": 1}, "glm4-moe": {"num_nextn_predict_layers": 1, "head_dim": 32},
    "mimo": {"num_nextn_predict_layers": 1}, "qwen3-5": _HYBRID, "qwen3-next": _HYBRID,
}.items():  # fmt: skip
    CHECKPOINTS[f"{_name}-mtp"] = {**CHECKPOINTS[_name], "vocab_size": 4096, **_changes}  # of the demo's tokenizer
_DEEPSEEK = ("model.layers.{}.", "enorm", "hnorm", "eh_proj", "shared_head.norm")
_QWEN = ("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
MTP_NAMES = {
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "Glm4MoeForCausalLM": _DEEPSEEK,
    "MiMoForCausalLM": ("model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    "Qwen3NextForCausalLM": _QWEN,
    "Qwen3_5ForCausalLM": _QWEN,
}
"""By architecture, as vLLM reads them: where the layer is, its norms of embedding and hidden state, their projection,
its last norm."""


def make_checkpoint(folder: Path, name: str, tokenizer: PreTrainedTokenizerFast, max_shard_size: str = "1GB") -> Path:
    """Write a seeded random checkpoint in float32, with weights large enough that its choices are clear-cut."""
    settings = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.2,
        "model_type": "llama",
    }  # fmt: skip
    changes, auto = CHECKPOINTS[name], AutoModelForCausalLM
    if "text_config" in changes:
        settings, auto = {"text_config": {**settings, **changes["text_config"]}}, AutoModelForImageTextToText
        changes = {name: value for name, value in changes.items() if name != "text_config"}
    torch.manual_seed(0)
    model = auto.from_config(AutoConfig.for_model(**{**settings, **changes})).eval()
    for parameter_name, parameter in model.named_parameters():
        if model.config.model_type == "recurrent_gemma" and not parameter_name.endswith("recurrent_param"):
            torch.nn.init.normal_(parameter, std=0.2)
        elif parameter_name.endswith("gate_up_proj_bias"):
            torch.nn.init.normal_(parameter, std=4.0)  # gpt-oss cuts off what is above 7
        elif parameter_name.endswith("mamba.in_proj.weight") and model.config.model_type == "zamba2":
            torch.nn.init.normal_(parameter, std=0.4)  # so that states count beside the inputs of their layers
        elif parameter_name.endswith("A_log"):  # so that a state lasts
            torch.nn.init.uniform_(parameter, *((-5.0, -1.0) if "linear_attn" in parameter_name else (-2.0, 1.0)))
        elif parameter_name.endswith((".dt_bias", ".dt_proj.bias")) and "linear_attn" not in parameter_name:
            torch.nn.init.uniform_(parameter, -4.0, 1.0)  # so that states last for some tokens, and for many
        elif parameter_name.endswith(  # and ones
            (".D", ".mamba.norm.weight", ".mixer.norm.weight", ".dt_layernorm.weight", ".b_layernorm.weight",
             ".c_layernorm.weight")
        ):  # fmt: skip
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif parameter_name.endswith((".bias", "_bias")):  # which begin as zeros, or dt_bias as ones
            torch.nn.init.normal_(parameter, std=0.2)
        elif parameter_name.endswith(".sinks"):
            torch.nn.init.normal_(parameter, std=2.0)
        elif parameter_name.endswith(  # and ones
            ("q_norm.weight", "k_norm.weight", "feedforward_layernorm.weight", "query_layernorm.weight",
             "key_layernorm.weight", "post_self_attn_layernorm.weight", "post_mlp_layernorm.weight", ".router.scale",
             "router_norm.weight", "correct_output_scale", "laurel_norm.weight", "per_layer_input_norm.weight",
             ".per_expert_scale", "linear_attn.norm.weight", "linear_attn.o_norm.weight", "q_layernorm.weight",
             "self_attn.o_norm.weight",
             "k_layernorm.weight", "operator_norm.weight", "ffn_norm.weight",
             "shared_transformer.input_layernorm.weight", "shared_transformer.pre_ff_layernorm.weight")
        ):  # fmt: skip
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif parameter_name.endswith("experts.down_proj") and model.config.model_type == "phimoe":
            torch.nn.init.normal_(parameter, std=0.02)  # SparseMixer's weights are near to 1: each other choice counts
        elif parameter_name.endswith(LAYER_NORMS) and model.config.model_type in LAYER_NORM_FAMILIES:
            torch.nn.init.uniform_(parameter, *((-0.5, 0.5) if model.config.model_type == "nemotron" else (0.5, 1.5)))
    for tensor_name, tensor in (*model.named_buffers(), *model.named_parameters()):
        if tensor_name.endswith(("e_score_correction_bias", "expert_bias")):  # which begins as zeros
            std = 0.02 if "moe_statics" in tensor_name else 0.1  # beside a softmax, or sigmoids
            torch.nn.init.normal_(tensor, std=std)
        elif tensor_name.endswith("layer_scalar"):  # and ones
            torch.nn.init.uniform_(tensor, 0.5, 1.5)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if changes.get("model_type") == "exaone":  # which transformers computes as a Llama; the hub's name is another
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "architectures": ["ExaoneForCausalLM"]}))
    tokenizer.save_pretrained(folder)
    if name.startswith("mimo"):  # transformers has it as Qwen2
        edit_json(folder / "config.json", architectures=["MiMoForCausalLM"], model_type="mimo")
    if name == "gemma3n-conditional":
        add_other_parts(folder)
    if name.endswith("-mtp") or changes.get("num_nextn_predict_layers"):
        add_mtp_layer(folder)
    return folder


def add_other_parts(folder: Path) -> None:
    """Make Gemma 3n's text model part of a whole one. transformers' own needs timm to be made."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    others = ("vision_tower.timm_model.conv_stem.conv", "audio_tower.conformer.0.norm", "embed_vision.embedding")
    tensors |= {f"model.{name}.weight": torch.ones(2, 2) for name in others}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    whole = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "text_config": config}
    (folder / "config.json").write_text(json.dumps(whole))


def load_text_model(folder: Path) -> PreTrainedModel:
    """What `add_other_parts` has made part of a whole."""
    config = json.loads((folder / "config.json").read_text())["text_config"]
    tensors = load_file(folder / "model.safetensors")
    own = {name.replace("language_model.", "") for name in tensors if "language_model." in name}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    missing, _ = model.load_state_dict(
        {name: tensors[name.replace("model.", "model.language_model.", 1)] for name in own}, strict=False
    )
    assert missing == ["lm_head.weight"]  # which is the embedding
    return model


def mtp_names(folder: Path) -> list[str]:
    """The entry of `MTP_NAMES`, with the names as they are in the checkpoint."""
    config = json.loads((folder / "config.json").read_text())
    prefix, *names = MTP_NAMES[config["architectures"][0]]
    prefix = prefix.format(config["num_hidden_layers"])
    return [prefix, *(f"{prefix}{name}.weight" for name in names)]


def mtp_layer(prefix: str) -> str:
    """Where the decoder layer is, of `mtp_names`' first."""
    return f"{prefix}layers.0." if prefix == "mtp." else prefix


def add_mtp_layer(folder: Path) -> None:
    """Give a checkpoint a random layer of multi-token prediction, which is like its last layer."""
    generator = torch.Generator().manual_seed(5)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    prefix, embedding_norm, hidden_norm, projection, last_norm = mtp_names(folder)
    last, size = f"model.layers.{config['num_hidden_layers'] - 1}.", config["hidden_size"]
    layer = {
        name.replace(last, mtp_layer(prefix)): tensor[torch.randperm(len(tensor), generator=generator)].clone()
        for name, tensor in tensors.items()
        if name.startswith(last)
    }
    for name in (embedding_norm, hidden_norm, last_norm):
        layer[name] = torch.rand(size, generator=generator) + 0.5
    layer[projection] = torch.randn(size, 2 * size, generator=generator) / size**0.5
    if MTP_NAMES[config["architectures"][0]] is _DEEPSEEK:  # it has copies, which are not read
        layer[f"{prefix}embed_tokens.weight"] = torch.zeros(1, 1)
        layer[f"{prefix}shared_head.head.weight"] = torch.zeros(1, 1)
    save_file({**tensors, **layer}, folder / "model.safetensors", metadata={"format": "pt"})


def make_prompts(count: int, vocab_size: int, max_length: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 1 to `max_length` ids; every fourth begins like another, so that prefixes are shared."""
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    for i in range(count):
        prompt = [rng.randrange(2, vocab_size) for _ in range(rng.randrange(1, max_length + 1))]
        if i % 4 == 3:
            prompt = (rng.choice(prompts) + prompt)[:max_length]
        prompts.append(prompt)
    return prompts


@dataclass(frozen=True)
class Expected:
    """What transformers makes of one prompt."""

    token_ids: list[int]
    logprobs: list[float]


def assert_exact(outputs: Sequence[RequestOutput], expected: Sequence[Expected]) -> None:
    """The engine's one completion of each prompt has transformers' tokens, and log-probabilities near to its."""
    for output, want in zip(outputs, expected, strict=True):
        (completion,) = output.outputs
        assert completion.token_ids == want.token_ids
        assert completion.logprobs is not None
        logprobs = [entry[i].logprob for entry, i in zip(completion.logprobs, completion.token_ids, strict=True)]
        assert logprobs == pytest.approx(want.logprobs, abs=1e-4)


def load_reference(folder: Path) -> PreTrainedModel:
    """transformers' own model of a checkpoint, in float32."""
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    if name == "Gemma3nForConditionalGeneration":
        return load_text_model(folder).eval()
    kind = getattr(transformers, name.replace("MiMo", "Qwen2"), AutoModelForCausalLM)  # it has no MiMo: a Qwen2
    model: PreTrainedModel = kind.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    # Its own forward fails in transformers 5.24.
    return (model.language_model if name == "Llama4ForConditionalGeneration" else model).eval()


def expected_outputs(name: str, folder: Path, prompts: Sequence[list[int]], lengths: Sequence[int]) -> list[Expected]:
    """What transformers generates greedily with a checkpoint after each prompt, which is alone.

    Args:
        name: of the stored result.
        folder: the checkpoint.
        prompts: token ids.
        lengths: how many tokens each prompt gets.
    """
    made_of = hashlib.sha256(f"{transformers.__version__} {prompts} {lengths}".encode())
    for path in sorted(folder.glob("*")):
        if path.suffix == ".safetensors" or path.name == "config.json":
            made_of.update(path.read_bytes())

    def compute() -> dict[str, Any]:
        model = load_reference(folder)
        results = [generate_greedily(model, *one) for one in zip(prompts, lengths, strict=True)]
        logprobs = [[round(logprob, 6) for logprob in one.logprobs] for one in results]
        return {"token_ids": [one.token_ids for one in results], "logprobs": logprobs}

    found = stored(name, made_of.hexdigest(), compute)
    return [Expected(*one) for one in zip(found["token_ids"], found["logprobs"], strict=True)]


def stored(name: str, made_of: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A result as it was stored, if it was made of the same things; else as it is computed.

    Args:
        name: of the result.
        made_of: a hash of what it depends on.
        compute: returns what can be stored as JSON.
    """
    file = RESULTS / f"{name}.json"
    if file.exists():
        found: dict[str, Any] = json.loads(file.read_text())
        if found["made_of"] == made_of:
            return found
    found = {"made_of": made_of, **compute()}
    if os.environ.get(STORE_VARIABLE):
        file.write_text(json.dumps(found, separators=(",", ":")) + "\n")
    return found


@torch.inference_mode()
def generate_greedily(model: PreTrainedModel, prompt: list[int], max_tokens: int) -> Expected:
    """Greedy decoding of one prompt, alone, to exactly `max_tokens` tokens, and each token's log-probability."""
    token_ids: list[int] = []
    logprobs: list[float] = []
    inputs, cache = torch.tensor([prompt]), None
    # transformers 5.17, which GPU machines have, calls it by its former name.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    has_cache = model.config.model_type != "recurrent_gemma"  # which returns none
    for number in range(max_tokens):
        arguments = {name: cache}
        if model.config.model_type == "bamba" and number:  # it does not count what is in the cache
            arguments["position_ids"] = torch.tensor([[len(prompt) + number - 1]])
        output = model(inputs, use_cache=has_cache, **arguments)
        cache = output.get(name)
        scores = output.logits[0, -1].float().log_softmax(-1)
        token_ids.append(int(scores.argmax()))
        logprobs.append(float(scores[token_ids[-1]]))
        inputs = torch.tensor([[token_ids[-1]] if has_cache else [*prompt, *token_ids]])
    return Expected(token_ids, logprobs)
