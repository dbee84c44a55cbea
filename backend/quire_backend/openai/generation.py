"""All prompts of one HTTP request at once, as one stream of what comes back."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from quire_backend.openai.errors import of_model
from quire_backend.openai.requests import GenerationRequest
from quire_backend.openai.triton_client import ModelError, TritonClient
from quire_backend.openai.triton_messages import Delta, Prompt

__all__ = ["generate"]

_Item = tuple[int, Delta]


def generate(
    client: TritonClient, request: GenerationRequest, *, request_id: str, traceparent: str | None
) -> AsyncGenerator[_Item, None]:
    """Each response of the model, with the number of its prompt. Closing the iterator early cancels all of it.

    Args:
        client: of the server.
        request: what is asked for.
        request_id: the client's name for it, the same for all prompts.
        traceparent: the trace that it is part of.

    Raises:
        ApiError: one of the prompts has failed; the others are cancelled.
    """
    sampling = request.sampling if traceparent is None else {"traceparent": traceparent, **request.sampling}

    async def of_prompt(number: int, prompt: Prompt) -> AsyncGenerator[_Item, None]:
        deltas = client.generate(request.model, prompt, sampling, stream=request.stream, request_id=request_id)
        try:
            async with aclosing(deltas):
                async for delta in deltas:
                    yield number, delta
        except ModelError as error:
            raise of_model(error.status, str(error), request.said, request.renamed) from None

    streams = [of_prompt(number, prompt) for number, prompt in enumerate(request.prompts)]
    return streams[0] if len(streams) == 1 else _merged(streams)


async def _merged(streams: Sequence[AsyncGenerator[_Item, None]]) -> AsyncGenerator[_Item, None]:
    """What comes from any of some streams; the end of this one, however it comes, is the end of all."""
    # Of one place: a prompt's next response is read when the one before it is taken.
    queue: asyncio.Queue[_Item | Exception | None] = asyncio.Queue(1)

    async def run(stream: AsyncGenerator[_Item, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put(item)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(run(stream)) for stream in streams]
    num_running = len(tasks)
    try:
        while num_running:
            item = await queue.get()
            if item is None:
                num_running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
