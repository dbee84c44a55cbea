"""Adapters in the scheduler: loads beside the steps, slots in turn, and no request that waits for ever."""

import random
from collections import Counter

import numpy as np
import pytest
from quire_engine.adapters.board import AdapterBoard, LoadOutcome, row_length
from quire_engine.lora import Adapter
from quire_engine.messages import EngineCoreOutput, ErrorCode, FinishReason, SchedulerOutput
from quire_engine.sampling_params import RequestOptions, SamplingParams, StructuredOutputsParams
from quire_engine.scheduler.adapters import AdapterScheduler
from quire_engine.scheduler.request import Request, RequestStatus
from quire_engine.scheduler.scheduler import Scheduler
from support.scheduling import FakeModelRunner, make_request, make_scheduler, undisturbed_output


class Ranks:
    """Two ranks that follow orders: a load is there so many steps after it was ordered, on the second rank later."""

    def __init__(self, max_loras: int, num_cells: int, delay: int) -> None:
        self.board = AdapterBoard(np.zeros((2, row_length(num_cells)), dtype=np.int64))
        self.cells: dict[int, Adapter] = {}
        self.slots: list[Adapter | None] = [None] * max_loras
        self.num_cells, self.delay = num_cells, delay
        self.broken: dict[str, LoadOutcome] = {}
        """By digest or folder."""
        self._under_way: list[list[int]] = []
        self.requests: dict[str, tuple[str | None, int]] = {}
        self.num_loads = 0

    def follow(self, output: SchedulerOutput) -> None:
        orders = output.adapter_orders
        for load in orders.loads if orders is not None else ():
            assert load.cell < self.num_cells
            self.cells[load.cell] = load.adapter
            self._under_way.append([self.delay, load.cell, load.number])
            self.num_loads += 1
        for slot, cell in orders.slots if orders is not None else ():
            self.slots[slot] = self.cells[cell] if cell >= 0 else None
        for new in output.new_requests:
            digest = self.requests[new.request_id][0]
            self.requests[new.request_id] = digest, new.adapter_slot
        for request_id in output.num_scheduled_tokens:  # each is computed with its own adapter, in this very step
            digest, slot = self.requests[request_id]
            adapter = self.slots[slot] if slot >= 0 else None
            assert digest == (None if adapter is None else adapter.digest)
        self.turn()

    def turn(self) -> None:
        for load in list(self._under_way):
            remaining, cell, number = load
            load[0] -= 1
            adapter = self.cells[cell]
            outcome = self.broken.get(adapter.folder) or self.broken.get(adapter.digest, LoadOutcome.READY)
            if remaining == 1:
                self.board.put(0, cell, number, outcome)
            elif remaining <= 0:
                self.board.put(0, cell, number, outcome)
                self.board.put(1, cell, number, LoadOutcome.READY)
                self._under_way.remove(load)


class Engine:
    """A scheduler, a stand-in model and ranks."""

    def __init__(
        self, max_loras: int = 2, num_cells: int = 4, max_overtakes: int = 3, delay: int = 2, **settings: int
    ) -> None:
        self.ranks = Ranks(max_loras, num_cells, delay)
        self.adapters = AdapterScheduler(max_loras, num_cells, max_overtakes, self.ranks.board)
        self.scheduler: Scheduler = make_scheduler(adapters=self.adapters, **settings)
        self.runner = FakeModelRunner.for_scheduler(self.scheduler)
        self.ended: dict[str, EngineCoreOutput] = {}
        self.tokens: dict[str, list[int]] = {}
        self.expected: dict[str, list[int]] = {}

    def add(self, name: str, prompt: list[int], max_tokens: int = 4, pinned: bool = False, digest: str = "") -> Request:
        adapter = Adapter(name, f"/adapters/{name}", digest or f"digest of {name}", pinned) if name else None
        request = make_request(
            prompt, params=SamplingParams(max_tokens=max_tokens), options=RequestOptions(adapter=adapter)
        )
        self.ranks.requests[request.request_id] = (None if adapter is None else adapter.digest), -1
        self.expected[request.request_id] = undisturbed_output(request)[0]
        self.scheduler.add_request(request)
        return request

    def step(self) -> None:
        if not self.scheduler.has_requests():
            self.ranks.turn()  # the engine core looks again a little later
            return
        output = self.scheduler.schedule()
        self.ranks.follow(output)
        for one in self.scheduler.update_from_output(output, self.runner.execute_model(output)):
            self.tokens.setdefault(one.request_id, []).extend(one.new_token_ids)
            if one.finish_reason is not None:
                self.ended[one.request_id] = one
        self.scheduler.check_integrity()

    def run(self, most: int = 2000) -> None:
        for _ in range(most):
            if not self.scheduler.requests:
                return
            self.step()
        raise AssertionError(f"{len(self.scheduler.requests)} requests wait for ever")


