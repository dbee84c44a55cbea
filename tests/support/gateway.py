"""The gRPC side of a tritonserver, driven by a test, and the gateway's application without a socket."""

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from quire_gateway.app import make_app
from quire_gateway.settings import GatewaySettings
from tritonclient.grpc import service_pb2, service_pb2_grpc

__all__ = ["Answer", "FakeTriton", "Gateway", "accepts", "ask", "gateway", "response", "running", "texts_of", "vectors"]


def texts_of(request: Any) -> dict[str, str]:
    """The text inputs of a request."""
    return {
        item.name: content[4:].decode()
        for item, content in zip(request.inputs, request.raw_input_contents, strict=True) if item.datatype == "BYTES"
    }  # fmt: skip


def accepts(structured_outputs: Any, text: str) -> bool:
    """Whether the engine's grammar of a request's `structured_outputs` accepts a text."""
    from quire_engine.structured_output.compile_job import _to_grammar
    from quire_engine.structured_output.compiler_messages import CompileRequest
    from quire_engine.structured_outputs_params import StructuredOutputsParams
    from xgrammar.testing import _is_grammar_accept_string

    params = StructuredOutputsParams.from_value(structured_outputs)
    grammar = _to_grammar(CompileRequest(0, params.kind, params.text, not params.disable_any_whitespace))
    return bool(_is_grammar_accept_string(grammar, text))


def response(text: str, reason: str = "None", **outputs: Any) -> Any:
    """One response of a model with one sequence, a token per character.

    Args:
        text: of the sequence.
        reason: its finish reason.
        outputs: besides those of every response: lists of ids, and others as JSON.
    """
    infer = service_pb2.ModelInferResponse()

    def add(name: str, datatype: str, content: bytes) -> None:
        infer.outputs.add(name=name, datatype=datatype, shape=[1])
        infer.raw_output_contents.append(content)

    for name, value in (("text_output", text), ("finish_reason", reason), ("perf_metrics", "null")):
        add(name, "BYTES", struct.pack("<I", len(value.encode())) + value.encode())
    add("num_input_tokens", "UINT32", struct.pack("<I", 3))
    add("num_output_tokens", "UINT32", struct.pack("<I", len(outputs.get("token_ids", text))))
    for name, value in outputs.items():
        if name.endswith("token_ids"):
            add(name, "INT32", struct.pack(f"<{len(value)}i", *value))
        else:
            said = json.dumps(value).encode()
            add(name, "BYTES", struct.pack("<I", len(said)) + said)
    return service_pb2.ModelStreamInferResponse(infer_response=infer)


def vectors(data: Any, name: str = "embeddings", **counts: list[int] | list[str]) -> Any:
    """One response of a model that gives vectors.

    Args:
        data: [rows, D].
        name: of the output.
        counts: `num_rows`, `labels` and other outputs; unset: three tokens per row.
    """
    infer = service_pb2.ModelInferResponse()
    rows = np.asarray(data, "<f4")
    infer.outputs.add(name=name, datatype="FP32", shape=rows.shape)
    infer.raw_output_contents.append(rows.tobytes())
    for output, values in ({"num_input_tokens": [3] * len(rows)} | counts).items():
        texts = [str(value).encode() for value in values]
        is_text = isinstance(values[0], str)
        infer.outputs.add(name=output, datatype="BYTES" if is_text else "UINT32", shape=[len(values)])
        infer.raw_output_contents.append(
            b"".join(struct.pack("<I", len(text)) + text for text in texts)
            if is_text
            else np.array(values, "<u4").tobytes()
        )
    return service_pb2.ModelStreamInferResponse(infer_response=infer)


