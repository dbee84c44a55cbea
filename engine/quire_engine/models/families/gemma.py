"""Gemma's text models: norms on both sides, and windows in most layers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire_engine.models.checkpoints.fields import MAX_EXPERTS, MAX_LAYERS, MAX_POSITIONS, MAX_SIZE, Fields
from quire_engine.models.families.reading import (
    make_layers,
    read_attention,
    read_head_size,
    read_mlp,
    read_num_layers,
    read_rope,
    read_window,
    read_window_rope,
    read_windows,
)
from quire_engine.models.options import (
    PRE_NORMS,
    AltUpOptions,
    AttentionOptions,
    ExpertsOptions,
    LayerInputOptions,
    LayerOptions,
    MLPOptions,
    ModelOptions,
    NormOptions,
)

ALIASES: Mapping[str, Mapping[str, str]] = {"gemma": {"hidden_activation": "hidden_act"}}
GEMMA2 = {"head_dim": 256, "tie_word_embeddings": True}
GEMMA4 = {
    **GEMMA2, "max_position_embeddings": 131072, "vocab_size": 262144, "num_attention_heads": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma": {**GEMMA2, "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 8192},
    "gemma2": GEMMA2,
    # The checkpoints with 4 billion parameters and more leave out what transformers adds.
    "gemma3": {
        **GEMMA2, "rope_theta": 1e6, "max_position_embeddings": 131072, "vocab_size": 262208,
        "num_attention_heads": 8, "num_key_value_heads": 4,
    },
    "gemma3n": {
        **GEMMA2, "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 35, "num_attention_heads": 8,
        "num_key_value_heads": 2, "rope_theta": 1e6, "max_position_embeddings": 32768, "vocab_size": 262400,
    },
    "gemma4": GEMMA4,
    "gemma4_unified": {
        **GEMMA4, "max_position_embeddings": 262144, "sliding_window": 1024, "hidden_size_per_layer_input": 0,
    },
    "vaultgemma": {**GEMMA2, "max_position_embeddings": 8192, "num_key_value_heads": 4},
}  # fmt: skip
NORMS = NormOptions(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
    offset=1.0,
    is_float32=True,
)
GEMMA4_ROPE = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
GEMMA4_NORMS = replace(NORMS, offset=0.0)
MAX_STREAMS = 16
"""More would be a mistake in the file: each layer has the cube of their number in coefficients."""
GEMMA4_NAMES = (
    (".layer_scalar", ".layer_scalar.weight"), (".router.proj.", ".moe.gate."),
    (".moe.experts.", ".experts."),  # as some quantisers call them
    (".experts.", ".moe.experts."),
    (".router.scale", ".moe.gate_norm.weight"), (".router.per_expert_scale", ".moe.expert_scale.weight"),
)  # fmt: skip


def gemma(fields: Fields) -> ModelOptions:
    """Gemma (https://arxiv.org/abs/2403.08295, section 2): the norms of Llama, and a scaled embedding."""
    if fields.boolean("use_bidirectional_attention", False):
        raise fields.error("use_bidirectional_attention", "false")
    if fields.values["hidden_act"] == "gelu":  # which says the approximation in the first checkpoints
        fields = fields.with_values({**fields.values, "hidden_act": "gelu_pytorch_tanh"})
    return ModelOptions(
        layers=make_layers(fields, read_attention(fields), read_mlp(fields)),
        norms=replace(PRE_NORMS, offset=1.0, is_float32=True),
        embedding_scale=fields.integer("hidden_size", 1, MAX_SIZE) ** 0.5,
    )


def gemma2(fields: Fields) -> ModelOptions:
    """Gemma 2 (https://arxiv.org/abs/2408.00118, section 2): soft caps, and a window in every second layer."""
    if fields.boolean("use_bidirectional_attention", False):
        raise fields.error("use_bidirectional_attention", "false")
    attention = replace(_read_attention(fields), soft_cap=fields.positive_or_null("attn_logit_softcapping", 50.0))
    mlp = read_mlp(fields, "hidden_activation", "gelu_pytorch_tanh")
    windows = read_windows(fields, read_window(fields, 4096), lambda i: i % 2 == 0)
    return ModelOptions(
        layers=make_layers(fields, attention, mlp, windows),
        norms=NORMS,
        embedding_scale=fields.integer("hidden_size", 1, MAX_SIZE) ** 0.5,
        logits_soft_cap=fields.positive_or_null("final_logit_softcapping", 30.0),
    )


def vaultgemma(fields: Fields) -> ModelOptions:
    """VaultGemma (https://arxiv.org/abs/2510.15001): Gemma 2 without norms of outputs."""
    return replace(gemma2(fields), norms=replace(NORMS, after_attention=None, after_mlp=None))


def gemma3(fields: Fields) -> ModelOptions:
    """Gemma 3 (https://arxiv.org/abs/2503.19786, section 2): normed queries and keys instead of soft caps, and five
    layers with a window, and a rotation of their own, to one without. EmbeddingGemma (https://arxiv.org/abs/2509.20354)
    is the same with attention to both sides, where a window is half as long to either."""
    attention = replace(_read_attention(fields), head_norms=True)
    is_causal, window = not fields.boolean("use_bidirectional_attention", False), read_window(fields, 4096)
    if not is_causal:
        attention, window = replace(attention, is_causal=False), None if window is None else window // 2 + 1
    local_rope = read_window_rope(fields, "rope_local_base_freq", 10000.0)
    mlp = read_mlp(fields, "hidden_activation", "gelu_pytorch_tanh")
    period = fields.integer("sliding_window_pattern", 1, MAX_LAYERS, 6)
    windows = read_windows(fields, window, lambda i: (i + 1) % period != 0)
    return ModelOptions(
        layers=make_layers(fields, attention, mlp, windows, local_rope),
        norms=NORMS,
        embedding_scale=fields.integer("hidden_size", 1, MAX_SIZE) ** 0.5,
        logits_soft_cap=fields.positive_or_null("final_logit_softcapping", None),
        has_head=is_causal,
    )


def gemma3n(fields: Fields) -> ModelOptions:
    """Gemma 3n (https://huggingface.co/docs/transformers/model_doc/gemma3n): several residual streams, of which each
    layer computes one; an input of its own for each layer; gates of the first layers that are sparse. The last layers
    use the keys and values of earlier ones."""
    num_layers = read_num_layers(fields)
    windows = read_windows(fields, read_window(fields, 512), lambda i: (i + 1) % 5 != 0)
    owners = _read_cache_owners(fields, windows, 15)
    common = read_attention(fields, head_norms=True, value_norms=True, scale=1.0)
    local_rope = read_window_rope(fields, "rope_local_base_freq", 10000.0)
    sizes = fields.values["intermediate_size"]
    sizes = sizes if isinstance(sizes, list) else [sizes] * num_layers
    if len(sizes) != num_layers:
        raise fields.error("intermediate_size", f"a size, or one for each of {num_layers} layers")
    layers = []
    for window, owner, size, sparsity in zip(windows, owners, sizes, _read_sparsities(fields), strict=True):
        rope = common.rope if window is None else local_rope
        mlp = read_mlp(
            fields.with_values({**fields.values, "intermediate_size": size}), "hidden_activation", "gelu_pytorch_tanh"
        )
        attention = replace(common, window=window, cache_of=owner, rope=rope)
        layers.append(LayerOptions(attention, replace(mlp, sparsity=sparsity)))
    number = fields.integer("altup_num_inputs", 2, MAX_STREAMS, 4)
    return ModelOptions(
        layers=tuple(layers),
        norms=replace(GEMMA4_NORMS, after_layer_input="post_per_layer_input_norm"),
        embedding_scale=fields.integer("hidden_size", 1, MAX_SIZE) ** 0.5,
        layer_inputs=LayerInputOptions(
            size=fields.integer("hidden_size_per_layer_input", 1, MAX_SIZE, 256),
            vocab_size=fields.integer("vocab_size_per_layer_input", 1, MAX_SIZE, 262144),
            activation=mlp.activation,
        ),
        altup=AltUpOptions(
            num_streams=number,
            active=fields.integer("altup_active_idx", 0, number - 1, 0),
            scales_output=fields.boolean("altup_correct_scale", True),
            laurel_rank=fields.integer("laurel_rank", 1, MAX_SIZE, 64),
        ),
        logits_soft_cap=fields.positive_or_null("final_logit_softcapping", 30.0),
        renamed=((".correct_output_scale", ".correct_output_scale.weight"),),
    )


def gemma4(fields: Fields) -> ModelOptions:
    """Gemma 4 (https://huggingface.co/docs/transformers/model_doc/gemma4): normed values; layers that see everything
    have larger heads, of which a part is rotated, and their keys may be their values. A large model has experts beside
    its feed-forward. In the small ones each layer has an input of its own, and the last layers use the keys and values
    of earlier ones."""
    windows = list(read_windows(fields, read_window(fields, 512), lambda i: (i + 1) % 6 != 0))
    windows[-1] = None
    overrides = _read_overrides(fields, windows)
    full_size = next((head_size for head_size, _ in overrides.values()), read_head_size(fields))
    rope_fields = fields.with_values({"rope_parameters": GEMMA4_ROPE, **fields.values})
    if fields.values.get("use_bidirectional_attention") == "all":
        raise fields.error("use_bidirectional_attention", "null or vision")
    common = AttentionOptions(
        rope=read_rope(rope_fields, full_size),
        qkv_bias=(bias := fields.boolean("attention_bias", False)), o_bias=bias, head_norms=True, value_norms=True,
        scale=1.0,
    )  # fmt: skip
    local_rope = read_window_rope(rope_fields, "rope_local_base_freq", 10000.0)
    owners, keys_are_values = _read_cache_owners(fields, windows, 0), fields.boolean("attention_k_eq_v", False)
    mlp = read_mlp(fields, "hidden_activation", "gelu_pytorch_tanh")
    is_wide = fields.boolean("use_double_wide_mlp", False)
    experts, layers = _read_experts(fields, mlp), []
    for number, (own_window, cache_of) in enumerate(zip(windows, owners, strict=True)):
        head_size, num_kv_heads = overrides.get(number, (None, None))
        attention = replace(
            common, window=own_window, head_size=head_size, num_kv_heads=num_kv_heads, cache_of=cache_of,
            keys_are_values=keys_are_values and own_window is None, has_bidirectional_parts=own_window is not None,
            rope=common.rope if own_window is None else local_rope,
        )  # fmt: skip
        factor = 2 if is_wide and cache_of is not None else 1
        own_mlp = replace(mlp, intermediate_size=factor * mlp.intermediate_size)
        layers.append(LayerOptions(attention, own_mlp, experts=experts))
    size = fields.integer("hidden_size_per_layer_input", 0, MAX_SIZE, 256)
    norms = GEMMA4_NORMS
    if experts is not None:
        norms = replace(
            norms, after_dense="post_feedforward_layernorm_1", before_experts="pre_feedforward_layernorm_2",
            after_experts="post_feedforward_layernorm_2",
        )  # fmt: skip
    layer_inputs = None
    if size:
        norms = replace(norms, after_layer_input="post_per_layer_input_norm")
        vocab_size = fields.integer("vocab_size_per_layer_input", 1, MAX_SIZE, 262144)
        layer_inputs = LayerInputOptions(size=size, vocab_size=vocab_size, activation=mlp.activation)
    return ModelOptions(
        layers=tuple(layers),
        norms=norms,
        embedding_scale=fields.integer("hidden_size", 1, MAX_SIZE) ** 0.5,
        layer_inputs=layer_inputs,
        layer_scales=True,
        logits_soft_cap=fields.positive_or_null("final_logit_softcapping", None),
        renamed=GEMMA4_NAMES,
    )


def gemma4_assistant(fields: Fields) -> ModelOptions:
    """The decoder of an assistant of Gemma 4 (`models/gemma4_assistant.py`): no layer makes keys and values, and logits
    have no cap."""
    for name in ("enable_moe_block", "use_double_wide_mlp"):
        if fields.boolean(name, False):
            raise fields.error(name, "false")
    fields.integer("hidden_size_per_layer_input", 0, 0, 0)
    options = gemma4(fields.with_values({**fields.values, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}))
    layers = []
    for layer in options.layers:
        assert isinstance(layer.attention, AttentionOptions)
        layers.append(replace(layer, attention=replace(layer.attention, cache_of=0)))
    return replace(options, layers=tuple(layers), logits_soft_cap=None)


def with_placeholders(options: LayerInputOptions, outer: Fields, text: Fields) -> LayerInputOptions:
    """The same for a model that takes images: its placeholders have the layers' inputs of padding."""
    tokens = {"image_token_id": 258_880, "video_token_id": 258_884, "audio_token_id": 258_881}
    placeholders = tuple(outer.integer(name, 0, MAX_POSITIONS, default) for name, default in tokens.items())
    return replace(options, placeholders=placeholders, padding=text.integer("pad_token_id", 0, MAX_SIZE, 0))


def gemma4_unified(fields: Fields) -> ModelOptions:
    """The text model of Gemma 4 12B, which embeds images and sounds without encoders: Gemma 4 with other defaults."""
    return gemma4(fields)


def _read_cache_owners(fields: Fields, windows: Sequence[int | None], default: int) -> list[int | None]:
    """By layer, the earlier one whose keys and values are its own too; None: it makes its own. The default is that of
    `num_kv_shared_layers`."""
    first = len(windows) - fields.integer("num_kv_shared_layers", 0, len(windows) - 1, default)
    last = {window: number for number, window in enumerate(windows[:first])}
    if not last.keys() >= set(windows[first:]):
        raise fields.error("num_kv_shared_layers", "less: the layers before have none of the same type")
    return [None] * first + [last[window] for window in windows[first:]]


def _read_sparsities(fields: Fields) -> list[float]:
    """By layer, which part of its gate's numbers becomes zero."""
    num_layers, given = read_num_layers(fields), fields.values.get("activation_sparsity_pattern")
    if given is None:
        num_sparse = 10 if num_layers > 10 else 0
        return [0.95] * num_sparse + [0.0] * (num_layers - num_sparse)
    if (
        not isinstance(given, list) or len(given) != num_layers
        or not all(type(one) in (int, float) and 0 <= one < 1 for one in given)
    ):  # fmt: skip
        raise fields.error("activation_sparsity_pattern", f"a number from 0 to below 1 for each of {num_layers} layers")
    return list(map(float, given))


def _read_overrides(fields: Fields, windows: Sequence[int | None]) -> dict[int, tuple[int, int | None]]:
    """By number, the head size and the number of KV heads of layers whose sizes are not the model's, from
    `per_layer_config` (transformers 5.24 and later) or `global_head_dim` (before); None: the model's own."""
    if fields.values.get("per_layer_config") is None:
        head_size, num_kv_heads = fields.integer("global_head_dim", 2, MAX_SIZE, 512), None
        name = "num_global_key_value_heads"
        if fields.boolean("attention_k_eq_v", False) and fields.values.get(name) is not None:
            num_kv_heads = fields.integer(name, 1, MAX_SIZE)
        return {number: (head_size, num_kv_heads) for number, window in enumerate(windows) if window is None}
    found, given = {}, fields.inner("per_layer_config")
    names = {int(name): name for name in given.values if name.isdecimal()}  # of as many digits as the last
    if len(names) < len(given.values) or max(names, default=0) >= len(windows):
        raise fields.error("per_layer_config", f"sizes by the number of one of {len(windows)} layers")
    for number, window in enumerate(windows):
        one = given.inner(names.get(number, str(number)))
        unknown = set(one.values) - {"head_dim", "num_key_value_heads"}
        if unknown or (one.values and window is not None):
            raise given.error(names[number], "head_dim and num_key_value_heads, of a layer without a window")
        if window is None:
            head_size = one.integer("head_dim", 2, MAX_SIZE, read_head_size(fields))
            has_number = one.values.get("num_key_value_heads") is not None
            found[number] = head_size, one.integer("num_key_value_heads", 1, MAX_SIZE) if has_number else None
    if len({head_size for head_size, _ in found.values()}) > 1:
        raise fields.error("per_layer_config", "the same head_dim in all layers without a window")
    return found


def _read_experts(fields: Fields, mlp: MLPOptions) -> ExpertsOptions | None:
    if not fields.boolean("enable_moe_block", False):
        return None
    number = fields.integer("num_experts", 1, MAX_EXPERTS)
    return ExpertsOptions(
        num_experts=number,
        top_k=fields.integer("top_k_experts", 1, number),
        expert=replace(mlp, intermediate_size=fields.integer("moe_intermediate_size", 1, MAX_SIZE)),
        norm_topk_prob=True,
        input_norm=True,
        expert_scales=True,
        stack="halves",
    )


def _read_attention(fields: Fields) -> AttentionOptions:
    return read_attention(fields, scale=fields.positive("query_pre_attn_scalar", 256) ** -0.5)
