"""Granite 3 (https://github.com/ibm-granite/granite-3.0-language-models): Llama with four multipliers, which keep the
scale of activations the same at any width (Yang et al. 2022, https://arxiv.org/abs/2203.03466)."""

from quire_engine.models.fields import Fields
from quire_engine.models.options import AttentionOptions, ModelOptions, make_layers, read_mlp
from quire_engine.models.rope_config import read_rope


def read_options(fields: Fields) -> ModelOptions:
    """Read the model from `config.json`."""
    bias, scale = fields.boolean("attention_bias", False), fields.positive("attention_multiplier", 1.0)
    attention = AttentionOptions(rope=read_rope(fields), qkv_bias=bias, o_bias=bias, scale=scale)
    mlp = read_mlp(fields, bias=fields.boolean("mlp_bias", False))
    return ModelOptions(
        layers=make_layers(fields, attention, mlp),
        embedding_scale=fields.positive("embedding_multiplier", 1.0),
        residual_multiplier=fields.positive("residual_multiplier", 1.0),
        logits_divisor=fields.positive("logits_scaling", 1.0),
    )
