"""Liquid's hybrids (https://arxiv.org/abs/2511.23404, section 2): most layers are gated short convolutions."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire_engine.models.checkpoints.fields import MAX_LAYERS, MAX_SIZE, Fields
from quire_engine.models.families.reading import (
    FULL,
    SLIDING,
    read_attention,
    read_experts,
    read_layer_types,
    read_num_layers,
    read_rope,
    read_window,
    read_window_rope,
)
from quire_engine.models.options import (
    AttentionOptions,
    ExpertsOptions,
    GroupedRouting,
    LayerOptions,
    MLPOptions,
    ModelOptions,
    NormOptions,
    ShortConvOptions,
)

CONV = "conv"
"""In `layer_types`."""
COMMON = {
    "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 128000, "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}  # fmt: skip
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "lfm2": COMMON,
    "lfm2_moe": COMMON,
    "lfm3": {
        **COMMON, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 7680,
        "conv_L_cache": 7, "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
}  # fmt: skip
NAMES_OF_FIELDS = {"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings", "theta": "rope_theta"}
ALIASES: Mapping[str, Mapping[str, str]] = dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), NAMES_OF_FIELDS)
"""Family → names of fields, and what other families call the same."""
NORMS = NormOptions(before_attention="operator_norm", before_mlp="ffn_norm")
SANDWICH_NORMS = replace(NORMS, after_attention="post_operator_norm", after_mlp="post_ffn_norm")
NAMES = (
    ("embedding_norm.", "norm."), (".self_attn.out_proj.", ".self_attn.o_proj."), (".q_layernorm.", ".q_norm."),
    (".k_layernorm.", ".k_norm."), (".self_attn.g_proj.", ".self_attn.gate_proj."),
    (".conv.conv.", ".mixer.conv."), (".conv.in_proj.", ".mixer.in_proj."),
    (".conv.out_proj.", ".mixer.out_proj."), (".feed_forward.expert_bias", ".mlp.choice_bias.weight"),
    (".feed_forward.", ".mlp."), (".w1.", ".gate_proj."), (".w2.", ".down_proj."), (".w3.", ".up_proj."),
)  # fmt: skip
FUSED = (("in_proj", ("b_proj", "c_proj", "x_proj")),)


def lfm2(fields: Fields) -> ModelOptions:
    """LFM2, dense."""
    return _make(fields, [MLPOptions(intermediate_size=_read_intermediate_size(fields))] * read_num_layers(fields))


def lfm2_moe(fields: Fields) -> ModelOptions:
    """LFM2 with experts in all layers but the first; sigmoids score them, and a bias balances them."""
    experts = read_experts(
        fields, 32, 4, expert=MLPOptions(intermediate_size=fields.integer("moe_intermediate_size", 1, MAX_SIZE, 1792)),
        norm_topk_prob=fields.boolean("norm_topk_prob", True),
        stack="halves",
        grouped=GroupedRouting(
            num_groups=1, top_groups=1, scoring="sigmoid", has_bias=fields.boolean("use_expert_bias", True),
            scale=fields.positive("routed_scaling_factor", 1.0),
        ),
    )  # fmt: skip
    num_layers, dense = read_num_layers(fields), MLPOptions(intermediate_size=_read_size(fields, 7168))
    num_dense = min(fields.integer("num_dense_layers", 0, MAX_LAYERS, 2), num_layers)
    return _make(fields, [*[dense] * num_dense, *[experts] * (num_layers - num_dense)])


def lfm3(fields: Fields) -> ModelOptions:
    """LFM3 (https://huggingface.co/docs/transformers/model_doc/lfm3): heads with gates, windows in every second layer
    with attention, and norms of outputs."""
    kinds = read_layer_types(
        fields, (CONV, FULL, SLIDING), lambda i: FULL if i % 4 == 2 else SLIDING if i % 4 == 0 and i else CONV
    )
    window = read_window(fields, 256)
    if window is None and SLIDING in kinds:
        raise fields.error("sliding_window", f"above 0, as layer_types names {SLIDING}")
    attention = read_attention(fields, head_norms=True, head_gates=fields.boolean("use_attention_gate", True))
    mlp = MLPOptions(intermediate_size=fields.integer("intermediate_size", 1, MAX_SIZE))
    layers = {
        CONV: LayerOptions(None, mlp, _read_conv(fields)),
        FULL: LayerOptions(attention, mlp),
        SLIDING: LayerOptions(
            replace(attention, window=window, rope=read_window_rope(fields, "rope_local_base_freq", 10000.0)), mlp
        ),
    }
    return ModelOptions(
        layers=tuple(layers[kind] for kind in kinds),
        norms=SANDWICH_NORMS if fields.boolean("use_sandwich_norm", True) else NORMS,
        renamed=NAMES,
        fused=FUSED,
    )


def _read_conv(fields: Fields) -> ShortConvOptions:
    return ShortConvOptions(
        size=fields.integer("hidden_size", 1, MAX_SIZE),
        conv_size=fields.integer("conv_L_cache", 1, MAX_SIZE, 3),
        bias=fields.boolean("conv_bias", False),
    )


def _make(fields: Fields, mlps: Sequence[MLPOptions | ExpertsOptions]) -> ModelOptions:
    attention, conv = AttentionOptions(rope=read_rope(fields), head_norms=True), _read_conv(fields)
    return ModelOptions(
        layers=tuple(
            LayerOptions(None, mlp, conv) if kind == CONV else LayerOptions(attention, mlp)
            for kind, mlp in zip(_read_types(fields), mlps, strict=True)
        ),
        norms=NORMS,
        renamed=NAMES,
        fused=FUSED,
    )


def _read_types(fields: Fields) -> list[str]:
    numbers = fields.values.get("full_attn_idxs")
    if numbers is not None and (not isinstance(numbers, list) or not all(type(one) is int for one in numbers)):
        raise fields.error("full_attn_idxs", "a list of layers' numbers")
    return read_layer_types(fields, (CONV, FULL), lambda i: FULL if numbers is None or i in numbers else CONV)


def _read_size(fields: Fields, default: int) -> int:
    """The size of a dense feed-forward, by its first name or by the present one."""
    return fields.integer("block_ff_dim", 1, MAX_SIZE, fields.integer("intermediate_size", 1, MAX_SIZE, default))


def _read_intermediate_size(fields: Fields) -> int:
    """What is left of the size with a gate, as in Llama: two thirds, rounded up."""
    size = _read_size(fields, 12288)
    if not fields.boolean("block_auto_adjust_ff_dim", True):
        return size
    multiple = fields.integer("block_multiple_of", 1, MAX_SIZE, 256)
    size = int(2 * size / 3)
    factor = fields.positive_or_null("block_ffn_dim_multiplier", 1.0)
    return size if factor is None else -(-int(factor * size) // multiple) * multiple
