"""FCFSRequestQueue: by arrival, preempted requests first."""

import pytest
from quire_engine.scheduler.request_queue import FCFSRequestQueue
from support.scheduling import make_request


def test_first_come_first_served_and_preempted_before_all() -> None:
    queue = FCFSRequestQueue()
    a, b, c = (make_request([1]) for _ in range(3))
    queue.add(a)
    queue.add(b)
    queue.prepend(c)
    assert list(queue) == [c, a, b]
    assert queue.peek() is c
    assert len(queue) == 3
    assert [queue.pop() for _ in range(3)] == [c, a, b]
    assert not queue


def test_request_leaves_from_anywhere() -> None:
    queue = FCFSRequestQueue()
    a, b, c = (make_request([1]) for _ in range(3))
    for request in (a, b, c):
        queue.add(request)
    queue.remove(b)
    assert list(queue) == [a, c]
    with pytest.raises(ValueError, match="not in"):
        queue.remove(b)
