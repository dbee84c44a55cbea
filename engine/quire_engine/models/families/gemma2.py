"""Gemma 2 (https://arxiv.org/abs/2408.00118, section 2): norms on both sides, soft caps, and a window in every second
layer."""

from dataclasses import replace

from quire_engine.models.fields import MAX_SIZE, Fields
from quire_engine.models.options import AttentionOptions, ModelOptions, NormOptions, make_layers, read_mlp
from quire_engine.models.rope_config import read_rope
from quire_engine.models.windows import read_window, read_windows

DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True}
NORMS = NormOptions(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
    offset=1.0,
    is_float32=True,
)


def read_attention(fields: Fields) -> AttentionOptions:
    """What the attention of Gemma 2 and 3 has in common."""
    if fields.boolean("use_bidirectional_attention", False):
        raise fields.error("use_bidirectional_attention", "false")
    bias = fields.boolean("attention_bias", False)
    scale = fields.positive("query_pre_attn_scalar", 256) ** -0.5
    return AttentionOptions(rope=read_rope(fields), qkv_bias=bias, o_bias=bias, scale=scale)


def read_options(fields: Fields) -> ModelOptions:
    """Read the model from `config.json`."""
    attention = replace(read_attention(fields), soft_cap=fields.positive_or_null("attn_logit_softcapping", 50.0))
    mlp = read_mlp(fields, "hidden_activation", "gelu_pytorch_tanh")
    windows = read_windows(fields, read_window(fields, 4096), lambda i: i % 2 == 0)
    return ModelOptions(
        layers=make_layers(fields, attention, mlp, windows),
        norms=NORMS,
        embedding_scale=fields.integer("hidden_size", 1, MAX_SIZE) ** 0.5,
        logits_soft_cap=fields.positive_or_null("final_logit_softcapping", 30.0),
    )
