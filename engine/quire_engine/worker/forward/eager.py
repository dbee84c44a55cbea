"""Forward: one way of computing a step; EagerForward computes any step, op by op."""

from collections.abc import Sequence
from typing import Protocol

import torch

from quire_engine.device.transfer import upload
from quire_engine.models.base import CausalLM
from quire_engine.models.step_context import ContextBuilder, KVCaches, StepContext
from quire_engine.worker.batch.input_batch import InputBatch
from quire_engine.worker.batch.step_inputs import StepInputs


class Forward(Protocol):
    """Computes hidden states with one model and its KV cache, whose tensors must not move."""

    def takes(self, inputs: StepInputs) -> bool:
        """Whether it can compute this step."""

    def __call__(self, inputs: StepInputs) -> torch.Tensor | None:
        """Compute a step that it takes; on a GPU this returns while the GPU still computes.

        Returns:
            [T, E] hidden states after the last norm, overwritten by the next call; None on stages before the last.
        """


class EagerForward:
    """A `Forward` that takes every step.

    Args:
        model: this rank's part.
        kv_caches: see its `forward`.
        batch: the steps' slots refer to it.
        last_token_ids: [max_num_seqs + 1] int64 on the device, by slot: holds the tokens that the host does not know;
            None if it knows all of them.
        group_ids: by layer, its group; not needed if there is only one.
    """

    def __init__(
        self,
        model: CausalLM,
        kv_caches: KVCaches,
        batch: InputBatch,
        last_token_ids: torch.Tensor | None,
        group_ids: Sequence[int] = (),
    ) -> None:
        self._model = model
        self._kv_caches = kv_caches
        self._contexts = ContextBuilder(
            model.state_specs, kv_caches, batch.block_tables, batch.block_size, group_ids, batch.columns
        )
        self._last_token_ids = last_token_ids

    def takes(self, inputs: StepInputs) -> bool:
        return True

    def __call__(self, inputs: StepInputs) -> torch.Tensor | None:
        token_ids_T, context = self.upload(inputs)
        if inputs.embedded is None:
            return self._model.forward(token_ids_T, context, self._kv_caches)
        rows_P, hidden_PE = upload(token_ids_T.device, *inputs.embedded)
        return self._model.forward(token_ids_T, context, self._kv_caches, (rows_P, hidden_PE))

    def upload(self, inputs: StepInputs) -> tuple[torch.Tensor, StepContext]:
        """The step's token ids, [T], and its context, on the device."""
        ahead = [] if self._last_token_ids is None else [inputs.token_slots, inputs.is_on_device]
        context, (token_ids_T, *there) = self._contexts.upload(inputs, inputs.token_ids, *ahead)
        if self._last_token_ids is not None:
            slots_T, is_on_device_T = there
            token_ids_T = torch.where(is_on_device_T, self._last_token_ids[slots_T], token_ids_T)
        return token_ids_T, context
