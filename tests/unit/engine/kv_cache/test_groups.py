"""Groups of layers: how a model's layers are grouped, and what a request holds of each group."""

from random import Random

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from quire_engine.kv_cache import STATE, KVCacheGroups, KVCacheManager
from quire_engine.kv_cache.block_pool import NULL_BLOCK
from quire_engine.scheduler.request import Request
from support.scheduling import make_request

BLOCK_SIZE = 4
GEMMA_3 = ((1024,) * 5 + (None,)) * 8
"""Windows of Gemma 3 12B: 48 layers."""


def manager(num_blocks: int, *windows: int | None, enable_prefix_caching: bool = True) -> KVCacheManager:
    return KVCacheManager(num_blocks, BLOCK_SIZE, enable_prefix_caching, KVCacheGroups(windows))


def compute(kv_cache: KVCacheManager, request: Request, num_new_tokens: int) -> list[int] | None:
    """What the scheduler does with a running request, or one that holds nothing yet."""
    hit = [] if kv_cache.num_blocks_of(request.request_id) else kv_cache.get_computed_blocks(request)
    num_hit = kv_cache.num_computed_tokens(hit)
    kv_cache.free_behind_windows(request)
    num_new_tokens = min(num_new_tokens, request.num_tokens - request.num_computed_tokens - num_hit)
    added = kv_cache.allocate_slots(request, num_new_tokens, hit)
    if added is not None:
        request.num_computed_tokens += num_hit + num_new_tokens
    return added


def num_hit_tokens(kv_cache: KVCacheManager, request: Request) -> int:
    return kv_cache.num_computed_tokens(kv_cache.get_computed_blocks(request))


# -- grouping ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("windows", "groups"),
    [
        ([None, None], {None: [(0, 1)]}),
        ([8, 8, 8], {8: [(0, 1, 2)]}),
        ([8, None, 8, None], {None: [(1, 3)], 8: [(0, 2)]}),
        ([8, 8, None, 8, 8, None], {None: [(2, 5)], 8: [(0, 3), (1, 4)]}),
        ([8, 8, None, 8, 8, None, 8], {None: [(2, 5)], 8: [(0, 4), (1, 6), (3,)]}),
        ([8, None, 8, None, 8, None, 8, None, 8], {None: [(1, 3, 5, 7)], 8: [(0, 2, 4, 6, 8)]}),
        ([8, 5, None], {None: [(2,)], 5: [(1,)], 8: [(0,)]}),
        ([8, 100, None], {None: [(1, 2)], 8: [(0,), ()]}),
    ],
)
def test_layers_are_grouped_by_window(
    windows: list[int | None], groups: dict[int | None, list[tuple[int, ...]]]
) -> None:
    got = KVCacheGroups.of(windows, max_model_len=100)
    expected = [(window, numbers) for window, all_numbers in groups.items() for numbers in all_numbers if numbers]
    if windows == [8, 100, None]:  # the smallest kind has one layer
        expected = [(None, (1,)), (None, (2,)), (8, (0,))]
    assert list(zip(got.windows, got.layers, strict=True)) == expected
    assert KVCacheGroups.of(windows, 100, is_hybrid=False).windows == (None,)


def test_a_window_that_no_request_exceeds_is_none() -> None:
    assert KVCacheGroups.of([4096] * 4, max_model_len=4096).keep_everything
    assert not KVCacheGroups.of([4095] * 4, max_model_len=4096).keep_everything


def test_each_stage_has_about_as_many_layers_of_each_group() -> None:
    groups = KVCacheGroups.of(GEMMA_3, 32768)
    for stage in (range(24), range(24, 48)):
        assert {sum(number in stage for number in numbers) for numbers in groups.layers} == {4}


