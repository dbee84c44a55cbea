"""Gemma 3's text models (https://arxiv.org/abs/2503.19786, section 2): Gemma 2 with normed queries and keys instead of
soft caps, and five layers with a window, and a rotation of their own, to one without."""

from dataclasses import replace

from quire_engine.models.families import gemma2
from quire_engine.models.fields import MAX_LAYERS, Fields
from quire_engine.models.options import DecoderOptions
from quire_engine.models.windows import read_window, read_window_rope_theta, read_windows

__all__ = ["DEFAULTS", "read_options"]

DEFAULTS = {
    **gemma2.DEFAULTS, "rope_theta": 1e6, "max_position_embeddings": 131072, "vocab_size": 262208,
    "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip
"""The checkpoints with 4 billion parameters and more leave out what transformers adds."""


def read_options(fields: Fields) -> DecoderOptions:
    """Read the options of the layers from `config.json`.

    Raises:
        CheckpointError: it describes a model that cannot be served.
    """
    period = fields.integer("sliding_window_pattern", 1, MAX_LAYERS, 6)
    return replace(
        gemma2.read_options(fields),
        qk_norm=True,
        attention_soft_cap=None,
        logits_soft_cap=fields.positive_or_null("final_logit_softcapping", None),
        windows=read_windows(fields, read_window(fields, 4096), lambda i: (i + 1) % period != 0),
        window_rope_theta=read_window_rope_theta(fields, "rope_local_base_freq", 10000.0),
    )
