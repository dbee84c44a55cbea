"""Many clients at once, some of whom read slowly, and all of whom leave in the middle: nothing of them is left."""

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

from support.gateway import Answer, FakeTriton, Gateway, gateway, response, texts_of

NUM_CLIENTS = 30
DEADLINE_S = 100
BODY: dict[str, Any] = {"model": "m", "prompt": "endless", "stream": True}


open_streams: set[Any] = set()
"""What the server has not seen the end of."""


async def serve(request: Any, context: Any) -> AsyncIterator[Any]:
    open_streams.add(context)
    context.add_done_callback(open_streams.discard)
    while texts_of(request)["text_input"] == "endless":
        yield response("x" * 10_000)  # a window is full soon
    yield response("done", "stop")


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def storm(app: Gateway, triton: FakeTriton) -> None:
    """Of the clients a third reads on for a while, a third takes two parts, and a third nothing but the head."""
    left, answers = asyncio.Event(), [Answer() for _ in range(NUM_CLIENTS)]
    reads = [asyncio.Semaphore((20, 3, 1)[i % 3]) for i in range(NUM_CLIENTS)]
    calls = [
        asyncio.create_task(app.call("/v1/completions", BODY, left=left, may_send=read.acquire, answer=answer))
        for read, answer in zip(reads, answers, strict=True)
    ]
    await until(lambda: all(answer.num_sent >= (2, 2, 0)[i % 3] and answer.status for i, answer in enumerate(answers)))
    left.set()
    await asyncio.gather(*calls)
    await until(lambda: not open_streams)
    triton.requests.clear()


def test_of_clients_that_all_vanish_nothing_is_left() -> None:
    async def go() -> None:
        async with gateway(serve) as (app, triton):
            num_objects = []
            for _ in range(3):
                num_tasks = len(asyncio.all_tasks())
                await storm(app, triton)
                answer = await app.call("/v1/completions", BODY | {"prompt": "Hi", "stream": False})
                assert answer.json["choices"][0]["text"] == "done"
                # Those that leave have a moment in which their stream may end by itself.
                await until(lambda num_tasks=num_tasks: len(asyncio.all_tasks()) <= max(num_tasks, 2))
                gc.collect()
                num_objects.append(len(gc.get_objects()))
            assert num_objects[2] - num_objects[1] < NUM_CLIENTS  # less than one for each client
            assert "quire_openai_requests_in_flight 1.0\n" in (await app.call("/metrics")).body.decode()

    asyncio.run(asyncio.wait_for(go(), DEADLINE_S))
