"""OLMo 2 (https://arxiv.org/abs/2501.00656, section 3): the outputs of attention and feed-forward are normed instead of
their inputs, and so are all queries of a token together, and all keys."""

from quire_engine.models.fields import Fields
from quire_engine.models.options import AttentionOptions, ModelOptions, NormOptions, make_layers, read_mlp
from quire_engine.models.rope_config import read_rope

DEFAULTS = {"rms_norm_eps": 1e-5}
NORMS = NormOptions(
    after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm", is_float32=True
)  # fmt: skip


def read_options(fields: Fields) -> ModelOptions:
    """Read the model from `config.json`."""
    bias = fields.boolean("attention_bias", False)
    attention = AttentionOptions(rope=read_rope(fields), qkv_bias=bias, o_bias=bias, projection_norms=True)
    return ModelOptions(layers=make_layers(fields, attention, read_mlp(fields)), norms=NORMS)
