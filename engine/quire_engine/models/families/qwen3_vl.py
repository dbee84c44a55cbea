"""The text model of Qwen3-VL (https://arxiv.org/abs/2511.21631): Qwen3. A token of text has one number in all three
dimensions of its position, so that MRoPE rotates it as RoPE does."""

from quire_engine.models.fields import Fields
from quire_engine.models.options import AttentionOptions, ModelOptions, make_layers, read_mlp
from quire_engine.models.rope_config import read_rope

DEFAULTS = {"rope_theta": 500000.0, "max_position_embeddings": 128000, "head_dim": 128, "num_key_value_heads": 32}


def read_options(fields: Fields) -> ModelOptions:
    """Read the model from `config.json`."""
    bias = fields.boolean("attention_bias", False)
    attention = AttentionOptions(rope=read_rope(fields), qkv_bias=bias, o_bias=bias, head_norms=True)
    return ModelOptions(layers=make_layers(fields, attention, read_mlp(fields)))
