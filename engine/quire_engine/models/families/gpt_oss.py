"""gpt-oss (https://arxiv.org/abs/2508.10925): in every layer experts with biases, and with a gate that is cut off; in
every other one a window; and beside the scores of each head a learned logit, which takes weight from them."""

from quire_engine.models.experts_options import MAX_EXPERTS, ExpertsOptions
from quire_engine.models.fields import MAX_SIZE, Fields
from quire_engine.models.options import DecoderOptions
from quire_engine.models.windows import read_window, read_windows

__all__ = ["DEFAULTS", "read_options"]

DEFAULTS = {
    "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "max_position_embeddings": 131072, "num_key_value_heads": 8,
}  # fmt: skip
NAMES = ((".self_attn.sinks", ".self_attn.sinks.weight"), (".mlp.router.", ".mlp.gate."))


def read_options(fields: Fields) -> DecoderOptions:
    """Read the options of the layers from `config.json`.

    Raises:
        CheckpointError: it describes a model that cannot be served.
    """
    for name, value in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if fields.positive(name, value) != value:
            raise fields.error(name, str(value))
    if not any(fields.inner(name).values for name in ("rope_scaling", "rope_parameters")):
        raise fields.error("rope_scaling", "given: no two versions of the model have the same where it is not")
    num_experts = fields.integer("num_local_experts", 1, MAX_EXPERTS, 128)
    bias = fields.boolean("attention_bias", True)
    return DecoderOptions(
        qkv_bias=bias,
        o_bias=bias,
        attention_sinks=True,
        float32_norms=True,
        activation="swigluoai",
        default_head_size=64,
        windows=read_windows(fields, read_window(fields, 128), lambda i: i % 2 == 0),
        experts=ExpertsOptions(
            num_experts=num_experts,
            top_k=fields.integer("num_experts_per_tok", 1, num_experts, min(4, num_experts)),
            intermediate_size=fields.integer("intermediate_size", 1, MAX_SIZE),
            norm_topk_prob=True,
            has_bias=True,
            are_stacked=True,
        ),
        renamed=NAMES,
    )
