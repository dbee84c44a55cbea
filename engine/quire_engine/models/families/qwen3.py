"""Qwen3 (https://arxiv.org/abs/2505.09388, section 2): no biases, and each head of queries and keys is normed."""

from quire_engine.models.fields import Fields
from quire_engine.models.options import DecoderOptions
from quire_engine.models.windows import read_qwen_windows

__all__ = ["read_options"]


def read_options(fields: Fields) -> DecoderOptions:
    """Read the options of the layers from `config.json`.

    Raises:
        CheckpointError: it describes a model that cannot be served.
    """
    bias = fields.boolean("attention_bias", False)
    return DecoderOptions(
        qkv_bias=bias, o_bias=bias, qk_norm=True, default_head_size=128, windows=read_qwen_windows(fields)
    )
