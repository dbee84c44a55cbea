"""The router against counts kept by hand, a prefix index against a block pool, and both against one who knows all."""

import random
from collections import Counter
from typing import Any

import pytest
from quire_engine.kv_cache import KVCacheManager
from quire_engine.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from quire_engine.replicas.router import STALLED_SECONDS, PrefixIndex, Router, block_keys
from quire_engine.sampling_params import SamplingParams
from quire_engine.scheduler.request import Request
from quire_engine.stats import AdapterStats, SchedulerStats
from support.virtual_clock import Clock

BLOCK = 16


def router(policy: str = "prefix", num_replicas: int = 2, **fields: Any) -> Router:
    return Router(policy, num_replicas, BLOCK, **fields)


def first_token(request_id: str) -> EngineCoreOutputs:
    return EngineCoreOutputs([EngineCoreOutput(request_id, [7])])


def end(request_id: str) -> EngineCoreOutputs:
    return EngineCoreOutputs([EngineCoreOutput(request_id, [7], FinishReason.LENGTH)])


def sequence(request_id: str, token_ids: list[int]) -> Request:
    return Request(EngineCoreRequest(request_id, token_ids, SamplingParams(max_tokens=1)), [], 1024)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_the_index_knows_what_a_pool_has_cached(enable_prefix_caching: bool) -> None:
    """Random prompts over a pool that is too small for them; the pool itself says what is cached."""
    chance = random.Random(3)
    manager = KVCacheManager(24, BLOCK, enable_prefix_caching)
    manager.block_pool.report_events()
    index, live = PrefixIndex(), []
    for number in range(400):
        prompt = [chance.randrange(2) for _ in range(chance.randint(1, 30))]
        request = sequence(str(number), prompt)
        hits = manager.get_computed_blocks(request)
        assert index.num_cached(block_keys(prompt, BLOCK)) == len(hits), number
        if manager.allocate_slots(request, len(prompt) - len(hits) * BLOCK, hits) is not None:
            request.num_computed_tokens = len(prompt)
            live.append(request)
        while live and (len(live) > 3 or chance.random() < 0.2):
            manager.free(live.pop(chance.randrange(len(live))))
        if chance.random() < 0.02:
            manager.reset_prefix_cache()
        index.apply(manager.block_pool.take_events())
    assert (manager.block_pool.num_evictions > 100) == enable_prefix_caching


def test_a_prompt_with_another_salt_has_other_blocks() -> None:
    prompt = list(range(40))
    for salt, expected in (("x", 2), ("y", 0), (None, 0)):
        index = PrefixIndex()
        index.expect(block_keys(prompt, BLOCK, "x"))
        assert index.num_cached(block_keys(prompt, BLOCK, salt)) == expected


def test_requests_of_one_prompt_that_come_together_stay_together() -> None:
    """The first one's blocks count before they are filed: sequences of one request share their prompt."""
    one = router()
    prompt = list(range(400))
    assert {one.route(str(number), prompt, [0, 1]) for number in range(2)} == {0}
    assert one.route("other", list(range(400, 800)), [0, 1]) == 1


def test_what_reads_no_cache_goes_where_there_is_the_least_to_do() -> None:
    one = router()
    prompt = list(range(40))
    one.route("a", prompt, [0, 1])
    assert one.route("b", prompt, [0, 1], reads_cache=False) == 1


def test_nothing_is_left_of_requests_that_ended() -> None:
    one = router()
    ids = [str(number) for number in range(50)]
    chance = random.Random(1)
    for request_id in ids:
        one.route(request_id, [chance.randrange(3) for _ in range(30)], [0, 1])
        if chance.random() < 0.5:
            one.note_outputs(one.replica_of(request_id) or 0, first_token(request_id))
    for request_id in ids:
        replica = one.replica_of(request_id)
        assert replica is not None
        if chance.random() < 0.5:
            one.note_outputs(replica, end(request_id))
        else:
            assert one.remove(request_id) == replica
        assert one.replica_of(request_id) is None
    for load in one._loads:
        assert (load.num_waiting, load.num_running, load.num_queued_tokens) == (0, 0, 0)
        assert not load.index._expected


