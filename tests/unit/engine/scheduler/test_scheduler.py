"""Scheduler: who gets how many tokens of a step, who waits, and who has to give way."""

import math
import struct
from typing import Any

import pytest
from quire_engine.messages import EngineCoreOutput, FinishReason, ModelRunnerOutput, SchedulerOutput, TokenLogprobs
from quire_engine.pooling import Pooled
from quire_engine.sampling_params import SamplingParams
from quire_engine.scheduler.request import Request, RequestStatus
from quire_engine.scheduler.scheduler import Scheduler
from support.scheduling import (
    FakeModelRunner,
    make_request,
    make_requests,
    make_scheduler,
    run_step,
    undisturbed_output,
)


def add(scheduler: Scheduler, *requests: Request) -> None:
    for request in requests:
        scheduler.add_request(request)


def execute(scheduler: Scheduler, scheduler_output: SchedulerOutput, token_id: int = 60) -> list[EngineCoreOutput]:
    """Give every request whose tokens are now all computed one token."""
    done = [
        request_id
        for request_id in scheduler_output.num_scheduled_tokens
        if scheduler.requests[request_id].num_computed_tokens == scheduler.requests[request_id].num_tokens
    ]
    sampled = {request_id: [token_id] for request_id in done}
    outputs = scheduler.update_from_output(scheduler_output, ModelRunnerOutput(sampled))
    scheduler.check_integrity()
    return outputs


def step(scheduler: Scheduler, token_id: int = 60) -> dict[str, int]:
    """One step; returns what was scheduled."""
    scheduler_output = scheduler.schedule()
    scheduler.check_integrity()
    execute(scheduler, scheduler_output, token_id)
    return scheduler_output.num_scheduled_tokens


def prompt(length: int, first: int = 0) -> list[int]:
    return [first, *range(1, length)]


# -- budgets ---------------------------------------------------------------------------------------------------------


def test_nothing_to_do_is_an_empty_step() -> None:
    scheduler = make_scheduler()
    assert not scheduler.has_requests()
    assert scheduler.schedule() == SchedulerOutput({}, step=1)


def test_prompts_then_single_tokens() -> None:
    scheduler = make_scheduler()
    add(scheduler, *make_requests(2, prompt_length=5))
    assert step(scheduler) == {"r0": 5, "r1": 5}
    assert step(scheduler) == {"r0": 1, "r1": 1}


def test_step_never_exceeds_the_token_budget() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=12)
    add(scheduler, *make_requests(4, prompt_length=5, max_tokens=20))
    assert step(scheduler) == {"r0": 5, "r1": 5, "r2": 2}
    assert step(scheduler) == {"r0": 1, "r1": 1, "r2": 3, "r3": 5}
    assert step(scheduler) == {"r0": 1, "r1": 1, "r2": 1, "r3": 1}


def test_long_prompt_is_computed_over_several_steps() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    request = make_request(prompt(19), request_id="r")
    add(scheduler, request)
    assert step(scheduler) == {"r": 8}
    assert (request.num_computed_tokens, request.num_output_tokens) == (8, 0)
    assert step(scheduler) == {"r": 8}
    assert step(scheduler) == {"r": 3}
    assert (request.num_computed_tokens, request.num_output_tokens) == (19, 1)
    assert step(scheduler) == {"r": 1}


def test_running_requests_come_before_waiting_ones() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=3)
    add(scheduler, *make_requests(3, prompt_length=1))
    assert step(scheduler) == {"r0": 1, "r1": 1, "r2": 1}
    add(scheduler, make_request([9], request_id="late"))
    assert step(scheduler) == {"r0": 1, "r1": 1, "r2": 1}


def test_budget_smaller_than_the_running_requests_serves_the_oldest() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=2)
    add(scheduler, *make_requests(3, prompt_length=1, max_tokens=2))
    assert step(scheduler) == {"r0": 1, "r1": 1}
    assert step(scheduler) == {"r0": 1, "r1": 1}
    assert step(scheduler) == {"r2": 1}


