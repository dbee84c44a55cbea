"""SchedulingPolicy: who comes next, and how much of a step prompts may take. First come, first served by itself.

The scheduler asks it at a few points, and knows no policy. What it is asked once a step costs nothing where it has no
opinion::

    add ──► queue ──► refusals? ──► plan: what prompts get ──► running, in an order ──► first token ──► end
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire_engine.messages import EngineCoreOutput, SchedulerOutput
from quire_engine.scheduler.request import Request
from quire_engine.scheduler.request_queue import FCFSRequestQueue, PriorityRequestQueue, RequestQueue, priority_key


@dataclass(slots=True)
class StepPlan:
    """What a step's prompts may take; its decodes have a token each in any case."""

    shares: dict[str, int] = field(default_factory=dict)
    """The most tokens of each running request that is not computed up to its last token."""
    num_new_tokens: int = 0
    """The most tokens of requests that begin to run."""
    max_running: int = 0
    """Requests that may run."""

    def share_of(self, request: Request) -> int:
        """The most tokens of a running request's prompt."""
        return self.shares.get(request.request_id, 0)


class SchedulingPolicy:
    """First come, first served."""

    def __init__(self) -> None:
        self.queue: RequestQueue = FCFSRequestQueue()

    def place(self, running: list[Request], request: Request, num_tokens: int) -> None:
        """Add a request to the running ones, which begins with so many tokens. The last of them gives way first."""
        running.append(request)

    def refusals(self, running: Sequence[Request], num_queued: int) -> list[tuple[Request, EngineCoreOutput]]:
        """Waiting requests that are to end now, and what they are told."""
        return []

    def plan(self, running: Sequence[Request]) -> StepPlan | None:
        """What the next step's prompts may take; None: what its budget allows."""
        return None

    def take_result(self, step: SchedulerOutput, outputs: Sequence[EngineCoreOutput]) -> None:
        """Take note of a step's output."""

    def note_step_seconds(self, seconds: float) -> None:
        """Take note of how long the step of the last `take_result` took."""

    def forget(self, request: Request) -> None:
        """A request has ended."""

    def outlook(self, request: Request, now: float) -> tuple[float | None, float | None]:
        """Of a request that has yet to begin, the seconds that this may be put off, and the seconds until it does; each
        None where nobody counts them."""
        return None, None


class PriorityPolicy(SchedulingPolicy):
    """By priority value, and then by arrival: what waits, and what runs."""

    def __init__(self) -> None:
        self.queue: RequestQueue = PriorityRequestQueue()

    def place(self, running: list[Request], request: Request, num_tokens: int) -> None:
        """Where its priority says."""
        insort(running, request, key=priority_key)
