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
        self._counted = [(-1, 0)] * batch.max_num_seqs
        """By slot, the generation of the request that was last counted there, and the count. It still holds if the
        block that it ends in has as much, so all blocks need not be looked at in each step."""

    def forget(self, block_ids: list[int]) -> None:
        """These blocks now belong to other tokens."""
        if self._filled[block_ids].any():
            self._counted = [(-1, 0)] * len(self._counted)
            self._filled[block_ids] = 0

    def counts(self, slots: Int64Array) -> Int64Array:
        """[S] → [S], how many of each request's first positions are computed, without a gap."""
        return np.array([self._count(slot) for slot in slots.tolist()])

    def _count(self, slot: int) -> int:
        batch, (generation, count) = self._batch, self._counted[slot]
        block, place = divmod(count, batch.block_size)
        is_same = place > 0 and generation == batch.generation[slot]
        if not (is_same and self._filled[batch.block_table[slot, block]] == place):
            filled = self._filled[batch.block_table[slot, : batch.num_blocks[slot]]]
            is_partial = filled < batch.block_size
            block = int(is_partial.argmax()) if is_partial.any() else len(filled)
            count = block * batch.block_size + (int(filled[block]) if block < len(filled) else 0)
            self._counted[slot] = int(batch.generation[slot]), count
        return count

    def extend(self, slots: Int64Array, starts: Int64Array, ends: Int64Array) -> None:
        """Positions from `starts` up to `ends` are computed now, [S] each; and those before them were."""
        size, table, filled = self._batch.block_size, self._batch.block_table, self._filled
        for slot, start, end in zip(slots.tolist(), starts.tolist(), ends.tolist(), strict=True):
            first, (last, place) = start // size, divmod(end, size)
            if first < last:
                filled[table[slot, first:last]] = size
            if place:
                block = table[slot, last]
                filled[block] = max(filled[block], place)
            self._counted[slot] = int(self._batch.generation[slot]), end
