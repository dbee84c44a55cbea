"""A step that raises: the faulty request ends alone, and no other is affected."""

from typing import Any

import pytest
from quire_engine.messages import EngineCoreOutput, FinishReason, ModelRunnerOutput, SchedulerOutput
from quire_engine.sampling_params import SamplingParams
from quire_engine.scheduler.request import Request
from quire_engine.scheduler.scheduler import Scheduler
from support.scheduling import (
    FakeModelRunner,
    make_request,
    make_requests,
    make_scheduler,
    run_step,
    undisturbed_output,
)


def run_to_the_end(
    scheduler: Scheduler, runner: FakeModelRunner, requests: list[Request], max_steps: int = 500
) -> dict[str, EngineCoreOutput]:
    """Add the requests and step until all have ended; returns the last output of each.

    What each put out in all is checked to be what the request itself holds.
    """
    streamed: dict[str, list[int]] = {request.request_id: [] for request in requests}
    last: dict[str, EngineCoreOutput] = {}
    for request in requests:
        scheduler.add_request(request)
    for _ in range(max_steps):
        if not scheduler.has_requests():
            break
        for output in run_step(scheduler, runner):
            assert output.request_id not in last or last[output.request_id].finish_reason is None, "ended twice"
            streamed[output.request_id] += output.new_token_ids
            last[output.request_id] = output
        scheduler.check_integrity()
    assert not scheduler.has_requests(), "no progress"
    for request in requests:
        assert streamed[request.request_id] == request.all_token_ids[request.num_prompt_tokens :]
    return last


def ids(requests: list[Request]) -> list[str]:
    return [request.request_id for request in requests]


@pytest.mark.parametrize("num_output", [0, 1, 5])
@pytest.mark.parametrize("faulty", ["r0", "r2", "r4"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_blocks": 8},
        {"max_num_batched_tokens": 5},
        {"max_num_seqs": 2},
        {"long_prefill_token_threshold": 3},
        {"enable_prefix_caching": False},
        {"max_num_seqs": 1},
    ],
    ids=str,
)
def test_faulty_request_ends_alone_and_its_neighbours_finish_undisturbed(
    faulty: str, num_output: int, settings: dict[str, Any]
) -> None:
    scheduler = make_scheduler(**settings)
    runner = FakeModelRunner.for_scheduler(scheduler, lambda request_id, n: (request_id, n) == (faulty, num_output))
    requests = make_requests(5, prompt_length=9, max_tokens=8)
    expected = {request.request_id: undisturbed_output(request) for request in requests}
    last = run_to_the_end(scheduler, runner, requests)
    for request in requests:
        output = last[request.request_id]
        tokens, reason = expected[request.request_id]
        if request.request_id == faulty:
            assert output.finish_reason is FinishReason.ERROR
            assert output.error == f"{faulty} made the step fail"
            assert request.all_token_ids[9:] == tokens[:num_output]
        else:
            assert (output.finish_reason, output.error) == (reason, None)
            assert request.all_token_ids[9:] == tokens
    assert runner.known_request_ids <= set(ids(requests))
    assert scheduler.make_stats().num_blocks_used == 0


def test_several_faulty_requests_in_one_batch_all_end() -> None:
    scheduler = make_scheduler()
    runner = FakeModelRunner.for_scheduler(scheduler, lambda request_id, n: request_id in ("r1", "r3") and n == 2)
    requests = make_requests(5, max_tokens=6)
    expected = {request.request_id: undisturbed_output(request)[0] for request in requests}
    last = run_to_the_end(scheduler, runner, requests)
    assert [request_id for request_id in last if last[request_id].finish_reason is FinishReason.ERROR] == ["r1", "r3"]
    for request_id in ("r0", "r2", "r4"):
        assert last[request_id].finish_reason is FinishReason.LENGTH
    assert [request.all_token_ids[8:] for request in requests if request.request_id in ("r0", "r2", "r4")] == [
        expected[request_id] for request_id in ("r0", "r2", "r4")
    ]


