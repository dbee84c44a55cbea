"""gpt-oss (https://arxiv.org/abs/2508.10925): in every layer experts with biases, and with a gate that is cut off; in
every other one a window; and beside the scores of each head a learned logit, which takes weight from them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire_engine.models.checkpoints.fields import Fields
from quire_engine.models.families.reading import (
    make_layers,
    read_attention,
    read_experts,
    read_mlp,
    read_window,
    read_windows,
)
from quire_engine.models.options import PRE_NORMS, ModelOptions

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gpt_oss": {
        "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "max_position_embeddings": 131072, "num_key_value_heads": 8,
        "head_dim": 64,
    }
}  # fmt: skip
NAMES = ((".self_attn.sinks", ".self_attn.sinks.weight"), (".mlp.router.", ".mlp.gate."))


def gpt_oss(fields: Fields) -> ModelOptions:
    for name, value in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if fields.positive(name, value) != value:
            raise fields.error(name, str(value))
    if not any(fields.inner(name).values for name in ("rope_scaling", "rope_parameters")):
        raise fields.error("rope_scaling", "given: no two versions of the model have the same where it is not")
    attention = read_attention(fields, bias=True, sinks=True)
    expert = replace(read_mlp(fields, bias=True), activation="swigluoai")
    experts = read_experts(
        fields, 128, 4, name="num_local_experts", expert=expert, norm_topk_prob=True, stack="interleaved"
    )
    windows = read_windows(fields, read_window(fields, 128), lambda i: i % 2 == 0)
    return ModelOptions(
        layers=make_layers(fields, attention, experts, windows),
        norms=replace(PRE_NORMS, is_float32=True),
        renamed=NAMES,
    )
