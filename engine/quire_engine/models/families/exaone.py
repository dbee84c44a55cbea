"""LG's EXAONE."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from quire_engine.models.checkpoints.fields import MAX_LAYERS, Fields
from quire_engine.models.families.llama import OLMO_NORMS, llama
from quire_engine.models.families.reading import (
    make_layers,
    read_attention,
    read_mlp,
    read_num_layers,
    read_window,
    read_windows,
    without_rope,
)
from quire_engine.models.options import ModelOptions

ALIASES: Mapping[str, Mapping[str, str]] = {
    "exaone": {
        "num_layers": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps", "activation_function": "hidden_act",
    },
}  # fmt: skip
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "exaone": {
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 4096, "num_key_value_heads": 8,
    },
    "exaone4": {"rms_norm_eps": 1e-5, "num_key_value_heads": 32},
}  # fmt: skip
EXAONE_NAMES = (
    ("transformer.wte", "embed_tokens"), ("transformer.h.", "layers."), ("transformer.ln_f", "norm"),
    (".attn.attention", ".self_attn"), (".out_proj", ".o_proj"), (".ln_1", ".input_layernorm"),
    (".ln_2", ".post_attention_layernorm"), (".c_fc_0", ".gate_proj"), (".c_fc_1", ".up_proj"),
    (".c_proj", ".down_proj"),
)  # fmt: skip


def exaone(fields: Fields) -> ModelOptions:
    """EXAONE 3, 3.5 and Deep (https://arxiv.org/abs/2412.04862): Llama, with other names."""
    return replace(llama(fields), renamed=EXAONE_NAMES)


def exaone4(fields: Fields) -> ModelOptions:
    """EXAONE 4 (https://arxiv.org/abs/2507.11407, section 2): norms of outputs instead of inputs, as in OLMo 2, normed
    heads, and where some layers have a window, no rotation in the others."""
    window, attention = read_window(fields, 4096), read_attention(fields, head_norms=True)
    windows = read_windows(fields, window, _sliding_pattern(fields))
    layers = make_layers(fields, attention, read_mlp(fields), windows)
    if window is not None:
        layers = without_rope(layers, lambda layer: layer.attention.window is None)
    return ModelOptions(layers=layers, norms=replace(OLMO_NORMS, is_float32=False))


def _sliding_pattern(fields: Fields) -> Callable[[int], bool]:
    """Which layers have a window, by their numbers: all but every so many, or those with an L in a repeated word."""
    name, last = "sliding_window_pattern", read_num_layers(fields) - 1
    word = fields.values.get(name)
    if not isinstance(word, str):
        period = fields.integer(name, 1, MAX_LAYERS, 4)
        return lambda i: (i + 1) % period != 0
    if not word or set(word) - {"L", "G"}:
        raise fields.error(name, "a number, or a word of the letters L and G")
    return lambda i: word[i % len(word)] == "L" and i != last
