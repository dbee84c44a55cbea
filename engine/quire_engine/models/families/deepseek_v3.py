"""DeepSeek-V3 and R1 (https://arxiv.org/abs/2412.19437, section 2.1): as DeepSeek-V2, but experts are scored by
sigmoids, and a bias balances them. The extra layers of multi-token prediction (section 2.2) are not computed."""

from quire_engine.models.families.deepseek_v2 import DEFAULTS, NAMES, read_latent, read_mlps
from quire_engine.models.fields import MAX_EXPERTS, MAX_LAYERS, Fields
from quire_engine.models.options import GroupedRouting, LayerOptions, ModelOptions, read_mlp

__all__ = ["DEFAULTS", "read_options"]


def read_options(fields: Fields) -> ModelOptions:
    """Read the model from `config.json`."""
    latent = read_latent(fields, interleaved=fields.boolean("rope_interleave", True))
    grouped = GroupedRouting(
        num_groups=fields.integer("n_group", 1, MAX_EXPERTS, 8),
        top_groups=fields.integer("topk_group", 1, MAX_EXPERTS, 4),
        scoring=fields.choice("scoring_func", ("sigmoid",), "sigmoid"),
        has_bias=fields.choice("topk_method", ("noaux_tc",), "noaux_tc") == "noaux_tc",
        scale=fields.positive("routed_scaling_factor", 2.5),
    )
    mlps = read_mlps(
        fields,
        read_mlp(fields),
        grouped,
        num_experts=256,
        num_shared=1,
        intermediate_size=2048,
        first_dense=3,
        top_k=8,
        norm_topk_prob=fields.boolean("norm_topk_prob", True),
    )
    return ModelOptions(
        layers=tuple(LayerOptions(latent, one) for one in mlps),
        renamed=NAMES,
        num_extra_layers=fields.integer("num_nextn_predict_layers", 0, MAX_LAYERS, 1),
    )
