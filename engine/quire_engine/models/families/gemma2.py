"""Gemma 2 (https://arxiv.org/abs/2408.00118, section 2): norms on both sides, soft caps, and a window in every second
layer."""

from quire_engine.models.fields import MAX_SIZE, Fields
from quire_engine.models.options import PRE_AND_POST_NORMS, DecoderOptions, read_activation
from quire_engine.models.windows import read_window, read_windows

__all__ = ["DEFAULTS", "read_options"]

DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True}


def read_options(fields: Fields) -> DecoderOptions:
    """Read the options of the layers from `config.json`.

    Raises:
        CheckpointError: it describes a model that cannot be served.
    """
    if fields.boolean("use_bidirectional_attention", False):
        raise fields.error("use_bidirectional_attention", "false")
    bias = fields.boolean("attention_bias", False)
    return DecoderOptions(
        qkv_bias=bias,
        o_bias=bias,
        norms=PRE_AND_POST_NORMS,
        norm_offset=1.0,
        float32_norms=True,
        activation=read_activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
        embedding_scale=fields.integer("hidden_size", 1, MAX_SIZE) ** 0.5,
        attention_scale=fields.positive("query_pre_attn_scalar", 256) ** -0.5,
        attention_soft_cap=fields.positive_or_null("attn_logit_softcapping", 50.0),
        logits_soft_cap=fields.positive_or_null("final_logit_softcapping", 30.0),
        windows=read_windows(fields, read_window(fields, 4096), lambda i: i % 2 == 0),
    )
