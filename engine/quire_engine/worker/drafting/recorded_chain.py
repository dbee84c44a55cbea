"""RecordedChain: the passes of `ChainDrafter` from recordings, so that no Python runs between two kernels of a pass.

::

    catch up   known tokens ─► embedding, features ─► layers      all that came since the last drafts
    first      the last of each request ─► head
    next       drafts ─► embedding ─► layers ─► head              run once for each further draft
                                                head: logits ─► draw ─► keep, and move on by one position
"""

import numpy as np
import numpy.typing as npt
import torch
from quire_kernels import DraftState, advance_drafts, load_rows, record, sample, token_probabilities

from quire_engine.models.step_context import ContextBuilder, KVCaches, StepRows
from quire_engine.worker.batch.input_batch import InputBatch
from quire_engine.worker.drafting.chain_models import ChainModel
from quire_engine.worker.drafting.draft_sampling import DraftSampling
from quire_engine.worker.forward.recorded import RECORDED_TOKENS, RecordedColumns, RecordedContext

Int64Array = npt.NDArray[np.int64]


class RecordedChain:
    """Drafts for at most `RECORDED_TOKENS` requests.

    Args:
        model: drafts.
        kv_caches: its own; their tensors must not move.
        batch: the requests.
        contexts: of the model's layers.
        max_places: the longest draft.

    Raises:
        NotRecordableError: it uses other ops than those of `quire_kernels`.
    """

    def __init__(
        self, model: ChainModel, kv_caches: KVCaches, batch: InputBatch, contexts: ContextBuilder, max_places: int
    ) -> None:
        rows = RECORDED_TOKENS
        self._batch = batch
        self._known, self._context = RecordedContext(contexts), RecordedContext(contexts)
        context = self._context.context
        self._columns = RecordedColumns()
        self._state = DraftState(
            next_token_ids=torch.zeros(rows, dtype=torch.int64),
            positions=context.positions,
            draw_positions=self._columns.positions,
            seq_lens=context.seq_lens,
            slot_mapping=context.slot_mapping,
            block_table=context.block_table,
            place=torch.zeros(1, dtype=torch.int64),
            drawn_token_ids=torch.zeros(max_places, rows, dtype=torch.int64),
            drawn_probabilities=torch.zeros(max_places, rows),
        )
        token_ids, last_rows = (torch.zeros(rows, dtype=torch.int64) for _ in range(2))
        self._token_ids: Int64Array = token_ids.numpy()
        self._last_rows: Int64Array = last_rows.numpy()
        self._drawn = self._state.drawn_token_ids.numpy(), self._state.drawn_probabilities.numpy()
        with record(rows) as self._catch_up:
            known = self._known.context
            known_out = model.layers(model.known_inputs(token_ids, known.slot_mapping), known, kv_caches)
        with record(rows) as self._first:
            out = load_rows(known_out, last_rows)
            self._head(model, out)
        with record(rows) as self._next:
            inputs = model.drafted_inputs(self._state.next_token_ids, out)
            self._head(model, model.layers(inputs, context, kv_caches))

    @property
    def num_bytes(self) -> int:
        """Memory of the results that the recorded ops write."""
        return sum(recording.num_bytes for recording in (self._catch_up, self._first, self._next))

    def draft(self, known: StepRows, sampling: DraftSampling) -> tuple[Int64Array, npt.NDArray[np.float32]]:
        """Draft.

        Args:
            known: positions that are to be computed before: at most `RECORDED_TOKENS`, with the last known one of each
                request among them.
            sampling: how many drafts each request gets, and with which parameters; all as the target's.

        Returns:
            [places that were drawn, S] each: the drafts, and how likely the model finds them; valid until the next
            call.
        """
        num_rows, num_places, context = len(known.slots), sampling.num_places, self._context
        width = -(-(int(known.seq_lens.max()) + num_places) // self._batch.block_size)
        table = self._batch.block_table[known.slots, :width]
        self._token_ids[: len(known.token_ids)] = known.token_ids
        self._known.set(known)
        self._last_rows[:num_rows] = known.query_start_loc[1:] - 1
        self._catch_up.run(len(known.positions))
        self._columns.set(sampling.arrays)
        self._state.place.zero_()
        context.positions[:num_rows] = known.seq_lens - 1
        context.block_tables[0][:num_rows, :width] = table
        # Unless threads share a sequence, one plan is enough for all places: with the lengths of the last one.
        context.seq_lens[:num_rows] = known.seq_lens + num_places
        context.plan_for(num_rows)
        self._first.run(num_rows)
        token_ids, probabilities = self._drawn
        sampling.note_drawn(probabilities[0, :num_rows].tolist())
        place = 1
        while sampling.goes_on():
            if context.has_shared_sequences:
                context.plan_for(num_rows)
            num_here = sampling.num_rows(place)
            if self._batch.columns:
                ends = known.seq_lens[:num_here] + place
                context.set_columns(StepRows(**self._batch.lay_out(known.slots[:num_here], ends - 1, ends)))
            self._next.run(num_here)
            sampling.note_drawn(probabilities[place, :num_here].tolist())
            place += 1
        return token_ids[:place, :num_rows], probabilities[:place, :num_rows]

    def _head(self, model: ChainModel, out: torch.Tensor) -> None:
        """Record how tokens are drawn."""
        logits = model.logits(out)
        token_ids = sample(logits, *self._columns.tensors)
        advance_drafts(self._state, token_ids, token_probabilities(logits, token_ids), self._batch.block_size)
