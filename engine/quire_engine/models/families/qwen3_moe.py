"""Qwen3-MoE (https://arxiv.org/abs/2505.09388, section 2): Qwen3 with many small experts, and none that all share."""

from quire_engine.models.families.qwen2_moe import read_mlps
from quire_engine.models.fields import Fields
from quire_engine.models.options import AttentionOptions, ModelOptions, make_layers
from quire_engine.models.rope_config import read_rope
from quire_engine.models.windows import read_window


def read_options(fields: Fields) -> ModelOptions:
    """Read the model from `config.json`."""
    bias = fields.boolean("attention_bias", False)
    window = read_window(fields, 4096) if fields.boolean("use_sliding_window", False) else None
    attention = AttentionOptions(
        rope=read_rope(fields), window=window, qkv_bias=bias, o_bias=bias, head_norms=True
    )  # fmt: skip
    mlps = read_mlps(fields, num_experts=128, top_k=8, intermediate_size=768)
    return ModelOptions(layers=make_layers(fields, attention, mlps))
