"""Forward: one way of computing a step."""

from typing import Protocol

import torch

from quire_engine.worker.batch.step_inputs import StepInputs

__all__ = ["Forward"]


class Forward(Protocol):
    """Computes hidden states with one model and its KV cache, which must stay where they are."""

    def takes(self, inputs: StepInputs) -> bool:
        """Whether this step can be computed so."""

    def __call__(self, inputs: StepInputs) -> torch.Tensor | None:
        """Compute a step that it takes; on a GPU this returns before it is computed.

        Returns:
            [T, E] hidden states after the last norm, overwritten by the next call; None on stages before the last.
        """
