"""Drafts of a model on the workers: for whom they are wanted, and which of those that come are used."""

from collections import deque
from collections.abc import Sequence
from copy import deepcopy
from itertools import pairwise
from random import Random

import pytest
from quire_engine.messages import FinishReason, ModelRunnerOutput, SchedulerOutput
from quire_engine.sampling_params import SamplingParams
from quire_engine.scheduler.request import Request
from quire_engine.scheduler.scheduler import Scheduler
from quire_engine.scheduler.step_time import StepCurve
from quire_engine.stats import StepStats
from support.scheduling import (
    VOCAB_SIZE,
    FakeModelRunner,
    FixedCosts,
    draft_always,
    draft_partly_right,
    draft_right,
    draft_with,
    make_request,
    make_requests,
    make_scheduler,
    next_token,
    run_step,
    undisturbed_output,
)

MOST = 7


def draft_wrong(token_ids: Sequence[int], num_tokens: int) -> list[int]:
    return [(next_token(token_ids) + 1) % VOCAB_SIZE] * num_tokens


def draft_failing(token_ids: Sequence[int], num_tokens: int) -> None:
    """There are no drafts."""


DRAFTS = {
    "right": draft_right,
    "wrong": draft_wrong,
    "partly right": draft_partly_right,
    "failed": draft_failing,
    "none": lambda token_ids, num_tokens: [],
    "no tokens": lambda token_ids, num_tokens: [VOCAB_SIZE] * num_tokens,
    "too many": lambda token_ids, num_tokens: draft_right(token_ids, num_tokens + 3),
}
WAYS = {
    "": {},
    "no prefix cache": {"enable_prefix_caching": False},
    "few blocks": {"num_blocks": 12},
    "small steps": {"max_num_batched_tokens": 5},
    "two stages": {"pipeline_parallel_size": 2},
    "ahead": {"async_scheduling": True},
}


def drafting(requests: Sequence[Request], costs: FixedCosts | None = None, **settings: int) -> Scheduler:
    scheduler = make_scheduler(**settings)
    if costs is None:
        draft_always(scheduler, None, most=MOST)
    else:
        draft_with(scheduler, None, VOCAB_SIZE, MOST, costs)
    for request in requests:
        scheduler.add_request(request)
    return scheduler


def run(scheduler: Scheduler, runner: FakeModelRunner, num_in_flight: int = 1) -> dict[str, list[int]]:
    """What each request gets, until all have ended, with so many steps in flight."""
    token_ids: dict[str, list[int]] = {request_id: [] for request_id in scheduler.requests}
    in_flight: deque[SchedulerOutput] = deque()
    while scheduler.has_requests() or in_flight:
        while len(in_flight) < num_in_flight:
            step = scheduler.schedule()
            scheduler.check_integrity()
            if in_flight and not step.num_scheduled_tokens and not step.dropped_request_ids:
                break
            runner.submit(step)
            in_flight.append(step)
        for output in scheduler.update_from_output(in_flight.popleft(), runner.collect()):
            assert output.finish_reason is not FinishReason.ERROR
            token_ids[output.request_id] += output.new_token_ids
        scheduler.check_integrity()
    return token_ids


def finish(scheduler: Scheduler, runner: FakeModelRunner, step: SchedulerOutput) -> ModelRunnerOutput:
    result = runner.execute_model(step)
    scheduler.update_from_output(step, result)
    return result


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("drafts", DRAFTS)
def test_every_request_gets_what_it_gets_without(drafts: str, way: str) -> None:
    requests = make_requests(5, max_tokens=21)
    expected = {request.request_id: undisturbed_output(request)[0] for request in requests}
    scheduler = drafting(requests, **WAYS[way])
    runner = FakeModelRunner.for_scheduler(scheduler)
    runner.draft = DRAFTS[drafts]  # type: ignore[assignment]
    assert run(scheduler, runner, 2 if way in ("two stages", "ahead") else 1) == expected
    stats = scheduler.make_stats()
    assert stats.drafts is not None
    assert (stats.num_preemptions > 0) == (way == "few blocks")
    assert stats.num_blocks_used == 0
    num_drafts, num_accepted = stats.drafts.num_draft_tokens, stats.drafts.num_accepted_tokens
    assert (num_drafts > 0) == (drafts in ("right", "wrong", "partly right", "too many"))
    assert (num_accepted > 0) == (drafts in ("right", "partly right", "too many"))
    assert (num_accepted < num_drafts) == (drafts in ("wrong", "partly right"))


