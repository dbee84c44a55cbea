"""DeepSeek-V2 (https://arxiv.org/abs/2405.04434) and V3: latent attention (section 2.1), and in most layers many small
experts beside shared ones (section 2.2)."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire_engine.models.checkpoints.fields import MAX_EXPERTS, MAX_LAYERS, MAX_SIZE, Fields
from quire_engine.models.families.reading import read_mlp, read_num_layers, read_rope
from quire_engine.models.options import (
    ExpertsOptions,
    GroupedRouting,
    LatentAttentionOptions,
    LayerOptions,
    MLPOptions,
    ModelOptions,
    MTPOptions,
)

DEFAULTS: Mapping[str, Mapping[str, Any]] = {"deepseek_v2": {"head_dim": 64}, "deepseek_v3": {"head_dim": 64}}
NAMES = ((".mlp.shared_experts.", ".mlp.shared_expert."), (".gate.e_score_correction_bias", ".choice_bias.weight"))
MAX_HEAD_SIZE = 1 << 16
METHODS = ("greedy", "group_limited_greedy")


def deepseek_v2(fields: Fields) -> ModelOptions:
    latent = _read_latent(fields, interleaved=True)
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
    mlp = read_mlp(fields, bias=None)
    mlps = _read_mlps(fields, mlp, grouped, num_experts=64, num_shared=2, intermediate_size=1407, first_dense=0)
    return ModelOptions(layers=tuple(LayerOptions(latent, one) for one in mlps), renamed=NAMES)


def deepseek_v3(fields: Fields) -> ModelOptions:
    """DeepSeek-V3 and R1 (https://arxiv.org/abs/2412.19437, section 2.1): sigmoids score the experts, and a bias
    balances them; and an extra layer predicts the token after the next (section 2.2)."""
    latent = _read_latent(fields, interleaved=fields.boolean("rope_interleave", True))
    grouped = GroupedRouting(
        num_groups=fields.integer("n_group", 1, MAX_EXPERTS, 8),
        top_groups=fields.integer("topk_group", 1, MAX_EXPERTS, 4),
        scoring=fields.choice("scoring_func", ("sigmoid",), "sigmoid"),
        has_bias=fields.choice("topk_method", ("noaux_tc",), "noaux_tc") == "noaux_tc",
        scale=fields.positive("routed_scaling_factor", 2.5),
    )
    mlps = _read_mlps(
        fields, read_mlp(fields), grouped, num_experts=256, num_shared=1, intermediate_size=2048, first_dense=3,
        top_k=8, norm_topk_prob=fields.boolean("norm_topk_prob", True),
    )  # fmt: skip
    num_extra_layers = fields.integer("num_nextn_predict_layers", 0, MAX_LAYERS, 1)
    layers = tuple(LayerOptions(latent, one) for one in mlps)
    return ModelOptions(
        layers=layers,
        renamed=(*NAMES, *mtp_names(len(layers))) if num_extra_layers else NAMES,
        num_extra_layers=num_extra_layers,
        mtp=MTPOptions(layer=layers[-1]) if num_extra_layers else None,
    )


def mtp_names(number: int) -> tuple[tuple[str, str], ...]:
    """`renamed` of a layer of multi-token prediction with DeepSeek-V3's names, by its number in the checkpoint."""
    ours = {
        "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden", "eh_proj": "mtp.fc",
        "shared_head.norm": "mtp.norm",
    }  # fmt: skip
    names = tuple((f"layers.{number}.{theirs}.", f"{name}.") for theirs, name in ours.items())
    return (*names, (f"layers.{number}.", "mtp.layers.0."))


def _read_latent(fields: Fields, *, interleaved: bool) -> LatentAttentionOptions:
    """The attention. A `q_lora_rank` that is null says that queries are not compressed."""
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


def _read_mlps(
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
    """The feed-forward of each layer, of which the first have no experts; the numbers are defaults of fields. Shared
    experts are one expert of as many times the size. Without `top_k` the field has no default."""
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
    num_layers = read_num_layers(fields)
    num_dense = min(fields.integer("first_k_dense_replace", 0, MAX_LAYERS, first_dense), num_layers)
    return [*[mlp] * num_dense, *[experts] * (num_layers - num_dense)]