def test_waiting_requests_count_four_times() -> None:
    one = router("least_loaded")
    assert one.route("a", [1], [0, 1]) == 0
    for number in range(3):
        request_id = f"b{number}"
        assert one.route(request_id, [1], [0, 1]) == 1, "4 against at most 3"
        one.note_outputs(1, first_token(request_id))
    one.note_outputs(0, first_token("a"))
    assert one.route("c", [1], [0, 1]) == 0, "1 against 3"


def test_an_output_of_where_it_was_before_counts_nothing() -> None:
    one = router("least_loaded")
    one.route("a", [1], [0])
    one.route("a", [1], [1])
    one.note_outputs(0, end("a"))
    assert one.replica_of("a") == 1
    assert (one.num_requests(0), one.num_requests(1)) == (0, 1)


def test_in_turn() -> None:
    one = router("round_robin", 3)
    assert [one.route(str(number), [1], [0, 1, 2]) for number in range(5)] == [0, 1, 2, 0, 1]
    assert one.route("x", [1], [0, 1]) == 0, "its turn is that of one that takes none"


def test_a_replica_that_is_silent_while_it_has_work_is_stalled() -> None:
    clock = Clock(0.0)
    one = router(clock=clock)
    clock.now = 50.0
    assert not one.is_stalled(0), "it has nothing to do"
    one.route("a", [1], [0])
    clock.now += STALLED_SECONDS
    assert not one.is_stalled(0)
    clock.now += 0.1
    assert one.is_stalled(0)
    one.note_outputs(0, EngineCoreOutputs())
    assert not one.is_stalled(0)


def test_a_replica_that_died_has_nothing_cached() -> None:
    one = router()
    prompt = list(range(40))
    one.route("a", prompt, [1])
    manager = KVCacheManager(64, BLOCK)
    manager.block_pool.report_events()
    manager.allocate_slots(sequence("a", prompt), 40)
    outputs = end("a")
    outputs.cache_events = manager.block_pool.take_events()
    one.note_outputs(1, outputs)
    assert one.route("b", prompt, [0, 1]) == 1, "it is cached there"
    one.remove("b")
    one.replica_died(1)
    assert one.route("c", prompt, [0, 1]) == 0, "nowhere any more"


# -- conversations on simulated replicas -------------------------------------------------------------------------------


