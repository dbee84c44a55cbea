"""What a request's drafts have been worth, by the tokens that came in their place."""

import pytest
from quire_engine.draft_chances import DraftChances
from quire_engine.scheduler.draft_record import DraftRecord, ProposalBenefit
from quire_engine.scheduler.proposer import Proposal

KNOWN_IN_VAIN = ProposalBenefit(worth=0.0, cost=1.0, guessed_share=0.0)


def test_a_proposal_is_compared_up_to_its_first_wrong_token() -> None:
    record, chances = DraftRecord(ProposalBenefit()), DraftChances()
    record.note(Proposal([5, 6, 7, 8], [0.5, 0.25, 0.75, 1.0]), start=2)
    record.learn([1, 2, 5, 6, 9, 8], chances)
    assert (sum(chances.accepted), sum(chances.compared)) == (2.0, 3.0)
    assert record.factor() == (2.0 + 2.0) / (1.5 + 2.0), "what a request begins with weighs as much as two drafts"


def test_what_is_not_known_yet_does_not_count() -> None:
    record, chances = DraftRecord(ProposalBenefit()), DraftChances()
    record.note(Proposal([5, 6, 7], [0.5, 0.5, 0.5]), start=2)
    record.learn([1, 2, 5], chances)
    assert (sum(chances.accepted), sum(chances.compared)) == (1.0, 1.0)
    record.learn([1, 2, 5, 6, 7], chances)
    assert sum(chances.compared) == 1.0, "once"


def test_the_factor_goes_from_that_of_all_to_its_own() -> None:
    record = DraftRecord(ProposalBenefit())
    assert record.factor() == 1.0
    for _ in range(100):
        record.note(Proposal([5], [0.5]), start=0)
        record.learn([6], DraftChances())
    assert record.factor() < 0.4
    for _ in range(100):
        record.note(Proposal([5], [0.5]), start=0)
        record.learn([5], DraftChances())
    assert 1.5 < record.factor() < 2.0


@pytest.mark.parametrize("costs", [[1.0] * 30, [0.001] * 30, [8.0] + [1.0] * 29, [0.001] + [1.0] * 29])
def test_it_rests_longer_each_time_while_asking_it_is_worth_too_little(costs: list[float]) -> None:
    record = DraftRecord(ProposalBenefit())
    rests = [record.note_benefit(0.0, cost, longest_rest=16) for cost in costs]
    assert rests[:7] == [0] * 6 + [1], "it is given some time, whatever asking costs, and has cost the first time"
    assert rests[7:10] == [3, 7, 15]
    assert set(rests[10:]) == {16}
    assert record.note_benefit(32.0, 1.0, longest_rest=16) == 0, "one draft that is worth much"


def test_it_rests_at_once_where_asking_is_worth_nothing_to_others() -> None:
    record = DraftRecord(KNOWN_IN_VAIN)
    assert record.note_benefit(0.0, 1.0, longest_rest=16) == 1


def test_each_request_learns_for_itself_from_what_is_known_of_all() -> None:
    of_all = ProposalBenefit()
    record = DraftRecord(of_all)
    for _ in range(20):
        record.note_benefit(0.0, 1.0, longest_rest=16)
    assert of_all == ProposalBenefit()


def test_cheap_times_in_vain_do_not_outweigh_one_that_was_dear_and_worth_it() -> None:
    """A model that stops by itself drafts little where that is in vain, and much where it is not."""
    record = DraftRecord(ProposalBenefit())
    in_vain, worth_it = (0.0, 0.2), (2.5, 1.0)
    for number in range(60):
        assert record.note_benefit(*(worth_it if number % 5 == 4 else in_vain), longest_rest=16) == 0
    for _ in range(30):
        record.note_benefit(*in_vain, longest_rest=16)
    assert record.note_benefit(*in_vain, longest_rest=16) == 16


@pytest.mark.parametrize(
    ("worth", "wanted"),
    [
        ([4], [5]),  # all of them, so perhaps one more
        ([2], [4]),  # one more than in the mean
        ([0] * 9, [4, 3, 3, 2, 2, 2, 2, 2, 2]),  # the first is the dear one
        ([4, 5, 0, 5], [5, 6, 5, 6]),
    ],
)
def test_as_many_are_wanted_as_were_worth_it_and_one_more(worth: list[int], wanted: list[int]) -> None:
    record, told = DraftRecord(ProposalBenefit()), []
    assert record.num_wanted == 4
    for num_drafts in worth:
        record.note_useful_drafts(num_drafts)
        told.append(record.num_wanted)
    assert told == wanted


def test_a_model_that_stops_by_itself_may_draft_as_many_as_there_may_be() -> None:
    record = DraftRecord(ProposalBenefit())
    record.stops_by_itself(7)
    record.note_useful_drafts(1)
    assert record.num_wanted == 7


def test_it_is_asked_again_at_once_after_a_time_that_was_worth_it_and_then_rests_for_half_as_long() -> None:
    record = DraftRecord(KNOWN_IN_VAIN)
    for _ in range(4):
        assert record.note_benefit(0.0, 1.0, longest_rest=100) > 0
    assert record.note_benefit(1.5, 1.0, longest_rest=100) == 0, "it was 15"
    assert record.note_benefit(0.0, 1.0, longest_rest=100) == 15, "twice the half, and one"


def test_its_next_rest_is_longer_than_the_one_that_it_begins_with() -> None:
    assert DraftRecord(KNOWN_IN_VAIN, first_rest=5).note_benefit(0.0, 1.0, longest_rest=16) == 11


def test_it_rests_whatever_asking_yields_where_that_fails() -> None:
    record = DraftRecord(ProposalBenefit())
    assert [record.rest_longer(longest_rest=5) for _ in range(4)] == [1, 3, 5, 5]
    assert record.note_benefit(4.0, 1.0, longest_rest=5) == 0, "that says nothing of what it is worth"
    assert record.note_benefit(0.0, 1.0, longest_rest=5) == 0


def test_its_model_is_behind_at_first_and_after_a_rest() -> None:
    record = DraftRecord(KNOWN_IN_VAIN)
    assert record.is_behind
    record.is_behind = False
    record.note_benefit(4.0, 1.0, longest_rest=16)
    assert not record.is_behind
    record.note_benefit(0.0, 1.0, longest_rest=16)
    assert record.is_behind
