"""A feed-forward of experts of which each token has a few (Shazeer et al. 2017, https://arxiv.org/abs/1701.06538)::

    gate ─ topk_softmax ─ routed_experts (each SwiGLU, and Σ weight · result) ─ one sum over the ranks
    shared_expert, for all tokens, times the sigmoid of shared_expert_gate if it has one, goes into the same sum

With several ranks, each has a slice of every expert's features, as of the shared expert's and of dense layers'. With
expert parallelism (GShard, Lepikhin et al. 2020, https://arxiv.org/abs/2006.16668, section 3) each has whole experts
instead. All ranks have all tokens, as their attention is cut into heads: nothing is sent, and experts that are
elsewhere add nothing to a rank's part of the sum::

    5 experts, 2 ranks     tensor parallel                  expert parallel
    rank 0                 0 1 2 3 4, the first halves      0 1 2
    rank 1                 0 1 2 3 4, the second halves     3 4
"""

from collections.abc import Sequence
from statistics import NormalDist

import torch
from quire_kernels import (
    ExpertsLora,
    ExpertsWeight,
    LoraTable,
    activate_and_mul,
    add_residual,
    gaussian_topk,
    grouped_topk,
    pack_experts,
    rms_norm,
    routed_experts,
    row_moments,
    scale_rows,
    topk_softmax,
    xielu,
)
from torch import nn

from quire_engine.distributed import ParallelState
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_engine.models.layers.parallel import ColumnParallel, Packable, RowParallel, StepAdapters, Weight
from quire_engine.models.options import ExpertsOptions, MLPOptions

ALONE = ParallelState()


def experts_of_rank(num_experts: int, parallel: ParallelState) -> Sequence[int]:
    """The ids of the experts that a rank has when the model is loaded; with expert parallelism the first ranks have the
    remainder. If experts move, the ranks' are every expert once, and then replicas of the first."""
    if not parallel.enable_expert_parallel:
        return range(num_experts)
    if parallel.num_redundant_experts is not None:
        each = (num_experts + parallel.num_redundant_experts) // parallel.tensor_parallel_size
        return [
            number % num_experts for number in range(each * parallel.tensor_rank, each * (parallel.tensor_rank + 1))
        ]
    rank = parallel.expert_rank
    each, left = divmod(num_experts, parallel.expert_parallel_size)
    first = rank * each + min(rank, left)
    return range(first, first + each + (rank < left))


class Router(ColumnParallel):
    """A small projection to numbers that decide much: float32 results, the same on every rank."""

    activation_bits = 32
    takes_adapters = False

    def __init__(self, in_features: int, name: str, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, {name: out_features}, bias, ALONE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out] float32."""
        return self.apply_linear(x, torch.float32)


class Expert(nn.Module):
    """The weights of a feed-forward whose output goes into a sum with others', before the ranks' sum."""

    def __init__(self, hidden_size: int, options: MLPOptions, parallel: ParallelState) -> None:
        super().__init__()
        size, bias, is_xielu = options.intermediate_size, options.bias, options.activation == "xielu"
        parts = {"gate_proj": size, "up_proj": size} if options.is_gated else {"up_proj": size}
        self.gate_up_proj = ColumnParallel(
            hidden_size, parts, bias, parallel, gated=options.is_gated and not options.sparsity,
            activation="silu" if is_xielu else options.activation, activates=not options.is_gated and not is_xielu,
        )  # fmt: skip
        self.alpha_p, self.alpha_n = (Weight(1, dtype=torch.float32) if is_xielu else None for _ in range(2))
        down_bias = bias if options.down_bias is None else options.down_bias
        self.down_proj = RowParallel(size, "down_proj", hidden_size, down_bias, parallel)

    def forward(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        """[T, E] -> [T, E], this rank's part."""
        out_TE: torch.Tensor = self.down_proj(self.gate_up_proj(hidden_TE), sums_ranks=False)
        return out_TE


