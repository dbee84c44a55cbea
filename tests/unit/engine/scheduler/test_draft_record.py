"""What a request's drafts have been worth, by the tokens that came in their place."""

import pytest
from quire_engine.draft_chances import DraftChances
from quire_engine.messages import DraftTokens
from quire_engine.scheduler.drafter import DraftRecord


def test_a_proposal_is_compared_up_to_its_first_wrong_token() -> None:
    record, chances = DraftRecord(8), DraftChances()
    record.proposal = DraftTokens(2, [5, 6, 7, 8], [0.5, 0.25, 0.75, 1.0])
    record.learn([1, 2, 5, 6, 9, 8], chances)
    assert (sum(chances.accepted), sum(chances.compared)) == (2.0, 3.0)
    assert record.acceptance == (2.0 + 2.0) / (1.5 + 2.0), "what a request begins with weighs as much as two drafts"


def test_what_is_not_known_yet_does_not_count() -> None:
    record, chances = DraftRecord(8), DraftChances()
    record.proposal = DraftTokens(2, [5, 6, 7], [0.5, 0.5, 0.5])
    record.learn([1, 2, 5], chances)
    assert (sum(chances.accepted), sum(chances.compared)) == (1.0, 1.0)
    record.learn([1, 2, 5, 6, 7], chances)
    assert sum(chances.compared) == 1.0, "once"


def test_the_acceptance_goes_from_that_of_all_to_its_own() -> None:
    record = DraftRecord(8)
    assert record.acceptance == 1.0
    for _ in range(100):
        record.proposal = DraftTokens(0, [5], [0.5])
        record.learn([6], DraftChances())
    assert record.acceptance < 0.4
    for _ in range(100):
        record.proposal = DraftTokens(0, [5], [0.5])
        record.learn([5], DraftChances())
    assert 1.5 < record.acceptance < 2.0


@pytest.mark.parametrize(
    ("worth", "wanted"),
    [
        ([4], [5]),  # all of them, so perhaps one more
        ([2], [3]),
        ([0] * 4, [3, 2, 2, 2]),  # the first is the dear one
        ([4, 5, 0, 5], [5, 6, 5, 6]),
    ],
)
def test_as_many_are_wanted_as_were_worth_it_and_one_more(worth: list[int], wanted: list[int]) -> None:
    record, told = DraftRecord(8), []
    assert record.num_wanted == 4
    for num_drafts in worth:
        record.note_useful_drafts(num_drafts)
        told.append(record.num_wanted)
    assert told == wanted
