"""Qwen3 (https://arxiv.org/abs/2505.09388, section 2): no biases, and each head of queries and keys is normed."""

from quire_engine.models.fields import Fields
from quire_engine.models.options import AttentionOptions, ModelOptions, make_layers, read_mlp
from quire_engine.models.rope_config import read_rope
from quire_engine.models.windows import read_qwen_windows

DEFAULTS = {"head_dim": 128}


def read_options(fields: Fields) -> ModelOptions:
    """Read the model from `config.json`."""
    bias = fields.boolean("attention_bias", False)
    attention = AttentionOptions(rope=read_rope(fields), qkv_bias=bias, o_bias=bias, head_norms=True)
    return ModelOptions(layers=make_layers(fields, attention, read_mlp(fields), read_qwen_windows(fields)))
