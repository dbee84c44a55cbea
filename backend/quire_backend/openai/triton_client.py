"""TritonClient: tritonserver's gRPC, as much of it as the gateway needs.

A request is a `ModelStreamInfer` of its own, whose sending side is closed at once: so the server ends it after the last
response, and each request can be cancelled, and read as slowly as its client reads, without regard to others. Nothing
is read ahead: what a slow client does not take waits in HTTP/2's window, and then in tritonserver, where the setting
`max_response_bytes` bounds it.
"""

import array
import asyncio
import contextlib
import itertools
import json
import re
import struct
import sys
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from quire_backend.openai.errors import ModelNotFoundError, UnavailableError

__all__ = ["Delta", "ModelError", "Prompt", "TritonClient"]

Prompt = str | list[int] | Mapping[str, Any]
"""Text, token ids, or a conversation: the model's input `messages` as an object."""

NUM_CHANNELS = 4
"""Connections: a process's requests share their windows and their thread in the server."""
_OPTIONS = [
    ("grpc.max_receive_message_length", -1),  # the server bounds it: see max_response_bytes
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # or all channels would share one connection
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),  # a server that is started again is found within a second
]
_METADATA = (("triton_grpc_error", "true"),)
"""Has the server end a stream that failed with the error's status, and not with its text alone."""
_TIMEOUT_S = 5.0
"""For questions that the server answers at once, if it answers."""
_LEAVING_S = 0.05
"""tritonserver 2.51 never releases a request that is cancelled just as its stream ends; one that is about to may."""
_STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.CANCELLED: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
_TRANSPORT = re.compile(r"failed to connect|Socket closed|Connection (reset|refused)|ipv[46]:|DNS|GOAWAY|Broken pipe")
"""In what gRPC itself says; it names addresses, which clients need not know."""
_UNKNOWN_MODEL = re.compile(r"Request for unknown model: .*(not found|no available versions)")
_AWAY = "the server does not answer; try again later"


class ModelError(Exception):
    """The model has refused a request, or could not serve it.

    Attributes:
        status: HTTP's.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """One response of the model. Lists have one entry per sequence."""

    texts: list[str]
    finish_reasons: list[str | None]
    num_output_tokens: list[int]
    num_prompt_tokens: int
    num_cached_tokens: int | None
    """Of the prompt; known at the end, and if the model tells it."""
    logprobs: list[list[dict[str, Any]] | None]
    """Per new token: token id → log-probability, the sampled token's first."""
    prompt_logprobs: list[dict[str, Any] | None] | None