def test_everybody_faulty_ends_everybody_and_leaves_a_working_engine() -> None:
    scheduler = make_scheduler()
    runner = FakeModelRunner.for_scheduler(scheduler, lambda request_id, n: request_id.startswith("r"))
    last = run_to_the_end(scheduler, runner, make_requests(4))
    assert {output.finish_reason for output in last.values()} == {FinishReason.ERROR}
    after = make_request([1, 2, 3], request_id="after", params=SamplingParams(max_tokens=3))
    expected = undisturbed_output(after)
    last = run_to_the_end(scheduler, runner, [after])
    assert (after.all_token_ids[3:], last["after"].finish_reason) == expected


def test_failure_that_does_not_come_back_ends_nobody() -> None:
    scheduler = make_scheduler()
    failures = iter([False, False, True])
    runner = FakeModelRunner.for_scheduler(scheduler, lambda request_id, n: n == 1 and next(failures, False))
    requests = make_requests(4, max_tokens=5)
    expected = {request.request_id: undisturbed_output(request) for request in requests}
    last = run_to_the_end(scheduler, runner, requests)
    assert next(failures, None) is None, "nothing failed"
    for request in requests:
        assert (request.all_token_ids[8:], last[request.request_id].finish_reason) == expected[request.request_id]


def test_failure_of_any_two_together_still_makes_progress() -> None:
    scheduler = make_scheduler()
    batch: list[str] = []

    def fails(request_id: str, num_output: int) -> bool:
        if batch and batch[0].startswith(f"{runner.num_steps}:"):
            batch.append(request_id)
        else:
            batch[:] = [f"{runner.num_steps}:"]
        return len(batch) > 1

    runner = FakeModelRunner.for_scheduler(scheduler, fails)
    requests = make_requests(3, max_tokens=4)
    expected = {request.request_id: undisturbed_output(request) for request in requests}
    last = run_to_the_end(scheduler, runner, requests)
    for request in requests:
        assert (request.all_token_ids[8:], last[request.request_id].finish_reason) == expected[request.request_id]


def failed_step(num_requests: int = 3) -> tuple[Scheduler, list[Request]]:
    """Requests with one output token each, whose second step has just failed."""
    scheduler = make_scheduler()
    requests = make_requests(num_requests, max_tokens=9)
    for request in requests:
        scheduler.add_request(request)
    sample(scheduler, scheduler.schedule())
    assert scheduler.recover_from_failed_step(scheduler.schedule(), "why") == []
    scheduler.check_integrity()
    return scheduler, requests


def sample(scheduler: Scheduler, scheduler_output: SchedulerOutput) -> None:
    """Give every scheduled request a token."""
    sampled = {request_id: [60] for request_id in scheduler_output.num_scheduled_tokens}
    scheduler.update_from_output(scheduler_output, ModelRunnerOutput(sampled))
    scheduler.check_integrity()


def test_suspects_run_one_at_a_time_in_their_old_order_and_then_together() -> None:
    scheduler, _ = failed_step()
    batches = []
    for _ in range(4):
        output = scheduler.schedule()
        batches.append(list(output.num_scheduled_tokens))
        sample(scheduler, output)
    assert batches[:3] == [["r0"], ["r1"], ["r2"]]
    assert sorted(batches[3]) == ["r0", "r1", "r2"]


def test_cleared_requests_go_on_in_their_old_order() -> None:
    scheduler, requests = failed_step()
    for _ in requests:
        sample(scheduler, scheduler.schedule())
    sample(scheduler, scheduler.schedule())
    assert ids(scheduler.running) == ["r0", "r1", "r2"]


def test_suspects_come_before_all_who_wait() -> None:
    scheduler, _ = failed_step()
    scheduler.add_request(make_request([9], request_id="late"))
    for expected in (["r0"], ["r1"], ["r2"]):
        output = scheduler.schedule()
        assert list(output.num_scheduled_tokens) == expected
        sample(scheduler, output)
    assert list(scheduler.schedule().num_scheduled_tokens)[-1] == "late"


def test_suspects_are_waiting_as_far_as_anybody_is_told() -> None:
    scheduler, _ = failed_step()
    stats = scheduler.make_stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocks_used) == (0, 3, 0)


