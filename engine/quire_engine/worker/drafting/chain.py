"""ChainDrafter: drafts one token after the other, each from those before it.

::

    known tokens      5   8  31   4 │             31 and 4 came with the last step
    computed before   5   8         │
    first pass               31   4 │ ─► 17       catches up, however far it is behind
    second pass                     │ 17 ─► 90
    third pass                      │     90 ─► 4
"""

import logging
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from quire_kernels import NotRecordableError, load_rows
from quire_kernels.kv_cache import is_tiled

from quire_engine.device.transfer import upload
from quire_engine.messages import DraftTokens
from quire_engine.models.base import AttentionSpec, ForwardContext, KVCaches
from quire_engine.worker.batch.input_batch import InputBatch
from quire_engine.worker.drafting.chain_model import ChainModel
from quire_engine.worker.drafting.draft_sampling import DraftSampling
from quire_engine.worker.drafting.drafted_positions import DraftedPositions
from quire_engine.worker.drafting.known_positions import KnownPositions
from quire_engine.worker.drafting.recorded_chain import RecordedChain
from quire_engine.worker.forward.base import key_caches_by_kind, plan_attentions, table_width, upload_context
from quire_engine.worker.forward.recorded import RECORDED_TOKENS, RecordedContext, RecordedLayers
from quire_engine.worker.submitted_step import count_accepted

__all__ = ["ChainDrafter"]

logger = logging.getLogger(__name__)

Int64Array = npt.NDArray[np.int64]


