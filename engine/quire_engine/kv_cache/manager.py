"""KVCacheManager: the blocks of each request, between the scheduler above and the block pool below.

Whenever a cached block is read, its content matches its hash, even with steps in flight:

1. A block is cached when all of its tokens are known and their computation is scheduled, not when it is done. Workers
   run steps in the order in which they were scheduled, so any reader of the block runs in a later step (or later in the
   same), after the writes.
2. With async scheduling a request may compute tokens that are not known yet. These are always its last, so no cached
   block contains them, and no step in flight writes to a cached block. This includes the extra step of a request that
   has ended at a stop token: it computes that token, at its own position.
3. Drafts are computed at the positions after the last known token, which no cached block contains either. Accepted
   drafts become known tokens, and are computed already. The position of a rejected draft is computed again before its
   block can be cached.
4. A request that ends or is preempted caches the blocks whose tokens have become known since, and frees its blocks
   while steps in flight may still write to uncached ones. Their next owner's writes come later, and it reads only what
   it wrote.
5. After a failed step nothing is in flight any more, and all hashes are forgotten.
"""

from array import array
from collections import Counter
from collections.abc import Iterable

from quire_engine.kv_cache.block_pool import BlockPool, KVCacheBlock
from quire_engine.kv_cache.hashing import NONE_HASH, encode_extra_keys, hash_block_tokens
from quire_engine.kv_cache.sequence import CachedSequence
from quire_engine.snapshot import PackedBlocks

__all__ = ["KVCacheManager"]


