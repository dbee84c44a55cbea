"""The waiting requests, first come, first served."""

from collections import deque
from collections.abc import Iterator

from quire_engine.request import Request

__all__ = ["FCFSRequestQueue"]


class FCFSRequestQueue:
    """A queue by arrival. A preempted request goes back to the front: it arrived before all who still wait."""

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()

    def add(self, request: Request) -> None:
        """Put a new request last."""
        self._queue.append(request)

    def prepend(self, request: Request) -> None:
        """Put a preempted request first."""
        self._queue.appendleft(request)

    def peek(self) -> Request:
        """The next request, left in the queue."""
        return self._queue[0]

    def pop(self) -> Request:
        """Take the next request out."""
        return self._queue.popleft()

    def remove(self, request: Request) -> None:
        """Take a request out from wherever it is."""
        self._queue.remove(request)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)