def test_a_request_waits_for_its_adapter_and_no_other_waits_for_it() -> None:
    engine = Engine(delay=5)
    late, base = engine.add("a", [1, 2, 3]), engine.add("", [1, 2, 3])
    assert late.status is RequestStatus.WAITING_FOR_ADAPTER
    engine.step()
    stats = engine.scheduler.make_stats()
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    assert stats.adapters is not None
    assert (stats.adapters.num_waiting, stats.adapters.waiting, stats.adapters.running) == (1, {"a": 1}, {})
    engine.run()
    assert engine.tokens == engine.expected
    assert {late.request_id, base.request_id} == set(engine.ended)
    stats = engine.scheduler.make_stats()
    assert stats.adapters is not None
    assert (stats.adapters.ready, stats.adapters.in_use, stats.adapters.num_loads) == (["digest of a"], [], 1)


@pytest.mark.parametrize(
    ("outcome", "parameter", "code"),
    [(LoadOutcome.CHANGED, "lora_name", None), (LoadOutcome.NO_MEMORY, None, ErrorCode.UNAVAILABLE)],
)
def test_a_failed_load_ends_the_requests_that_wait_for_it(
    outcome: LoadOutcome, parameter: str | None, code: ErrorCode | None
) -> None:
    engine = Engine()
    engine.ranks.broken["digest of bad"] = outcome
    bad, good = [engine.add("bad", [i]) for i in (1, 2)], engine.add("good", [3])
    engine.run()
    for request in bad:
        ended = engine.ended[request.request_id]
        assert (ended.finish_reason, ended.error_parameter, ended.error_code) == (FinishReason.ERROR, parameter, code)
        assert ended.error is not None
        assert ended.error.startswith("lora_name is 'bad'; its adapter in /adapters/bad could not be loaded")
    assert engine.ended[good.request_id].finish_reason is FinishReason.LENGTH
    assert engine.adapters.make_stats().num_failed_loads == 1
    engine.ranks.broken.clear()
    again = engine.add("bad", [4])
    engine.run()
    assert engine.ended[again.request_id].error is None


@pytest.mark.parametrize("outcome", [LoadOutcome.MISSING, LoadOutcome.CHANGED])
@pytest.mark.parametrize("is_pinned", [False, True])
def test_a_folder_that_has_lost_its_files_ends_only_the_requests_that_name_it(
    outcome: LoadOutcome, is_pinned: bool
) -> None:
    """An adapter was replaced by a copy of itself in another folder, and the first folder was deleted."""
    engine = Engine()
    engine.ranks.broken["/adapters/old"] = outcome
    old, new = (engine.add(name, [1], pinned=is_pinned, digest="of both") for name in ("old", "new"))
    engine.run()
    error = engine.ended[old.request_id].error
    assert error is not None
    assert error.startswith("lora_name is 'old'; its adapter in /adapters/old could not be loaded")
    assert engine.ended[new.request_id].finish_reason is FinishReason.LENGTH
    assert engine.tokens[new.request_id] == engine.expected[new.request_id]
    assert engine.adapters.make_stats().ready == ["of both"]