def test_long_prefill_threshold_leaves_room_for_others() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16, long_prefill_token_threshold=6)
    add(scheduler, make_request(prompt(15), request_id="long"), make_request(prompt(4, 9), request_id="short"))
    assert step(scheduler) == {"long": 6, "short": 4}
    assert step(scheduler) == {"long": 6, "short": 1}
    assert step(scheduler) == {"long": 3, "short": 1}
    assert step(scheduler) == {"long": 1, "short": 1}


def test_no_more_than_max_num_seqs_run() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    add(scheduler, *make_requests(3, max_tokens=2))
    assert list(step(scheduler)) == ["r0", "r1"]
    assert list(step(scheduler)) == ["r0", "r1"]
    assert list(step(scheduler)) == ["r2"]


def test_first_that_does_not_fit_holds_back_those_behind_it() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    add(
        scheduler,
        make_request(prompt(8), request_id="running"),
        make_request(prompt(12, 8), request_id="large"),
        make_request(prompt(2, 9), request_id="small"),
    )
    assert step(scheduler) == {"running": 8}
    assert [request.request_id for request in scheduler.waiting] == ["large", "small"]
    scheduler.finish_request("running")
    assert step(scheduler) == {"large": 12, "small": 2}


# -- what the worker is told -----------------------------------------------------------------------------------------


def test_new_request_is_introduced_once_and_then_known_by_its_id() -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=4)
    params = SamplingParams(stop_token_ids=[7, 3], max_tokens=9)
    add(scheduler, make_request(prompt(4), request_id="r", params=params, eos_token_ids=[5]))
    first = scheduler.schedule()
    (new,) = first.new_requests
    assert (new.request_id, new.token_ids, new.num_prompt_tokens) == ("r", prompt(4), 4)
    assert (new.sampling_params, new.stop_token_ids) == (params, [3, 5, 7])
    assert (new.block_ids, new.num_computed_tokens) == ([0], 0)
    assert first.cached_requests.request_ids == []
    execute(scheduler, first)
    assert new.token_ids == prompt(4), "what was sent must not change afterwards"
    second = scheduler.schedule()
    assert second.new_requests == []
    cached = second.cached_requests
    assert (cached.request_ids, cached.new_block_ids, cached.num_computed_tokens) == (["r"], [[1]], [4])
    execute(scheduler, second)
    third = scheduler.schedule().cached_requests
    assert (third.request_ids, third.new_block_ids, third.num_computed_tokens) == (["r"], [[]], [5])


def test_prefix_hit_counts_as_computed() -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=4)
    add(scheduler, make_request([*range(9)], request_id="a"), make_request([*range(8), 50], request_id="b"))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 9, "b": 1}
    a, b = output.new_requests
    assert (a.block_ids, a.num_computed_tokens) == ([0, 1, 2], 0)
    assert (b.block_ids, b.num_computed_tokens) == ([0, 1, 3], 8)


def test_finished_request_is_dropped_exactly_once() -> None:
    scheduler = make_scheduler()
    add(scheduler, *make_requests(2, max_tokens=1), make_request([9], request_id="on"))
    step(scheduler)
    assert scheduler.schedule().dropped_request_ids == ["r0", "r1"]
    assert scheduler.schedule().dropped_request_ids == []


def test_request_that_the_worker_never_knew_is_not_dropped() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, *make_requests(2))
    step(scheduler)
    scheduler.finish_request("r1")
    assert scheduler.schedule().dropped_request_ids == []


def test_preempted_request_that_is_aborted_while_it_waits_is_dropped_once() -> None:
    scheduler, _, young = squeezed()
    output = scheduler.schedule()
    assert output.dropped_request_ids == [young.request_id]
    execute(scheduler, output)
    scheduler.finish_request(young.request_id)
    assert scheduler.schedule().dropped_request_ids == []


# -- preemption ------------------------------------------------------------------------------------------------------


def squeezed(**settings: Any) -> tuple[Scheduler, Request, Request]:
    """Two requests fill all four blocks, and the next token of either needs another one."""
    scheduler = make_scheduler(num_blocks=4, block_size=4, **settings)
    old, young = make_requests(2, prompt_length=8, max_tokens=8)
    add(scheduler, old, young)
    step(scheduler)
    return scheduler, old, young