def test_trial_of_a_long_prompt_lasts_until_its_token() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    long, short = make_request(range(20), request_id="long"), make_request([30], request_id="short")
    scheduler.add_request(short)
    scheduler.add_request(long)
    scheduler.recover_from_failed_step(scheduler.schedule(), "why")
    sample(scheduler, scheduler.schedule())
    for num_tokens in (8, 8):
        output = scheduler.schedule()
        assert output.num_scheduled_tokens == {"long": num_tokens}
        scheduler.update_from_output(output, ModelRunnerOutput({}))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"long": 4}
    sample(scheduler, output)
    assert sorted(scheduler.schedule().num_scheduled_tokens) == ["long", "short"]


def test_nothing_cached_is_trusted_after_a_failure() -> None:
    scheduler, _ = failed_step()
    assert scheduler.make_stats().num_blocks_cached == 0
    output = scheduler.schedule()
    (new,) = output.new_requests
    assert (new.request_id, new.num_computed_tokens) == ("r0", 0)
    assert output.num_scheduled_tokens == {"r0": 9}


def test_everybody_of_the_failed_step_is_dropped_once_and_introduced_again() -> None:
    scheduler, _ = failed_step()
    output = scheduler.schedule()
    assert sorted(output.dropped_request_ids) == ["r0", "r1", "r2"]
    assert [new.request_id for new in output.new_requests] == ["r0"]
    sample(scheduler, output)
    assert scheduler.schedule().dropped_request_ids == ["r0"], "cleared, it makes room for the next suspect"


@pytest.mark.parametrize("aborted", ["r0", "r1", "r2"])
@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_suspect_can_be_aborted_wherever_it_is(aborted: str, num_steps: int) -> None:
    scheduler, requests = failed_step()
    for _ in range(num_steps):
        sample(scheduler, scheduler.schedule())
    assert scheduler.finish_request(aborted) is not None
    scheduler.check_integrity()
    for _ in range(20):
        sample(scheduler, scheduler.schedule())
    assert not scheduler.has_requests()
    assert [request.num_output_tokens for request in requests if request.request_id != aborted] == [9, 9]


def test_suspect_aborted_in_isolation_makes_room_for_the_next() -> None:
    scheduler, _ = failed_step()
    output = scheduler.schedule()
    scheduler.finish_request("r0")
    scheduler.update_from_output(output, ModelRunnerOutput({"r0": [60]}))
    scheduler.check_integrity()
    assert list(output.num_scheduled_tokens) == ["r0"]
    assert list(scheduler.schedule().num_scheduled_tokens) == ["r1"]


def test_request_that_was_not_scheduled_in_the_failed_step_is_not_ended() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    runner = FakeModelRunner.for_scheduler(scheduler, lambda request_id, n: (request_id, n) == ("r0", 2))
    requests = make_requests(2, prompt_length=4, max_tokens=5)
    expected = undisturbed_output(requests[1])
    last = run_to_the_end(scheduler, runner, requests)
    assert last["r0"].finish_reason is FinishReason.ERROR
    assert (requests[1].all_token_ids[4:], last["r1"].finish_reason) == expected


def test_a_step_that_is_taken_back_makes_nobody_a_suspect() -> None:
    scheduler = make_scheduler(max_num_seqs=3)
    requests = make_requests(4, max_tokens=9)
    for request in requests:
        scheduler.add_request(request)
    sample(scheduler, scheduler.schedule())
    scheduler.schedule()
    assert scheduler.take_back_step() == []
    scheduler.check_integrity()
    assert scheduler.make_stats().num_blocks_cached == 0, "what it wrote may be half written"
    output = scheduler.schedule()
    assert [new.request_id for new in output.new_requests] == ["r0", "r1", "r2"], "first of all, and together"
    assert sorted(output.dropped_request_ids) == ["r0", "r1", "r2"]
    sample(scheduler, output)
    assert [request.num_preemptions for request in requests] == [0] * 4


def test_a_suspect_whose_step_is_taken_back_runs_alone_again() -> None:
    scheduler, _ = failed_step()
    for _ in range(3):
        assert list(scheduler.schedule().num_scheduled_tokens) == ["r0"]
        assert scheduler.take_back_step() == []
        scheduler.check_integrity()
    batches = []
    for _ in range(4):
        output = scheduler.schedule()
        batches.append(list(output.num_scheduled_tokens))
        sample(scheduler, output)
    assert batches[:3] == [["r0"], ["r1"], ["r2"]]
    assert sorted(batches[3]) == ["r0", "r1", "r2"]
