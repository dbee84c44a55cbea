"""GPT-NeoX (Black et al. 2022, https://arxiv.org/abs/2204.06745), and other decoders with LayerNorms and biases."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire_engine.models.checkpoints.fields import MAX_SIZE, Fields
from quire_engine.models.families.reading import make_layers, read_mlp, read_rope, read_window
from quire_engine.models.options import PRE_NORMS, AttentionOptions, ModelOptions

ALIASES: Mapping[str, Mapping[str, str]] = {
    "falcon": {
        "layer_norm_epsilon": "rms_norm_eps", "activation": "hidden_act", "n_embed": "hidden_size",
        "num_kv_heads": "num_key_value_heads",
    },
    "gpt_neox": {
        "layer_norm_eps": "rms_norm_eps", "rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor",
    },
    "phi": {"layer_norm_eps": "rms_norm_eps"},
    "stablelm": {"layer_norm_eps": "rms_norm_eps"},
    "starcoder2": {"norm_epsilon": "rms_norm_eps"},
}  # fmt: skip
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "falcon": {"rms_norm_eps": 1e-5, "hidden_act": "gelu", "tie_word_embeddings": True},
    "gpt_neox": {"rms_norm_eps": 1e-5, "hidden_act": "gelu", "partial_rotary_factor": 0.25},
    "phi": {"rms_norm_eps": 1e-5, "hidden_act": "gelu_new", "partial_rotary_factor": 0.5},
    "stablelm": {
        "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "num_key_value_heads": 32, "partial_rotary_factor": 0.25,
    },
    "starcoder2": {
        "rms_norm_eps": 1e-5, "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 4096,
        "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
}  # fmt: skip
QK_LAYERNORM = "false; or set model_impl to transformers"
NORMS = replace(PRE_NORMS, is_layer_norm=True, bias=True)
FALCON_NAMES = (
    ("transformer.word_embeddings", "embed_tokens"), ("transformer.h.", "layers."), ("transformer.ln_f", "norm"),
    (".self_attention.dense", ".self_attn.o_proj"), (".self_attention.", ".self_attn."),
    (".ln_attn", ".input_layernorm"), (".ln_mlp", ".post_attention_layernorm"), (".dense_h_to_4h", ".up_proj"),
    (".dense_4h_to_h", ".down_proj"),
)  # fmt: skip
NEOX_NAMES = (
    ("gpt_neox.", ""), ("embed_in", "embed_tokens"), ("embed_out", "lm_head"), ("final_layer_norm", "norm"),
    (".attention.dense", ".self_attn.o_proj"), (".attention.", ".self_attn."), (".dense_h_to_4h", ".up_proj"),
    (".dense_4h_to_h", ".down_proj"),
)  # fmt: skip
PHI_NAMES = (
    (".self_attn.dense", ".self_attn.o_proj"), (".fc1", ".up_proj"), (".fc2", ".down_proj"),
    ("final_layernorm", "norm"),
)  # fmt: skip
STARCODER2_NAMES = ((".c_fc", ".up_proj"), (".c_proj", ".down_proj"))


def falcon(fields: Fields) -> ModelOptions:
    """Falcon (https://arxiv.org/abs/2311.16867, section 4): attention and feed-forward side by side, in the newer
    architecture with a norm each, and queries, keys and values in one matrix, group by group. Falcon 3 is a Llama."""
    if fields.boolean("alibi", False):
        raise fields.error("alibi", "false")
    is_new, bias = fields.boolean("new_decoder_architecture", False), fields.boolean("bias", False)
    is_parallel = is_new or fields.boolean("parallel_attn", True)
    num_norms = fields.integer("num_ln_in_parallel_attn", 1, 2, 2 if is_new else 1)
    if num_norms == 2 and not is_new:
        raise fields.error("num_ln_in_parallel_attn", "1, as new_decoder_architecture is false")
    size = fields.integer("ffn_hidden_size", 1, MAX_SIZE, 4 * fields.integer("hidden_size", 1, MAX_SIZE))
    fields = fields.with_values({**fields.values, "intermediate_size": size})
    attention = AttentionOptions(rope=read_rope(fields), qkv_bias=bias, o_bias=bias, fused_name="query_key_value")
    return ModelOptions(
        layers=make_layers(fields, attention, read_mlp(fields, bias=bias, is_gated=False)),
        norms=NORMS if num_norms == 2 or not is_parallel else replace(NORMS, before_mlp=None),
        parallel_residual=is_parallel,
        renamed=FALCON_NAMES,
        num_kv_heads=1 if fields.boolean("multi_query", True) and not is_new else None,
    )


def gpt_neox(fields: Fields) -> ModelOptions:
    """GPT-NeoX and Pythia (https://arxiv.org/abs/2304.01373): attention and feed-forward side by side, each with a norm
    of its own, partial rotary, and queries, keys and values in one matrix, head by head."""
    bias = fields.boolean("attention_bias", True)
    attention = AttentionOptions(rope=read_rope(fields), qkv_bias=bias, o_bias=bias, fused_name="query_key_value")
    return ModelOptions(
        layers=make_layers(fields, attention, read_mlp(fields, bias=True, is_gated=False)),
        norms=NORMS,
        parallel_residual=fields.boolean("use_parallel_residual", True),
        renamed=NEOX_NAMES,
        skipped=(".self_attn.bias", ".self_attn.masked_bias"),  # masks, in old checkpoints
    )


def phi(fields: Fields) -> ModelOptions:
    """Phi-1, 1.5 and 2 (https://arxiv.org/abs/2309.05463, section 2): attention and feed-forward side by side on one
    norm, partial rotary, and biases, of the head too."""
    if fields.boolean("qk_layernorm", False):
        raise fields.error("qk_layernorm", QK_LAYERNORM)
    attention = AttentionOptions(rope=read_rope(fields), qkv_bias=True, o_bias=True)
    return ModelOptions(
        layers=make_layers(fields, attention, read_mlp(fields, bias=True, is_gated=False)),
        norms=replace(NORMS, before_mlp=None),
        parallel_residual=True,
        renamed=PHI_NAMES,
        head_bias=True,
    )


def stablelm(fields: Fields) -> ModelOptions:
    """StableLM 2 and StableLM 3B (https://arxiv.org/abs/2402.17834, section 2): Llama with LayerNorms and partial
    rotary; in some versions attention and feed-forward are side by side on one norm."""
    if fields.boolean("qk_layernorm", False):
        raise fields.error("qk_layernorm", QK_LAYERNORM)
    attention = AttentionOptions(rope=read_rope(fields), qkv_bias=fields.boolean("use_qkv_bias", False))
    is_parallel = fields.boolean("use_parallel_residual", False)
    return ModelOptions(
        layers=make_layers(fields, attention, read_mlp(fields)),
        norms=replace(NORMS, before_mlp=None) if is_parallel else NORMS,
        parallel_residual=is_parallel,
    )


def starcoder2(fields: Fields) -> ModelOptions:
    """StarCoder2 (https://arxiv.org/abs/2402.19173, section 6): biases, and a window in every layer."""
    bias = fields.boolean("use_bias", True)
    attention = AttentionOptions(
        rope=read_rope(fields), qkv_bias=bias, o_bias=bias, window=read_window(fields, None)
    )  # fmt: skip
    mlp = read_mlp(fields, bias=bias, is_gated=False)
    return ModelOptions(layers=make_layers(fields, attention, mlp), norms=NORMS, renamed=STARCODER2_NAMES)