class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Answers each request by `serve`, which gets the request and its context."""

    def __init__(self, serve: Callable[[Any, Any], AsyncIterator[Any]]) -> None:
        self._serve = serve
        self.chat_format: dict[str, Any] | None = {}
        """What it says when it is asked how its model writes calls and reasoning; None: it has no model."""
        self.models: dict[str, str] = {}
        """Name → backend."""
        self.is_draining = False
        self.requests: list[Any] = []
        self.num_cancelled = 0

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:  # noqa: N802
        if self.is_draining:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Server is stopping")
        index = service_pb2.RepositoryIndexResponse()
        for name in self.models:
            index.models.add(name=name, state="READY")
        return index

    async def ModelConfig(self, request: Any, context: Any) -> Any:  # noqa: N802
        answer = service_pb2.ModelConfigResponse()
        answer.config.backend = self.models[request.name]
        return answer

    async def ModelStreamInfer(self, requests: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        request = await anext(requests)
        if request.parameters["introspect"].string_param == "chat_format":
            if self.chat_format is None:
                await context.abort(grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'm' is not found")
            yield response(json.dumps(self.chat_format))
            return
        self.requests.append(request)
        try:
            async for message in self._serve(request, context):
                yield message
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


@dataclass
class Answer:
    """What an application has sent for one request."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    num_sent: int = 0

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Gateway:
    """Calls an application."""

    def __init__(self, app: Any) -> None:
        self._app = app

    def drain(self) -> None:
        """What the signal does."""
        self._app.drain()

    async def call(
        self, path: str, body: Any = None, headers: Mapping[str, str] | None = None, *,
        left: asyncio.Event | None = None, may_send: Callable[[], Awaitable[Any]] | None = None,
        answer: Answer | None = None, method: str | None = None,
    ) -> Answer:  # fmt: skip
        """One request.

        Args:
            path: of the route, and a query.
            body: JSON, or raw parts; None: a GET.
            headers: besides the content type.
            left: set when the client is gone.
            may_send: awaited before each part of the answer is taken.
            answer: filled as it comes.
            method: unset: GET or POST, by the body.
        """
        answer = answer or Answer()
        parts = body if isinstance(body, list) else [b"" if body is None else json.dumps(body).encode()]
        messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
        messages.append({"type": "http.request", "body": b"", "more_body": False})
        said = {"content-type": "application/json"} | dict(headers or {})

        async def receive() -> Any:
            if messages:
                return messages.pop(0)
            await (left or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if may_send is not None:
                await may_send()
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                answer.body += message.get("body", b"")
                answer.num_sent += 1

        scope = {
            "type": "http", "method": method or ("GET" if body is None else "POST"),
            "path": path.partition("?")[0], "query_string": path.partition("?")[2].encode(),
            "headers": [(name.encode(), value.encode()) for name, value in said.items()], "scheme": "http",
            "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1), "root_path": "", "http_version": "1.1",
        }  # fmt: skip
        await self._app(scope, receive, send)
        return answer


@asynccontextmanager
async def running(app: Any) -> AsyncIterator[Gateway]:
    """An application between its start and its end."""
    told: asyncio.Queue[Any] = asyncio.Queue()
    said: asyncio.Queue[Any] = asyncio.Queue()
    lifespan = asyncio.create_task(app({"type": "lifespan", "asgi": {}, "state": {}}, told.get, said.put))
    await told.put({"type": "lifespan.startup"})
    assert (await said.get())["type"] == "lifespan.startup.complete"
    try:
        yield Gateway(app)
    finally:
        await told.put({"type": "lifespan.shutdown"})
        await lifespan


def ask(
    path: str,
    body: Any,
    parts: Iterable[str] = ("ok",),
    chat_format: Mapping[str, Any] | None = None,
    end: str = "stop",
) -> tuple[Answer, list[Any]]:
    """The answer to one request to a model that says some text, and the requests that the server got.

    Args:
        path: of the route.
        body: of the request.
        parts: of the model's text.
        chat_format: what the model says of itself.
        end: its finish reason.
    """
    texts = list(parts)

    async def serve(request: Any, context: Any) -> AsyncIterator[Any]:
        for number, text in enumerate(texts):
            yield response(text, "None" if number < len(texts) - 1 else end)

    async def go() -> tuple[Answer, list[Any]]:
        async with gateway(serve) as (app, triton):
            triton.chat_format = dict(chat_format or {})
            return await app.call(path, body), triton.requests

    return asyncio.run(asyncio.wait_for(go(), 20))


@asynccontextmanager
async def gateway(
    serve: Callable[[Any, Any], AsyncIterator[Any]], **settings: Any
) -> AsyncIterator[tuple[Gateway, FakeTriton]]:
    """A gateway in front of a fake server."""
    triton = FakeTriton(serve)
    server = grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(triton, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with running(make_app(GatewaySettings(url=f"127.0.0.1:{port}", **settings))) as made:
            yield made, triton
    finally:
        await server.stop(0)
