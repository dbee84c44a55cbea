"""What drafts may take of a step, and what a proposer cannot do to it."""

from collections import deque
from collections.abc import Mapping, Sequence

import pytest
from quire_engine.messages import DraftTokens, EngineCoreOutput, FinishReason, GrammarBitmask, SchedulerOutput
from quire_engine.sampling_params import SamplingParams
from quire_engine.scheduler.grammar import GrammarError
from quire_engine.scheduler.request import Request
from quire_engine.scheduler.scheduler import Scheduler
from quire_engine.stats import DraftStats, StepStats
from support.scheduling import (
    VOCAB_SIZE,
    FakeModelRunner,
    FixedCosts,
    draft_always,
    draft_with,
    make_request,
    make_requests,
    make_scheduler,
    run_step,
    true_continuation,
    undisturbed_output,
)


class Proposer:
    """Drafts these tokens for everybody, or what comes next."""

    def __init__(self, token_ids: Sequence[int] | None = None) -> None:
        self.token_ids = token_ids
        self.forgotten: list[str] = []

    def propose(self, request: Request, max_tokens: int) -> DraftTokens:
        token_ids = true_continuation(request, max_tokens) if self.token_ids is None else list(self.token_ids)
        return DraftTokens(request.num_tokens, token_ids, [1.0] * len(token_ids))

    def forget(self, request: Request) -> None:
        self.forgotten.append(request.request_id)


class Raises(Proposer):
    num_asked = 0

    def propose(self, request: Request, max_tokens: int) -> DraftTokens:
        self.num_asked += 1
        raise RuntimeError("propose")

    def forget(self, request: Request) -> None:
        raise RuntimeError("forget")


def drafting(proposer: Proposer, num_requests: int = 1, max_tokens: int = 9, **settings: int) -> Scheduler:
    """A scheduler whose requests have a token each."""
    scheduler = make_scheduler(**settings)
    draft_always(scheduler, proposer)
    for request in make_requests(num_requests, max_tokens=max_tokens):
        scheduler.add_request(request)
    return scheduler


def run(scheduler: Scheduler, runner: FakeModelRunner | None = None) -> dict[str, list[int]]:
    """What each request gets, until all have ended."""
    runner = runner or FakeModelRunner.for_scheduler(scheduler)
    token_ids: dict[str, list[int]] = {request_id: [] for request_id in scheduler.requests}
    while scheduler.has_requests():
        for output in run_step(scheduler, runner):
            assert output.finish_reason is not FinishReason.ERROR
            token_ids[output.request_id] += output.new_token_ids
        scheduler.check_integrity()
    return token_ids


def test_a_proposer_that_raises_is_not_asked_again_and_nobody_notices() -> None:
    proposer = Raises()
    scheduler = drafting(proposer, 3)
    expected = {name: undisturbed_output(request)[0] for name, request in scheduler.requests.items()}
    assert run(scheduler) == expected
    assert proposer.num_asked == 3


def test_the_ranks_hear_what_was_accepted_before_the_proposer_raised() -> None:
    class RaisesLater(Proposer):
        num_asked = 0

        def propose(self, request: Request, max_tokens: int) -> DraftTokens:
            self.num_asked += 1
            if self.num_asked == 2:
                raise RuntimeError("the second time")
            return super().propose(request, max_tokens)

    scheduler, proposer = make_scheduler(async_scheduling=True, sends_new_token_ids=True), RaisesLater()
    draft_always(scheduler, proposer)
    scheduler.add_request(make_request([7] * 8, request_id="r0", params=SamplingParams(max_tokens=30)))
    (request,) = scheduler.requests.values()
    runner, told = FakeModelRunner.for_scheduler(scheduler), []
    for _ in range(4):
        step = scheduler.schedule()
        told += [token_id for token_ids in step.cached_requests.new_token_ids for token_id in token_ids]
        assert told == request.all_token_ids[8:], "before the step computes behind them"
        scheduler.update_from_output(step, runner.execute_model(step))
    assert proposer.num_asked == 2
    assert len(told) > 7, "some were accepted"
    assert request.all_token_ids[8:] == undisturbed_output(request)[0][: request.num_output_tokens]


