"""DeepSeek-V2 (https://arxiv.org/abs/2405.04434): latent attention (section 2.1), and in most layers many small experts
beside shared ones (section 2.2)."""

import math
from dataclasses import replace

from quire_engine.models.fields import MAX_EXPERTS, MAX_LAYERS, MAX_SIZE, Fields
from quire_engine.models.options import (
    ExpertsOptions,
    GroupedRouting,
    LatentAttentionOptions,
    LayerOptions,
    MLPOptions,
    ModelOptions,
    read_mlp,
)
from quire_engine.models.rope_config import read_rope

DEFAULTS = {"head_dim": 64}
NAMES = ((".mlp.shared_experts.", ".mlp.shared_expert."), (".gate.e_score_correction_bias", ".choice_bias.weight"))
MAX_HEAD_SIZE = 1 << 16
METHODS = ("greedy", "group_limited_greedy")


def read_options(fields: Fields) -> ModelOptions:
    """Read the model from `config.json`."""
    latent = read_latent(fields, interleaved=True)
    has_groups = fields.choice("topk_method", METHODS, "greedy") == "group_limited_greedy"
    if fields.boolean("norm_topk_prob", False):
        raise fields.error("norm_topk_prob", "false")
    grouped = GroupedRouting(
        num_groups=fields.integer("n_group", 1, MAX_EXPERTS) if has_groups else 1,
        top_groups=fields.integer("topk_group", 1, MAX_EXPERTS) if has_groups else 1,
        scoring="softmax",
        has_bias=False,
        scale=fields.positive("routed_scaling_factor", 1.0),
    )
    mlp = read_mlp(fields, bias=fields.boolean("mlp_bias", False))
    mlps = read_mlps(fields, mlp, grouped, num_experts=64, num_shared=2, intermediate_size=1407, first_dense=0)
    return ModelOptions(layers=tuple(LayerOptions(latent, one) for one in mlps), renamed=NAMES)


def read_latent(fields: Fields, *, interleaved: bool) -> LatentAttentionOptions:
    """Read the attention. A `q_lora_rank` that is null says that queries are not compressed.

    Args:
        fields: of `config.json`.
        interleaved: whether features that are rotated together lie side by side.

    Raises:
        CheckpointError: a size is missing, or none, or a field of the rotary embedding has a wrong value.
    """
    is_compressed = fields.values.get("q_lora_rank", 1536) is not None
    rope_size = fields.integer("qk_rope_head_dim", 2, MAX_HEAD_SIZE, 64)
    if rope_size % 2:
        raise fields.error("qk_rope_head_dim", "even")
    nope_size = fields.integer("qk_nope_head_dim", 1, MAX_HEAD_SIZE, 128)
    return LatentAttentionOptions(
        rope=read_rope(fields, rope_size),
        scale=_read_scale(fields, nope_size + rope_size),
        bias=fields.boolean("attention_bias", False),
        query_rank=fields.integer("q_lora_rank", 1, MAX_SIZE, 1536) if is_compressed else None,
        kv_rank=fields.integer("kv_lora_rank", 1, MAX_HEAD_SIZE, 512),
        rope_size=rope_size,
        nope_size=nope_size,
        value_size=fields.integer("v_head_dim", 1, MAX_HEAD_SIZE, 128),
        interleaved=interleaved,
    )


def _read_scale(fields: Fields, head_size: int) -> float:
    """With YaRN more than the inverse root of the head's size (https://arxiv.org/abs/2309.00071, section 3.4), once for
    queries and once for keys."""
    scale = float(head_size**-0.5)
    rope = fields.inner("rope_parameters")
    rope = rope if rope.values else fields.inner("rope_scaling")
    kind = rope.values.get("rope_type") or rope.values.get("type") or "default"
    factor = rope.positive("factor", 1.0)
    if kind == "default" or not rope.values.get("mscale_all_dim") or factor <= 1:
        return scale
    mscale = 0.1 * rope.positive("mscale_all_dim") * math.log(factor) + 1.0
    return scale * mscale * mscale


def read_mlps(
    fields: Fields,
    mlp: MLPOptions,
    grouped: GroupedRouting,
    *,
    num_experts: int,
    num_shared: int,
    intermediate_size: int,
    first_dense: int,
    top_k: int | None = None,
    norm_topk_prob: bool = False,
) -> list[MLPOptions | ExpertsOptions]:
    """Read the feed-forwards of the layers.

    Args:
        fields: of `config.json`.
        mlp: of layers without experts.
        grouped: how experts are chosen.
        num_experts: the default of `n_routed_experts`.
        num_shared: of `n_shared_experts`; they are one expert of as many times the size.
        intermediate_size: of `moe_intermediate_size`.
        first_dense: of `first_k_dense_replace`, layers without experts.
        top_k: of `num_experts_per_tok`; None: it has no default.
        norm_topk_prob: see `ExpertsOptions`.

    Raises:
        CheckpointError: a field has a wrong value.
    """
    fields.integer("moe_layer_freq", 1, 1, 1)
    number = fields.integer("n_routed_experts", 1, MAX_EXPERTS, num_experts)
    if number % grouped.num_groups:
        raise fields.error("n_group", f"a divisor of n_routed_experts={number}")
    if grouped.top_groups > grouped.num_groups:
        raise fields.error("topk_group", f"at most n_group={grouped.num_groups}")
    most = number // grouped.num_groups * grouped.top_groups
    names = ("num_experts_per_tok", 1, most)
    size = fields.integer("moe_intermediate_size", 1, MAX_SIZE, intermediate_size)
    shared = fields.integer("n_shared_experts", 0, MAX_EXPERTS, num_shared)
    expert = MLPOptions(intermediate_size=size, activation=mlp.activation)
    experts = ExpertsOptions(
        num_experts=number,
        top_k=fields.integer(*names) if top_k is None else fields.integer(*names, min(top_k, most)),
        expert=expert,
        norm_topk_prob=norm_topk_prob,
        shared=replace(expert, intermediate_size=shared * size) if shared else None,
        shared_has_gate=False,
        grouped=grouped,
    )
    num_layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    num_dense = min(fields.integer("first_k_dense_replace", 0, MAX_LAYERS, first_dense), num_layers)
    return [*[mlp] * num_dense, *[experts] * (num_layers - num_dense)]
