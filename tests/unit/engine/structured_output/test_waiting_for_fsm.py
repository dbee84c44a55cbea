"""Requests that wait for a grammar: nobody behind them waits, and the grammar sees exactly what was sampled."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from quire_engine.messages import EngineCoreOutput, ErrorCode, FinishReason
from quire_engine.sampling_params import RequestOptions, SamplingParams
from quire_engine.scheduler.request import Request, RequestStatus
from quire_engine.structured_outputs_params import StructuredOutputsParams
from support.scheduling import (
    FakeModelRunner,
    make_request,
    make_requests,
    make_scheduler,
    run_step,
    undisturbed_output,
)
from support.virtual_clock import Clock


class CountingGrammar:
    """Accepts a number of tokens, any at all, and then has ended; keeps what it was given."""

    def __init__(self, length: int, refuses_at: int | None = None) -> None:
        self.length, self.refuses_at = length, refuses_at
        self.last_fill_seconds = 0.0
        self.seen: list[int] = []

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        self.seen += token_ids
        return self.refuses_at is None or len(self.seen) <= self.refuses_at

    def fill_behind(self, drafts: Sequence[int], bitmask: npt.NDArray[np.int32], first_row: int) -> int:
        raise NotImplementedError

    def fill_bitmask(self, bitmask: npt.NDArray[np.int32], row: int) -> None:
        bitmask[row] = -1

    def is_terminated(self) -> bool:
        return len(self.seen) >= self.length


def structured(prompt: list[int], **values: int) -> Request:
    given = {"max_tokens": 50, **values}
    return make_request(prompt, params=SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), **given))


def test_it_holds_nobody_back_and_runs_when_ready() -> None:
    scheduler = make_scheduler()
    runner = FakeModelRunner.for_scheduler(scheduler)
    request, others = structured([1, 2, 3]), make_requests(3)
    scheduler.add_request(request)
    assert not scheduler.has_requests()
    for other in others:
        scheduler.add_request(other)
    assert request.status is RequestStatus.WAITING_FOR_FSM
    assert (scheduler.make_stats().num_waiting, scheduler.make_stats().num_waiting_for_fsm) == (4, 1)
    finished: list[EngineCoreOutput] = []
    while scheduler.has_requests():
        finished += [output for output in run_step(scheduler, runner) if output.finish_reason is not None]
        scheduler.check_integrity()
    assert {output.request_id for output in finished} == {other.request_id for other in others}

    request.grammar = grammar = CountingGrammar(7)
    scheduler.grammar_is_ready(request)
    outputs: list[EngineCoreOutput] = []
    while scheduler.has_requests():
        outputs += run_step(scheduler, runner)
    assert grammar.seen == [token for output in outputs for token in output.new_token_ids]
    assert request.grammar_seconds is not None
    assert [output.grammar_seconds for output in outputs] == [request.grammar_seconds, *[None] * (len(outputs) - 1)]
    assert (len(grammar.seen), outputs[-1].finish_reason) == (7, FinishReason.STOP)
    scheduler.check_integrity()


def test_it_can_be_aborted_before_its_grammar_is_ready() -> None:
    scheduler = make_scheduler()
    request = structured([1, 2, 3])
    scheduler.add_request(request)
    assert scheduler.finish_request(request.request_id) is request
    request.grammar = CountingGrammar(1)
    scheduler.grammar_is_ready(request)  # too late: nothing happens
    assert not scheduler.has_requests()
    scheduler.check_integrity()


def test_only_requests_that_are_sampled_have_a_row() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4, num_blocks=16)
    runner = FakeModelRunner.for_scheduler(scheduler)
    request = structured(list(range(10)))
    request.grammar = CountingGrammar(3)
    scheduler.add_request(request)
    rows = []
    for _ in range(4):
        output = scheduler.schedule()
        rows.append(scheduler.structured_requests_to_sample(output))
        scheduler.update_from_output(output, runner.execute_model(output))
    assert rows == [[], [], [request], [request]]  # chunks of 4, 4 and 2, then one token
    assert output.new_requests == []


def test_workers_do_not_get_the_schema() -> None:
    scheduler = make_scheduler()
    request = structured([1, 2], seed=5)
    request.grammar = CountingGrammar(3)
    scheduler.add_request(request)
    params = scheduler.schedule().new_requests[0].sampling_params
    assert params == SamplingParams(max_tokens=50, seed=5)


def test_preemption_leaves_the_grammar_where_the_output_is() -> None:
    scheduler = make_scheduler(num_blocks=9, block_size=4)
    runner = FakeModelRunner.for_scheduler(scheduler)
    requests = [structured([number, 2, 3, 4, 5, 6]) for number in range(4)]
    for number, request in enumerate(requests):
        request.grammar = CountingGrammar(12 + number)
        scheduler.add_request(request)
    expected = [
        undisturbed_output(make_request(r.all_token_ids, params=SamplingParams(max_tokens=20)))[0] for r in requests
    ]
    while scheduler.has_requests():
        run_step(scheduler, runner)
        scheduler.check_integrity()
    assert sum(request.num_preemptions for request in requests) > 2
    for number, request in enumerate(requests):
        assert isinstance(request.grammar, CountingGrammar)
        assert request.grammar.seen == expected[number][: 12 + number]


@pytest.mark.parametrize("min_tokens", [0, 20])
def test_the_end_of_the_grammar_ends_the_request(min_tokens: int) -> None:
    scheduler = make_scheduler()
    runner = FakeModelRunner.for_scheduler(scheduler)
    request = structured([1], min_tokens=min_tokens)
    request.grammar = CountingGrammar(4)
    scheduler.add_request(request)
    outputs = [output for _ in range(4) for output in run_step(scheduler, runner)]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (FinishReason.STOP, None)
    assert not scheduler.has_requests()


def test_a_token_that_the_grammar_does_not_allow_ends_the_request_with_an_error() -> None:
    scheduler = make_scheduler()
    runner = FakeModelRunner.for_scheduler(scheduler)
    request, other = structured([1]), make_requests(1)[0]
    request.grammar = CountingGrammar(9, refuses_at=2)
    scheduler.add_request(request)
    scheduler.add_request(other)
    outputs = [output for _ in range(4) for output in run_step(scheduler, runner)]
    failed = [output for output in outputs if output.error is not None]
    assert [(o.request_id, o.new_token_ids, o.error_parameter) for o in failed] == [
        (request.request_id, [], "structured_outputs")
    ]
    assert sum(len(output.new_token_ids) for output in outputs if output.request_id == other.request_id) == 4


def test_a_failed_step_does_not_advance_the_grammar() -> None:
    scheduler = make_scheduler()
    failures = iter([True])
    runner = FakeModelRunner.for_scheduler(scheduler, lambda _, num_output: num_output == 2 and next(failures, False))
    requests = [structured([1]), structured([2])]
    for request in requests:
        request.grammar = CountingGrammar(6)
        scheduler.add_request(request)
    outputs = []
    while scheduler.has_requests():
        outputs += run_step(scheduler, runner)
    for request in requests:
        assert isinstance(request.grammar, CountingGrammar)
        assert request.grammar.seen == request.all_token_ids[1:]
        assert len(request.grammar.seen) == 6


@pytest.mark.parametrize(
    ("settings", "deadline_ms", "code"),
    [({}, 500.0, ErrorCode.DEADLINE), ({"max_queue_delay_ms": 500.0}, None, ErrorCode.UNAVAILABLE)],
)
def test_time_runs_while_a_grammar_is_compiled(
    settings: dict[str, float], deadline_ms: float | None, code: ErrorCode
) -> None:
    clock = Clock(1000.0)
    scheduler = make_scheduler(clock=clock, **settings)
    runner = FakeModelRunner.for_scheduler(scheduler)
    request = structured([1, 2, 3])
    request.options = RequestOptions(deadline_ms=deadline_ms)
    scheduler.add_request(request)
    assert not scheduler.has_requests()
    assert scheduler.seconds_until_overdue() == pytest.approx(0.5)
    clock.now += 0.6
    assert (scheduler.has_requests(), scheduler.seconds_until_overdue()) == (True, 0.0)
    (output,) = run_step(scheduler, runner)
    assert (output.request_id, output.finish_reason, output.error_code) == (
        request.request_id, FinishReason.ERROR, code,
    )  # fmt: skip
    request.grammar = CountingGrammar(1)
    scheduler.grammar_is_ready(request)  # too late: nothing happens
    assert not scheduler.has_requests()
    assert scheduler.seconds_until_overdue() is None
    scheduler.check_integrity()


def test_who_waits_for_a_grammar_counts_in_a_bounded_queue() -> None:
    scheduler = make_scheduler(max_queued_requests=2)
    runner = FakeModelRunner.for_scheduler(scheduler)
    requests = [structured([number, 2, 3]) for number in range(4)]
    for request in requests[:2]:
        scheduler.add_request(request)
    assert not scheduler.has_requests()
    for request in requests[2:]:
        scheduler.add_request(request)
    assert scheduler.has_requests()
    outputs = run_step(scheduler, runner)
    assert [(output.request_id, output.error_code) for output in outputs] == [
        (request.request_id, ErrorCode.UNAVAILABLE) for request in requests[2:]
    ]
    assert not scheduler.has_requests()
    scheduler.check_integrity()
    # One that can run at once takes nobody's place.
    scheduler.add_request(make_requests(1)[0])
    assert all(output.error is None for output in run_step(scheduler, runner))
    for request in requests[:2]:
        request.grammar = CountingGrammar(3)
        scheduler.grammar_is_ready(request)
    while scheduler.has_requests():
        assert all(output.error is None for output in run_step(scheduler, runner))
    assert [request.num_output_tokens for request in requests] == [3, 3, 0, 0]
