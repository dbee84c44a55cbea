"""Cohere's Command models: LayerNorms without a bias, and attention and feed-forward side by side on one norm."""

from collections.abc import Mapping
from typing import Any

from quire_engine.models.checkpoints.fields import MAX_LAYERS, Fields
from quire_engine.models.families.reading import (
    make_layers,
    read_attention,
    read_mlp,
    read_window,
    read_windows,
    without_rope,
)
from quire_engine.models.options import LayerOptions, ModelOptions, NormOptions

ALIASES: Mapping[str, Mapping[str, str]] = {
    "cohere": {"layer_norm_eps": "rms_norm_eps"},
    "cohere2": {"layer_norm_eps": "rms_norm_eps"},
}
COHERE = {"rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "tie_word_embeddings": True}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {"cohere": {**COHERE, "rope_theta": 500000.0}, "cohere2": COHERE}
NORMS = NormOptions(before_attention="input_layernorm", is_layer_norm=True)


def cohere(fields: Fields) -> ModelOptions:
    """Command R and R+ (https://docs.cohere.com/docs/command-r), and Aya 23 (https://arxiv.org/abs/2405.15032)."""
    attention = read_attention(fields, interleaved=True, head_layer_norms=fields.boolean("use_qk_norm", False))
    return _model(fields, make_layers(fields, attention, read_mlp(fields)))


def cohere2(fields: Fields) -> ModelOptions:
    """Command R7B and Command A (https://arxiv.org/abs/2504.00698, section 2): three of four layers have a window and
    a rotation, the others neither."""
    period = fields.integer("sliding_window_pattern", 1, MAX_LAYERS, 4)
    windows = read_windows(fields, read_window(fields, 4096), lambda i: (i + 1) % period != 0)
    layers = make_layers(fields, read_attention(fields, interleaved=True), read_mlp(fields), windows)
    return _model(fields, without_rope(layers, lambda attention: attention.window is None))


def _model(fields: Fields, layers: tuple[LayerOptions, ...]) -> ModelOptions:
    return ModelOptions(
        layers=layers, norms=NORMS, parallel_residual=True, logits_divisor=1 / fields.positive("logit_scale", 0.0625)
    )
