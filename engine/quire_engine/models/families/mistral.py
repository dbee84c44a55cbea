"""Mistral (https://arxiv.org/abs/2310.06825, section 2): Llama, in some versions with a window in every layer."""

from quire_engine.models.fields import Fields
from quire_engine.models.options import AttentionOptions, ModelOptions, make_layers, read_mlp
from quire_engine.models.rope_config import read_rope
from quire_engine.models.windows import read_window


def read_options(fields: Fields) -> ModelOptions:
    """Read the model from `config.json`."""
    attention = AttentionOptions(rope=read_rope(fields), window=read_window(fields, 4096))
    return ModelOptions(layers=make_layers(fields, attention, read_mlp(fields)))