def test_a_request_without_a_slot_is_overtaken_by_so_many_and_no_more() -> None:
    """One slot, and a stream of requests that would keep it for ever."""
    engine = Engine(max_loras=1, max_overtakes=5, max_num_seqs=4)
    engine.add("b", [1])
    engine.run()  # it is in memory then
    engine.add("a", [1], max_tokens=8)
    for _ in range(6):
        engine.step()
    starved = engine.add("b", [2])
    added = []
    while starved.request_id not in engine.ended:
        added.append(engine.add("a", [3], max_tokens=8))
        engine.step()
        assert len(added) < 200, "it is starved"
    num_before = sum(one.request_id in engine.ended for one in added)
    assert num_before <= 6  # five, and one that came before the scheduler had looked
    engine.run()


def test_the_adapter_used_longest_ago_makes_room_and_pinned_ones_stay() -> None:
    engine = Engine(max_loras=1, num_cells=3)
    for name in ("a", "b", "c"):
        engine.add(name, [1], pinned=name == "a")
        engine.run()
    engine.add("b", [1])
    engine.run()
    engine.add("d", [1])
    engine.run()
    stats = engine.adapters.make_stats()
    assert set(stats.ready) == {"digest of a", "digest of b", "digest of d"}
    assert stats.num_evictions == 1
    engine.adapters.pin(Adapter("a", "", "digest of a"), is_pinned=False)
    engine.add("e", [1])
    engine.run()
    assert set(engine.adapters.make_stats().ready) == {"digest of b", "digest of d", "digest of e"}


def test_a_pinned_adapter_is_loaded_without_a_request() -> None:
    engine = Engine()
    engine.adapters.pin(Adapter("a", "/adapters/a", "digest of a"), is_pinned=True)
    assert engine.scheduler.has_requests()
    for _ in range(8):
        engine.step()
    assert engine.adapters.make_stats().ready == ["digest of a"]
    assert not engine.scheduler.has_requests()


def test_orders_of_a_step_that_was_not_sent_come_again() -> None:
    engine = Engine(delay=0)
    request = engine.add("a", [1])
    lost = engine.scheduler.schedule()
    assert lost.adapter_orders is not None
    engine.scheduler.recover_from_failed_step(lost, "it was not sent", was_submitted=False)
    engine.run()
    assert engine.ended[request.request_id].error is None


def test_equal_prompts_share_blocks_with_one_adapter_alone() -> None:
    engine = Engine(max_loras=3)
    prompt = list(range(1, 18))
    for name, digest, expected in (
        ("a", "", 0),
        ("", "", 0),
        ("b", "", 0),
        ("a", "", 16),
        ("a2", "digest of a", 16),
        ("a", "new", 0),
    ):
        request = engine.add(name, prompt, digest=digest)
        engine.run()
        assert request.num_cached_tokens == expected, (name, digest)


@pytest.mark.parametrize("seed", range(6))
def test_any_history(seed: int) -> None:
    """Requests of many adapters come, go and are aborted, loads fail, steps fail: all end, with their own tokens."""
    rng = random.Random(seed)
    engine = Engine(
        max_loras=rng.randrange(1, 4), num_cells=rng.randrange(3, 6), max_overtakes=rng.randrange(8),
        delay=rng.randrange(4), max_num_seqs=rng.randrange(2, 6), num_blocks=40,
    )  # fmt: skip
    engine.ranks.broken["digest of x0"] = LoadOutcome.FAILED
    live: dict[str, str] = {}
    for _ in range(250):
        if rng.random() < 0.5:
            name = rng.choice(["", *(f"x{min(int(rng.expovariate(0.4)), 9)}" for _ in range(3))])
            prompt, length = [rng.randrange(60) for _ in range(rng.randrange(1, 20))], rng.randrange(1, 9)
            live[engine.add(name, prompt, length).request_id] = name
        if live and rng.random() < 0.05:
            request_id = rng.choice(list(live))
            engine.scheduler.finish_request(request_id)
            live.pop(request_id)
        engine.step()
    engine.run()
    causes = Counter()
    for request_id, name in live.items():
        ended = engine.ended[request_id]
        causes[ended.finish_reason] += 1
        assert (ended.error is not None) == (name == "x0")
        if ended.error is None:
            assert engine.tokens[request_id] == engine.expected[request_id]
    assert causes[FinishReason.LENGTH] > 30
    stats = engine.adapters.make_stats()
    assert (stats.running, stats.waiting, stats.in_use, stats.num_waiting) == ({}, {}, [], 0)


