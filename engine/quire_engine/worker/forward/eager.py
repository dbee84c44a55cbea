"""EagerForward: computes any step, op by op."""

from typing import Any

import numpy.typing as npt
import torch

from quire_engine.device.transfer import upload
from quire_engine.models.base import CausalLM, ForwardContext, KVCaches
from quire_engine.worker.batch.input_batch import TABLE_STEP, InputBatch
from quire_engine.worker.batch.step_inputs import StepInputs
from quire_engine.worker.forward.base import key_caches_by_kind, plan_attentions

__all__ = ["EagerForward"]


class EagerForward:
    """A `Forward` that takes every step.

    Args:
        model: this rank's part.
        kv_caches: see its `forward`.
        batch: the steps' slots refer to it.
        last_token_ids: [max_num_seqs + 1] int64 on the device, by slot: holds the tokens that the host does not know;
            None if it knows all of them.
    """

    def __init__(
        self, model: CausalLM, kv_caches: KVCaches, batch: InputBatch, last_token_ids: torch.Tensor | None
    ) -> None:
        self._model = model
        self._kv_caches = kv_caches
        self._key_caches = key_caches_by_kind(model, kv_caches)
        self._batch = batch
        self._last_token_ids = last_token_ids

    def takes(self, inputs: StepInputs) -> bool:
        """Always True."""
        return True

    def __call__(self, inputs: StepInputs) -> torch.Tensor | None:
        """[T, E], or None; see `Forward`."""
        return self._model.forward(*self.upload(inputs), self._kv_caches)

    def upload(self, inputs: StepInputs) -> tuple[torch.Tensor, ForwardContext]:
        """The step's token ids, [T], and its context, on the device."""
        key_cache = self._kv_caches[0][0]
        device, block_size = key_cache.device, key_cache.shape[2]
        width = -(-int(inputs.seq_lens.max()) // block_size)
        if device.type != "cpu":
            width = -(-width // TABLE_STEP) * TABLE_STEP
        arrays: list[npt.NDArray[Any]] = [
            inputs.token_ids, inputs.positions, inputs.slot_mapping, self._batch.block_table[inputs.slots, :width],
            inputs.query_start_loc, inputs.seq_lens,
        ]  # fmt: skip
        if self._last_token_ids is not None:
            arrays += [inputs.token_slots, inputs.is_on_device]
        token_ids_T, positions_T, slot_mapping, block_table, starts, lens, *ahead = upload(device, *arrays)
        if self._last_token_ids is not None:
            slots_T, is_on_device_T = ahead
            token_ids_T = torch.where(is_on_device_T, self._last_token_ids[slots_T], token_ids_T)
        # Plans are made from the host's copies: reading from a GPU would wait for it.
        known = (torch.from_numpy(inputs.query_start_loc), torch.from_numpy(inputs.seq_lens))
        context = ForwardContext(
            positions=positions_T,
            slot_mapping=slot_mapping,
            block_table=block_table,
            query_start_loc=starts,
            seq_lens=lens,
            plans=plan_attentions(self._key_caches, block_table, *known),
        )
        return token_ids_T, context
