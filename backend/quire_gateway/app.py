"""The routes."""

import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec
from prometheus_client import generate_latest
from quire_engine.encoders.embeds import ImageEmbeds
from quire_engine.encoders.video import Video
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from quire_gateway.answers import Answer, CompletionAnswer
from quire_gateway.chat import chat_request
from quire_gateway.chat_answers import ChatAnswer
from quire_gateway.chat_format import ChatFormats
from quire_gateway.errors import ApiError, of_model
from quire_gateway.fields import Fields, parse_object
from quire_gateway.generation import generate
from quire_gateway.limits import RequestLimits
from quire_gateway.media import Media
from quire_gateway.messages_answer import MessagesAnswer
from quire_gateway.messages_request import parse_messages
from quire_gateway.middleware import Gatekeeper, charge_of, error_response, request_id_of
from quire_gateway.models import health, list_models, show_model, show_version
from quire_gateway.operations import load_lora_adapter, operate, unload_lora_adapter, update_weights
from quire_gateway.pooling import (
    PoolingCall,
    parse_classify,
    parse_embeddings,
    parse_pooling,
    parse_rerank,
    parse_score,
)
from quire_gateway.requests import GenerationRequest, parse_completion
from quire_gateway.responses_answer import ResponsesAnswer
from quire_gateway.responses_request import parse_responses
from quire_gateway.settings import GatewaySettings
from quire_gateway.tokens import count_tokens, detokenize, tokenize
from quire_gateway.triton_client import ModelError, TritonClient, client_of
from quire_gateway.triton_messages import Delta
from quire_gateway.work import ClientLeftError, run_if_large, unless_client_leaves

_JSON = "application/json"
_Deltas = AsyncGenerator[tuple[int, Delta], None]
_T = TypeVar("_T")


