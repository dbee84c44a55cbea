"""JobQueue: which grammars are compiled now, and which wait. It knows no process and no clock.

How long a grammar takes is not known beforehand, and most take milliseconds. So each is tried in the order of arrival,
and stopped when it has used the first of `TRY_SECONDS` of CPU time. Then it is tried for longer, after all others in
that round, and at last to its end. Each round has `PLACES` of its own. Those of the last round are all that it has; the
others may use free places, as their jobs end soon::

    add ──► round 0 ──► round 1 ──► round 2 ──► (ends)         or ends in any round
            0.05 s      0.5 s       the rest

So a quick grammar waits at most for the first of `TRY_SECONDS` of each that came before it, however slow they are; and
many quick ones do not keep slow ones from running.
"""

from collections import deque

from quire_engine.structured_output.compiler_messages import CompileRequest

TRY_SECONDS = (0.05, 0.5)
"""CPU time of each round but the last. Usual schemas take less than the first; with a large vocabulary, the second."""
PLACES = (2, 1, 2)
MAX_JOBS = sum(PLACES)
"""Grammars compiled at once, so that a slow one does not block the others."""


class JobQueue:
    """Requests by job id, waiting or running, each in a round."""

    def __init__(self) -> None:
        self._waiting: tuple[deque[CompileRequest], ...] = tuple(deque() for _ in PLACES)
        self._running: dict[int, int] = {}
        """The rounds of running jobs."""

    def add(self, request: CompileRequest, job_round: int = 0) -> None:
        """Add a new grammar, or one that has to be tried for longer."""
        self._waiting[job_round].append(request)

    def remove(self, job_id: int) -> bool:
        """Forget a job that has ended or is cancelled. Returns whether it was running."""
        for waiting in self._waiting:
            for request in [request for request in waiting if request.job_id == job_id]:
                waiting.remove(request)
        return self._running.pop(job_id, None) is not None

    def take_next(self) -> tuple[CompileRequest, int] | None:
        """The next job to start and its round, if there is a job and a place for it."""
        if len(self._running) >= MAX_JOBS:
            return None
        running = [*self._running.values()]
        wanted = [number for number, waiting in enumerate(self._waiting) if waiting]
        own = [number for number in wanted if running.count(number) < PLACES[number]]
        for job_round in own or wanted:
            if own or job_round < len(TRY_SECONDS):
                request = self._waiting[job_round].popleft()
                self._running[request.job_id] = job_round
                return request, job_round
        return None

    @property
    def num_running(self) -> int:
        """Jobs of all rounds."""
        return len(self._running)
