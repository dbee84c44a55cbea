"""A small load on the endpoint, from this process: some streams that each send one request after the other.

It shows how the server behaves, and is not for measuring.
"""

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire_dashboard.triton_client import Triton, TritonError

__all__ = ["LoadJob", "LoadPlan", "Result", "percentile"]

MOST_STREAMS = 64
MOST_REQUESTS = 10_000
_WORDS = (  # noqa: SIM905 (a list of them would fill the page)
    "the cache holds blocks of keys and values while a request runs and its prefix may serve another one later on "
    "def class return import for in range if else value list number text line file open read write print"
).split()


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadPlan:
    """What to send."""

    model: str
    num_streams: int = 4
    """Requests that run at the same time."""
    num_requests: int = 32
    prompt_words: int = 32
    shared_words: int = 0
    """How many of them are the same in every prompt, for the prefix cache."""
    max_tokens: int = 64
    slo_class: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, most in (("num_streams", MOST_STREAMS), ("num_requests", MOST_REQUESTS)):
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be from 1 to {most}")

    def prompt(self, number: int) -> str:
        """The prompt of the n-th request."""
        shared = min(self.shared_words, self.prompt_words)
        words = random.Random(self.seed).choices(_WORDS, k=shared)
        words += random.Random(f"{self.seed} {number}").choices(_WORDS, k=self.prompt_words - shared)
        return " ".join(words)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One request, by this process' clock."""

    ttft_seconds: float | None = None
    e2e_seconds: float = 0.0
    num_tokens: int = 0
    error: str = ""


class LoadJob:
    """One load. It runs in threads of its own until it is through or stopped."""

    def __init__(self, triton: Triton, plan: LoadPlan) -> None:
        self.plan = plan
        self._triton = triton
        self._lock = threading.Lock()
        self._results: list[Result] = []
        self._next = 0
        self._start = time.monotonic()
        self._end: float | None = None
        self._stopping = threading.Event()
        self._alive = plan.num_streams
        self._threads = [
            threading.Thread(target=self._stream, name=f"quire-load-{number}", daemon=True)
            for number in range(plan.num_streams)
        ]

    def start(self) -> None:
        """Start."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Send no more requests, and cancel the running ones."""
        self._stopping.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the end."""
        for thread in self._threads:
            thread.join(timeout_s)

    @property
    def is_running(self) -> bool:
        """Whether a stream is still running."""
        return self._end is None

    @property
    def seconds(self) -> float:
        """How long it has run."""
        return (self._end or time.monotonic()) - self._start

    def results(self) -> list[Result]:
        """Of the requests that have ended."""
        with self._lock:
            return list(self._results)

    def _stream(self) -> None:
        try:
            while not self._stopping.is_set():
                with self._lock:
                    number, self._next = self._next, self._next + 1
                if number >= self.plan.num_requests:
                    return
                result = self._request(number)
                if result is not None:
                    with self._lock:
                        self._results.append(result)
                if result is not None and result.error:
                    # If the server is down, every request fails at once: that must not become a busy loop.
                    self._stopping.wait(0.5)
        finally:
            with self._lock:
                self._alive -= 1
                if self._alive == 0:
                    self._end = time.monotonic()

    def _request(self, number: int) -> Result | None:
        """None when it was stopped."""
        parameters: dict[str, Any] = {"max_tokens": self.plan.max_tokens, "ignore_eos": True}
        if self.plan.slo_class:
            parameters["slo_class"] = self.plan.slo_class
        ttft, num_tokens, last = None, 0, 0.0
        chunks = self._triton.generate(self.plan.model, self.plan.prompt(number), parameters)
        try:
            for chunk in chunks:
                num_tokens += chunk.num_output_tokens
                last = chunk.seconds
                if ttft is None and chunk.num_output_tokens:
                    ttft = chunk.seconds
                if self._stopping.is_set():
                    return None
        except TritonError as error:
            return Result(error=str(error))
        finally:
            chunks.close()
        return Result(ttft_seconds=ttft, e2e_seconds=last, num_tokens=num_tokens)


def percentile(values: Sequence[float], q: float) -> float | None:
    """The q-quantile of sorted values, interpolated linearly; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