def test_the_longest_request_is_the_one_that_fits() -> None:
    groups = KVCacheGroups((None, 8, 8))
    for num_blocks in range(3, 60):
        longest = groups.max_tokens(num_blocks, BLOCK_SIZE, 6, 10_000)
        assert groups.max_blocks(longest, BLOCK_SIZE, 6) <= num_blocks
        assert groups.max_blocks(longest + 1, BLOCK_SIZE, 6) > num_blocks
    assert KVCacheGroups((None,)).max_tokens(10, 16, 2048, 64) == 160
    assert KVCacheGroups((8,)).max_tokens(5, BLOCK_SIZE, 6, 10_000) == 10_000, "it never holds more than a window"


# -- what is held ------------------------------------------------------------------------------------------------------


def test_groups_take_turns_in_the_block_table() -> None:
    kv_cache, request = manager(16, None, 5), make_request(range(9))
    assert compute(kv_cache, request, 9) == [0, 1, 2, 3, 4, 5]
    assert request.no_allocation_until == 11
    request.all_token_ids += range(50, 56)
    assert compute(kv_cache, request, 1) == []
    assert compute(kv_cache, request, 3) == [6, 7]
    blocks = kv_cache._blocks[request.request_id]
    assert [block is NULL_BLOCK for block in blocks[1::2]] == [True, False, False, False]
    assert kv_cache.get_block_ids(request.request_id) == [0, 0, 2, 3, 4, 5, 6, 7]
    assert kv_cache.num_blocks_of(request.request_id) == 7
    kv_cache.check_integrity()


