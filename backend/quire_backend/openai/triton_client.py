"""TritonClient: tritonserver's gRPC, as much of it as the gateway needs.

A request is a `ModelStreamInfer` of its own, whose sending side is closed at once: so the server ends it after the last
response, and each request can be cancelled, and read as slowly as its client reads, without regard to others. One
response is read ahead: what else a slow client does not take waits in HTTP/2's window, and then in tritonserver, where
the setting `max_response_bytes` bounds it.
"""

import asyncio
import itertools
import re
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any

import grpc
import msgspec
from tritonclient.grpc import service_pb2, service_pb2_grpc

from quire_backend.openai.errors import ApiError, ModelNotFoundError, UnavailableError
from quire_backend.openai.large import run_if_large
from quire_backend.openai.triton_messages import (
    Delta,
    Prompt,
    add_prompt,
    contents_of,
    delta_of,
    generation_request,
    texts_of,
)

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
_TASK_TIMEOUT_S = 60.0
"""For tokens of long texts, which wait for other conversations."""
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
    """The model has rejected a request, or could not serve it.

    Attributes:
        status: HTTP's.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


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
            return [name for name in await self._ready_models() if await self._is_ours(name)]
        except grpc.aio.AioRpcError:
            raise UnavailableError(_AWAY) from None

    async def _ready_models(self) -> list[str]:
        index = await self._stubs[0].RepositoryIndex(service_pb2.RepositoryIndexRequest(ready=True), timeout=_TIMEOUT_S)
        return sorted({model.name for model in index.models})

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
        try:
            return (await self.ask(model, "health")).get("healthy") is True
        except ApiError:
            return False

    async def run_task(
        self, model: str, task: str, prompt: Prompt, num_bytes: int, **parameters: bool
    ) -> dict[str, Any]:
        """What a model answers to a task that generates nothing.

        Args:
            model: its name.
            task: `tokenize` or `detokenize`.
            prompt: see `Prompt`.
            num_bytes: of the prompt, about.
            parameters: of the task.

        Raises:
            ModelError: the model has rejected it, or failed.
            ModelNotFoundError: there is no such model.
        """
        request = service_pb2.ModelInferRequest(model_name=model)
        request.parameters["task"].string_param = task
        for name, value in parameters.items():
            request.parameters[name].bool_param = value
        await run_if_large(num_bytes, add_prompt, request, prompt)
        call = self._stubs[0].ModelStreamInfer(iter([request]), timeout=_TASK_TIMEOUT_S, metadata=_METADATA)
        answer: dict[str, Any] = {}
        try:
            async for response in call:
                if response.error_message:
                    raise await self._as_raised(ModelError(400, response.error_message), model)
                for text in texts_of(response.infer_response):
                    answer = await run_if_large(len(text), msgspec.json.decode, text)
        except grpc.aio.AioRpcError as error:
            raise await self._as_raised(_model_error(error), model) from None
        return answer

    async def ask(self, model: str, question: str) -> dict[str, Any]:
        """What a model answers to `introspect` of a kind that needs no token.

        Raises:
            ModelNotFoundError: there is no such model.
            UnavailableError: it does not answer.
        """
        request = service_pb2.ModelInferRequest(model_name=model)
        request.parameters["introspect"].string_param = question
        call = self._stubs[0].ModelStreamInfer(iter([request]), timeout=_TIMEOUT_S, metadata=_METADATA)
        answer: Any = {}
        try:
            async for response in call:
                for text in texts_of(response.infer_response):
                    answer = msgspec.json.decode(text)
        except grpc.aio.AioRpcError as error:
            raised = await self._as_raised(_model_error(error), model)
            if isinstance(raised, ModelError) and raised.status == 400:  # it does not know the question
                return {}
            raise raised if isinstance(raised, ApiError) else UnavailableError(_AWAY) from None
        except ValueError:
            return {}
        return answer if isinstance(answer, dict) else {}

    async def generate(
        self, model: str, prompt: Prompt, sampling: Mapping[str, Any], *, stream: bool, request_id: str,
        response_id: str, outputs: Iterable[str] = (), num_bytes: int = 0,
    ) -> AsyncGenerator[Delta, None]:  # fmt: skip
        """Generate from one prompt. Closing the iterator early cancels the request.

        Args:
            model: its name.
            prompt: see `Prompt`.
            sampling: the model's sampling parameters.
            stream: many responses, or one with everything.
            request_id: the client's name for it.
            response_id: the name of the answer.
            outputs: names of outputs besides those that every answer needs.
            num_bytes: of the prompt and the parameters, about.

        Raises:
            ModelError: the model has rejected it, or failed.
            ModelNotFoundError: there is no such model.
            UnavailableError: the server is away.
        """
        request = await run_if_large(
            num_bytes, generation_request, model, prompt, sampling, stream, request_id, response_id, outputs
        )
        call = next(self._next_stub).ModelStreamInfer(iter([request]), metadata=_METADATA)
        responses = _Responses(call)
        has_ended = False
        last: Delta | None = None
        failure: ModelError | None = None
        try:
            while (response := await responses.next()) is not grpc.aio.EOF:
                if response.error_message:
                    failure = ModelError(400, response.error_message)  # raised when the stream has ended
                elif response.infer_response.outputs:
                    contents = contents_of(response.infer_response)
                    last = await run_if_large(sum(map(len, contents.values())), delta_of, contents)
                    yield last
            has_ended = True
            if failure is None and (last is None or not any(last.finish_reasons)):  # it was cut off
                failure = ModelError(500, "the model's answer has no end; the server's log has the cause")
        except grpc.aio.AioRpcError as error:
            has_ended = True
            failure = _model_error(error)
        finally:
            if not has_ended:
                self._leave(call, responses)
        if failure is not None:
            raise await self._as_raised(failure, model)

    async def _as_raised(self, failure: ModelError, model: str) -> Exception:
        if not _UNKNOWN_MODEL.match(str(failure)):
            return failure
        try:
            may_come_back = model in await self._ready_models()
        except grpc.aio.AioRpcError:  # a server that drains knows no model any more
            may_come_back = True
        return UnavailableError(_AWAY) if may_come_back else ModelNotFoundError(model)

    def _leave(self, call: Any, responses: "_Responses") -> None:
        """Cancel a call, unless it is about to end."""
        task = asyncio.create_task(_cancel_unless_it_ends(call, responses))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)


class _Responses:
    """The responses of a call, read by a task of its own, which is one response ahead.

    A read that is cancelled cancels its call, at once; so it must not be cancelled together with who waits for it.

    Args:
        call: a stream of the server's.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._response: Any = None
        """The next one, when it is there."""
        self._changed: asyncio.Future[None] | None = None
        """Of the one side that waits for the other."""
        self._failure: BaseException | None = None
        self._is_left = False
        self.reading = asyncio.create_task(self._read())

    async def next(self) -> Any:
        """The next response, or EOF.

        Raises:
            AioRpcError: the call has failed.
        """
        while self._response is None:
            if self._failure is not None:
                raise self._failure
            await self._change()
        response, self._response = self._response, None
        self._tell()
        return response

    def leave(self) -> None:
        """No more responses are taken; they are read on, for the end."""
        self._is_left = True
        self._tell()

    async def _read(self) -> None:
        response: Any = None
        try:
            while response is not grpc.aio.EOF:
                response = await self._call.read()
                while self._response is not None and not self._is_left:
                    await self._change()
                self._response = response
                self._tell()
        except Exception as error:
            self._failure = error
        except asyncio.CancelledError as error:  # so is a read whose call, or connection, we have ended
            self._failure = error
            raise
        finally:
            self._tell()

    async def _change(self) -> None:
        self._changed = self._loop.create_future()
        await self._changed

    def _tell(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)


async def _cancel_unless_it_ends(call: Any, responses: _Responses) -> None:
    responses.leave()
    await asyncio.wait({responses.reading}, timeout=_LEAVING_S)
    if not responses.reading.done():
        call.cancel()
    # Cancelled with its call.
    await asyncio.gather(responses.reading, return_exceptions=True)


# -- errors -----------------------------------------------------------------------------------------------------------


def _model_error(error: grpc.aio.AioRpcError) -> ModelError:
    message = error.details() or error.code().name
    if error.code() is grpc.StatusCode.UNAVAILABLE and _TRANSPORT.search(message):
        message = _AWAY
    return ModelError(_STATUSES.get(error.code(), 500), message)
