"""The table of rotary angles: RoPE (Su et al. 2021, https://arxiv.org/abs/2104.09864), and what extends it to contexts
longer than those of the training.

Keys stay in the cache as they were rotated, and prefixes of them are shared. So the angles of a position depend on
nothing but the model and its `max_model_len`. In their authors' code, `dynamic` and `longrope` stretch the angles by
the length of the sequence; here, for all sequences alike, by that of the longest one that the model is served with.
"""

import math
from collections.abc import Callable
from functools import cache

import torch

from quire_engine.models.options import RopeConfig

RopeTables = Callable[[RopeConfig | None, int], tuple[torch.Tensor, torch.Tensor]]
"""(rotation, or None for none; head size) → the table of the keys and that of the queries, which are mostly one."""


def rope_cos_sin(rope: RopeConfig, head_size: int, max_model_len: int) -> torch.Tensor:
    """The table that `quire_kernels.rope_and_cache` reads: [max_model_len, R] float32, cos of R/2 angles, then sin.
    Always computed on the CPU: a GPU's powers and quotients differ in their last bits, and positions of 100,000 and
    more multiply the difference."""
    with torch.device("cpu"):
        inv_freq = _inverse_frequencies(rope, rope.rotary_size(head_size), max_model_len)
        angles = torch.outer(torch.arange(max_model_len).float(), inv_freq)
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor
    return cos_sin.to(torch.get_default_device())


def rope_order(size: int, interleaved: bool) -> torch.Tensor:
    """[size] int64: features of the checkpoint in the order in which `quire_kernels.rope_and_cache` rotates them, those
    of one half with those of the other. In the checkpoint they are in this order, or lie side by side."""
    order = torch.arange(size, device="cpu")
    return order.view(-1, 2).t().flatten() if interleaved else order


def rope_dimensions(rope: RopeConfig, head_size: int) -> torch.Tensor:
    """[R] int64: by which dimension of its position, 0 to 2, each feature turns."""
    num_pairs = rope.rotary_size(head_size) // 2
    with torch.device("cpu"):
        if rope.mrope_interleaved:
            pairs = torch.zeros(num_pairs, dtype=torch.int64)
            for dimension in (1, 2):
                pairs[dimension : 3 * rope.mrope_section[dimension] : 3] = dimension
        else:
            pairs = torch.arange(3).repeat_interleave(torch.tensor(rope.mrope_section))[:num_pairs]
    return pairs.repeat(2).to(torch.get_default_device())


def rope_tables(max_model_len: int) -> RopeTables:
    """The tables of a model's layers, of which those that rotate alike share one; see `rope_cos_sin`."""

    @cache
    def tables(rope: RopeConfig | None, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        if rope is None:
            cos_sin = torch.empty(max_model_len, 0, dtype=torch.float32)
        else:
            cos_sin = rope_cos_sin(rope, head_size, max_model_len)
            if rope.llama_4_scaling_beta is not None:
                return cos_sin, _growing(rope, rope.llama_4_scaling_beta, cos_sin)
        return cos_sin, cos_sin

    return tables


def _growing(rope: RopeConfig, beta: float, cos_sin: torch.Tensor) -> torch.Tensor:
    """The table of queries that grow with their position (as in Llama 4; https://arxiv.org/abs/2501.19399)."""
    original = rope.original_max_position_embeddings
    first = int(rope.rope_type == "none")  # Llama 4 counts positions from 1
    if len(cos_sin) + first <= original:
        return cos_sin
    lengths = torch.arange(first, len(cos_sin) + first, device=cos_sin.device) // original
    return cos_sin * (1 + beta * torch.log1p(lengths.float())).unsqueeze(1)


def _inverse_frequencies(rope: RopeConfig, size: int, max_model_len: int) -> torch.Tensor:
    theta, original = rope.rope_theta, rope.original_max_position_embeddings
    if rope.rope_type == "dynamic" and max_model_len > original and size > 2:
        # NTK-aware: the slowest angle is interpolated, the fastest stays (Peng et al. 2023, section 3.3).
        theta *= (rope.factor * max_model_len / original - (rope.factor - 1)) ** (size / (size - 2))
    powers = theta ** (torch.arange(0, size, 2, dtype=torch.int64).float() / size)
    if rope.rope_type == "longrope":
        factors = rope.long_factor if max_model_len > original else rope.short_factor
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * powers)
    inv_freq = 1.0 / powers
    if rope.rope_type == "none":
        return torch.zeros_like(inv_freq)
    if rope.rope_type == "linear":
        return inv_freq / rope.factor
    if rope.rope_type == "proportional":  # the angles of a whole head, of which the slower ones are 0
        return (inv_freq / rope.factor).where(
            torch.arange(size // 2) < int(rope.partial_rotary_factor * size // 2), 0.0
        )
    if rope.rope_type == "llama3":
        return _llama3(rope, inv_freq)
    if rope.rope_type == "yarn":
        kept = _yarn_kept(rope, size)
        return 1.0 / (rope.factor * powers) * (1 - kept) + inv_freq * kept
    return inv_freq


def _llama3(rope: RopeConfig, inv_freq: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: wavelengths beyond the original context are stretched by `factor`, short ones stay the same, and
    between the two bounds the factor is interpolated."""
    wavelength = 2 * math.pi / inv_freq
    smooth = rope.original_max_position_embeddings / wavelength - rope.low_freq_factor
    smooth = (smooth / max(rope.high_freq_factor - rope.low_freq_factor, 1e-9)).clamp(0.0, 1.0)
    return (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq


def _yarn_kept(rope: RopeConfig, size: int) -> torch.Tensor:
    """How much of each frequency YaRN keeps (Peng et al. 2023, https://arxiv.org/abs/2309.00071, section 3.2).

    All, where it turns more than `beta_fast` times in the original context; nothing below `beta_slow`; a ramp between.
    """

    def pair_that_turns(times: float) -> float:
        turns = rope.original_max_position_embeddings / (times * 2 * math.pi)
        return size * math.log(turns) / (2 * math.log(rope.rope_theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = (torch.arange(size // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    return 1 - ramp.clamp(0, 1)
