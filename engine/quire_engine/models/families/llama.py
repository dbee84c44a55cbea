"""Llama (Touvron et al. 2023, https://arxiv.org/abs/2302.13971): the decoder with no options except biases."""

from quire_engine.models.fields import Fields
from quire_engine.models.options import DecoderOptions

__all__ = ["read_options"]


def read_options(fields: Fields) -> DecoderOptions:
    """Read the options of the layers from `config.json`.

    Raises:
        CheckpointError: it describes a model that cannot be served.
    """
    bias = fields.boolean("attention_bias", False)
    return DecoderOptions(qkv_bias=bias, o_bias=bias, mlp_bias=fields.boolean("mlp_bias", False))
