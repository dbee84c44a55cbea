"""EndedRequestLog: the last requests that have ended, for operators who ask why one was slow or failed.

A ring in the memory of the server's process, so that it outlives engines that die, and ends with the model::

    number   … 411   412   413   414   415         the next one is 416
                   └─ kept: the last `capacity` ─┘
    cursor       "9f2c61aa:414": of this ring, all before 414 has been seen

It holds no text of clients unless it is told to. Labels and the messages of errors are kept: an error may quote the
parameter that was wrong.
"""

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import msgspec
from quire_engine.errors import RequestError, quote
from quire_engine.sampling_params import SamplingParams
from quire_engine.slo import SLOTargets
from quire_engine.snapshot import EndedRequest, EndedRequests
from quire_engine.stats import FinishedRequestStats, IterationStats, SchedulerStats

MAX_TEXT = 20_000
"""Characters of a prompt that are kept."""


class EndedRequestLog:
    """A `StatLogger` that keeps ended requests. Thread-safe.

    Args:
        capacity: how many; 0 keeps none.
        slo_classes: the setting `slo`.
        keep_text: whether prompts are kept, too.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        capacity: int,
        slo_classes: Mapping[str, SLOTargets],
        *,
        keep_text: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._lock = threading.Lock()
        self._ring: deque[EndedRequest] = deque(maxlen=capacity)
        self._capacity = capacity
        self._slo = {name: targets.seconds() for name, targets in slo_classes.items()}
        self._keep_text = keep_text
        self._clock = clock
        self._name = secrets.token_hex(4)
        """Of this ring: a cursor of another one is worth nothing."""
        self._since = clock()
        self._num_ended = 0

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
        """Keep the requests that ended with this step; returns at once."""
        for request in iteration_stats.finished_requests:
            self.add(request)

    def add(self, request: FinishedRequestStats) -> None:
        """Keep one; also one that was refused before it reached the engine."""
        if not self._capacity:
            return
        with self._lock:
            self._ring.append(self._entry(request))
            self._num_ended += 1

    def since(self, cursor: str = "") -> EndedRequests:
        """What is kept, or of that what has been added since an earlier answer.

        Args:
            cursor: of that answer. If it is of another ring, such as that of the model before it was loaded again,
                the answer is everything.

        Raises:
            RequestError: it is no cursor.
        """
        name, _, seen = cursor.partition(":")
        if cursor and not (name and seen.isascii() and seen.isdecimal() and len(seen) < 16):
            raise RequestError("cursor", f"cursor is {quote(cursor)}; it must be that of an earlier answer")
        with self._lock:
            first = self._num_ended - len(self._ring)
            skipped = max(int(seen) - first, 0) if name == self._name else 0
            return EndedRequests(
                cursor=f"{self._name}:{self._num_ended}",
                num_ended=self._num_ended,
                capacity=self._capacity,
                since_unix=self._since,
                slo=self._slo,
                requests=list(islice(self._ring, skipped, None)),
            )

    def _entry(self, request: FinishedRequestStats) -> EndedRequest:
        return EndedRequest(
            number=self._num_ended,
            time_unix=self._clock(),
            finish_reason=request.finish_reason,
            id=request.request_id,
            label=request.label,
            slo_class=request.slo_class or "",
            slo_verdict=request.slo_verdict or "",
            slo_cause=request.slo_cause or "",
            error=request.error or "",
            error_code=request.error_code or "",
            aborted_by=request.aborted_by or "",
            e2e_seconds=request.e2e_seconds,
            time_to_first_token_seconds=request.time_to_first_token_seconds,
            time_per_output_token_seconds=request.time_per_output_token_seconds,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_output_tokens=request.num_output_tokens,
            num_sequences=request.num_sequences,
            num_preemptions=request.num_preemptions,
            num_replays=request.num_replays,
            num_running_before=request.num_running_before,
            num_waiting_before=request.num_waiting_before,
            traceparent=request.traceparent or "",
            **{f"{phase}_seconds": seconds for phase, seconds in request.phase_seconds.items()},
            parameters={} if request.params is None else _parameters(request.params, self._keep_text),
            prompt=request.prompt[:MAX_TEXT] if self._keep_text and request.prompt is not None else None,
        )


def _parameters(params: SamplingParams, keep_text: bool) -> dict[str, Any]:
    """Those that differ from their defaults. A `cache_salt` is a secret, and how output is delivered says nothing."""
    values: dict[str, Any] = msgspec.to_builtins(params)
    return {
        name: value
        for name, value in values.items()
        if name not in ("cache_salt", "output_kind") and (keep_text or isinstance(value, bool | int | float))
    }
