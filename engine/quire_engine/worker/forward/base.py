"""Forward: one way of computing a step, and what all of them share."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from quire_kernels import AttentionPlan, plan_attention

from quire_engine.device.transfer import upload
from quire_engine.models.base import AttentionSpec, ForwardContext, KVCaches
from quire_engine.worker.batch.input_batch import TABLE_STEP
from quire_engine.worker.batch.step_inputs import StepInputs

__all__ = [
    "Forward",
    "key_caches_by_group",
    "key_caches_by_kind",
    "plan_attentions",
    "table_width",
    "upload_context",
    "with_contexts",
]

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
    return key_caches_by_group(specs, kv_caches)[0]


def key_caches_by_group(
    specs: Sequence[AttentionSpec], kv_caches: KVCaches, group_ids: Sequence[int] = (), num_groups: int = 1
) -> list[dict[AttentionSpec, torch.Tensor]]:
    """For each group and each kind of layer in it, the key cache of one such layer; see `key_caches_by_kind`.

    Args:
        specs: by layer.
        kv_caches: by layer.
        group_ids: by layer, its group; not needed if there is only one.
        num_groups: of the whole model. A stage may have no layer of some of them.
    """
    key_caches: list[dict[AttentionSpec, torch.Tensor]] = [{} for _ in range(num_groups)]
    for spec, (key_cache, *_), group in zip(specs, kv_caches, group_ids or [0] * len(specs), strict=True):
        key_caches[group][spec] = key_cache
    return key_caches


def upload_context(
    key_caches: Sequence[Mapping[AttentionSpec, torch.Tensor]],
    block_tables: Sequence[Int64Array],
    slots: Int64Array,
    positions: Int64Array,
    slot_mappings: Sequence[Int64Array],
    query_start_loc: Int64Array,
    seq_lens: Int64Array,
    *others: npt.NDArray[Any],
    group_ids: Sequence[int] = (),
) -> tuple[ForwardContext, list[torch.Tensor]]:
    """Upload what the layers need to know of a step, and the plan of its attention; on a GPU with one copy.

    Args:
        key_caches: of each group of layers; see `key_caches_by_kind`.
        block_tables: [slots, M] of each group, of which `slots` and as many blocks as `seq_lens` needs are uploaded.
        slots: [S]
        positions: see `ForwardContext`, like the next three.
        slot_mappings: of each group.
        query_start_loc: likewise.
        seq_lens: likewise.
        others: arrays that go with them.
        group_ids: by layer, its group; not needed if there is only one.

    Returns:
        The context, and the others on the device.
    """
    key_cache = next(key_cache for kinds in key_caches for key_cache in kinds.values())
    device, block_size, num_groups = key_cache.device, key_cache.shape[2], len(key_caches)
    width = table_width(int(seq_lens.max()), block_size, device)
    positions_T, starts, lens, *there = upload(
        device, positions, query_start_loc, seq_lens, *slot_mappings,
        *(table[slots, :width] for table in block_tables), *others,
    )  # fmt: skip
    # Plans are made from the host's copies: reading from a GPU would wait for it.
    known = (torch.from_numpy(query_start_loc), torch.from_numpy(seq_lens))
    contexts = [
        ForwardContext(
            positions=positions_T,
            slot_mapping=slot_mapping_T,
            block_table=table_SM,
            query_start_loc=starts,
            seq_lens=lens,
            plans=plan_attentions(kinds, table_SM, *known),
        )
        for kinds, slot_mapping_T, table_SM in zip(
            key_caches, there[:num_groups], there[num_groups : 2 * num_groups], strict=True
        )
    ]
    return with_contexts(contexts, group_ids), there[2 * num_groups :]


def with_contexts(contexts: Sequence[ForwardContext], group_ids: Sequence[int]) -> ForwardContext:
    """The context of all layers.

    Args:
        contexts: by group.
        group_ids: by layer, its group; not needed if there is only one.
    """
    if len(contexts) == 1:
        return contexts[0]
    return replace(contexts[0], groups=contexts, group_ids=group_ids)


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
