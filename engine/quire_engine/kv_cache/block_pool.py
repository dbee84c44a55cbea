"""BlockPool: every KV block of the engine, each either free or referenced; and blocks of states likewise, in a queue of
their own (`groups.py`).

A block is in exactly one of two states:

::

    free        ref_cnt == 0, linked in the free queue
    referenced  ref_cnt  > 0, not in the free queue

and, independently of that, it may carry the hash of its content (it is *cached*). A cached block that becomes free
keeps its hash until it is allocated again, so an equal prefix can take it back out of the middle of the queue:

::

    head ⇄ least recently used ⇄ … ⇄ most recently freed ⇄ tail
      allocate from here                free to here;  touch: unlink from anywhere, O(1)
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from quire_engine.kv_cache.events import CacheEvents


class KVCacheBlock:
    """Metadata of one block; `block_id` is its index in the cache tensors of its kind."""

    __slots__ = ("block_hash", "block_id", "depth", "is_state", "next_free", "prev_free", "ref_cnt", "root_hash")

    def __init__(self, block_id: int, is_state: bool = False) -> None:
        self.block_id, self.is_state = block_id, is_state
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        self.root_hash = b""
        """While cached: hash of the first block of its prefix."""
        self.depth = 0
        """While cached: its index in its prefix."""
        self.prev_free: KVCacheBlock | None = None
        self.next_free: KVCacheBlock | None = None

    def __repr__(self) -> str:
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}, cached={self.block_hash is not None})"


NULL_BLOCK = KVCacheBlock(0)
"""In a request's list, the place of a block that it does not need any more. Belongs to no pool. Its id is one that
every cache has: kernels may see it, but read nothing there."""
NULL_BLOCK.ref_cnt = 1


class FreeKVCacheBlockQueue:
    """A doubly linked list through the blocks themselves, in the order in which they will be reused."""

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._head = KVCacheBlock(-1)  # sentinels, so that no link is ever None while in the queue
        self._tail = KVCacheBlock(-1)
        self._head.next_free, self._tail.prev_free = self._tail, self._head
        self.num_free_blocks = 0
        self.num_cached = 0
        """Free blocks whose content can still be reused; the pool counts them."""
        for block in blocks:
            self.append(block)

    def append(self, block: KVCacheBlock) -> None:
        """Link at the tail, to be reused last."""
        self._insert(block, self._tail)

    def prepend(self, block: KVCacheBlock) -> None:
        """Link at the head, to be reused first."""
        first = self._head.next_free
        assert first is not None
        self._insert(block, first)

    def _insert(self, block: KVCacheBlock, after: KVCacheBlock) -> None:
        before = after.prev_free
        assert before is not None
        before.next_free = after.prev_free = block
        block.prev_free, block.next_free = before, after
        self.num_free_blocks += 1

    def remove(self, block: KVCacheBlock) -> None:
        """Unlink from anywhere in the queue."""
        before, after = block.prev_free, block.next_free
        assert before is not None, f"{block} is not in the free queue"
        assert after is not None, f"{block} is not in the free queue"
        before.next_free, after.prev_free = after, before
        block.prev_free = block.next_free = None
        self.num_free_blocks -= 1

    def popleft(self) -> KVCacheBlock:
        """Unlink and return the least recently used block."""
        block = self._head.next_free
        assert block is not None
        assert block is not self._tail, "no free block"
        self.remove(block)
        return block

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = self._head.next_free
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free


class BlockPool:
    """Allocates, shares, caches and frees blocks.

    Args:
        num_blocks: of keys and values.
        num_states: blocks of states.
    """

    def __init__(self, num_blocks: int, num_states: int = 0) -> None:
        if num_blocks + num_states < 1:
            raise ValueError(f"num_blocks is {num_blocks}; it must be at least 1")
        blocks, states = (
            [KVCacheBlock(i) for i in range(num_blocks)],
            [KVCacheBlock(i, True) for i in range(num_states)],
        )
        self.blocks = [*blocks, *states]
        """Blocks of both kinds."""
        self.num_states = num_states
        self.free_queue, self.free_states = FreeKVCacheBlockQueue(blocks), FreeKVCacheBlockQueue(states)
        self._cached: dict[bytes, KVCacheBlock] = {}
        self.num_evictions = 0
        """Cached blocks that were reallocated for other content since the start."""
        self._events: CacheEvents | None = None
        self.on_filed: Callable[[bytes], None] | None = None
        """Called with the hash of each block that is cached, but not of states that may soon be replaced."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks of keys and values that can be allocated, including cached ones."""
        return self.free_queue.num_free_blocks

    @property
    def num_free_states(self) -> int:
        """Blocks of states that can be allocated, including cached ones."""
        return self.free_states.num_free_blocks

    @property
    def num_cached_free_blocks(self) -> int:
        """Free blocks of keys and values whose content can still be reused."""
        return self.free_queue.num_cached

    def get_cached_block(self, block_hash: bytes) -> KVCacheBlock | None:
        """The block that holds this content, free or referenced."""
        return self._cached.get(block_hash)

    def allocate(self, num_blocks: int, are_states: bool = False) -> list[KVCacheBlock]:
        """Allocate the least recently used free blocks, each with `ref_cnt` 1 and no hash.

        The caller checks `num_free_blocks` or `num_free_states` first.
        """
        queue = self.free_states if are_states else self.free_queue
        assert num_blocks <= queue.num_free_blocks, f"{num_blocks} blocks wanted, {queue.num_free_blocks} free"
        allocated = []
        for _ in range(num_blocks):
            block = queue.popleft()
            if block.block_hash is not None:
                self._forget(block)
                queue.num_cached -= 1
                self.num_evictions += 1
            block.ref_cnt = 1
            allocated.append(block)
        return allocated

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Add a reference to cached blocks, taking free ones out of the queue."""
        for block in blocks:
            if block.ref_cnt == 0:
                queue = self._queue_of(block)
                queue.remove(block)
                queue.num_cached -= 1
            block.ref_cnt += 1

    def free(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Drop a reference from each block; blocks without references become free, to be reused in the order given."""
        for block in blocks:
            assert block.ref_cnt > 0, f"{block} is freed twice"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                queue = self._queue_of(block)
                queue.append(block)
                queue.num_cached += block.block_hash is not None

    def discard(self, block: KVCacheBlock) -> None:
        """Drop a reference from a block whose content is worth nothing more, to be reused first if it becomes free."""
        assert block.ref_cnt > 0, f"{block} is freed twice"
        block.ref_cnt -= 1
        if block.ref_cnt == 0:
            if block.block_hash is not None:
                self._forget(block)
            self._queue_of(block).prepend(block)

    def _queue_of(self, block: KVCacheBlock) -> FreeKVCacheBlockQueue:
        return self.free_states if block.is_state else self.free_queue

    def _forget(self, block: KVCacheBlock) -> None:
        assert block.block_hash is not None
        del self._cached[block.block_hash]
        if self._events is not None:
            self._events.evicted(block.block_hash)
        block.block_hash = None

    @property
    def cached_blocks(self) -> Collection[KVCacheBlock]:
        """All cached blocks, free or referenced."""
        return self._cached.values()

    def cache(
        self, block: KVCacheBlock, block_hash: bytes, root_hash: bytes = b"", depth: int = 0, reports: bool = True
    ) -> None:
        """Cache a full block under its hash. If another block with this hash is cached already, that one stays.

        Args:
            block: a referenced one.
            block_hash: of its content and everything before it.
            root_hash: that of the first block of its prefix; only for snapshots.
            depth: its index in its prefix; only for snapshots.
            reports: whether `on_filed` is called.
        """
        assert block.ref_cnt > 0, f"{block} is cached while free"
        if block.block_hash is None and block_hash not in self._cached:
            block.block_hash, block.root_hash, block.depth = block_hash, root_hash, depth
            self._cached[block_hash] = block
            if self._events is not None:
                self._events.filed(block_hash)
            if reports and self.on_filed is not None:
                self.on_filed(block_hash)

    def report_events(self) -> None:
        """Note changes of the cached content from now on, beginning with what is cached."""
        self._events = CacheEvents()  # what was noted and not taken is part of what is cached
        for block_hash in self._cached:
            self._events.filed(block_hash)

    def take_events(self) -> bytes:
        """The changes since this was last called, as in `CacheEvents`; nothing if none are noted."""
        return b"" if self._events is None else self._events.take()

    def reset_cache(self) -> None:
        """Forget all cached content. Requests keep the blocks that they use."""
        for block in self._cached.values():
            block.block_hash = None
        self._cached.clear()
        self.free_queue.num_cached = self.free_states.num_cached = 0
        if self._events is not None:
            self._events.reset()

    def check_integrity(self) -> None:
        """Check that every block is in exactly one state, and that the counters and the hash map agree.

        Raises:
            AssertionError: a block is lost, or shared or cached by mistake.
        """
        free = [*self.free_queue, *self.free_states]
        num_free = self.num_free_blocks + self.num_free_states
        assert len(free) == num_free, "free queue: its length and its counter differ"
        assert len({id(block) for block in free}) == len(free), "free queue: a block is in it twice"
        for block in free:
            assert block.ref_cnt == 0, f"{block} is in the free queue"
        num_referenced = sum(block.ref_cnt > 0 for block in self.blocks)
        assert num_referenced + len(free) == len(self.blocks), "a block is neither free nor referenced"
        num_cached = sum(block.block_hash is not None for block in self.blocks)
        assert num_cached == len(self._cached), "hash map: its size and the cached blocks differ"
        for block_hash, block in self._cached.items():
            assert block.block_hash == block_hash, f"hash map: {block} is filed under another hash"
        for queue in (self.free_queue, self.free_states):
            num_cached_free = sum(block.block_hash is not None for block in queue)
            assert num_cached_free == queue.num_cached, "the counter of cached free blocks is off"
