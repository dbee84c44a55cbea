"""All prompts of one HTTP request at once, as one stream of what comes back."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from quire_gateway.errors import of_model
from quire_gateway.requests import GenerationRequest
from quire_gateway.tokens import text_of
from quire_gateway.triton_client import ModelError, TritonClient
from quire_gateway.triton_messages import Delta, Prompt

_Item = tuple[int, Delta]


def generate(
    client: TritonClient,
    request: GenerationRequest,
    num_bytes: int,
    *,
    request_id: str,
    response_id: str,
    traceparent: str | None,
) -> AsyncGenerator[_Item, None]:
    """Each response of the model, with the number of its prompt. Closing the iterator early cancels all of it.

    Args:
        client: of the server.
        request: what is asked for.
        num_bytes: of its body.
        request_id: the client's name for it, the same for all prompts.
        response_id: the name of the answer.
        traceparent: the trace that it is part of.

    Raises:
        ApiError: one of the prompts has failed; the others are cancelled.
    """
    sampling = request.sampling if traceparent is None else {"traceparent": traceparent, **request.sampling}

    async def of_prompt(number: int, prompt: Prompt) -> AsyncGenerator[_Item, None]:
        deltas = client.generate(
            request.model, prompt, sampling,
            stream=request.stream, request_id=request_id, response_id=response_id, outputs=request.outputs,
            num_bytes=num_bytes,
        )  # fmt: skip
        try:
            async with aclosing(deltas):
                async for delta in deltas:
                    yield number, delta
        except ModelError as error:
            raise of_model(error.status, str(error), request.said, request.renamed) from None

    streams = [of_prompt(number, prompt) for number, prompt in enumerate(request.prompts)]
    deltas = streams[0] if len(streams) == 1 else _merged(streams)
    if request.is_without_output:
        deltas = _without_output(deltas)
    return _with_prompts(deltas, client, request) if "prompt_token_ids" in request.outputs else deltas


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


async def _without_output(deltas: AsyncGenerator[_Item, None]) -> AsyncGenerator[_Item, None]:
    """The same, as if the model had made no token."""
    async with aclosing(deltas):
        async for number, delta in deltas:
            yield (
                number,
                msgspec.structs.replace(
                    delta,
                    texts=[""] * len(delta.texts),
                    finish_reasons=[None if reason is None else "length" for reason in delta.finish_reasons],
                    num_output_tokens=[0] * len(delta.texts),
                    logprobs=[None if positions is None else [] for positions in delta.logprobs],
                    token_ids=None if delta.token_ids is None else [[] for _ in delta.token_ids],
                ),
            )


async def _with_prompts(
    deltas: AsyncGenerator[_Item, None], client: TritonClient, request: GenerationRequest
) -> AsyncGenerator[_Item, None]:
    """The same, with all that the model says of a prompt in the first of the prompt's deltas: with several sequences,
    it may say that after another sequence has begun.
    """
    held: dict[int, list[Delta]] = {}
    known: set[int] = set()
    async with aclosing(deltas):
        async for number, delta in deltas:
            if number in known:
                yield number, delta
                continue
            held.setdefault(number, []).append(delta)
            if delta.prompt_token_ids is not None:
                known.add(number)
                nothing = msgspec.structs.replace(delta, prompt_token_ids=None, prompt_logprobs=None)
                first, *others = [*held.pop(number)[:-1], nothing]
                said = await _prompt_of(client, request, number, delta.prompt_token_ids)
                yield number, msgspec.structs.replace(first, prompt_logprobs=delta.prompt_logprobs, **said)
                for other in others:
                    yield number, other


async def _prompt_of(
    client: TritonClient, request: GenerationRequest, number: int, token_ids: list[int]
) -> dict[str, Any]:
    """Fields of a delta that say what a prompt is."""
    said: dict[str, Any] = {"prompt_token_ids": token_ids}
    if request.echo:
        prompt = request.prompts[number]
        is_whole = isinstance(prompt, str) and "truncate_prompt_tokens" not in request.sampling
        said["prompt_text"] = prompt if is_whole else await text_of(client, request.model, token_ids)
        if "logprobs" in request.sampling:
            said["first_token"] = await text_of(client, request.model, token_ids[:1])
    return said
