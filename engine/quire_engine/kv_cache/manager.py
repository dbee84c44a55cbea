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
6. What a KV connector loads gets a block once it lies in the memory of every rank, checked, and is filed when the step
   is scheduled that writes it there, before it computes anything.
7. A block behind a window is freed when the step that no longer sees it is scheduled. Earlier steps may still read it;
   its next owner's writes come later.
8. A block of states is cached when the step after the one that writes it is scheduled, as sequences of a step are
   computed side by side. The state after an accepted draft is written by the next step, which computes the draft again.

A request has one list of blocks. With several groups of layers (`groups`) they take turns in it, so that the list
always has as many entries of each group; what lies behind a group's window is the null block::

    window of group 1: 5 tokens       tokens    0 … 3     4 … 7     8 … 11
    blocks of 4, 12 tokens computed   blocks    17  ∅     20  9     4   30     of group 0, of group 1, of group 0, …
"""

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from quire_engine.kv_cache.block_pool import NULL_BLOCK, BlockPool, KVCacheBlock
from quire_engine.kv_cache.groups import ONE_GROUP, STATES_PER_REQUEST, KVCacheGroups
from quire_engine.kv_cache.hashing import extend_block_hashes, suffix_of_group
from quire_engine.kv_cache.state import STATE
from quire_engine.messages import PromptPart
from quire_engine.sampling_params import SamplingParams
from quire_engine.snapshot import PackedBlocks

STATE_REACH = 2
"""A token needs the state after the one before it, as if it saw itself and that one."""


class CachedSequence(Protocol):
    """A request's tokens, and what else its blocks depend on; the scheduler's `Request` implements it."""

    request_id: str
    sampling_params: SamplingParams
    """Only the cache salt is used."""
    all_token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    num_output_placeholders: int
    block_hashes: list[bytes]
    """Hash of each full block, as far as needed so far; the KV cache manager fills it in."""
    lora_id: str | None
    prompt_parts: list[PromptPart]
    no_allocation_until: int
    """Up to this many tokens `allocate_slots`, which sets it, has no block to add and none that becomes full."""

    @property
    def num_tokens(self) -> int:
        """Length of `all_token_ids`."""

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Whether every token has to be computed, cached or not."""


