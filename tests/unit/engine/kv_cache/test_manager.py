"""KVCacheManager: who gets which blocks, and which of them an equal prefix shares."""

import pytest
from quire_engine.kv_cache import KVCacheBlock, KVCacheManager
from quire_engine.scheduler.request import Request
from support.scheduling import make_request

BLOCK_SIZE = 4


def admit(manager: KVCacheManager, request: Request, num_new_tokens: int | None = None) -> list[int] | None:
    """What the scheduler does with a request that holds nothing yet; returns the added block ids."""
    hit = manager.get_computed_blocks(request)
    num_hit = len(hit) * manager.block_size
    num_new_tokens = request.num_tokens - num_hit if num_new_tokens is None else num_new_tokens
    added = manager.allocate_slots(request, num_new_tokens, hit)
    if added is not None:
        request.num_computed_tokens = num_hit + num_new_tokens
    return added


def proceed(manager: KVCacheManager, request: Request, num_new_tokens: int) -> list[int] | None:
    """What the scheduler does with a running request."""
    added = manager.allocate_slots(request, num_new_tokens)
    if added is not None:
        request.num_computed_tokens += num_new_tokens
    return added


def snapshot(manager: KVCacheManager) -> object:
    """Everything that an unsuccessful call must leave as it was."""
    pool = manager.block_pool
    return (
        [block.block_id for block in pool.free_queue],
        [(block.ref_cnt, block.block_hash) for block in pool.blocks],
        pool.num_cached_free_blocks,
        {request_id: manager.get_block_ids(request_id) for request_id in manager._blocks},
        dict(manager._num_cached_blocks),
    )


