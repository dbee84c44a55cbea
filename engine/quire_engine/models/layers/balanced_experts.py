"""A mixture of experts whose experts move between the ranks while requests run, with replicas of the busiest.

The ranks have places for as many *physical* experts as there are *logical* ones, the model's own, and some more. Which
logical expert a physical one is changes from time to time (`expert_placement.py`)::

    physical              0 1 2 │ 3 4 5     rank 0 │ rank 1
    logical, at first     0 1 2 │ 3 0 1     4 experts, 2 redundant ones
             later        0 3 2 │ 1 2 2     expert 2 is sent most tokens: row t goes to its replica t mod 3

Weights are written over those that were there, in the same form and at the same addresses.

A token's bits must not depend on the placement: the token may be computed again after a restart, where each expert is
in its first place, and its keys may have been cached under an earlier placement. An expert's result is the same on
every rank. Sums that the ranks round before they are added up would differ. So the ranks exchange the results of single
experts, as DeepSeek's do (https://arxiv.org/abs/2412.19437, section 3.4), and each adds them up in the order of the
token's experts. That is `top_k` times as much to exchange as sums are, and little beside the computation.
"""

import torch
from quire_kernels import combine_experts, routed_experts

from quire_engine.distributed import ParallelState
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_engine.models.layers.experts import MixtureOfExperts
from quire_engine.models.options import ExpertsOptions


class BalancedExperts(MixtureOfExperts):
    """A `MixtureOfExperts` on one of several ranks whose experts move."""

    def __init__(self, config: CheckpointConfig, options: ExpertsOptions, parallel: ParallelState) -> None:
        super().__init__(config, options, parallel)
        assert parallel.num_redundant_experts is not None, "else they do not move"
        num_physical = options.num_experts + parallel.num_redundant_experts
        self._rank, self._num_here = parallel.tensor_rank, num_physical // parallel.tensor_parallel_size
        self.placement = [number % options.num_experts for number in range(num_physical)]
        """By physical expert, the logical one that it is."""
        most = 1 + parallel.num_redundant_experts
        self._replicas_XR = torch.zeros(options.num_experts, most, dtype=torch.int64)
        """By logical expert, the physical ones that it is; what is beyond them is not read."""
        self._num_replicas_X = torch.zeros(options.num_experts, dtype=torch.int64)
        self.update_tables()

    def fetch(self, physical: int, source: int) -> list[torch.Tensor] | None:
        """Send an expert's weights from rank to rank. All ranks of the stage make the same calls.

        Args:
            physical: the expert that is to have them.
            source: the expert that has them.

        Returns:
            The weights, on the rank that `place` needs them on; None on the others.
        """
        assert self._packed is not None, "pack was not called"
        assert self.group is not None, "there is one rank"
        (sender, place), receiver = divmod(source, self._num_here), physical // self._num_here
        if self._rank not in (sender, receiver):
            return None
        own = self._packed.tensors_of(place if self._rank == sender else physical % self._num_here)
        if sender == receiver:
            return [tensor.clone() for tensor in own]
        if self._rank == receiver:
            # As bytes: not every group transfers every dtype.
            sizes = [(tensor.nbytes,) for tensor in own]
            received = [self.group.receive(size, torch.uint8, sender) for size in sizes]
            return [one.view(like.dtype).view(like.shape) for one, like in zip(received, own, strict=True)]
        for tensor in own:
            self.group.send(tensor.view(-1).view(torch.uint8), receiver)
        return None

    def place(self, physical: int, logical: int, weights: list[torch.Tensor] | None) -> None:
        """Make a physical expert another logical one, with weights from `fetch`; `update_tables` has to follow."""
        assert self._packed is not None, "pack was not called"
        if weights is not None:
            for tensor, new in zip(self._packed.tensors_of(physical % self._num_here), weights, strict=True):
                tensor.copy_(new)
        self.placement[physical] = logical

    def update_tables(self) -> None:
        """Route tokens by the placement."""
        replicas: list[list[int]] = [[] for _ in range(self.options.num_experts)]
        for physical, logical in enumerate(self.placement):
            replicas[logical].append(physical)
        most = self._replicas_XR.shape[1]
        table = [own + [0] * (most - len(own)) for own in replicas]
        self._replicas_XR.copy_(torch.tensor(table, device="cpu"))
        self._num_replicas_X.copy_(torch.tensor(list(map(len, replicas)), device="cpu"))

    def _expert_map(self) -> torch.Tensor:
        """By physical id: the places stay, what is in them changes."""
        expert_map = torch.full((len(self.placement),), -1, dtype=torch.int64, device="cpu")
        first = self._rank * self._num_here
        expert_map[first : first + self._num_here] = torch.arange(self._num_here, device="cpu")
        return expert_map

    def _sum(
        self,
        hidden_TE: torch.Tensor,
        weights_TK: torch.Tensor,
        expert_ids_TK: torch.Tensor,
        shared_TE: torch.Tensor | None,
        shared_gate_T1: torch.Tensor | None,
    ) -> torch.Tensor:
        """Which replica computes a row does not change the result."""
        assert self._packed is not None, "pack was not called"
        assert self.group is not None, "there is one rank"
        (num_tokens, top_k), size = expert_ids_TK.shape, hidden_TE.shape[1]
        rows_T1 = torch.arange(num_tokens, device=hidden_TE.device)[:, None]
        physical_TK = self._replicas_XR[expert_ids_TK, rows_T1 % self._num_replicas_X[expert_ids_TK]]
        ones_P1 = torch.ones(num_tokens * top_k, 1, dtype=torch.float32, device=hidden_TE.device)
        # Each pair as a row with one expert: 0 on all ranks but one, so that their sum is its result, to the last bit.
        results_PE = routed_experts(
            hidden_TE.repeat_interleave(top_k, 0), ones_P1, physical_TK.view(-1, 1), self._packed
        )
        if shared_TE is not None:
            results_PE = torch.cat((results_PE, shared_TE))
        results_PE = self.group.all_reduce(results_PE)
        pairs_PE, shared_TE = results_PE[: len(ones_P1)], results_PE[len(ones_P1) :] if shared_TE is not None else None
        results_TKE = pairs_PE.view(num_tokens, top_k, size)
        return combine_experts(results_TKE, weights_TK, shared_TE, shared_gate_T1).to(hidden_TE.dtype)
