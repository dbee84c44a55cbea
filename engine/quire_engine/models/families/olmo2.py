"""OLMo 2 (https://arxiv.org/abs/2501.00656, section 3): the outputs of attention and feed-forward are normed instead of
their inputs, and so are all queries of a token together, and all keys."""

from quire_engine.models.fields import Fields
from quire_engine.models.options import POST_NORMS, DecoderOptions

__all__ = ["DEFAULTS", "read_options"]

DEFAULTS = {"rms_norm_eps": 1e-5}


def read_options(fields: Fields) -> DecoderOptions:
    """Read the options of the layers from `config.json`.

    Raises:
        CheckpointError: it describes a model that cannot be served.
    """
    bias = fields.boolean("attention_bias", False)
    return DecoderOptions(qkv_bias=bias, o_bias=bias, qk_projection_norm=True, norms=POST_NORMS, float32_norms=True)
