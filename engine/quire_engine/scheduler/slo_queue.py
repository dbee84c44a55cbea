"""SLORequestQueue: waiting requests by least slack, and behind them the late ones.

::

    on time  │ by the latest moment at which they can begin     ──┐
             ▼ that moment has passed                             ├─► next: on time, or late when it is their turn
    late     │ by arrival                                       ──┘
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

from quire_engine.scheduler.request import Request
from quire_engine.scheduler.request_queue import SortedRequestQueue


@dataclass(slots=True)
class Standing:
    """A request's objectives as times on the scheduler's clock, and the predictions for it."""

    latest_start: float
    """The latest time at which it can begin and have its first token in time."""
    first_token_by: float
    arrived_at: float
    num_left: int
    """Tokens to compute at its arrival."""
    is_late: bool = False
    """Whether it cannot meet an objective any more, or runs with the tokens that others leave."""
    predicted_first_token: float | None = None
    """Of its first forecast."""
    predicted_start: float | None = None
    first_token_at: float | None = None


class SLORequestQueue:
    """Two queues.

    Args:
        standing_of: returns a request's standing.
        late_is_due: whether late requests come before others now.
    """

    def __init__(self, standing_of: Callable[[Request], Standing], late_is_due: Callable[[], bool]) -> None:
        self._standing_of = standing_of
        self._late_is_due = late_is_due
        self.on_time = SortedRequestQueue(lambda request: standing_of(request).latest_start)
        self.late = SortedRequestQueue(lambda request: request.arrival)
        self.new: list[Request] = []
        """Requests that arrived since the policy last emptied this."""

    def add(self, request: Request) -> None:
        """Put in a new request."""
        self.prepend(request)
        self.new.append(request)

    def prepend(self, request: Request) -> None:
        """Put a request into its queue."""
        (self.late if self._standing_of(request).is_late else self.on_time).add(request)

    def peek(self) -> Request:
        """The next request, left in the queue."""
        return self._next.peek()

    def pop(self) -> Request:
        """Take the next request out."""
        return self._next.pop()

    def remove(self, request: Request) -> None:
        """Take a request out from wherever it is."""
        (self.late if request in self.late else self.on_time).remove(request)

    def demote(self, now: float) -> None:
        """Requests that cannot have their first tokens in time any more give way to the others."""
        while self.on_time:
            standing = self._standing_of(request := self.on_time.peek())
            if standing.latest_start >= now or standing.first_token_at is not None:  # preempted: it comes first
                return
            self.make_late(request)

    def make_late(self, request: Request) -> None:
        """Make a waiting request late."""
        self.on_time.remove(request)
        self._standing_of(request).is_late = True
        self.late.add(request)

    @property
    def _next(self) -> SortedRequestQueue:
        return self.late if self.late and (not self.on_time or self._late_is_due()) else self.on_time

    def __contains__(self, request: object) -> bool:
        return request in self.on_time or request in self.late

    def __len__(self) -> int:
        return len(self.on_time) + len(self.late)

    def __iter__(self) -> Iterator[Request]:
        return chain(self.on_time, self.late)
