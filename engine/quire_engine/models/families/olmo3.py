"""OLMo 3 (https://arxiv.org/abs/2512.13961): OLMo 2 with a window in three of four layers, which do not scale the
rotation."""

from dataclasses import replace

from quire_engine.models.families.olmo2 import NORMS
from quire_engine.models.fields import Fields
from quire_engine.models.options import AttentionOptions, LayerOptions, ModelOptions, read_mlp
from quire_engine.models.rope_config import read_rope
from quire_engine.models.windows import read_window, read_window_rope, read_windows

DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 500000.0}


def read_options(fields: Fields) -> ModelOptions:
    """Read the model from `config.json`."""
    bias, mlp = fields.boolean("attention_bias", False), read_mlp(fields)
    attention = AttentionOptions(rope=read_rope(fields), qkv_bias=bias, o_bias=bias, projection_norms=True)
    local = replace(attention, rope=read_window_rope(fields, "rope_theta", 500000.0))
    windows = read_windows(fields, read_window(fields, 4096), lambda i: (i + 1) % 4 != 0)
    layers = [attention if window is None else replace(local, window=window) for window in windows]
    return ModelOptions(layers=tuple(LayerOptions(one, mlp) for one in layers), norms=NORMS)
