"""RequestStates: a request's blocks of states. `KVCacheManager` decides which are kept."""

from dataclasses import dataclass, field

from quire_engine.kv_cache.block_pool import BlockPool, KVCacheBlock


@dataclass(slots=True)
class RequestStates:
    """The blocks of states of one request.

    ::

        block of tokens     0    1    2    3    4
        state after it      ∅   17    ∅   20    9       places = [1, 3, 4]
    """

    num_hit_blocks: int
    """How many blocks of tokens its prefix hit had."""
    places: list[int]
    """The blocks of tokens after which there is a state, in order."""
    num_tokens: int = 0
    """Up to how many tokens states are stored for certain."""
    unwritten: list[tuple[KVCacheBlock, bytes, bytes, int, bool]] = field(default_factory=list)
    """What the step being scheduled writes, to be cached with the next one: the arguments of `BlockPool.cache`."""

    def cache_written(self, pool: BlockPool) -> None:
        """Cache what the last step has written."""
        for arguments in self.unwritten:
            pool.cache(*arguments)
        self.unwritten.clear()
