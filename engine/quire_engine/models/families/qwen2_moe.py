"""Qwen1.5-MoE and Qwen2-MoE (https://arxiv.org/abs/2407.10671, section 2.2.2): Qwen2 with many small experts, and one
that all tokens share."""

from dataclasses import replace

from quire_engine.models.fields import MAX_EXPERTS, MAX_LAYERS, MAX_SIZE, Fields
from quire_engine.models.options import (
    AttentionOptions,
    ExpertsOptions,
    MLPOptions,
    ModelOptions,
    make_layers,
    read_mlp,
)
from quire_engine.models.rope_config import read_rope
from quire_engine.models.windows import read_window, read_windows


def read_options(fields: Fields) -> ModelOptions:
    """Read the model from `config.json`."""
    attention = AttentionOptions(rope=read_rope(fields), qkv_bias=fields.boolean("qkv_bias", True))
    window = read_window(fields, 4096) if fields.boolean("use_sliding_window", False) else None
    end = fields.integer("max_window_layers", 0, MAX_LAYERS, 28)  # unlike in Qwen2, the layers before it have windows
    windows = read_windows(fields, window, lambda layer: layer % 2 == 0 and layer < end)
    mlps = read_mlps(fields, num_experts=60, top_k=4, intermediate_size=1408, shared_intermediate_size=5632)
    return ModelOptions(layers=make_layers(fields, attention, mlps, windows))


def read_mlps(
    fields: Fields, *, num_experts: int, top_k: int, intermediate_size: int, shared_intermediate_size: int | None = None
) -> list[MLPOptions | ExpertsOptions]:
    """The feed-forwards of the layers of one of Qwen's mixtures.

    Args:
        fields: of `config.json`.
        num_experts: the default of its field, as what follows.
        top_k: `num_experts_per_tok`.
        intermediate_size: `moe_intermediate_size`.
        shared_intermediate_size: `shared_expert_intermediate_size`; None: there is no shared expert.

    Raises:
        CheckpointError: a field has a wrong value.
    """
    # transformers 5 writes Qwen3's number under the name that Mixtral has for it.
    name = "num_local_experts" if fields.values.get("num_experts") is None else "num_experts"
    number = fields.integer(name, 1, MAX_EXPERTS, num_experts)
    dense = fields.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int and layer >= 0 for layer in dense):
        raise fields.error("mlp_only_layers", "a list of layers' numbers")
    mlp, shared = read_mlp(fields), None
    if shared_intermediate_size is not None:
        size = fields.integer("shared_expert_intermediate_size", 1, MAX_SIZE, shared_intermediate_size)
        shared = replace(mlp, intermediate_size=size)
    size = fields.integer("moe_intermediate_size", 1, MAX_SIZE, intermediate_size)
    experts = ExpertsOptions(
        num_experts=number,
        top_k=fields.integer("num_experts_per_tok", 1, number, min(top_k, number)),
        expert=replace(mlp, intermediate_size=size),
        norm_topk_prob=fields.boolean("norm_topk_prob", False),
        shared=shared,
    )
    step = fields.integer("decoder_sparse_step", 1, MAX_SIZE, 1)
    num_layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    return [mlp if layer in dense or (layer + 1) % step else experts for layer in range(num_layers)]