def test_youngest_gives_way_when_blocks_run_out() -> None:
    scheduler, old, young = squeezed()
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {old.request_id: 1}
    assert output.dropped_request_ids == [young.request_id]
    assert young.status is RequestStatus.PREEMPTED
    assert (young.num_computed_tokens, young.num_preemptions) == (0, 1)
    assert scheduler.kv_cache.get_block_ids(young.request_id) == []
    assert scheduler.make_stats().num_preemptions == 1
    scheduler.check_integrity()


def test_preempted_request_waits_in_front_of_those_who_never_ran() -> None:
    scheduler, _, young = squeezed()
    late = make_request([9], request_id="late")
    add(scheduler, late)
    scheduler.schedule()
    assert list(scheduler.waiting) == [young, late]


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4, enable_prefix_caching=False, long_prefill_token_threshold=4)
    add(scheduler, make_request(prompt(4), request_id="old"), make_request(prompt(12, 9), request_id="young"))
    assert step(scheduler) == {"old": 4, "young": 4}
    assert step(scheduler) == {"old": 1, "young": 4}
    # The young one gives way, and its first chunk would fit again at once, only to be in the way again.
    assert step(scheduler) == {"old": 1}
    assert [request.request_id for request in scheduler.waiting] == ["young"]


def test_preempted_request_comes_back_with_its_output_and_hits_its_own_prefix() -> None:
    scheduler, old, young = squeezed()
    step(scheduler)
    scheduler.finish_request(old.request_id)
    output = scheduler.schedule()
    (new,) = output.new_requests
    assert new.request_id == young.request_id
    assert new.token_ids == young.all_token_ids
    assert new.num_prompt_tokens == 8
    assert len(new.token_ids) == 9
    assert new.num_computed_tokens == 4, "its last block was reused, its first was not"
    assert output.num_scheduled_tokens == {young.request_id: 5}
    assert young.status is RequestStatus.RUNNING


def test_as_many_give_way_as_are_needed_youngest_first() -> None:
    scheduler = make_scheduler(num_blocks=6, block_size=2, long_prefill_token_threshold=6)
    old, *others = make_request(prompt(12), request_id="old"), *make_requests(3, prompt_length=2)
    add(scheduler, old, *others)
    assert step(scheduler) == {"old": 6, "r0": 2, "r1": 2, "r2": 2}
    assert step(scheduler) == {"old": 6}
    assert [request.request_id for request in scheduler.waiting] == ["r0", "r1", "r2"]
    assert [request.num_preemptions for request in (old, *others)] == [0, 1, 1, 1]


def test_request_in_the_middle_gives_way_itself_rather_than_take_from_an_older_one() -> None:
    scheduler = make_scheduler(num_blocks=3, block_size=4)
    a, b = make_request(prompt(4), request_id="a"), make_request(prompt(8, 9), request_id="b")
    a.all_token_ids.pop()  # three tokens: one more fits its block
    a.num_prompt_tokens = 3
    add(scheduler, a, b)
    assert step(scheduler) == {"a": 3, "b": 8}
    assert step(scheduler) == {"a": 1}
    assert list(scheduler.waiting) == [b]


def test_oldest_is_never_preempted_and_everybody_finishes_in_a_tiny_cache() -> None:
    scheduler = make_scheduler(num_blocks=5, block_size=4)
    runner = FakeModelRunner.for_scheduler(scheduler)
    requests = make_requests(6, prompt_length=7, max_tokens=12)
    expected = {request.request_id: undisturbed_output(request)[0] for request in requests}
    add(scheduler, *requests)
    while scheduler.has_requests():
        oldest = scheduler.running[0] if scheduler.running else None
        preempted_before = oldest.num_preemptions if oldest else 0
        run_step(scheduler, runner)
        scheduler.check_integrity()
        if oldest:
            assert oldest.num_preemptions == preempted_before
    assert scheduler.num_preemptions > 0
    for request in requests:
        assert request.all_token_ids[7:] == expected[request.request_id]


