"""Qwen2 and Qwen2.5 (https://arxiv.org/abs/2407.10671, section 2.2): Llama with biases of queries, keys and values."""

from quire_engine.models.fields import Fields
from quire_engine.models.options import AttentionOptions, ModelOptions, make_layers, read_mlp
from quire_engine.models.rope_config import read_rope
from quire_engine.models.windows import read_qwen_windows


def read_options(fields: Fields) -> ModelOptions:
    """Read the model from `config.json`."""
    attention = AttentionOptions(rope=read_rope(fields), qkv_bias=True)
    return ModelOptions(layers=make_layers(fields, attention, read_mlp(fields), read_qwen_windows(fields)))
