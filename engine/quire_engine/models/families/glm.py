"""GLM-4 (https://arxiv.org/abs/2406.12793) and its successors, in most of which a part of each head is rotated."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire_engine.models.checkpoints.fields import Fields
from quire_engine.models.families.deepseek import (
    deepseek_v32,
    read_balanced,
    read_latent,
    read_mlps,
    with_extra_layers,
)
from quire_engine.models.families.reading import make_layers, read_attention, read_mlp, read_mrope
from quire_engine.models.options import AttentionOptions, LayerOptions, ModelOptions, NormOptions

GLM = {
    "rms_norm_eps": 1.5625e-7, "max_position_embeddings": 131072, "num_key_value_heads": 2, "head_dim": 128,
    "partial_rotary_factor": 0.5,
}  # fmt: skip
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "glm": GLM,
    "glm4": GLM,
    "glm4_moe": {
        "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "num_key_value_heads": 8, "partial_rotary_factor": 0.5,
    },
    "glm4_moe_lite": {
        "rms_norm_eps": 1e-5, "max_position_embeddings": 202752, "head_dim": 64, "qk_nope_head_dim": 192,
        "v_head_dim": 256,
    },
    "glm_moe_dsa": {
        "rms_norm_eps": 1e-5, "max_position_embeddings": 202752, "head_dim": 64, "q_lora_rank": 2048,
        "qk_nope_head_dim": 192, "v_head_dim": 256, "n_group": 1, "topk_group": 1,
    },
    "glm4v": {"rms_norm_eps": 1e-5, "max_position_embeddings": 32768, "num_key_value_heads": 2},
    "glm4v_moe": {
        "rms_norm_eps": 1e-5, "max_position_embeddings": 65536, "num_key_value_heads": 8, "partial_rotary_factor": 0.5,
        "attention_bias": True,
    },
}  # fmt: skip
FUSED = (("gate_up_proj", ("gate_proj", "up_proj")),)
NORMS = NormOptions(
    before_attention="input_layernorm",
    after_attention="post_self_attn_layernorm",
    before_mlp="post_attention_layernorm",
    after_mlp="post_mlp_layernorm",
)


def glm(fields: Fields) -> ModelOptions:
    """GLM-4 of 2024 (glm-4-9b-chat-hf): biases of queries, keys and values."""
    attention = replace(read_attention(fields, bias=True, interleaved=True), o_bias=False)
    return ModelOptions(layers=make_layers(fields, attention, read_mlp(fields)), fused=FUSED)


def glm4(fields: Fields) -> ModelOptions:
    """GLM-4-0414 (https://huggingface.co/zai-org/GLM-4-32B-0414): norms on both sides."""
    return replace(glm(fields), norms=NORMS)


def glm4v(fields: Fields) -> ModelOptions:
    """The text model of GLM-4.1V (https://arxiv.org/abs/2507.01006): GLM-4-0414 with positions of three dimensions."""
    return _with_grid_positions(fields, glm4(fields))


def _with_grid_positions(fields: Fields, options: ModelOptions) -> ModelOptions:
    rope = read_mrope(fields, (8, 12, 12))
    layers = []
    for layer in options.layers:
        assert isinstance(layer.attention, AttentionOptions)
        layers.append(replace(layer, attention=replace(layer.attention, rope=rope)))
    return replace(options, layers=tuple(layers))


def glm4_moe(fields: Fields) -> ModelOptions:
    """GLM-4.5, 4.6 and 4.7 (https://arxiv.org/abs/2508.06471, section 2.1): grouped-query attention, and the experts of
    DeepSeek-V3. Head norms are in the larger ones."""
    has_norms = fields.boolean("use_qk_norm", False)
    attention = replace(read_attention(fields, head_norms=has_norms), o_bias=False)
    mlps = read_mlps(
        fields, read_mlp(fields), read_balanced(fields), num_experts=128, num_shared=1, intermediate_size=1408,
        first_dense=1, top_k=8, norm_topk_prob=fields.boolean("norm_topk_prob", True),
    )  # fmt: skip
    layers = make_layers(fields, attention, mlps)
    return ModelOptions(layers=layers, **with_extra_layers(fields, layers))


def glm4v_moe(fields: Fields) -> ModelOptions:
    """The text model of GLM-4.5V and 4.6V: GLM-4.5-Air, with biases and positions of three dimensions."""
    return _with_grid_positions(fields, glm4_moe(fields))


def glm4_moe_lite(fields: Fields) -> ModelOptions:
    """GLM-4.7-Flash (https://huggingface.co/zai-org/GLM-4.7-Flash): DeepSeek-V3 in other sizes."""
    interleaved = fields.boolean("rope_interleave", True)
    latent = read_latent(fields, interleaved=interleaved, query_rank=768)
    mlps = read_mlps(
        fields, read_mlp(fields), read_balanced(fields, scale=1.8), num_experts=64, num_shared=1,
        intermediate_size=1536, first_dense=1, top_k=4, norm_topk_prob=fields.boolean("norm_topk_prob", True),
    )  # fmt: skip
    layers = tuple(LayerOptions(latent, one) for one in mlps)
    return ModelOptions(layers=layers, **with_extra_layers(fields, layers))


def glm_moe_dsa(fields: Fields) -> ModelOptions:
    """GLM-5 (https://arxiv.org/abs/2602.15763): DeepSeek-V3.2 in other sizes. In later versions some layers see
    the keys that the indexer of an earlier one has chosen, which are all keys here as well."""
    return deepseek_v32(fields)
