"""Hunyuan V1, dense (https://huggingface.co/tencent/Hunyuan-7B-Instruct) and with experts (Hunyuan-A13B,
https://huggingface.co/tencent/Hunyuan-A13B-Instruct): each head of queries and keys is normed after the rotation."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire_engine.models.checkpoints.fields import MAX_EXPERTS, Fields
from quire_engine.models.families.reading import (
    make_layers,
    read_attention,
    read_head_size,
    read_mlp,
    read_num_layers,
)
from quire_engine.models.options import AttentionOptions, ExpertsOptions, ModelOptions

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "hunyuan_v1_dense": {"rms_norm_eps": 1e-5}, "hunyuan_v1_moe": {"rms_norm_eps": 1e-5},
}  # fmt: skip
NAMES = (
    (".query_layernorm.", ".q_norm."), (".key_layernorm.", ".k_norm."), (".mlp.gate.wg.", ".mlp.gate."),
    (".mlp.shared_mlp.", ".mlp.shared_expert."),
)  # fmt: skip


def hunyuan_v1_dense(fields: Fields) -> ModelOptions:
    return ModelOptions(layers=make_layers(fields, _read_attention(fields), read_mlp(fields)), renamed=NAMES)


def hunyuan_v1_moe(fields: Fields) -> ModelOptions:
    """Experts in every layer, and one that all tokens share, of the same size."""
    expert = read_mlp(fields)
    num_experts = _read_same(fields, "num_experts", MAX_EXPERTS)
    experts = ExpertsOptions(
        num_experts=num_experts, top_k=_read_same(fields, "moe_topk", num_experts), expert=expert, norm_topk_prob=True,
        shared=expert, shared_has_gate=False,
    )  # fmt: skip
    return ModelOptions(layers=make_layers(fields, _read_attention(fields), experts), renamed=NAMES)


def _read_attention(fields: Fields) -> AttentionOptions:
    """With `alpha`, `dynamic` says another base of the rotation, whatever the length of the sequence."""
    attention = read_attention(fields, head_norms=True, norms_after_rope=True)
    given = fields.inner("rope_parameters")
    given, size = given if given.values else fields.inner("rope_scaling"), read_head_size(fields)
    rope = attention.rope
    assert rope is not None
    if rope.rope_type == "dynamic" and given.values.get("alpha") is not None and size > 2:
        theta = rope.rope_theta * given.positive("alpha") ** (size / (size - 2))
        rope = replace(rope, rope_type="default", rope_theta=theta)
    return replace(attention, rope=replace(rope, attention_factor=1.0))  # a norm of what is rotated cancels it


def _read_same(fields: Fields, name: str, most: int) -> int:
    """A number from 1 on that is the same in all layers, given once or for each; 1 if it is missing."""
    value = fields.values.get(name)
    if not isinstance(value, list):
        return fields.integer(name, 1, most, 1)
    if len(value) != read_num_layers(fields) or len(set(map(str, value))) != 1:
        raise fields.error(name, "the same number for each layer")
    return fields.with_values({name: value[0]}).integer(name, 1, most)
