"""Nemotron-H and Nemotron 3 (https://arxiv.org/abs/2504.03624, section 2; https://arxiv.org/abs/2512.20848): each layer
is Mamba-2, attention without positions, a feed-forward with relu², or experts of these."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire_engine.models.checkpoints.fields import MAX_EXPERTS, MAX_LAYERS, MAX_SIZE, Fields
from quire_engine.models.families.mamba import ALONE_NAMES, ATTENTION, MAMBA_FUSED, RECURRENT, read_mamba
from quire_engine.models.families.reading import read_mlp
from quire_engine.models.options import (
    AttentionOptions,
    ExpertsOptions,
    GroupedRouting,
    LayerOptions,
    ModelOptions,
    NormOptions,
)

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "nemotron_h": {
        "rms_norm_eps": 1e-5, "intermediate_size": 21504, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 4096, "mamba_num_heads": 128, "mamba_head_dim": 64,
        "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4,
    }
}  # fmt: skip
ALIASES: Mapping[str, Mapping[str, str]] = {"nemotron_h": {"layer_norm_epsilon": "rms_norm_eps"}}
NAMES = (
    *ALONE_NAMES,
    *((f".mixer.{name}.", f".self_attn.{name}.") for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *((f".mixer.{name}.", f".mlp.{name}.") for name in ("up_proj", "down_proj", "experts")),
    *((f".mixer.{name}.", f".mlp.{name}.") for name in ("fc1_latent_proj", "fc2_latent_proj")),
    (".mixer.gate.e_score_correction_bias", ".mlp.choice_bias.weight"),
    (".mixer.gate.", ".mlp.gate."),
    (".mixer.shared_experts.", ".mlp.shared_expert."),
)
NORMS = NormOptions(before_attention="input_layernorm", before_mlp="input_layernorm", is_float32=True)
KINDS = {"M": RECURRENT[0], "*": ATTENTION[0], "-": "mlp", "E": "moe"}
"""Kinds of layers, by their letter in `hybrid_override_pattern`."""


def nemotron_h(fields: Fields) -> ModelOptions:
    fields.choice("mamba_hidden_act", ("silu",), "silu")
    kinds = _read_kinds(fields)
    mamba = read_mamba(
        fields, num_heads="mamba_num_heads", head_size="mamba_head_dim", num_groups="n_groups",
        state_size="ssm_state_size", conv_size="conv_kernel", bias="use_bias", conv_bias="use_conv_bias",
    )  # fmt: skip
    layers = {
        RECURRENT[0]: LayerOptions(None, None, mamba),
        ATTENTION[0]: LayerOptions(AttentionOptions(rope=None), None),
        "mlp": LayerOptions(None, read_mlp(fields, "mlp_hidden_act", "relu2", bias=None, is_gated=False)),
    }
    if "moe" in kinds:
        layers["moe"] = LayerOptions(None, _read_experts(fields))
    return ModelOptions(
        layers=tuple(layers[kind] for kind in kinds), norms=NORMS, renamed=NAMES, fused=MAMBA_FUSED, skipped=("mtp.",)
    )


def _read_kinds(fields: Fields) -> list[str]:
    """The kind of each layer, of the list in `layers_block_type` or else the letters of `hybrid_override_pattern`."""
    name = "hybrid_override_pattern" if fields.values.get("layers_block_type") is None else "layers_block_type"
    given = fields.values.get(name, "ME*-")
    older = {"mamba": RECURRENT[0], "attention": ATTENTION[0]}
    kinds = [KINDS.get(one, older.get(one, one)) for one in given] if isinstance(given, str | list) else []
    if not 0 < len(kinds) <= MAX_LAYERS or not all(kind in KINDS.values() for kind in kinds):
        raise fields.error(
            name, f"one of {', '.join(KINDS if isinstance(given, str) else KINDS.values())} for each layer"
        )
    return kinds


def _read_experts(fields: Fields) -> ExpertsOptions:
    name = "n_routed_experts" if fields.values.get("num_local_experts") is None else "num_local_experts"
    number = fields.integer(name, 1, MAX_EXPERTS, 8)
    num_groups = fields.integer("n_group", 1, number, 1)
    if number % num_groups:
        raise fields.error("n_group", f"a divisor of {name}={number}")
    top_groups = fields.integer("topk_group", 1, num_groups, 1)
    fields.integer("n_shared_experts", 1, 1, 1)
    shared = read_mlp(fields, "mlp_hidden_act", "relu2", bias=None, is_gated=False)
    has_latent = fields.values.get("moe_latent_size") is not None
    if has_latent and shared.bias:
        raise fields.error("mlp_bias", "false, as moe_latent_size is given")
    return ExpertsOptions(
        num_experts=number,
        top_k=fields.integer("num_experts_per_tok", 1, number // num_groups * top_groups, 2),
        expert=replace(
            shared, intermediate_size=fields.integer("moe_intermediate_size", 1, MAX_SIZE, 7688), bias=False
        ),
        norm_topk_prob=fields.boolean("norm_topk_prob", True),
        shared=replace(
            shared, intermediate_size=fields.integer("moe_shared_expert_intermediate_size", 1, MAX_SIZE, 7688)
        ),
        shared_has_gate=False,
        latent_size=fields.integer("moe_latent_size", 1, MAX_SIZE) if has_latent else None,
        grouped=GroupedRouting(
            num_groups=num_groups,
            top_groups=top_groups,
            scoring="sigmoid",
            has_bias=True,
            scale=fields.positive("routed_scaling_factor", 1.0),
        ),
    )
