"""Granite with experts: 3 and 4 (https://huggingface.co/collections/ibm-granite/granite-40-language-models). Most
layers of Granite 4 H are Mamba-2; its smallest models, and Granite 4 without H, have no experts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire_engine.models.checkpoints.fields import MAX_EXPERTS, MAX_SIZE, Fields
from quire_engine.models.families.llama import granite
from quire_engine.models.families.mamba import (
    MAMBA_DEFAULTS,
    MAMBA_FUSED,
    MAMBA_NAMES,
    RECURRENT,
    read_layer_kinds,
    read_mamba,
)
from quire_engine.models.families.reading import read_mlp
from quire_engine.models.options import AttentionOptions, ExpertsOptions, LayerOptions, MLPOptions, ModelOptions

DEFAULTS: Mapping[str, Mapping[str, Any]] = {"granitemoehybrid": {**MAMBA_DEFAULTS, "intermediate_size": 11008}}
NAMES = (
    (".mamba.", ".mixer."),
    *MAMBA_NAMES,
    (".block_sparse_moe.input_linear.weight", ".mlp.experts.gate_up_proj"),
    (".block_sparse_moe.output_linear.weight", ".mlp.experts.down_proj"),
    (".block_sparse_moe.router.layer.", ".mlp.gate."),
    (".block_sparse_moe.experts.", ".mlp.experts."),  # of adapters
)
FUSED = (*MAMBA_FUSED, ("gate_up_proj", ("gate_proj", "up_proj")))


def granitemoe(fields: Fields) -> ModelOptions:
    """Granite 3's models with experts: Granite with many small experts."""
    return _with_experts(fields, 0)


def granitemoeshared(fields: Fields) -> ModelOptions:
    """The same with an expert that all tokens share."""
    return _with_experts(fields, fields.integer("shared_intermediate_size", 0, MAX_SIZE, 0))


def granitemoehybrid(fields: Fields) -> ModelOptions:
    """Granite 4. Without experts, the shared one is the feed-forward."""
    options = _with_experts(fields, fields.integer("shared_intermediate_size", 1, MAX_SIZE, 1024))
    is_rotated = fields.choice("position_embedding_type", ("rope", "nope"), "nope") == "rope"
    fields.choice("hidden_act", ("silu",), "silu")
    are_recurrent, layers = read_layer_kinds(fields, RECURRENT[0]), []
    mamba = read_mamba(fields) if any(are_recurrent) else None
    for layer, is_recurrent in zip(options.layers, are_recurrent, strict=True):
        assert isinstance(layer.attention, AttentionOptions)
        attention = layer.attention if is_rotated else replace(layer.attention, rope=None)
        layers.append(LayerOptions(None, layer.mlp, mamba) if is_recurrent else LayerOptions(attention, layer.mlp))
    return replace(options, layers=tuple(layers))


def _with_experts(fields: Fields, shared_size: int) -> ModelOptions:
    options, expert = granite(fields), read_mlp(fields)
    number = fields.integer("num_local_experts", 0, MAX_EXPERTS, 8)
    shared = replace(expert, intermediate_size=shared_size) if shared_size else None
    mlp: MLPOptions | ExpertsOptions
    if number:
        mlp = ExpertsOptions(
            num_experts=number,
            top_k=fields.integer("num_experts_per_tok", 1, number, min(2, number)),
            expert=expert,
            norm_topk_prob=True,
            shared=shared,
            shared_has_gate=False,
            stack="halves",
        )
    elif shared is None:
        raise fields.error("num_local_experts", "above 0")
    else:
        mlp = shared
    place = ".mlp.shared_expert." if number else ".mlp."
    names = (
        (".shared_mlp.input_linear.", f"{place}gate_up_proj."),
        (".shared_mlp.output_linear.", f"{place}down_proj."),
    )
    return replace(
        options,
        layers=tuple(LayerOptions(layer.attention, mlp) for layer in options.layers),
        renamed=(*NAMES, *names),
        fused=FUSED,
    )