class Replica:
    """A prefix cache, and a step that computes at most `BUDGET` prompt tokens and one token of each running request."""

    BUDGET = 64

    def __init__(self) -> None:
        self.manager = KVCacheManager(6000, BLOCK)
        self.manager.block_pool.report_events()
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_cached = 0

    def num_cached_of(self, prompt: list[int]) -> int:
        """Tokens of a prompt that are cached, or will be once those have run that wait."""
        cached = len(self.manager.get_computed_blocks(sequence("?", prompt))) * BLOCK
        for request in self.waiting:
            pairs = zip(prompt[:-1], request.all_token_ids, strict=False)
            equal = next((i for i, (x, y) in enumerate(pairs) if x != y), len(prompt) - 1)
            cached = max(cached, min(equal, request.num_tokens) // BLOCK * BLOCK)
        return cached

    def step(self) -> EngineCoreOutputs:
        outputs, budget = [], self.BUDGET
        outputs += [EngineCoreOutput(request.request_id, [7]) for request in self.running]
        while self.waiting and budget > 0:
            request = self.waiting.pop(0)
            hits = self.manager.get_computed_blocks(request)
            self.num_cached += len(hits) * BLOCK
            num_new = request.num_tokens - len(hits) * BLOCK
            assert self.manager.allocate_slots(request, num_new, hits) is not None
            request.num_computed_tokens = request.num_tokens
            budget -= num_new
            self.running.append(request)
            outputs.append(EngineCoreOutput(request.request_id, [7]))
        return EngineCoreOutputs(outputs, cache_events=self.manager.block_pool.take_events())


class Conversation:
    """Turns that each begin with all that was said before, over one of a few system prompts."""

    def __init__(self, number: int, chance: random.Random) -> None:
        self.number, self.chance = number, chance
        self.tokens = [1000 * (number % 3) + place for place in range(120)]
        self.turn, self.idle_for, self.left = 0, chance.randint(0, 30), 0

    def next_prompt(self) -> list[int]:
        self.turn += 1
        self.tokens += [self.chance.randrange(10_000, 90_000) for _ in range(self.chance.randint(5, 60))]
        self.left = self.chance.randint(8, 40)
        return list(self.tokens)


def simulate(
    policy: str, num_replicas: int = 4, num_conversations: int = 40, num_turns: int = 7, seed: int = 5
) -> dict[str, float]:
    """Share of the tokens that are cached of those that somewhere are, and how uneven the running requests are while
    there are two for each replica."""
    chance = random.Random(seed)
    one, replicas = router(policy, num_replicas), [Replica() for _ in range(num_replicas)]
    conversations = [Conversation(number, chance) for number in range(num_conversations)]
    live: dict[str, Conversation] = {}
    num_oracle = num_steps = 0
    running: Counter[int] = Counter()
    while any(one.turn < num_turns for one in conversations) or live:
        for talk in conversations:
            request_id = f"{talk.number}-{talk.turn + 1}"
            if talk.left or talk.turn >= num_turns:
                continue
            if talk.idle_for:
                talk.idle_for -= 1
                continue
            prompt = talk.next_prompt()
            request = sequence(request_id, prompt)
            num_oracle += max(replica.num_cached_of(prompt) for replica in replicas)
            chosen = one.route(request_id, prompt, range(num_replicas))
            replicas[chosen].waiting.append(request)
            live[request_id] = talk
        for number, replica in enumerate(replicas):
            outputs = replica.step()
            for output in outputs.outputs:
                talk = live[output.request_id]
                talk.left -= 1
                if talk.left == 0:
                    output.finish_reason = FinishReason.LENGTH
                    ended = next(r for r in replica.running if r.request_id == output.request_id)
                    replica.running.remove(ended)
                    replica.manager.free(ended)
                    talk.idle_for = chance.randint(0, 30)
                    del live[output.request_id]
            one.note_outputs(number, outputs)
        if sum(len(replica.running) for replica in replicas) >= 2 * num_replicas:
            running.update({number: len(replica.running) for number, replica in enumerate(replicas)})
        num_steps += 1
    mean = sum(running.values()) / num_replicas
    return {
        "cached": sum(replica.num_cached for replica in replicas) / num_oracle,
        "imbalance": max(running.values()) / mean - 1,
        "steps": num_steps,
    }


@pytest.mark.parametrize("seed", [0, 5, 11])
def test_conversations_find_what_they_said_and_load_is_even(seed: int) -> None:
    results = simulate("prefix", seed=seed)
    print(results)
    assert results["cached"] >= 0.98
    assert results["imbalance"] <= 0.15


@pytest.mark.parametrize("policy", ["least_loaded", "round_robin"])
def test_other_ways_find_less(policy: str) -> None:
    results = simulate(policy, num_turns=3)
    print(results)
    assert results["cached"] < 0.9


@pytest.mark.parametrize("policy", ["prefix", "least_loaded"])
def test_a_request_goes_where_its_adapter_is(policy: str) -> None:
    """Where it is loaded, or about to be; but not if there is much more to do."""
    chosen = router(policy)
    assert chosen.route("a", [1] * 20, [0, 1], adapter="x") == 0
    assert chosen.route("b", [2] * 20, [0, 1], adapter="y") == 1
    assert chosen.route("c", [3] * 20, [0, 1], adapter="y") == 1
    assert chosen.route("d", [4] * 20, [0, 1], adapter="x") == 0
    for request_id in "abcd":
        chosen.remove(request_id)
    stats = SchedulerStats(adapters=AdapterStats(ready=["y"]))
    chosen.note_outputs(1, EngineCoreOutputs(scheduler_stats=stats))
    assert chosen.route("e", [5] * 20, [0, 1], adapter="y") == 1
    assert [chosen.route(f"f{i}", [6 + i] * 400, [1], adapter="y") for i in range(3)] == [1, 1, 1]
    assert chosen.route("g", [5] * 20, [0, 1], adapter="y") == 0
    chosen.replica_died(1)
    for request_id in ("e", "f0", "f1", "f2", "g"):
        chosen.remove(request_id)
    assert chosen.route("h", [5] * 20, [0, 1], adapter="y") == 0


def test_the_keys_of_a_prompt_are_of_its_adapter() -> None:
    keys = {tuple(block_keys([1] * 40, BLOCK, adapter=adapter)) for adapter in (None, "x", "y")}
    assert len({key for own in keys for key in own}) == 6
