"""Fewer cases by default, all of them with QUIRE_TESTS_FULL=1."""

import os
from collections.abc import Iterable
from itertools import combinations
from typing import Any

__all__ = ["FULL", "pairs"]

FULL = os.environ.get("QUIRE_TESTS_FULL", "0") == "1"


def pairs(rows: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Some of the rows, with each two values that are together in a row; or all of them.

    It chooses greedily: each time the row with the most pairs that are in none yet. Most faults need one value, or two
    together (Kuhn, Wallace and Gallo: Software Fault Interactions and Implications for Software Testing, 2004).
    """
    all_rows = list(rows)
    if FULL:
        return all_rows
    pairs_of = [set(combinations(enumerate(map(repr, row)), 2)) for row in all_rows]
    left = set().union(*pairs_of)
    chosen = set()
    while left:
        best = max(range(len(all_rows)), key=lambda place: len(pairs_of[place] & left))
        chosen.add(best)
        left -= pairs_of[best]
    return [all_rows[place] for place in sorted(chosen)]
