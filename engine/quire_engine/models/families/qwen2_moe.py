"""Qwen1.5-MoE and Qwen2-MoE (https://arxiv.org/abs/2407.10671, section 2.2.2): Qwen2 with many small experts, and one
that all tokens share."""

from quire_engine.models.experts_options import read_qwen_experts
from quire_engine.models.fields import MAX_LAYERS, Fields
from quire_engine.models.options import DecoderOptions
from quire_engine.models.windows import read_window, read_windows

__all__ = ["read_options"]


def read_options(fields: Fields) -> DecoderOptions:
    """Read the options of the layers from `config.json`.

    Raises:
        CheckpointError: it describes a model that cannot be served.
    """
    experts = read_qwen_experts(fields, num_experts=60, top_k=4, intermediate_size=1408, shared_intermediate_size=5632)
    window = read_window(fields, 4096) if fields.boolean("use_sliding_window", False) else None
    end = fields.integer("max_window_layers", 0, MAX_LAYERS, 28)  # unlike in Qwen2, the layers before it have windows
    windows = read_windows(fields, window, lambda layer: layer % 2 == 0 and layer < end)
    return DecoderOptions(qkv_bias=fields.boolean("qkv_bias", True), experts=experts, windows=windows)
