"""The model over small steps, recorded once, so that no Python runs between two kernels."""

import logging

import torch
from quire_kernels import NotRecordableError, Recording, plan_attention, record
from quire_kernels.attention_plan import CpuAttentionPlan

from quire_engine.models.base import CausalLM, KVCaches
from quire_engine.models.layers import AttentionMetadata

__all__ = ["RECORDED_TOKENS", "RecordedForward"]

RECORDED_TOKENS = 64
"""Steps of more tokens are computed op by op: they take so long that what is between the ops does not show."""

logger = logging.getLogger(__name__)


class RecordedForward:
    """Computes hidden states as the model does, by a recording where the step is small enough.

    Args:
        model: of one rank alone: what ranks tell each other cannot be recorded.
        kv_caches: as of its `forward`. Like the weights they must stay where they are.
    """

    def __init__(self, model: CausalLM, kv_caches: KVCaches) -> None:
        self._model = model
        self._kv_caches = kv_caches
        self._hidden = torch.empty(RECORDED_TOKENS, model.hidden_size, dtype=model.dtype)
        self._positions = torch.zeros(RECORDED_TOKENS, dtype=torch.int64)
        self._slot_mapping = torch.zeros(RECORDED_TOKENS, dtype=torch.int64)
        self._plan: CpuAttentionPlan | None = None
        self._out = self._hidden
        self._recording: Recording | None = None
        self._record()

    def __call__(self, token_ids_T: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        """[T, E] hidden states after the last norm: overwritten by the next call."""
        num_tokens = len(token_ids_T)
        plan, is_small = metadata.plan, num_tokens <= RECORDED_TOKENS
        if self._recording is None or self._plan is None or not isinstance(plan, CpuAttentionPlan) or not is_small:
            hidden_TE = self._model.forward(token_ids_T, self._kv_caches, metadata)
            assert hidden_TE is not None, "of several stages"
            return hidden_TE
        self._hidden[:num_tokens] = self._model.embed(token_ids_T)
        self._positions[:num_tokens] = metadata.positions
        self._slot_mapping[:num_tokens] = metadata.slot_mapping
        self._plan.copy_(plan)
        self._recording.run(num_tokens)
        return self._out[:num_tokens]

    @property
    def num_bytes(self) -> int:
        """Of the results that the recorded ops write."""
        return 0 if self._recording is None else self._recording.num_bytes

    def _record(self) -> None:
        """Record the layers over one request's tokens; any plan will do, as each run brings its own."""
        table, seq_lens = torch.zeros(1, RECORDED_TOKENS, dtype=torch.int64), torch.tensor([RECORDED_TOKENS])
        start_loc = torch.tensor([0, RECORDED_TOKENS])
        plan = plan_attention(table, start_loc, seq_lens, self._model.num_heads, self._kv_caches[0][0])
        if not isinstance(plan, CpuAttentionPlan):  # none but the C++ kernels can be recorded
            return
        self._plan = plan
        metadata = AttentionMetadata(
            positions=self._positions,
            slot_mapping=self._slot_mapping,
            block_table=table,
            query_start_loc=start_loc,
            seq_lens=seq_lens,
            plan=plan,
        )
        try:
            with record(RECORDED_TOKENS) as recording:
                layers = self._model.run_layers(self._hidden, None, self._kv_caches, metadata)
                self._out = self._model.final_norm(*layers)
        except NotRecordableError as error:
            logger.warning("steps are computed op by op, which takes longer where they are small: %s", error)
        else:
            self._recording = recording
