"""JobQueue: which grammars are compiled now, and which wait. It knows no process, and time is what it is told.

Nobody knows beforehand how long a grammar takes, and most take milliseconds. So each is tried for `QUICK_SECONDS`, in
the order of arrival. Those that take longer are slow, and no more than `MAX_SLOW_JOBS` of them have a place while
others wait to be tried: the last to be started then make way, and begin anew behind all other slow ones. When nobody
waits to be tried, slow ones may have all places.

::

    add ──► untried ──► running ──► (ends)           a try: as many as there are places
                           │  ▲
                  makes way ▼  │
                          slow ┘                      MAX_SLOW_JOBS, or all places that nobody else wants

So one that takes milliseconds waits for no more than `QUICK_SECONDS` of those that came before it, shared among the
places that slow ones do not have, however slow they are; and slow ones always have `MAX_SLOW_JOBS` places.
"""

from collections import deque
from dataclasses import dataclass

from quire_engine.structured_output.protocol import CompileRequest

__all__ = ["MAX_JOBS", "MAX_SLOW_JOBS", "QUICK_SECONDS", "JobQueue"]

MAX_JOBS = 4
"""Grammars compiled at once, so that one that takes all its time does not hold up the others."""
MAX_SLOW_JOBS = 2
QUICK_SECONDS = 0.5
"""Longer than this takes a usual schema only on a busy machine."""


@dataclass(slots=True)
class _Running:
    request: CompileRequest
    started_at: float
    slow_from: float


class JobQueue:
    """Requests by job id, waiting or running. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._untried: deque[CompileRequest] = deque()
        self._slow: deque[CompileRequest] = deque()
        self._running: dict[int, _Running] = {}

    def add(self, request: CompileRequest) -> None:
        """A new grammar."""
        self._untried.append(request)

    def remove(self, job_id: int) -> bool:
        """Forget a job that has ended or that nobody waits for; True when it was running."""
        self._untried = deque(request for request in self._untried if request.job_id != job_id)
        self._slow = deque(request for request in self._slow if request.job_id != job_id)
        return self._running.pop(job_id, None) is not None

    def take_next(self, now: float) -> CompileRequest | None:
        """The job to start now, if there is one and a place for it."""
        if len(self._running) >= MAX_JOBS:
            return None
        if self._slow and (not self._untried or self._num_slow(now) < MAX_SLOW_JOBS):
            request = self._slow.popleft()
            self._running[request.job_id] = _Running(request, now, slow_from=now)
        elif self._untried:
            request = self._untried.popleft()
            self._running[request.job_id] = _Running(request, now, slow_from=now + QUICK_SECONDS)
        else:
            return None
        return request

    def make_way(self, now: float) -> list[int]:
        """Running jobs that have to stop, so that others can be tried. They wait again, behind the other slow ones."""
        slow = [one for one in self._running.values() if now >= one.slow_from]
        slow.sort(key=lambda one: one.started_at)
        num_places = MAX_JOBS - len(self._running)
        num_wanted = max(min(len(self._untried) - num_places, len(slow) - MAX_SLOW_JOBS), 0)
        stopped = slow[len(slow) - num_wanted :]
        for one in stopped:
            del self._running[one.request.job_id]
            self._slow.append(one.request)
        return [one.request.job_id for one in stopped]

    def seconds_until_due(self, now: float) -> float | None:
        """When to look again, though nothing has happened: another job becomes slow, and others wait. None: no need."""
        if not self._untried:
            return None
        return min((one.slow_from - now for one in self._running.values() if now < one.slow_from), default=None)

    def _num_slow(self, now: float) -> int:
        return sum(now >= one.slow_from for one in self._running.values())
