"""Communicator: the seam between a model and the other ranks that hold parts of it; ParallelState: a rank's place.

::

                     tensor parallel ──►
    pipeline   ┌ stage 0 │ rank 0 │ rank 1 │      rank = stage · tensor_parallel_size + place in the stage
    parallel   └ stage 1 │ rank 2 │ rank 3 │      rank 2 samples: the first one of the last stage

The ranks of a stage hold a slice of each of its layers and get the same tokens (Megatron-LM, Shoeybi et al. 2019,
https://arxiv.org/abs/1909.08053, section 3). Each rank sends its activations to the same place in the next stage.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from quire_engine.distributed.lockstep_group import LockstepGroup


class Communicator(Protocol):
    """A group of ranks. All of them call the same collective operations in the same order."""

    @property
    def rank(self) -> int:
        """This one's place in the group, from 0."""
        ...

    @property
    def size(self) -> int:
        """Ranks in the group."""
        ...

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, the same bits on each of them. May overwrite `tensor`, and may return it."""
        ...

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """All ranks' [T, n] side by side as [T, size · n] on rank 0, None on the others."""
        ...

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """Send a tensor to another rank of the group, which calls `receive`; may return before it is received."""
        ...

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> torch.Tensor:
        """Wait for a tensor of this shape and dtype that another rank sends, and return it."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelState:
    """One rank's place among all ranks."""

    rank: int = 0
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    enable_expert_parallel: bool = False
    """The experts of a layer are divided among the ranks of a stage, rather than the features of each expert."""
    num_redundant_experts: int | None = None
    """With expert parallelism, the replicas of experts in each layer, if experts move between the ranks while requests
    run; None: each stays where it is."""
    expert_replica: int = 0
    """The index of this engine among those that share the experts."""
    num_expert_replicas: int = 1
    """The number of engines that share the experts. Each of their ranks has some of a layer's experts."""
    expert_group: "LockstepGroup | None" = None
    """The ranks of these engines, engine by engine; None if experts are not shared."""
    tensor_group: Communicator | None = None
    """The ranks of this stage, by their place in it; None if there is only one."""
    pipeline_group: Communicator | None = None
    """The ranks at this place in all stages, by stage; None if there is only one stage."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def tensor_rank(self) -> int:
        """Place in the stage."""
        return self.rank % self.tensor_parallel_size

    @property
    def stage(self) -> int:
        """Stage of the pipeline."""
        return self.rank // self.tensor_parallel_size

    @property
    def expert_rank(self) -> int:
        """Place among the ranks that share a layer's experts."""
        return self.expert_replica * self.tensor_parallel_size + self.tensor_rank

    @property
    def expert_parallel_size(self) -> int:
        """Number of ranks that share a layer's experts."""
        return self.num_expert_replicas * self.tensor_parallel_size

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank embeds the tokens."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes logits."""
        return self.stage == self.pipeline_parallel_size - 1

    @property
    def output_rank(self) -> int:
        """The rank that samples and returns the results: the first one of the last stage."""
        return (self.pipeline_parallel_size - 1) * self.tensor_parallel_size

    @property
    def is_output_rank(self) -> bool:
        """Whether this is the output rank."""
        return self.rank == self.output_rank
