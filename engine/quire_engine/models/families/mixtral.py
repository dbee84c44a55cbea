"""Mixtral (Jiang et al. 2024, https://arxiv.org/abs/2401.04088): Llama with experts, two of eight for each token."""

from quire_engine.models.fields import MAX_EXPERTS, Fields
from quire_engine.models.options import AttentionOptions, ExpertsOptions, ModelOptions, make_layers, read_mlp
from quire_engine.models.rope_config import read_rope
from quire_engine.models.windows import read_window

NAMES = ((".block_sparse_moe.", ".mlp."), (".w1.", ".gate_proj."), (".w2.", ".down_proj."), (".w3.", ".up_proj."))


def read_options(fields: Fields) -> ModelOptions:
    """Read the model from `config.json`."""
    num_experts = fields.integer("num_local_experts", 1, MAX_EXPERTS, 8)
    experts = ExpertsOptions(
        num_experts=num_experts,
        top_k=fields.integer("num_experts_per_tok", 1, num_experts, 2),
        expert=read_mlp(fields),
        norm_topk_prob=True,
    )
    attention = AttentionOptions(rope=read_rope(fields), window=read_window(fields, None))
    return ModelOptions(layers=make_layers(fields, attention, experts), renamed=NAMES)