# -- finish and abort ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_aborted_request_is_gone_and_its_blocks_are_free_at_once(num_steps: int) -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=4, max_num_batched_tokens=4)
    request = make_request(prompt(10), request_id="r")
    add(scheduler, request)
    for _ in range(num_steps):
        step(scheduler)
    assert scheduler.finish_request("r") is request
    assert request.status is RequestStatus.FINISHED
    assert not scheduler.has_requests()
    assert scheduler.make_stats().num_blocks_used == 0
    assert (list(scheduler.waiting), scheduler.running) == ([], [])
    scheduler.check_integrity()


def test_aborting_twice_or_somebody_unknown_is_nothing() -> None:
    scheduler = make_scheduler()
    add(scheduler, *make_requests(1))
    scheduler.finish_request("r0")
    assert scheduler.finish_request("r0") is None
    assert scheduler.finish_request("nobody") is None


def test_request_aborted_while_its_step_ran_is_passed_over() -> None:
    scheduler = make_scheduler()
    add(scheduler, *make_requests(2))
    scheduler_output = scheduler.schedule()
    scheduler.finish_request("r0")
    outputs = scheduler.update_from_output(scheduler_output, ModelRunnerOutput({"r0": [60], "r1": [60]}))
    assert [output.request_id for output in outputs] == ["r1"]
    scheduler.check_integrity()


def test_request_ends_with_its_reason_and_frees_its_blocks() -> None:
    scheduler = make_scheduler()
    params = SamplingParams(stop_token_ids=[7], max_tokens=3)
    for request_id in ("eos", "stop", "length"):
        add(scheduler, make_request([1], request_id=request_id, params=params, eos_token_ids=[2]))
    first = scheduler.update_from_output(
        scheduler.schedule(), ModelRunnerOutput({"eos": [2], "stop": [60], "length": [60]})
    )
    assert [(output.request_id, output.finish_reason) for output in first] == [
        ("eos", FinishReason.STOP),
        ("stop", None),
        ("length", None),
    ]
    assert first[0].stop_reason is None
    second = scheduler.update_from_output(scheduler.schedule(), ModelRunnerOutput({"stop": [7], "length": [60]}))
    assert (second[0].finish_reason, second[0].stop_reason, second[0].new_token_ids) == (FinishReason.STOP, 7, [7])
    (third,) = scheduler.update_from_output(scheduler.schedule(), ModelRunnerOutput({"length": [60]}))
    assert (third.finish_reason, third.stop_reason) == (FinishReason.LENGTH, None)
    assert not scheduler.has_requests()
    assert scheduler.make_stats().num_blocks_used == 0
    scheduler.check_integrity()


def test_tokens_after_the_one_that_ends_a_request_are_cut_off() -> None:
    scheduler = make_scheduler()
    add(scheduler, make_request([1], request_id="r", eos_token_ids=[2]))
    (output,) = scheduler.update_from_output(scheduler.schedule(), ModelRunnerOutput({"r": [60, 2, 61]}))
    assert output.new_token_ids == [60, 2]
    assert output.finish_reason is FinishReason.STOP


def test_logprobs_of_the_worker_reach_the_output() -> None:
    scheduler = make_scheduler()
    add(scheduler, *make_requests(2))
    scheduler_output = scheduler.schedule()
    logprobs: list[TokenLogprobs] = [[(60, -0.5, 1)]]
    runner_output = ModelRunnerOutput({"r0": [60], "r1": [60]}, {"r1": logprobs})
    outputs = scheduler.update_from_output(scheduler_output, runner_output)
    assert [output.logprobs for output in outputs] == [None, logprobs]


# -- what is told about it -------------------------------------------------------------------------------------------


def test_the_first_step_is_reported_once_and_cached_tokens_come_with_the_first_token_only() -> None:
    scheduler = make_scheduler(block_size=4)
    add(scheduler, make_request([*range(9)], request_id="a"), make_request([*range(8), 50], request_id="b"))
    first_a, first_b = execute(scheduler, scheduler.schedule())
    assert (first_a.num_cached_tokens, first_b.num_cached_tokens) == (0, 8)
    changes = scheduler.take_phase_changes()
    assert [change[:2] for change in changes] == [("a", "scheduled"), ("b", "scheduled")]
    assert all(0 <= seconds < 10 for _, _, seconds in changes)
    _, second_b = execute(scheduler, scheduler.schedule())
    assert (second_b.num_cached_tokens, scheduler.take_phase_changes()) == (0, [])


