"""Cohere's Command models: LayerNorms without a bias, and attention and feed-forward side by side on one norm."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire_engine.models.checkpoints.fields import MAX_EXPERTS, MAX_LAYERS, MAX_SIZE, Fields
from quire_engine.models.families.reading import (
    make_layers,
    read_attention,
    read_experts,
    read_layer_types,
    read_mlp,
    read_num_layers,
    read_window,
    read_windows,
    without_rope,
)
from quire_engine.models.options import (
    ExpertsOptions,
    GroupedRouting,
    LayerOptions,
    MLPOptions,
    ModelOptions,
    NormOptions,
)

ALIASES: Mapping[str, Mapping[str, str]] = {
    "cohere": {"layer_norm_eps": "rms_norm_eps"},
    "cohere2": {"layer_norm_eps": "rms_norm_eps"},
}
COHERE = {"rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "tie_word_embeddings": True}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "cohere": {**COHERE, "rope_theta": 500000.0},
    "cohere2": COHERE,
    "cohere2_moe": {"head_dim": 128, "max_position_embeddings": 8192, "tie_word_embeddings": True},
}
DENSE, SPARSE = "dense", "sparse"
"""In `mlp_layer_types`."""
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


def cohere2_moe(fields: Fields) -> ModelOptions:
    """Cohere 2 with experts (https://huggingface.co/docs/transformers/model_doc/cohere2_moe), but in the first layers,
    whose windows have a period of their own. The result is the sum or the mean of that of the routed experts and that
    of the shared ones, of which we make one."""
    num_dense = fields.integer("first_k_dense_replace", 0, read_num_layers(fields), 0)
    types = read_layer_types(fields, (DENSE, SPARSE), lambda i: DENSE if i < num_dense else SPARSE, "mlp_layer_types")
    period = fields.integer("sliding_window_pattern", 1, MAX_LAYERS, 4)
    first_period = fields.integer("prefix_dense_sliding_window_pattern", 1, MAX_LAYERS, 1)
    windows = read_windows(
        fields, read_window(fields, 4096),
        lambda i: (i + 1) % first_period != 0 if i < num_dense else (i - num_dense + 1) % period != 0,
    )  # fmt: skip
    experts, dense = _read_experts(fields), read_mlp(fields)
    size = fields.values.get("prefix_dense_intermediate_size")
    if size is not None:
        size = fields.integer("prefix_dense_intermediate_size", 1, MAX_SIZE)
        dense = replace(dense, intermediate_size=size)
    layers = make_layers(
        fields, read_attention(fields, interleaved=True), [dense if one == DENSE else experts for one in types], windows
    )
    without = without_rope(layers, lambda attention: attention.window is None)
    if first_period == 1:  # dense layers are rotated, and see everything
        without = tuple(
            whole if kind == DENSE else one for one, whole, kind in zip(without, layers, types, strict=True)
        )
    is_layer_norm = fields.values.get("rms_norm_eps") is None
    is_mean = experts.grouped is not None and experts.grouped.scale != 1
    return replace(
        _model(fields, without),
        norms=replace(
            NORMS, is_layer_norm=is_layer_norm, eps=fields.positive("layer_norm_eps", 1e-5) if is_layer_norm else None
        ),
        renamed=((".shared_experts.", ".shared_expert."),),
        scaled=((".shared_expert.down_proj", 0.5),) if is_mean else (),
    )


def _read_experts(fields: Fields) -> ExpertsOptions:
    expert, num_shared = read_mlp(fields), fields.integer("num_shared_experts", 0, MAX_EXPERTS, 0)
    scoring = fields.choice("expert_selection_fn", ("softmax", "sigmoid"), "softmax")
    strategy = fields.choice("shared_expert_combination_strategy", ("average", "sum"), "average")
    scale = 0.5 if num_shared and strategy == "average" else 1.0
    is_plain = scoring == "softmax" and scale == 1
    return read_experts(
        fields, 8, 2, expert=expert,
        norm_topk_prob=scoring == "softmax" or fields.boolean("norm_topk_prob", True),
        shared=MLPOptions(
            intermediate_size=num_shared * expert.intermediate_size, activation=expert.activation, bias=expert.bias
        ) if num_shared else None,
        shared_has_gate=False,
        grouped=None if is_plain else GroupedRouting(
            num_groups=1, top_groups=1, scoring=scoring, has_bias=False, scale=scale
        ),
    )  # fmt: skip


def _model(fields: Fields, layers: tuple[LayerOptions, ...]) -> ModelOptions:
    return ModelOptions(
        layers=layers, norms=NORMS, parallel_residual=True, logits_divisor=1 / fields.positive("logit_scale", 0.0625)
    )