@pytest.mark.parametrize("outside", [VOCAB_SIZE, -1])
def test_a_draft_ends_before_what_is_no_token(outside: int) -> None:
    scheduler = drafting(Proposer([5, outside, 6]))
    run_step(scheduler, FakeModelRunner.for_scheduler(scheduler))
    assert scheduler.schedule().draft_token_ids == {"r0": [5]}


def test_drafts_take_what_is_left_of_the_tokens_and_rows_and_no_more() -> None:
    scheduler = drafting(Proposer([7] * 20), 2, max_tokens=30, max_num_batched_tokens=16, max_num_seqs=8)
    run_step(scheduler, FakeModelRunner.for_scheduler(scheduler))
    scheduler.add_request(make_request([50] * 9, request_id="new"))
    step = scheduler.schedule()
    assert step.num_scheduled_tokens == {"r0": 1 + 3, "r1": 1 + 2, "new": 9}, "8 rows; 3 are taken"
    scheduler = drafting(Proposer([7] * 20), 1, max_tokens=4)
    run_step(scheduler, FakeModelRunner.for_scheduler(scheduler))
    assert scheduler.schedule().num_scheduled_tokens == {"r0": 1 + 2}, "the last token is sampled behind the last draft"


def test_nobody_gives_way_in_a_step_for_its_drafts() -> None:
    scheduler = drafting(Proposer([7] * 8), 2, max_tokens=9, num_blocks=6, block_size=4)
    run_step(scheduler, FakeModelRunner.for_scheduler(scheduler))
    step = scheduler.schedule()
    assert set(step.num_scheduled_tokens) == {"r0", "r1"}
    assert scheduler.num_preemptions == 0
    assert list(step.draft_token_ids) == ["r0"] or not step.draft_token_ids


def test_a_request_that_is_isolated_has_no_drafts() -> None:
    """It is to fail for itself: a step that fails because of drafts ends no request."""
    scheduler = drafting(Proposer(), 3)
    expected = {name: undisturbed_output(request)[0] for name, request in scheduler.requests.items()}
    failed: list[str] = []

    class Runner(FakeModelRunner):
        def submit(self, scheduler_output):  # type: ignore[no-untyped-def]
            if scheduler_output.draft_token_ids and len(failed) < 3:
                failed.append("with drafts")
                self.fails = lambda request_id, num_output_tokens: True
            super().submit(scheduler_output)
            self.fails = lambda request_id, num_output_tokens: False

    assert run(scheduler, Runner.for_scheduler(scheduler)) == expected
    assert len(failed) == 3


class Certain(Proposer):
    """Drafts with these chances."""

    def __init__(self, *chances: float) -> None:
        super().__init__()
        self.chances = chances

    def propose(self, request: Request, max_tokens: int) -> DraftTokens:
        chances = list(self.chances[:max_tokens])
        return DraftTokens(request.num_tokens, [7] * len(chances), chances)


@pytest.mark.parametrize(
    ("seconds_per_token", "num_drafts"),
    [
        (0.0, 4),  # reading the weights takes all the time
        (0.1, 3),
        (0.3, 2),
        (1.0, 1),
        (100.0, 0),  # a draft takes as long as a step, and is accepted less often than not
    ],
)
def test_so_many_drafts_are_computed_as_make_the_most_tokens_per_second(
    seconds_per_token: float, num_drafts: int
) -> None:
    scheduler = make_scheduler()
    draft_with(scheduler, Certain(0.9, 0.6, 0.6, 0.6), VOCAB_SIZE, 7, FixedCosts(seconds_per_token))
    scheduler.add_request(make_request([5], request_id="r0", params=SamplingParams(max_tokens=30)))
    run_step(scheduler, FakeModelRunner.for_scheduler(scheduler))
    assert len(scheduler.schedule().draft_token_ids.get("r0", ())) == num_drafts


