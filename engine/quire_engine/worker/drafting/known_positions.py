"""KnownPositions: positions of known tokens that a drafting model is to compute, flattened, on the host."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire_engine.worker.batch.input_batch import InputBatch

__all__ = ["KnownPositions"]

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownPositions:
    """T consecutive positions of S requests, at least one of each."""

    slots: Int64Array
    """[S]"""
    ends: Int64Array
    """[S], the position after the last one of each request."""
    query_start_loc: Int64Array
    """[S + 1], cumulative number of positions."""
    positions: Int64Array
    """[T]"""
    token_ids: Int64Array
    """[T], the input at each position."""
    slot_mapping: Int64Array
    """[T], the cache slot of each position."""

    @classmethod
    def of(
        cls, batch: InputBatch, slots: Int64Array, starts: Int64Array, ends: Int64Array, token_offset: int
    ) -> "KnownPositions":
        """Lay out the positions from `starts` up to `ends`, [S] each.

        Args:
            batch: with the requests' tokens and blocks.
            slots: [S]
            starts: below `ends`.
            ends: see above.
            token_offset: the input at position p is token p + `token_offset`.
        """
        size, owners = batch.block_size, slots
        if len(slots) == 1:
            positions = np.arange(starts[0], ends[0])
            query_start_loc = np.array([0, len(positions)])
        else:
            query_start_loc = np.zeros(len(slots) + 1, dtype=np.int64)
            lens = ends - starts
            lens.cumsum(out=query_start_loc[1:])
            positions = np.arange(query_start_loc[-1]) + np.repeat(starts - query_start_loc[:-1], lens)
            owners = np.repeat(slots, lens)
        return cls(
            slots=slots,
            ends=ends,
            query_start_loc=query_start_loc,
            positions=positions,
            token_ids=batch.token_ids[owners, positions + token_offset],
            slot_mapping=batch.block_table[owners, positions // size] * size + positions % size,
        )
