"""Nemotron, and other decoders whose feed-forward has no gate, and `relu(x)²` (So et al. 2021,
https://arxiv.org/abs/2109.08668, section 4) for an activation."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire_engine.models.checkpoints.fields import MAX_SIZE, Fields
from quire_engine.models.families.reading import make_layers, read_attention, read_mlp
from quire_engine.models.options import PRE_NORMS, MLPOptions, ModelOptions, NormOptions

ALIASES: Mapping[str, Mapping[str, str]] = {"nemotron": {"norm_eps": "rms_norm_eps"}}
APERTUS_ROPE = {
    "rope_type": "llama3", "rope_theta": 12000000.0, "factor": 8.0, "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "apertus": {"rms_norm_eps": 1e-5, "rope_theta": 12000000.0, "max_position_embeddings": 65536},
    "arcee": {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    "nemotron": {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "partial_rotary_factor": 0.5},
}


def apertus(fields: Fields) -> ModelOptions:
    """Apertus (https://arxiv.org/abs/2509.14233, section 2.1): normed heads, and xIELU with two learned numbers in each
    layer for an activation."""
    fields.choice("hidden_act", ("xielu",), "xielu")
    if not any(fields.inner(name).values for name in ("rope_scaling", "rope_parameters")):
        fields = fields.with_values({**fields.values, "rope_parameters": APERTUS_ROPE})
    size = fields.integer("intermediate_size", 1, MAX_SIZE)
    return ModelOptions(
        layers=make_layers(
            fields,
            read_attention(fields, head_norms=True),
            MLPOptions(intermediate_size=size, activation="xielu", is_gated=False),
        ),
        norms=NormOptions(before_attention="attention_layernorm", before_mlp="feedforward_layernorm"),
        renamed=tuple((f".act_fn.{name}", f".{name}.weight") for name in ("alpha_p", "alpha_n")),
        skipped=(".act_fn.beta", ".act_fn.eps"),  # which no checkpoint changes
    )


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
