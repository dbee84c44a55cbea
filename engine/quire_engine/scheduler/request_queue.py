"""The waiting requests, first come, first served or by priority.

Both queues keep requests by id, so that removing one from the middle does not cost more in a longer queue.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from itertools import count
from typing import Protocol

from quire_engine.scheduler.request import Request


class RequestQueue(Protocol):
    """Requests that wait for their turn; iterating goes from the next one to the last."""

    def add(self, request: Request) -> None:
        """Put in a new request."""
        ...

    def prepend(self, request: Request) -> None:
        """Put back a request that was scheduled already, or was passed over."""
        ...

    def peek(self) -> Request:
        """The next request, left in the queue."""
        ...

    def pop(self) -> Request:
        """Take the next request out."""
        ...

    def remove(self, request: Request) -> None:
        """Take a request out from anywhere in the queue; ValueError if it is not there."""
        ...

    def __contains__(self, request: object) -> bool: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class FCFSRequestQueue:
    """A queue by arrival. A preempted request goes back to the front: it arrived before all that still wait."""

    def __init__(self) -> None:
        self._queue: OrderedDict[str, Request] = OrderedDict()

    def add(self, request: Request) -> None:
        """Put a new request last."""
        self._queue[request.request_id] = request

    def prepend(self, request: Request) -> None:
        """Put a preempted request first."""
        self._queue[request.request_id] = request
        self._queue.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        """The next request, left in the queue."""
        return next(iter(self._queue.values()))

    def pop(self) -> Request:
        """Take the next request out."""
        return self._queue.popitem(last=False)[1]

    def remove(self, request: Request) -> None:
        """Take a request out from wherever it is."""
        if request not in self:
            raise ValueError(f"{request} is not in the queue")
        del self._queue[request.request_id]

    def __contains__(self, request: object) -> bool:
        return isinstance(request, Request) and self._queue.get(request.request_id) is request

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue.values())


def priority_key(request: Request) -> tuple[int, int]:
    """Sort key of the policy "priority": the lowest value first, then the earliest arrival."""
    return request.sampling_params.priority, request.arrival


class PriorityRequestQueue:
    """A heap by priority, then arrival. A preempted request goes back to its place in this order."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._entry_numbers = count()  # no two entries are equal, so requests themselves are never compared
        self._heap: list[tuple[int, int, int, Request]] = []
        """Requests removed from the middle stay in here, and are dropped when they come to the top."""

    def add(self, request: Request) -> None:
        """Put in a request."""
        self._requests[request.request_id] = request
        heapq.heappush(self._heap, (*priority_key(request), next(self._entry_numbers), request))

    def prepend(self, request: Request) -> None:
        """Put back a request; its place is the same as a new request's."""
        self.add(request)

    def peek(self) -> Request:
        """The next request, left in the queue."""
        while (request := self._heap[0][-1]) not in self:
            heapq.heappop(self._heap)
        return request

    def pop(self) -> Request:
        """Take the next request out."""
        request = self.peek()
        heapq.heappop(self._heap)
        del self._requests[request.request_id]
        return request

    def remove(self, request: Request) -> None:
        """Take a request out from wherever it is."""
        if request not in self:
            raise ValueError(f"{request} is not in the queue")
        del self._requests[request.request_id]
        if len(self._heap) > 2 * len(self._requests) + 16:  # mostly requests that have left
            self._heap = [entry for entry in self._heap if entry[-1] in self]
            heapq.heapify(self._heap)

    def __contains__(self, request: object) -> bool:
        return isinstance(request, Request) and self._requests.get(request.request_id) is request

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._requests.values(), key=priority_key))