@dataclass(slots=True)
class _RequestStates:
    """The blocks of states of one request; `KVCacheManager` decides which are kept.

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


class KVCacheManager:
    """Allocates blocks for the tokens that requests are about to compute, and shares equal prefixes.

    Args:
        num_blocks: of the pool, for all groups together.
        block_size: tokens per block.
        enable_prefix_caching: whether to share equal prefixes.
        groups: of the model's layers.
        num_states: blocks of states; unless all layers keep states.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        groups: KVCacheGroups = ONE_GROUP,
        num_states: int = 0,
    ) -> None:
        self.block_size = block_size
        self.groups = groups
        self._num_groups = groups.num_groups
        self._suffixes = [suffix_of_group(group) for group in range(groups.num_groups)]
        """By group, the suffix of its blocks' hashes."""
        self._windows = [
            (group, STATE_REACH if window == STATE else window)
            for group, window in enumerate(groups.windows)
            if window is not None
        ]
        """Groups with a window; all others come before them, and that of states is the last."""
        self.enable_prefix_caching = enable_prefix_caching
        self.num_blocks = num_blocks
        """Blocks of all groups but that of states, unless there is no other."""
        self._has_states = groups.has_states
        self._states_apart = groups.has_states and groups.num_groups > 1
        """Whether blocks of states are of a kind of their own."""
        self.block_pool = BlockPool(num_blocks, num_states if self._states_apart else 0)
        self._blocks: dict[str, list[KVCacheBlock]] = {}
        self._num_cached_blocks: dict[str, int] = {}  # how many of a request's blocks were offered to the cache
        self._states: dict[str, _RequestStates] = {}
        """By request; empty if no layer keeps states."""

    def get_block_ids(self, request_id: str) -> list[int]:
        """The request's block table; with several groups theirs, in turns. The null block has a valid id, but -1 where
        no state is kept."""
        return self._ids(self._blocks.get(request_id, []))

    def _ids(self, blocks: list[KVCacheBlock]) -> list[int]:
        """Ids of blocks of all groups in turn."""
        ids = [block.block_id for block in blocks]
        if self._has_states:
            last = self._num_groups - 1
            ids[last :: self._num_groups] = [
                -1 if block is NULL_BLOCK else block.block_id for block in blocks[last :: self._num_groups]
            ]
        return ids

    def num_blocks_of(self, request_id: str) -> int:
        """Blocks of keys and values that the request refers to."""
        blocks = self._held_blocks(request_id)
        return sum(not block.is_state for block in blocks) if self._states_apart else len(blocks)

    def _held_blocks(self, request_id: str) -> list[KVCacheBlock]:
        """The request's blocks, without null blocks."""
        blocks = self._blocks.get(request_id, [])
        return [block for block in blocks if block is not NULL_BLOCK] if self._windows else blocks

    def snapshot(self, request_ids: Iterable[str]) -> PackedBlocks:
        """The present state of all blocks, with the block tables of `request_ids`, in that order."""
        cached = [block for block in self.block_pool.cached_blocks if not block.is_state]
        return PackedBlocks(
            self.block_size,
            self.num_blocks,
            [
                array("i", [block.block_id for block in self._held_blocks(request_id) if not block.is_state]).tobytes()
                for request_id in request_ids
            ],
            array("i", [block.block_id for block in cached]).tobytes(),
            array("i", [block.depth for block in cached]).tobytes(),
            array("q", [hash(block.root_hash) for block in cached]).tobytes(),
        )

    def get_computed_blocks(self, request: CachedSequence) -> list[KVCacheBlock]:
        """The longest cached prefix of a request that holds no blocks yet. Does not reference the blocks yet.

        The last token is always left to compute: without it there would be no logits to sample from. With several
        groups, they take turns in the result; of those with a window only the blocks are needed that the next token
        sees, and the others are null blocks.
        """
        if not self.enable_prefix_caching or request.skip_reading_prefix_cache:
            return []
        max_blocks = (request.num_tokens - 1) // self.block_size
        self._extend_block_hashes(request, max_blocks)
        if self._windows:  # without any there is one group
            return self._computed_blocks_of_groups(request.block_hashes[:max_blocks])
        computed: list[KVCacheBlock] = []
        for block_hash in request.block_hashes[:max_blocks]:
            block = self.block_pool.get_cached_block(block_hash)
            if block is None:
                break
            computed.append(block)
        return computed

    def num_computed_tokens(self, computed_blocks: list[KVCacheBlock]) -> int:
        """The tokens of a prefix that `get_computed_blocks` found."""
        return len(computed_blocks) // self._num_groups * self.block_size

    def _computed_blocks_of_groups(self, block_hashes: list[bytes]) -> list[KVCacheBlock]:
        """The longest prefix for which every group has what it needs.

        A shorter prefix needs other blocks of the groups with a window, so these are searched in turn until all agree.
        """
        cached = [_CachedBlocks(self.block_pool, block_hashes, suffix) for suffix in self._suffixes]
        length = len(block_hashes)
        for blocks in cached[: self._num_groups - len(self._windows)]:
            length = next((i for i in range(length) if blocks[i] is None), length)
        agreed, turn = 0, 0
        while length and agreed < len(self._windows):
            group, window = self._windows[turn]
            shorter = self._longest_within_window(cached[group], length, window)
            agreed = agreed + 1 if shorter == length else 1
            length, turn = shorter, (turn + 1) % len(self._windows)
        computed = [NULL_BLOCK] * (length * self._num_groups)
        firsts = [0] * (self._num_groups - len(self._windows))
        firsts += [self._first_seen(length * self.block_size, window) for _, window in self._windows]
        for group, first in enumerate(firsts):
            for i in range(first, length):
                block = cached[group][i]
                assert block is not None
                computed[i * self._num_groups + group] = block
        return computed

    def _first_seen(self, num_computed_tokens: int, window: int) -> int:
        """Index of the first block that a token after so many others sees."""
        return max(num_computed_tokens - window + 1, 0) // self.block_size

    def _longest_within_window(self, cached: "_CachedBlocks", length: int, window: int) -> int:
        """The longest prefix, of at most `length` blocks, after which the group has all that the next token sees."""
        first = self._first_seen(length * self.block_size, window)
        i = length - 1
        while i >= first:
            if cached[i] is None:
                length = i
                first = self._first_seen(length * self.block_size, window)
            i -= 1
        return length

    def free_behind_windows(self, request: CachedSequence) -> None:
        """Free the blocks that neither the request's next token sees nor any after it.

        Call it before the request's next tokens are scheduled, when no draft can be taken back any more.
        """
        if not self._windows or request.request_id not in self._blocks:
            return
        blocks, behind = self._blocks[request.request_id], []
        for group, window in self._windows:
            first_seen = self._first_seen(request.num_computed_tokens, window)
            if self._has_states and group == self._num_groups - 1:
                self._free_states_before(request, blocks, first_seen)
                continue
            for place in range((first_seen - 1) * self._num_groups + group, -1, -self._num_groups):
                if blocks[place] is NULL_BLOCK:
                    break
                behind.append(blocks[place])
                blocks[place] = NULL_BLOCK
        self.block_pool.free(behind)

    def _free_states_before(self, request: CachedSequence, blocks: list[KVCacheBlock], first: int) -> None:
        """Free the request's blocks of states before an index; of these, the cache keeps snapshots, and what the
        request itself has found there. The state after the last full block stays until there is a later one, as
        the turn may end before that; but it does not while there are more tokens to compute."""
        if request.num_computed_tokens >= request.num_tokens - 1:
            first = min(first, request.num_computed_tokens // self.block_size - 1)
        # The next step computes accepted drafts again, and stores the states after the blocks that they fill.
        states = self._states[request.request_id]
        first = min(first, states.num_tokens // self.block_size)
        while states.places and states.places[0] < first:
            index = states.places.pop(0)
            place = (index + 1) * self._num_groups - 1
            if index < states.num_hit_blocks or self._is_snapshot(request, index):
                self.block_pool.free([blocks[place]])
            else:
                self.block_pool.discard(blocks[place])
            blocks[place] = NULL_BLOCK

    def _is_snapshot(self, request: CachedSequence, index: int) -> bool:
        """Whether the cache keeps the state after a block: the last of the prompt, and every so many."""
        return (index + 1) % self.groups.snapshot_blocks == 0 or (
            index == (request.num_prompt_tokens - 1) // self.block_size - 1
        )

    def begin_step(self) -> None:
        """Cache the blocks of states that the last step has written. Call it before a step is scheduled."""
        for states in self._states.values():
            states.cache_written(self.block_pool)

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
                plus these do not exceed `request.no_allocation_until`, nothing is to be done, and the call may be
                skipped.
            computed_blocks: the prefix hit, for a request that is just being admitted.

        Returns:
            The ids of the added blocks, including hit blocks, with several groups in turns; or None if there is not
            enough room; then nothing has changed.
        """
        computed_blocks = computed_blocks or []
        blocks = self._blocks.get(request.request_id, [])
        if blocks and request.num_computed_tokens + num_new_tokens <= request.no_allocation_until:
            return []
        num_groups, num_hits = self._num_groups, len(computed_blocks) // self._num_groups
        num_tokens = request.num_computed_tokens + num_hits * self.block_size + num_new_tokens
        first = (len(blocks) + len(computed_blocks)) // num_groups
        end = max(-(-num_tokens // self.block_size), first)
        new_blocks = self._new_blocks(request, first, end, computed_blocks)
        if new_blocks is None:
            return None
        added = computed_blocks + new_blocks
        if request.request_id not in self._blocks:
            self._blocks[request.request_id] = blocks
            self._num_cached_blocks[request.request_id] = num_hits
            if self._has_states:
                self._states[request.request_id] = _RequestStates(num_hits, [num_hits - 1] if num_hits else [])
        blocks.extend(added)
        if self._has_states:
            states = self._states[request.request_id]
            states.places += [i for i in range(first, end) if blocks[(i + 1) * num_groups - 1] is not NULL_BLOCK]
            states.num_tokens = min(num_tokens, request.num_tokens + request.num_output_placeholders)
        request.no_allocation_until = len(blocks) // num_groups * self.block_size
        if self.enable_prefix_caching:
            self._cache_full_blocks(request, min(num_tokens, request.num_tokens))
            next_full = (self._num_cached_blocks[request.request_id] + 1) * self.block_size
            request.no_allocation_until = min(request.no_allocation_until, next_full - 1)
        return self._ids(added)

    def _new_blocks(
        self, request: CachedSequence, first: int, end: int, computed_blocks: list[KVCacheBlock]
    ) -> list[KVCacheBlock] | None:
        """Reference the blocks of a hit, and allocate those after it: of each group in turns, from the first index to
        the end. None if there is not enough room; then nothing has changed.

        Of states, the last two blocks of a step are needed, and all that drafts reach; and snapshots for the prefix
        cache, if there is room.
        """
        pool, num_paged = self.block_pool, self._num_groups - self._has_states
        room, room_for_states = self._room_beside(computed_blocks)
        room -= num_paged * (end - first)
        if room < 0:
            return None
        states: set[int] = set()
        if self._has_states:
            room = room_for_states if self._states_apart else room
            known = (request.num_tokens - 1) // self.block_size
            needed = min(max(first, min(end - 1, known) - 1), end)
            room -= end - needed
            if room < 0:
                return None
            states = set(range(needed, end))
            if self.enable_prefix_caching:
                snapshots = [i for i in range(first, needed) if self._is_snapshot(request, i)]
                states.update(snapshots[max(len(snapshots) - room, 0) :])
        if computed_blocks:
            pool.touch(block for block in computed_blocks if block is not NULL_BLOCK)
        paged = pool.allocate(num_paged * (end - first))
        if not self._has_states:
            return paged
        own, each, added = iter(pool.allocate(len(states), self._states_apart)), iter(paged), []
        for index in range(first, end):
            added += [*islice(each, num_paged), next(own) if index in states else NULL_BLOCK]
        return added

    def _room_beside(self, computed_blocks: list[KVCacheBlock]) -> tuple[int, int]:
        """How many blocks could be allocated if the blocks of a hit were referenced: of keys and values, and of states.
        A free hit block leaves the free queue too, though it is not newly allocated."""
        are_states = [block.is_state for block in computed_blocks if block.ref_cnt == 0]
        num_states = sum(are_states)
        pool = self.block_pool
        return pool.num_free_blocks - (len(are_states) - num_states), pool.num_free_states - num_states

    def add_loaded_blocks(
        self, request: CachedSequence, computed_blocks: list[KVCacheBlock], num_blocks: int
    ) -> list[KVCacheBlock] | None:
        """Allocate and file blocks of a request that holds none yet, for content that the next step has from elsewhere.

        Args:
            request: they are blocks of its known tokens.
            computed_blocks: the prefix hit, which the added blocks follow.
            num_blocks: how many to add in each group.

        Returns:
            The added blocks, with several groups in turns, and null blocks where the next token needs none. The caller
            has a reference to each of these and to each of the hit. None if there is not enough room for them and for
            one more block of each group; then nothing has changed.
        """
        num_groups, size = self._num_groups, self.block_size
        first = len(computed_blocks) // num_groups
        end = first + num_blocks
        firsts = [first] * (num_groups - len(self._windows))
        firsts += [max(first, self._first_seen(end * size, window)) for _, window in self._windows]
        num_paged = num_groups - self._states_apart
        num_needed, num_states = sum(end - own for own in firsts[:num_paged]), int(self._states_apart)
        pool, (room, room_for_states) = self.block_pool, self._room_beside(computed_blocks)
        if num_needed + num_paged > room or (self._states_apart and room_for_states < STATES_PER_REQUEST):
            return None
        pool.touch(block for block in computed_blocks if block is not NULL_BLOCK)
        allocated, states = iter(pool.allocate(num_needed)), iter(pool.allocate(num_states, are_states=True))
        hashes, added = request.block_hashes, []
        for i in range(first, end):
            for group, own in enumerate(firsts):
                added.append(next(allocated if group < num_paged else states) if i >= own else NULL_BLOCK)
                if i >= own:
                    self.block_pool.cache(added[-1], hashes[i] + self._suffixes[group], hashes[0], i)
        return added

    def cached_block_ids(self, block_hash: bytes) -> list[int] | None:
        """By group but that of states, the ids of the blocks that hold the content of a hash; None if a group has
        none."""
        suffixes = self._suffixes[: self._num_groups - self._has_states]
        blocks = [self.block_pool.get_cached_block(block_hash + suffix) for suffix in suffixes]
        return None if None in blocks else [block.block_id for block in blocks if block is not None]

    @property
    def state_suffix(self) -> bytes:
        """What the hash of a block of states ends with, behind that of the block of tokens before it."""
        return self._suffixes[-1]

    def release(self, blocks: list[KVCacheBlock]) -> None:
        """Drop the caller's references to blocks of `add_loaded_blocks`."""
        self.block_pool.free(block for block in reversed(blocks) if block is not NULL_BLOCK)

    def free(self, request: CachedSequence) -> None:
        """Drop the request's references. Its last blocks are reused first: they are the least likely to be shared."""
        if self.enable_prefix_caching and request.request_id in self._blocks:
            self._cache_full_blocks(request, min(request.num_computed_tokens, request.num_tokens))
        request.no_allocation_until = 0
        blocks = self._held_blocks(request.request_id)
        self._num_cached_blocks.pop(request.request_id, None)
        self._blocks.pop(request.request_id, None)
        if states := self._states.pop(request.request_id, None):
            states.cache_written(self.block_pool)
            kept = [one for one in blocks if one.is_state == self._states_apart]
            last_hash = next((one.block_hash for one in reversed(kept) if one.block_hash is not None), None)
            if self.block_pool.on_filed is not None and last_hash is not None:
                self.block_pool.on_filed(last_hash)  # while it ran, only snapshots were reported
            # Those that are not cached are half of a request's: reuse them before cached ones.
            unused = [one for one in kept if one.block_hash is None]
            blocks = [one for one in blocks if one not in unused]
            for block in unused:
                self.block_pool.discard(block)
        self.block_pool.free(reversed(blocks))

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        for states in self._states.values():
            states.unwritten.clear()
        self.block_pool.reset_cache()

    def check_integrity(self) -> None:
        """Check the pool, that reference counts are exactly the requests' references, and that only blocks behind a
        window are null blocks.

        Raises:
            AssertionError: a block is lost, or shared by mistake.
        """
        self.block_pool.check_integrity()
        references = Counter(id(block) for blocks in self._blocks.values() for block in blocks)
        for block in self.block_pool.blocks:
            assert block.ref_cnt == references[id(block)], f"{block} has {references[id(block)]} owners"
        with_window = dict(self._windows)
        for request_id, blocks in self._blocks.items():
            assert len(blocks) % self._num_groups == 0, f"{request_id}: a group has fewer blocks than another"
            for group in range(self._num_groups):
                is_null = [block is NULL_BLOCK for block in blocks[group :: self._num_groups]]
                if self._has_states and group == self._num_groups - 1:
                    places = [index for index, one in enumerate(is_null) if not one]
                    assert places == self._states[request_id].places, f"{request_id}: its states are elsewhere"
                    continue
                assert group in with_window or not any(is_null), f"{request_id}: group {group} lacks a block"
                assert is_null == sorted(is_null, reverse=True), f"{request_id}: group {group} has a gap"

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
        blocks, hashes, num_groups = self._blocks[request.request_id], request.block_hashes, self._num_groups
        paged = num_groups - self._has_states
        for place in range(first * num_groups, num_full * num_groups):
            block, i, group = blocks[place], place // num_groups, place % num_groups
            if block is NULL_BLOCK:
                continue
            if group < paged:
                self.block_pool.cache(block, hashes[i] + self._suffixes[group], hashes[0], i)
            elif (i + 1) * self.block_size <= (states := self._states[request.request_id]).num_tokens:
                arguments = block, hashes[i] + self._suffixes[group], hashes[0], i, self._is_snapshot(request, i)
                states.unwritten.append(arguments)
        self._num_cached_blocks[request.request_id] = num_full

    def _extend_block_hashes(self, request: CachedSequence, num_blocks: int) -> None:
        extend_block_hashes(
            request.block_hashes, request.all_token_ids, self.block_size, num_blocks,
            request.sampling_params.cache_salt, request.lora_id, request.prompt_parts,
        )  # fmt: skip


class _CachedBlocks:
    """The blocks that hold a prefix for one group of layers, each looked up at its first use. `suffix` is that of the
    group's hashes."""

    def __init__(self, pool: BlockPool, block_hashes: list[bytes], suffix: bytes) -> None:
        self._pool = pool
        self._block_hashes = block_hashes
        self._suffix = suffix

    def __getitem__(self, index: int) -> KVCacheBlock | None:
        return self._pool.get_cached_block(self._block_hashes[index] + self._suffix)