def test_the_likeliest_drafts_of_all_requests_come_first() -> None:
    class ByRequest(Proposer):
        def propose(self, request: Request, max_tokens: int) -> DraftTokens:
            return DraftTokens(request.num_tokens, [7] * 4, [0.9] * 4 if request.request_id == "r1" else [0.5] * 4)

    scheduler = drafting(ByRequest(), 2, max_tokens=30, max_num_seqs=6)
    run_step(scheduler, FakeModelRunner.for_scheduler(scheduler))
    assert {name: len(own) for name, own in scheduler.schedule().draft_token_ids.items()} == {"r1": 4}


def test_a_step_without_drafts_comes_first_where_nothing_is_known_of_its_time() -> None:
    scheduler = make_scheduler()
    costs = FixedCosts(0.0)
    costs.unknown = {1}
    draft_with(scheduler, Certain(0.9), VOCAB_SIZE, 7, costs)
    scheduler.add_request(make_request([5], request_id="r0", params=SamplingParams(max_tokens=30)))
    runner = FakeModelRunner.for_scheduler(scheduler)
    run_step(scheduler, runner)
    step = scheduler.schedule()
    assert not step.draft_token_ids
    runner.submit(step)
    scheduler.update_from_output(step, runner.collect())
    costs.unknown = set()
    assert scheduler.schedule().draft_token_ids


def test_drafts_that_were_right_all_along_are_computed_though_none_was_for_long() -> None:
    """The record also learns from drafts that are not computed."""
    scheduler = make_scheduler(num_blocks=400)
    costs = FixedCosts(100.0)
    draft_with(scheduler, Proposer(), VOCAB_SIZE, 7, costs)
    scheduler.add_request(make_request([50], request_id="r0", params=SamplingParams(max_tokens=200)))
    runner = FakeModelRunner.for_scheduler(scheduler)
    for _ in range(50):
        run_step(scheduler, runner)
    assert scheduler.make_stats().drafts == DraftStats()
    costs.seconds_per_token = 0.0
    for _ in range(18):
        run_step(scheduler, runner)
    stats = scheduler.make_stats().drafts
    assert stats is not None
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0


@pytest.mark.parametrize("num_left", [2, 0])
def test_drafts_that_a_grammar_does_not_allow_are_not_in_the_step(num_left: int) -> None:
    def fill_bitmask(
        requests: Sequence[Request], drafts: Mapping[str, Sequence[int]]
    ) -> tuple[GrammarBitmask, list[tuple[Request, int]], list[tuple[Request, GrammarError]]]:
        cut = [(request, num_left) for request in requests if request.request_id in drafts]
        return GrammarBitmask([request.request_id for request in requests], b""), cut, []

    scheduler = make_scheduler(fill_bitmask=fill_bitmask)
    draft_always(scheduler, Proposer([7] * 9))
    for request in make_requests(2, max_tokens=9):
        scheduler.add_request(request)
    scheduler._structured["r0"] = scheduler.requests["r0"]
    run_step(scheduler, FakeModelRunner.for_scheduler(scheduler))
    step = scheduler.schedule()
    assert step.draft_token_ids == {"r1": [7] * 7} | ({"r0": [7] * num_left} if num_left else {})
    assert step.num_scheduled_tokens == {"r0": 1 + num_left, "r1": 1 + 7}
    assert step.grammar_bitmask == GrammarBitmask(["r0"], b"")
    assert scheduler.requests["r0"].num_computed_tokens == 8 + 1 + num_left


def test_a_request_whose_grammar_cannot_go_on_ends_and_its_message_was_begun_before() -> None:
    events: list[object] = []

    def fill_bitmask(
        requests: Sequence[Request], drafts: Mapping[str, Sequence[int]]
    ) -> tuple[None, list[tuple[Request, int]], list[tuple[Request, GrammarError]]]:
        events.append([request.request_id for request in requests])
        return None, [], [(request, GrammarError("no token is left")) for request in requests]

    scheduler = make_scheduler(fill_bitmask=fill_bitmask)
    scheduler._on_begin = events.append
    (request,) = make_requests(1)
    request.message_number = 5
    scheduler.add_request(request)
    scheduler._structured["r0"] = request
    runner = FakeModelRunner.for_scheduler(scheduler)
    (output,) = run_step(scheduler, runner)
    assert events == [5, ["r0"]]
    assert (output.error, output.new_token_ids) == ("structured_outputs: no token is left", [])
    assert not scheduler.has_requests()
    run_step(scheduler, runner)
    assert not runner.known_request_ids
    scheduler.check_integrity()


