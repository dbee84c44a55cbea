"""The text model of Qwen3-VL (https://arxiv.org/abs/2511.21631): Qwen3. A token of text has one number in all three
dimensions of its position, so that MRoPE rotates it as RoPE does."""

from quire_engine.models.fields import Fields
from quire_engine.models.options import DecoderOptions

__all__ = ["DEFAULTS", "read_options"]

DEFAULTS = {"rope_theta": 500000.0, "max_position_embeddings": 128000, "head_dim": 128, "num_key_value_heads": 32}


def read_options(fields: Fields) -> DecoderOptions:
    """Read the options of the layers from `config.json`.

    Raises:
        CheckpointError: it describes a model that cannot be served.
    """
    bias = fields.boolean("attention_bias", False)
    return DecoderOptions(qkv_bias=bias, o_bias=bias, qk_norm=True)
