"""Mixtral (Jiang et al. 2024, https://arxiv.org/abs/2401.04088): Llama with experts, two of eight for each token."""

from quire_engine.models.experts_options import MAX_EXPERTS, ExpertsOptions
from quire_engine.models.fields import MAX_SIZE, Fields
from quire_engine.models.options import DecoderOptions
from quire_engine.models.windows import read_equal_windows

__all__ = ["read_options"]

NAMES = (
    (".block_sparse_moe.", ".mlp."),
    (".w1.", ".gate_proj."),
    (".w2.", ".down_proj."),
    (".w3.", ".up_proj."),
)


def read_options(fields: Fields) -> DecoderOptions:
    """Read the options of the layers from `config.json`.

    Raises:
        CheckpointError: it describes a model that cannot be served.
    """
    num_experts = fields.integer("num_local_experts", 1, MAX_EXPERTS, 8)
    experts = ExpertsOptions(
        num_experts=num_experts,
        top_k=fields.integer("num_experts_per_tok", 1, num_experts, 2),
        intermediate_size=fields.integer("intermediate_size", 1, MAX_SIZE),
        norm_topk_prob=True,
    )
    return DecoderOptions(experts=experts, renamed=NAMES, windows=read_equal_windows(fields, None))