class GatedMLP(Expert):
    """A feed-forward, such as SwiGLU, or without a gate."""

    def forward(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        """[T, E] -> [T, E]."""
        hidden_TI = self.gate_up_proj(hidden_TE)
        if self.alpha_p is not None and self.alpha_n is not None:
            hidden_TI = xielu(hidden_TI, self.alpha_p.weight, self.alpha_n.weight)
        out_TE: torch.Tensor = self.down_proj(hidden_TI)
        return out_TE


class SparseMLP(GatedMLP):
    """A feed-forward of whose gate only the largest numbers are not zero (`MLPOptions.sparsity`)."""

    def __init__(self, hidden_size: int, options: MLPOptions, parallel: ParallelState) -> None:
        super().__init__(hidden_size, options, parallel)
        self.activation, self.multiplier = options.activation, NormalDist().inv_cdf(options.sparsity)
        self._group, (self._own_size, _) = parallel.tensor_group, self.gate_up_proj.sizes
        self._share = self._own_size / options.intermediate_size

    def forward(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        """[T, E] -> [T, E]."""
        gate_TI, up_TI = self.gate_up_proj(hidden_TE).tensor_split([self._own_size], 1)
        moments_T2 = row_moments(gate_TI)
        if self._group is not None:  # of the whole gate
            mean_T, variance_T = moments_T2.unbind(1)
            sums_T2 = torch.stack((mean_T, variance_T + mean_T.square()), 1) * self._share
            mean_T, square_T = self._group.all_reduce(sums_T2).unbind(1)
            moments_T2 = torch.stack((mean_T, (square_T - mean_T.square()).clamp(min=0)), 1)
        gate_TI = gaussian_topk(gate_TI, moments_T2, self.multiplier)
        out_TE: torch.Tensor = self.down_proj(activate_and_mul(gate_TI, self.activation, up_TI))
        return out_TE


class ExpertLinears:
    """One of the two linear layers of all experts of a mixture that a rank has, as adapters change it. What `Packable`
    has of its projections, this has of those of one expert after another."""

    def __init__(self, linears: Sequence[Packable]) -> None:
        self._linears = linears
        self.names = [name for one in linears for name in one.names]
        self.projections = [projection for one in linears for projection in one.projections]
        self.lora_table: LoraTable | None = None
        self.step = StepAdapters()

    def enable_adapters(self, step: StepAdapters, max_loras: int, max_rank: int, like: torch.Tensor) -> None:
        """As of `Packable`."""
        first, columns = self._linears[0], self.projections[0].columns
        self.step = step
        self.lora_table = LoraTable(
            first.sizes, columns.stop - columns.start, like.dtype, max_loras=max_loras, max_rank=max_rank,
            device=like.device, num_experts=len(self._linears),
        )  # fmt: skip

    def adapter_slice(self, number: int, a_RK: torch.Tensor, b_NR: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As of `Packable`."""
        expert, own = divmod(number, len(self._linears[0].projections))
        return self._linears[expert].adapter_slice(own, a_RK, b_NR)

    def weight_band(self, number: int, rows: slice) -> torch.Tensor:
        """As of `Packable`."""
        expert, own = divmod(number, len(self._linears[0].projections))
        return self._linears[expert].weight_band(own, rows)


class MixtureOfExperts(nn.Module):
    """The feed-forward of a layer with experts. `pack` has to be called once their weights are loaded."""

    def __init__(self, config: CheckpointConfig, options: ExpertsOptions, parallel: ParallelState) -> None:
        super().__init__()
        self.options, self.group, self.eps = options, parallel.tensor_group, config.rms_norm_eps
        size = config.hidden_size
        self.gate = Router(size, "gate", options.num_experts, options.expert.bias)
        self.gate_norm = Weight(size, dtype=torch.float32) if options.input_norm else None
        self.expert_scale = Weight(options.num_experts, dtype=torch.float32) if options.expert_scales else None
        self._gate_norm_E: torch.Tensor | None = None
        latent_size = options.latent_size
        if latent_size is not None:
            self.fc1_latent_proj = ColumnParallel(size, {"fc1_latent_proj": latent_size}, False, ALONE)
            self.fc2_latent_proj = ColumnParallel(latent_size, {"fc2_latent_proj": size}, False, ALONE)
        cut = ALONE if parallel.enable_expert_parallel else parallel
        numbers = experts_of_rank(options.num_experts, parallel)
        self.experts = nn.ModuleDict({str(i): Expert(latent_size or size, options.expert, cut) for i in numbers})
        self.shared_expert: Expert | None = None
        if options.shared is not None:
            self.shared_expert = Expert(size, options.shared, parallel)
            if options.shared_has_gate:
                self.shared_expert_gate = Router(size, "shared_expert_gate", 1)
        if options.grouped is not None and options.grouped.has_bias:
            self.choice_bias = Weight(options.num_experts, dtype=torch.float32)
        self.counts_X: torch.Tensor | None = None
        """int64, on the model's device: how many tokens were sent to each expert. Set before the first step, as what is
        recorded or captured refers to it; None: nothing is counted."""
        self._packed: ExpertsWeight | None = None
        self._adaptable: list[ExpertLinears] = []

    def pack(self) -> None:
        """Bring the experts together, whose matrices are packed."""
        gate_up, down = ([one.packed for one in each] for each in self._linears())
        self._packed = pack_experts(gate_up, down, self._expert_map())
        if self.gate_norm is not None:
            self._gate_norm_E = self.gate_norm.weight * len(self.gate_norm.weight) ** -0.5

    def adaptable_linears(self) -> list[ExpertLinears]:
        """What adapters may change of the experts; their tables, once there are any, are those of the next steps."""
        self._adaptable = [ExpertLinears(each) for each in self._linears()]
        return self._adaptable

    def _linears(self) -> tuple[list[Packable], list[Packable]]:
        here = [expert for expert in self.experts.values() if isinstance(expert, Expert)]
        return [one.gate_up_proj for one in here], [one.down_proj for one in here]

    def _expert_map(self) -> torch.Tensor:
        """By id, the place of an expert among those that are here, or -1."""
        expert_map = torch.full((self.options.num_experts,), -1, dtype=torch.int64, device="cpu")
        expert_map[list(map(int, self.experts))] = torch.arange(len(self.experts), device="cpu")
        return expert_map

    def _route(self, logits_TX: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, X] -> weights and ids of each token's experts."""
        options, grouped = self.options, self.options.grouped
        if grouped is None:
            scale_X = None if self.expert_scale is None else self.expert_scale.weight
            return topk_softmax(
                logits_TX, options.top_k, options.norm_topk_prob, self.counts_X, scale_X, options.jitter
            )
        return grouped_topk(
            logits_TX, options.top_k, options.norm_topk_prob, num_groups=grouped.num_groups,
            top_groups=grouped.top_groups, scoring=grouped.scoring, scale=grouped.scale,
            bias_X=self.choice_bias.weight if grouped.has_bias else None, counts_X=self.counts_X,
        )  # fmt: skip

    def forward(self, hidden_TE: torch.Tensor, residual_TE: torch.Tensor | None = None) -> torch.Tensor:
        """[T, E] -> [T, E]. The residual stream is what is routed by, with `input_norm`."""
        options, input_TE, shared_input_TE = self.options, hidden_TE, hidden_TE
        if self._gate_norm_E is not None:
            assert residual_TE is not None
            input_TE = rms_norm(residual_TE, self._gate_norm_E, self.eps)
        logits_TX = self.gate(input_TE)
        weights_TK, expert_ids_TK = self._route(logits_TX)
        if options.scales_input:
            scale_T1, _ = grouped_topk(logits_TX, 1, False, num_groups=1, top_groups=1, scoring="sigmoid")
            hidden_TE = scale_rows(hidden_TE, scale_T1.squeeze(1))
        shared_TE = shared_gate_T1 = None
        if self.shared_expert is not None:
            shared_TE = self.shared_expert(shared_input_TE)
            shared_gate_T1 = self.shared_expert_gate(shared_input_TE) if options.shared_has_gate else None
        if options.latent_size is not None:
            latent_TL = self._sum(self.fc1_latent_proj(hidden_TE), weights_TK, expert_ids_TK, None, None)
            out_TE: torch.Tensor = self.fc2_latent_proj(latent_TL)
            if shared_TE is not None:
                add_residual(shared_TE if self.group is None else self.group.all_reduce(shared_TE), out_TE)
            return out_TE
        return self._sum(hidden_TE, weights_TK, expert_ids_TK, shared_TE, shared_gate_T1)

    def _sum(
        self,
        hidden_TE: torch.Tensor,
        weights_TK: torch.Tensor,
        expert_ids_TK: torch.Tensor,
        shared_TE: torch.Tensor | None,
        shared_gate_T1: torch.Tensor | None,
    ) -> torch.Tensor:
        """[T, E], of all ranks; for the arguments see `routed_experts`."""
        assert self._packed is not None, "pack was not called"
        out_TE = routed_experts(
            hidden_TE, weights_TK, expert_ids_TK, self._packed, shared_TE, shared_gate_T1, self._lora()
        )
        return out_TE if self.group is None else self.group.all_reduce(out_TE)

    def _lora(self) -> ExpertsLora | None:
        """The adapters of the step's rows; None if no row has any."""
        if not self._adaptable:
            return None
        gate_up, down = self._adaptable
        if gate_up.lora_table is None or down.lora_table is None or gate_up.step.index_T is None:
            return None
        return ExpertsLora(gate_up.lora_table, down.lora_table, gate_up.step.index_T)