def test_a_request_may_have_fewer_drafts_or_none() -> None:
    scheduler = drafting(Proposer([7] * 9), 0)
    for number, own in enumerate((None, 0, 2, 50)):
        params = SamplingParams(max_tokens=30, num_speculative_tokens=own)
        scheduler.add_request(make_request([50 + number], request_id=f"r{number}", params=params))
    run_step(scheduler, FakeModelRunner.for_scheduler(scheduler))
    drafts = scheduler.schedule().draft_token_ids
    assert {name: len(own) for name, own in drafts.items()} == {"r0": 7, "r2": 2, "r3": 7}


def test_what_was_drafted_and_accepted_is_counted() -> None:
    scheduler = drafting(Proposer(), 2)
    outputs: list[EngineCoreOutput] = []
    runner = FakeModelRunner.for_scheduler(scheduler)
    while scheduler.has_requests():
        outputs += run_step(scheduler, runner)
    stats = scheduler.make_stats().drafts
    assert stats is not None
    drafted = [output for output in outputs if output.num_draft_tokens]
    assert stats.num_drafts == len(drafted)
    assert stats.num_draft_tokens == sum(output.num_draft_tokens for output in drafted)
    assert stats.num_accepted_tokens == sum(len(output.new_token_ids) - 1 for output in drafted)
    assert sum(stats.num_accepted_tokens_per_pos) == stats.num_accepted_tokens
    assert stats.num_accepted_tokens_per_pos == sorted(stats.num_accepted_tokens_per_pos, reverse=True)
    assert stats.acceptance_length == 1 + stats.num_accepted_tokens / stats.num_drafts


def test_the_proposer_is_told_of_every_end() -> None:
    proposer = Proposer()
    scheduler = drafting(proposer, 3)
    scheduler.finish_request("r1")
    run(scheduler)
    assert sorted(proposer.forgotten) == ["r0", "r1", "r2"]


class Counted(Certain):
    """Counts how often it is asked; has no drafts."""

    num_asked = 0

    def propose(self, request: Request, max_tokens: int) -> DraftTokens:
        self.num_asked += 1
        return super().propose(request, max_tokens)


def test_requests_are_asked_less_often_where_no_request_had_drafts() -> None:
    scheduler, proposer = make_scheduler(num_blocks=400), Counted()
    costs = FixedCosts(0.0)
    costs.propose_seconds = 0.1  # a tenth of a step
    draft_with(scheduler, proposer, VOCAB_SIZE, 7, costs)
    runner = FakeModelRunner.for_scheduler(scheduler)
    asked = []
    for number in range(60):
        before = proposer.num_asked
        scheduler.add_request(make_request([number], request_id=f"r{number}", params=SamplingParams(max_tokens=40)))
        while scheduler.has_requests():
            run_step(scheduler, runner)
        asked.append(proposer.num_asked - before)
    assert asked[0] == 9 + 1, "until its balance is below 0, and then every 20 steps"
    assert 1 <= min(asked[5:]) <= max(asked[5:]) <= 6, "the balance of all is below 0 after 33 times"


def test_a_request_is_asked_in_every_step_where_that_costs_nothing() -> None:
    scheduler, proposer = make_scheduler(num_blocks=400), Counted()
    draft_always(scheduler, proposer)
    scheduler.add_request(make_request([1], params=SamplingParams(max_tokens=40, ignore_eos=True)))
    run(scheduler)
    assert proposer.num_asked >= 38


def test_requests_that_rest_are_asked_in_the_same_steps() -> None:
    scheduler, proposer = make_scheduler(num_blocks=2000), Counted()
    draft_always(scheduler, proposer, propose_seconds=0.01)
    runner, asked = FakeModelRunner.for_scheduler(scheduler), []
    for number in range(300):
        if number in (0, 5, 9, 13):
            params = SamplingParams(max_tokens=400, ignore_eos=True)
            scheduler.add_request(make_request([number], request_id=f"r{number}", params=params))
        before = proposer.num_asked
        run_step(scheduler, runner)
        asked.append(proposer.num_asked - before)
    late = [number for number in asked[150:] if number]
    assert late
    assert sum(late) >= 2 * len(late), "they came at four different times"