def test_prefix_cache_is_counted_once_per_request_however_often_it_is_preempted() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    runner = FakeModelRunner.for_scheduler(scheduler)
    requests = make_requests(2, prompt_length=8, max_tokens=8)
    add(scheduler, *requests)
    while scheduler.has_requests():
        run_step(scheduler, runner)
    stats = scheduler.make_stats()
    assert stats.num_preemptions > 0
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (16, 0)
    add(scheduler, make_request([1, *range(1, 8)], request_id="again"))
    run_step(scheduler, runner)
    stats = scheduler.make_stats()
    assert stats.prefix_cache_queries == 24
    assert stats.prefix_cache_hits in (0, 4)
    assert stats.prefix_cache_hits == scheduler.requests["again"].num_cached_tokens


def test_stats_are_those_of_the_moment() -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=4, max_num_seqs=2)
    requests = make_requests(4, prompt_length=5)
    add(scheduler, *requests)
    step(scheduler)
    stats = scheduler.make_stats()
    assert (stats.num_running, stats.num_waiting) == (2, 2)
    assert (stats.num_blocks_used, stats.num_blocks_cached, stats.num_blocks_free) == (4, 0, 4)
    assert stats.kv_cache_usage == 0.5
    scheduler.finish_request("r0")
    stats = scheduler.make_stats()
    assert (stats.num_running, stats.num_waiting) == (1, 2)
    assert (stats.num_blocks_used, stats.num_blocks_cached, stats.num_blocks_free) == (2, 1, 5)


def test_stats_count_cached_blocks_that_made_room() -> None:
    scheduler = make_scheduler(num_blocks=2, block_size=4)
    add(scheduler, *make_requests(2, prompt_length=5))
    step(scheduler)
    assert scheduler.make_stats().num_block_evictions == 0
    scheduler.finish_request("r0")
    assert scheduler.make_stats().num_blocks_cached == 1
    step(scheduler)
    assert scheduler.make_stats().num_block_evictions == 1


def test_preemptions_of_a_request_come_with_its_outputs() -> None:
    scheduler, old, young = squeezed()
    step(scheduler)
    scheduler.finish_request(old.request_id)
    (output,) = execute(scheduler, scheduler.schedule())
    assert (output.request_id, output.num_preemptions) == (young.request_id, 1)


# -- check_integrity itself ------------------------------------------------------------------------------------------


def test_integrity_check_notices_a_request_in_no_queue_or_in_two() -> None:
    scheduler = make_scheduler()
    add(scheduler, *make_requests(2))
    step(scheduler)
    request = scheduler.running.pop()
    with pytest.raises(AssertionError, match="no queue, or in two"):
        scheduler.check_integrity()
    scheduler.running.append(request)
    scheduler.check_integrity()
    scheduler.waiting.add(request)
    with pytest.raises(AssertionError, match="no queue, or in two"):
        scheduler.check_integrity()


def test_a_vector_that_is_not_finite_is_an_error() -> None:
    scheduler = make_scheduler()
    requests = make_requests(3)
    add(scheduler, *requests)
    scheduled = scheduler.schedule()
    numbers = {"r0": [1.0, 2.0], "r1": [1.0, math.nan], "r2": [math.inf, 1.0]}
    pooled = {name: Pooled(struct.pack("2f", *values), (2,)) for name, values in numbers.items()}
    outputs = scheduler.update_from_output(scheduled, ModelRunnerOutput({}, pooled=pooled))
    assert [(one.finish_reason, one.pooled is None) for one in outputs] == [
        (FinishReason.STOP, False), (FinishReason.ERROR, True), (FinishReason.ERROR, True),
    ]  # fmt: skip
    assert outputs[1].error is not None
    assert "NaN or infinity" in outputs[1].error
    assert not scheduler.requests
    scheduler.check_integrity()
