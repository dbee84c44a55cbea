"""LG's EXAONE."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire_engine.models.checkpoints.fields import MAX_LAYERS, Fields
from quire_engine.models.families.deepseek import NAMES, read_balanced, read_mlps
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
from quire_engine.models.options import ExpertsOptions, LayerOptions, MLPOptions, ModelOptions

ALIASES: Mapping[str, Mapping[str, str]] = {
    "exaone": {
        "num_layers": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps", "activation_function": "hidden_act",
    },
    "exaone_moe": {
        "num_experts": "n_routed_experts", "num_local_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
    },
}  # fmt: skip
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "exaone": {
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 4096, "num_key_value_heads": 8,
    },
    "exaone4": {"rms_norm_eps": 1e-5, "num_key_value_heads": 32},
    "exaone_moe": {"rms_norm_eps": 1e-5, "num_key_value_heads": 32},
}  # fmt: skip
EXAONE_NAMES = (
    ("transformer.wte", "embed_tokens"), ("transformer.h.", "layers."), ("transformer.ln_f", "norm"),
    (".attn.attention", ".self_attn"), (".out_proj", ".o_proj"), (".ln_1", ".input_layernorm"),
    (".ln_2", ".post_attention_layernorm"), (".c_fc_0", ".gate_proj"), (".c_fc_1", ".up_proj"),
    (".c_proj", ".down_proj"),
)  # fmt: skip
MOE_NAMES = ((".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"), *NAMES)


def exaone(fields: Fields) -> ModelOptions:
    """EXAONE 3, 3.5 and Deep (https://arxiv.org/abs/2412.04862): Llama, with other names."""
    return replace(llama(fields), renamed=EXAONE_NAMES)


def exaone4(fields: Fields) -> ModelOptions:
    """EXAONE 4 (https://arxiv.org/abs/2507.11407, section 2): norms of outputs instead of inputs, as in OLMo 2, normed
    heads, and where some layers have a window, no rotation in the others."""
    layers = _make_layers(fields, read_mlp(fields))
    return ModelOptions(layers=layers, norms=replace(OLMO_NORMS, is_float32=False))


def exaone_moe(fields: Fields) -> ModelOptions:
    """K-EXAONE (https://huggingface.co/LGAI-EXAONE/K-EXAONE-236B-A23B): the attention of EXAONE 4 and the experts of
    DeepSeek-V3, with the norms of Llama. Layers of multi-token prediction are not computed."""
    mlps = read_mlps(
        fields, read_mlp(fields), read_balanced(fields, scale=2.5), num_experts=64, num_shared=1,
        intermediate_size=1024, first_dense=1, top_k=8, norm_topk_prob=fields.boolean("norm_topk_prob", True),
    )  # fmt: skip
    return ModelOptions(layers=_make_layers(fields, mlps), renamed=MOE_NAMES, skipped=("mtp.",))


def _make_layers(fields: Fields, mlps: MLPOptions | Sequence[MLPOptions | ExpertsOptions]) -> tuple[LayerOptions, ...]:
    window, attention = read_window(fields, 4096), read_attention(fields, head_norms=True)
    layers = make_layers(fields, attention, mlps, read_windows(fields, window, _sliding_pattern(fields)))
    return layers if window is None else without_rope(layers, lambda attention: attention.window is None)


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
