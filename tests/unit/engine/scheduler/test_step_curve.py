"""How long a step takes, by its size: what is measured, what is between, and what is forgotten."""

import pytest
from quire_engine.scheduler.step_time import StepCurve


def costs_of(*measured: tuple[int, float]) -> StepCurve:
    """The first measurement of each size does not count."""
    costs = StepCurve()
    for num_tokens in dict(measured):
        plain(costs, num_tokens, 1000.0)
    for num_tokens, seconds in measured:
        plain(costs, num_tokens, seconds)
    return costs


def plain(costs: StepCurve, num_tokens: int, seconds: float) -> None:
    costs.record(num_tokens, seconds, has_drafts=False)


def seconds_of(costs: StepCurve, num_tokens: int, num_more: int) -> list[float]:
    return costs.seconds(num_tokens, num_more)[: num_more + 1]


def test_nothing_is_known_at_first() -> None:
    costs = StepCurve()
    assert not costs.are_known()
    assert costs.is_unknown(1)
    plain(costs, 1, 1.0)
    assert not costs.are_known(), "the first step was slow: nothing was in a cache"
    plain(costs, 1, 1.0)
    assert not costs.is_unknown(1)


@pytest.mark.parametrize(("num_tokens", "seconds"), [(1, 1.0), (2, 1.0), (3, 1.5), (4, 2.0), (5, 2.0 + 1 / 16)])
def test_between_two_sizes_there_is_a_straight_line(num_tokens: int, seconds: float) -> None:
    assert seconds_of(costs_of((2, 1.0), (4, 2.0)), num_tokens, 0) == pytest.approx([seconds])


def test_drafts_cost_little_enough_to_try_where_nothing_is_known_of_them() -> None:
    assert seconds_of(costs_of((32, 2.0)), 32, 2) == pytest.approx([2.0, 2.0 + 1 / 32, 2.0 + 2 / 32])
    assert seconds_of(costs_of((1, 2.0)), 1, 2) == pytest.approx([2.0, 2.0 + 1 / 16, 2.0 + 2 / 16])


def test_drafts_cost_no_less_than_tokens_did_in_smaller_steps() -> None:
    assert seconds_of(costs_of((2, 1.0), (4, 2.0)), 4, 2) == pytest.approx([2.0, 2.5, 3.0])
    assert seconds_of(costs_of((3, 1.0), (4, 2.0)), 4, 1) == pytest.approx([2.0, 2.0 + 1 / 16]), "too near to tell"
    assert seconds_of(costs_of((2, 2.0), (4, 1.0)), 4, 1) == pytest.approx([2.0, 2.0 + 1 / 16])
    costs = costs_of((2, 1.0), (4, 2.0))
    for _ in range(2):
        costs.record(5, 2.25, has_drafts=True)
    assert seconds_of(costs, 4, 2) == pytest.approx([2.0, 2.25, 2.75])


def test_steps_with_drafts_are_known_by_themselves() -> None:
    costs = costs_of((1, 1.0), (3, 100.0))
    for _ in range(2):
        costs.record(3, 2.0, has_drafts=True)
        costs.record(5, 1.5, has_drafts=True)
    assert seconds_of(costs, 1, 5) == pytest.approx([1.0, 1.5, 2.0, 2.0, 2.0, 2.0 + 1 / 16])
    assert seconds_of(costs, 3, 1) == [100.0, 100.0], "with more tokens it takes no less time"


def test_large_sizes_share_a_mean() -> None:
    costs = costs_of((100, 5.0))
    assert not costs.is_unknown(103)
    assert costs.is_unknown(104)
    assert costs.is_unknown(95)


def test_of_the_first_steps_the_fastest_counts() -> None:
    """What they need was in no cache."""
    assert seconds_of(costs_of((1, 4.0), (1, 1.0), (1, 3.0)), 1, 0) == [1.0]


def test_means_follow_what_is_measured_but_not_one_outlier() -> None:
    costs = costs_of((1, 1.0), (1, 2.0), (1, 1.5), (1, 2.0), (1, 100.0))
    assert seconds_of(costs, 1, 0) == pytest.approx([1.2])
    for _ in range(100):
        plain(costs, 1, 3.0)
    assert seconds_of(costs, 1, 0) == pytest.approx([3.0])


@pytest.mark.parametrize(("num_measurements", "num_steps"), [(1, 64), (3, 3 * 64), (50, 16 * 64)])
def test_what_was_measured_often_is_remembered_longer(num_measurements: int, num_steps: int) -> None:
    costs = costs_of(*[(8, 100.0)] * num_measurements)
    until_refreshed = num_steps // 4
    for _ in range(until_refreshed):
        plain(costs, 1, 1.0)
    assert not costs.is_unknown(8)
    plain(costs, 1, 1.0)
    assert costs.is_unknown(8)
    for _ in range(num_steps - until_refreshed - 1):
        plain(costs, 1, 1.0)
    assert seconds_of(costs, 8, 0) == [100.0], "wanted again, but not forgotten"
    plain(costs, 1, 1.0)
    assert seconds_of(costs, 1, 1) == pytest.approx([1.0, 1.0 + 0.5 / 16])
    plain(costs, 8, 2.0)
    assert seconds_of(costs, 8, 0) == [2.0]


def test_asking_is_measured_per_request() -> None:
    costs = StepCurve()
    for seconds in (100.0, 1.0, 4.0, 1.0):
        costs.record_proposals(4, seconds)
    assert costs.propose_seconds == 0.25, "of the first times the fastest counts"
    costs.record_proposals(1, 100.0, is_upper_bound=True)
    assert costs.propose_seconds == 0.25
    costs.record_proposals(1, 100.0)
    assert costs.propose_seconds == pytest.approx(0.25 * 1.2), "a long prompt that is looked at for the first time"
    for _ in range(100):
        costs.record_proposals(2, 1.0)
    assert costs.propose_seconds == pytest.approx(0.5)
    assert costs.proposal_seconds(9) == pytest.approx(0.5), "lookups take as long for any number"


def test_a_models_first_draft_takes_longer_than_the_others() -> None:
    costs = StepCurve()
    costs.record_proposals(2, 1.0)
    costs.record_drafting(6, 0.75)
    assert costs.proposal_seconds(1) == 0.5
    assert costs.proposal_seconds(4) == 0.5 + 3 * 0.125
    for seconds in (100.0, 0.125, 0.25):
        costs.record_drafting(1, seconds)
    assert costs.draft_seconds == 0.125, "of the first times the fastest counts"
    costs.record_drafting(1, 100.0)
    assert costs.draft_seconds == pytest.approx(0.125 * 1.2), "the core was another program's"
