"""Phi-3, Phi-3.5 and Phi-4 (https://arxiv.org/abs/2404.14219, section 2): Llama, with projections that are fused in its
checkpoints, LongRoPE, and in Phi-4-mini (https://arxiv.org/abs/2503.01743) partial rotary."""

from quire_engine.models.fields import Fields
from quire_engine.models.options import AttentionOptions, ModelOptions, make_layers, read_mlp
from quire_engine.models.rope_config import read_rope
from quire_engine.models.windows import read_window

DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096}
FUSED = (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj")))


def read_options(fields: Fields) -> ModelOptions:
    """Read the model from `config.json`."""
    attention = AttentionOptions(rope=read_rope(fields), window=read_window(fields, None))
    return ModelOptions(layers=make_layers(fields, attention, read_mlp(fields)), fused=FUSED)
