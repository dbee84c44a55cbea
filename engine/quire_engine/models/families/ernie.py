"""ERNIE 4.5 (https://ernie.baidu.com/blog/publication/ERNIE_Technical_Report.pdf, section 2): features that are rotated
together lie side by side, and one field says whether linear layers have biases."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire_engine.models.checkpoints.fields import MAX_EXPERTS, MAX_LAYERS, MAX_SIZE, Fields
from quire_engine.models.families.reading import make_layers, read_experts, read_mlp, read_num_layers, read_rope
from quire_engine.models.options import AttentionOptions, GroupedRouting, ModelOptions

COMMON = {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "max_position_embeddings": 131072, "tie_word_embeddings": True}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "ernie4_5": {**COMMON, "num_key_value_heads": 2, "head_dim": 128},
    "ernie4_5_moe": {**COMMON, "num_key_value_heads": 4},
}
NAMES = (
    (".mlp.shared_experts.", ".mlp.shared_expert."),
    (".mlp.gate.moe_statics.", ".mlp.moe_statics."),
    (".moe_statics.e_score_correction_bias", ".choice_bias.weight"),
)


def ernie4_5(fields: Fields) -> ModelOptions:
    bias = fields.boolean("use_bias", False)
    attention = AttentionOptions(rope=read_rope(fields), qkv_bias=bias, o_bias=bias, interleaved=True)
    return ModelOptions(layers=make_layers(fields, attention, read_mlp(fields, bias=bias)))


def ernie4_5_moe(fields: Fields) -> ModelOptions:
    """The mixture of experts (section 2.2): a softmax scores them, and a bias balances them, as in DeepSeek-V3. The
    heads of multi-token prediction are not computed."""
    if fields.boolean("use_bias", False):
        raise fields.error("use_bias", "false")
    mlp, size = read_mlp(fields), fields.integer("moe_intermediate_size", 1, MAX_SIZE, 1536)
    shared = fields.integer("moe_num_shared_experts", 0, MAX_EXPERTS, 2)
    experts = read_experts(
        fields,
        64,
        6,
        name="moe_num_experts",
        top_k_name="moe_k",
        expert=replace(mlp, intermediate_size=size),
        norm_topk_prob=True,
        shared=replace(mlp, intermediate_size=shared * size) if shared else None,
        shared_has_gate=False,
        grouped=GroupedRouting(num_groups=1, top_groups=1, scoring="softmax", has_bias=True, scale=1.0),
    )
    first = fields.integer("moe_layer_start_index", 0, MAX_LAYERS, 1)
    last = fields.integer("moe_layer_end_index", -1, MAX_LAYERS, -1)
    interval, num_layers = fields.integer("moe_layer_interval", 1, MAX_LAYERS, 1), read_num_layers(fields)
    last = num_layers - 1 if last == -1 else last
    mlps = [experts if first <= i <= last and (i + 1) % interval == 0 else mlp for i in range(num_layers)]
    attention = AttentionOptions(rope=read_rope(fields), interleaved=True)
    return ModelOptions(layers=make_layers(fields, attention, mlps), renamed=NAMES, skipped=("mtp_",))
