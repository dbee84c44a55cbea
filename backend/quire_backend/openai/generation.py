"""All prompts of one HTTP request at once, as one stream of what comes back."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from quire_backend.openai.errors import of_model
from quire_backend.openai.requests import GenerationRequest
from quire_backend.openai.triton_client import Delta, ModelError, Prompt, TritonClient

__all__ = ["generate"]


async def generate(
    client: TritonClient, request: GenerationRequest, *, request_id: str, traceparent: str | None
) -> AsyncGenerator[tuple[int, Delta], None]:
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
    # Of one place: a prompt's next response is read when the one before it is taken.
    queue: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue(1)

    async def run(number: int, prompt: Prompt) -> None:
        deltas = client.generate(request.model, prompt, sampling, stream=request.stream, request_id=request_id)
        try:
            async with aclosing(deltas):
                async for delta in deltas:
                    await queue.put((number, delta))
            await queue.put(None)
        except ModelError as error:
            await queue.put(of_model(error.status, str(error), request.said, request.renamed))
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(run(number, prompt)) for number, prompt in enumerate(request.prompts)]
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
