"""RecurrentGemma (https://arxiv.org/abs/2404.07839, section 2): Griffin (https://arxiv.org/abs/2402.19427), of whose
layers some are recurrences and some attend to a window."""

import math
from collections.abc import Mapping
from typing import Any

from quire_engine.models.checkpoints.fields import MAX_POSITIONS, MAX_SIZE, Fields
from quire_engine.models.families.reading import ACTIVATIONS, read_num_layers, read_rope
from quire_engine.models.options import (
    AttentionOptions,
    LayerOptions,
    MLPOptions,
    ModelOptions,
    NormOptions,
    RgLruOptions,
)

RECURRENT, ATTENTION = "recurrent", "attention"
"""In `block_types`."""
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "recurrent_gemma": {
        "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "partial_rotary_factor": 0.5,
        "tie_word_embeddings": True,
    }
}  # fmt: skip
"""The files say nothing of the context: it is that of training (table 1)."""
NORMS = NormOptions(before_attention="temporal_pre_norm", before_mlp="channel_pre_norm", offset=1.0, is_float32=True)
NAMES = (
    *((f".temporal_block.{name}_proj.", f".self_attn.{name}_proj.") for name in "qkvo"),
    *((f".temporal_block.rg_lru.{gate}_gate_{kind}", f".mixer.{gate}_gate.{kind}")
      for gate in ("input", "recurrent") for kind in ("weight", "bias")),
    (".temporal_block.rg_lru.recurrent_param", ".mixer.recurrent_param.weight"),
    (".temporal_block.", ".mixer."),
    (".mlp_block.", ".mlp."),
    ("model.final_norm.", "model.norm."),
)  # fmt: skip


def recurrent_gemma(fields: Fields) -> ModelOptions:
    hidden_size, num_heads = (fields.integer(name, 1, MAX_SIZE) for name in ("hidden_size", "num_attention_heads"))
    activation = ACTIVATIONS[fields.choice("hidden_activation", tuple(ACTIVATIONS), "gelu_pytorch_tanh")]
    width = fields.integer("lru_width", 1, MAX_SIZE, hidden_size)
    if width % num_heads:
        raise fields.error("num_attention_heads", f"a divisor of lru_width={width}")
    state = RgLruOptions(
        width=width, num_heads=num_heads, conv_size=fields.integer("conv1d_width", 2, MAX_SIZE, 4),
        activation=activation,
    )  # fmt: skip
    attention = AttentionOptions(
        rope=read_rope(fields), window=fields.integer("attention_window_size", 1, MAX_POSITIONS, 2048),
        qkv_bias=fields.boolean("attention_bias", False), o_bias=True,
    )  # fmt: skip
    # Half of the size in the file is the gate's.
    mlp = MLPOptions(
        intermediate_size=fields.integer("intermediate_size", 2, MAX_SIZE) // 2, activation=activation, bias=True
    )
    layers = {RECURRENT: LayerOptions(None, mlp, state), ATTENTION: LayerOptions(attention, mlp)}
    kinds = fields.values.get("block_types") or [RECURRENT, RECURRENT, ATTENTION]
    if not isinstance(kinds, list) or not all(kind in (RECURRENT, ATTENTION) for kind in kinds):
        raise fields.error("block_types", f"a list of {RECURRENT} and {ATTENTION}")
    return ModelOptions(
        layers=tuple(layers[kinds[number % len(kinds)]] for number in range(read_num_layers(fields))),
        norms=NORMS,
        embedding_scale=_to_bfloat16(hidden_size**0.5),  # in any dtype
        logits_soft_cap=fields.positive("logits_soft_cap", 30.0),
        renamed=NAMES,
    )


def _to_bfloat16(number: float) -> float:
    """The nearest number with a mantissa of 8 bits."""
    mantissa, exponent = math.frexp(number)
    return math.ldexp(round(mantissa * 256), exponent - 8)
