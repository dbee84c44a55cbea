"""DeepSeek-V2 (https://arxiv.org/abs/2405.04434): latent attention (section 2.1), and in most layers fine-grained experts
beside shared ones (section 2.2)."""

import math

from quire_engine.models.fields import Fields
from quire_engine.models.options import DecoderOptions, LatentAttentionOptions

__all__ = ["read_attention_scale", "read_latent", "read_options"]

MAX_SIZE = 1 << 16
"""Of a head, or of a rank."""


def read_options(fields: Fields) -> DecoderOptions:
    """Read the options of the layers from `config.json`.

    Raises:
        CheckpointError: it describes a model that cannot be served.
    """
    latent, bias = read_latent(fields, interleaved=True), fields.boolean("attention_bias", False)
    return DecoderOptions(
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.boolean("mlp_bias", False),
        latent=latent,
        attention_scale=read_attention_scale(fields, latent),
        default_head_size=latent.rope_size,
    )


def read_latent(fields: Fields, *, interleaved: bool) -> LatentAttentionOptions:
    """Read the sizes of the attention. A `q_lora_rank` that is null says that queries are not compressed.

    Args:
        fields: of `config.json`.
        interleaved: whether features that are rotated together lie side by side.

    Raises:
        CheckpointError: one of them is missing, or no size.
    """
    compresses = fields.values.get("q_lora_rank", 1536) is not None
    rope_size = fields.integer("qk_rope_head_dim", 2, MAX_SIZE, 64)
    if rope_size % 2:
        raise fields.error("qk_rope_head_dim", "even")
    return LatentAttentionOptions(
        query_rank=fields.integer("q_lora_rank", 1, MAX_SIZE, 1536) if compresses else None,
        kv_rank=fields.integer("kv_lora_rank", 1, MAX_SIZE, 512),
        rope_size=rope_size,
        nope_size=fields.integer("qk_nope_head_dim", 1, MAX_SIZE, 128),
        value_size=fields.integer("v_head_dim", 1, MAX_SIZE, 128),
        interleaved=interleaved,
    )


def read_attention_scale(fields: Fields, latent: LatentAttentionOptions) -> float:
    """What products of queries and keys are multiplied by: with YaRN more than the inverse root of the head's size
    (https://arxiv.org/abs/2309.00071, section 3.4), twice, as it would be for queries and for keys.

    Raises:
        CheckpointError: a field of the rotary embedding has a wrong value.
    """
    scale = (latent.nope_size + latent.rope_size) ** -0.5
    rope = fields.inner("rope_parameters")
    rope = rope if rope.values else fields.inner("rope_scaling")
    kind = rope.values.get("rope_type") or rope.values.get("type") or "default"
    if kind == "default" or not rope.values.get("mscale_all_dim"):
        return scale
    factor = rope.positive("factor", 1.0)
    mscale = 0.1 * rope.positive("mscale_all_dim") * math.log(factor) + 1.0 if factor > 1 else 1.0
    return scale * mscale * mscale
