"""BlockPool: no block is ever lost, shared wrongly or found under content that it does not hold."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from quire_engine.kv_cache.block_pool import BlockPool, FreeKVCacheBlockQueue, KVCacheBlock


def content(name: object) -> bytes:
    """A hash of something."""
    return f"{name}".encode().ljust(32, b".")


def ids(blocks: list[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


def free_ids(pool: BlockPool) -> list[int]:
    return [block.block_id for block in pool.free_queue]


# -- the free queue --------------------------------------------------------------------------------------------------


def test_queue_gives_blocks_in_the_order_in_which_they_came() -> None:
    queue = FreeKVCacheBlockQueue([KVCacheBlock(i) for i in range(3)])
    queue.append(KVCacheBlock(7))
    assert queue.num_free_blocks == 4
    assert [queue.popleft().block_id for _ in range(4)] == [0, 1, 2, 7]
    assert queue.num_free_blocks == 0


@pytest.mark.parametrize("position", [0, 1, 2])
def test_queue_unlinks_from_anywhere(position: int) -> None:
    blocks = [KVCacheBlock(i) for i in range(3)]
    queue = FreeKVCacheBlockQueue(blocks)
    queue.remove(blocks[position])
    assert [block.block_id for block in queue] == [i for i in range(3) if i != position]
    assert queue.num_free_blocks == 2
    queue.append(blocks[position])
    assert [block.block_id for block in queue][-1] == position


def test_queue_refuses_to_unlink_twice() -> None:
    block = KVCacheBlock(0)
    queue = FreeKVCacheBlockQueue([block])
    queue.remove(block)
    with pytest.raises(AssertionError, match="not in the free queue"):
        queue.remove(block)


def test_empty_queue_refuses_to_give() -> None:
    with pytest.raises(AssertionError, match="no free block"):
        FreeKVCacheBlockQueue([]).popleft()


# -- allocate, free, share -------------------------------------------------------------------------------------------


def test_pool_needs_a_block() -> None:
    with pytest.raises(ValueError, match="num_blocks is 0; it must be at least 1"):
        BlockPool(0)


def test_allocated_blocks_are_referenced_once_and_no_longer_free() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    assert ids(blocks) == [0, 1, 2]
    assert [block.ref_cnt for block in blocks] == [1, 1, 1]
    assert free_ids(pool) == [3]
    pool.check_integrity()


def test_allocating_more_than_is_free_is_our_own_bug() -> None:
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 free"):
        BlockPool(2).allocate(3)


def test_least_recently_freed_block_is_reused_first() -> None:
    pool = BlockPool(4)
    a, b, c = pool.allocate(3)
    pool.free([b])
    pool.free([c, a])
    assert free_ids(pool) == [3, b.block_id, c.block_id, a.block_id]
    assert ids(pool.allocate(2)) == [3, b.block_id]
    pool.check_integrity()


def test_block_is_free_only_when_nobody_refers_to_it() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.cache(block, content("x"))
    pool.touch([block])
    pool.free([block])
    assert (block.ref_cnt, pool.num_free_blocks) == (1, 1)
    pool.free([block])
    assert (block.ref_cnt, pool.num_free_blocks) == (0, 2)
    pool.check_integrity()


def test_freeing_twice_is_our_own_bug() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)


# -- cached content --------------------------------------------------------------------------------------------------


def test_block_keeps_its_content_while_free_and_loses_it_when_handed_out_again() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.cache(block, content("x"))
    pool.free([block])
    assert pool.get_cached_block(content("x")) is block
    assert pool.num_cached_free_blocks == 1
    other, again = pool.allocate(2)
    assert again is block
    assert pool.get_cached_block(content("x")) is None
    assert (other.block_hash, again.block_hash) == (None, None)
    assert pool.num_cached_free_blocks == 0
    pool.check_integrity()


def test_touch_takes_a_cached_block_out_of_the_middle_of_the_queue() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.cache(block, content(block.block_id))
    pool.free(blocks)
    pool.touch([blocks[1]])
    assert free_ids(pool) == [3, 0, 2]
    assert (blocks[1].ref_cnt, pool.num_cached_free_blocks) == (1, 2)
    pool.check_integrity()


def test_reused_block_counts_as_most_recently_used_again() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.cache(block, content(block.block_id))
    pool.free(blocks)
    pool.touch([blocks[0]])
    pool.free([blocks[0]])
    assert free_ids(pool) == [1, 2, 0]


def test_first_of_two_blocks_with_equal_content_stays_the_cached_one() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.cache(first, content("x"))
    pool.cache(second, content("x"))
    assert pool.get_cached_block(content("x")) is first
    assert second.block_hash is None
    pool.free([second, first])
    pool.check_integrity()
    pool.allocate(1)
    assert pool.get_cached_block(content("x")) is first, "handing out the copy must not forget the original"
    pool.check_integrity()


def test_block_is_cached_under_one_content_only() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.cache(block, content("x"))
    pool.cache(block, content("y"))
    assert pool.get_cached_block(content("y")) is None
    pool.check_integrity()


def test_caching_a_free_block_is_our_own_bug() -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="cached while free"):
        pool.cache(pool.blocks[0], content("x"))


def test_evictions_are_cached_blocks_that_are_handed_out() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    pool.cache(first, content("first"))
    pool.cache(second, content("second"))
    pool.free([first, second])
    pool.touch([second])
    pool.allocate(1)
    assert pool.num_evictions == 0, "one was taken back, and one that holds nothing is still there"
    pool.allocate(1)
    assert pool.num_evictions == 1
    pool.free([second])
    pool.reset_cache()
    pool.allocate(1)
    assert pool.num_evictions == 1, "what was forgotten before is not evicted"


def test_reset_forgets_content_but_not_owners() -> None:
    pool = BlockPool(3)
    kept, freed = pool.allocate(2)
    pool.cache(kept, content("kept"))
    pool.cache(freed, content("freed"))
    pool.free([freed])
    pool.reset_cache()
    assert pool.get_cached_block(content("kept")) is None
    assert pool.get_cached_block(content("freed")) is None
    assert (kept.ref_cnt, pool.num_free_blocks, pool.num_cached_free_blocks) == (1, 2, 0)
    pool.check_integrity()
    pool.cache(kept, content("kept"))
    pool.free([kept])
    assert pool.num_cached_free_blocks == 1
    pool.check_integrity()


# -- check_integrity itself ------------------------------------------------------------------------------------------


def lose_a_block(pool: BlockPool) -> None:
    pool.free_queue.popleft()


def free_without_queueing(pool: BlockPool) -> None:
    pool.blocks[0].ref_cnt = 0


def refer_to_a_free_block(pool: BlockPool) -> None:
    pool.blocks[3].ref_cnt = 1


def queue_a_block_twice(pool: BlockPool) -> None:
    pool.free_queue.append(pool.blocks[3])


def miscount_the_queue(pool: BlockPool) -> None:
    pool.free_queue.num_free_blocks += 1


def keep_a_hash_that_is_not_filed(pool: BlockPool) -> None:
    pool.blocks[0].block_hash = content("stray")


def file_under_another_hash(pool: BlockPool) -> None:
    pool.blocks[1].block_hash = content("other")


def miscount_cached_free_blocks(pool: BlockPool) -> None:
    pool.free_queue.num_cached += 1


@pytest.mark.parametrize(
    "damage",
    [
        lose_a_block,
        free_without_queueing,
        refer_to_a_free_block,
        queue_a_block_twice,
        miscount_the_queue,
        keep_a_hash_that_is_not_filed,
        file_under_another_hash,
        miscount_cached_free_blocks,
    ],
)
def test_integrity_check_notices(damage: Callable[[BlockPool], None]) -> None:
    pool = BlockPool(6)
    blocks = pool.allocate(3)
    pool.cache(blocks[1], content("x"))
    pool.cache(blocks[2], content("y"))
    pool.free([blocks[2]])
    pool.check_integrity()
    damage(pool)
    with pytest.raises(AssertionError):
        pool.check_integrity()


# -- any history -----------------------------------------------------------------------------------------------------


class BlockPoolHistory(RuleBasedStateMachine):
    """A pool against a plain model of it: a list of free ids, counts of references, and a map of contents."""

    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.free = list(range(num_blocks))
        self.references = [0] * num_blocks
        self.contents: dict[int, bytes] = {}
        self.owned: list[KVCacheBlock] = []  # one entry per reference

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        num_blocks = data.draw(st.integers(0, len(self.free)))
        expected, self.free = self.free[:num_blocks], self.free[num_blocks:]
        blocks = self.pool.allocate(num_blocks)
        assert ids(blocks) == expected
        for block_id in expected:
            self.references[block_id] = 1
            self.contents.pop(block_id, None)
        self.owned += blocks

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def free_some(self, data: st.DataObject) -> None:
        indices = data.draw(st.lists(st.integers(0, len(self.owned) - 1), unique=True, max_size=4))
        blocks = [self.owned[index] for index in indices]
        self.owned = [block for index, block in enumerate(self.owned) if index not in indices]
        for block in blocks:
            self.references[block.block_id] -= 1
            if self.references[block.block_id] == 0:
                self.free.append(block.block_id)
        self.pool.free(blocks)

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), name=st.integers(0, 5))
    def cache(self, data: st.DataObject, name: int) -> None:
        block = data.draw(st.sampled_from(self.owned))
        if block.block_id not in self.contents and content(name) not in self.contents.values():
            self.contents[block.block_id] = content(name)
        self.pool.cache(block, content(name))

    @rule(names=st.lists(st.integers(0, 5), unique=True, max_size=4))
    def reuse(self, names: list[int]) -> None:
        hits = [block for name in names if (block := self.pool.get_cached_block(content(name))) is not None]
        for block in hits:
            if self.references[block.block_id] == 0:
                self.free.remove(block.block_id)
            self.references[block.block_id] += 1
        self.pool.touch(hits)
        self.owned += hits

    @rule()
    def reset_cache(self) -> None:
        self.contents.clear()
        self.pool.reset_cache()

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check_integrity()
        assert free_ids(self.pool) == self.free
        assert [block.ref_cnt for block in self.pool.blocks] == self.references
        assert self.pool.num_free_blocks == len(self.free)
        assert self.pool.num_cached_free_blocks == sum(block_id in self.contents for block_id in self.free)
        for name in range(6):
            holder = self.pool.get_cached_block(content(name))
            expected = [block_id for block_id, held in self.contents.items() if held == content(name)]
            assert ([] if holder is None else [holder.block_id]) == expected


TestBlockPoolHistory = BlockPoolHistory.TestCase
TestBlockPoolHistory.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