def make_app(settings: GatewaySettings, make_client: Callable[[str], TritonClient] = TritonClient) -> Gatekeeper:
    """The gateway as an ASGI application.

    Args:
        settings: what it is in front of, and whom it lets in.
        make_client: makes the server's client, in the event loop.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        client = app.state.client = make_client(settings.url)
        app.state.chat_formats = ChatFormats(client.ask)
        app.state.limits = settings.limits
        app.state.ignored_fields = settings.ignored_fields
        app.state.media = Media(settings.allowed_media_domains, settings.limits.max_body_bytes)
        app.state.first_seen = {}
        yield
        await client.close()

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(gatekeeper.registry), media_type="text/plain; version=0.0.4")

    # Routes with GET take HEAD too.
    routes = [
        Route("/v1/models", list_models),
        Route("/v1/completions", _completions, methods=["POST"]),
        Route("/v1/chat/completions", _chat_completions, methods=["POST"]),
        Route("/v1/responses", _responses, methods=["POST"]),
        Route("/v1/messages", _messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", _count_tokens, methods=["POST"]),
        *(Route(path, partial(_pool, parse), methods=["POST"]) for path, parse in _POOLING.items()),
        Route("/v1/load_lora_adapter", partial(_operate, load_lora_adapter), methods=["POST"]),
        Route("/v1/unload_lora_adapter", partial(_operate, unload_lora_adapter), methods=["POST"]),
        Route("/tokenize", _tokenize, methods=["POST"]),
        Route("/detokenize", _detokenize, methods=["POST"]),
        *(Route(f"/{name}", operate, methods=["POST"]) for name in ("sleep", "wake_up", "reset_prefix_cache")),
        Route("/is_sleeping", operate),
        Route("/update_weights", partial(_operate, update_weights), methods=["POST"]),
        Route("/health", health),
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/version", show_version),
        Route("/metrics", metrics),
    ]
    handlers = {
        ApiError: _on_api_error, HTTPException: _on_http_error, ClientLeftError: _on_client_left,
        ClientDisconnect: _on_client_left, Exception: _on_fault,
    }  # fmt: skip
    one_model = Route("/v1/models/{model:path}", show_model)
    app = Starlette(routes=[*routes, one_model], exception_handlers=handlers, lifespan=lifespan)
    app.router.redirect_slashes = False
    gatekeeper = Gatekeeper(app, settings, {route.path for route in routes})
    return gatekeeper


# -- what serves ------------------------------------------------------------------------------------------------------


async def _tokenize(request: Request) -> Response:
    num_bytes, fields = await _fields(request)
    work = tokenize(client_of(request), fields, num_bytes, request.app.state.media)
    return await _json(num_bytes, await unless_client_leaves(request.receive, work))


async def _detokenize(request: Request) -> Response:
    num_bytes, fields = await _fields(request)
    work = detokenize(client_of(request), fields, num_bytes)
    return await _json(num_bytes, await unless_client_leaves(request.receive, work))


async def _operate(work: Callable[[Request, Fields], Awaitable[Response]], request: Request) -> Response:
    """What only operators may ask for."""
    body = await _body(request)
    return await work(request, await run_if_large(len(body), parse_object, body))


async def _pool(parse: Callable[[Fields], PoolingCall], request: Request) -> Response:
    """Embeddings, scores or classes."""
    num_bytes, call = await _read(request, parse)
    work = client_of(request).pool(
        call, num_bytes, request_id=request_id_of(request.scope), traceparent=request.headers.get("traceparent")
    )
    try:
        pooled = await unless_client_leaves(request.receive, work)
    except ModelError as error:
        raise of_model(error.status, str(error), call.said, call.renamed) from None
    if (charge := charge_of(request.scope)) is not None:
        charge(sum(pooled.num_prompt_tokens))
    num_bytes += _JSON_BYTES_PER_NUMBER * pooled.data.size
    return await _json(num_bytes, await run_if_large(num_bytes, call.render, pooled))


_POOLING: dict[str, Callable[[Fields], PoolingCall]] = {
    "/v1/embeddings": parse_embeddings,
    "/rerank": parse_rerank,
    "/v1/rerank": parse_rerank,
    "/v2/rerank": parse_rerank,
    "/score": parse_score,
    "/v1/score": parse_score,
    "/classify": parse_classify,
    "/pooling": parse_pooling,
}
"""Route → what reads its body."""
_JSON_BYTES_PER_NUMBER = 22


# -- what generates ---------------------------------------------------------------------------------------------------


async def _completions(request: Request) -> Response:
    num_bytes, asked = await _read(request, parse_completion)
    return await _generate(request, num_bytes, asked, CompletionAnswer(asked, f"cmpl-{secrets.token_hex(12)}"))


async def _chat_completions(request: Request) -> Response:
    num_bytes, asked = await _read(request, chat_request)
    formats: ChatFormats = request.app.state.chat_formats
    asked, make_parser = (await formats.of(asked.model)).read(asked)
    answer = ChatAnswer(asked, f"chatcmpl-{secrets.token_hex(12)}", make_parser)
    return await _generate(request, num_bytes, asked, answer)


async def _responses(request: Request) -> Response:
    num_bytes, asked = await _read(request, parse_responses)
    formats: ChatFormats = request.app.state.chat_formats
    chat_format = await formats.of(asked.model)
    asked, make_parser = chat_format.read(asked)
    defaults = {name: value for name, value in chat_format.sampling.items() if asked.sampling.get(name) is None}
    asked = replace(asked, echoed=asked.echoed | defaults)
    answer = ResponsesAnswer(asked, f"resp_{secrets.token_hex(12)}", make_parser)
    return await _generate(request, num_bytes, asked, answer)


async def _messages(request: Request) -> Response:
    num_bytes, asked = await _read(request, parse_messages)
    formats: ChatFormats = request.app.state.chat_formats
    asked, make_parser = (await formats.of(asked.model)).read(asked)
    name, request_id = f"msg_{secrets.token_hex(12)}", request_id_of(request.scope)
    return await _generate(request, num_bytes, asked, MessagesAnswer(asked, name, make_parser, request_id))


async def _count_tokens(request: Request) -> Response:
    num_bytes, asked = await _read(request, partial(parse_messages, is_counted=True))
    num_bytes, counted = await _with_media(request, num_bytes, asked)
    number = await unless_client_leaves(request.receive, count_tokens(client_of(request), counted, num_bytes))
    return await _json(0, {"input_tokens": number})


async def _body(request: Request) -> bytes:
    """The body, which must be JSON: a page of another site can have a browser send anything else."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _JSON:
        raise ApiError(415, f"the content type must be {_JSON}")
    return await request.body()


async def _fields(request: Request) -> tuple[int, Fields]:
    """The size of the body, and its fields, with the model if it is left out and there is only one."""
    body = await _body(request)
    fields = await run_if_large(len(body), parse_object, body)
    for name in request.app.state.ignored_fields:
        fields.take(name)
    if "model" not in fields.rest() and len(names := await client_of(request).models()) == 1:
        fields.provide("model", names[0])
    return len(body), fields


async def _read(request: Request, parse: Callable[[Fields], _T]) -> tuple[int, _T]:
    """The size of the body, and what is asked for in it."""
    num_bytes, fields = await _fields(request)
    return num_bytes, await run_if_large(num_bytes, parse, fields)


