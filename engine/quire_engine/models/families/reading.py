"""Readers of the parts of `config.json` that families share. Each raises CheckpointError if a field is wrong."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from quire_engine.errors import CheckpointError
from quire_engine.models.checkpoints.fields import MAX_EXPERTS, MAX_LAYERS, MAX_POSITIONS, MAX_SIZE, Fields
from quire_engine.models.options import AttentionOptions, ExpertsOptions, LayerOptions, MLPOptions, RopeConfig

ACTIVATIONS = {
    "silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu", "relu2": "relu2",
}  # fmt: skip
"""Names in `config.json` → those of `quire_kernels`."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic", "longrope", "proportional")
FULL, SLIDING = "full_attention", "sliding_attention"
"""In `layer_types`."""


def read_num_layers(fields: Fields) -> int:
    """The number of layers."""
    return fields.integer("num_hidden_layers", 1, MAX_LAYERS)


def read_max_position_embeddings(fields: Fields) -> int:
    """The length of the longest sequences that the model was made for."""
    return fields.integer("max_position_embeddings", 1, MAX_POSITIONS, 2048)


def read_head_size(fields: Fields) -> int:
    """The size of queries and keys: `head_dim`, or the heads' share of `hidden_size`. It must be even."""
    hidden_size, num_heads = (fields.integer(name, 1, MAX_SIZE) for name in ("hidden_size", "num_attention_heads"))
    head_size = fields.integer("head_dim", 2, MAX_SIZE, hidden_size // num_heads)
    if head_size < 2 or head_size % 2:
        raise CheckpointError(f"{fields.path}: the head size is {head_size}; it must be even")
    return head_size


def read_attention(fields: Fields, *, bias: bool = False, **options: Any) -> AttentionOptions:
    """Grouped-query attention with `attention_bias`.

    Args:
        fields: of `config.json`.
        bias: the default of that field.
        options: the other options of the attention.
    """
    bias = fields.boolean("attention_bias", bias)
    return AttentionOptions(rope=read_rope(fields), qkv_bias=bias, o_bias=bias, **options)


def read_mlp(
    fields: Fields,
    name: str = "hidden_act",
    default: str = "silu",
    *,
    bias: bool | None = False,
    is_gated: bool = True,
) -> MLPOptions:
    """The feed-forward of most families.

    Args:
        fields: of `config.json`.
        name: of the field with the activation, one of `ACTIVATIONS`.
        default: of that field.
        bias: whether its linear layers have biases; None: the field `mlp_bias` says so.
        is_gated: whether there is a gate, and the activation is the gate's.
    """
    bias = fields.boolean("mlp_bias", False) if bias is None else bias
    activation = ACTIVATIONS[fields.choice(name, tuple(ACTIVATIONS), default)]
    size = fields.integer("intermediate_size", 1, MAX_SIZE)
    return MLPOptions(intermediate_size=size, activation=activation, bias=bias, is_gated=is_gated)


def read_experts(
    fields: Fields,
    number: int,
    top_k: int,
    *,
    name: str = "num_experts",
    top_k_name: str = "num_experts_per_tok",
    **options: Any,
) -> ExpertsOptions:
    """Experts.

    Args:
        fields: of `config.json`.
        number: the default of the field `name`.
        top_k: the default of the field `top_k_name`.
        name: the field with the number of experts.
        top_k_name: the field with the number of each token's experts.
        options: the other options of the experts.
    """
    number = fields.integer(name, 1, MAX_EXPERTS, number)
    top_k = fields.integer(top_k_name, 1, number, min(top_k, number))
    return ExpertsOptions(num_experts=number, top_k=top_k, **options)


def make_layers(
    fields: Fields,
    attention: AttentionOptions,
    mlps: MLPOptions | ExpertsOptions | Sequence[MLPOptions | ExpertsOptions],
    windows: Sequence[int | None] | None = None,
    local_rope: RopeConfig | None = None,
) -> tuple[LayerOptions, ...]:
    """Layers that differ in their windows and feed-forwards alone.

    Args:
        fields: of `config.json`.
        attention: of all layers.
        mlps: of all layers, or one for each.
        windows: one for each layer; None: the attention's own.
        local_rope: the rotation of layers with a window; None: that of the others.
    """
    num_layers = read_num_layers(fields)
    each = [mlps] * num_layers if isinstance(mlps, MLPOptions | ExpertsOptions) else mlps
    windows = [attention.window] * num_layers if windows is None else windows
    by_window = {window: dataclasses.replace(attention, window=window) for window in windows}
    if local_rope is not None:
        by_window = {
            window: own if window is None else dataclasses.replace(own, rope=local_rope)
            for window, own in by_window.items()
        }
    return tuple(LayerOptions(by_window[window], mlp) for window, mlp in zip(windows, each, strict=True))


def without_rope(
    layers: Sequence[LayerOptions], is_without: Callable[[AttentionOptions], bool]
) -> tuple[LayerOptions, ...]:
    """The same layers, of which some do not rotate queries and keys (Kazemnejad et al. 2023,
    https://arxiv.org/abs/2305.19466)."""
    changed = []
    for layer in layers:
        attention = layer.attention
        if isinstance(attention, AttentionOptions) and is_without(attention):
            layer = dataclasses.replace(layer, attention=dataclasses.replace(attention, rope=None))
        changed.append(layer)
    return tuple(changed)


def read_layer_types(
    fields: Fields, kinds: tuple[str, ...], default: Callable[[int], str], name: str = "layer_types"
) -> list[str]:
    """The kind of each layer, from the field of this name.

    Args:
        fields: of `config.json`.
        kinds: the names of all kinds.
        default: the kind of a layer, by its number, if the field is missing.
        name: the field's.
    """
    num_layers, types = read_num_layers(fields), fields.values.get(name)
    if types is None:
        return [default(number) for number in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or not all(one in kinds for one in types):
        raise fields.error(name, f"{' or '.join(kinds)} for each of {num_layers} layers")
    return types


# -- Sliding windows (Beltagy et al. 2020, https://arxiv.org/abs/2004.05150) -------------------------------------------


def read_window(fields: Fields, default: int | None) -> int | None:
    """How many of its last keys each row sees at most, in layers with a window; None if no layer has one. The default
    is that of a missing field, not of null."""
    if "sliding_window" not in fields.values:
        return default
    return None if fields.values["sliding_window"] is None else fields.integer("sliding_window", 1, MAX_POSITIONS)


def read_used_window(fields: Fields, default: int | None) -> int | None:
    """`read_window` if the field `use_sliding_window` is true; else None."""
    return read_window(fields, default) if fields.boolean("use_sliding_window", False) else None


def read_windows(fields: Fields, window: int | None, is_sliding: Callable[[int], bool]) -> tuple[int | None, ...]:
    """The window of each layer; None: it sees all keys.

    Args:
        fields: of `config.json`.
        window: the size.
        is_sliding: whether a layer has a window, by its number, if the field `layer_types` is missing.
    """
    types = read_layer_types(
        fields, (FULL, SLIDING), lambda i: SLIDING if window is not None and is_sliding(i) else FULL
    )
    if window is None and SLIDING in types:
        raise fields.error("sliding_window", f"above 0 and in use, as layer_types names {SLIDING}")
    return tuple(window if one == SLIDING else None for one in types)


def read_window_rope(fields: Fields, name: str, default: float) -> RopeConfig:
    """The rotation of layers with a window, in families that have two; it is not scaled.

    Args:
        fields: of `config.json`.
        name: of its base in files without `rope_parameters` of its own.
        default: the base, if both are missing.
    """
    rope = fields.inner("rope_parameters").inner(SLIDING)
    rope.choice("rope_type", ("default",), "default")
    return RopeConfig(rope_theta=rope.positive("rope_theta", fields.positive(name, default)))


# -- Rotary embedding --------------------------------------------------------------------------------------------------


def read_rope(fields: Fields, head_size: int | None = None) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    Args:
        fields: of `config.json`.
        head_size: how many features of a head can be rotated; None: all.
    """
    head_size = read_head_size(fields) if head_size is None else head_size
    max_position_embeddings = read_max_position_embeddings(fields)
    scaling, parameters = fields.inner("rope_scaling"), fields.inner("rope_parameters")
    if "full_attention" in parameters.values:  # then layers with a window have others
        parameters = parameters.inner("full_attention")
    rope = parameters if parameters.values else scaling
    rope = rope.with_values({**scaling.values, **parameters.values})
    rope_type = _rope_type(rope)
    default = RopeConfig()
    original = _original_length(rope_type, rope, fields, max_position_embeddings)
    # Those who extend a context often give its old and its new length, and no factor.
    by_length = max_position_embeddings / original if rope_type in ("yarn", "longrope") else default.factor
    config = RopeConfig(
        rope_type=rope_type,
        rope_theta=rope.positive("rope_theta", fields.positive("rope_theta", default.rope_theta)),
        partial_rotary_factor=rope.positive("partial_rotary_factor", fields.positive("partial_rotary_factor", 1.0)),
        factor=(factor := rope.positive("factor", by_length)),
        low_freq_factor=rope.positive("low_freq_factor", default.low_freq_factor),
        high_freq_factor=rope.positive("high_freq_factor", default.high_freq_factor),
        original_max_position_embeddings=original,
        attention_factor=rope.positive("attention_factor", _attention_factor(rope_type, rope, factor, original)),
        beta_fast=rope.positive("beta_fast", default.beta_fast),
        beta_slow=rope.positive("beta_slow", default.beta_slow),
        truncate=rope.boolean("truncate", default.truncate),
        llama_4_scaling_beta=rope.positive_or_null("llama_4_scaling_beta", None),
    )
    # A factor of 1e308 makes infinitely many.
    rotary_size = config.rotary_size(head_size) if config.partial_rotary_factor <= head_size else 0
    if not 2 <= rotary_size <= head_size or rotary_size % 2:
        source = fields if rope.values.get("partial_rotary_factor") is None else rope
        raise source.error("partial_rotary_factor", f"an even number of features of {head_size}, divided by these")
    if config.llama_4_scaling_beta is not None and rotary_size != head_size:
        raise rope.error("llama_4_scaling_beta", "left out where a part of each head is not rotated")
    if rope_type == "llama3" and config.high_freq_factor < config.low_freq_factor:
        raise rope.error("high_freq_factor", f"at least low_freq_factor={config.low_freq_factor}")
    if rope_type != "longrope":
        return config
    short, long = (rope.positive_numbers(name, rotary_size // 2) for name in ("short_factor", "long_factor"))
    return dataclasses.replace(config, short_factor=short, long_factor=long)


def read_mrope(fields: Fields, default: tuple[int, int, int], *, interleaved: bool = False) -> RopeConfig:
    """`read_rope` with positions of three dimensions; the default is that of `mrope_section`."""
    rope = fields.inner("rope_parameters")
    rope = rope if rope.values else fields.inner("rope_scaling")
    section, num_pairs = default, read_rope(fields).rotary_size(read_head_size(fields)) // 2
    if rope.values.get("mrope_section") is not None:
        one, two, three = map(int, rope.positive_numbers("mrope_section", 3))
        section = one, two, three
        if not interleaved and sum(section) != num_pairs:
            raise rope.error("mrope_section", f"three numbers with the sum {num_pairs}, half of the rotated features")
    return dataclasses.replace(read_rope(fields), mrope_section=section, mrope_interleaved=interleaved)


def _rope_type(rope: Fields) -> str:
    name = "type" if rope.values.get("rope_type") is None else "rope_type"
    if rope.values.get(name) == "mrope" and rope.values.get("mrope_section") is not None:  # in older files
        return "default"
    if rope.values.get(name) in ("su", "yarn") and rope.values.get("long_factor") is not None:
        return "longrope"  # what it was called at first
    return rope.choice(name, ROPE_TYPES, "default")


def _original_length(rope_type: str, rope: Fields, fields: Fields, max_position_embeddings: int) -> int:
    name = "original_max_position_embeddings"
    if rope_type == "dynamic":
        return max_position_embeddings
    is_outside = rope_type != "default" and fields.values.get(name) is not None
    return (fields if is_outside else rope).integer(name, 1, MAX_POSITIONS, max_position_embeddings)


def _attention_factor(rope_type: str, rope: Fields, factor: float, original: int) -> float:
    """The default: of YaRN (Peng et al. 2023, https://arxiv.org/abs/2309.00071, equation 22), or of LongRoPE (Ding et
    al. 2024, https://arxiv.org/abs/2402.13753, as its authors publish it)."""
    if rope_type == "longrope":
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    if rope_type != "yarn":
        return 1.0

    def scale(multiplier: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0

    if rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        return scale(rope.positive("mscale")) / scale(rope.positive("mscale_all_dim"))
    return scale(1.0)
