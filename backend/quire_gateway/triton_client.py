"""TritonClient: tritonserver's gRPC, as much of it as the gateway needs."""

from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from typing import Any

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
from quire_client.messages import contents_of, infer_request, outputs_of
from quire_client.pooling import Pooled, last_pooled, pooling_request
from quire_client.streams import ANSWER_S, MANY_STREAMS, Connection

from quire_gateway.errors import ApiError, ModelNotFoundError, UnavailableError
from quire_gateway.large import run_if_large
from quire_gateway.pooling import PoolingCall
from quire_gateway.triton_messages import (
    Delta,
    Prompt,
    add_prompt,
    delta_of,
    generation_request,
)

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
        self._connection = Connection(url, MANY_STREAMS)

    async def close(self) -> None:
        """Close the connections."""
        await self._connection.close()

    async def models(self) -> list[str]:
        """Names of the models that are ready and are Quire's.

        Raises:
            UnavailableError: the server is away.
        """
        try:
            return [name for name in await self._connection.ready_models() if await self._is_ours(name)]
        except ClientError:
            raise UnavailableError(_AWAY) from None

    async def _is_ours(self, name: str) -> bool:
        try:
            return await self._connection.backend_of(name) == "quire"
        except Disconnected:
            raise
        except ClientError:
            return False  # unloaded since

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
        request = infer_request(model, {}, {"task": task, **parameters})
        await run_if_large(num_bytes, add_prompt, request, prompt)
        answer: dict[str, Any] = {}
        try:
            async with aclosing(self._connection.responses(request, _TASK_TIMEOUT_S)) as responses:
                async for response in responses:
                    for text in outputs_of(response).get("text_output", ()):
                        answer = await run_if_large(len(text), msgspec.json.decode, text)
        except ClientError as error:
            raise await self._as_raised(error, model) from None
        return answer

    async def ask(self, model: str, question: str, parameters: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What a model answers to `introspect`.

        Args:
            model: its name.
            question: of a kind that needs no token, unless there are parameters.
            parameters: of an operation, with the token. It may take as long as it likes.

        Raises:
            ModelError: the model has rejected an operation, or could not do it.
            ModelNotFoundError: there is no such model.
            UnavailableError: it does not answer.
        """
        request = infer_request(model, {}, {"introspect": question, **(parameters or {})})
        answer: Any = {}
        try:
            timeout = ANSWER_S if parameters is None else None
            async with aclosing(self._connection.responses(request, timeout)) as responses:
                async for response in responses:
                    for text in outputs_of(response).get("text_output", ()):
                        answer = msgspec.json.decode(text)
        except ClientError as error:
            raised = await self._as_raised(error, model)
            if parameters is not None:
                raise raised from None
            if isinstance(error, InvalidArgument):  # it does not know the question
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
        last: Delta | None = None
        try:
            async with aclosing(self._connection.responses(request)) as responses:
                async for response in responses:
                    if response.outputs:
                        contents = contents_of(response)
                        last = await run_if_large(sum(map(len, contents.values())), delta_of, contents)
                        yield last
            if last is None or not any(last.finish_reasons):  # it was cut off
                raise ClientError("the model's answer has no end; the server's log has the cause")
        except ClientError as error:
            raise await self._as_raised(error, model) from None

    async def pool(self, call: PoolingCall, num_bytes: int, *, request_id: str, traceparent: str | None) -> Pooled:
        """Vectors of all prompts of a call. Cancelling this cancels the request.

        Args:
            call: what is asked for.
            num_bytes: of its body.
            request_id: the client's name for it.
            traceparent: the trace that it is part of.

        Raises:
            ModelError: the model has rejected it, or failed.
            ModelNotFoundError: there is no such model.
            UnavailableError: the server is away.
        """
        said = {"traceparent": traceparent, **call.parameters}
        request = await run_if_large(
            num_bytes, pooling_request, call.model, call.task, call.texts, call.pairs, said, request_id
        )
        try:
            async with aclosing(self._connection.responses(request)) as responses:
                pooled = await last_pooled(responses)
            if pooled is None:
                raise ClientError("the model's answer holds no vectors; the server's log has the cause")
        except ClientError as error:
            raise await self._as_raised(error, call.model) from None
        return pooled

    async def _as_raised(self, failure: ClientError, model: str) -> Exception:
        if not (isinstance(failure, NotFound) and failure.is_unknown_model):
            message = _AWAY if isinstance(failure, Disconnected) else str(failure)  # which names addresses
            return ModelError(_STATUSES.get(type(failure), 500), message)
        try:
            may_come_back = model in await self._connection.ready_models()
        except ClientError:  # a server that drains knows no model any more
            may_come_back = True
        return UnavailableError(_AWAY) if may_come_back else ModelNotFoundError(model)
