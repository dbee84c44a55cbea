"""EndedLog: one model's ended requests, as far as this dashboard has heard of them.

Each look asks only for what has ended since the last one. What was heard outlives the server that said it, so that an
operator can still see what ended before it died.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from quire_client import ClientError, EndedAnswer, EndedRequest


@dataclass(frozen=True, slots=True)
class EndedSeen:
    """What is known at a look. The mapping stays the same until something has ended."""

    requests: Mapping[str, EndedRequest] = field(default_factory=dict)
    """By a name that stays theirs, the latest first."""
    answer: EndedAnswer | None = None
    """The last one, of which the requests are what was new; None: there was none yet."""
    error: str = ""
    """Why the last look brought nothing."""
    age_s: float = 0.0
    """Of the last answer."""


class EndedLog:
    """Keeps as many as the model does. Thread-safe.

    Args:
        ask: for what has ended since a cursor; raises ClientError.
        clock: seconds, monotonic.
    """

    def __init__(self, ask: Callable[[str], EndedAnswer], clock: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._clock = clock
        self._lock = threading.Lock()
        self._requests: Mapping[str, EndedRequest] = {}
        self._answer: EndedAnswer | None = None
        self._error = ""
        self._asked_at: float | None = None
        self._answered_at = 0.0

    def look(self, age_s: float) -> EndedSeen:
        """What is known; asks the model if the last look is older than `age_s`."""
        with self._lock:
            now = self._clock()
            if self._asked_at is None or now - self._asked_at >= age_s:
                self._asked_at = now
                self._refresh(now)
            return EndedSeen(self._requests, self._answer, self._error, now - self._answered_at)

    def _refresh(self, now: float) -> None:
        try:
            answer = self._ask("" if self._answer is None else self._answer.cursor)
        except ClientError as error:
            self._error = str(error)
            return
        self._answer, self._answered_at, self._error = answer, now, ""
        if answer.requests:
            # A model that was loaded again, or another instance of it, tells of all that it keeps.
            found = {**self._requests, **{f"{answer.ring}:{one.number}": one for one in answer.requests}}
            latest = sorted(found.items(), key=lambda item: -item[1].time_unix)
            self._requests = dict(latest[: max(answer.capacity, 1)])
