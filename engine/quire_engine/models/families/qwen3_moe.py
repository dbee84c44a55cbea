"""Qwen3-MoE (https://arxiv.org/abs/2505.09388, section 2): Qwen3 with many small experts, and none that all share."""

from quire_engine.models.experts_options import read_qwen_experts
from quire_engine.models.fields import Fields
from quire_engine.models.options import DecoderOptions, refuse_sliding_window

__all__ = ["read_options"]


def read_options(fields: Fields) -> DecoderOptions:
    """Read the options of the layers from `config.json`.

    Raises:
        CheckpointError: it describes a model that cannot be served.
    """
    refuse_sliding_window(fields)
    bias = fields.boolean("attention_bias", False)
    experts = read_qwen_experts(fields, num_experts=128, top_k=8, intermediate_size=768)
    return DecoderOptions(qkv_bias=bias, o_bias=bias, qk_norm=True, experts=experts)
