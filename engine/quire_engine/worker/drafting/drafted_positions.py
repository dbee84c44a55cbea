"""DraftedPositions: how far a drafting model has computed keys and values of its own, for each KV block."""

import numpy as np
import numpy.typing as npt

from quire_engine.worker.batch.input_batch import InputBatch

__all__ = ["DraftedPositions"]

Int64Array = npt.NDArray[np.int64]


class DraftedPositions:
    """A drafting model stores its keys and values in the same blocks as its target, in a cache of its own. It computes
    them when it drafts, so it may be behind; a block that is found in the prefix cache has what was computed when it
    belonged to another request with the same tokens. (With an EAGLE head, the last position of a found block has the
    other request's next token for its input. That costs acceptance, where the two differ.)

    ::

        block table     12   3  40   7
        filled          16  16   5   0        of 16 tokens each: positions 0 … 36 are computed

    Args:
        batch: with the block tables.
        num_blocks: of the cache.
    """

    def __init__(self, batch: InputBatch, num_blocks: int) -> None:
        self._batch = batch
        self._filled = np.zeros(num_blocks, dtype=np.int64)
        """By block id, how many of its first positions are computed."""
        self._counts = np.zeros(batch.max_num_seqs, dtype=np.int64)
        """By slot, what was last counted. It still holds if the block that it ends in has as much, so all blocks need
        not be looked at in each step."""
        self._generations = np.full(batch.max_num_seqs, -1, dtype=np.int64)
        """By slot, of which request that was; -1: of none any more."""

    def forget(self, block_ids: list[int]) -> None:
        """These blocks now belong to other tokens."""
        if self._filled[block_ids].any():
            self._generations.fill(-1)
        self._filled[block_ids] = 0

    def counts(self, slots: Int64Array) -> Int64Array:
        """[S] → [S], how many of each request's first positions are computed, without a gap."""
        batch, counts = self._batch, self._counts[slots]
        blocks, places = counts // batch.block_size, counts % batch.block_size
        is_stale = self._generations[slots] != batch.generation[slots]
        ends_in = batch.block_table[slots, np.minimum(blocks, batch.block_table.shape[1] - 1)]
        is_stale |= (places == 0) | (self._filled[ends_in] != places)
        if is_stale.any():
            stale = slots[is_stale]
            self._counts[stale] = counts[is_stale] = self._count_in_blocks(stale)
            self._generations[stale] = batch.generation[stale]
        return counts

    def _count_in_blocks(self, slots: Int64Array) -> Int64Array:
        batch = self._batch
        num_blocks = batch.num_blocks[slots]
        filled = self._filled[batch.block_table[slots, : int(num_blocks.max())]]
        filled[np.arange(filled.shape[1]) >= num_blocks[:, None]] = 0
        is_partial = filled < batch.block_size
        first = np.where(is_partial.any(1), is_partial.argmax(1), num_blocks)
        partly = filled[np.arange(len(slots)), np.minimum(first, filled.shape[1] - 1)] % batch.block_size
        counts: Int64Array = first * batch.block_size + partly
        return counts

    def extend(self, slots: Int64Array, starts: Int64Array, ends: Int64Array) -> None:
        """Positions from `starts` up to `ends` are computed now, [S] each; and those before them were."""
        size, table = self._batch.block_size, self._batch.block_table
        self._counts[slots] = ends
        self._generations[slots] = self._batch.generation[slots]
        for slot, start, end in zip(slots.tolist(), starts.tolist(), ends.tolist(), strict=True):
            first, last = start // size, end // size
            self._filled[table[slot, first:last]] = size
            if end % size:
                self._filled[table[slot, last]] = max(self._filled[table[slot, last]], end % size)
