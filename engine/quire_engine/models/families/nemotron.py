"""Nemotron, and other decoders whose feed-forward has no gate, and `relu(x)²` (So et al. 2021,
https://arxiv.org/abs/2109.08668, section 4) for an activation."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire_engine.models.checkpoints.fields import Fields
from quire_engine.models.families.reading import make_layers, read_attention, read_mlp
from quire_engine.models.options import PRE_NORMS, ModelOptions

ALIASES: Mapping[str, Mapping[str, str]] = {"nemotron": {"norm_eps": "rms_norm_eps"}}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "arcee": {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    "nemotron": {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "partial_rotary_factor": 0.5},
}


def arcee(fields: Fields) -> ModelOptions:
    """AFM (https://www.arcee.ai/blog/deep-dive-afm-4-5b-the-first-arcee-foundational-model): else as Llama."""
    mlp = read_mlp(fields, default="relu2", bias=None, is_gated=False)
    return ModelOptions(layers=make_layers(fields, read_attention(fields), mlp))


def nemotron(fields: Fields) -> ModelOptions:
    """Nemotron-4 (https://arxiv.org/abs/2402.16819, section 2) and Minitron: LayerNorms, to whose weights 1 is added,
    and partial rotary."""
    mlp = read_mlp(fields, default="relu2", bias=None, is_gated=False)
    norms = replace(PRE_NORMS, is_layer_norm=True, bias=True, offset=1.0)
    return ModelOptions(layers=make_layers(fields, read_attention(fields), mlp), norms=norms)
