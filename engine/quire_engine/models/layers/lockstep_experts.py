"""A mixture of experts that several engines share: each rank of each has some of the experts, and all run in step.

::

    engine 0, its tokens ─► attention ─ gate ─┐               ┌─ experts 0 1 2 of all tokens ─┐          ┌─► its sum
                                              ├─► all_gather ─┤                               ├─► gather ┤
    engine 1, its tokens ─► attention ─ gate ─┘               └─ experts 3 4   of all tokens ─┘          └─► its sum

In each layer the ranks meet twice:

    1. The first rank of every engine sends its tokens, and the ids of their experts. An engine without tokens sends
       none, and takes part all the same: its experts are needed.
    2. Every rank sends the results of its experts for all these tokens, one by one, in float32.

Then each engine adds up the results of its own tokens in the order of their experts, as `routed_experts` does in one
engine. So a token has the bits that one engine gives it, on any engine and beside any other tokens.
"""

from collections.abc import Sequence

import torch
from quire_kernels import expert_results, sum_results

from quire_engine.distributed import ParallelState
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_engine.models.layers.experts import MixtureOfExperts, experts_of_rank
from quire_engine.models.options import ExpertsOptions


class LockstepExperts(MixtureOfExperts):
    """A `MixtureOfExperts` on a rank with an `expert_group`."""

    def __init__(self, config: CheckpointConfig, options: ExpertsOptions, parallel: ParallelState) -> None:
        super().__init__(config, options, parallel)
        assert parallel.expert_group is not None, "else they are not shared"
        self._all_ranks, self._ranks_each = parallel.expert_group, parallel.tensor_parallel_size
        self._replica, self._num_replicas = parallel.expert_replica, parallel.num_expert_replicas
        self._is_first = parallel.tensor_rank == 0
        self._hidden_size, self._dtype = options.latent_size or config.hidden_size, torch.get_default_dtype()
        owners = torch.empty(options.num_experts, dtype=torch.int64, device="cpu")
        for rank in range(parallel.expert_parallel_size):
            replica, tensor_rank = divmod(rank, parallel.tensor_parallel_size)
            state = ParallelState(
                rank=tensor_rank, tensor_parallel_size=parallel.tensor_parallel_size, enable_expert_parallel=True,
                expert_replica=replica, num_expert_replicas=parallel.num_expert_replicas,
            )  # fmt: skip
            owners[list(experts_of_rank(options.num_experts, state))] = rank
        self._owners_X = owners

    def serve(self) -> None:
        """Compute what the other engines need in a step in which this engine has no tokens."""
        no_ids_TK = torch.empty(0, self.options.top_k, dtype=torch.int64)
        self._results(torch.empty(0, self._hidden_size, dtype=self._dtype), no_ids_TK)

    def _sum(
        self,
        hidden_TE: torch.Tensor,
        weights_TK: torch.Tensor,
        expert_ids_TK: torch.Tensor,
        shared_TE: torch.Tensor | None,
        shared_gate_T1: torch.Tensor | None,
    ) -> torch.Tensor:
        results_TKE = self._results(hidden_TE, expert_ids_TK)
        if shared_TE is not None and self.group is not None:
            shared_TE = self.group.all_reduce(shared_TE)
        return sum_results(results_TKE, weights_TK, hidden_TE.dtype, shared_TE, shared_gate_T1)

    def _results(self, hidden_TE: torch.Tensor, expert_ids_TK: torch.Tensor) -> torch.Tensor:
        """[T, K, E] float32, the results of the experts of this engine's tokens, wherever they are."""
        message = torch.cat((_as_bytes(expert_ids_TK), _as_bytes(hidden_TE)))
        if not self._all_ranks.is_in_step:  # the memory is measured: as if all engines had as many tokens
            self._own_results([message] * self._num_replicas)
            return torch.zeros(*expert_ids_TK.shape, self._hidden_size)
        messages = self._all_ranks.all_gather(message if self._is_first else message[:0])[:: self._ranks_each]
        results_PE, owners_TK, first = self._own_results(messages)
        of_ranks = self._all_ranks.all_gather(_as_bytes(results_PE))
        results_TKE = torch.empty(*expert_ids_TK.shape, self._hidden_size)
        before_TK, own_TK = owners_TK[:first], owners_TK[first : first + len(hidden_TE)]
        for rank, data in enumerate(of_ranks):
            rows, places = torch.where(own_TK == rank)
            start = int((before_TK == rank).sum())
            of_rank_PE = data.view(torch.float32).view(-1, self._hidden_size)
            results_TKE[rows, places] = of_rank_PE[start : start + len(rows)]
        return results_TKE

    def _own_results(self, messages: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, int]:
        """The results of this rank's experts for the tokens of all engines, which have sent the ids of their tokens'
        experts and their hidden states, as bytes.

        Returns:
            [P, E] float32, token by token; which rank has each token's experts, [tokens of all, K]; and where the
                tokens of this engine begin.
        """
        assert self._packed is not None, "pack was not called"
        ids_bytes = 8 * self.options.top_k
        num_tokens = [len(one) // (ids_bytes + self._hidden_size * self._dtype.itemsize) for one in messages]
        pairs = list(zip(messages, num_tokens, strict=True))
        ids = torch.cat([one[: number * ids_bytes].view(torch.int64) for one, number in pairs])
        hidden = torch.cat([one[number * ids_bytes :].view(self._dtype) for one, number in pairs])
        ids_TK, hidden_TE = ids.view(-1, self.options.top_k), hidden.view(-1, self._hidden_size)
        owners_TK = self._owners_X[ids_TK]
        rows, places = torch.where(owners_TK == self._all_ranks.rank)
        results_PE = expert_results(hidden_TE[rows], ids_TK[rows, places], self._packed)
        return results_PE, owners_TK, sum(num_tokens[: self._replica])


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
