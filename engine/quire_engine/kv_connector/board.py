"""TransferBoard: the state of loads and saves, in memory that all ranks share: a row per rank, which alone writes it.

::

    rank 0   │ slot 0 │ slot 1 │ … │ saved blocks │ their bytes │ blocks not saved │ tiers … │      int64 each
    rank 1   │ …

    a slot   │ number of the load │ blocks that are there, 20 bits │      written once, when nothing of it is to come

A load has a slot from its begin to its end; the number says whether the slot's content is about it. A rank reads loads
in the order in which they began, so what it writes late about an abandoned load never overwrites the slot's next one.
"""

from enum import IntEnum

import numpy as np
import numpy.typing as npt

NUM_SLOTS = 64
"""Limit of loads at a time. More would only wait for each other: they share a disk."""
_COUNT_BITS = 20
MAX_LOADED_BLOCKS = (1 << _COUNT_BITS) - 1
_SAVED, _SAVED_BYTES, _NOT_SAVED = range(NUM_SLOTS, NUM_SLOTS + 3)
MAX_TIERS = 3
ROW = 80
"""Numbers in a row: whole cache lines."""


class TierOutcome(IntEnum):
    """The outcome of blocks in one of several stores."""

    SAVED = 0
    LOADED = 1
    SAVE_FAILED = 2
    LOAD_FAILED = 3


_TIERS = NUM_SLOTS + 3
assert len(TierOutcome) * MAX_TIERS + _TIERS <= ROW


class TransferBoard:
    """One process's view of the rows.

    Args:
        cells: int64, [ranks, ROW], zeros at first.
    """

    def __init__(self, cells: npt.NDArray[np.int64]) -> None:
        self._cells = cells

    def put(self, rank: int, slot: int, number: int, num_blocks: int) -> None:
        """Report that a rank's part of a load has ended.

        Args:
            rank: which.
            slot: of the load.
            number: of the load.
            num_blocks: how many of its first blocks the rank has.
        """
        self._cells[rank, slot] = number << _COUNT_BITS | num_blocks

    def loaded(self, slot: int, number: int) -> int | None:
        """How many of a load's first blocks all ranks have; None until every rank has reported."""
        cells = self._cells[:, slot]
        if (cells >> _COUNT_BITS != number).any():
            return None
        return int((cells & MAX_LOADED_BLOCKS).min())

    def count_saved(self, rank: int, num_bytes: int) -> None:
        """Count a block of which a rank has saved its part."""
        self._cells[rank, _SAVED] += 1
        self._cells[rank, _SAVED_BYTES] += num_bytes

    def count_not_saved(self, rank: int) -> None:
        """Count a block of which a rank could not save its part, or had no time for it."""
        self._cells[rank, _NOT_SAVED] += 1

    def count_tier(self, rank: int, tier: int, outcome: TierOutcome, number: int) -> None:
        """Count blocks by the outcome of a rank's part in one of several stores."""
        self._cells[rank, _TIERS + len(TierOutcome) * tier + outcome] += number

    def tiers(self, number: int) -> list[list[int]]:
        """For each of so many stores, the blocks of each outcome: on all ranks; failures on the worst rank."""
        cells = self._cells[:, _TIERS : _TIERS + len(TierOutcome) * number].reshape(-1, number, len(TierOutcome))
        low, high = cells.min(0), cells.max(0)
        failures = (TierOutcome.SAVE_FAILED, TierOutcome.LOAD_FAILED)
        return [
            [int((high if outcome in failures else low)[tier, outcome]) for outcome in TierOutcome]
            for tier in range(number)
        ]

    def saved(self) -> tuple[int, int, int]:
        """Blocks that all ranks have saved, the bytes of all parts, and blocks that some rank has not saved."""
        cells = self._cells
        return int(cells[:, _SAVED].min()), int(cells[:, _SAVED_BYTES].sum()), int(cells[:, _NOT_SAVED].max())
