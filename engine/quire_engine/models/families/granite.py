"""Granite 3 (https://github.com/ibm-granite/granite-3.0-language-models): Llama with four multipliers, which keep the
scale of activations the same at any width (Yang et al. 2022, https://arxiv.org/abs/2203.03466)."""

from quire_engine.models.fields import Fields
from quire_engine.models.options import DecoderOptions

__all__ = ["read_options"]


def read_options(fields: Fields) -> DecoderOptions:
    """Read the options of the layers from `config.json`.

    Raises:
        CheckpointError: it describes a model that cannot be served.
    """
    bias = fields.boolean("attention_bias", False)
    return DecoderOptions(
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.boolean("mlp_bias", False),
        embedding_scale=fields.positive("embedding_multiplier", 1.0),
        attention_scale=fields.positive("attention_multiplier", 1.0),
        residual_multiplier=fields.positive("residual_multiplier", 1.0),
        logits_divisor=fields.positive("logits_scaling", 1.0),
    )
