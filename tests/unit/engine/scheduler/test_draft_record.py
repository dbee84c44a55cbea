"""What a request's drafts have been worth, by the tokens that came in their place."""

import pytest
from quire_engine.draft_chances import DraftChances
from quire_engine.scheduler.draft_record import DraftRecord
from quire_engine.scheduler.proposer import Proposal


def test_a_proposal_is_compared_up_to_its_first_wrong_token() -> None:
    record, chances = DraftRecord(gain=4.0), DraftChances()
    record.note(Proposal([5, 6, 7, 8], [0.5, 0.25, 0.75, 1.0]), start=2)
    record.learn([1, 2, 5, 6, 9, 8], chances)
    assert (sum(chances.accepted), sum(chances.compared)) == (2.0, 3.0)
    assert record.factor() == (2.0 + 2.0) / (1.5 + 2.0), "what a request begins with weighs as much as two drafts"


def test_what_is_not_known_yet_does_not_count() -> None:
    record, chances = DraftRecord(gain=4.0), DraftChances()
    record.note(Proposal([5, 6, 7], [0.5, 0.5, 0.5]), start=2)
    record.learn([1, 2, 5], chances)
    assert (sum(chances.accepted), sum(chances.compared)) == (1.0, 1.0)
    record.learn([1, 2, 5, 6, 7], chances)
    assert sum(chances.compared) == 1.0, "once"


def test_the_factor_goes_from_that_of_all_to_its_own() -> None:
    record = DraftRecord(gain=4.0)
    assert record.factor() == 1.0
    for _ in range(100):
        record.note(Proposal([5], [0.5]), start=0)
        record.learn([6], DraftChances())
    assert record.factor() < 0.4
    for _ in range(100):
        record.note(Proposal([5], [0.5]), start=0)
        record.learn([5], DraftChances())
    assert 1.5 < record.factor() < 2.0


def test_it_rests_longer_each_time_while_asking_it_is_worth_too_little() -> None:
    record = DraftRecord(gain=4.0)
    rests = [record.was_asked(0.0, longest_rest=16) for _ in range(30)]
    assert rests[:14] == [0] * 13 + [1], "it is given some time"
    assert rests[14:17] == [3, 7, 15]
    assert set(rests[17:]) == {16}
    assert record.was_asked(32.0, longest_rest=16) == 0, "one draft that is worth much"


def test_it_rests_at_once_where_asking_is_worth_nothing_to_others() -> None:
    record = DraftRecord(gain=0.0)
    assert record.was_asked(0.0, longest_rest=16) == 1


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
    record, told = DraftRecord(gain=4.0), []
    assert record.num_wanted == 4
    for num_drafts in worth:
        record.was_worth(num_drafts)
        told.append(record.num_wanted)
    assert told == wanted


def test_a_model_that_stops_by_itself_may_draft_as_many_as_there_may_be() -> None:
    record = DraftRecord(gain=4.0)
    record.stops_by_itself(7)
    record.was_worth(1)
    assert record.num_wanted == 7


def test_it_is_asked_again_at_once_after_a_time_that_was_worth_it_and_then_rests_for_half_as_long() -> None:
    record = DraftRecord(gain=0.0)
    for _ in range(4):
        assert record.was_asked(0.0, longest_rest=100) > 0
    assert record.was_asked(1.5, longest_rest=100) == 0, "it was 15"
    assert record.was_asked(0.0, longest_rest=100) == 15, "twice the half, and one"


def test_its_next_rest_is_longer_than_the_one_that_it_begins_with() -> None:
    assert DraftRecord(gain=0.0, first_rest=5).was_asked(0.0, longest_rest=16) == 11


def test_it_says_once_that_it_has_rested_and_at_first() -> None:
    record = DraftRecord(gain=0.0)
    assert [record.has_rested(), record.has_rested()] == [True, False]
    assert record.was_asked(4.0, longest_rest=16) == 0
    assert not record.has_rested()
    assert record.was_asked(0.0, longest_rest=16) == 1
    assert [record.has_rested(), record.has_rested()] == [True, False]
