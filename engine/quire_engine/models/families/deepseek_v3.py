"""DeepSeek-V3 and R1 (https://arxiv.org/abs/2412.19437, section 2.1): as DeepSeek-V2, but experts are scored by
sigmoids, and a bias balances them. The extra layers of multi-token prediction (section 2.2) are not computed."""

from quire_engine.models.families.deepseek_v2 import DEFAULTS, NAMES, read_experts, read_latent, read_mlps
from quire_engine.models.fields import MAX_LAYERS, Fields
from quire_engine.models.options import MAX_EXPERTS, GroupedRouting, LayerOptions, ModelOptions, TensorNames, read_mlp

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
    mlp = read_mlp(fields)
    experts = read_experts(
        fields,
        grouped,
        mlp.activation,
        num_experts=256,
        num_shared=1,
        intermediate_size=2048,
        top_k=8,
        norm_topk_prob=fields.boolean("norm_topk_prob", True),
    )
    layers = (LayerOptions(latent, one) for one in read_mlps(fields, mlp, experts, first_dense=3))
    num_extra_layers = fields.integer("num_nextn_predict_layers", 0, MAX_LAYERS, 1)
    return ModelOptions(
        layers=tuple(layers), tensors=TensorNames(renamed=NAMES, num_extra_layers=num_extra_layers)
    )  # fmt: skip
