"""SchedulingPolicy: the order of requests, and how much of a step prompts may take. The base class is first come, first
served.

The scheduler calls it at a few points, and knows no policy. The calls of each step cost nothing where it plans
nothing::

    add ──► queue ──► rejections? ──► plan: tokens of prompts ──► running, in an order ──► first token ──► end
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire_engine.messages import EngineCoreOutput, SchedulerOutput
from quire_engine.scheduler.request import Request
from quire_engine.scheduler.request_queue import FCFSRequestQueue, PriorityRequestQueue, RequestQueue, priority_key


@dataclass(slots=True)
class StepBudget:
    """What is left of a step. Knows numbers of tokens, but no requests and no blocks.

    A prompt that exceeds the remaining tokens has as many as are left: chunked prefill. One prompt is partial at a
    time, and prompts that fit into the step overtake the others. So no prompt, however long, keeps others from going on
    or from starting.
    """

    num_tokens: int
    """Tokens that the step still has room for."""
    threshold: int
    """The setting `long_prefill_token_threshold`."""
    has_partial_prefill: bool = False
    """Whether the step computes a prompt in part."""

    def chunk(self, num_left: int, limit: int) -> int:
        """How many of a request's `num_left` uncomputed tokens go into this step, at most `limit`."""
        return min(num_left, limit, self.threshold) if self.threshold else min(num_left, limit)


@dataclass(slots=True)
class StepPlan:
    """Limits of a step's prompts; its decodes have a token each in any case."""

    shares: dict[str, int] = field(default_factory=dict)
    """Most tokens of each running request that is not computed up to its last token; 0 of those that are missing."""
    num_new_tokens: int = 0
    """The most tokens of requests that begin to run."""
    max_running: int = 0
    """Requests that may run."""


class SchedulingPolicy:
    """First come, first served."""

    def __init__(self) -> None:
        self.queue: RequestQueue = FCFSRequestQueue()

    def place(self, running: list[Request], request: Request, num_tokens: int) -> None:
        """Add a request that begins with `num_tokens` tokens to the running ones. The last of them is preempted
        first."""
        running.append(request)

    def rejections(self, running: Sequence[Request], num_queued: int) -> list[tuple[Request, EngineCoreOutput]]:
        """Waiting requests to reject now, with their output."""
        return []

    def plan(self, running: Sequence[Request]) -> StepPlan | None:
        """Limits of the next step's prompts; None: those of its budget."""
        return None

    def take_result(self, step: SchedulerOutput, outputs: Sequence[EngineCoreOutput]) -> None:
        """Learn from a step's output."""

    def note_step_seconds(self, seconds: float) -> None:
        """Learn how long the step of the last `take_result` took."""

    def forget(self, request: Request) -> None:
        """A request has ended."""

    def outlook(self, request: Request, now: float) -> tuple[float | None, float | None]:
        """Slack and predicted start, in seconds from now, of a request that has not begun; None where the policy does
        not predict them."""
        return None, None


class PriorityPolicy(SchedulingPolicy):
    """Orders waiting and running requests by priority value, then by arrival."""

    def __init__(self) -> None:
        self.queue: RequestQueue = PriorityRequestQueue()

    def place(self, running: list[Request], request: Request, num_tokens: int) -> None:
        """Insert it by its priority."""
        insort(running, request, key=priority_key)
