"""DeepSeek-V3 and R1 (https://arxiv.org/abs/2412.19437, section 2.1): as DeepSeek-V2, with another way of choosing
experts. The extra layers of multi-token prediction (section 2.2) are not computed."""

from quire_engine.models.families.deepseek_v2 import read_attention_scale, read_latent
from quire_engine.models.fields import Fields
from quire_engine.models.options import DecoderOptions

__all__ = ["read_options"]


def read_options(fields: Fields) -> DecoderOptions:
    """Read the options of the layers from `config.json`.

    Raises:
        CheckpointError: it describes a model that cannot be served.
    """
    latent = read_latent(fields, interleaved=fields.boolean("rope_interleave", True))
    bias = fields.boolean("attention_bias", False)
    return DecoderOptions(
        qkv_bias=bias,
        o_bias=bias,
        latent=latent,
        attention_scale=read_attention_scale(fields, latent),
        default_head_size=latent.rope_size,
        num_extra_layers=fields.integer("num_nextn_predict_layers", 0, 100, 1),
    )
