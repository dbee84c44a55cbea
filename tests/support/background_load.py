"""A load on one model that goes on while a test does other things, and says which requests failed."""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from support.clients import ask
from support.serving import Server, wait_until
from tritonclient.grpc import aio as grpc_aio

__all__ = ["Load"]

PAUSE_SECONDS = 0.2
"""Of a client after an error: of a server that is away it would ask for nothing else."""
REQUEST_SECONDS = 30.0
"""The deadline of a request. None is cancelled by its client: tritonserver 2.51 may wait for ever, when it stops, for a
request that was cancelled just as its answer was written."""


class Scene(Protocol):
    """Where a load runs."""

    @property
    def server(self) -> Server:
        """What it is sent to."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Where its clients run."""


def short_prompt(number: int) -> str:
    """The same for each request."""
    return "def f(x):\n    "


class Load:
    """Requests to one model in the background, for as long as the context lasts, and then until the last has ended.

    Args:
        scene: where.
        model: which one.
        num_streams: requests at a time, each followed by the next.
        per_second: instead: so many begin every second, whether or not others have ended.
        deadline_seconds: of each request.
        make_prompt: that of the n-th request.
        parameters: of each request.
    """

    def __init__(
        self, scene: Scene, model: str, num_streams: int = 1, per_second: float = 0.0,
        deadline_seconds: float = REQUEST_SECONDS, make_prompt: Callable[[int], str] = short_prompt, **parameters: Any,
    ) -> None:  # fmt: skip
        self._scene, self._model = scene, model
        self._num_streams, self._per_second = num_streams, per_second
        self._deadline_seconds, self._make_prompt = deadline_seconds, make_prompt
        self._parameters = {"max_tokens": 50, "ignore_eos": True, "temperature": 0.0, **parameters}
        self.num_begun = self.num_ended = 0
        self.errors: list[str] = []
        self._failures: list[Exception] = []
        self._is_over = False
        self._has_ended = False

    def __enter__(self) -> "Load":
        self._future = asyncio.run_coroutine_threadsafe(self._run(), self._scene.loop)
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
        self.join()

    def stop(self) -> None:
        """Send no more. What was sent goes on."""
        self._future.cancel()

    def join(self) -> None:
        """Wait until the last request has ended; raise what a request has raised."""
        if not self._future.cancelled():  # it has failed: nothing else ends it
            self._future.result()
        wait_until(lambda: self._has_ended, "the load has ended", 2 * self._deadline_seconds)
        for failure in self._failures:
            raise failure

    async def _run(self) -> None:
        live: set[asyncio.Task[None]] = set()
        async with grpc_aio.InferenceServerClient(self._scene.server.grpc) as client:
            try:
                if not self._per_second:
                    live = {asyncio.ensure_future(self._one_by_one(client)) for _ in range(self._num_streams)}
                    ended, _ = await asyncio.wait(live, return_when=asyncio.FIRST_EXCEPTION)
                    for task in ended:
                        task.result()
                while True:
                    live.add(asyncio.ensure_future(self._ask(client)))
                    await asyncio.sleep(1 / self._per_second)
            finally:
                self._is_over = True
                results = await asyncio.gather(*live, return_exceptions=True)
                self._failures = [one for one in results if isinstance(one, Exception)]
                self._has_ended = True

    async def _one_by_one(self, client: grpc_aio.InferenceServerClient) -> None:
        while not self._is_over:
            await self._ask(client)

    async def _ask(self, client: grpc_aio.InferenceServerClient) -> None:
        self.num_begun += 1
        answer = await ask(
            client, model=self._model, text_input=self._make_prompt(self.num_begun), outputs=["text_output"],
            parameters=self._parameters, timeout=int(self._deadline_seconds * 1e6),
        )  # fmt: skip
        self.num_ended += 1
        if answer.error is not None:
            self.errors.append(answer.message)
            await asyncio.sleep(PAUSE_SECONDS)