class ChainDrafter:
    """A `DraftMethod`.

    Args:
        model: drafts.
        bytes_per_block: of its keys and values, and of what else it keeps.
        batch: the requests.
        device: of the model.
        max_tokens: that it computes at once.
        max_drafts: of a request.
    """

    needs_hidden = False

    def __init__(
        self,
        model: ChainModel,
        bytes_per_block: int,
        batch: InputBatch,
        device: torch.device,
        max_tokens: int,
        max_drafts: int,
    ) -> None:
        self.bytes_per_block = bytes_per_block
        self._model = model
        self._batch = batch
        self._device = device
        self._max_tokens = max_tokens
        self._max_drafts = max_drafts
        self._last: dict[int, tuple[int, DraftTokens]] = {}
        """By slot, the slot's generation and what was drafted last."""
        self.initialize_cache(0)

    def initialize_cache(self, num_blocks: int) -> None:
        """Allocate keys and values."""
        self._kv_caches: KVCaches = []
        self._key_caches: dict[AttentionSpec, torch.Tensor] = {}
        self._layers: RecordedLayers | None = None
        self._chain: RecordedChain | None = None
        self._drafted = DraftedPositions(self._batch, num_blocks)
        self._last.clear()
        model, caches = self._model, self._model.allocate_caches(num_blocks)
        self._kv_caches, self._key_caches = caches, key_caches_by_kind(model.attention_specs, caches)
        if num_blocks and is_tiled(caches[0][0]):
            try:
                self._layers = RecordedLayers(
                    lambda inputs, context: model.layers(inputs, context, caches), model.input_widths, model.dtype,
                    RecordedContext(model.attention_specs, caches, self._batch.block_table.shape[1]),
                )  # fmt: skip
                self._chain = RecordedChain(model, caches, self._batch, self._max_drafts)
            except NotRecordableError as error:  # not logged itself: it refers to the caches
                logger.warning("drafts are computed op by op, which takes longer: %s", str(error))

    @property
    def recorded_bytes(self) -> int:
        """See `DraftMethod`."""
        return sum(recorded.num_bytes for recorded in (self._layers, self._chain) if recorded is not None)

    def forget_blocks(self, block_ids: list[int]) -> None:
        """See `DraftMethod`."""
        self._drafted.forget(block_ids)

    def draft(self, slots: Int64Array, hidden_SE: torch.Tensor | None, sampling: DraftSampling) -> list[DraftTokens]:
        """See `DraftMethod`."""
        model = self._model
        ends = self._batch.num_known_tokens[slots] - model.token_offset
        is_recorded = self._chain is not None and len(slots) <= RECORDED_TOKENS and sampling.by_chance is None
        known = self._catch_up(slots, ends, RECORDED_TOKENS if is_recorded else self._max_tokens)
        if self._chain is not None and is_recorded:
            drafts = sampling.drafts_of(*self._chain.draft(known, sampling))
        else:
            out_SE = self._pass(known)
            token_ids = sampling.draw(model.logits(out_SE))
            for context in self._contexts(slots, ends, sampling):
                if not sampling.goes_on():
                    break
                num_rows = len(context.positions)
                out_SE = self._run(model.drafted_inputs(token_ids[:num_rows], out_SE[:num_rows]), context)
                token_ids = sampling.draw(model.logits(out_SE))
            drafts = sampling.drafts()
        generations = self._batch.generation[slots].tolist()
        self._last.update(zip(slots.tolist(), zip(generations, drafts, strict=True), strict=True))
        return drafts

    def _contexts(self, slots: Int64Array, ends: Int64Array, sampling: DraftSampling) -> Iterator[ForwardContext]:
        """The contexts of the drafts after the first, place by place: one position of each request that has one.

        Args:
            slots: [S]
            ends: [S], the first position after the known ones.
            sampling: says which requests have how many drafts.
        """
        num_places = sampling.num_places - 1
        if num_places < 1:
            return
        block_size, table = self._batch.block_size, self._batch.block_table
        positions_PS = ends + np.arange(num_places)[:, None]
        # Of requests with fewer drafts, the positions of further places may be outside the table; nobody reads them.
        blocks_PS = np.minimum(positions_PS // block_size, table.shape[1] - 1)
        slot_mapping_PS = table[slots, blocks_PS] * block_size + positions_PS % block_size
        width = table_width(int(positions_PS.max()) + 1, block_size, self._device)
        starts = np.arange(len(slots) + 1)
        *columns, table_SM, starts_there = upload(
            self._device, positions_PS, slot_mapping_PS, positions_PS + 1, table[slots, :width], starts
        )
        for place in range(num_places):
            rows = slice(sampling.num_rows(place + 1))
            positions, slot_mapping, lens = (column[place, rows] for column in columns)
            known = torch.from_numpy(starts[: rows.stop + 1]), torch.from_numpy(positions_PS[place, rows] + 1)
            yield ForwardContext(
                positions=positions,
                slot_mapping=slot_mapping,
                block_table=table_SM[rows],
                query_start_loc=starts_there[: rows.stop + 1],
                seq_lens=lens,
                plans=plan_attentions(self._key_caches, table_SM[rows], *known),
            )

    def _catch_up(self, slots: Int64Array, ends: Int64Array, most: int) -> KnownPositions:
        """Compute the positions before `ends`, [S], until at most `most` of them are left; or if there are more
        requests, the last one of each.

        Returns:
            Those that are left, which are counted as computed.
        """
        if self._model.token_offset == 0:
            self._keep_accepted(slots)
        starts = np.minimum(self._drafted.counts(slots), ends - 1)
        first_starts, num_left = starts.copy(), int((ends - starts).sum())
        while num_left > max(self._max_tokens, len(slots)):  # one long part after the other
            row = int((ends - starts).argmax())
            part = slice(row, row + 1)
            until = np.minimum(starts[part] + self._max_tokens, ends[part] - 1)
            self._pass(self._known(slots[part], starts[part], until))
            num_left -= int((until - starts[part])[0])
            starts[part] = until
        if num_left > most:
            is_behind = ends - starts > 1
            self._pass(self._known(slots[is_behind], starts[is_behind], ends[is_behind] - 1))
            starts = ends - 1
        self._drafted.extend(slots, first_starts, ends)
        return self._known(slots, starts, ends)

    def _known(self, slots: Int64Array, starts: Int64Array, ends: Int64Array) -> KnownPositions:
        return KnownPositions.of(self._batch, slots, starts, ends, self._model.token_offset)

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

    def _pass(self, known: KnownPositions) -> torch.Tensor:
        """Compute known positions → [S, E] of the last one of each request."""
        context, (token_ids_T, last_rows_S) = upload_context(
            [self._key_caches], [self._batch.block_table], known.slots, known.positions, [known.slot_mapping],
            known.query_start_loc, known.ends, known.token_ids, known.query_start_loc[1:] - 1,
        )  # fmt: skip
        out_TE = self._run(self._model.known_inputs(token_ids_T, context.slot_mapping), context)
        return load_rows(out_TE, last_rows_S)

    def _run(self, inputs: Sequence[torch.Tensor], context: ForwardContext) -> torch.Tensor:
        if self._layers is None or len(context.positions) > RECORDED_TOKENS:
            return self._model.layers(inputs, context, self._kv_caches)
        self._layers.context.set(
            context.positions.numpy(), [context.slot_mapping.numpy()], [context.block_table.numpy()],
            context.query_start_loc.numpy(), context.seq_lens.numpy(),
        )  # fmt: skip
        return self._layers(inputs)
