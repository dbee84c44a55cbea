"""TritonClient: tritonserver's gRPC, as much of it as the gateway needs."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing, suppress
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
from quire_client.messages import contents_of, infer_request
from quire_client.pooling import Pooled, pooling_request
from quire_client.streams import ANSWER_S, MANY_STREAMS, Connection
from starlette.requests import Request

from quire_gateway.errors import ApiError, InvalidRequestError, ModelNotFoundError, UnavailableError
from quire_gateway.pooling import PoolingCall
from quire_gateway.triton_messages import (
    Delta,
    Prompt,
    delta_of,
    generation_request,
    task_request,
)
from quire_gateway.work import run_if_large

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


def client_of(request: Request) -> "TritonClient":
    """The client of the gateway that serves a request."""
    client: TritonClient = request.app.state.client
    return client


class TritonClient:
    """Talks to one tritonserver. Made and used in one event loop.

    Its calls raise ModelNotFoundError if there is no such model, UnavailableError if the server is away, and ModelError
    if the model has rejected a request, or failed.

    Args:
        url: `host:port` of its gRPC.
    """

    def __init__(self, url: str) -> None:
        self._connection = Connection(url, MANY_STREAMS)
        self._models: frozenset[str] = frozenset()
        """The served models when they were last listed."""
        self._parents: dict[str, list[str]] = {}
        """Adapter → the served models that have it, likewise."""
        self._listing: asyncio.Task[dict[str, dict[str, Any]]] | None = None

    async def close(self) -> None:
        """Close the connections."""
        await self._connection.close()

    async def models(self) -> list[str]:
        """Names of the models that are ready and are Quire's."""
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

    async def cards(self) -> dict[str, dict[str, Any]]:
        """The served models, and what each says of itself: its answer to `chat_format`; empty while it gives none."""
        if self._listing is None or self._listing.done():
            self._listing = asyncio.create_task(self._list())
        return await asyncio.shield(self._listing)  # all that wait share it

    async def _list(self) -> dict[str, dict[str, Any]]:
        names = await self.models()
        cards = dict(zip(names, await asyncio.gather(*map(self._card, names)), strict=True))
        parents: dict[str, list[str]] = {}
        for model, card in cards.items():
            for adapter in card.get("loras", ()):
                if adapter not in cards:
                    parents.setdefault(adapter, []).append(model)
        self._models, self._parents = frozenset(names), parents
        return cards

    async def _card(self, model: str) -> dict[str, Any]:
        with suppress(ApiError):
            return await self._ask(model, "chat_format")
        return {}

    async def find(self, name: str) -> tuple[str, str | None]:
        """The served model that a name means, and the adapter if it is an adapter's. An unknown name is returned as it
        is.

        Raises:
            InvalidRequestError: several models have an adapter of this name.
        """
        if name not in self._models and name not in self._parents:
            with suppress(ApiError):
                await self.cards()
        if name in self._models or name not in self._parents:
            return name, None
        model, *others = self._parents[name]
        if others:
            raise InvalidRequestError(
                "model",
                f"model is {name!r}, an adapter of {model} and of {', '.join(others)}; give one of these as the model, "
                "and the adapter as lora_name",
            )
        return model, name

    async def _with_adapter(self, name: str, parameters: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """The served model that a name means, and a request's parameters with the adapter."""
        model, adapter = await self.find(name)
        if adapter is None:
            return model, parameters
        if parameters.get("lora_name", adapter) != adapter:
            raise InvalidRequestError(
                "lora_name", f"lora_name is given with the model {name!r}, which is an adapter itself; leave it out"
            )
        return model, {**parameters, "lora_name": adapter}

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
        """
        served, _ = await self.find(model)
        request = await run_if_large(num_bytes, task_request, served, prompt, task, parameters)
        try:
            text = await self._connection.text(request, _TASK_TIMEOUT_S)
        except ClientError as error:
            raise await self._as_raised(error, model) from None
        answer: dict[str, Any] = await run_if_large(len(text), msgspec.json.decode, text)
        return answer

    async def ask(self, model: str, question: str) -> dict[str, Any]:
        """What a model answers to `introspect`, of a kind that needs no token; empty: it does not know the question."""
        return await self._ask((await self.find(model))[0], question)

    async def _ask(self, model: str, question: str) -> dict[str, Any]:
        try:
            answer = await self._introspect(model, {"introspect": question}, ANSWER_S)
        except InvalidArgument:
            return {}
        except ClientError as error:
            raised = await self._as_raised(error, model)
            raise raised if isinstance(raised, ApiError) else UnavailableError(_AWAY) from None
        return answer if isinstance(answer, dict) else {}

    async def _introspect(self, model: str, parameters: Mapping[str, Any], timeout: float | None = None) -> Any:
        text = await self._connection.text(infer_request(model, {}, parameters), timeout)
        try:
            return msgspec.json.decode(text)
        except ValueError:
            return {}

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
        """
        served, sampling = await self._with_adapter(model, sampling)
        request = await run_if_large(
            num_bytes, generation_request, served, prompt, sampling, stream, request_id, response_id, outputs
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
        """
        served, said = await self._with_adapter(call.model, {"traceparent": traceparent, **call.parameters})
        request = await run_if_large(
            num_bytes, pooling_request, served, call.task, call.texts, call.pairs, said, request_id
        )
        try:
            pooled = await self._connection.pooled(request)
            if pooled is None:
                raise ClientError("the model's answer holds no vectors; the server's log has the cause")
        except ClientError as error:
            raise await self._as_raised(error, call.model) from None
        return pooled

    async def operate(self, model: str, action: str, parameters: Mapping[str, Any], token: str) -> Any:
        """Have a model do what an operator asks for, and return its answer. It takes as long as it takes.

        Args:
            model: a served one.
            action: as of `introspect`.
            parameters: of the action.
            token: the model's `introspection_token`.
        """
        proof = {"introspection_token": token} if token else {}
        try:
            answer = await self._introspect(model, {"introspect": action, **proof, **parameters})
        except ClientError as error:
            raise await self._as_raised(error, model) from None
        self._models, self._parents, self._listing = frozenset(), {}, None  # what they are is asked again
        return answer

    async def _as_raised(self, failure: ClientError, model: str) -> Exception:
        if isinstance(failure, NotFound) and self._parents.pop(model, []):  # an adapter that was unloaded since
            return ModelNotFoundError(model)
        if not (isinstance(failure, NotFound) and failure.is_unknown_model):
            message = _AWAY if isinstance(failure, Disconnected) else str(failure)  # which names addresses
            return ModelError(_STATUSES.get(type(failure), 500), message)
        try:
            may_come_back = model in await self._connection.ready_models()
        except ClientError:  # a server that drains knows no model any more
            may_come_back = True
        return UnavailableError(_AWAY) if may_come_back else ModelNotFoundError(model)
