"""AdapterBoard: how loads of adapters end, in memory that all ranks share. Each rank writes a row of its own.

::

    rank 0   │ cell 0 │ cell 1 │ …      int64 each
    rank 1   │ …

    a cell   │ number of the load │ outcome, 3 bits │    written once, when the rank's load has ended

The number says whether the content is about the cell's present load.
"""

from enum import IntEnum

import numpy as np
import numpy.typing as npt

_OUTCOME_BITS = 3
_CACHE_LINE = 8


class LoadOutcome(IntEnum):
    """The end of a rank's load. Of several ranks the highest value counts."""

    READY = 1
    FAILED = 2
    """The rank's log has the reason."""
    NO_MEMORY = 3
    MISSING = 4
    """Its files cannot be read."""
    CHANGED = 5
    """Its files have changed since it was registered."""


def row_length(num_cells: int) -> int:
    """Numbers in a row: whole cache lines."""
    return -(-num_cells // _CACHE_LINE) * _CACHE_LINE


class AdapterBoard:
    """One process's view of the rows: int64, [ranks, `row_length`], zeros at first."""

    def __init__(self, cells: npt.NDArray[np.int64]) -> None:
        self._cells = cells

    def put(self, rank: int, cell: int, number: int, outcome: LoadOutcome) -> None:
        """Report the end of a rank's load into a cell."""
        self._cells[rank, cell] = number << _OUTCOME_BITS | outcome

    def outcome(self, cell: int, number: int) -> LoadOutcome | None:
        """How a load has ended; None until every rank has reported."""
        cells = self._cells[:, cell]
        if (cells >> _OUTCOME_BITS != number).any():
            return None
        return LoadOutcome(int((cells & ((1 << _OUTCOME_BITS) - 1)).max()))
