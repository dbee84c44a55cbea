"""RopeConfig: the rotary embedding as `config.json` describes it. Does not use torch."""

import dataclasses
import math
from dataclasses import dataclass

from quire_engine.errors import CheckpointError
from quire_engine.models.fields import MAX_POSITIONS, MAX_SIZE, Fields

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary embedding parameters, with the names of `config.json`."""

    rope_type: str = "default"
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    """The part of each head, from its first feature on, that is rotated."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    """Length of the sequences before the context was extended."""
    attention_factor: float = 1.0
    """Multiplies cosines and sines, and so the products of queries and keys by its square."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """The bounds of YaRN's ramp are rounded to whole pairs of features."""
    llama_4_scaling_beta: float | None = None
    """Queries, and not keys, are multiplied by `1 + beta * log(1 + position // original_max_position_embeddings)`."""
    short_factor: tuple[float, ...] = ()
    """One for each pair of features, up to the original length; with `longrope`."""
    long_factor: tuple[float, ...] = ()
    """Likewise, for longer models."""

    def rotary_size(self, head_size: int) -> int:
        """How many features of a head are rotated."""
        return int(head_size * self.partial_rotary_factor)

    @property
    def extended_length(self) -> int:
        """The length up to which the factor extends the context, if it says so."""
        return int(self.original_max_position_embeddings * self.factor) if self.rope_type in ("yarn", "dynamic") else 0


def read_max_position_embeddings(fields: Fields) -> int:
    """The length of the longest sequences that the model was made for.

    Raises:
        CheckpointError: it is no integer above 0.
    """
    return fields.integer("max_position_embeddings", 1, MAX_POSITIONS, 2048)


def read_head_size(fields: Fields) -> int:
    """Of queries and keys: `head_dim`, or the heads' share of `hidden_size`.

    Raises:
        CheckpointError: a field has a wrong value, or the size is not even.
    """
    hidden_size, num_heads = (fields.integer(name, 1, MAX_SIZE) for name in ("hidden_size", "num_attention_heads"))
    head_size = fields.integer("head_dim", 2, MAX_SIZE, hidden_size // num_heads)
    if head_size < 2 or head_size % 2:
        raise CheckpointError(f"{fields.path}: the head size is {head_size}; it must be even")
    return head_size


def read_rope(fields: Fields, head_size: int | None = None) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    Args:
        fields: of `config.json`.
        head_size: how many features of a head can be rotated; None: all.

    Raises:
        CheckpointError: a field has a wrong value.
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
    rotary_size = config.rotary_size(head_size)
    if not 2 <= rotary_size <= head_size or rotary_size % 2:
        source = fields if rope.values.get("partial_rotary_factor") is None else rope
        raise source.error("partial_rotary_factor", f"an even number of features of {head_size}, divided by these")
    if config.llama_4_scaling_beta is not None and rotary_size != head_size:
        raise rope.error("llama_4_scaling_beta", "left out where a part of each head is not rotated")
    if rope_type == "llama3" and config.high_freq_factor <= config.low_freq_factor:
        raise rope.error("high_freq_factor", f"above low_freq_factor={config.low_freq_factor}")
    if rope_type != "longrope":
        return config
    short, long = (rope.positive_numbers(name, rotary_size // 2) for name in ("short_factor", "long_factor"))
    return dataclasses.replace(config, short_factor=short, long_factor=long)


def _rope_type(rope: Fields) -> str:
    name = "type" if rope.values.get("rope_type") is None else "rope_type"
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
