"""DeepSeek-V2 (https://arxiv.org/abs/2405.04434) and V3: latent attention (section 2.1), and in most layers many small
experts beside shared ones (section 2.2). MiniCPM3 has the one, and dots.llm1 the other."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire_engine.models.checkpoints.fields import MAX_EXPERTS, MAX_LAYERS, MAX_POSITIONS, MAX_SIZE, Fields
from quire_engine.models.families.reading import (
    make_layers,
    read_attention,
    read_layer_types,
    read_mlp,
    read_num_layers,
    read_rope,
    read_window,
    read_windows,
)
from quire_engine.models.options import (
    ExpertsOptions,
    GroupedRouting,
    LatentAttentionOptions,
    LayerOptions,
    MLPOptions,
    ModelOptions,
    MTPOptions,
)

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {"head_dim": 64},
    "deepseek_v3": {"head_dim": 64},
    "deepseek_v32": {"head_dim": 64, "max_position_embeddings": 163840},
    "minicpm3": {
        "rms_norm_eps": 1e-5, "max_position_embeddings": 32768, "tie_word_embeddings": True, "head_dim": 32,
        "kv_lora_rank": 256, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64,
    },
}  # fmt: skip
NAMES = ((".mlp.shared_experts.", ".mlp.shared_expert."), (".gate.e_score_correction_bias", ".choice_bias.weight"))
MAX_HEAD_SIZE = 1 << 16
METHODS = ("greedy", "group_limited_greedy")


def deepseek_v2(fields: Fields) -> ModelOptions:
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
    mlp = read_mlp(fields, bias=None)
    mlps = read_mlps(fields, mlp, grouped, num_experts=64, num_shared=2, intermediate_size=1407, first_dense=0)
    return ModelOptions(layers=tuple(LayerOptions(latent, one) for one in mlps), renamed=NAMES)


def deepseek_v3(fields: Fields) -> ModelOptions:
    """DeepSeek-V3 and R1 (https://arxiv.org/abs/2412.19437, section 2.1): sigmoids score the experts, and a bias
    balances them; and an extra layer predicts the token after the next (section 2.2)."""
    latent = read_latent(fields, interleaved=fields.boolean("rope_interleave", True))
    fields.choice("scoring_func", ("sigmoid",), "sigmoid")
    fields.choice("topk_method", ("noaux_tc",), "noaux_tc")
    grouped = read_balanced(fields, num_groups=8, top_groups=4, scale=2.5)
    mlps = read_mlps(
        fields, read_mlp(fields), grouped, num_experts=256, num_shared=1, intermediate_size=2048, first_dense=3,
        top_k=8, norm_topk_prob=fields.boolean("norm_topk_prob", True),
    )  # fmt: skip
    layers = tuple(LayerOptions(latent, one) for one in mlps)
    return ModelOptions(layers=layers, **with_extra_layers(fields, layers))


def deepseek_v32(fields: Fields) -> ModelOptions:
    """DeepSeek-V3.2 (https://arxiv.org/abs/2512.02556, section 2.1): V3 in whose layers each token sees the
    `index_topk` keys that an indexer scores best. These are all keys of a sequence that is no longer: up to that length
    the model is V3, and the indexer is not read."""
    options = deepseek_v3(fields.with_values({**fields.values, "rope_interleave": True}))
    return replace(options, skipped=(".indexer.",), max_model_len=fields.integer("index_topk", 1, MAX_POSITIONS, 2048))


def dots1(fields: Fields) -> ModelOptions:
    """dots.llm1 (https://arxiv.org/abs/2506.05767, section 2.1): the attention of Qwen3, and the experts of
    DeepSeek-V3."""
    for name in ("n_routed_experts", "n_shared_experts"):
        fields.integer(name, 0, MAX_EXPERTS)
    late = fields.integer("max_window_layers", 0, MAX_LAYERS, 62)
    windows = read_windows(fields, read_window(fields, 4096), lambda i: i >= late)
    mlps = read_mlps(
        fields, read_mlp(fields), read_balanced(fields), num_experts=1, num_shared=1, intermediate_size=1408,
        first_dense=0, norm_topk_prob=fields.boolean("norm_topk_prob", False),
    )  # fmt: skip
    attention = read_attention(fields, head_norms=True)
    return ModelOptions(layers=make_layers(fields, attention, mlps, windows), renamed=NAMES)


def minicpm3(fields: Fields) -> ModelOptions:
    """MiniCPM3 (https://huggingface.co/openbmb/MiniCPM3-4B): latent attention, and multipliers that keep the scale of
    activations the same at any width and depth (https://arxiv.org/abs/2404.06395, section 3.1)."""
    hidden_size, num_layers = fields.integer("hidden_size", 1, MAX_SIZE), read_num_layers(fields)
    num_heads = fields.integer("num_attention_heads", 1, hidden_size)
    value_size = fields.integer("v_head_dim", 1, MAX_HEAD_SIZE, hidden_size // num_heads)
    latent = read_latent(
        fields.with_values({**fields.values, "v_head_dim": value_size}), interleaved=False, query_rank=768
    )
    scale_depth = fields.positive_or_null("scale_depth", 1.4)
    base = fields.positive_or_null("dim_model_base", 256)
    return ModelOptions(
        layers=(LayerOptions(latent, read_mlp(fields, bias=None)),) * num_layers,
        embedding_scale=fields.positive("scale_emb", 12.0),
        residual_multiplier=1.0 if scale_depth is None else scale_depth / math.sqrt(num_layers),
        logits_divisor=1.0 if base is None else hidden_size / base,
    )


def with_extra_layers(fields: Fields, layers: Sequence[LayerOptions]) -> dict[str, Any]:
    """Options of the names of tensors, and of the layers for multi-token prediction, which are behind the others in the
    checkpoint. The first of them drafts."""
    default = fields.integer("num_mtp_layers", 0, MAX_LAYERS, 1)
    number = fields.integer("num_nextn_predict_layers", 0, MAX_LAYERS, default)
    if not number:
        return {"renamed": NAMES}
    renamed = (*NAMES, *mtp_names(len(layers)))
    return {"renamed": renamed, "num_extra_layers": number, "mtp": MTPOptions(layer=layers[-1])}


def mtp_names(number: int) -> tuple[tuple[str, str], ...]:
    """`renamed` of a layer of multi-token prediction with DeepSeek-V3's names, by its number in the checkpoint."""
    ours = {
        "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden", "eh_proj": "mtp.fc",
        "shared_head.norm": "mtp.norm",
    }  # fmt: skip
    names = tuple((f"layers.{number}.{theirs}.", f"{name}.") for theirs, name in ours.items())
    return (*names, (f"layers.{number}.", "mtp.layers.0."))


def read_balanced(fields: Fields, *, num_groups: int = 1, top_groups: int = 1, scale: float = 1.0) -> GroupedRouting:
    """DeepSeek-V3's choice of experts; the numbers are defaults of fields."""
    return GroupedRouting(
        num_groups=fields.integer("n_group", 1, MAX_EXPERTS, num_groups),
        top_groups=fields.integer("topk_group", 1, MAX_EXPERTS, top_groups),
        scoring="sigmoid",
        has_bias=True,
        scale=fields.positive("routed_scaling_factor", scale),
    )


def read_latent(fields: Fields, *, interleaved: bool, query_rank: int = 1536) -> LatentAttentionOptions:
    """The attention. A `q_lora_rank` that is null says that queries are not compressed; if it is missing, it is
    `query_rank`."""
    is_compressed = fields.values.get("q_lora_rank", query_rank) is not None
    rope_size = fields.integer("qk_rope_head_dim", 2, MAX_HEAD_SIZE, 64)
    if rope_size % 2:
        raise fields.error("qk_rope_head_dim", "even")
    nope_size, rope = fields.integer("qk_nope_head_dim", 1, MAX_HEAD_SIZE, 128), read_rope(fields, rope_size)
    if rope.rotary_size(rope_size) != rope_size:
        raise fields.error("partial_rotary_factor", f"1, as qk_rope_head_dim={rope_size} says what is rotated")
    return LatentAttentionOptions(
        rope=rope,
        scale=_read_scale(fields, nope_size + rope_size),
        bias=fields.boolean("attention_bias", False),
        query_rank=fields.integer("q_lora_rank", 1, MAX_SIZE, query_rank) if is_compressed else None,
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
    """The feed-forward of each layer, of which the first have no experts, or those that `mlp_layer_types` names; the
    numbers are defaults of fields. Shared experts are one expert of as many times the size. Without `top_k` the field
    has no default."""
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
    num_dense = fields.integer("first_k_dense_replace", 0, MAX_LAYERS, first_dense)
    types = read_layer_types(
        fields, ("dense", "sparse"), lambda i: "dense" if i < num_dense else "sparse", "mlp_layer_types"
    )
    return [mlp if one == "dense" else experts for one in types]
