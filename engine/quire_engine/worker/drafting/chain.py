"""ChainDrafter: drafts one token after the other, each from those before it.

::

    known tokens      5   8  31   4 │             31 and 4 came with the last step
    computed before   5   8         │
    first pass               31   4 │ ─► 17       catches up, however far it is behind
    second pass                     │ 17 ─► 90
    third pass                      │     90 ─► 4
"""

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from quire_kernels import NotRecordableError, load_rows

from quire_engine.messages import DraftTokens
from quire_engine.models.step_context import ContextBuilder, KVCaches, StepContext, StepRows
from quire_engine.worker.batch.input_batch import InputBatch
from quire_engine.worker.drafting.chain_models import CachingModel, ChainModel
from quire_engine.worker.drafting.draft_sampling import DraftSampling
from quire_engine.worker.drafting.recorded_chain import RecordedChain
from quire_engine.worker.forward.recorded import RECORDED_TOKENS, RecordedContext, RecordedLayers
from quire_engine.worker.submitted_step import count_accepted

logger = logging.getLogger(__name__)

Int64Array = npt.NDArray[np.int64]


class CachingDrafter:
    """The part of a `DraftMethod` that keeps keys and values, and computes those of known tokens.

    Args:
        model: drafts.
        bytes_per_block: of its keys and values, and of what else it keeps.
        batch: the requests.
        max_tokens: that it computes at once.
    """

    needs_hidden = False
    _model: CachingModel
    _layers: RecordedLayers | None = None

    def __init__(self, model: CachingModel, bytes_per_block: int, batch: InputBatch, max_tokens: int) -> None:
        self.bytes_per_block, self._model, self._batch, self._max_tokens = bytes_per_block, model, batch, max_tokens
        self.initialize_cache(0)

    def initialize_cache(self, num_blocks: int) -> None:
        """Allocate keys and values."""
        self._kv_caches: KVCaches = []
        self._contexts: ContextBuilder | None = None
        model, batch = self._model, self._batch
        self._drafted = DraftedPositions(batch, num_blocks)
        self._kv_caches = caches = model.allocate_caches(num_blocks)
        self._contexts = ContextBuilder(
            model.state_specs, caches, batch.block_tables[:1], batch.block_size, columns=batch.columns
        )

    @property
    def recorded_bytes(self) -> int:
        return 0 if self._layers is None else self._layers.num_bytes

    def forget_blocks(self, block_ids: list[int]) -> None:
        self._drafted.forget(block_ids)

    def _catch_up(self, slots: Int64Array, ends: Int64Array, most: int) -> StepRows:
        """Compute the positions before `ends`, [S], until at most `most` of them are left; or if there are more
        requests, the last one of each.

        Returns:
            Those that are left, which are counted as computed.
        """
        starts = np.minimum(self._drafted.counts(slots), ends - 1)
        first_starts, num_left = starts.copy(), int((ends - starts).sum())
        while num_left > max(self._max_tokens, len(slots)):  # one long part after the other
            row = int((ends - starts).argmax())
            part = slice(row, row + 1)
            until = np.minimum(starts[part] + self._max_tokens, ends[part] - 1)
            self._pass(self._rows(slots[part], starts[part], until))
            num_left -= int((until - starts[part])[0])
            starts[part] = until
        if num_left > most:
            is_behind = ends - starts > 1
            self._pass(self._rows(slots[is_behind], starts[is_behind], ends[is_behind] - 1))
            starts = ends - 1
        self._drafted.extend(slots, first_starts, ends)
        return self._rows(slots, starts, ends)

    def _rows(self, slots: Int64Array, starts: Int64Array, ends: Int64Array) -> StepRows:
        """The rows from `starts` up to `ends`; at positions of drafts, without their tokens."""
        fields = self._batch.lay_out(slots, starts, ends, self._model.token_offset)
        return StepRows(**{**fields, "slot_mappings": fields["slot_mappings"][:1]})

    def _upload(self, rows: StepRows, *others: Int64Array) -> tuple[StepContext, list[torch.Tensor]]:
        assert self._contexts is not None
        return self._contexts.upload(rows, *others)

    def _pass(self, known: StepRows) -> torch.Tensor:
        """Compute known positions → [S, E] of the last one of each request."""
        context, (token_ids_T, last_rows_S) = self._upload(known, known.token_ids, known.query_start_loc[1:] - 1)
        out_TE = self._run(self._model.known_inputs(token_ids_T, context.slot_mapping), known, context)
        return load_rows(out_TE, last_rows_S)

    def _run(self, inputs: Sequence[torch.Tensor], rows: StepRows, context: StepContext) -> torch.Tensor:
        if self._layers is None or len(rows.positions) > RECORDED_TOKENS:
            return self._model.layers(inputs, context, self._kv_caches)
        self._layers.context.set(rows)
        return self._layers(inputs)


