"""Kimi Linear (https://arxiv.org/abs/2510.26692): gated delta rules with a decay of each channel in most layers, latent
attention without positions in the others, and the experts of DeepSeek-V3."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire_engine.models.checkpoints.fields import MAX_SIZE, Fields
from quire_engine.models.families.deepseek import NAMES as DEEPSEEK_NAMES
from quire_engine.models.families.deepseek import read_balanced, read_latent, read_mlps
from quire_engine.models.families.gated_delta import FUSED, LINEAR
from quire_engine.models.families.reading import FULL, read_layer_types, read_mlp, read_num_layers
from quire_engine.models.options import GatedDeltaOptions, LayerOptions, ModelOptions, RopeConfig

ALIASES: Mapping[str, Mapping[str, str]] = {
    "kimi_linear": {
        "model_max_length": "max_position_embeddings", "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group", "num_experts": "n_routed_experts", "num_local_experts": "n_routed_experts",
        "num_experts_per_token": "num_experts_per_tok", "num_shared_experts": "n_shared_experts",
    }
}  # fmt: skip
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "kimi_linear": {
        "rms_norm_eps": 1e-5, "max_position_embeddings": 1048576, "head_dim": 64, "linear_head_dim": 128,
        "linear_num_heads": 32, "linear_conv_kernel_dim": 4,
    }
}  # fmt: skip
MIXER_NAMES = (
    (".forget_gate.", "."),  # as transformers calls the module, and so adapters
    (".mixer.A_log", ".mixer.A_log.weight"), (".mixer.dt_bias", ".mixer.dt_bias.weight"),
    (".mixer.o_norm.", ".mixer.norm."), (".mixer.o_proj.", ".mixer.out_proj."),
)  # fmt: skip
NAMES = (
    (".block_sparse_moe.", ".mlp."), (".w1.", ".gate_proj."), (".w2.", ".down_proj."), (".w3.", ".up_proj."),
    *DEEPSEEK_NAMES, *MIXER_NAMES,
)  # fmt: skip


def kimi_linear(fields: Fields) -> ModelOptions:
    fields.choice("hidden_act", ("silu",), "silu")  # it is the convolution's too
    fields.choice("moe_router_activation_func", ("sigmoid",), "sigmoid")
    if not fields.boolean("mla_use_nope", True):
        raise fields.error("mla_use_nope", "true")
    fields.integer("num_nextn_predict_layers", 0, 0, 0)
    latent = replace(read_latent(fields, interleaved=False), rope=RopeConfig(rope_type="none"))
    mlps = read_mlps(
        fields, read_mlp(fields), read_balanced(fields, scale=2.446), num_experts=256, num_shared=1,
        intermediate_size=1024, first_dense=1, top_k=8, norm_topk_prob=fields.boolean("norm_topk_prob", True),
    )  # fmt: skip
    kinds, delta = _read_kinds(fields), _read_delta(fields)
    layers = tuple(
        LayerOptions(None, mlp, delta) if kind == LINEAR else LayerOptions(latent, mlp)
        for kind, mlp in zip(kinds, mlps, strict=True)
    )
    of_mixers = (f"layers.{number}." for number, kind in enumerate(kinds) if kind == LINEAR)
    renamed = (*((f"{name}self_attn.", f"{name}mixer.") for name in of_mixers), *NAMES)
    return ModelOptions(layers=layers, renamed=renamed, fused=FUSED)


def _read_kinds(fields: Fields) -> list[str]:
    """The kind of each layer; published files number those with attention from 1 on, in `linear_attn_config`."""
    given, num_layers = fields.inner("linear_attn_config"), read_num_layers(fields)
    numbers = given.values.get("full_attn_layers")
    if numbers is None:
        return read_layer_types(fields, (LINEAR, FULL), lambda i: FULL if i and i % 4 == 0 else LINEAR)
    if not isinstance(numbers, list) or not all(type(one) is int and 1 <= one <= num_layers for one in numbers):
        raise given.error("full_attn_layers", f"a list of layers' numbers, from 1 to {num_layers}")
    return read_layer_types(fields, (LINEAR, FULL), lambda i: FULL if i + 1 in numbers else LINEAR)


def _read_delta(fields: Fields) -> GatedDeltaOptions:
    given, outer = fields.inner("linear_attn_config"), {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
    outer["short_conv_kernel_size"] = "linear_conv_kernel_dim"
    size, num_heads, conv_size = (
        given.integer(name, 1, MAX_SIZE, fields.integer(theirs, 1, MAX_SIZE)) for name, theirs in outer.items()
    )
    return GatedDeltaOptions(
        num_key_heads=num_heads, num_value_heads=num_heads, key_size=size, value_size=size, conv_size=conv_size,
        gate_rank=size,
    )  # fmt: skip