def test_right_drafts_make_the_steps_fewer() -> None:
    def num_steps(draft: str) -> int:
        scheduler = drafting(make_requests(2, max_tokens=40))
        runner = FakeModelRunner.for_scheduler(scheduler)
        runner.draft = DRAFTS[draft]  # type: ignore[assignment]
        run(scheduler, runner)
        return runner.num_steps

    assert num_steps("wrong") == num_steps("failed") == 40
    assert num_steps("right") == 7, "1 token, 1 + 4 of them, then 1 + 6 and at last 1 + 7"


def test_drafts_are_wanted_of_those_that_the_step_samples() -> None:
    requests = [make_request([50] * 9, request_id="long"), *make_requests(1, prompt_length=4)]
    scheduler = drafting(requests, max_num_batched_tokens=8)
    runner = FakeModelRunner.for_scheduler(scheduler)
    step = scheduler.schedule()
    assert step.num_scheduled_tokens == {"long": 8}
    assert not step.num_drafts_wanted, "a part of its prompt is left"
    finish(scheduler, runner, step)
    step = scheduler.schedule()
    assert step.num_scheduled_tokens == {"long": 1, "r0": 4}
    assert step.num_drafts_wanted == {"long": 4, "r0": 2}


def test_no_draft_is_wanted_where_steps_have_no_room_for_any() -> None:
    scheduler = drafting(make_requests(8, prompt_length=1), max_num_batched_tokens=8, max_num_seqs=8)
    step = scheduler.schedule()
    assert len(step.num_scheduled_tokens) == 8
    assert not step.num_drafts_wanted


def test_no_draft_is_wanted_behind_the_end_of_the_output() -> None:
    """The step's own token, and one after the last draft: of 4 tokens, 2 can be drafted."""
    requests = [
        make_request([50 + most], request_id=f"r{most}", params=SamplingParams(max_tokens=most)) for most in range(1, 8)
    ]
    step = drafting(requests).schedule()
    assert step.num_drafts_wanted == {"r3": 1, "r4": 2, "r5": 3, "r6": 4, "r7": 4}


def test_drafts_of_this_step_count_for_those_of_the_next() -> None:
    """All of them may be accepted."""
    scheduler = drafting([make_request([5], request_id="r0", params=SamplingParams(max_tokens=8))])
    runner = FakeModelRunner.for_scheduler(scheduler)
    finish(scheduler, runner, scheduler.schedule())
    step = scheduler.schedule()
    assert len(step.draft_token_ids["r0"]) == 4
    assert step.num_drafts_wanted == {"r0": 1}, "1 + 4 + 1 tokens, a draft and the last token"


def test_a_request_may_want_fewer_drafts_or_none() -> None:
    requests = [
        make_request([5, own or 0], request_id=f"r{own}", params=SamplingParams(num_speculative_tokens=own))
        for own in (None, 0, 2, 50)
    ]
    scheduler = drafting(requests)
    assert scheduler.schedule().num_drafts_wanted == {"rNone": 4, "r2": 2, "r50": 4}
    assert not scheduler.requests["r0"].is_drafted


