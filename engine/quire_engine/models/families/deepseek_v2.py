"""DeepSeek-V2 (https://arxiv.org/abs/2405.04434): latent attention (section 2.1), and in most layers many small experts
beside shared ones (section 2.2)."""

import math

from quire_engine.models.experts_options import MAX_EXPERTS, ExpertsOptions, GroupedRouting
from quire_engine.models.fields import MAX_LAYERS, MAX_SIZE, Fields
from quire_engine.models.options import DecoderOptions, LatentAttentionOptions

__all__ = ["NAMES", "read_attention_scale", "read_experts", "read_latent", "read_options"]

NAMES = ((".mlp.shared_experts.", ".mlp.shared_expert."), (".gate.e_score_correction_bias", ".choice_bias.weight"))
MAX_HEAD_SIZE = 1 << 16
METHODS = ("greedy", "group_limited_greedy")


def read_options(fields: Fields) -> DecoderOptions:
    """Read the options of the layers from `config.json`.

    Raises:
        CheckpointError: it describes a model that cannot be served.
    """
    latent, bias = read_latent(fields, interleaved=True), fields.boolean("attention_bias", False)
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
    return DecoderOptions(
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.boolean("mlp_bias", False),
        latent=latent,
        attention_scale=read_attention_scale(fields, latent),
        default_head_size=latent.rope_size,
        experts=read_experts(fields, grouped, num_experts=64, num_shared=2, intermediate_size=1407, first_dense=0),
        renamed=NAMES,
    )


def read_latent(fields: Fields, *, interleaved: bool) -> LatentAttentionOptions:
    """Read the sizes of the attention. A `q_lora_rank` that is null says that queries are not compressed.

    Args:
        fields: of `config.json`.
        interleaved: whether features that are rotated together lie side by side.

    Raises:
        CheckpointError: one of them is missing, or no size.
    """
    is_compressed = fields.values.get("q_lora_rank", 1536) is not None
    rope_size = fields.integer("qk_rope_head_dim", 2, MAX_HEAD_SIZE, 64)
    if rope_size % 2:
        raise fields.error("qk_rope_head_dim", "even")
    return LatentAttentionOptions(
        query_rank=fields.integer("q_lora_rank", 1, MAX_SIZE, 1536) if is_compressed else None,
        kv_rank=fields.integer("kv_lora_rank", 1, MAX_HEAD_SIZE, 512),
        rope_size=rope_size,
        nope_size=fields.integer("qk_nope_head_dim", 1, MAX_HEAD_SIZE, 128),
        value_size=fields.integer("v_head_dim", 1, MAX_HEAD_SIZE, 128),
        interleaved=interleaved,
    )


def read_attention_scale(fields: Fields, latent: LatentAttentionOptions) -> float:
    """What products of queries and keys are multiplied by: with YaRN more than the inverse root of the head's size
    (https://arxiv.org/abs/2309.00071, section 3.4), once for queries and once for keys.

    Raises:
        CheckpointError: a field of the rotary embedding has a wrong value.
    """
    scale = float((latent.nope_size + latent.rope_size) ** -0.5)
    rope = fields.inner("rope_parameters")
    rope = rope if rope.values else fields.inner("rope_scaling")
    kind = rope.values.get("rope_type") or rope.values.get("type") or "default"
    factor = rope.positive("factor", 1.0)
    if kind == "default" or not rope.values.get("mscale_all_dim") or factor <= 1:
        return scale
    mscale = 0.1 * rope.positive("mscale_all_dim") * math.log(factor) + 1.0
    return scale * mscale * mscale


def read_experts(
    fields: Fields,
    grouped: GroupedRouting,
    *,
    num_experts: int,
    num_shared: int,
    intermediate_size: int,
    first_dense: int,
    top_k: int | None = None,
    norm_topk_prob: bool = False,
) -> ExpertsOptions:
    """Read the experts.

    Args:
        fields: of `config.json`.
        grouped: how they are chosen.
        num_experts: `n_routed_experts` where nothing is said, as all that follow but the last.
        num_shared: `n_shared_experts`; they are one expert of as many times the size.
        intermediate_size: `moe_intermediate_size`.
        first_dense: `first_k_dense_replace`, layers without experts.
        top_k: `num_experts_per_tok`; None: it has to be said.
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
    dense = fields.integer("first_k_dense_replace", 0, MAX_LAYERS, first_dense)
    return ExpertsOptions(
        num_experts=number,
        top_k=fields.integer(*names) if top_k is None else fields.integer(*names, min(top_k, most)),
        intermediate_size=size,
        norm_topk_prob=norm_topk_prob,
        shared_intermediate_size=shared * size or None,
        shared_has_gate=False,
        grouped=grouped,
        mlp_only_layers=tuple(range(dense)),
    )
