"""RecordedChain: the passes of `ChainDrafter` from recordings, so that no Python runs between two kernels of a pass.

::

    first    outputs at known tokens ─► head
    next     drafts ─► embedding ─► layers ─► head        run once for each further draft
                                              head: logits ─► draw ─► keep, and move on by one position
"""

import numpy as np
import numpy.typing as npt
import torch
from quire_kernels import AttentionPlan, DraftState, advance_drafts, record, sample, token_probabilities

from quire_engine.models.base import KVCaches
from quire_engine.worker.drafting.chain_model import ChainModel
from quire_engine.worker.drafting.draft_sampling import DraftSampling, SamplingColumns
from quire_engine.worker.forward.base import key_caches_by_kind, plan_attentions
from quire_engine.worker.forward.recorded import RECORDED_TOKENS, RecordedContext

__all__ = ["RecordedChain"]

Int64Array = npt.NDArray[np.int64]


class RecordedChain:
    """Drafts for at most `RECORDED_TOKENS` requests.

    Args:
        model: drafts.
        kv_caches: its own; their tensors must not move.
        max_blocks: of a request.
        max_places: the longest draft.

    Raises:
        NotRecordableError: it uses other ops than those of `quire_kernels`.
    """

    def __init__(self, model: ChainModel, kv_caches: KVCaches, max_blocks: int, max_places: int) -> None:
        rows = RECORDED_TOKENS
        self._key_caches = key_caches_by_kind(model.attention_specs, kv_caches)
        self._block_size = kv_caches[0][0].shape[2]
        self._context = RecordedContext(model.attention_specs, kv_caches)
        context = self._context.context
        self._columns = SamplingColumns.empty(rows)
        self._state = DraftState(
            next_token_ids=torch.zeros(rows, dtype=torch.int64),
            positions=context.positions,
            draw_positions=self._columns.positions,
            seq_lens=torch.ones(rows, dtype=torch.int64),
            slot_mapping=context.slot_mapping,
            block_table=torch.zeros(rows, max_blocks, dtype=torch.int64),
            place=torch.zeros(1, dtype=torch.int64),
            drawn_token_ids=torch.zeros(max_places, rows, dtype=torch.int64),
            drawn_probabilities=torch.zeros(max_places, rows),
        )
        self._starts = torch.arange(rows + 1)
        self._out = torch.zeros(rows, model.out_width, dtype=model.dtype)
        with record(rows) as self._first:
            self._head(model, self._out)
        with record(rows) as self._next:
            inputs = model.drafted_inputs(self._state.next_token_ids, self._out)
            self._head(model, model.layers(inputs, context, kv_caches))

    @property
    def num_bytes(self) -> int:
        """Memory of the results that the recorded ops write."""
        return self._first.num_bytes + self._next.num_bytes

    def draft(
        self, out_SE: torch.Tensor, ends: Int64Array, block_table: Int64Array, sampling: DraftSampling
    ) -> tuple[Int64Array, npt.NDArray[np.float32]]:
        """Draft.

        Args:
            out_SE: the model's output at the last known position of each request.
            ends: [S], the position after it.
            block_table: [S, M] of the requests.
            sampling: how many drafts each request gets, and with which parameters; all as the target's.

        Returns:
            [places, S] each: the drafts, and how likely the model finds them; valid until the next call.
        """
        num_rows, num_places, state = len(out_SE), sampling.num_places, self._state
        self._out[:num_rows] = out_SE
        self._columns.copy_(sampling.columns)
        state.place.zero_()
        state.positions[:num_rows] = torch.from_numpy(ends - 1)
        width = -(-(int(ends.max()) + num_places) // self._block_size)
        state.block_table[:num_rows, :width] = torch.from_numpy(block_table[:, :width])
        state.seq_lens[:num_rows] = torch.from_numpy(ends + num_places)
        plans = self._plan(num_rows)
        self._first.run(num_rows)
        for place in range(1, num_places):
            if any(plan.partials.numel() for plan in plans):  # threads share a sequence, in as many parts as it has
                plans = self._plan(num_rows)
            self._next.run(sampling.num_rows(place))
        drawn = state.drawn_token_ids[:num_places, :num_rows], state.drawn_probabilities[:num_places, :num_rows]
        return drawn[0].numpy(), drawn[1].numpy()

    def _plan(self, num_rows: int) -> list[AttentionPlan]:
        """Divide the work of the attention, for `seq_lens` as they are now. Unless threads share a sequence, once is
        enough for all places, with the lengths of the last one. The result must be kept alive."""
        state = self._state
        plans = plan_attentions(
            self._key_caches, state.block_table[:num_rows], self._starts[: num_rows + 1], state.seq_lens[:num_rows]
        )
        self._context.set_plans(plans)
        return [*plans.values()]

    def _head(self, model: ChainModel, out: torch.Tensor) -> None:
        """Record how tokens are drawn."""
        logits = model.logits(out)
        token_ids = sample(logits, *self._columns.tensors)
        advance_drafts(self._state, token_ids, token_probabilities(logits, token_ids), self._block_size)
