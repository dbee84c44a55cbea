"""RecordedForward: computes small steps from a recording, so that no Python runs between two kernels."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from quire_kernels import AttentionPlan, NotRecordableError, record
from quire_kernels.attention_plan import CpuAttentionPlan
from quire_kernels.kv_cache import is_tiled

from quire_engine.models.base import AttentionSpec, ForwardContext, KVCaches, RecordableLM
from quire_engine.worker.batch.step_inputs import StepInputs
from quire_engine.worker.forward.base import key_caches_by_group, plan_attentions, with_contexts
from quire_engine.worker.forward.eager import EagerForward

__all__ = ["RECORDED_TOKENS", "RecordedContext", "RecordedForward", "RecordedLayers"]

RECORDED_TOKENS = 64
"""Steps of more tokens are computed op by op: they take so long that Python's overhead does not matter."""

Layers: TypeAlias = Callable[[Sequence[torch.Tensor], ForwardContext], torch.Tensor]
"""(inputs, each [T, its width], context) → [T, E]; uses only ops of `quire_kernels`, and may overwrite the inputs."""

logger = logging.getLogger(__name__)


class RecordedContext:
    """A context whose tensors do not move, for recorded ops to read from.

    Args:
        specs: of the layers' attention.
        kv_caches: by layer; their tensors must not move. The C++ kernels use them.
        group_ids: by layer, its group; not needed if there is only one.
        num_groups: of the whole model.
    """

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        kv_caches: KVCaches,
        group_ids: Sequence[int] = (),
        num_groups: int = 1,
    ) -> None:
        # Of one request's tokens. Any plan works, as each run copies its own into it.
        table, seq_lens = torch.zeros(1, RECORDED_TOKENS, dtype=torch.int64), torch.tensor([RECORDED_TOKENS])
        start_loc = torch.tensor([0, RECORDED_TOKENS])
        positions = torch.zeros(RECORDED_TOKENS, dtype=torch.int64)
        self._contexts = []
        """By group."""
        for key_caches in key_caches_by_group(specs, kv_caches, group_ids, num_groups):
            plans = plan_attentions(key_caches, table, start_loc, seq_lens)
            context = ForwardContext(
                positions=positions,
                slot_mapping=torch.zeros(RECORDED_TOKENS, dtype=torch.int64),
                block_table=table,
                query_start_loc=start_loc,
                seq_lens=seq_lens,
                plans={spec: plan for spec, plan in plans.items() if isinstance(plan, CpuAttentionPlan)},
            )
            self._contexts.append(context)
        self.context = with_contexts(self._contexts, group_ids)

    def set(self, context: ForwardContext) -> None:
        """Take over another context, which has to be kept alive as long as ops read from this one."""
        num_tokens = len(context.positions)
        self.context.positions[:num_tokens] = context.positions
        for own, given in zip(self._contexts, context.groups or [context], strict=True):
            own.slot_mapping[:num_tokens] = given.slot_mapping
            _copy_plans(own.plans, given.plans)

    def set_plans(self, plans: Mapping[AttentionSpec, AttentionPlan]) -> None:
        """Take over the plans alone, likewise; of one group."""
        _copy_plans(self.context.plans, plans)


def _copy_plans(own: Mapping[AttentionSpec, AttentionPlan], given: Mapping[AttentionSpec, AttentionPlan]) -> None:
    for spec, plan in own.items():
        new = given[spec]
        assert isinstance(plan, CpuAttentionPlan)
        assert isinstance(new, CpuAttentionPlan)
        plan.copy_(new)


class RecordedLayers:
    """Layers, recorded over at most `RECORDED_TOKENS` tokens.

    Args:
        layers: to be recorded.
        widths: of their inputs.
        dtype: of their inputs.
        specs: of their attention, by layer.
        kv_caches: by layer; their tensors must not move.
        group_ids: by layer, its group; not needed if there is only one.
        num_groups: of the whole model.

    Raises:
        NotRecordableError: they use other ops than those of `quire_kernels`.
    """

    def __init__(
        self,
        layers: Layers,
        widths: Sequence[int],
        dtype: torch.dtype,
        specs: Sequence[AttentionSpec],
        kv_caches: KVCaches,
        group_ids: Sequence[int] = (),
        num_groups: int = 1,
    ) -> None:
        self._inputs = [torch.empty(RECORDED_TOKENS, width, dtype=dtype) for width in widths]
        self._context = RecordedContext(specs, kv_caches, group_ids, num_groups)
        with record(RECORDED_TOKENS) as self._recording:
            self._out = layers(self._inputs, self._context.context)

    @property
    def num_bytes(self) -> int:
        """Memory of the results that the recorded ops write."""
        return self._recording.num_bytes

    def __call__(self, inputs: Sequence[torch.Tensor], context: ForwardContext) -> torch.Tensor:
        """[T, E], overwritten by the next call."""
        num_tokens = len(context.positions)
        for own, given in zip(self._inputs, inputs, strict=True):
            own[:num_tokens] = given
        self._context.set(context)
        self._recording.run(num_tokens)
        return self._out[:num_tokens]


class RecordedForward:
    """A `Forward` that takes small steps, if the model's ops can be recorded with these caches.

    Args:
        model: of a single rank: communication cannot be recorded.
        kv_caches: see its `forward`.
        eager: uploads the steps.
        group_ids: by layer, its group; not needed if there is only one.
        num_groups: of the whole model.
    """

    def __init__(
        self,
        model: RecordableLM,
        kv_caches: KVCaches,
        eager: EagerForward,
        group_ids: Sequence[int] = (),
        num_groups: int = 1,
    ) -> None:
        self._model = model
        self._eager = eager

        def layers(inputs: Sequence[torch.Tensor], context: ForwardContext) -> torch.Tensor:
            return model.final_norm(*model.run_layers(inputs[0], None, context, kv_caches))

        self._layers: RecordedLayers | None = None
        if not is_tiled(kv_caches[0][0]):  # only attention in C++ can be recorded
            return
        try:
            self._layers = RecordedLayers(
                layers, [model.hidden_size], model.dtype, model.attention_specs, kv_caches, group_ids, num_groups
            )
        except NotRecordableError as error:  # not logged itself: it refers to the caches
            logger.warning("steps are computed op by op, which takes longer where they are small: %s", str(error))

    def takes(self, inputs: StepInputs) -> bool:
        """Whether there is a recording, and the step is small enough for it."""
        return self._layers is not None and len(inputs.token_ids) <= RECORDED_TOKENS

    def __call__(self, inputs: StepInputs) -> torch.Tensor:
        """[T, E]; see `Forward`."""
        assert self._layers is not None
        token_ids_T, context = self._eager.upload(inputs)
        return self._layers([self._model.embed(token_ids_T)], context)

    @property
    def num_bytes(self) -> int:
        """Memory of the results that the recorded ops write."""
        return 0 if self._layers is None else self._layers.num_bytes
