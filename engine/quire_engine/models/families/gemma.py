"""Gemma's text models: norms on both sides, and windows in most layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire_engine.models.checkpoints.fields import MAX_LAYERS, MAX_SIZE, Fields
from quire_engine.models.families.reading import (
    make_layers,
    read_attention,
    read_mlp,
    read_window,
    read_window_rope,
    read_windows,
)
from quire_engine.models.options import PRE_NORMS, AttentionOptions, ModelOptions, NormOptions

ALIASES: Mapping[str, Mapping[str, str]] = {"gemma": {"hidden_activation": "hidden_act"}}
GEMMA2 = {"head_dim": 256, "tie_word_embeddings": True}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma": {**GEMMA2, "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 8192},
    "gemma2": GEMMA2,
    # The checkpoints with 4 billion parameters and more leave out what transformers adds.
    "gemma3": {
        **GEMMA2, "rope_theta": 1e6, "max_position_embeddings": 131072, "vocab_size": 262208,
        "num_attention_heads": 8, "num_key_value_heads": 4,
    },
    "vaultgemma": {**GEMMA2, "max_position_embeddings": 8192, "num_key_value_heads": 4},
}  # fmt: skip
NORMS = NormOptions(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
    offset=1.0,
    is_float32=True,
)


def gemma(fields: Fields) -> ModelOptions:
    """Gemma (https://arxiv.org/abs/2403.08295, section 2): the norms of Llama, and a scaled embedding."""
    if fields.boolean("use_bidirectional_attention", False):
        raise fields.error("use_bidirectional_attention", "false")
    if fields.values["hidden_act"] == "gelu":  # which says the approximation in the first checkpoints
        fields = fields.with_values({**fields.values, "hidden_act": "gelu_pytorch_tanh"})
    return ModelOptions(
        layers=make_layers(fields, read_attention(fields), read_mlp(fields)),
        norms=replace(PRE_NORMS, offset=1.0, is_float32=True),
        embedding_scale=fields.integer("hidden_size", 1, MAX_SIZE) ** 0.5,
    )


def gemma2(fields: Fields) -> ModelOptions:
    """Gemma 2 (https://arxiv.org/abs/2408.00118, section 2): soft caps, and a window in every second layer."""
    if fields.boolean("use_bidirectional_attention", False):
        raise fields.error("use_bidirectional_attention", "false")
    attention = replace(_read_attention(fields), soft_cap=fields.positive_or_null("attn_logit_softcapping", 50.0))
    mlp = read_mlp(fields, "hidden_activation", "gelu_pytorch_tanh")
    windows = read_windows(fields, read_window(fields, 4096), lambda i: i % 2 == 0)
    return ModelOptions(
        layers=make_layers(fields, attention, mlp, windows),
        norms=NORMS,
        embedding_scale=fields.integer("hidden_size", 1, MAX_SIZE) ** 0.5,
        logits_soft_cap=fields.positive_or_null("final_logit_softcapping", 30.0),
    )


def vaultgemma(fields: Fields) -> ModelOptions:
    """VaultGemma (https://arxiv.org/abs/2510.15001): Gemma 2 without norms of outputs."""
    return replace(gemma2(fields), norms=replace(NORMS, after_attention=None, after_mlp=None))


def gemma3(fields: Fields) -> ModelOptions:
    """Gemma 3 (https://arxiv.org/abs/2503.19786, section 2): normed queries and keys instead of soft caps, and five
    layers with a window, and a rotation of their own, to one without. EmbeddingGemma (https://arxiv.org/abs/2509.20354)
    is the same with attention to both sides, where a window is half as long to either."""
    attention = replace(_read_attention(fields), head_norms=True)
    is_causal, window = not fields.boolean("use_bidirectional_attention", False), read_window(fields, 4096)
    if not is_causal:
        attention, window = replace(attention, is_causal=False), None if window is None else window // 2 + 1
    local_rope = read_window_rope(fields, "rope_local_base_freq", 10000.0)
    mlp = read_mlp(fields, "hidden_activation", "gelu_pytorch_tanh")
    period = fields.integer("sliding_window_pattern", 1, MAX_LAYERS, 6)
    windows = read_windows(fields, window, lambda i: (i + 1) % period != 0)
    return ModelOptions(
        layers=make_layers(fields, attention, mlp, windows, local_rope),
        norms=NORMS,
        embedding_scale=fields.integer("hidden_size", 1, MAX_SIZE) ** 0.5,
        logits_soft_cap=fields.positive_or_null("final_logit_softcapping", None),
        has_head=is_causal,
    )


def _read_attention(fields: Fields) -> AttentionOptions:
    return read_attention(fields, scale=fields.positive("query_pre_attn_scalar", 256) ** -0.5)
