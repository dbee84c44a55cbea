"""TritonClient: tritonserver's gRPC, as much of it as the gateway needs."""

import itertools
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from typing import Any

import grpc
import msgspec
from quire_client import (
    Cancelled,
    ClientError,
    DeadlineExceeded,
    Disconnected,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from quire_client.errors import UNKNOWN_MODEL, error_of
from quire_client.messages import contents_of, outputs_of
from quire_client.streams import METADATA, OPTIONS, responses_of
from tritonclient.grpc import service_pb2, service_pb2_grpc

from quire_backend.openai.errors import ApiError, ModelNotFoundError, UnavailableError
from quire_backend.openai.large import run_if_large
from quire_backend.openai.triton_messages import (
    Delta,
    Prompt,
    add_prompt,
    delta_of,
    generation_request,
)

NUM_CHANNELS = 4
"""Connections: a process's requests share their windows and their thread in the server."""
_TIMEOUT_S = 5.0
"""For questions that the server answers at once, if it answers."""
_TASK_TIMEOUT_S = 60.0
"""For tokens of long texts, which wait for other conversations."""
_STATUSES: Mapping[type[ClientError], int] = {
    InvalidArgument: 400, NotFound: 404, Unavailable: 503, Disconnected: 503, Cancelled: 503, DeadlineExceeded: 504,
}  # fmt: skip
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
        self._channels = [grpc.aio.insecure_channel(url, options=OPTIONS) for _ in range(NUM_CHANNELS)]
        self._stubs = [service_pb2_grpc.GRPCInferenceServiceStub(channel) for channel in self._channels]
        self._next_stub = itertools.cycle(self._stubs)

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
            if isinstance(error_of(error), Disconnected):
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
        call = self._stubs[0].ModelStreamInfer(iter([request]), timeout=_TASK_TIMEOUT_S, metadata=METADATA)
        answer: dict[str, Any] = {}
        try:
            async for response in call:
                if response.error_message:
                    raise await self._as_raised(ModelError(400, response.error_message), model)
                for text in outputs_of(response.infer_response).get("text_output", ()):
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
        call = self._stubs[0].ModelStreamInfer(iter([request]), timeout=_TIMEOUT_S, metadata=METADATA)
        answer: Any = {}
        try:
            async for response in call:
                for text in outputs_of(response.infer_response).get("text_output", ()):
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
        call = next(self._next_stub).ModelStreamInfer(iter([request]), metadata=METADATA)
        last: Delta | None = None
        failure: ModelError | None = None
        try:
            async with aclosing(responses_of(call)) as responses:
                async for response in responses:
                    if response.error_message:
                        failure = ModelError(400, response.error_message)  # raised when the stream has ended
                    elif response.infer_response.outputs:
                        contents = contents_of(response.infer_response)
                        last = await run_if_large(sum(map(len, contents.values())), delta_of, contents)
                        yield last
            if failure is None and (last is None or not any(last.finish_reasons)):  # it was cut off
                failure = ModelError(500, "the model's answer has no end; the server's log has the cause")
        except grpc.aio.AioRpcError as error:
            failure = _model_error(error)
        if failure is not None:
            raise await self._as_raised(failure, model)

    async def _as_raised(self, failure: ModelError, model: str) -> Exception:
        if not UNKNOWN_MODEL.match(str(failure)):
            return failure
        try:
            may_come_back = model in await self._ready_models()
        except grpc.aio.AioRpcError:  # a server that drains knows no model any more
            may_come_back = True
        return UnavailableError(_AWAY) if may_come_back else ModelNotFoundError(model)


def _model_error(error: grpc.aio.AioRpcError) -> ModelError:
    failure = error_of(error)
    message = _AWAY if isinstance(failure, Disconnected) else str(failure)  # which names addresses
    return ModelError(_STATUSES.get(type(failure), 500), message)
