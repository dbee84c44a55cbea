"""RecordedForward: computes small steps from a recording, so that no Python runs between two kernels."""

import logging

import torch
from quire_kernels import NotRecordableError, Recording, record
from quire_kernels.attention_plan import CpuAttentionPlan

from quire_engine.models.base import AttentionSpec, CausalLM, ForwardContext, KVCaches
from quire_engine.worker.batch.step_inputs import StepInputs
from quire_engine.worker.forward.base import key_caches_by_kind, plan_attentions
from quire_engine.worker.forward.eager import EagerForward

__all__ = ["RECORDED_TOKENS", "RecordedForward"]

RECORDED_TOKENS = 64
"""Steps of more tokens are computed op by op: they take so long that Python's overhead does not matter."""

logger = logging.getLogger(__name__)


class RecordedForward:
    """A `Forward` that takes small steps, if the model can be recorded.

    Args:
        model: of a single rank: communication cannot be recorded.
        kv_caches: see its `forward`.
        eager: uploads the steps.
    """

    def __init__(self, model: CausalLM, kv_caches: KVCaches, eager: EagerForward) -> None:
        self._model = model
        self._kv_caches = kv_caches
        self._eager = eager
        self._hidden = torch.empty(RECORDED_TOKENS, model.hidden_size, dtype=model.dtype)
        self._positions = torch.zeros(RECORDED_TOKENS, dtype=torch.int64)
        self._slot_mapping = torch.zeros(RECORDED_TOKENS, dtype=torch.int64)
        self._plans: dict[AttentionSpec, CpuAttentionPlan] = {}
        self._out = self._hidden
        self._recording: Recording | None = None
        self._record()

    def takes(self, inputs: StepInputs) -> bool:
        """Whether there is a recording, and the step is small enough for it."""
        return self._recording is not None and len(inputs.token_ids) <= RECORDED_TOKENS

    def __call__(self, inputs: StepInputs) -> torch.Tensor:
        """[T, E]; see `Forward`."""
        num_tokens = len(inputs.token_ids)
        token_ids_T, context = self._eager.upload(inputs)
        assert self._recording is not None
        self._hidden[:num_tokens] = self._model.embed(token_ids_T)
        self._positions[:num_tokens] = context.positions
        self._slot_mapping[:num_tokens] = context.slot_mapping
        for spec, plan in self._plans.items():
            own = context.plans[spec]
            assert isinstance(own, CpuAttentionPlan)
            plan.copy_(own)
        self._recording.run(num_tokens)
        return self._out[:num_tokens]

    @property
    def num_bytes(self) -> int:
        """Memory of the results that the recorded ops write."""
        return 0 if self._recording is None else self._recording.num_bytes

    def _record(self) -> None:
        """Record the layers over one request's tokens. Any plan works, as each run copies its own into it."""
        table, seq_lens = torch.zeros(1, RECORDED_TOKENS, dtype=torch.int64), torch.tensor([RECORDED_TOKENS])
        start_loc = torch.tensor([0, RECORDED_TOKENS])
        plans = plan_attentions(key_caches_by_kind(self._model, self._kv_caches), table, start_loc, seq_lens)
        self._plans = {spec: plan for spec, plan in plans.items() if isinstance(plan, CpuAttentionPlan)}
        if not self._plans:  # only the C++ kernels can be recorded
            return
        context = ForwardContext(
            positions=self._positions,
            slot_mapping=self._slot_mapping,
            block_table=table,
            query_start_loc=start_loc,
            seq_lens=seq_lens,
            plans=self._plans,
        )
        try:
            with record(RECORDED_TOKENS) as recording:
                layers = self._model.run_layers(self._hidden, None, context, self._kv_caches)
                self._out = self._model.final_norm(*layers)
        except NotRecordableError as error:
            logger.warning("steps are computed op by op, which takes longer where they are small: %s", error)
        else:
            self._recording = recording
