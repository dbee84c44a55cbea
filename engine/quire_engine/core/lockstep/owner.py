"""LockstepOwner: the front's end of what engines meet by that share the experts. It outlives each of them.

It ends a generation when an engine dies, and knows which engine the others wait for: in a step that hangs
the heartbeats of all engines stand still, but only one of them is not waiting for another.
"""

from quire_engine.config import ParallelConfig
from quire_engine.ipc.lockstep import Lockstep, LockstepHandle
from quire_engine.messages import LockstepArguments

BUFFER_BYTES = 4 << 20
"""A decode's tokens fit into one, and a prefill's take few meetings. Memory is taken as it is used."""


class LockstepOwner:
    """Created before the engines, and closed after them.

    Args:
        parallel: how many there are, and ranks of each.
    """

    def __init__(self, parallel: ParallelConfig) -> None:
        self._ranks_each = parallel.world_size
        num_ranks = parallel.data_parallel_size * parallel.world_size
        cores = LockstepHandle.create(parallel.data_parallel_size)
        self.arguments = LockstepArguments(cores, LockstepHandle.create(num_ranks, BUFFER_BYTES))
        self._cores, self._ranks = Lockstep(cores, None), Lockstep(self.arguments.ranks, None)
        self._is_closed = False

    def end_generation(self) -> None:
        """Stop all waits for an engine that is dead, or about to be. Any thread may call it."""
        if not self._is_closed:
            self._ranks.end(self._cores.end() - 1)

    def is_waited_for(self, engine: int) -> bool:
        """Whether another engine is where this one has yet to come. Any thread may call it."""
        if self._is_closed:
            return False
        cores = self._cores.present_positions()
        own, others = self._ranks_of(engine)
        return cores[engine] < max(cores) or min(own) < max(others)

    def waits(self, engine: int) -> bool:
        """Whether all ranks of an engine wait for one of another. Any thread may call it."""
        if self._is_closed:
            return False
        own, others = self._ranks_of(engine)
        return min(own) > min(others)

    def _ranks_of(self, engine: int) -> tuple[list[int], list[int]]:
        """Where the ranks of an engine are, and those of the others."""
        positions, first = self._ranks.present_positions(), engine * self._ranks_each
        own = positions[first : first + self._ranks_each]
        return own, positions[:first] + positions[first + self._ranks_each :]

    def close(self) -> None:
        """Close all descriptors. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._cores.close()
        self._ranks.close()
        self.arguments.cores.close()
        self.arguments.ranks.close()
