"""Hybrids most of whose layers are gated delta rules (`layers/gated_delta.py`), and the others attention."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire_engine.models.checkpoints.fields import MAX_LAYERS, MAX_SIZE, Fields
from quire_engine.models.families.llama import OLMO_NORMS
from quire_engine.models.families.qwen import read_mlps
from quire_engine.models.families.reading import (
    FULL,
    read_attention,
    read_layer_types,
    read_mlp,
    read_mrope,
    read_num_layers,
)
from quire_engine.models.options import (
    AttentionOptions,
    ExpertsOptions,
    GatedDeltaOptions,
    LayerOptions,
    MLPOptions,
    ModelOptions,
    MTPOptions,
    NormOptions,
)

LINEAR = "linear_attention"
"""In `layer_types`."""
QWEN = {
    "head_dim": 256, "max_position_embeddings": 32768, "partial_rotary_factor": 0.25, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}  # fmt: skip
QWEN_MOE = {**QWEN, "num_key_value_heads": 2, "norm_topk_prob": True}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "olmo_hybrid": {"max_position_embeddings": 65536, "linear_conv_kernel_dim": 4},
    "qwen3_5": {**QWEN, "num_key_value_heads": 4},
    "qwen3_5_moe": {**QWEN_MOE, "intermediate_size": 512},  # of no layer, as all have experts
    "qwen3_next": {**QWEN_MOE, "intermediate_size": 5632},
}  # fmt: skip
NORMS = NormOptions(before_attention="input_layernorm", before_mlp="post_attention_layernorm", is_float32=True)
QWEN_NORMS = replace(NORMS, offset=1.0)
NAMES = (
    (".linear_attn.A_log", ".mixer.A_log.weight"), (".linear_attn.dt_bias", ".mixer.dt_bias.weight"),
    (".linear_attn.in_proj_z.", ".mixer.z_proj."), (".linear_attn.in_proj_b.", ".mixer.b_proj."),
    (".linear_attn.in_proj_a.", ".mixer.a_proj."), (".linear_attn.g_proj.", ".mixer.z_proj."),
    (".linear_attn.o_norm.", ".mixer.norm."), (".linear_attn.o_proj.", ".mixer.out_proj."),
    (".linear_attn.", ".mixer."), (".attention_layer_norm.", ".input_layernorm."),
    (".feedforward_layer_norm.", ".post_attention_layernorm."),
)  # fmt: skip
FUSED = (
    ("in_proj_qkv", ("q_proj", "k_proj", "v_proj")), ("conv1d", ("q_conv1d", "k_conv1d", "v_conv1d")),
)  # fmt: skip


def qwen3_5(fields: Fields) -> ModelOptions:
    """The text model of Qwen3.5 and 3.6 (https://qwen.ai/blog?id=qwen3.5), with positions of three dimensions."""
    return _make_qwen(fields, [read_mlp(fields)] * read_num_layers(fields), has_mrope=True)


def qwen3_5_moe(fields: Fields) -> ModelOptions:
    """The same with many small experts, and one that all tokens share."""
    return _make_qwen(fields, _read_mlps(fields, num_experts=256, top_k=8), has_mrope=True)


def qwen3_next(fields: Fields) -> ModelOptions:
    """Qwen3-Next (https://qwen.ai/blog?id=qwen3-next): like Qwen3.5 with experts, but for the order in which the
    checkpoint has the projections of the gated delta rule."""
    by_key_head = fields.boolean("linear_by_key_head", True)  # false in GGUF files: llama.cpp changes the order
    return _make_qwen(fields, _read_mlps(fields, num_experts=512, top_k=10), by_key_head=by_key_head)


def olmo_hybrid(fields: Fields) -> ModelOptions:
    """OLMo Hybrid (https://huggingface.co/allenai/Olmo-Hybrid-7B): OLMo 3 without windows, and layers of gated delta
    rules, which may also subtract what a key has (Grazzi et al. 2024, https://arxiv.org/abs/2411.12537)."""
    attention = read_attention(fields, projection_norms=True)
    if fields.inner("rope_parameters").values.get("rope_theta", 0) is None:
        attention = replace(attention, rope=None)
    beta_scale = 2.0 if fields.boolean("linear_allow_neg_eigval", True) else 1.0
    delta = _read_delta(fields, beta_scale=beta_scale, norm_eps=1e-5)
    return _make(fields, [read_mlp(fields)] * read_num_layers(fields), attention, delta, OLMO_NORMS, NORMS)


def _read_mlps(fields: Fields, *, num_experts: int, top_k: int) -> list[MLPOptions | ExpertsOptions]:
    return read_mlps(
        fields, num_experts=num_experts, top_k=top_k, intermediate_size=512, shared_size=512, stack="halves"
    )  # fmt: skip


def _make_qwen(
    fields: Fields, mlps: Sequence[MLPOptions | ExpertsOptions], *, by_key_head: bool = False, has_mrope: bool = False
) -> ModelOptions:
    attention = read_attention(fields, head_norms=True, output_gate=True)
    if has_mrope:
        attention = replace(attention, rope=read_mrope(fields, (11, 11, 10), interleaved=True))
    options = _make(fields, mlps, attention, _read_delta(fields, by_key_head=by_key_head), QWEN_NORMS)
    return replace(options, mtp=MTPOptions(layer=LayerOptions(attention, mlps[-1])))


def _make(
    fields: Fields,
    mlps: Sequence[MLPOptions | ExpertsOptions],
    attention: AttentionOptions,
    delta: GatedDeltaOptions,
    norms: NormOptions,
    linear_norms: NormOptions | None = None,
) -> ModelOptions:
    """The model. Layers with a gated delta rule may have other norms."""
    interval = fields.integer("full_attention_interval", 1, MAX_LAYERS, 4)
    types = read_layer_types(fields, (LINEAR, FULL), lambda layer: LINEAR if (layer + 1) % interval else FULL)
    return ModelOptions(
        layers=tuple(
            LayerOptions(None, mlp, delta, norms=linear_norms) if kind == LINEAR else LayerOptions(attention, mlp)
            for kind, mlp in zip(types, mlps, strict=True)
        ),
        norms=norms,
        renamed=NAMES,
        fused=FUSED,
    )


def _read_delta(fields: Fields, **options: Any) -> GatedDeltaOptions:
    """The gated delta rule; other options are given."""
    fields.choice("hidden_act", ("silu",), "silu")  # it is the convolution's too
    num_heads = fields.integer("num_attention_heads", 1, MAX_SIZE)
    num_key_heads = fields.integer("linear_num_key_heads", 1, MAX_SIZE, num_heads)
    num_value_heads = fields.integer("linear_num_value_heads", 1, MAX_SIZE, num_heads)
    if num_value_heads % num_key_heads:
        raise fields.error("linear_num_value_heads", f"a multiple of linear_num_key_heads={num_key_heads}")
    key_size = int(0.75 * fields.integer("hidden_size", 1, MAX_SIZE) / num_key_heads)
    key_size = fields.integer("linear_key_head_dim", 1, MAX_SIZE, key_size)
    return GatedDeltaOptions(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_size=key_size,
        value_size=fields.integer("linear_value_head_dim", 1, MAX_SIZE, 2 * key_size),
        conv_size=fields.integer("linear_conv_kernel_dim", 1, MAX_SIZE),
        **options,
    )
