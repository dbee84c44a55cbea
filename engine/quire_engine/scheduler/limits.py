"""RequestLimits: finds requests that have waited too long or exceed the queue's bound, and estimates when to retry.

It costs nothing if requests have no deadline and the engine sets neither a bound on its queue nor a delay.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Collection, Mapping

from quire_engine.config import SchedulerConfig
from quire_engine.messages import EngineCoreOutput, ErrorCode, FinishReason
from quire_engine.scheduler.request import Request
from quire_engine.scheduler.request_queue import RequestQueue, priority_key

NUM_ENDS = 64
"""Ends of requests from which the rate is computed."""
SHORTEST_RETRY_SECONDS = 0.1
FIRST_RETRY_SECONDS = 1.0
"""The estimate before two requests have ended."""

_Timer = tuple[float, int, str, str]
"""(time, the request's arrival and id, value of the `ErrorCode` with which it ends at that time)"""


class RequestLimits:
    """Keeps the times at which waiting or running requests have to end, and finds those that are overdue."""

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._timers: list[_Timer] = []
        """A heap; timers of ended requests stay in for a while."""
        self._ends: deque[float] = deque(maxlen=NUM_ENDS)

    def watch(self, request: Request, requests: Mapping[str, Request]) -> None:
        """Set the timers of a new request."""
        delay, deadline = self._config.max_queue_delay_ms, request.options.deadline_ms
        if delay is None and deadline is None:
            return
        if len(self._timers) > 4 * len(requests) + 64:  # mostly of requests that have ended
            self._timers = [timer for timer in self._timers if _find(requests, timer) is not None]
            heapq.heapify(self._timers)
        for milliseconds, code in ((delay, ErrorCode.UNAVAILABLE), (deadline, ErrorCode.DEADLINE)):
            if milliseconds is not None:
                moment = request.queued_at + milliseconds / 1000
                heapq.heappush(self._timers, (moment, request.arrival, request.request_id, code.value))

    def overdue(self, requests: Mapping[str, Request]) -> list[tuple[Request, ErrorCode]]:
        """Requests that became overdue since the last call, each with the limit that it exceeded."""
        overdue: list[tuple[Request, ErrorCode]] = []
        if not self._timers:
            return overdue
        now = self._clock()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)
            request = _find(requests, timer)
            # A request that was scheduled once may be preempted and wait again: the delay does not limit that.
            code = ErrorCode(timer[3])
            if request is not None and (code is ErrorCode.DEADLINE or _may_be_rejected(request)):
                overdue.append((request, code))
        return overdue

    def excess(self, waiting: RequestQueue, waiting_for_fsm: Collection[Request]) -> list[Request]:
        """The last of the waiting requests, as many as exceed `max_queued_requests`; never one that has run before.

        Requests that wait for their grammars come after all that could run already.
        """
        limit = self._config.max_queued_requests
        if limit is None or len(waiting) + len(waiting_for_fsm) <= limit:
            return []
        new = [*waiting, *sorted(waiting_for_fsm, key=priority_key)]
        return [request for request in new if _may_be_rejected(request)][limit:]

    def has_work(self, queued: Collection[Request]) -> bool:
        """Whether `overdue` or `excess` may return any of these queued requests."""
        limit = self._config.max_queued_requests
        if limit is not None and len(queued) > limit and any(map(_may_be_rejected, queued)):
            return True
        return self.seconds_until_overdue() == 0.0

    def seconds_until_overdue(self) -> float | None:
        """Time until `overdue` may next return a request, 0 if it may now; None if no timer is set."""
        return max(self._timers[0][0] - self._clock(), 0.0) if self._timers else None

    def request_ended(self) -> None:
        """Record that a running request has ended."""
        self._ends.append(self._clock())

    def nothing_left(self) -> None:
        """Start the rate anew: the engine is idle, and the idle time says nothing about its speed."""
        self._ends.clear()

    def retry_after_seconds(self, num_queued: int) -> float:
        """Estimate the time until `num_queued + 1` requests have ended, rounded up to 0.1 s."""
        if len(self._ends) < 2:
            return FIRST_RETRY_SECONDS
        interval = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return max(math.ceil(interval * (num_queued + 1) * 10) / 10, SHORTEST_RETRY_SECONDS)

    def overdue_output(self, request: Request, code: ErrorCode, num_queued: int) -> EngineCoreOutput:
        """The output of a request that is overdue."""
        elapsed = f"{1000 * (self._clock() - request.queued_at):.0f} ms"
        if code is ErrorCode.UNAVAILABLE:
            delay = f"{self._config.max_queue_delay_ms:g}"
            why = f"waited {elapsed} without a turn (max_queue_delay_ms is {delay})"
            return unavailable(request, why, num_queued, self.retry_after_seconds(num_queued), "queue_delay")
        where = "while it waited" if request.scheduled_at is None else f"after {request.num_output_tokens} tokens"
        return EngineCoreOutput(
            request.request_id,
            finish_reason=FinishReason.ERROR,
            error=f"deadline: the request's deadline passed {where}, {elapsed} after it came",
            num_preemptions=request.num_preemptions,
            error_code=ErrorCode.DEADLINE,
        )

    def excess_output(self, request: Request, num_queued: int) -> EngineCoreOutput:
        """The output of a request that found the queue full."""
        why = f"the queue is full (max_queued_requests is {self._config.max_queued_requests})"
        return unavailable(request, why, num_queued, self.retry_after_seconds(num_queued), "queue_full")


def unavailable(request: Request, why: str, num_queued: int, retry_seconds: float, refusal: str) -> EngineCoreOutput:
    """The output of a request that is rejected for lack of capacity; `refusal` names the limit."""
    return EngineCoreOutput(
        request.request_id,
        finish_reason=FinishReason.ERROR,
        error=f"unavailable: {why}; {num_queued} requests are queued; try again in about {retry_seconds:g} s",
        error_code=ErrorCode.UNAVAILABLE,
        retry_after_seconds=retry_seconds,
        refusal=refusal,
    )


def _may_be_rejected(request: Request) -> bool:
    """Whether it was never accepted: neither scheduled by this engine, nor accepted by an earlier one that failed."""
    return request.scheduled_at is None and not request.is_replay


def _find(requests: Mapping[str, Request], timer: _Timer) -> Request | None:
    """The request that a timer belongs to, unless it has ended; a later one may have the same id."""
    _, arrival, request_id, _ = timer
    request = requests.get(request_id)
    return request if request is not None and request.arrival == arrival else None
