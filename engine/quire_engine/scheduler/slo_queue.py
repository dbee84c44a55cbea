"""SLORequestQueue: waiting requests by least slack, and behind them the late ones.

::

    on time  │ by the latest moment at which they can begin     ──┐
             ▼ that moment has passed                             ├─► next: on time, or late when it is their turn
    late     │ by arrival                                       ──┘
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

from quire_engine.scheduler.request import Request

_Entry = tuple[float, int, Request]
"""(latest start or arrival, a number so that no two entries are equal, the request)"""


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
    predicted_start: float | None = None
    first_token_at: float | None = None
    is_known: bool = False
    """Whether it was forecast once."""


class SLORequestQueue:
    """Two heaps.

    Args:
        standing_of: returns a request's standing.
        late_is_due: whether late requests come before others now.
    """

    def __init__(self, standing_of: Callable[[Request], Standing], late_is_due: Callable[[], bool]) -> None:
        self._standing_of = standing_of
        self._late_is_due = late_is_due
        self._requests: dict[str, Request] = {}
        self._entry_numbers = count()
        self._on_time: list[_Entry] = []
        self._late: list[_Entry] = []
        """Requests removed from the middle stay in both heaps until they come to the top."""
        self.new: list[Request] = []
        """Requests that arrived since the policy last emptied this."""

    def add(self, request: Request) -> None:
        """Put in a new request."""
        self.prepend(request)
        self.new.append(request)

    def prepend(self, request: Request) -> None:
        """Put a request into its heap."""
        self._requests[request.request_id] = request
        standing = self._standing_of(request)
        if standing.is_late:
            heapq.heappush(self._late, (request.arrival, next(self._entry_numbers), request))
        else:
            heapq.heappush(self._on_time, (standing.latest_start, next(self._entry_numbers), request))

    def peek(self) -> Request:
        """The next request, left in the queue."""
        return self._next_heap()[0][-1]

    def pop(self) -> Request:
        """Take the next request out."""
        request: Request = heapq.heappop(self._next_heap())[-1]
        del self._requests[request.request_id]
        return request

    def remove(self, request: Request) -> None:
        """Take a request out from wherever it is."""
        if request not in self:
            raise ValueError(f"{request} is not in the queue")
        del self._requests[request.request_id]
        for heap in (self._on_time, self._late):
            if len(heap) > 2 * len(self._requests) + 16:  # mostly requests that have left
                heap[:] = [entry for entry in heap if entry[-1] in self]
                heapq.heapify(heap)

    def demote(self, now: float) -> None:
        """Requests that cannot have their first tokens in time any more give way to the others."""
        while self.has_on_time and self._on_time[0][0] < now:
            request = self._on_time[0][-1]
            standing = self._standing_of(request)
            if standing.first_token_at is not None:
                return  # it was preempted, and comes first
            heapq.heappop(self._on_time)
            standing.is_late = True
            self.prepend(request)

    def make_late(self, request: Request) -> None:
        """Make a waiting request late."""
        self._on_time = [entry for entry in self._on_time if entry[-1] is not request]
        heapq.heapify(self._on_time)
        self._standing_of(request).is_late = True
        self.prepend(request)

    @property
    def has_on_time(self) -> bool:
        """Whether a request can still have its first token in time."""
        return self._has(self._on_time)

    @property
    def has_late(self) -> bool:
        """Whether there is a late request."""
        return self._has(self._late)

    def first_on_time(self, most: int) -> list[Request]:
        """The next requests that are not late, in their order."""
        return [entry[-1] for entry in heapq.nsmallest(most, self._on_time) if entry[-1] in self]

    def _has(self, heap: list[_Entry]) -> bool:
        while heap and heap[0][-1] not in self:
            heapq.heappop(heap)
        return bool(heap)

    def _next_heap(self) -> list[_Entry]:
        late, on_time = self.has_late, self.has_on_time
        return self._late if late and (not on_time or self._late_is_due()) else self._on_time

    def __contains__(self, request: object) -> bool:
        return isinstance(request, Request) and self._requests.get(request.request_id) is request

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        for heap in (self._on_time, self._late):
            yield from (entry[-1] for entry in sorted(heap) if entry[-1] in self)
