"""Placements of experts: even ones, the way to them, and what is refused."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_engine.models.layers.expert_placement import (
    balanced,
    check_redundancy,
    first_placement,
    next_moves,
    rank_shares,
)


def busiest(load: list[float], placement: list[int], num_ranks: int) -> float:
    """The busiest rank's load per the mean."""
    by_rank = np.array(load) @ rank_shares(placement, len(load), num_ranks)
    return float(by_rank.max() / by_rank.mean())


def test_the_example_of_deepseeks_readme() -> None:
    """12 experts, 4 redundant ones: there on 8 GPUs, where the hottest replica has 132."""
    load = [90.0, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86]
    placement = balanced(load, first_placement(12, 4), 8)
    replicas = Counter(placement)
    assert {expert: number for expert, number in replicas.items() if number > 1} == {1: 2, 4: 2, 5: 2, 10: 2}
    assert busiest(load, placement, 8) < 1.25
    assert busiest(load, first_placement(12, 4), 8) > 1.5


def test_a_hot_expert_is_on_all_ranks() -> None:
    load = [60.0, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    placement = balanced(load, first_placement(10, 2), 3)
    assert [placement[start : start + 4].count(0) for start in (0, 4, 8)] == [1, 1, 1]
    assert busiest(load, placement, 3) < 1.05
    assert busiest(load, first_placement(10, 2), 3) > 1.3


def test_what_is_balanced_stays() -> None:
    load = [5.0, 3, 3, 5, 9, 9]
    placement = balanced(load, first_placement(6, 0), 3)
    assert sum(a != b for a, b in zip(placement, first_placement(6, 0), strict=True)) <= 4
    assert balanced(load, placement, 3) == placement


@given(st.data())
def test_every_step_of_the_way_has_every_expert(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(2, 4))
    experts = data.draw(st.integers(ranks, 12))
    allowed = [number for number in range(experts * (ranks - 1) + 1) if (experts + number) % ranks == 0]
    redundant = data.draw(st.sampled_from(allowed))
    limit = data.draw(st.integers(2, 5))
    loads = st.lists(st.integers(0, 99).map(float), min_size=experts, max_size=experts)
    placement = first_placement(experts, redundant)
    for load in (data.draw(loads), data.draw(loads)):
        target = balanced(load, placement, ranks)
        assert set(target) == set(range(experts))
        assert len(target) == experts + redundant
        for _ in range(len(target) + 1):
            now, moves = next_moves(placement, target, ranks, limit)
            if not moves:
                break
            assert len(moves) <= limit
            moved = list(placement)
            for physical, source in moves:
                moved[physical] = placement[source]
            assert moved == now
            assert set(now) == set(range(experts)), "each can be computed at any time"
            placement = now
        assert placement == target


@pytest.mark.parametrize(("experts", "redundant", "ranks", "such_as"), [
    (9, 0, 2, "1 or 3 or 5"), (8, 3, 4, "0 or 4 or 8"), (4, 8, 2, "0 or 2 or 4"),
])  # fmt: skip
def test_placements_that_are_uneven_are_refused(experts: int, redundant: int, ranks: int, such_as: str) -> None:
    with pytest.raises(ValueError, match=f"num_redundant_experts is {redundant}; .*{such_as}"):
        check_redundancy(experts, redundant, ranks)
    check_redundancy(experts, int(such_as[0]), ranks)
