"""StepHistory: how long the last steps took, phase by phase, and what the very last one was made of."""

import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from quire_engine.messages import SchedulerOutput
from quire_engine.request import Request
from quire_engine.snapshot import StepComposition, StepSeconds

__all__ = ["StepHistory", "StepPhase"]

NUM_STEPS = 128
"""Over which the medians are taken."""

StepPhase = Literal["schedule", "execute", "update"]


class StepHistory:
    """Told of every step; what it is asked for is worked out only then."""

    def __init__(self) -> None:
        self._seconds: dict[StepPhase, deque[float]] = {
            "schedule": deque(maxlen=NUM_STEPS),
            "execute": deque(maxlen=NUM_STEPS),
            "update": deque(maxlen=NUM_STEPS),
        }
        self.last_step: SchedulerOutput | None = None

    @contextmanager
    def measure(self, phase: StepPhase) -> Iterator[None]:
        """Time a part of a step; one that raises does not count."""
        began_at = time.perf_counter()
        yield
        self._seconds[phase].append(time.perf_counter() - began_at)

    def step_seconds(self) -> StepSeconds:
        """Medians; 0 of a phase that has not been yet."""
        return StepSeconds(**{phase: statistics.median(last or (0.0,)) for phase, last in self._seconds.items()})

    def composition(self, requests: Mapping[str, Request]) -> StepComposition:
        """The last step in numbers.

        Args:
            requests: the live ones. Of one that has ended since, several tokens count as prefill and one as decode.
        """
        step = self.last_step
        if step is None:
            return StepComposition()
        computed_before = {new.request_id: new.num_computed_tokens for new in step.new_requests}
        cached = step.cached_requests
        computed_before.update(zip(cached.request_ids, cached.num_computed_tokens, strict=True))
        num_decode_tokens = 0
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            request = requests.get(request_id)
            in_prompt = request is not None and computed_before[request_id] < request.num_prompt_tokens
            num_decode_tokens += num_tokens == 1 and not in_prompt
        return StepComposition(
            len(step.num_scheduled_tokens),
            step.total_num_scheduled_tokens,
            step.total_num_scheduled_tokens - num_decode_tokens,
            num_decode_tokens,
        )
