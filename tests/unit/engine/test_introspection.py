"""What an operator sees of an engine: from a scheduler alone, put together by the frontend, and of a real engine."""

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from quire_engine import LLM, AsyncLLM, EngineConfig, SamplingParams
from quire_engine.core.engine_core import StepHistory
from quire_engine.frontend.introspection import combine_blocks, combine_requests
from quire_engine.frontend.request_state import ParentRequest, RequestState
from quire_engine.messages import EngineCoreRequest, UtilityOutput
from quire_engine.scheduler.request import MAX_OWN_EVENTS
from quire_engine.scheduler.scheduler import Scheduler
from quire_engine.slo import NO_TARGETS, SLOTargets
from quire_engine.snapshot import (
    MAX_EVENTS,
    EngineCoreSnapshot,
    RequestEvent,
    RequestSnapshot,
    Snapshot,
    StepComposition,
    StepSeconds,
)
from quire_engine.stats import StepStats
from quire_engine.timeline import RequestPhase
from support.scheduling import FakeModelRunner, make_request, make_scheduler, run_step


class Clock:
    """A second per look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def live(
    request_id: str,
    arrived_at: float = 0.0,
    first_token_time: float | None = None,
    phases: Sequence[tuple[RequestPhase, float]] = (("queue", 0.0),),
    caller_request_id: str | None = None,
    slo_targets: SLOTargets = NO_TARGETS,
) -> RequestState:
    params = SamplingParams(max_tokens=4, detokenize=False, n=1 if caller_request_id is None else 2, temperature=1)
    request = EngineCoreRequest(request_id, [5] * 8, params, arrived_at=arrived_at, slo_targets=slo_targets)
    parent = None
    if caller_request_id is not None:
        parent = ParentRequest(msgspec.structs.replace(request, request_id=caller_request_id))
    decoder: Any = SimpleNamespace(byte_ids=frozenset(), special_ids=frozenset())
    state = RequestState(request, decoder, lambda output: None, parent)
    state.first_token_time, state.timeline.phases = first_token_time, list(phases)
    return state


def snapshot_of(scheduler: Scheduler) -> EngineCoreSnapshot:
    requests = scheduler.request_snapshots(1000)
    blocks = scheduler.kv_cache.snapshot(request.id for request in requests)
    return EngineCoreSnapshot(1, 0, StepSeconds(), StepComposition(), [], requests, blocks)


def kinds(request: RequestSnapshot) -> list[str]:
    return [event.kind for event in request.events]


# -- the timeline ------------------------------------------------------------------------------------------------------


def test_timeline_of_a_long_prompt() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4, clock=Clock())
    runner = FakeModelRunner.for_scheduler(scheduler)
    scheduler.add_request(make_request(range(10), params=SamplingParams(max_tokens=3)))
    assert [request.phase for request in scheduler.request_snapshots(9)] == ["waiting"]
    phases = []
    for _ in range(4):
        run_step(scheduler, runner)
        (seen,) = scheduler.request_snapshots(9)
        phases.append(seen.phase)
    assert phases == ["prefill", "prefill", "decode", "decode"]
    assert kinds(seen) == ["scheduled", "prefill_chunk", "prefill_chunk", "first_token"]
    assert [event.num_tokens for event in seen.events] == [4, 4, 2, 1]
    ages = [event.age_seconds for event in seen.events]
    assert ages == sorted(ages, reverse=True)
    assert ages[-1] > 0


def test_the_first_token_tells_of_the_chunks_of_a_long_prompt_and_of_no_others() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4, clock=Clock())
    runner = FakeModelRunner.for_scheduler(scheduler)
    found = {}
    for length in (10, 3):
        scheduler.add_request(make_request(range(length), request_id=str(length), params=SamplingParams(max_tokens=2)))
        while scheduler.has_requests():
            found.update({(length, len(found)): output.prefill_chunks for output in run_step(scheduler, runner)})
    chunks = {(length, place): [tokens for _, tokens in own] for (length, place), own in found.items()}
    assert chunks == {(10, 0): [4, 4, 2], (10, 1): [], (3, 2): [], (3, 3): []}
    seconds = [at for at, _ in found[10, 0]]
    assert 0 < seconds[0] < seconds[1] < seconds[2]


def test_timeline_tells_of_preemption_and_replay() -> None:
    scheduler = make_scheduler(num_blocks=6, block_size=4, enable_prefix_caching=False)
    runner = FakeModelRunner.for_scheduler(scheduler)
    replayed = make_request(range(8), request_id="a", params=SamplingParams(max_tokens=12, ignore_eos=True))
    replayed.is_replay = True
    scheduler.add_request(replayed)
    scheduler.add_request(make_request(range(8), request_id="b", params=SamplingParams(max_tokens=12, ignore_eos=True)))
    while not scheduler.num_preemptions:
        run_step(scheduler, runner)
    first, second = scheduler.request_snapshots(9)
    assert (first.id, first.phase, kinds(first)) == ("a", "decode", ["replayed", "scheduled", "first_token"])
    assert (second.id, second.phase, second.num_preemptions, second.num_blocks) == ("b", "preempted", 1, 0)
    assert kinds(second) == ["scheduled", "first_token", "preempted"]
    assert second.events[-1].num_tokens > 8


def test_timeline_is_bounded_and_keeps_the_latest() -> None:
    request = make_request([1])
    for number in range(1000):
        request.note_event("prefill_chunk", float(number), number)
    assert len(request.events) == MAX_OWN_EVENTS
    assert request.events[-1] == ("prefill_chunk", 999.0, 999)
    seen = RequestSnapshot("r", "decode", events=[RequestEvent(k, 999 - t, n) for k, t, n in request.events])
    (seen,) = combine_requests([seen], {"r": live("r", first_token_time=5.0)}, {}, lambda _: False, 1000.0, 64)
    assert len(seen.events) == MAX_EVENTS
    assert seen.events[0].kind == "arrived"


def test_of_those_that_wait_only_the_next_are_told() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for number in range(5):
        scheduler.add_request(make_request(range(8), request_id=f"r{number}"))
    scheduler.schedule()
    assert [request.id for request in scheduler.request_snapshots(2)] == ["r0", "r1", "r2"]


# -- blocks ------------------------------------------------------------------------------------------------------------


def test_block_map_and_prefix_tree() -> None:
    scheduler = make_scheduler(num_blocks=16, block_size=4)
    runner = FakeModelRunner.for_scheduler(scheduler)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    for request_id, prompt in {"a": [1] * 12, "b": [1] * 12, "c": [2] * 5, "gone": [3] * 9}.items():
        scheduler.add_request(make_request(prompt, request_id=request_id, params=params))
    run_step(scheduler, runner)
    scheduler.finish_request("gone")
    core = snapshot_of(scheduler)
    blocks, tree = combine_blocks(core, core.requests)
    assert len(blocks.owner) == len(blocks.ref_count) == len(blocks.cached) == blocks.num_blocks == 16
    pool = scheduler.kv_cache.block_pool.blocks
    assert blocks.ref_count == [block.ref_cnt for block in pool]
    assert blocks.cached == [int(block.block_hash is not None) for block in pool]
    a, b, c = (scheduler.kv_cache.get_block_ids(request_id) for request_id in "abc")
    assert [blocks.owner[block_id] for block_id in (*a, *c)] == [0] * len(a) + [2] * len(c)
    assert {blocks.owner[block_id] for block_id in b} == {0, 1}, "a shared block is told to be of the first"
    assert all((owner == -1) == (count == 0) for owner, count in zip(blocks.owner, blocks.ref_count, strict=True))
    # a and b: 3 full blocks of ones; c: one; gone: two, which are still there
    assert (tree.num_cached_blocks, tree.num_roots, tree.depth) == (6, 3, 3)
    assert [(one.num_blocks, one.num_references) for one in tree.hottest] == [(3, 2), (1, 1), (2, 0)]


def test_requests_that_have_ended_since_own_nothing() -> None:
    scheduler = make_scheduler()
    for request_id in "ab":
        scheduler.add_request(make_request(range(ord(request_id), ord(request_id) + 8), request_id=request_id))
    scheduler.schedule()
    core = snapshot_of(scheduler)
    requests = combine_requests(core.requests, {"b": live("b"), "new": live("new")}, {}, lambda _: False, 1.0, 64)
    assert [(request.id, request.phase) for request in requests] == [("b", "prefill"), ("new", "waiting")]
    blocks, _ = combine_blocks(core, requests)
    assert sorted(set(blocks.owner)) == [-1, 0]
    assert sum(blocks.ref_count) == 2


# -- what the frontend adds --------------------------------------------------------------------------------------------


def test_frontend_adds_labels_ages_and_what_an_engine_that_is_no_more_knew() -> None:
    core = [RequestSnapshot("a", "decode", num_output_tokens=3, events=[RequestEvent("replayed", 2.0, 2)])]
    phases: list[tuple[RequestPhase, float]] = [
        ("queue", 0.0), ("prefill", 1.0), ("decode", 2.0), ("held", 7.0), ("replayed", 8.0)
    ]  # fmt: skip
    requests = combine_requests(
        core,
        {
            "a": live("a", arrived_at=10.0, first_token_time=12.0, phases=phases, caller_request_id="whole"),
            "b": live("b", arrived_at=15.0),
        },
        {"whole": "mine"},
        lambda request_id: request_id == "b",
        now=20.0,
        max_model_len=64,
    )
    first, second = requests
    assert (first.label, first.age_seconds, first.queue_seconds) == ("mine", 10.0, 1.0)
    assert [(event.kind, event.age_seconds) for event in first.events] == [
        ("arrived", 10.0), ("first_token", 8.0), ("replayed", 2.0)
    ]  # fmt: skip
    assert first.phases == [("queue", 10.0), ("prefill", 9.0), ("decode", 8.0), ("held", 3.0), ("replayed", 2.0)]
    assert (second.phase, second.label, kinds(second)) == ("held", "", ["arrived"])


@pytest.mark.parametrize(
    ("targets", "facts", "num_output_tokens", "slack"),
    [
        ({}, {}, 0, None),
        ({"ttft_ms": 500}, {}, 0, -0.5),
        ({"ttft_ms": 1500}, {}, 0, 0.5),
        ({"ttft_ms": 1500, "e2e_ms": 1200}, {}, 0, 0.2),
        ({"ttft_ms": 500}, {"first_token_time": 0.4}, 1, None),
        ({"ttft_ms": 500}, {"first_token_time": 0.7}, 1, -0.2),
        ({"tpot_ms": 100}, {"first_token_time": 0.8}, 1, -0.1),
        ({"tpot_ms": 100}, {"first_token_time": 0.8}, 3, 0.1),
        ({"tpot_ms": 100}, {}, 0, None),
        ({"tpot_ms": 1000, "e2e_ms": 1100}, {"first_token_time": 0.8}, 1, 0.1),
    ],
)
def test_slack_is_the_time_until_the_first_target_is_missed(
    targets: dict[str, float], facts: dict[str, float], num_output_tokens: int, slack: float | None
) -> None:
    one = live("r", slo_targets=SLOTargets(**targets), **facts)
    assert one.slack_seconds(num_output_tokens, now=1.0) == (None if slack is None else pytest.approx(slack))


def test_step_history() -> None:
    history = StepHistory()
    assert history.step_seconds() == StepSeconds()
    assert history.composition() == StepComposition()
    for number in range(1000):
        history.record(StepStats(0.1, number, 0.3, 2, 9, 8))
    assert history.step_seconds() == StepSeconds(0.1, 935.5, 0.3)
    assert history.composition() == StepComposition(2, 9, 8, 1)


def test_snapshot_survives_the_wire() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request(range(8)))
    scheduler.schedule()
    output = UtilityOutput(7, snapshot_of(scheduler))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(output), type=UtilityOutput) == output


# -- real engines ------------------------------------------------------------------------------------------------------


async def _until(condition: Callable[[Snapshot], bool], llm: AsyncLLM) -> Snapshot:
    async def look() -> Snapshot:
        while not condition(snapshot := await llm.snapshot({})):
            await asyncio.sleep(0.005)
        return snapshot

    return await asyncio.wait_for(look(), 30)


@pytest.mark.slow
@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_engine_under_load_tells_of_itself(
    checkpoint: Callable[[str], Path], fault: Callable[..., Path], tensor_parallel_size: int
) -> None:
    folder = checkpoint("tied-gqa")
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    expected = LLM(folder, dtype="float32").generate([[5, 6, 7 + i] for i in range(4)], params, use_tqdm=False)

    async def main(llm: AsyncLLM) -> None:
        async def one(prompt: list[int]) -> list[int]:
            return [output async for output in llm.generate(prompt, params)][-1].outputs[0].token_ids

        tasks = [asyncio.create_task(one([5, 6, 7 + i])) for i in range(4)]
        snapshot = await _until(lambda seen: [one.phase for one in seen.requests] == ["decode"] * 4, llm)
        engine, blocks = snapshot.engine, snapshot.blocks
        assert engine.up
        assert engine.answered
        assert engine.pid == llm.engine_pid
        assert engine.step > 0
        assert engine.last_step.num_requests == 4
        assert engine.last_step.num_tokens == engine.last_step.num_decode_tokens + engine.last_step.num_prefill_tokens
        assert engine.step_seconds.execute > 0 < engine.step_seconds.schedule
        assert [rank.pid for rank in engine.ranks] == (llm.worker_pids or [llm.engine_pid])
        seconds = [rank.step_seconds_p50 for rank in engine.ranks]
        assert all(one is not None and one > 0 for one in seconds), seconds
        for index, request in enumerate(snapshot.requests):
            assert blocks.owner.count(index) == request.num_blocks > 0
            assert request.num_prompt_tokens == 3
            assert request.max_tokens == 100
            assert request.age_seconds > 0
            assert request.queue_seconds is not None
            assert kinds(request) == ["arrived", "scheduled", "first_token"]
        assert "introspection_token" not in snapshot.settings
        assert snapshot.settings["tensor_parallel_size"] == tensor_parallel_size
        assert [await one for one in tasks] == [one.outputs[0].token_ids for one in expected], "nothing was disturbed"
        idle = await llm.snapshot()
        assert idle.requests == []
        assert set(idle.blocks.owner) == {-1}

    settings = {
        "dtype": "float32",
        "introspection_token": "a secret of operators",
        "tensor_parallel_size": tensor_parallel_size,
    }
    fault(action="slow", rank=0, seconds=0.02)  # requests live for two seconds, and are there to be seen
    llm = AsyncLLM(EngineConfig.from_settings({"model": str(folder), **settings}))
    try:
        asyncio.run(main(llm))
    finally:
        llm.shutdown()


@pytest.mark.slow
def test_snapshot_while_the_engine_is_started_again_and_cancel_of_one_sequence(
    checkpoint: Callable[[str], Path], fault: Callable[..., Path]
) -> None:
    fault(action="slow", rank=0, seconds=0.02)  # requests live for seconds, and are there to be seen

    async def main(llm: AsyncLLM) -> None:
        async def one(n: int) -> list[str | None]:
            params = SamplingParams(temperature=1, max_tokens=200, ignore_eos=True, n=n)
            outputs = [output async for output in llm.generate([5, 6, 7], params)]
            return [sequence.finish_reason for sequence in outputs[-1].outputs]

        tasks = [asyncio.create_task(one(n)) for n in (1, 2)]
        await _until(lambda seen: [one.phase for one in seen.requests] == ["decode"] * 3, llm)
        os.kill(llm.engine_pid, signal.SIGKILL)
        away = await _until(lambda seen: not seen.engine.up, llm)
        assert not away.engine.answered
        assert [one.phase for one in away.requests] == ["held"] * 3
        assert not any(rank.up for rank in away.engine.ranks)
        back = await _until(lambda seen: seen.engine.answered and "decode" in [r.phase for r in seen.requests], llm)
        assert back.engine.restarts == 1
        assert "replayed" in kinds(back.requests[0])
        assert "first_token" in kinds(back.requests[0])
        assert not llm.cancel("nobody")
        assert llm.cancel(back.requests[-1].id)
        reasons = await asyncio.gather(*tasks)
        assert reasons[0] == ["length"]
        assert "abort" in reasons[1]

    llm = AsyncLLM(EngineConfig.from_settings({"model": str(checkpoint("tied-gqa")), "dtype": "float32"}))
    try:
        asyncio.run(main(llm))
    finally:
        llm.shutdown()
