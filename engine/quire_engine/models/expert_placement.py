"""Which rank computes which expert. Knows no weights."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from quire_engine.distributed import ParallelState
from quire_engine.models.experts import experts_of_rank
from quire_engine.models.parallel import stage_layers

__all__ = ["FloatArray", "shares_of_ranks"]

FloatArray: TypeAlias = npt.NDArray[np.float64]


def shares_of_ranks(
    shape: tuple[int, int], tensor_parallel_size: int, pipeline_parallel_size: int, enable_expert_parallel: bool
) -> FloatArray:
    """[layers, experts, ranks], the share of an expert's tokens that a rank computes, or computes a slice of.

    Args:
        shape: layers and experts.
        tensor_parallel_size: ranks of a stage.
        pipeline_parallel_size: stages.
        enable_expert_parallel: an expert is on one rank of its stage; else each has a slice of it.
    """
    world_size = tensor_parallel_size * pipeline_parallel_size
    shares = np.zeros((*shape, world_size))
    for rank in range(world_size):
        state = ParallelState(
            rank=rank,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            enable_expert_parallel=enable_expert_parallel,
        )
        layers, experts = stage_layers(shape[0], state), experts_of_rank(shape[1], state)
        shares[layers.start : layers.stop, experts.start : experts.stop, rank] = 1
    return shares
