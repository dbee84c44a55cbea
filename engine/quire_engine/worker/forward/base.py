"""Forward: one way of computing a step, and what all of them share."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from quire_kernels import AttentionPlan, plan_attention

from quire_engine.device.transfer import upload
from quire_engine.models.base import AttentionSpec, ForwardContext, KVCaches
from quire_engine.worker.batch.input_batch import TABLE_STEP
from quire_engine.worker.batch.step_inputs import StepInputs

__all__ = ["Forward", "key_caches_by_kind", "plan_attentions", "table_width", "upload_context"]

Int64Array = npt.NDArray[np.int64]


class Forward(Protocol):
    """Computes hidden states with one model and its KV cache, whose tensors must not move."""

    def takes(self, inputs: StepInputs) -> bool:
        """Whether it can compute this step."""

    def __call__(self, inputs: StepInputs) -> torch.Tensor | None:
        """Compute a step that it takes; on a GPU this returns while the GPU still computes.

        Returns:
            [T, E] hidden states after the last norm, overwritten by the next call; None on stages before the last.
        """


def key_caches_by_kind(specs: Sequence[AttentionSpec], kv_caches: KVCaches) -> dict[AttentionSpec, torch.Tensor]:
    """For each kind of layer, the key cache of one such layer.

    Args:
        specs: by layer.
        kv_caches: by layer.
    """
    return dict(zip(specs, (key_cache for key_cache, _ in kv_caches), strict=True))


def upload_context(
    key_caches: Mapping[AttentionSpec, torch.Tensor],
    block_tables: Int64Array,
    slots: Int64Array,
    positions: Int64Array,
    slot_mapping: Int64Array,
    query_start_loc: Int64Array,
    seq_lens: Int64Array,
    *others: npt.NDArray[Any],
) -> tuple[ForwardContext, list[torch.Tensor]]:
    """Upload what the layers need to know of a step, and the plan of its attention; on a GPU with one copy.

    Args:
        key_caches: see `key_caches_by_kind`.
        block_tables: [slots, M], of which `slots` and as many blocks as `seq_lens` needs are uploaded.
        slots: [S]
        positions: see `ForwardContext`, like the next three.
        slot_mapping: likewise.
        query_start_loc: likewise.
        seq_lens: likewise.
        others: arrays that go with them.

    Returns:
        The context, and the others on the device.
    """
    key_cache = next(iter(key_caches.values()))
    device, block_size = key_cache.device, key_cache.shape[2]
    width = table_width(int(seq_lens.max()), block_size, device)
    positions_T, slot_mapping_T, table_SM, starts, lens, *there = upload(
        device, positions, slot_mapping, block_tables[slots, :width], query_start_loc, seq_lens, *others
    )
    # Plans are made from the host's copies: reading from a GPU would wait for it.
    known = (torch.from_numpy(query_start_loc), torch.from_numpy(seq_lens))
    context = ForwardContext(
        positions=positions_T,
        slot_mapping=slot_mapping_T,
        block_table=table_SM,
        query_start_loc=starts,
        seq_lens=lens,
        plans=plan_attentions(key_caches, table_SM, *known),
    )
    return context, there


def table_width(num_tokens: int, block_size: int, device: torch.device) -> int:
    """How many blocks of each request a step needs to know, if the longest has so many tokens."""
    width = -(-num_tokens // block_size)
    return width if device.type == "cpu" else -(-width // TABLE_STEP) * TABLE_STEP


def plan_attentions(
    key_caches: Mapping[AttentionSpec, torch.Tensor],
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
) -> dict[AttentionSpec, AttentionPlan]:
    """A plan for each kind of layer. Layers of one kind share a plan, as a step is the same for all of them.

    Args:
        key_caches: see `key_caches_by_kind`.
        block_table: see `ForwardContext`.
        query_start_loc: likewise, on the host.
        seq_lens: likewise, on the host.
    """
    plans = {
        spec: plan_attention(block_table, query_start_loc, seq_lens, spec.num_heads, key_cache, spec.window)
        for spec, key_cache in key_caches.items()
    }
    return {spec: plan for spec, plan in plans.items() if plan is not None}