def test_few_steps_are_measured_while_all_requests_rest() -> None:
    class Noted(FixedCosts):
        num_noted = 0

        def record(self, num_tokens: int, seconds: float, *, has_drafts: bool) -> None:
            self.num_noted += 1

    scheduler, proposer, costs = make_scheduler(num_blocks=400), Counted(), Noted()
    costs.propose_seconds = 0.1
    draft_with(scheduler, proposer, VOCAB_SIZE, 7, costs)
    runner = FakeModelRunner.for_scheduler(scheduler)
    params = SamplingParams(max_tokens=600, ignore_eos=True)
    scheduler.add_request(make_request([1], request_id="r", params=params))
    noted, asked = [], []
    for _ in range(500):
        output = scheduler.schedule()
        assert not scheduler.schedule().num_scheduled_tokens, "where steps overlap, one may be empty: it is no step"
        scheduler.update_from_output(output, runner.execute_model(output))
        scheduler.note_step_seconds(StepStats(num_tokens=1), 1.0, 1.0)
        noted.append(costs.num_noted)
        asked.append(proposer.num_asked)
    num_resting = 300
    num_noted, num_asked = noted[-1] - noted[-num_resting], asked[-1] - asked[-num_resting]
    assert noted[3] == 4, "all while it is asked"
    assert num_resting / 5 < num_noted <= num_resting / 4 + num_asked


def test_hardly_more_than_one_request_is_asked_in_vain_in_each_step_of_a_large_batch() -> None:
    number, max_tokens = 64, 80
    scheduler = make_scheduler(num_blocks=2000, max_num_seqs=2 * number, max_num_batched_tokens=640)
    proposer, costs = Counted(), FixedCosts()
    costs.propose_seconds = 1e-3
    draft_with(scheduler, proposer, VOCAB_SIZE, 7, costs)
    runner, asked = FakeModelRunner.for_scheduler(scheduler), []
    for wave in range(8):
        before, num_steps = proposer.num_asked, runner.num_steps
        for place in range(number):
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            scheduler.add_request(make_request([wave, place], request_id=f"r{wave}-{place}", params=params))
        while scheduler.has_requests():
            run_step(scheduler, runner)
        asked.append((proposer.num_asked - before) / (runner.num_steps - num_steps))
    assert asked[0] > 3, "at first nobody knows that it is in vain"
    assert 0 < asked[-1] < 1.5


def test_a_request_that_rests_goes_on_before_its_token_is_known() -> None:
    class Asked(Counted):
        def propose(self, request: Request, max_tokens: int) -> DraftTokens:
            assert request.num_computed_tokens == request.num_tokens, "it is asked for what follows its last token"
            return super().propose(request, max_tokens)

    scheduler, proposer = make_scheduler(async_scheduling=True), Asked()
    draft_always(scheduler, proposer, propose_seconds=0.05)
    scheduler.add_request(make_request([7] * 8, request_id="r0", params=SamplingParams(max_tokens=40)))
    (request,) = scheduler.requests.values()
    runner, in_flight, waits = FakeModelRunner.for_scheduler(scheduler), deque[SchedulerOutput](), []
    while scheduler.has_requests():
        step = scheduler.schedule()
        if step.num_scheduled_tokens:
            runner.submit(step)
            in_flight.append(step)
        waits.append(not step.num_scheduled_tokens)
        if len(in_flight) == 2 or not step.num_scheduled_tokens:
            scheduler.update_from_output(in_flight.popleft(), runner.collect())
    assert request.all_token_ids[8:] == undisturbed_output(request)[0]
    assert 3 <= proposer.num_asked <= 6, "every 16 steps"
    assert proposer.num_asked <= sum(waits) <= proposer.num_asked + 2, "where it is to be asked, and at its end"
