"""Several steps in flight: who is scheduled meanwhile, and whose results still count."""

from typing import Any

import pytest
from quire_engine.messages import FinishReason, ModelRunnerOutput, PromptLogprobs, SchedulerOutput
from quire_engine.sampling_params import SamplingParams
from quire_engine.scheduler.scheduler import Scheduler
from support.scheduling import make_request, make_requests, make_scheduler


def pipeline(num_requests: int = 0, num_batches: int = 2, **settings: Any) -> Scheduler:
    """A scheduler for a pipeline, whose requests have a token each."""
    scheduler = make_scheduler(pipeline_parallel_size=num_batches, sends_new_token_ids=True, **settings)
    for request in make_requests(num_requests, max_tokens=9):
        scheduler.add_request(request)
    if num_requests:
        update(scheduler, scheduler.schedule())
    return scheduler


def update(scheduler: Scheduler, step: SchedulerOutput, token_id: int = 60) -> dict[str, list[int]]:
    """Give every scheduled request a token; returns what was told of whom."""
    sampled = {request_id: [token_id] for request_id in step.num_scheduled_tokens}
    outputs = scheduler.update_from_output(step, ModelRunnerOutput(sampled))
    scheduler.check_integrity()
    return {output.request_id: output.new_token_ids for output in outputs}


def test_decodes_are_divided_among_the_batches_in_turn() -> None:
    scheduler = pipeline(5)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert list(first.num_scheduled_tokens) == ["r0", "r1", "r2"]
    assert list(second.num_scheduled_tokens) == ["r3", "r4"]
    assert not scheduler.schedule().num_scheduled_tokens, "all tokens are in flight"
    assert update(scheduler, first) == {"r0": [60], "r1": [60], "r2": [60]}
    assert list(scheduler.schedule().num_scheduled_tokens) == ["r0", "r1", "r2"]


def test_chunks_of_a_prompt_follow_each_other_at_once() -> None:
    scheduler = pipeline(num_batches=3, max_num_batched_tokens=8)
    scheduler.add_request(make_request(range(20), request_id="long"))
    numbers = [scheduler.schedule().num_scheduled_tokens for _ in range(4)]
    assert numbers == [{"long": 8}, {"long": 8}, {"long": 4}, {}]


def test_other_ranks_are_told_each_token_once() -> None:
    scheduler = pipeline(1)
    for token_id in (7, 8):
        step = scheduler.schedule()
        told = step.cached_requests.new_token_ids
        update(scheduler, step, token_id)
    assert told == [[7]]
    assert make_told(scheduler) == [[8]]


def make_told(scheduler: Scheduler) -> list[list[int]]:
    return scheduler.schedule().cached_requests.new_token_ids


def test_one_rank_alone_is_told_nothing() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request([1, 2]))
    update(scheduler, scheduler.schedule())
    assert make_told(scheduler) == []


def test_preempted_request_ignores_what_was_in_flight() -> None:
    scheduler = pipeline(2, num_blocks=5, block_size=4, enable_prefix_caching=False)
    old = scheduler.schedule()  # both have 8 tokens in 2 blocks each; r0 gets the last block, r1's is the next batch
    assert list(old.num_scheduled_tokens) == ["r0"]
    new = scheduler.schedule()
    assert (new.num_scheduled_tokens, new.dropped_request_ids) == ({}, ["r1"])
    assert update(scheduler, old) == {"r0": [60]}


@pytest.mark.parametrize("num_in_flight", [1, 2])
def test_void_results_bring_neither_tokens_nor_prompt_logprobs(num_in_flight: int) -> None:
    scheduler = pipeline(num_batches=3, max_num_batched_tokens=4)
    request = make_request(range(8), request_id="back", params=SamplingParams(max_tokens=2, prompt_logprobs=0))
    scheduler.add_request(request)
    steps = [scheduler.schedule() for _ in range(num_in_flight)]
    scheduler.running.remove(request)
    scheduler._preempt(request)
    again = scheduler.schedule()
    assert again.num_scheduled_tokens == {"back": 4}
    for step in steps:
        output = ModelRunnerOutput({"back": [9]}, prompt_logprobs={"back": PromptLogprobs(5, 0, b"", b"", b"")})
        assert scheduler.update_from_output(step, output) == []
    assert (request.num_output_tokens, request.prompt_logprobs) == (0, [])
    chunk = PromptLogprobs(1, 0, b"", b"", b"")
    scheduler.update_from_output(again, ModelRunnerOutput({}, prompt_logprobs={"back": chunk}))
    assert request.prompt_logprobs == [chunk]


def test_request_that_has_the_id_of_an_aborted_one_does_not_get_its_tokens() -> None:
    scheduler = pipeline()
    scheduler.add_request(make_request([1, 2], request_id="same"))
    old = scheduler.schedule()
    scheduler.finish_request("same")
    scheduler.add_request(make_request([3, 4, 5], request_id="same"))
    new = scheduler.schedule()
    assert (new.dropped_request_ids, [data.request_id for data in new.new_requests]) == (["same"], ["same"])
    assert update(scheduler, old) == {}
    assert update(scheduler, new) == {"same": [60]}


def test_aborted_request_is_not_heard_of_again_and_dropped_once() -> None:
    scheduler = pipeline(2)
    step = scheduler.schedule()
    scheduler.finish_request("r0")
    assert scheduler.schedule().dropped_request_ids == ["r0"]
    assert update(scheduler, step) == {}
    assert scheduler.schedule().dropped_request_ids == []


def test_failure_makes_suspects_of_all_in_flight_who_are_then_tried_alone() -> None:
    scheduler = pipeline(4)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert scheduler.recover_from_failed_step(first, "why") == []
    assert update(scheduler, second) == {}, "scheduled before the failure"
    batches = []
    for _ in range(4):
        step = scheduler.schedule()
        batches.append(list(step.num_scheduled_tokens))
        assert scheduler.schedule().num_scheduled_tokens == {}, "nobody besides the isolated one"
        update(scheduler, step)
    assert batches == [["r0"], ["r1"], ["r2"], ["r3"]]


def test_one_that_failed_alone_ends_though_others_were_in_flight() -> None:
    scheduler = pipeline(2)
    first, _ = scheduler.schedule(), scheduler.schedule()
    (output,) = scheduler.recover_from_failed_step(first, "why")
    assert (output.request_id, output.finish_reason, output.error) == ("r0", FinishReason.ERROR, "why")
    assert list(scheduler.schedule().num_scheduled_tokens) == ["r1"]


def test_one_that_was_aborted_alone_is_a_suspect_like_all_and_ends_only_in_isolation() -> None:
    scheduler = pipeline(2)
    first, _ = scheduler.schedule(), scheduler.schedule()
    assert scheduler.recover_from_failed_step(first, "why", was_aborted=True) == []
    alone = scheduler.schedule()
    assert list(alone.num_scheduled_tokens) == ["r0"]
    (output,) = scheduler.recover_from_failed_step(alone, "why", was_aborted=True)
    assert (output.request_id, output.finish_reason, output.error) == ("r0", FinishReason.ERROR, "why")
    assert list(scheduler.schedule().num_scheduled_tokens) == ["r1"]


def test_drops_of_a_step_that_was_never_submitted_are_told_again() -> None:
    scheduler = pipeline(2)
    scheduler.finish_request("r0")
    step = scheduler.schedule()
    assert step.dropped_request_ids == ["r0"]
    scheduler.recover_from_failed_step(step, "why", was_submitted=False)
    assert scheduler.schedule().dropped_request_ids == ["r0", "r1"]
