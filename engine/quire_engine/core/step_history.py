"""StepHistory: how long the last steps took, phase by phase, and what the last one consisted of."""

import statistics
from collections import deque

from quire_engine.snapshot import StepComposition, StepSeconds
from quire_engine.stats import StepStats

__all__ = ["StepHistory"]

NUM_STEPS = 128
"""Steps that the medians are taken over."""


class StepHistory:
    """Keeps the last steps; medians are only computed when they are asked for."""

    def __init__(self) -> None:
        self._steps: deque[StepStats] = deque(maxlen=NUM_STEPS)

    def record(self, step: StepStats) -> None:
        """Add a step that has ended."""
        self._steps.append(step)

    def step_seconds(self) -> StepSeconds:
        """Medians; 0 before the first step."""
        if not self._steps:
            return StepSeconds()
        return StepSeconds(
            statistics.median(step.schedule_seconds for step in self._steps),
            statistics.median(step.execute_seconds for step in self._steps),
            statistics.median(step.update_seconds for step in self._steps),
        )

    def composition(self) -> StepComposition:
        """The last step in numbers."""
        if not self._steps:
            return StepComposition()
        last = self._steps[-1]
        return StepComposition(last.num_requests, last.num_tokens, last.num_prefill_tokens, last.num_decode_tokens)
