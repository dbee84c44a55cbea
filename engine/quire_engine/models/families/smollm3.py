"""SmolLM3 (https://huggingface.co/blog/smollm3): Llama, with every fourth layer without positions."""

from dataclasses import replace

from quire_engine.models.fields import MAX_LAYERS, Fields
from quire_engine.models.options import AttentionOptions, LayerOptions, ModelOptions, read_mlp
from quire_engine.models.rope_config import read_rope
from quire_engine.models.windows import read_window, read_windows

DEFAULTS = {"rope_theta": 2e6, "max_position_embeddings": 32768, "num_key_value_heads": 4, "tie_word_embeddings": True}


def read_options(fields: Fields) -> ModelOptions:
    """Read the model from `config.json`."""
    bias, without_rope = fields.boolean("attention_bias", False), _layers_without_rope(fields)
    rope, mlp = read_rope(fields), read_mlp(fields, bias=fields.boolean("mlp_bias", False))
    window = read_window(fields, None) if fields.boolean("use_sliding_window", False) else None
    windows = read_windows(fields, window, lambda i: i in without_rope)
    attention = AttentionOptions(rope=rope, qkv_bias=bias, o_bias=bias)
    layers = [
        replace(attention, window=window, rope=None if i in without_rope else rope) for i, window in enumerate(windows)
    ]
    return ModelOptions(layers=tuple(LayerOptions(one, mlp) for one in layers))


def _layers_without_rope(fields: Fields) -> frozenset[int]:
    num_layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    flags = fields.values.get("no_rope_layers")
    if flags is None:
        interval = fields.integer("no_rope_layer_interval", 1, MAX_LAYERS, 4)
        return frozenset(range(interval - 1, num_layers, interval))
    if not isinstance(flags, list) or len(flags) < num_layers or not all(flag in (0, 1) for flag in flags):
        raise fields.error("no_rope_layers", f"a list of {num_layers} numbers, 0 for a layer without RoPE, else 1")
    return frozenset(i for i, flag in enumerate(flags[:num_layers]) if not flag)
