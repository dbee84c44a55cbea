"""AssistantDrafter: drafts with a model that reads the target's keys and values (`models/gemma4_assistant.py`).

It keeps nothing between steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from quire_engine.kv_cache import AttentionSpec
from quire_engine.messages import DraftTokens
from quire_engine.models.decoder import Decoder
from quire_engine.models.gemma4_assistant import Gemma4Assistant
from quire_engine.models.step_context import ContextBuilder, KVCaches, StepContext, StepRows
from quire_engine.worker.batch.input_batch import InputBatch
from quire_engine.worker.drafting.draft_sampling import DraftSampling

Int64Array = npt.NDArray[np.int64]


class AssistantDrafter:
    """A `DraftMethod`.

    Args:
        model: drafts.
        target: the model that it drafts for.
        batch: the requests.
        target_caches: the target's present caches, and by layer its group.
    """

    needs_hidden = True
    bytes_per_block = 0
    recorded_bytes = 0

    def __init__(
        self,
        model: Gemma4Assistant,
        target: Decoder,
        batch: InputBatch,
        target_caches: Callable[[], tuple[KVCaches, Sequence[int]]],
    ) -> None:
        self._model, self._target, self._batch, self._target_caches = model, target, batch, target_caches
        self._kv_caches: KVCaches = []
        self._contexts: ContextBuilder | None = None

    def initialize_cache(self, num_blocks: int) -> None:
        """Use the target's caches, which were allocated before, or drop them."""
        self._kv_caches, self._contexts = [], None
        if num_blocks:
            caches, group_ids = self._target_caches()
            specs, batch = self._model.state_specs, self._batch
            made = {
                spec.window: index
                for index, spec in enumerate(self._target.state_specs)
                if isinstance(spec, AttentionSpec) and spec.cache_of is None
            }
            indices = [made[spec.window] for spec in specs if isinstance(spec, AttentionSpec)]
            self._kv_caches = [caches[index] for index in indices]
            groups = [group_ids[index] for index in indices] if group_ids else ()
            self._contexts = ContextBuilder(specs, self._kv_caches, batch.block_tables, batch.block_size, groups)

    def forget_blocks(self, block_ids: list[int]) -> None:
        """It knows none."""

    def draft(self, slots: Int64Array, hidden_SE: torch.Tensor | None, sampling: DraftSampling) -> list[DraftTokens]:
        """At the position of the last known token, over the keys before it: the target has not computed the token."""
        assert hidden_SE is not None
        model, ends = self._model, self._batch.num_known_tokens[slots] - 1
        context, token_ids_S = self._upload(slots, ends)
        while sampling.goes_on():
            num_rows = sampling.num_rows(sampling.num_drawn)
            if num_rows < len(token_ids_S):
                context, _ = self._upload(slots[:num_rows], ends[:num_rows])
                token_ids_S, hidden_SE = token_ids_S[:num_rows], hidden_SE[:num_rows]
            out_SE = model.run(self._target.embed_alone(token_ids_S), hidden_SE, context, self._kv_caches)
            hidden_SE = model.next_hidden(out_SE)
            token_ids_S = sampling.draw(model.logits(out_SE))
        return sampling.drafts()

    def _upload(self, slots: Int64Array, ends: Int64Array) -> tuple[StepContext, torch.Tensor]:
        """The context of all drafts, and the tokens at `ends`, [S]."""
        assert self._contexts is not None
        rows = StepRows(**self._batch.lay_out(slots, ends - 1, ends, token_offset=1))
        context, (token_ids_S,) = self._contexts.upload(replace(rows, positions=ends), rows.token_ids)
        return context, token_ids_S