class KVCacheManager:
    """Allocates blocks for the tokens that requests are about to compute, and shares equal prefixes."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.block_pool = BlockPool(num_blocks)
        self._blocks: dict[str, list[KVCacheBlock]] = {}
        self._num_cached_blocks: dict[str, int] = {}  # how many of a request's blocks were offered to the cache

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole cache."""
        return len(self.block_pool.blocks)

    def get_block_ids(self, request_id: str) -> list[int]:
        """The request's block table."""
        return [block.block_id for block in self._blocks.get(request_id, ())]

    def num_blocks_of(self, request_id: str) -> int:
        """Blocks that the request refers to."""
        return len(self._blocks.get(request_id, ()))

    def snapshot(self, request_ids: Iterable[str]) -> PackedBlocks:
        """The present state of all blocks, with the block tables of `request_ids`, in that order."""
        cached = self.block_pool.cached_blocks
        return PackedBlocks(
            self.block_size,
            self.num_blocks,
            [array("i", self.get_block_ids(request_id)).tobytes() for request_id in request_ids],
            array("i", [block.block_id for block in cached]).tobytes(),
            array("i", [block.depth for block in cached]).tobytes(),
            array("q", [hash(block.root_hash) for block in cached]).tobytes(),
        )

    def get_computed_blocks(self, request: CachedSequence) -> list[KVCacheBlock]:
        """The longest cached prefix of a request that holds no blocks yet. Does not reference the blocks yet.

        The last token is always left to compute: without it there would be no logits to sample from.
        """
        if not self.enable_prefix_caching or request.skip_reading_prefix_cache:
            return []
        max_blocks = (request.num_tokens - 1) // self.block_size
        self._extend_block_hashes(request, max_blocks)
        computed: list[KVCacheBlock] = []
        for block_hash in request.block_hashes[:max_blocks]:
            block = self.block_pool.get_cached_block(block_hash)
            if block is None:
                break
            computed.append(block)
        return computed

    def allocate_slots(
        self, request: CachedSequence, num_new_tokens: int, computed_blocks: list[KVCacheBlock] | None = None
    ) -> list[int] | None:
        """Make room for the next `num_new_tokens` of a request.

        ::

            | request's blocks (computed) | computed_blocks (prefix hit) | new blocks ……………………… |
            |◄──────────── num_computed_tokens + hit tokens ────────────►|◄─── num_new_tokens ───►|

        Args:
            request: `num_computed_tokens` does not yet include the prefix hit.
            num_new_tokens: tokens to compute in the coming step, including those in flight. If `num_computed_tokens`
                plus these do not exceed `request.no_allocation_until`, the call may be skipped: it would change
                nothing.
            computed_blocks: the prefix hit, for a request that is just being admitted.

        Returns:
            The ids of the added blocks, including hit blocks, or None if there is not enough room; then nothing has
            changed.
        """
        computed_blocks = computed_blocks or []
        blocks = self._blocks.get(request.request_id, [])
        num_computed = request.num_computed_tokens + len(computed_blocks) * self.block_size
        num_tokens = num_computed + num_new_tokens
        num_new_blocks = -(-num_tokens // self.block_size) - len(blocks) - len(computed_blocks)
        # A free hit block leaves the free queue too, though it is not newly allocated.
        num_free_hits = sum(block.ref_cnt == 0 for block in computed_blocks)
        if max(num_new_blocks, 0) + num_free_hits > self.block_pool.num_free_blocks:
            return None
        self.block_pool.touch(computed_blocks)
        added = computed_blocks + self.block_pool.allocate(max(num_new_blocks, 0))
        if request.request_id not in self._blocks:
            self._blocks[request.request_id] = blocks
            self._num_cached_blocks[request.request_id] = len(computed_blocks)
        blocks.extend(added)
        request.no_allocation_until = len(blocks) * self.block_size
        if self.enable_prefix_caching:
            self._cache_full_blocks(request, min(num_tokens, request.num_tokens))
            next_full = (self._num_cached_blocks[request.request_id] + 1) * self.block_size
            request.no_allocation_until = min(request.no_allocation_until, next_full - 1)
        return [block.block_id for block in added]

    def free(self, request: CachedSequence) -> None:
        """Drop the request's references. Its last blocks are reused first: they are the least likely to be shared."""
        if self.enable_prefix_caching and request.request_id in self._blocks:
            self._cache_full_blocks(request, min(request.num_computed_tokens, request.num_tokens))
        request.no_allocation_until = 0
        blocks = self._blocks.pop(request.request_id, [])
        self._num_cached_blocks.pop(request.request_id, None)
        self.block_pool.free(reversed(blocks))

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self.block_pool.reset_cache()

    def check_integrity(self) -> None:
        """Check the pool, and that reference counts are exactly the requests' references.

        Raises:
            AssertionError: a block is lost, or shared by mistake.
        """
        self.block_pool.check_integrity()
        references = Counter(block.block_id for blocks in self._blocks.values() for block in blocks)
        for block in self.block_pool.blocks:
            assert block.ref_cnt == references[block.block_id], f"{block} has {references[block.block_id]} owners"

    def _cache_full_blocks(self, request: CachedSequence, num_tokens: int) -> None:
        """Cache the blocks that will be full once `num_tokens`, all of them known, are computed.

        This happens before they are computed: every layer writes the keys and values of the whole step before any
        request attends to them, so another request of the same step may already share these blocks.
        """
        num_full = num_tokens // self.block_size
        first = self._num_cached_blocks[request.request_id]
        if num_full <= first:
            return
        self._extend_block_hashes(request, num_full)
        blocks = self._blocks[request.request_id]
        for i in range(first, num_full):
            self.block_pool.cache(blocks[i], request.block_hashes[i], request.block_hashes[0], i)
        self._num_cached_blocks[request.request_id] = num_full

    def _extend_block_hashes(self, request: CachedSequence, num_blocks: int) -> None:
        hashes, size = request.block_hashes, self.block_size
        for i in range(len(hashes), num_blocks):
            parent = hashes[-1] if hashes else NONE_HASH
            token_ids = request.all_token_ids[i * size : (i + 1) * size]
            extra_keys = self._extra_keys(request, i) if i == 0 or request.mm_hashes else b""
            hashes.append(hash_block_tokens(parent, token_ids, extra_keys))

    def _extra_keys(self, request: CachedSequence, index: int) -> bytes:
        """What the content of the request's block depends on besides its tokens; see `encode_extra_keys`."""
        start, end = index * self.block_size, (index + 1) * self.block_size
        mm_hashes = [
            (content, first - start, num_tokens)
            for content, first, num_tokens in request.mm_hashes
            if first < end and first + num_tokens > start
        ]
        if index > 0:
            return encode_extra_keys(mm_hashes=mm_hashes)
        return encode_extra_keys(request.sampling_params.cache_salt, request.lora_id, mm_hashes)
