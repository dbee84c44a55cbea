"""Gemma 3's text models (https://arxiv.org/abs/2503.19786, section 2): as Gemma 2, with normed queries and keys instead
of soft caps, and five layers with a window, and a rotation of their own, to one without."""

from dataclasses import replace

from quire_engine.models.families import gemma2
from quire_engine.models.fields import MAX_LAYERS, MAX_SIZE, Fields
from quire_engine.models.options import LayerOptions, ModelOptions, read_mlp
from quire_engine.models.windows import read_window, read_window_rope, read_windows

DEFAULTS = {
    **gemma2.DEFAULTS, "rope_theta": 1e6, "max_position_embeddings": 131072, "vocab_size": 262208,
    "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip
"""The checkpoints with 4 billion parameters and more leave out what transformers adds."""


def read_options(fields: Fields) -> ModelOptions:
    """Read the model from `config.json`."""
    attention = replace(gemma2.read_attention(fields), head_norms=True)
    local = replace(attention, rope=read_window_rope(fields, "rope_local_base_freq", 10000.0))
    mlp = read_mlp(fields, "hidden_activation", "gelu_pytorch_tanh")
    period = fields.integer("sliding_window_pattern", 1, MAX_LAYERS, 6)
    windows = read_windows(fields, read_window(fields, 4096), lambda i: (i + 1) % period != 0)
    layers = [attention if window is None else replace(local, window=window) for window in windows]
    return ModelOptions(
        layers=tuple(LayerOptions(one, mlp) for one in layers),
        norms=gemma2.NORMS,
        embedding_scale=fields.integer("hidden_size", 1, MAX_SIZE) ** 0.5,
        logits_soft_cap=fields.positive_or_null("final_logit_softcapping", None),
    )
