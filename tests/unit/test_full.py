"""The cases that tests of several parameters have by default."""

from itertools import combinations, product

import pytest
from support import full


def test_each_two_values_are_together_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full, "FULL", False)
    rows = [row for row in product("abc", range(4), [False, True], ["x", "y"]) if row[:2] != ("a", 0)]
    some = full.pairs(rows)
    assert len(some) < len(rows) / 2
    assert set(some) < set(rows)
    for first, second in combinations(range(4), 2):
        assert {(row[first], row[second]) for row in some} == {(row[first], row[second]) for row in rows}
    monkeypatch.setattr(full, "FULL", True)
    assert full.pairs(rows) == rows
