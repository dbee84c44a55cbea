"""A load of gRPC streams, and what their client itself measured of each, by its own clock."""

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from support.clients import ask
from support.serving import Server
from tritonclient.grpc import aio as grpc_aio

__all__ = ["Measured", "in_background", "send", "send_all"]

WANTED = {"stream": True, "return_finish_reason": True, "return_num_input_tokens": True,
          "return_num_output_tokens": True, "return_perf_metrics": True}  # fmt: skip
LIMIT_SECONDS = 240.0


@dataclass(slots=True)
class Measured:
    """One request, as its client saw it."""

    parameters: dict[str, Any] = field(default_factory=dict)
    """What it asked for."""
    ttft_seconds: float | None = None
    e2e_seconds: float = 0.0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    finish_reason: str = ""
    error: str = ""
    perf: dict[str, Any] = field(default_factory=dict)
    """What the server says of it, with its last response."""

    @property
    def slo_class(self) -> str:
        """The class of objectives that it asked for."""
        return str(self.parameters.get("slo_class", "default"))


async def send(client: grpc_aio.InferenceServerClient, request: dict[str, Any]) -> Measured:
    """One request on a stream of its own; `request` is what `clients.ask` takes."""
    measured = Measured(request.get("parameters", {}))

    def take(response: dict[str, list[Any]]) -> None:
        now = time.perf_counter() - start
        measured.num_tokens += sum(response["num_output_tokens"])
        if measured.ttft_seconds is None and measured.num_tokens:
            measured.ttft_seconds = now
        measured.num_prompt_tokens = response["num_input_tokens"][0]
        measured.finish_reason = response["finish_reason"][0].replace("None", "")
        measured.perf = json.loads(response["perf_metrics"][0]) or {}

    start = time.perf_counter()
    answer = await ask(client, **WANTED, **request, on_response=take)
    measured.e2e_seconds = time.perf_counter() - start
    measured.error = "" if answer.error is None else answer.message
    return measured


async def send_all(
    client: grpc_aio.InferenceServerClient, requests: Iterable[dict[str, Any]], num_streams: int
) -> list[Measured]:
    """Many requests, `num_streams` of them at the same time, until all are answered."""
    waiting = iter(requests)
    measured: list[Measured] = []

    async def stream() -> None:
        measured.extend([await send(client, request) for request in waiting])

    await asyncio.gather(*(stream() for _ in range(num_streams)))
    return measured


@contextmanager
def in_background(
    server: Server, make_request: Callable[[int], dict[str, Any]], num_streams: int
) -> Iterator[list[Measured]]:
    """A load from a thread of its own for as long as the body runs.

    Args:
        server: where it goes.
        make_request: the n-th request.
        num_streams: how many run at the same time.

    Yields:
        A list that holds everything that was sent, once the body is left and all is answered.
    """
    measured: list[Measured] = []
    done = threading.Event()

    async def work() -> None:
        async with grpc_aio.InferenceServerClient(server.grpc) as client:
            requests = map(make_request, itertools.takewhile(lambda number: not done.is_set(), itertools.count()))
            measured.extend(await asyncio.wait_for(send_all(client, requests, num_streams), LIMIT_SECONDS))

    with ThreadPoolExecutor(1, "load") as executor:
        load = executor.submit(asyncio.run, work())
        try:
            yield measured
        finally:
            done.set()
        load.result()