async def _json(num_bytes: int, value: object) -> Response:
    return Response(await run_if_large(num_bytes, msgspec.json.encode, value), media_type=_JSON)


async def _generate(request: Request, num_bytes: int, asked: GenerationRequest, answer: Answer) -> Response:
    limits: RequestLimits = request.app.state.limits
    limits.check(asked)
    num_bytes, asked = await _with_media(request, num_bytes, asked)
    deltas = generate(
        client_of(request), asked, num_bytes,
        request_id=request_id_of(request.scope), response_id=answer.answer_id,
        traceparent=request.headers.get("traceparent"),
    )  # fmt: skip
    if (charge := charge_of(request.scope)) is not None:
        deltas = _charged(deltas, charge)
    if not asked.stream:
        collected = await unless_client_leaves(request.receive, _collect(deltas))
        num_bytes += sum(delta.num_bytes for _, delta in collected)
        return await _json(num_bytes, await run_if_large(num_bytes, answer.whole, collected))
    # What fails before the first text has its own status.
    first = await unless_client_leaves(request.receive, anext(deltas))
    return _EventStream(num_bytes, first, deltas, answer)


async def _with_media(request: Request, num_bytes: int, asked: GenerationRequest) -> tuple[int, GenerationRequest]:
    """The same, with the images that it names by URL."""
    prompt = asked.prompts[0]
    if not isinstance(prompt, Mapping) or "images" not in prompt:
        return num_bytes, asked
    media: Media = request.app.state.media
    param = asked.renamed.get("messages", "messages")
    prompt = await unless_client_leaves(request.receive, media.fetch(prompt, param))
    sizes = (
        image.num_bytes if isinstance(image, Video | ImageEmbeds) else len(image) for image in prompt["images"]
    )  # fmt: skip
    return num_bytes + sum(sizes), replace(asked, prompts=[prompt])


async def _charged(deltas: _Deltas, charge: Callable[[int], None]) -> _Deltas:
    """The same, while the tokens of prompts and answers are counted."""
    counted: set[int] = set()
    async with aclosing(deltas):
        async for number, delta in deltas:
            num_prompt_tokens = 0 if number in counted else delta.num_prompt_tokens
            counted.add(number)
            charge(num_prompt_tokens + sum(delta.num_output_tokens))
            yield number, delta


async def _collect(deltas: _Deltas) -> list[tuple[int, Delta]]:
    async with aclosing(deltas):
        return [item async for item in deltas]


class _EventStream(Response):
    """Server-sent events. The next response of the model is read when the client has taken the one before it."""

    def __init__(self, num_bytes: int, first: tuple[int, Delta], deltas: _Deltas, answer: Answer) -> None:
        super().__init__(headers={"cache-control": "no-store"}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._num_bytes = num_bytes
        """Of the request, parts of which the first and the last events may repeat."""
        self._first = first
        self._deltas = deltas
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientLeftError):
            await unless_client_leaves(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._deltas):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                num_bytes = self._num_bytes + self._first[1].num_bytes
                await self._send_events(send, num_bytes, self._answer.chunks(*self._first))
                async for number, delta in self._deltas:
                    num_bytes += delta.num_bytes
                    await self._send_events(send, delta.num_bytes, self._answer.chunks(number, delta))
                await self._send_events(send, num_bytes, self._answer.last_chunks())
            except ApiError as error:
                await self._send_events(send, num_bytes, self._answer.failure(error))
            await send({"type": "http.response.body", "body": self._answer.ending})

    async def _send_events(self, send: Send, num_bytes: int, events: Iterable[dict[str, Any]]) -> None:
        """Send some events, which are made here, and are about as large as what they are made of."""
        if body := await run_if_large(num_bytes, lambda: b"".join(map(self._answer.frame, events))):
            await send({"type": "http.response.body", "body": body, "more_body": True})


# -- the rest ---------------------------------------------------------------------------------------------------------


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error, request.scope)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """What Starlette itself finds: no such route, another method."""
    assert isinstance(error, HTTPException)
    return error_response(ApiError(error.status_code, error.detail), request.scope)


async def _on_fault(request: Request, error: Exception) -> Response:
    """The cause is in the log."""
    fault = ApiError(500, "the gateway failed at this request; its log has the cause")
    return error_response(fault, request.scope)


async def _on_client_left(_: Request, error: Exception) -> Response:
    return Response(status_code=499)  # it is not sent: the client has left
