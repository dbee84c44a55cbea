"""ExpertsOptions: the mixture of experts in a family's layers. Does not use torch."""

from dataclasses import dataclass

from quire_engine.models.fields import MAX_SIZE, Fields

__all__ = ["MAX_EXPERTS", "ExpertsOptions", "GroupedRouting", "read_qwen_experts"]

MAX_EXPERTS = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedRouting:
    """How DeepSeek's models choose experts; see `quire_kernels.grouped_topk`."""

    num_groups: int
    top_groups: int
    scoring: str
    has_bias: bool
    scale: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsOptions:
    """The same for all layers that have experts; see `models/experts.py`."""

    num_experts: int
    top_k: int
    """Experts of each token."""
    intermediate_size: int
    """Of one expert."""
    norm_topk_prob: bool
    """The weights of a token's experts add up to 1; else they are the softmax over all experts."""
    shared_intermediate_size: int | None = None
    """Of the expert that all tokens share; unset: there is none."""
    shared_has_gate: bool = True
    """The output of that expert is multiplied by a number of each token's own."""
    has_bias: bool = False
    """The router and the linear layers of the experts have biases; not those of the shared one."""
    are_stacked: bool = False
    """In the checkpoint the experts of a layer are one tensor; see `models/stacked_experts.py`."""
    grouped: GroupedRouting | None = None
    """Experts are chosen in another way than by a softmax over all of them."""
    decoder_sparse_step: int = 1
    """Every so many layers have experts, the others are dense."""
    mlp_only_layers: tuple[int, ...] = ()
    """Layers that are dense all the same."""

    def are_in(self, layer: int) -> bool:
        """Whether a layer has experts, by its number in the checkpoint."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


def read_qwen_experts(
    fields: Fields, *, num_experts: int, top_k: int, intermediate_size: int, shared_intermediate_size: int | None = None
) -> ExpertsOptions:
    """Read the experts of one of Qwen's mixtures from `config.json`.

    Args:
        fields: of `config.json`.
        num_experts: what it is where nothing is said, as all that follow.
        top_k: `num_experts_per_tok`.
        intermediate_size: `moe_intermediate_size`.
        shared_intermediate_size: `shared_expert_intermediate_size`; None: there is no shared expert.

    Raises:
        CheckpointError: a field has a wrong value.
    """
    # transformers 5 writes Qwen3's number under the name that Mixtral has for it.
    name = "num_local_experts" if fields.values.get("num_experts") is None else "num_experts"
    number = fields.integer(name, 1, MAX_EXPERTS, num_experts)
    dense = fields.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int and layer >= 0 for layer in dense):
        raise fields.error("mlp_only_layers", "a list of layers' numbers")
    shared = shared_intermediate_size
    if shared is not None:
        shared = fields.integer("shared_expert_intermediate_size", 1, MAX_SIZE, shared)
    return ExpertsOptions(
        num_experts=number,
        top_k=fields.integer("num_experts_per_tok", 1, number, min(top_k, number)),
        intermediate_size=fields.integer("moe_intermediate_size", 1, MAX_SIZE, intermediate_size),
        norm_topk_prob=fields.boolean("norm_topk_prob", False),
        shared_intermediate_size=shared,
        decoder_sparse_step=fields.integer("decoder_sparse_step", 1, MAX_SIZE, 1),
        mlp_only_layers=tuple(dense),
    )
