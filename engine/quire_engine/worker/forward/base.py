"""Forward: one way of computing a step, and what all of them share."""

from collections.abc import Mapping
from typing import Protocol

import torch
from quire_kernels import AttentionPlan, plan_attention

from quire_engine.models.base import AttentionSpec, CausalLM, KVCaches
from quire_engine.worker.batch.step_inputs import StepInputs

__all__ = ["Forward", "key_caches_by_kind", "plan_attentions"]


class Forward(Protocol):
    """Computes hidden states with one model and its KV cache, whose tensors must not move."""

    def takes(self, inputs: StepInputs) -> bool:
        """Whether it can compute this step."""

    def __call__(self, inputs: StepInputs) -> torch.Tensor | None:
        """Compute a step that it takes; on a GPU this returns while the GPU still computes.

        Returns:
            [T, E] hidden states after the last norm, overwritten by the next call; None on stages before the last.
        """


def key_caches_by_kind(model: CausalLM, kv_caches: KVCaches) -> dict[AttentionSpec, torch.Tensor]:
    """For each kind of layer, the key cache of one such layer.

    Args:
        model: the model that the layers belong to.
        kv_caches: see its `forward`.
    """
    return dict(zip(model.attention_specs, (key_cache for key_cache, _ in kv_caches), strict=True))


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
        spec: plan_attention(block_table, query_start_loc, seq_lens, spec.num_heads, key_cache)
        for spec, key_cache in key_caches.items()
    }
    return {spec: plan for spec, plan in plans.items() if plan is not None}