class TritonClient:
    """Talks to one tritonserver. Made and used in one event loop.

    Args:
        url: `host:port` of its gRPC.
    """

    def __init__(self, url: str) -> None:
        self._channels = [grpc.aio.insecure_channel(url, options=_OPTIONS) for _ in range(NUM_CHANNELS)]
        self._stubs = [service_pb2_grpc.GRPCInferenceServiceStub(channel) for channel in self._channels]
        self._next_stub = itertools.cycle(self._stubs)
        self._leaving: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Close the connections."""
        for channel in self._channels:
            await channel.close()

    async def models(self) -> list[str]:
        """Names of the models that are ready and are Quire's.

        Raises:
            UnavailableError: the server is away.
        """
        try:
            index = await self._stubs[0].RepositoryIndex(
                service_pb2.RepositoryIndexRequest(ready=True), timeout=_TIMEOUT_S
            )
            names = sorted({model.name for model in index.models})
            return [name for name in names if await self._is_ours(name)]
        except grpc.aio.AioRpcError:
            raise UnavailableError(_AWAY) from None

    async def _is_ours(self, name: str) -> bool:
        try:
            answer = await self._stubs[0].ModelConfig(service_pb2.ModelConfigRequest(name=name), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE and _TRANSPORT.search(error.details() or ""):
                raise
            return False  # unloaded since
        return bool(answer.config.backend == "quire")

    async def is_healthy(self, model: str) -> bool:
        """Whether a model's engine runs. The server alone does not know: to it, a model is ready while its engine is
        started again.
        """
        return (await self.ask(model, "health")).get("healthy") is True

    async def ask(self, model: str, question: str) -> dict[str, Any]:
        """What a model answers to `introspect` of a kind that needs no token; empty if it does not answer."""
        request = service_pb2.ModelInferRequest(model_name=model)
        request.parameters["introspect"].string_param = question
        call = self._stubs[0].ModelStreamInfer(iter([request]), timeout=_TIMEOUT_S, metadata=_METADATA)
        answer: Any = {}
        try:
            async for response in call:
                for text in _outputs(response.infer_response).get("text_output", []):
                    answer = json.loads(text)
        except (grpc.aio.AioRpcError, ValueError):
            return {}
        return answer if isinstance(answer, dict) else {}

    async def generate(
        self, model: str, prompt: Prompt, sampling: Mapping[str, Any], *, stream: bool, request_id: str
    ) -> AsyncGenerator[Delta, None]:
        """Generate from one prompt. Closing the iterator early cancels the request.

        Args:
            model: its name.
            prompt: see `Prompt`.
            sampling: the model's sampling parameters.
            stream: many responses, or one with everything.
            request_id: the client's name for it.

        Raises:
            ModelError: the model has refused it, or failed.
            ModelNotFoundError: there is no such model.
            UnavailableError: the server is away.
        """
        request = _request(model, prompt, sampling, stream, request_id)
        call = next(self._next_stub).ModelStreamInfer(iter([request]), metadata=_METADATA)
        reading: asyncio.Task[Any] | None = None
        has_ended = False
        refused: ModelError | None = None
        try:
            while True:
                # Shielded: a read that is cancelled cancels its call, at once.
                reading = asyncio.ensure_future(call.read())
                response = await asyncio.shield(reading)
                if response is grpc.aio.EOF:
                    has_ended = True
                    break
                if response.error_message:
                    refused = ModelError(400, response.error_message)  # raised when the stream has ended
                elif response.infer_response.outputs:
                    yield _delta(_outputs(response.infer_response))
        except grpc.aio.AioRpcError as error:
            has_ended = True
            refused = _refusal(error)
        finally:
            if not has_ended:
                self._leave(call, reading)
        if refused is None:
            return
        if _UNKNOWN_MODEL.match(str(refused)):
            raise ModelNotFoundError(model)
        raise refused

    def _leave(self, call: Any, reading: "asyncio.Task[Any] | None") -> None:
        """Cancel a call, unless it is about to end."""
        task = asyncio.create_task(_cancel_unless_it_ends(call, reading))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)


async def _cancel_unless_it_ends(call: Any, reading: "asyncio.Task[Any] | None") -> None:
    async def read_on() -> None:
        if reading is not None and await asyncio.shield(reading) is grpc.aio.EOF:
            return
        while await asyncio.shield(asyncio.ensure_future(call.read())) is not grpc.aio.EOF:
            pass

    try:
        await asyncio.wait_for(read_on(), _LEAVING_S)
    except asyncio.TimeoutError:
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await call.code()
    except (grpc.aio.AioRpcError, asyncio.CancelledError):
        pass


# -- messages ---------------------------------------------------------------------------------------------------------


def _refusal(error: grpc.aio.AioRpcError) -> ModelError:
    message = error.details() or error.code().name
    if error.code() is grpc.StatusCode.UNAVAILABLE and _TRANSPORT.search(message):
        message = _AWAY
    return ModelError(_STATUSES.get(error.code(), 500), message)


def _request(model: str, prompt: Prompt, sampling: Mapping[str, Any], stream: bool, request_id: str) -> Any:
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    if isinstance(prompt, str):
        _add_text(request, "text_input", prompt)
    elif isinstance(prompt, Mapping):
        _add_text(request, "messages", json.dumps(prompt, ensure_ascii=False))
    else:
        ids = array.array("i", prompt)
        if sys.byteorder == "big":
            ids.byteswap()
        _add(request, "input_ids", "INT32", len(ids), ids.tobytes())
    _add_text(request, "sampling_parameters", json.dumps(sampling, ensure_ascii=False))
    flags = ["exclude_input_in_output", "return_finish_reason", "return_num_input_tokens", "return_num_output_tokens",
             "return_perf_metrics"]  # fmt: skip
    flags += ["stream"] if stream else []
    flags += ["return_logprobs"] if "logprobs" in sampling else []
    flags += ["return_prompt_logprobs"] if "prompt_logprobs" in sampling else []
    for name in flags:
        _add(request, name, "BOOL", 1, b"\1")
    return request


def _add_text(request: Any, name: str, text: str) -> None:
    content = text.encode()
    _add(request, name, "BYTES", 1, struct.pack("<I", len(content)) + content)


def _add(request: Any, name: str, datatype: str, size: int, content: bytes) -> None:
    request.inputs.add(name=name, datatype=datatype, shape=[size])
    request.raw_input_contents.append(content)


def _outputs(response: Any) -> dict[str, list[Any]]:
    """Values of each output of a response."""
    return {
        output.name: _texts(content) if output.datatype == "BYTES" else _numbers(content)
        for output, content in zip(response.outputs, response.raw_output_contents, strict=True)
    }


def _texts(content: bytes) -> list[str]:
    texts, position = [], 0
    while position < len(content):
        (size,) = struct.unpack_from("<I", content, position)
        position += 4 + size
        texts.append(content[position - size : position].decode())
    return texts


def _numbers(content: bytes) -> list[int]:
    """All outputs of numbers that are asked for are UINT32."""
    return list(struct.unpack(f"<{len(content) // 4}I", content))


def _delta(outputs: Mapping[str, list[Any]]) -> Delta:
    metrics = json.loads(outputs["perf_metrics"][0]) or {}
    texts = outputs["text_output"]
    logprobs = [json.loads(text) for text in outputs["logprobs"]] if "logprobs" in outputs else [None] * len(texts)
    return Delta(
        texts=texts,
        finish_reasons=[None if reason == "None" else reason for reason in outputs["finish_reason"]],
        num_output_tokens=outputs["num_output_tokens"],
        num_prompt_tokens=outputs["num_input_tokens"][0],
        num_cached_tokens=metrics.get("num_cached_tokens"),
        logprobs=logprobs,
        prompt_logprobs=json.loads(outputs["prompt_logprobs"][0]) if "prompt_logprobs" in outputs else None,
    )
