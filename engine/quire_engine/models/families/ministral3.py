"""Ministral 3 (https://huggingface.co/collections/mistralai/ministral-3): Mistral with YaRN, and with queries that grow
with their position (`llama_4_scaling_beta` of the rotation)."""

from quire_engine.models.fields import Fields
from quire_engine.models.options import AttentionOptions, ModelOptions, make_layers, read_mlp
from quire_engine.models.rope_config import read_rope
from quire_engine.models.windows import read_window

DEFAULTS = {"rms_norm_eps": 1e-5, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 262144}


def read_options(fields: Fields) -> ModelOptions:
    """Read the model from `config.json`."""
    if not fields.inner("rope_parameters").values:
        raise fields.error("rope_parameters", "given")
    attention = AttentionOptions(rope=read_rope(fields), window=read_window(fields, None))
    return ModelOptions(layers=make_layers(fields, attention, read_mlp(fields)))
