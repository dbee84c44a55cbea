"""The waiting requests, first come, first served or by a key.

All queues keep requests by id, so that removing one from the middle does not cost more in a longer queue.
"""

import heapq
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Protocol

from quire_engine.scheduler.request import Request


class RequestQueue(Protocol):
    """Requests that wait for their turn; iterating goes from the next one to the last."""

    def add(self, request: Request) -> None:
        """Put in a new request."""

    def prepend(self, request: Request) -> None:
        """Put back a request that was scheduled already, or was passed over."""

    def peek(self) -> Request:
        """The next request, left in the queue."""
        ...

    def pop(self) -> Request:
        """Take the next request out."""
        ...

    def remove(self, request: Request) -> None:
        """Take a request out from anywhere in the queue; ValueError if it is not there."""

    def __contains__(self, request: object) -> bool: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


def priority_key(request: Request) -> tuple[int, int]:
    """Sort key of the policy "priority": the lowest value first, then the earliest arrival."""
    return request.sampling_params.priority, request.arrival


class SortedRequestQueue:
    """A heap by a key, and by order of adding among equal ones. A preempted request goes back to its place.

    Args:
        key: of a request when it is added.
    """

    def __init__(self, key: Callable[[Request], Any]) -> None:
        self._key = key
        self._numbers = count(1)  # no two entries are equal, so requests themselves are never compared
        self._entries: dict[str, tuple[Any, int, Request]] = {}
        self._heap: list[tuple[Any, int, Request]] = []
        """Entries of requests removed from the middle stay in here, and are dropped when they come to the top."""

    def add(self, request: Request) -> None:
        self._push(request, next(self._numbers))

    def prepend(self, request: Request) -> None:
        self.add(request)

    def _push(self, request: Request, number: int) -> None:
        entry = self._entries[request.request_id] = self._key(request), number, request
        heapq.heappush(self._heap, entry)

    def peek(self) -> Request:
        while self._entries.get(self._heap[0][-1].request_id) is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0][-1]

    def pop(self) -> Request:
        request = self.peek()
        heapq.heappop(self._heap)
        del self._entries[request.request_id]
        return request

    def remove(self, request: Request) -> None:
        if request not in self:
            raise ValueError(f"{request} is not in the queue")
        del self._entries[request.request_id]
        if len(self._heap) > 2 * len(self._entries) + 16:  # mostly requests that have left
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def first(self, most: int) -> list[Request]:
        """The next requests in their order, at most so many."""
        return [entry[-1] for entry in heapq.nsmallest(most, self._entries.values())]

    def __contains__(self, request: object) -> bool:
        return isinstance(request, Request) and self._entries.get(request.request_id, (None,))[-1] is request

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (entry[-1] for entry in sorted(self._entries.values()))


class FCFSRequestQueue(SortedRequestQueue):
    """By arrival. A preempted request goes to the front: it arrived before all that still wait."""

    def __init__(self) -> None:
        super().__init__(lambda request: 0)

    def prepend(self, request: Request) -> None:
        self._push(request, -next(self._numbers))


class PriorityRequestQueue(SortedRequestQueue):
    """By priority, then arrival."""

    def __init__(self) -> None:
        super().__init__(priority_key)
