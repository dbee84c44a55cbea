"""BlockDrafter: drafts a block of tokens in one pass, in which they see each other (`models/dflash.py`)."""

import numpy as np
import numpy.typing as npt
import torch
from quire_kernels import load_rows

from quire_engine.messages import DraftTokens
from quire_engine.models.step_context import StepRows
from quire_engine.worker.drafting.chain import CachingDrafter
from quire_engine.worker.drafting.chain_models import BlockModel
from quire_engine.worker.drafting.draft_sampling import DraftSampling

Int64Array = npt.NDArray[np.int64]


class BlockDrafter(CachingDrafter):
    """A `DraftMethod`. For its arguments see `CachingDrafter`.

    ::

        known tokens      5   8  31   4 │            4 came with the last step; 5, 8 and 31 are computed
        block                         4 │ ?  ?  ?    mask tokens, in whose places the drafts are
    """

    _model: BlockModel

    def draft(self, slots: Int64Array, hidden_SE: torch.Tensor | None, sampling: DraftSampling) -> list[DraftTokens]:
        batch, head, ends = self._batch, self._model.head, self._batch.num_known_tokens[slots] - 1
        self._pass(self._catch_up(slots, ends, self._max_tokens))
        # There may be no block for the last place, as only the inputs of drafts have to be in the cache: then it has
        # the logits of the one before.
        room = batch.num_blocks[slots] * batch.block_size - ends
        lens = np.minimum(np.minimum(sampling.counts, head.max_drafts) + 1, room)
        fields = batch.lay_out(slots, ends, ends + lens)
        rows = StepRows(**{**fields, "slot_mappings": fields["slot_mappings"][:1]})
        firsts, token_ids = rows.query_start_loc[:-1], np.full_like(rows.token_ids, head.mask_token_id)
        token_ids[firsts] = rows.token_ids[firsts]
        counts = [sampling.num_rows(place) for place in range(min(sampling.num_places, head.max_drafts))]
        each = [firsts[:count] + np.minimum(place, lens[:count] - 1) for place, count in enumerate(counts, 1)]
        context, (token_ids_T, rows_D) = self._upload(rows, token_ids, np.concatenate(each))
        logits_DV = head.logits(load_rows(head.run(token_ids_T, context, self._kv_caches), rows_D))
        for logits_SV in torch.split(logits_DV, counts):
            sampling.draw(logits_SV)
        return sampling.drafts()
