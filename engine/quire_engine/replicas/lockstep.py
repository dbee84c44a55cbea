"""LockstepOwner: where engines meet that share the experts of a model, and therefore compute every step together.

::

    ReplicaSet ─┬─ LockstepOwner: the memory that the engines meet in; ends a generation when one dies
                ├─ LocalReplica 0 ─► LockstepProcess ─► EngineCore ─► its ranks ─┐ meet in every layer
                └─ LocalReplica 1 ─► LockstepProcess ─► EngineCore ─► its ranks ─┘ with experts

1. Before each step the engine cores meet, and each says whether it has work. If any has, all compute: an engine
   without work lends its experts. If none has, the wave ends, and all block until one is sent a request: it comes to
   the next meeting, which calls the others.
2. A request cannot be lost at the end of a wave: what came too late for one meeting is said at the next, which any
   engine may call.
3. When an engine dies, the front ends the generation, and the others' steps with it. They keep their weights, compute
   again what was running, and come to the next meeting, where they wait for the engine that is started in its place.
   The requests of the dead one continue on the others, from the journal. No other engine has died, so their requests
   are no suspects.
4. A step that fails in one engine ends the generation as well: that engine finds the faulty request as it would alone.
5. In a step that hangs the heartbeats of all engines stand still, but only one engine does not wait for another: the
   owner knows which one.
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
