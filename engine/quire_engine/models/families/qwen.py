"""Qwen's decoders, dense and with experts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire_engine.models.checkpoints.fields import MAX_LAYERS, MAX_SIZE, Fields
from quire_engine.models.families.reading import (
    make_layers,
    read_attention,
    read_experts,
    read_layer_types,
    read_mlp,
    read_mrope,
    read_num_layers,
    read_rope,
    read_used_window,
    read_window,
    read_window_rope,
    read_windows,
)
from quire_engine.models.options import (
    AttentionOptions,
    ExpertsOptions,
    MLPOptions,
    ModelOptions,
    MTPOptions,
    StackLayout,
)

MIMO_NAMES = (
    ("mtp_layers.0.token_layernorm.", "mtp.pre_fc_norm_embedding."),
    ("mtp_layers.0.hidden_layernorm.", "mtp.pre_fc_norm_hidden."), ("mtp_layers.0.input_proj.", "mtp.fc."),
    ("mtp_layers.0.final_layernorm.", "mtp.norm."), ("mtp_layers.0.", "mtp.layers.0."),
)  # fmt: skip
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "mellum": {
        "rope_theta": 500000.0, "max_position_embeddings": 131072, "head_dim": 128, "num_key_value_heads": 4,
        "norm_topk_prob": True,
    },
    "qwen2_vl": {
        "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 32768, "num_key_value_heads": 8,
        "max_window_layers": 80,
    },
    "qwen3": {"head_dim": 128},
    "qwen3_vl": {
        "rope_theta": 500000.0, "max_position_embeddings": 128000, "head_dim": 128, "num_key_value_heads": 32,
    },
    "qwen3_vl_moe": {
        "rope_theta": 500000.0, "max_position_embeddings": 128000, "num_key_value_heads": 16,
    },
}  # fmt: skip


def qwen2(fields: Fields) -> ModelOptions:
    """Qwen2 and Qwen2.5 (https://arxiv.org/abs/2407.10671, section 2.2): Llama with biases of queries, keys, values."""
    attention = AttentionOptions(rope=read_rope(fields), qkv_bias=True)
    return ModelOptions(layers=make_layers(fields, attention, read_mlp(fields), _late_windows(fields)))


def mimo(fields: Fields) -> ModelOptions:
    """MiMo (https://arxiv.org/abs/2505.07608): Qwen2 with a layer of multi-token prediction, whose input has the hidden
    state first."""
    options, num_extra_layers = qwen2(fields), fields.integer("num_nextn_predict_layers", 0, MAX_LAYERS, 0)
    mtp = MTPOptions(layer=options.layers[-1], embedding_first=False) if num_extra_layers else None
    return replace(options, renamed=MIMO_NAMES, mtp=mtp)


def qwen3(fields: Fields) -> ModelOptions:
    """Qwen3 (https://arxiv.org/abs/2505.09388, section 2): no biases, and each head of queries and keys is normed."""
    attention = read_attention(fields, head_norms=True)
    return ModelOptions(layers=make_layers(fields, attention, read_mlp(fields), _late_windows(fields)))


def qwen2_vl(fields: Fields) -> ModelOptions:
    """The text model of Qwen2-VL and Qwen2.5-VL (https://arxiv.org/abs/2409.12191, section 2.1): Qwen2 with positions
    of three dimensions. A token of text has one number in all of them, so that it is rotated as in Qwen2."""
    attention = AttentionOptions(rope=read_mrope(fields, (16, 24, 24)), qkv_bias=True)
    return ModelOptions(layers=make_layers(fields, attention, read_mlp(fields), _late_windows(fields)))


def qwen3_vl(fields: Fields) -> ModelOptions:
    """The text model of Qwen3-VL (https://arxiv.org/abs/2511.21631): Qwen3 with positions of three dimensions, by which
    features turn in turn."""
    return ModelOptions(layers=make_layers(fields, _read_grid_attention(fields), read_mlp(fields)))


def qwen3_vl_moe(fields: Fields) -> ModelOptions:
    """The same with many small experts, and no shared one."""
    mlps = [
        replace(mlp, stack="transposed_halves", norm_topk_prob=True) if isinstance(mlp, ExpertsOptions) else mlp
        for mlp in read_mlps(fields, num_experts=60, top_k=4, intermediate_size=1408)
    ]
    return ModelOptions(layers=make_layers(fields, _read_grid_attention(fields), mlps))


def _read_grid_attention(fields: Fields) -> AttentionOptions:
    rope = read_mrope(fields, (24, 20, 20), interleaved=True)
    return replace(read_attention(fields, head_norms=True), rope=rope)


def qwen2_moe(fields: Fields) -> ModelOptions:
    """Qwen1.5-MoE and Qwen2-MoE (https://arxiv.org/abs/2407.10671, section 2.2.2): Qwen2 with many small experts, and
    one that all tokens share."""
    attention = AttentionOptions(rope=read_rope(fields), qkv_bias=fields.boolean("qkv_bias", True))
    window = read_used_window(fields, 4096)
    end = fields.integer("max_window_layers", 0, MAX_LAYERS, 28)  # unlike in Qwen2, the layers before it have windows
    windows = read_windows(fields, window, lambda layer: layer % 2 == 0 and layer < end)
    mlps = read_mlps(fields, num_experts=60, top_k=4, intermediate_size=1408, shared_size=5632)
    return ModelOptions(layers=make_layers(fields, attention, mlps, windows))


def qwen3_moe(fields: Fields) -> ModelOptions:
    """Qwen3-MoE (https://arxiv.org/abs/2505.09388, section 2): Qwen3 with many small experts, and no shared one."""
    window = read_used_window(fields, 4096)
    attention = read_attention(fields, head_norms=True, window=window)
    mlps = read_mlps(fields, num_experts=128, top_k=8, intermediate_size=768)
    return ModelOptions(layers=make_layers(fields, attention, mlps))


def mellum(fields: Fields) -> ModelOptions:
    """Mellum 2 (https://huggingface.co/JetBrains/Mellum2-12B-A2.5B-Base): Qwen3-MoE with layers that have a window, and
    a rotation of their own. Layers of multi-token prediction are not computed."""
    if fields.values.get("mlp_layer_types") is not None:
        types = read_layer_types(fields, ("dense", "sparse"), lambda i: "sparse", "mlp_layer_types")
        dense = [i for i, one in enumerate(types) if one == "dense"]
        fields = fields.with_values({**fields.values, "mlp_only_layers": dense})
    windows = read_windows(fields, read_window(fields, 1024), lambda i: False)
    mlps = read_mlps(fields, num_experts=64, top_k=8, intermediate_size=896)
    local_rope, attention = read_window_rope(fields, "", 10000.0), read_attention(fields, head_norms=True)
    return ModelOptions(layers=make_layers(fields, attention, mlps, windows, local_rope), skipped=("mtp.",))


def _late_windows(fields: Fields) -> tuple[int | None, ...]:
    """The first `max_window_layers` layers see everything."""
    first = fields.integer("max_window_layers", 0, MAX_LAYERS, 28)
    return read_windows(fields, read_used_window(fields, 4096), lambda i: i >= first)


def read_mlps(
    fields: Fields,
    *,
    num_experts: int,
    top_k: int,
    intermediate_size: int,
    shared_size: int | None = None,
    stack: StackLayout | None = None,
) -> list[MLPOptions | ExpertsOptions]:
    """The feed-forward of each layer; the numbers are defaults of fields. Without `shared_size` no expert is shared.
    `stack` is that of `ExpertsOptions`."""
    # transformers 5 writes Qwen3's number under the name that Mixtral has for it.
    name = "num_local_experts" if fields.values.get("num_experts") is None else "num_experts"
    dense = fields.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int and layer >= 0 for layer in dense):
        raise fields.error("mlp_only_layers", "a list of layers' numbers")
    mlp, shared = read_mlp(fields), None
    if shared_size is not None:
        size = fields.integer("shared_expert_intermediate_size", 1, MAX_SIZE, shared_size)
        shared = replace(mlp, intermediate_size=size)
    size = fields.integer("moe_intermediate_size", 1, MAX_SIZE, intermediate_size)
    experts = read_experts(
        fields, num_experts, top_k, name=name, expert=replace(mlp, intermediate_size=size),
        norm_topk_prob=fields.boolean("norm_topk_prob", False), shared=shared, stack=stack,
    )  # fmt: skip
    step = fields.integer("decoder_sparse_step", 1, MAX_SIZE, 1)
    return [mlp if i in dense or (i + 1) % step else experts for i in range(read_num_layers(fields))]
