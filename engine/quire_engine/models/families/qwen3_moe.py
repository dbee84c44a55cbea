"""Qwen3-MoE (https://arxiv.org/abs/2505.09388, section 2): Qwen3 with many small experts, and none that all share."""

from quire_engine.models.experts_options import read_qwen_experts
from quire_engine.models.fields import Fields
from quire_engine.models.options import DecoderOptions
from quire_engine.models.windows import read_equal_windows

__all__ = ["read_options"]


def read_options(fields: Fields) -> DecoderOptions:
    """Read the options of the layers from `config.json`.

    Raises:
        CheckpointError: it describes a model that cannot be served.
    """
    bias = fields.boolean("attention_bias", False)
    experts = read_qwen_experts(fields, num_experts=128, top_k=8, intermediate_size=768)
    windows = read_equal_windows(fields, 4096) if fields.boolean("use_sliding_window", False) else ()
    return DecoderOptions(qkv_bias=bias, o_bias=bias, qk_norm=True, experts=experts, windows=windows)
