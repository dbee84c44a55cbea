"""A small load on the endpoint, from this process, by the generator of `quire bench serve`.

It shows how the server behaves, and is not for measuring: this process has other things to do.
"""

import asyncio
import math
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

from quire_load.arrivals import Arrivals
from quire_load.datasets import DatasetOptions, PromptMaker, make_requests, with_slo_classes
from quire_load.grpc_endpoint import GrpcEndpoint
from quire_load.load import Load, RequestRecord

MOST_STREAMS = 64
MOST_REQUESTS = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadPlan:
    """What to send."""

    model: str
    request_rate: float = 0.0
    """Requests per second, as a Poisson process; 0: each stream sends its next request when the last one has ended."""
    num_streams: int = 4
    """Requests that run at the same time; with a rate, at most."""
    num_requests: int = 32
    prompt_tokens: int = 32
    shared_tokens: int = 0
    """How many of them are the same in every prompt, for the prefix cache."""
    max_tokens: int = 64
    slo_class: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, most in (("num_streams", MOST_STREAMS), ("num_requests", MOST_REQUESTS)):
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be from 1 to {most}")

    def load(self, endpoint: GrpcEndpoint) -> Load:
        """The run. To be made in an event loop."""
        shared = min(self.shared_tokens, self.prompt_tokens - 1)
        dataset = DatasetOptions(dataset_name="random", random_prefix_len=shared, random_output_len=self.max_tokens,
                                 random_input_len=self.prompt_tokens - shared)  # fmt: skip
        requests = make_requests(dataset, PromptMaker(), self.num_requests, self.seed)
        classes = {self.slo_class: 1.0} if self.slo_class else {}
        arrivals = Arrivals(request_rate=self.request_rate or math.inf, max_concurrency=self.num_streams)
        return Load(endpoint, with_slo_classes(requests, classes, self.seed), arrivals)


class LoadJob:
    """One load. It runs in a thread of its own until it is through or stopped.

    Args:
        url: HOST:PORT of the server's gRPC.
        plan: what to send.
    """

    def __init__(self, url: str, plan: LoadPlan) -> None:
        self.plan = plan
        self._url = url
        self._lock = threading.Lock()
        self._is_stopped = False
        self._running: tuple[asyncio.AbstractEventLoop, Load] | None = None
        self._start = time.monotonic()
        self._end: float | None = None
        self._thread = threading.Thread(target=self._run, name="quire-load", daemon=True)

    def start(self) -> None:
        """Start."""
        self._thread.start()

    def stop(self) -> None:
        """Send no more requests, and cancel the running ones."""
        with self._lock:
            self._is_stopped = True
            if self._running is not None:
                loop, load = self._running
                with suppress(RuntimeError):  # it has just ended
                    loop.call_soon_threadsafe(load.stop)

    def join(self, timeout_s: float) -> None:
        """Wait for the end."""
        self._thread.join(timeout_s)

    @property
    def is_running(self) -> bool:
        """Whether a stream is still running."""
        return self._end is None

    @property
    def seconds(self) -> float:
        """How long it has run."""
        return (self._end or time.monotonic()) - self._start

    def records(self) -> list[RequestRecord]:
        """Of the requests that have ended."""
        return list(self._running[1].records) if self._running is not None else []

    def _run(self) -> None:
        try:
            asyncio.run(self._send())
        finally:
            self._end = time.monotonic()

    async def _send(self) -> None:
        endpoint = GrpcEndpoint(self._url, self.plan.model, {"ignore_eos": True})
        load = self.plan.load(endpoint)
        with self._lock:
            self._running = asyncio.get_running_loop(), load
            if self._is_stopped:
                load.stop()
        try:
            await load.run()
        finally:
            await endpoint.close()
