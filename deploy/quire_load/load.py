"""Load: sends requests when they are due, and records what came back, and when.

Times are measured from when a request was *due*, not from when it was sent: where a server stalls, or `max_concurrency`
holds requests back, those that should have been sent meanwhile waited, and their times say so. (A generator that
measures from the moment of sending leaves just the bad times out: "coordinated omission", Gil Tene, "How NOT to Measure
Latency".)
In a closed loop a request is due when the one before it has ended.
"""

import asyncio
from array import array
from collections.abc import MutableSequence, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

from quire_load.arrivals import Arrivals
from quire_load.datasets import SampleRequest
from quire_load.endpoint import Endpoint, EndpointError

PAUSE_AFTER_ERROR_S = 0.5
"""Of a user in a closed loop: a server that is down refuses at once, and that must not become a busy loop."""


@dataclass(kw_only=True, slots=True)
class RequestRecord:
    """One request. Times are in seconds since the run's start, by this process' clock."""

    scheduled_s: float
    """When it was due."""
    sent_s: float = 0.0
    token_times_s: MutableSequence[float] = field(default_factory=lambda: array("d"))
    """Of each response with tokens."""
    ended_s: float = 0.0
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    is_vector: bool = False
    """Whether the answer is no tokens, but a vector."""
    slo_class: str = ""
    error_kind: str = ""
    """Empty: it was answered. Else one of `EndpointError.kind`."""
    error: str = ""

    @property
    def ttft_s(self) -> float | None:
        """Time to first token; None without one."""
        return self.token_times_s[0] - self.scheduled_s if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None without a second."""
        if self.num_output_tokens < 2 or not self.token_times_s:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.num_output_tokens - 1)

    @property
    def itls_s(self) -> list[float]:
        """Inter-token latencies: gaps between responses with tokens, each of which may hold several."""
        return [after - before for before, after in zip(self.token_times_s, self.token_times_s[1:], strict=False)]

    @property
    def e2el_s(self) -> float:
        """End-to-end latency."""
        return self.ended_s - self.scheduled_s


class Load:
    """One run.

    Args:
        endpoint: where the requests go.
        requests: what is sent.
        arrivals: when it is sent.
        timeout_s: a request that takes longer is cancelled, and a timeout; counted from when it was sent.
    """

    def __init__(
        self, endpoint: Endpoint, requests: Sequence[SampleRequest], arrivals: Arrivals, *, timeout_s: float = 600.0
    ) -> None:
        self.num_requests = len(requests)
        self.records: list[RequestRecord] = []
        """Of the requests that have ended. It only grows; other threads may copy it."""
        self.is_interrupted = False
        self.duration_s = 0.0
        """From the start to the end of the last request; known at the end."""
        self._endpoint = endpoint
        self._requests = requests
        self._arrivals = arrivals
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(arrivals.max_concurrency or len(requests) or 1)
        self._start = 0.0
        self._task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Send everything, and wait for the answers."""
        self._start = asyncio.get_running_loop().time()
        self._task = asyncio.create_task(self._closed_loop() if self._arrivals.is_closed_loop else self._open_loop())
        if self.is_interrupted:  # stopped before it began
            self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self.duration_s = max((record.ended_s for record in self.records), default=0.0)

    def stop(self) -> None:
        """Send nothing more, and cancel what runs; it does not count. To be called in the event loop."""
        self.is_interrupted = True
        if self._task is not None:
            self._task.cancel()

    async def _open_loop(self) -> None:
        offsets = self._arrivals.offsets(self.num_requests)
        running: set[asyncio.Task[None]] = set()
        try:
            for request, scheduled_s in zip(self._requests, offsets, strict=True):
                delay_s = scheduled_s - self._now()
                if delay_s > 0:
                    await asyncio.sleep(delay_s)
                task = asyncio.create_task(self._send_in_slot(request, scheduled_s))
                running.add(task)
                task.add_done_callback(running.discard)
            await asyncio.gather(*running)
        finally:
            await _cancel_all(running)

    async def _send_in_slot(self, request: SampleRequest, scheduled_s: float) -> None:
        async with self._slots:
            await self._send(request, scheduled_s)

    async def _closed_loop(self) -> None:
        requests = iter(self._requests)

        async def user() -> None:
            for request in requests:
                record = await self._send(request, self._now())
                if record.error_kind:
                    await asyncio.sleep(PAUSE_AFTER_ERROR_S)

        users = {asyncio.create_task(user()) for _ in range(self._arrivals.max_concurrency or 1)}
        try:
            await asyncio.gather(*users)
        finally:
            await _cancel_all(users)

    async def _send(self, request: SampleRequest, scheduled_s: float) -> RequestRecord:
        record = RequestRecord(scheduled_s=scheduled_s, sent_s=self._now(), slo_class=request.slo_class)
        record.ended_s = record.sent_s
        try:
            await asyncio.wait_for(self._receive(request, record), self._timeout_s)
            if not record.token_times_s and not record.is_vector:
                record.error_kind, record.error = "error", "the answer ended without a token"
        except asyncio.TimeoutError:
            record.error_kind, record.error = "timeout", f"no end within {self._timeout_s:g} s"
        except EndpointError as error:
            record.error_kind, record.error = error.kind, str(error)
        except Exception as error:  # one request's, whatever it is: the others go on, and the report tells it
            record.error_kind, record.error = "error", f"{type(error).__name__}: {error}"
        if record.error_kind:
            record.ended_s = self._now()
        self.records.append(record)
        return record

    async def _receive(self, request: SampleRequest, record: RequestRecord) -> None:
        num_tokens = 0
        async with aclosing(self._endpoint.generate(request)) as chunks:
            async for chunk in chunks:
                record.ended_s = self._now()
                num_tokens += chunk.num_new_tokens
                record.is_vector = record.is_vector or chunk.is_vector
                if chunk.num_new_tokens:
                    record.token_times_s.append(record.ended_s)
                record.num_input_tokens = chunk.num_input_tokens or record.num_input_tokens
                record.num_output_tokens = chunk.num_output_tokens or max(num_tokens, record.num_output_tokens)

    def _now(self) -> float:
        return asyncio.get_running_loop().time() - self._start


async def _cancel_all(tasks: set[asyncio.Task[None]]) -> None:
    left = list(tasks)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
