"""Forward: one way of computing a step, and what all of them share."""

from typing import Protocol

import torch
from quire_kernels import AttentionPlan, plan_attention

from quire_engine.models.base import AttentionSpec, CausalLM, KVCaches
from quire_engine.worker.batch.step_inputs import StepInputs

__all__ = ["Forward", "plan_attentions"]


class Forward(Protocol):
    """Computes hidden states with one model and its KV cache, whose tensors must not move."""

    def takes(self, inputs: StepInputs) -> bool:
        """Whether it can compute this step."""

    def __call__(self, inputs: StepInputs) -> torch.Tensor | None:
        """Compute a step that it takes; on a GPU this returns while the GPU still computes.

        Returns:
            [T, E] hidden states after the last norm, overwritten by the next call; None on stages before the last.
        """


def plan_attentions(
    model: CausalLM,
    kv_caches: KVCaches,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
) -> dict[AttentionSpec, AttentionPlan]:
    """A plan for each kind of layer. Layers of one kind share a plan, as a step is the same for all of them.

    Args:
        model: the model that the layers belong to.
        kv_caches: see its `forward`.
        block_table: see `ForwardContext`.
        query_start_loc: likewise, on the host.
        seq_lens: likewise, on the host.
    """
    caches = dict(zip(model.attention_specs, (key_cache for key_cache, _ in kv_caches), strict=True))
    plans = {
        spec: plan_attention(block_table, query_start_loc, seq_lens, spec.num_heads, key_cache)
        for spec, key_cache in caches.items()
    }
    return {spec: plan for spec, plan in plans.items() if plan is not None}