class ChainDrafter(CachingDrafter):
    """A `DraftMethod`.

    Args:
        model: see `CachingDrafter`, like the next three.
        bytes_per_block: likewise.
        batch: likewise.
        max_tokens: likewise.
        max_drafts: of a request.
    """

    _model: ChainModel

    def __init__(
        self,
        model: ChainModel,
        bytes_per_block: int,
        batch: InputBatch,
        max_tokens: int,
        max_drafts: int,
    ) -> None:
        self._max_drafts = max_drafts
        self._last: dict[int, tuple[int, DraftTokens]] = {}
        """By slot, the slot's generation and what was drafted last."""
        super().__init__(model, bytes_per_block, batch, max_tokens)

    def initialize_cache(self, num_blocks: int) -> None:
        self._layers = None
        self._chain: RecordedChain | None = None
        self._last.clear()
        super().initialize_cache(num_blocks)
        model, caches, contexts = self._model, self._kv_caches, self._contexts
        assert contexts is not None
        if num_blocks and contexts.are_tiled:
            try:
                self._layers = RecordedLayers(
                    lambda inputs, context: model.layers(inputs, context, caches), model.input_widths, model.dtype,
                    RecordedContext(contexts),
                )  # fmt: skip
                self._chain = RecordedChain(model, caches, self._batch, contexts, self._max_drafts)
            except NotRecordableError as error:  # not logged itself: it refers to the caches
                logger.warning("drafts are computed op by op, which takes longer: %s", str(error))

    @property
    def recorded_bytes(self) -> int:
        return super().recorded_bytes + (0 if self._chain is None else self._chain.num_bytes)

    def draft(self, slots: Int64Array, hidden_SE: torch.Tensor | None, sampling: DraftSampling) -> list[DraftTokens]:
        model = self._model
        ends = self._batch.num_known_tokens[slots] - model.token_offset
        is_recorded = self._chain is not None and len(slots) <= RECORDED_TOKENS and sampling.by_chance is None
        if model.token_offset == 0:
            self._keep_accepted(slots)
        known = self._catch_up(slots, ends, RECORDED_TOKENS if is_recorded else self._max_tokens)
        if self._chain is not None and is_recorded:
            drafts = sampling.drafts_of(*self._chain.draft(known, sampling))
        else:
            out_SE = self._pass(known)
            token_ids = sampling.draw(model.logits(out_SE))
            while sampling.goes_on():  # one position of each request that has one more draft
                own, ends = slice(sampling.num_rows(sampling.num_drawn)), ends + 1
                rows = self._rows(slots[own], ends[own] - 1, ends[own])
                out_SE = self._run(model.drafted_inputs(token_ids[own], out_SE[own]), rows, self._upload(rows)[0])
                token_ids = sampling.draw(model.logits(out_SE))
            drafts = sampling.drafts()
        generations = self._batch.generation[slots].tolist()
        self._last.update(zip(slots.tolist(), zip(generations, drafts, strict=True), strict=True))
        return drafts

    def _keep_accepted(self, slots: Int64Array) -> None:
        """Drafts that were accepted need not be computed again, but for the last one, which was not an input yet."""
        batch = self._batch
        for slot in slots.tolist():
            generation, drafts = self._last.pop(slot, (-1, None))
            if drafts is None or generation != batch.generation[slot]:
                continue
            start, computed = drafts.start, drafts.token_ids[:-1]
            end = min(start + len(computed), int(batch.num_known_tokens[slot]))
            num_accepted = count_accepted(computed[: end - start], batch.token_ids[slot, start:end].tolist())
            row = np.array([slot])
            self._drafted.extend(row, np.array([start]), np.array([start + num_accepted]))


class DraftedPositions:
    """A drafting model has a cache of its own, with the same blocks as the target's first group of layers, which keeps
    all tokens. It computes keys and values when it drafts, so it may be behind. A block that is found in the prefix
    cache has what was computed when it belonged to another request with the same tokens. (With a head, the last
    position of a found block has the other request's next token for its input. That costs acceptance, where the two
    differ.)

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
