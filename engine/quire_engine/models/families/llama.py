"""Llama (Touvron et al. 2023, https://arxiv.org/abs/2302.13971); others say how they differ from it."""

from quire_engine.models.fields import Fields
from quire_engine.models.options import AttentionOptions, ModelOptions, make_layers, read_mlp
from quire_engine.models.rope_config import read_rope


def read_options(fields: Fields) -> ModelOptions:
    """Read the model from `config.json`."""
    bias = fields.boolean("attention_bias", False)
    attention = AttentionOptions(rope=read_rope(fields), qkv_bias=bias, o_bias=bias)
    mlp = read_mlp(fields, bias=fields.boolean("mlp_bias", False))
    return ModelOptions(layers=make_layers(fields, attention, mlp))