def test_nobody_waits_or_gives_way_in_a_step_for_what_is_wanted_after_it() -> None:
    """The same step without drafting schedules the same, but for the drafts."""
    num_wanted = num_denied = num_preemptions = 0
    for num_blocks in range(8, 20):
        scheduler = drafting(make_requests(5, max_tokens=21), num_blocks=num_blocks)
        runner = FakeModelRunner.for_scheduler(scheduler)
        runner.draft = draft_partly_right
        while scheduler.has_requests():
            twin = deepcopy(scheduler)
            twin._drafter = None
            without, step = twin.schedule(), scheduler.schedule()
            counts = dict(step.num_scheduled_tokens)
            for request_id, drafts in step.draft_token_ids.items():
                counts[request_id] -= len(drafts)
            assert counts == without.num_scheduled_tokens
            assert step.dropped_request_ids == without.dropped_request_ids
            assert [new.request_id for new in step.new_requests] == [new.request_id for new in without.new_requests]
            num_wanted += len(step.num_drafts_wanted)
            num_denied += len(step.num_scheduled_tokens) - len(step.num_drafts_wanted)
            finish(scheduler, runner, step)
        num_preemptions += scheduler.num_preemptions
    assert min(num_wanted, num_denied, num_preemptions) > 10


def test_blocks_for_what_is_wanted_are_sent_with_the_step() -> None:
    scheduler = drafting(make_requests(1, prompt_length=8), num_blocks=64, block_size=4)
    scheduler.requests["r0"].max_tokens = 40
    step = scheduler.schedule()
    assert step.num_drafts_wanted == {"r0": 4}
    assert step.new_requests[0].block_ids == scheduler.kv_cache.get_block_ids("r0")
    assert len(step.new_requests[0].block_ids) == 3
    finish(scheduler, FakeModelRunner.for_scheduler(scheduler), step)
    step = scheduler.schedule()
    known = 3 + sum(map(len, step.cached_requests.new_block_ids))
    assert known == len(scheduler.kv_cache.get_block_ids("r0")) == -(-(8 + 1 + 4 + step.num_drafts_wanted["r0"]) // 4)


def test_what_was_drafted_for_a_request_that_gave_way_is_not_used_before_its_time() -> None:
    scheduler = drafting(make_requests(1, max_tokens=9), async_scheduling=True)
    runner = FakeModelRunner.for_scheduler(scheduler)
    runner.draft = draft_wrong
    step = scheduler.schedule()
    runner.submit(step)
    (request,) = scheduler.running
    scheduler._preempt(scheduler.running.pop())
    scheduler.update_from_output(step, runner.collect())
    assert request.num_output_tokens == 0, "the result is void"
    again = scheduler.schedule()
    assert not again.draft_token_ids
    finish(scheduler, runner, again)
    assert request.all_token_ids[8:] == undisturbed_output(request)[0][:1]


def test_what_was_drafted_for_a_request_that_ended_is_dropped() -> None:
    scheduler = drafting(make_requests(2, max_tokens=9))
    runner = FakeModelRunner.for_scheduler(scheduler)
    step = scheduler.schedule()
    result = runner.execute_model(step)
    scheduler.finish_request("r0")
    scheduler.update_from_output(step, result)
    assert "r0" in result.drafts
    assert list(scheduler.schedule().draft_token_ids) == ["r1"]


@pytest.mark.parametrize("prompt_length", [8, 9])
def test_a_new_request_with_an_old_id_gets_none_of_the_old_ones_drafts(prompt_length: int) -> None:
    """Whether they would fit by their position (9 tokens) or not."""
    scheduler = drafting(make_requests(1, max_tokens=9))
    runner = FakeModelRunner.for_scheduler(scheduler)
    step = scheduler.schedule()
    result = runner.execute_model(step)
    scheduler.finish_request("r0")
    new = make_request([60] * prompt_length, request_id="r0", params=SamplingParams(max_tokens=9))
    scheduler.add_request(new)
    scheduler.update_from_output(step, result)
    assert result.drafts["r0"].start == 9
    step = scheduler.schedule()
    assert not step.draft_token_ids
    runner.draft = draft_failing
    finish(scheduler, runner, step)
    assert new.num_tokens == prompt_length + 1
    assert not scheduler.schedule().draft_token_ids


def test_drafts_that_were_left_out_are_not_used_once_the_request_has_gone_on() -> None:
    costs = FixedCosts()
    scheduler = drafting(make_requests(1, max_tokens=30), costs)
    runner = FakeModelRunner.for_scheduler(scheduler)
    finish(scheduler, runner, scheduler.schedule())
    runner.draft = draft_failing
    costs.unknown = {1}
    finish(scheduler, runner, scheduler.schedule())
    costs.unknown = set()
    step = scheduler.schedule()
    assert step.num_scheduled_tokens == {"r0": 1}


class Costs(FixedCosts):
    """Notes what is recorded.

    Args:
        propose_seconds: how long it takes to ask a request, where a token takes a second.
    """

    def __init__(self, propose_seconds: float = 0.0) -> None:
        super().__init__()
        self.propose_seconds = propose_seconds
        self.asked: list[tuple[int, float, bool]] = []
        self.further: list[tuple[int, float]] = []
        self.steps: list[float] = []

    def record_proposals(self, number: int, seconds: float, *, is_upper_bound: bool = False) -> None:
        self.asked.append((number, seconds, is_upper_bound))

    def record_drafting(self, number: int, seconds: float) -> None:
        self.further.append((number, seconds))

    def record(self, num_tokens: int, seconds: float, *, has_drafts: bool) -> None:
        self.steps.append(seconds)


def wanted_steps(scheduler: Scheduler, runner: FakeModelRunner, num_steps: int) -> list[bool]:
    """In which of the next steps any drafts are wanted."""
    wanted = []
    for _ in range(num_steps):
        step = scheduler.schedule()
        wanted.append(bool(step.num_drafts_wanted))
        finish(scheduler, runner, step)
    return wanted


def num_wanted_of_each(scheduler: Scheduler, runner: FakeModelRunner, seconds: float = 0.0) -> list[int]:
    """In how many steps drafts are wanted of each of 60 requests of 16 tokens, one after the other.

    Args:
        scheduler: has no requests.
        runner: carries out its steps.
        seconds: that a model takes until its first draft.
    """
    num_wanted = [0] * 60
    for number in range(60):
        params = SamplingParams(max_tokens=16, ignore_eos=True)
        scheduler.add_request(make_request([number], request_id=f"n{number}", params=params))
        while scheduler.has_requests():
            step = scheduler.schedule()
            result = runner.execute_model(step)
            if step.num_drafts_wanted:
                num_wanted[number] += 1
                result.first_draft_seconds = result.draft_seconds = seconds
            scheduler.update_from_output(step, result)
    return num_wanted


def test_a_request_rests_while_its_drafts_are_worth_too_little() -> None:
    (request,) = make_requests(1, max_tokens=2000)
    scheduler = drafting([request], Costs(propose_seconds=0.25), num_blocks=600)
    runner = FakeModelRunner.for_scheduler(scheduler)
    runner.draft = draft_wrong
    first, later = wanted_steps(scheduler, runner, 40), wanted_steps(scheduler, runner, 120)
    assert all(first[:5])
    assert 2 <= sum(later) <= 6, "once in 50 steps"
    runner.draft = draft_right
    assert all(wanted_steps(scheduler, runner, 200)[-10:])


def test_asking_costs_what_drafting_takes_but_not_what_a_model_has_to_make_up_for() -> None:
    """The first time it computes the whole prompt. A step takes so much less."""
    costs = Costs()
    scheduler = drafting(make_requests(2, max_tokens=30), costs)
    runner = FakeModelRunner.for_scheduler(scheduler)
    for seconds in (0.5, 0.0625, 0.125):
        step = scheduler.schedule()
        result = runner.execute_model(step)
        result.draft_seconds, result.first_draft_seconds = seconds, seconds / 2
        scheduler.update_from_output(step, result)
        scheduler.note_step_seconds(StepStats(num_tokens=2), 9.0, 8.0)
    assert costs.asked == [(2, 0.25, True), (2, 0.03125, False), (2, 0.0625, False)]
    assert costs.further == [(2 * 3, 0.25), (2 * 4, 0.03125), (2 * 5, 0.0625)]
    assert costs.steps == [7.5, 7.9375, 7.875]


def test_after_a_rest_a_model_has_to_make_up_for_it_again() -> None:
    costs = Costs(propose_seconds=0.25)
    scheduler = drafting(make_requests(1, max_tokens=400), costs, num_blocks=400)
    runner = FakeModelRunner.for_scheduler(scheduler)
    runner.draft = draft_wrong
    wanted = wanted_steps(scheduler, runner, 250)
    usual = sum(now and before for before, now in pairwise(wanted))
    assert sum(not is_upper_bound for _, _, is_upper_bound in costs.asked) == usual < sum(wanted) - 3


def test_after_a_preemption_too() -> None:
    costs = Costs()
    scheduler = drafting(make_requests(3, max_tokens=30), costs, num_blocks=12, enable_prefix_caching=False)
    run(scheduler, FakeModelRunner.for_scheduler(scheduler))
    assert scheduler.make_stats().num_preemptions > 1
    num_behind = sum(is_upper_bound for _, _, is_upper_bound in costs.asked)
    assert 1 < num_behind < len(costs.asked), "not only in the first step"


@pytest.mark.parametrize(("prompt_seconds", "fewest", "most"), [(0.0, 20, 120), (3.0, 1, 8)])
def test_the_longer_its_prompt_takes_the_fewer_are_asked_in_vain(prompt_seconds: float, fewest: int, most: int) -> None:
    scheduler = drafting([], Costs(propose_seconds=0.05), num_blocks=400)
    runner = FakeModelRunner.for_scheduler(scheduler)
    runner.draft = draft_wrong
    num_wanted = num_wanted_of_each(scheduler, runner, prompt_seconds)
    assert num_wanted[0] >= 5, "at first nobody knows that it is in vain"
    assert fewest <= sum(num_wanted[20:]) <= most


@pytest.mark.parametrize("num_good", [0, 30])
@pytest.mark.parametrize(("propose_seconds", "most"), [(0.25, 7), (0.01, 26)])
def test_where_drafting_fails_it_is_tried_rarely(propose_seconds: float, most: int, num_good: int) -> None:
    """However well it went before: every 4 steps at most, and more rarely the longer asking takes."""
    scheduler = drafting(make_requests(1, max_tokens=2000), Costs(propose_seconds), num_blocks=600)
    runner = FakeModelRunner.for_scheduler(scheduler)
    assert all(wanted_steps(scheduler, runner, num_good))
    runner.draft = draft_failing
    assert sum(wanted_steps(scheduler, runner, 100)) <= most
    runner.draft = draft_right
    wanted = wanted_steps(scheduler, runner, 200)
    assert all(wanted[wanted.index(True) :]), "at once as before, once it works"


@pytest.mark.parametrize("num_good", [0, 30])
def test_where_drafting_fails_for_all_new_requests_rest_from_the_start(num_good: int) -> None:
    scheduler = drafting(make_requests(1, max_tokens=num_good + 1), Costs(propose_seconds=0.25), num_blocks=400)
    runner = FakeModelRunner.for_scheduler(scheduler)
    run(scheduler, runner)
    runner.draft = draft_failing
    num_wanted = num_wanted_of_each(scheduler, runner)
    assert num_wanted[0] == 1, "the next probe comes after more steps than are left"
    assert sum(num_wanted[-20:]) < 20


def test_few_dear_times_that_are_worth_it_pay_for_many_cheap_ones_in_vain() -> None:
    """A model that stops by itself takes little time where it has nothing to draft."""
    costs = Costs(propose_seconds=0.3)
    costs.draft_seconds = 0.1
    requests = make_requests(4, max_tokens=900)
    scheduler = drafting([], costs, num_blocks=400)
    runner, is_hit = FakeModelRunner.for_scheduler(scheduler), Random(0)
    seconds = num_tokens = 0.0
    for request in requests:
        scheduler.add_request(request)
        while scheduler.has_requests():
            step = scheduler.schedule()
            hit = is_hit.random() < 0.2
            runner.draft = draft_right if hit else lambda token_ids, num_tokens: draft_wrong(token_ids, 1)
            result = runner.execute_model(step)
            seconds += 1.0
            for drafts in result.drafts.values():
                num_drafts = len(drafts.token_ids)
                drafts.chances[:] = [0.95 if hit else 0.03] * num_drafts
                seconds += 0.3 + (num_drafts - 1) * 0.1
                result.drafting_stopped = not hit
            num_tokens += sum(map(len, result.sampled_token_ids.values()))
            scheduler.update_from_output(step, result)
    assert num_tokens / seconds > 1.3, "tokens in the time of one without drafts; 1.7 if it were asked in all steps"


def test_dear_first_times_of_a_process_do_not_make_a_request_rest() -> None:
    class Learned(FixedCosts):
        record_proposals = StepCurve.record_proposals
        record_drafting = StepCurve.record_drafting

    scheduler = drafting(make_requests(1, max_tokens=400), Learned(), num_blocks=400)
    runner = FakeModelRunner.for_scheduler(scheduler)
    for number in range(50):
        step = scheduler.schedule()
        assert step.num_drafts_wanted
        result = runner.execute_model(step)
        result.first_draft_seconds = result.draft_seconds = 30.0 if number < 3 else 0.2
        scheduler.update_from_output(step, result)


@pytest.mark.parametrize(("propose_seconds", "interval"), [(0.01, 4), (0.25, 50), (1.0, 200)])
def test_probes_come_at_a_fixed_interval_and_take_a_fixed_share_of_the_time(
    propose_seconds: float, interval: int
) -> None:
    scheduler = drafting(make_requests(1, max_tokens=2000), Costs(propose_seconds), num_blocks=600)
    runner = FakeModelRunner.for_scheduler(scheduler)
    runner.draft = draft_wrong
    wanted = [number for number, is_wanted in enumerate(wanted_steps(scheduler, runner, 700)) if is_wanted]
    first = next(number for number, (one, other) in enumerate(pairwise(wanted)) if other - one > 1)
    gaps = {other - one for one, other in pairwise(wanted[first + 1 :])}
    assert gaps == {interval}


def test_nothing_is_wanted_while_it_is_not_known_how_long_steps_take() -> None:
    scheduler = make_scheduler()
    draft_with(scheduler, None, VOCAB_SIZE, MOST)
    scheduler.add_request(make_request([5], request_id="r0", params=SamplingParams(max_tokens=30)))
    runner = FakeModelRunner.for_scheduler(scheduler)
    for _ in range(2):
        step = scheduler.schedule()
        assert not step.num_drafts_wanted
        finish(scheduler, runner, step)
        scheduler.note_step_seconds(StepStats(num_tokens=1), 0.1, 0.1)
    assert scheduler.schedule().num_drafts_wanted == {"r0": 4}


def test_more_are_wanted_of_those_whose_drafts_pay_off_and_fewer_of_others() -> None:
    """Where a draft costs what another request's token costs, a wrong one is not computed."""
    costs = FixedCosts(0.3)
    scheduler = drafting(make_requests(1, max_tokens=150), costs, num_blocks=400)
    runner = FakeModelRunner.for_scheduler(scheduler)
    assert [scheduler_wants(scheduler, runner) for _ in range(5)][-1] == MOST
    runner.draft = draft_wrong
    assert [scheduler_wants(scheduler, runner) for _ in range(40)][-1] == 2


def scheduler_wants(scheduler: Scheduler, runner: FakeModelRunner) -> int:
    """How many drafts the next step wants of its request."""
    step = scheduler.schedule()
    finish(scheduler, runner, step)
    return step.num_drafts_wanted["r0"]


def test_a_model_that_stops_by_itself_may_draft_as_many_as_there_may_be() -> None:
    scheduler = drafting(make_requests(1, max_tokens=150), FixedCosts(0.3), num_blocks=400)
    runner = FakeModelRunner.for_scheduler(scheduler)
    runner.draft = lambda token_ids, num_tokens: draft_right(token_ids, 1)
    wanted = []
    for has_stopped in (False, True, True, False):
        step = scheduler.schedule()
        result = runner.execute_model(step)
        result.drafting_stopped = has_stopped
        scheduler.update_from_output(step, result)
        wanted.append(step.num_drafts_wanted["r0"])
    assert wanted == [4, 3, MOST, MOST], "fewer than wanted may also be all that it can"


def test_now_and_then_a_model_does_not_stop_so_that_what_drafts_cost_is_seen() -> None:
    """A first measurement that is far too high must not decide for ever."""
    costs = FixedCosts(0.1)
    costs.draft_seconds = 1.0
    scheduler = drafting(make_requests(1, max_tokens=150), costs, num_blocks=400)
    runner = FakeModelRunner.for_scheduler(scheduler)
    runner.draft = lambda token_ids, num_tokens: draft_right(token_ids, 1)
    least = []
    for _ in range(40):
        step = scheduler.schedule()
        finish(scheduler, runner, step)
        least.append(step.least_draft_chance)
    assert max(least) > 0.9
    assert 0 in least[5:]


def test_the_workers_are_told_what_drafts_are_worth_and_how_they_fared() -> None:
    """Those of greedy requests and of others, by themselves."""
    scheduler = drafting([], FixedCosts(0.3), num_blocks=400)
    for name, temperature in (("r0", 0.0), ("r1", 1.0)):
        params = SamplingParams(max_tokens=60, temperature=temperature)
        scheduler.add_request(make_request([5, 6], request_id=name, params=params))
    runner = FakeModelRunner.for_scheduler(scheduler)
    runner.draft = draft_wrong
    step = scheduler.schedule()
    assert step.least_draft_chance == 0, "all are drafted while nothing is known"
    for _ in range(4):
        finish(scheduler, runner, step)
        step = scheduler.schedule()
    # A token takes 0.3 of the 1.6 seconds of a step of two.
    assert step.least_draft_chance == pytest.approx(0.3 / (1.6 / 2) / 0.7)
    for of_kind in step.draft_chances:
        assert sum(of_kind.compared) > 0
        assert sum(of_kind.accepted) == 0


def test_a_suspect_has_no_drafts_computed_and_none_wanted() -> None:
    scheduler = drafting(make_requests(3, max_tokens=12))
    expected = {name: undisturbed_output(request)[0] for name, request in scheduler.requests.items()}
    runner = FakeModelRunner.for_scheduler(scheduler)
    token_ids: dict[str, list[int]] = {name: [] for name in expected}
    for number in range(60):
        runner.fails = lambda request_id, num_output, number=number: number == 2  # type: ignore[misc]
        is_isolating = bool(scheduler._isolation.is_active)
        twin = deepcopy(scheduler).schedule() if scheduler.has_requests() else None
        assert not (is_isolating and twin is not None and (twin.draft_token_ids or twin.num_drafts_wanted))
        for output in run_step(scheduler, runner):
            token_ids[output.request_id] += output.new_token_ids
        scheduler.check_integrity()
    assert token_ids == expected
    assert scheduler.make_stats().num_failed_steps == 1
