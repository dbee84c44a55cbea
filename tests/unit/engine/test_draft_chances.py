"""How likely drafts are accepted, by what became of those of about the same chance."""

import msgspec
import pytest
from quire_engine.draft_chances import DraftChances


def learned(chance: float, num_right: int, num_wrong: int) -> DraftChances:
    chances = DraftChances()
    for number in range(num_right + num_wrong):
        chances.learn(chance, is_accepted=number < num_right)
    return chances


@pytest.mark.parametrize("chance", [0.001, 0.3, 0.5, 0.97, 1.0])
def test_at_first_a_chance_is_what_it_says(chance: float) -> None:
    assert DraftChances().of(chance) == pytest.approx(chance)


@pytest.mark.parametrize(("num_right", "num_wrong"), [(0, 500), (500, 0)])
def test_in_the_end_it_is_what_came_of_such_drafts(num_right: int, num_wrong: int) -> None:
    chances = learned(0.5, num_right, num_wrong)
    assert chances.of(0.51) == pytest.approx(float(num_right > 0), abs=0.02)
    assert chances.of(0.7) == pytest.approx(0.7), "of others nothing is known"


def test_what_was_long_ago_counts_less() -> None:
    chances = learned(1.0, 1000, 0)
    for _ in range(1000):
        chances.learn(1.0, is_accepted=False)
    assert chances.of(1.0) < 0.2


def test_chances_are_between_0_and_1_and_go_to_the_workers() -> None:
    chances = learned(0.2, 3, 1)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(chances), type=DraftChances)
    for chance in (1e-3, 0.2, 1.0):
        assert 0 < sent.of(chance) == chances.of(chance) <= 1