def ids(blocks: list[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


def test_blocks_are_added_only_as_tokens_need_them() -> None:
    manager = KVCacheManager(8, BLOCK_SIZE)
    request = make_request(range(6))
    assert admit(manager, request) == [0, 1]
    request.all_token_ids += [90, 91, 92]
    assert proceed(manager, request, 1) == []
    assert proceed(manager, request, 1) == []
    assert proceed(manager, request, 1) == [2]
    assert manager.get_block_ids(request.request_id) == [0, 1, 2]
    manager.check_integrity()


def test_unknown_request_has_no_blocks() -> None:
    manager = KVCacheManager(2, BLOCK_SIZE)
    assert manager.get_block_ids("nobody") == []
    manager.free(make_request([1]))
    manager.check_integrity()


# -- prefix hits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "num_hits"), [(3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (11, 2), (12, 2), (13, 3), (20, 3)]
)
def test_hit_is_of_full_blocks_and_never_of_the_last_token(num_tokens: int, num_hits: int) -> None:
    manager = KVCacheManager(16, BLOCK_SIZE)
    admit(manager, make_request(range(14)))  # three full blocks, one that is not
    hit = manager.get_computed_blocks(make_request(range(num_tokens)))
    assert ids(hit) == [0, 1, 2][:num_hits]


def test_prompt_of_whole_blocks_leaves_its_last_block_to_compute() -> None:
    manager = KVCacheManager(16, BLOCK_SIZE)
    admit(manager, make_request(range(8)))
    again = make_request(range(8))
    assert admit(manager, again) == [0, 2]
    assert again.num_computed_tokens == 8
    manager.check_integrity()


def test_hit_ends_at_the_first_difference() -> None:
    manager = KVCacheManager(16, BLOCK_SIZE)
    admit(manager, make_request(range(12)))
    assert ids(manager.get_computed_blocks(make_request([*range(7), 99, *range(8, 13)]))) == [0]
    assert ids(manager.get_computed_blocks(make_request([99, *range(1, 13)]))) == []


def test_hit_ends_where_a_block_was_reused_though_later_ones_are_still_cached() -> None:
    manager = KVCacheManager(4, BLOCK_SIZE)
    request = make_request(range(13))
    admit(manager, request)
    manager.free(request)
    manager.block_pool.touch([manager.block_pool.blocks[i] for i in (0, 2, 3)])
    manager.block_pool.allocate(1)  # takes block 1
    assert ids(manager.get_computed_blocks(make_request(range(13)))) == [0]


def test_equal_block_behind_a_different_prefix_is_no_hit() -> None:
    manager = KVCacheManager(16, BLOCK_SIZE)
    admit(manager, make_request([1, 1, 1, 1, 7, 7, 7, 7, 0]))
    assert manager.get_computed_blocks(make_request([7, 7, 7, 7, 0])) == []
    assert manager.get_computed_blocks(make_request([2, 2, 2, 2, 7, 7, 7, 7, 0])) == []


def test_request_that_has_ended_is_still_a_hit() -> None:
    manager = KVCacheManager(8, BLOCK_SIZE)
    request = make_request(range(9))
    admit(manager, request)
    manager.free(request)
    again = make_request(range(9))
    assert ids(manager.get_computed_blocks(again)) == [0, 1]
    assert admit(manager, again) == [0, 1, 3]
    manager.check_integrity()


def test_only_what_is_computed_is_offered() -> None:
    manager = KVCacheManager(8, BLOCK_SIZE)
    admit(manager, make_request(range(16)), num_new_tokens=7)
    assert ids(manager.get_computed_blocks(make_request(range(16)))) == [0]


def test_each_chunk_of_a_prompt_is_offered_as_it_is_computed() -> None:
    manager = KVCacheManager(8, BLOCK_SIZE)
    request = make_request(range(16))
    admit(manager, request, num_new_tokens=7)
    proceed(manager, request, 1)
    assert ids(manager.get_computed_blocks(make_request(range(16)))) == [0, 1]
    proceed(manager, request, 8)
    assert ids(manager.get_computed_blocks(make_request(range(17)))) == [0, 1, 2, 3]


def test_output_is_offered_like_a_prompt() -> None:
    manager = KVCacheManager(8, BLOCK_SIZE)
    request = make_request(range(7))
    admit(manager, request)
    request.all_token_ids += [50, 51]
    proceed(manager, request, 1)
    assert ids(manager.get_computed_blocks(make_request([*range(7), 50, 51]))) == [0, 1]
    assert ids(manager.get_computed_blocks(make_request([*range(7), 49, 51]))) == [0]


def test_requests_of_one_step_share_their_prefix() -> None:
    manager = KVCacheManager(8, BLOCK_SIZE)
    assert admit(manager, make_request([*range(8), 50])) == [0, 1, 2]
    assert admit(manager, make_request([*range(8), 60, 61])) == [0, 1, 3]
    assert [block.ref_cnt for block in manager.block_pool.blocks[:4]] == [2, 2, 1, 1]
    manager.check_integrity()


def test_shared_blocks_stay_until_the_last_owner_is_gone() -> None:
    manager = KVCacheManager(4, BLOCK_SIZE)
    first, second = make_request([*range(8), 50]), make_request([*range(8), 60])
    admit(manager, first)
    admit(manager, second)
    manager.free(first)
    assert manager.block_pool.num_free_blocks == 1
    manager.check_integrity()
    manager.free(second)
    assert manager.block_pool.num_free_blocks == 4
    manager.check_integrity()


def test_without_prefix_caching_nothing_is_shared_or_kept() -> None:
    manager = KVCacheManager(8, BLOCK_SIZE, enable_prefix_caching=False)
    first, second = make_request(range(9)), make_request(range(9))
    assert admit(manager, first) == [0, 1, 2]
    assert admit(manager, second) == [3, 4, 5]
    manager.free(first)
    assert manager.block_pool.num_cached_free_blocks == 0
    assert first.block_hashes == []
    manager.check_integrity()


def test_reset_forgets_prefixes_while_their_owner_goes_on() -> None:
    manager = KVCacheManager(8, BLOCK_SIZE)
    request = make_request(range(9))
    admit(manager, request)
    manager.reset_prefix_cache()
    assert manager.get_computed_blocks(make_request(range(9))) == []
    request.all_token_ids += [50, 51, 52, 53]
    proceed(manager, request, 4)
    manager.check_integrity()
    manager.free(request)
    manager.check_integrity()


# -- no room ---------------------------------------------------------------------------------------------------------


def test_running_request_without_room_changes_nothing() -> None:
    manager = KVCacheManager(3, BLOCK_SIZE)
    request = make_request(range(8))
    admit(manager, request)
    admit(manager, make_request([99]))
    request.all_token_ids.append(50)
    before = snapshot(manager)
    assert manager.allocate_slots(request, 1) is None
    assert snapshot(manager) == before
    manager.check_integrity()


def test_new_request_without_room_changes_nothing() -> None:
    manager = KVCacheManager(3, BLOCK_SIZE)
    admit(manager, make_request(range(8)))
    before = snapshot(manager)
    assert admit(manager, make_request([99] * 5)) is None
    assert snapshot(manager) == before
    assert admit(manager, make_request([99] * 4)) == [2]
    manager.check_integrity()


def test_new_request_with_a_hit_and_without_room_changes_nothing() -> None:
    manager = KVCacheManager(4, BLOCK_SIZE)
    admit(manager, make_request([*range(8), 50]))
    before = snapshot(manager)
    assert admit(manager, make_request([*range(8), *range(60, 65)])) is None
    assert snapshot(manager) == before
    assert admit(manager, make_request([*range(8), *range(60, 64)])) == [0, 1, 3]
    manager.check_integrity()


def test_free_hit_blocks_are_not_counted_as_room_for_the_rest() -> None:
    manager = KVCacheManager(4, BLOCK_SIZE)
    ended = make_request(range(9))
    admit(manager, ended)
    manager.free(ended)
    admit(manager, make_request([99]))  # takes the one block that never held anything
    assert manager.block_pool.num_free_blocks == 3
    before = snapshot(manager)
    # Two free blocks are the hit itself, so one is left where two are needed.
    assert admit(manager, make_request(range(16))) is None
    assert snapshot(manager) == before
    assert admit(manager, make_request(range(12))) == [0, 1, 2]
    manager.check_integrity()


# -- free ------------------------------------------------------------------------------------------------------------


def test_last_blocks_of_a_request_are_reused_first() -> None:
    manager = KVCacheManager(4, BLOCK_SIZE)
    request = make_request(range(15))
    assert admit(manager, request) == [0, 1, 2, 3]
    manager.free(request)
    assert ids(list(manager.block_pool.free_queue)) == [3, 2, 1, 0]
    admit(manager, make_request([99] * 5))
    assert ids(manager.get_computed_blocks(make_request(range(15)))) == [0, 1]


def test_request_freed_twice_is_freed_once() -> None:
    manager = KVCacheManager(4, BLOCK_SIZE)
    request = make_request(range(5))
    admit(manager, request)
    manager.free(request)
    manager.free(request)
    assert manager.block_pool.num_free_blocks == 4
    manager.check_integrity()


def test_nothing_is_remembered_of_requests_that_are_gone() -> None:
    manager = KVCacheManager(4, BLOCK_SIZE)
    before = snapshot(manager)
    request = make_request(range(3))
    admit(manager, request)
    assert snapshot(manager) != before
    manager.free(request)
    assert (manager._blocks, manager._num_cached_blocks) == ({}, {})


def test_preempted_request_finds_its_own_blocks_again_output_included() -> None:
    manager = KVCacheManager(8, BLOCK_SIZE)
    request = make_request(range(7))
    admit(manager, request)
    request.all_token_ids += [50, 51, 52]
    proceed(manager, request, 1)
    manager.free(request)
    request.num_computed_tokens = 0
    assert admit(manager, request) == [0, 1, 2]
    assert request.num_computed_tokens == 10
    manager.check_integrity()


# -- check_integrity itself ------------------------------------------------------------------------------------------


def test_integrity_check_notices_a_reference_without_owner() -> None:
    manager = KVCacheManager(4, BLOCK_SIZE)
    admit(manager, make_request([1]))
    manager.block_pool.blocks[0].ref_cnt += 1
    manager.block_pool.check_integrity()
    with pytest.raises(AssertionError, match="1 owners"):
        manager.check_integrity()


def test_integrity_check_notices_a_block_with_two_owners_and_one_reference() -> None:
    manager = KVCacheManager(4, BLOCK_SIZE)
    first, second = make_request([1]), make_request([2])
    admit(manager, first)
    admit(manager, second)
    manager._blocks[second.request_id].append(manager.block_pool.blocks[0])
    manager.block_pool.check_integrity()
    with pytest.raises(AssertionError, match="2 owners"):
        manager.check_integrity()