def test_a_request_that_ends_while_its_grammar_is_compiled_never_had_its_adapter() -> None:
    engine = Engine()
    live = engine.add("a", [1], max_tokens=30)
    for _ in range(5):
        engine.step()
    for name in ("a", "b"):
        adapter = Adapter(name, f"/adapters/{name}", f"digest of {name}")
        params = SamplingParams(max_tokens=4, structured_outputs=StructuredOutputsParams(choice=["x"]))
        request = make_request([2], params=params, options=RequestOptions(adapter=adapter))
        engine.scheduler.add_request(request)
        assert request.status is RequestStatus.WAITING_FOR_FSM
        engine.scheduler.finish_request(request.request_id)
    stats = engine.adapters.make_stats()
    assert (stats.running, stats.waiting, stats.in_use) == ({"a": 1}, {}, ["digest of a"])
    engine.run()
    assert engine.ended[live.request_id].error is None


@pytest.mark.parametrize("pinned", [0, 2])
def test_no_request_waits_for_ever_for_room_in_memory(pinned: int) -> None:
    """Requests for all adapters that are ready keep waiting behind one whose adapter is not."""
    engine = Engine(max_loras=2, num_cells=2 + pinned, max_overtakes=3, max_num_seqs=4)
    for number in range(pinned):
        engine.add(f"p{number}", [1], pinned=True)
        engine.run()
    for name in ("a", "b"):
        engine.add(name, [1], max_tokens=8)
        engine.step()
    for _ in range(6):
        engine.step()
    starved = engine.add("c", [2])
    num_added = 0
    while starved.request_id not in engine.ended:
        for name in ("a", "b"):
            engine.add(name, [3], max_tokens=8)
            num_added += 1
        engine.step()
        assert num_added < 200, "it is starved"
    engine.run()


def test_no_turns_of_others_keep_a_request_from_room_in_memory() -> None:
    """One slot that two adapters take in turn, and memory for them alone."""
    engine = Engine(max_loras=1, num_cells=2, max_overtakes=3, max_num_seqs=4)
    for name in ("a", "b"):
        engine.add(name, [1])
        engine.run()
    for name in ("a", "b"):
        engine.add(name, [1], max_tokens=4)
    engine.step()
    starved = engine.add("c", [2])
    for number in range(300):
        engine.add("ab"[number % 2], [3], max_tokens=2)
        engine.step()
        if starved.request_id in engine.ended:
            break
    assert starved.request_id in engine.ended
    engine.run()


def test_more_pins_than_there_is_room_for_end_the_oldest() -> None:
    engine = Engine(max_loras=1, num_cells=3)
    for name in ("a", "b", "c", "d", "e"):
        engine.add(name, [1], pinned=True)
        engine.run()
    assert set(engine.adapters.make_stats().ready) >= {"digest of d", "digest of e"}


def test_nothing_is_loaded_after_all_adapters_are_dropped_until_a_request_comes() -> None:
    engine = Engine()
    request = engine.add("a", [1], pinned=True)
    engine.run()
    assert engine.ended[request.request_id].error is None
    engine.adapters.forget_all()
    assert not engine.scheduler.has_requests()
    engine.adapters.pin(Adapter("b", "", "digest of b"), is_pinned=False)
    assert not engine.scheduler.has_requests()
    engine.add("b", [1])
    engine.run()
    assert set(engine.adapters.make_stats().ready) == {"digest of a", "digest of b"}


def test_loads_of_few_adapters_are_counted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_engine.scheduler.adapters.MAX_COUNTED", 3)
    engine = Engine(max_loras=1, num_cells=2)
    for name in ("a", "b", "a", "c", "a", "d", "e", "f", "e"):
        engine.add(name, [1])
        engine.run()
    stats = engine.adapters.make_stats()
    assert len(stats.loads) == 3
    assert set(stats.ready) <= stats.loads.keys()
    assert stats.num_loads == 6
