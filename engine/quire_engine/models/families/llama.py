"""Llama (Touvron et al. 2023, https://arxiv.org/abs/2302.13971), and decoders that differ from it in a few options."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire_engine.models.checkpoints.fields import MAX_EXPERTS, MAX_LAYERS, MAX_POSITIONS, MAX_SIZE, Fields
from quire_engine.models.families.reading import (
    FULL,
    make_layers,
    read_attention,
    read_experts,
    read_head_size,
    read_layer_types,
    read_mlp,
    read_num_layers,
    read_rope,
    read_used_window,
    read_window,
    read_window_rope,
    read_windows,
)
from quire_engine.models.options import (
    PRE_NORMS,
    AttentionOptions,
    ExpertsOptions,
    GroupedRouting,
    LayerOptions,
    MLPOptions,
    ModelOptions,
    NormOptions,
    RopeConfig,
)

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "helium": {
        "rms_norm_eps": 1e-8, "rope_theta": 100000.0, "max_position_embeddings": 4096, "num_key_value_heads": 20,
        "head_dim": 128,
    },
    "llama4": {
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 131072, "vocab_size": 202048,
        "hidden_size": 5120, "intermediate_size": 8192, "num_hidden_layers": 48, "num_attention_heads": 40,
        "num_key_value_heads": 8, "head_dim": 128,
    },
    "ministral3": {
        "rms_norm_eps": 1e-5, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 262144,
    },
    "minimax_m2": {
        "rope_theta": 5e6, "max_position_embeddings": 196608, "num_key_value_heads": 8, "head_dim": 128,
    },
    "olmo2": {"rms_norm_eps": 1e-5},
    "olmo3": {"rms_norm_eps": 1e-5, "rope_theta": 500000.0},
    "olmoe": {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    "phi3": {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
    "seed_oss": {"max_position_embeddings": 524288, "num_key_value_heads": 8, "head_dim": 128},
    "phimoe": {
        "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 131072, "num_key_value_heads": 8,
    },
    "smollm3": {
        "rope_theta": 2e6, "max_position_embeddings": 32768, "num_key_value_heads": 4, "tie_word_embeddings": True,
    },
}  # fmt: skip
LLAMA4_NAMES = ((".feed_forward.router.", ".mlp.gate."), (".feed_forward.", ".mlp."))
CHUNKED = "chunked_attention"
"""In `layer_types`."""
MIXTRAL_NAMES = (
    (".block_sparse_moe.", ".mlp."), (".w1.", ".gate_proj."), (".w2.", ".down_proj."), (".w3.", ".up_proj."),
)  # fmt: skip
MINIMAX_NAMES = (*MIXTRAL_NAMES, (".mlp.e_score_correction_bias", ".mlp.choice_bias.weight"))
PHI3_FUSED = (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj")))
OLMO_NORMS = NormOptions(
    after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm", is_float32=True
)  # fmt: skip


def llama(fields: Fields) -> ModelOptions:
    return ModelOptions(layers=make_layers(fields, read_attention(fields), read_mlp(fields, bias=None)))


def llama4(fields: Fields) -> ModelOptions:
    """Llama 4 (https://ai.meta.com/blog/llama-4-multimodal-intelligence): layers that see their chunk alone, between
    others without rotation, whose queries grow with their position (https://arxiv.org/abs/2501.19399); and one expert
    for each token, whose input the router scales."""
    without_rope, attention = _layers_without_rope(fields), read_attention(fields, interleaved=True)
    chunk = None
    if "attention_chunk_size" not in fields.values or fields.values["attention_chunk_size"] is not None:
        chunk = fields.integer("attention_chunk_size", 1, MAX_POSITIONS, 8192)
    growing = None
    if fields.boolean("attn_temperature_tuning", True):
        growing = RopeConfig(
            rope_type="none",
            llama_4_scaling_beta=fields.positive("attn_scale", 0.1),
            original_max_position_embeddings=fields.integer("floor_scale", 1, MAX_POSITIONS, 8192),
        )
    types = read_layer_types(fields, (FULL, CHUNKED), lambda i: FULL if chunk is None or i in without_rope else CHUNKED)
    if chunk is None and CHUNKED in types:
        raise fields.error("attention_chunk_size", f"an integer above 0, as layer_types names {CHUNKED}")
    rotated = replace(attention, unit_norms=fields.boolean("use_qk_norm", True))
    mlps = _read_llama4_mlps(fields)
    layers = []
    for number, kind in enumerate(types):
        own = replace(attention, rope=growing, interleaved=False) if number in without_rope else rotated
        if kind == CHUNKED:
            own = replace(own, window=chunk, is_chunked=True)
        layers.append(LayerOptions(own, mlps[number]))
    return ModelOptions(layers=tuple(layers), renamed=LLAMA4_NAMES)


def _read_llama4_mlps(fields: Fields) -> list[MLPOptions | ExpertsOptions]:
    """The feed-forward of each layer."""
    num_layers, expert = read_num_layers(fields), read_mlp(fields)
    number = fields.integer("num_local_experts", 1, MAX_EXPERTS, 16)
    experts = ExpertsOptions(
        num_experts=number, top_k=fields.integer("num_experts_per_tok", 1, 1, 1), expert=expert, norm_topk_prob=True,
        shared=expert, shared_has_gate=False, scales_input=True, stack="transposed_halves",
    )  # fmt: skip
    dense = replace(expert, intermediate_size=fields.integer("intermediate_size_mlp", 1, MAX_SIZE, 16384))
    step, chosen = fields.integer("interleave_moe_layer_step", 1, MAX_LAYERS, 1), fields.values.get("moe_layers")
    if chosen is None:
        chosen = range(step - 1, num_layers, step)
    elif not isinstance(chosen, list) or not all(type(one) is int and 0 <= one < num_layers for one in chosen):
        raise fields.error("moe_layers", f"a list of numbers of the {num_layers} layers")
    return [experts if number in chosen else dense for number in range(num_layers)]


def helium(fields: Fields) -> ModelOptions:
    """Helium (https://huggingface.co/kyutai/helium-1-2b): features that are rotated together lie side by side."""
    attention = replace(read_attention(fields, interleaved=True), o_bias=False)
    layers = make_layers(fields, attention, read_mlp(fields, bias=None))
    return ModelOptions(layers=layers, norms=replace(PRE_NORMS, is_float32=True))


def granite(fields: Fields) -> ModelOptions:
    """Granite 3 (https://github.com/ibm-granite/granite-3.0-language-models): four multipliers keep the scale of
    activations the same at any width (Yang et al. 2022, https://arxiv.org/abs/2203.03466)."""
    attention = read_attention(fields, scale=fields.positive("attention_multiplier", 1.0))
    return ModelOptions(
        layers=make_layers(fields, attention, read_mlp(fields, bias=None)),
        embedding_scale=fields.positive("embedding_multiplier", 1.0),
        residual_multiplier=fields.positive("residual_multiplier", 1.0),
        logits_divisor=fields.positive("logits_scaling", 1.0),
    )


def mistral(fields: Fields) -> ModelOptions:
    """Mistral (https://arxiv.org/abs/2310.06825, section 2): some versions have a window in every layer."""
    attention = AttentionOptions(rope=read_rope(fields), window=read_window(fields, 4096))
    return ModelOptions(layers=make_layers(fields, attention, read_mlp(fields)))


def ministral3(fields: Fields) -> ModelOptions:
    """Ministral 3 (https://huggingface.co/collections/mistralai/ministral-3): Mistral with YaRN, and with queries that
    grow with their position (`llama_4_scaling_beta` of the rotation)."""
    if not fields.inner("rope_parameters").values:
        raise fields.error("rope_parameters", "given")
    attention = AttentionOptions(rope=read_rope(fields), window=read_window(fields, None))
    return ModelOptions(layers=make_layers(fields, attention, read_mlp(fields)))


def mixtral(fields: Fields) -> ModelOptions:
    """Mixtral (Jiang et al. 2024, https://arxiv.org/abs/2401.04088): Mistral with experts, two of eight per token."""
    experts = read_experts(fields, 8, 2, name="num_local_experts", expert=read_mlp(fields), norm_topk_prob=True)
    attention = AttentionOptions(rope=read_rope(fields), window=read_window(fields, None))
    return ModelOptions(layers=make_layers(fields, attention, experts), renamed=MIXTRAL_NAMES)


def minimax_m2(fields: Fields) -> ModelOptions:
    """MiniMax-M2 (https://huggingface.co/MiniMaxAI/MiniMax-M2): queries and keys normed as in OLMo 2, partial rotary,
    and in every layer experts that sigmoids score and a bias balances, as in DeepSeek-V3."""
    fields.choice("scoring_func", ("sigmoid",), "sigmoid")
    for name in ("use_qk_norm", "use_routing_bias"):
        if not fields.boolean(name, True):
            raise fields.error(name, "true")
    fields.integer("shared_intermediate_size", 0, 0, 0)
    if fields.values.get("rotary_dim") is not None:
        part = fields.integer("rotary_dim", 2, MAX_SIZE) / read_head_size(fields)
        fields = fields.with_values({"partial_rotary_factor": part, **fields.values})
    experts = read_experts(
        fields, 256, 8, name="num_local_experts", expert=read_mlp(fields), norm_topk_prob=True,
        grouped=GroupedRouting(num_groups=1, top_groups=1, scoring="sigmoid", has_bias=True, scale=1.0),
    )  # fmt: skip
    attention = AttentionOptions(rope=read_rope(fields), projection_norms=True)
    return ModelOptions(layers=make_layers(fields, attention, experts), renamed=MINIMAX_NAMES)


def phimoe(fields: Fields) -> ModelOptions:
    """Phi-3.5-MoE (https://arxiv.org/abs/2404.14219, section 2): experts that SparseMixer weighs, LayerNorms, biases,
    of the head too, and LongRoPE with a factor of its own."""
    rope_fields = fields.inner("rope_parameters")
    rope_fields = rope_fields if rope_fields.values else fields.inner("rope_scaling")
    rope = read_rope(fields)
    if rope.rope_type == "longrope":
        factor = rope_fields.positive("short_mscale")
        if rope_fields.positive("long_mscale") != factor:
            raise rope_fields.error("long_mscale", f"short_mscale={factor}, as positions have one table")
        rope = replace(rope, attention_factor=factor)
    num_experts = fields.integer("num_local_experts", 1, MAX_EXPERTS, 16)
    experts = ExpertsOptions(
        num_experts=num_experts,
        top_k=fields.integer("num_experts_per_tok", 2, 2, 2),
        expert=read_mlp(fields),
        norm_topk_prob=False,
        jitter=fields.positive("router_jitter_noise", 0.01),
    )
    bias = fields.boolean("attention_bias", False)
    attention = AttentionOptions(rope=rope, qkv_bias=bias, o_bias=bias, window=read_window(fields, None))
    return ModelOptions(
        layers=make_layers(fields, attention, experts),
        norms=replace(PRE_NORMS, is_layer_norm=True, bias=True),
        renamed=MIXTRAL_NAMES,
        head_bias=fields.boolean("lm_head_bias", False),
    )


def phi3(fields: Fields) -> ModelOptions:
    """Phi-3, Phi-3.5 and Phi-4 (https://arxiv.org/abs/2404.14219, section 2): fused projections in the checkpoint,
    LongRoPE, and in Phi-4-mini (https://arxiv.org/abs/2503.01743) partial rotary."""
    attention = AttentionOptions(rope=read_rope(fields), window=read_window(fields, None))
    return ModelOptions(layers=make_layers(fields, attention, read_mlp(fields)), fused=PHI3_FUSED)


def olmo2(fields: Fields) -> ModelOptions:
    """OLMo 2 (https://arxiv.org/abs/2501.00656, section 3): norms of the outputs of attention and feed-forward instead
    of their inputs, and of all queries of a token together, and of all keys."""
    attention = read_attention(fields, projection_norms=True)
    return ModelOptions(layers=make_layers(fields, attention, read_mlp(fields)), norms=OLMO_NORMS)


def olmo3(fields: Fields) -> ModelOptions:
    """OLMo 3 (https://arxiv.org/abs/2512.13961): OLMo 2 with a window in three of four layers, which do not scale the
    rotation."""
    attention, local_rope = read_attention(fields, projection_norms=True), read_window_rope(fields, "rope_theta", 5e5)
    windows = read_windows(fields, read_window(fields, 4096), lambda i: (i + 1) % 4 != 0)
    return ModelOptions(layers=make_layers(fields, attention, read_mlp(fields), windows, local_rope), norms=OLMO_NORMS)


def olmoe(fields: Fields) -> ModelOptions:
    """OLMoE (https://arxiv.org/abs/2409.02060, section 2): experts in every layer, and norms of all queries of a token
    together, and of all keys."""
    if fields.values.get("clip_qkv") is not None:
        raise fields.error("clip_qkv", "null")
    is_normed = fields.boolean("norm_topk_prob", False)
    experts = read_experts(fields, 64, 8, expert=read_mlp(fields), norm_topk_prob=is_normed)
    return ModelOptions(layers=make_layers(fields, read_attention(fields, projection_norms=True), experts))


def seed_oss(fields: Fields) -> ModelOptions:
    """Seed-OSS (https://huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct): Llama with biases of queries, keys and
    values."""
    attention = replace(read_attention(fields, bias=True), o_bias=fields.boolean("attention_out_bias", False))
    return ModelOptions(layers=make_layers(fields, attention, read_mlp(fields, bias=None)))


def smollm3(fields: Fields) -> ModelOptions:
    """SmolLM3 (https://huggingface.co/blog/smollm3): no positions in every fourth layer."""
    without_rope, attention, mlp = _layers_without_rope(fields), read_attention(fields), read_mlp(fields, bias=None)
    windows = read_windows(fields, read_used_window(fields, None), lambda i: i in without_rope)
    layers = [
        replace(attention, window=window, rope=None if i in without_rope else attention.rope)
        for i, window in enumerate(windows)
    ]
    return ModelOptions(layers=tuple(LayerOptions(one, mlp) for one in layers))


def _layers_without_rope(fields: Fields) -> frozenset[int]:
    num_layers, flags = read_num_layers(fields), fields.values.get("no_rope_layers")
    if flags is None or flags == []:  # as Llama 4 is published
        interval = fields.integer("no_rope_layer_interval", 1, MAX_LAYERS, 4)
        return frozenset(range(interval - 1, num_layers, interval))
    if not isinstance(flags, list) or len(flags) < num_layers or not all(flag in (0, 1) for flag in flags):
        raise fields.error("no_rope_layers", f"a list of {num_layers} numbers, 0 for a layer without RoPE, else 1")
    return frozenset(i for i, flag in enumerate(flags[:num_layers]) if not flag)