@pytest.mark.parametrize("window", range(2, 14))
def test_exactly_what_is_behind_the_window_is_freed(window: int) -> None:
    for num_computed in range(1, 20):
        kv_cache, request = manager(16, window), make_request(range(30))
        compute(kv_cache, request, num_computed)
        kv_cache.free_behind_windows(request)
        blocks = kv_cache._blocks[request.request_id]
        # The next token, at position num_computed, sees itself and the window - 1 before it.
        seen = {position // BLOCK_SIZE for position in range(max(num_computed - window + 1, 0), num_computed)}
        assert {i for i, block in enumerate(blocks) if block is not NULL_BLOCK} - seen <= {num_computed // BLOCK_SIZE}
        assert all(blocks[i] is not NULL_BLOCK for i in seen)


def test_a_long_prompt_holds_a_chunk_and_a_window() -> None:
    kv_cache, request = manager(1000, None, 16), make_request(range(1000))
    most = 0
    while request.num_computed_tokens < 1000:
        compute(kv_cache, request, 32)
        most = max(most, kv_cache.num_blocks_of(request.request_id) - -(-request.num_computed_tokens // BLOCK_SIZE))
    assert most == (32 + 16) // BLOCK_SIZE
    assert most <= kv_cache.groups.max_blocks(1000, BLOCK_SIZE, 32) - 250


def test_memory_of_a_prompt_of_32k_tokens_in_the_shape_of_gemma_3() -> None:
    """In units of the keys and values of 16 tokens of one layer."""

    def held(is_hybrid: bool) -> tuple[int, int]:
        groups = KVCacheGroups.of(GEMMA_3, 32768, is_hybrid)
        kv_cache = KVCacheManager(20_000, 16, groups=groups)
        request, most = make_request([7] * 32768), 0
        while request.num_computed_tokens < 32768:
            compute(kv_cache, request, 2048)
            most = max(most, kv_cache.num_blocks_of(request.request_id))
        kv_cache.free_behind_windows(request)
        layers = max(map(len, groups.layers))
        return layers * kv_cache.num_blocks_of(request.request_id), layers * most

    assert held(is_hybrid=False) == (98304, 98304)
    # 8 layers of 2048 blocks, and 40 of 64; while a chunk is computed, 40 of 192.
    assert held(is_hybrid=True) == (8 * 2048 + 40 * 64, 8 * 2048 + 40 * 192)


# -- states ------------------------------------------------------------------------------------------------------------


def with_states(num_states: int = 20, snapshot_blocks: int = 50) -> KVCacheManager:
    return KVCacheManager(100, BLOCK_SIZE, True, KVCacheGroups((None, STATE), (), snapshot_blocks), num_states)


def run_with_states(kv_cache: KVCacheManager, request: Request, tokens: list[int]) -> None:
    """Compute the prompt, and then token by token; the request ends."""
    kv_cache.begin_step()
    assert compute(kv_cache, request, request.num_tokens) is not None
    for token in tokens:
        request.all_token_ids.append(token)
        kv_cache.begin_step()
        assert compute(kv_cache, request, 1) is not None
        kv_cache.check_integrity()
    kv_cache.free(request)
    kv_cache.check_integrity()


@pytest.mark.parametrize("num_tokens", range(1, 10))
def test_the_next_turn_goes_on_from_the_last_full_block(num_tokens: int) -> None:
    kv_cache, request = with_states(), make_request(range(10))
    run_with_states(kv_cache, request, [*range(100, 100 + num_tokens)])
    following = make_request([*request.all_token_ids, 1, 2, 3, 4])
    assert num_hit_tokens(kv_cache, following) == (10 + num_tokens) // BLOCK_SIZE * BLOCK_SIZE
    another = make_request([*range(10), 7, 7, 7])
    assert num_hit_tokens(kv_cache, another) == 8, "the end of the prompt is kept, too"


def test_a_state_that_was_found_stays_for_others() -> None:
    kv_cache, first = with_states(), make_request(range(12))
    run_with_states(kv_cache, first, [])
    for salt in (50, 60, 70):
        request = make_request([*range(12), *range(salt, salt + 9)])
        assert num_hit_tokens(kv_cache, request) == 12
        run_with_states(kv_cache, request, [*range(200, 210)])


@pytest.mark.parametrize("states_alone", [False, True])
def test_turns_evict_no_state_while_there_is_a_block_without_one(states_alone: bool) -> None:
    groups = KVCacheGroups((STATE,) if states_alone else (None, STATE), (), 50)
    kv_cache = KVCacheManager(6 if states_alone else 100, BLOCK_SIZE, True, groups, 6)
    for number in range(5):
        run_with_states(kv_cache, make_request([number] * 10), [])
    hits = [num_hit_tokens(kv_cache, make_request([number] * 12)) for number in range(5)]
    assert hits == [8] * 5, "each leaves one state"


def test_long_prompts_have_snapshots_as_far_as_there_is_room() -> None:
    for num_states, expected in ((20, [8, 16, 24, 32]), (4, [24, 32])):
        kv_cache = with_states(num_states, snapshot_blocks=2)
        run_with_states(kv_cache, make_request(range(37)), [])
        found = [num_hit_tokens(kv_cache, make_request([*range(end), 99])) for end in (8, 16, 24, 32)]
        assert [end for end in found if end] == expected, "the last ones are the most useful"


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_snapshots_are_for_the_prefix_cache_alone(enable_prefix_caching: bool) -> None:
    kv_cache = KVCacheManager(100, BLOCK_SIZE, enable_prefix_caching, KVCacheGroups((None, STATE), (), 2), 20)
    assert compute(kv_cache, make_request(range(37)), 37) is not None
    assert 20 - kv_cache.block_pool.num_free_states == (6 if enable_prefix_caching else 2)


def test_states_that_only_running_requests_need_are_reported_when_they_end() -> None:
    """What is stored elsewhere is what the cache keeps."""
    kv_cache, request = with_states(snapshot_blocks=3), make_request(range(9))
    reported: list[bytes] = []
    kv_cache.block_pool.on_filed = reported.append
    run_with_states(kv_cache, request, [*range(100, 120)])
    hashes = [block_hash + kv_cache.state_suffix for block_hash in request.block_hashes]
    places = {2, 5, 1, 6}  # each third block, the last before the prompt's end, and the last full one
    assert {i for i, block_hash in enumerate(hashes) if block_hash in reported} == places


# -- prefix hits -------------------------------------------------------------------------------------------------------


def test_a_hit_needs_the_window_alone_before_its_end() -> None:
    kv_cache, request = manager(64, None, 8), make_request(range(41))
    compute(kv_cache, request, 41)
    kv_cache.free(request)
    again = make_request(range(41))
    hit = kv_cache.get_computed_blocks(again)
    assert kv_cache.num_computed_tokens(hit) == 40
    assert [block is NULL_BLOCK for block in hit[1::2]] == [True] * 8 + [False] * 2
    assert not any(block is NULL_BLOCK for block in hit[::2])
    assert compute(kv_cache, again, 1) is not None
    assert kv_cache.num_blocks_of(again.request_id) == 11 + 3
    kv_cache.check_integrity()


def take_content(kv_cache: KVCacheManager, place: int) -> None:
    """Reuse a block of the one request that there is, as another request would."""
    block = next(iter(kv_cache._blocks.values()))[place]
    del kv_cache.block_pool._cached[block.block_hash]  # type: ignore[arg-type]
    block.block_hash = None


@pytest.mark.parametrize(
    ("window", "lost", "num_hit"),
    [
        (8, [], 40), (8, [0, 1, 7], 40), (8, [8], 32), (8, [9], 36), (8, [9, 8, 7], 28), (8, [9, 7], 28),
        (8, [9, 6], 36),
        (5, [9], 36), (5, [8], 40), (1, list(range(10)), 40), (9, [9, 6], 36), (100, [3], 12),
    ],
)  # fmt: skip
def test_a_hit_ends_where_each_group_has_what_it_needs(window: int, lost: list[int], num_hit: int) -> None:
    kv_cache, request = manager(64, None, window, enable_prefix_caching=True), make_request(range(41))
    assert kv_cache.allocate_slots(request, 41) is not None
    for index in lost:
        take_content(kv_cache, 2 * index + 1)
    assert num_hit_tokens(kv_cache, make_request(range(41))) == num_hit


def longest_hit(present: list[list[bool]], windows: tuple[int | None, ...]) -> int:
    """By trying all lengths, in blocks."""
    for length in range(len(present[0]), 0, -1):
        firsts = [0 if window is None else max(length * BLOCK_SIZE - window + 1, 0) for window in windows]
        if all(
            all(present[group][position // BLOCK_SIZE] for position in range(first, length * BLOCK_SIZE))
            for group, first in enumerate(firsts)
        ):
            return length
    return 0


@pytest.mark.parametrize("seed", range(200))
def test_the_longest_hit_is_found(seed: int) -> None:
    rng = Random(seed)
    windows = rng.choice([(None, 6, 11), (3, 9), (None, None, 5), (None, 1, 30), (12,), (4, 4, 4)])
    kv_cache, request = manager(64, *windows), make_request(range(41))
    assert kv_cache.allocate_slots(request, 41) is not None
    present = [[rng.random() < 0.8 for _ in range(10)] for _ in windows]
    for group, own in enumerate(present):
        for index, is_there in enumerate(own):
            if not is_there:
                take_content(kv_cache, index * len(windows) + group)
    assert num_hit_tokens(kv_cache, make_request(range(41))) == BLOCK_SIZE * longest_hit(present, windows)


def test_groups_do_not_take_each_others_blocks() -> None:
    kv_cache, request = manager(64, None, 100, 100), make_request(range(9))
    added = compute(kv_cache, request, 9)
    assert added is not None
    hit = kv_cache.get_computed_blocks(make_request(range(9)))
    assert [block.block_id for block in hit] == added[:6]


# -- any history -------------------------------------------------------------------------------------------------------


class GroupsHistory(RuleBasedStateMachine):
    """Requests that share prefixes come, are computed in chunks, take tokens back, and go."""

    @initialize(
        windows=st.sampled_from([(None, 5), (7,), (None, 1, 6), (None, None, 9, 9), (3, 8)]),
        num_blocks=st.integers(24, 60),
        enable_prefix_caching=st.booleans(),
    )
    def start(self, windows: tuple[int | None, ...], num_blocks: int, enable_prefix_caching: bool) -> None:
        self.windows = windows
        self.kv_cache = manager(num_blocks, *windows, enable_prefix_caching=enable_prefix_caching)
        self.live: list[Request] = []
        self.written: dict[int, tuple[int, tuple[int, ...]]] = {}  # block id → group, and tokens up to its end

    @rule(shared=st.integers(0, 30), own=st.integers(1, 8), name=st.integers(40, 45))
    def add(self, shared: int, own: int, name: int) -> None:
        if len(self.live) < 4:
            self.live.append(make_request([*range(shared), *[name] * own]))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num_new_tokens=st.integers(1, 12))
    def go_on(self, data: st.DataObject, num_new_tokens: int) -> None:
        request = data.draw(st.sampled_from(self.live))
        if request.num_computed_tokens == request.num_tokens:
            request.all_token_ids.append(num_new_tokens)
        if compute(self.kv_cache, request, num_new_tokens) is None:
            self.go(request)
            return
        first = max(request.num_computed_tokens - num_new_tokens, 0) // BLOCK_SIZE
        blocks = self.kv_cache._blocks[request.request_id][first * len(self.windows) :]
        for place, block in enumerate(blocks):
            index, group = first + place // len(self.windows), place % len(self.windows)
            end = min((index + 1) * BLOCK_SIZE, request.num_computed_tokens)
            if block is not NULL_BLOCK:
                self.written[block.block_id] = group, tuple(request.all_token_ids[:end])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.go(data.draw(st.sampled_from(self.live)))

    @rule()
    def reset(self) -> None:
        self.kv_cache.reset_prefix_cache()

    def go(self, request: Request) -> None:
        self.kv_cache.free(request)
        self.live.remove(request)

    def seen(self, request: Request) -> list[tuple[int, int, int]]:
        """(index, group, block id) of all that the request's next token sees."""
        table = self.kv_cache.get_block_ids(request.request_id)
        first = [0 if window is None else max(request.num_computed_tokens - window + 1, 0) for window in self.windows]
        return [
            (index, group, table[index * len(self.windows) + group])
            for group in range(len(self.windows))
            for index in range(first[group] // BLOCK_SIZE, -(-request.num_computed_tokens // BLOCK_SIZE))
        ]

    @invariant()
    def nothing_is_lost_and_everyone_sees_their_own(self) -> None:
        if not hasattr(self, "live"):
            return
        self.kv_cache.check_integrity()
        for request in self.live:
            for index, group, block_id in self.seen(request):
                own_group, tokens = self.written[block_id]
                end = min((index + 1) * BLOCK_SIZE, request.num_computed_tokens)
                assert (own_group, tokens[:end]) == (group, tuple(request.all_token_ids[:end]))

    def teardown(self) -> None:
        for request in list(getattr(self, "live", [])):
            self.go(request)
        if hasattr(self, "kv_cache"):
            assert self.kv_cache.block_pool.num_free_blocks == self.kv_cache.num_blocks


TestGroupsHistory = GroupsHistory.TestCase
TestGroupsHistory.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)


def test_integrity_check_notices_a_gap_and_a_missing_block() -> None:
    for place, text in ((2, "group 0 lacks a block"), (3, "group 1 has a gap")):
        kv_cache, request = manager(16, None, 5), make_request(range(9))
        compute(kv_cache, request, 9)
        blocks = kv_cache._blocks[request.request_id]
        kv_cache.block_pool.free([blocks[place]])
        blocks[place] = NULL_BLOCK
        with pytest.raises(AssertionError, match=text):
            kv_cache.check_integrity()
