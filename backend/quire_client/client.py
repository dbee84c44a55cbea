"""AsyncClient and Client: generate with a model, and ask and tell it what operators do."""

import asyncio
import json
import os
import queue
import threading
import time
from collections.abc import AsyncGenerator, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import grpc
import numpy as np
import numpy.typing as npt
from tritonclient.grpc import service_pb2, service_pb2_grpc

from quire_client.ended import EndedAnswer
from quire_client.errors import Cancelled, ClientError, DeadlineExceeded, Disconnected, InvalidArgument, error_of
from quire_client.messages import Value, infer_request, is_final, outputs_of
from quire_client.snapshot import Snapshot
from quire_client.streams import METADATA, OPTIONS, responses_of

Prompt = str | list[int] | list[dict[str, str]] | list[dict[str, Any]] | npt.NDArray[np.float32]
"""Text, token ids, a conversation of `{"role": …, "content": …}`, or hidden states, [tokens, E]."""
TOKEN_VARIABLE = "QUIRE_INTROSPECTION_TOKEN"
_T = TypeVar("_T")
_ANSWER_S = 5.0
"""For questions that a model answers at once, if it answers."""
_LIVE_S = 2.0
_FLAGS = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens", "return_perf_metrics",
          "exclude_input_in_output")  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """One response of a stream, or a whole answer."""

    texts: Sequence[str] = ()
    """What is new of each sequence; one, unless `n` says otherwise."""
    finish_reasons: Sequence[str] = ()
    """`stop`, `length` or others; empty of a sequence that goes on."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    """In this response."""
    seconds: float = 0.0
    """Since the request was sent, by this process' clock."""
    is_final: bool = False
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """The server's own timings, with the last response."""

    @property
    def text(self) -> str:
        """Of the first sequence."""
        return self.texts[0] if self.texts else ""

    @property
    def finish_reason(self) -> str:
        """Of the first sequence."""
        return self.finish_reasons[0] if self.finish_reasons else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaled:
    """What has become of a model's replicas."""

    replicas: int
    before: int
    of_other_hosts: int | None = None
    """None: all are on the server's host."""


class AsyncClient:
    """Talks to one tritonserver. Made and used in one event loop; connects when it is first used, and again by itself.

    Args:
        url: HOST:PORT of its gRPC.
        token: the models' `introspection_token`, for seeing and cancelling requests; None: that of the environment
            variable QUIRE_INTROSPECTION_TOKEN.
    """

    def __init__(self, url: str = "127.0.0.1:8001", token: str | None = None) -> None:
        self.url = url
        self._token = os.environ.get(TOKEN_VARIABLE, "") if token is None else token
        self._channel = grpc.aio.insecure_channel(url, options=OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    # -- generation ---------------------------------------------------------------------------------------------------

    async def stream(
        self, model: str, prompt: Prompt, *, request_id: str = "", timeout: float | None = None,
        parameters: Mapping[str, Any] | None = None, **sampling: Any,
    ) -> AsyncGenerator[Chunk, None]:  # fmt: skip
        """Generate, a response at a time. Closing the iterator early cancels the request.

        Args:
            model: its name.
            prompt: see `Prompt`.
            request_id: a name for it, by which operators find it.
            timeout: seconds for all of it.
            parameters: the request's own, such as `slo_class`; `docs/requests.md` has them.
            sampling: sampling parameters under vLLM's names, such as `max_tokens` and `temperature`.

        Raises:
            ClientError: the model has rejected it, or failed; or the server is away.
        """
        request = self._request(model, prompt, sampling, parameters, request_id, stream=True)
        start = time.perf_counter()
        async with aclosing(self._responses(request, timeout)) as responses:
            async for response in responses:
                if response.outputs:
                    yield _chunk(response, time.perf_counter() - start)

    async def generate(
        self, model: str, prompt: Prompt, *, request_id: str = "", timeout: float | None = None,
        parameters: Mapping[str, Any] | None = None, **sampling: Any,
    ) -> Chunk:  # fmt: skip
        """Generate, and return the whole answer; see `stream`."""
        request = self._request(model, prompt, sampling, parameters, request_id, stream=False)
        start = time.perf_counter()
        chunk = Chunk()
        async with aclosing(self._responses(request, timeout)) as responses:
            async for response in responses:
                if response.outputs:
                    chunk = _chunk(response, time.perf_counter() - start)
        if not chunk.texts:
            raise ClientError(f"{model} gave no answer")
        return chunk

    def _request(
        self, model: str, prompt: Prompt, sampling: Mapping[str, Any], parameters: Mapping[str, Any] | None,
        request_id: str, *, stream: bool,
    ) -> Any:  # fmt: skip
        name, value = _prompt_input(prompt)
        inputs: dict[str, Value] = {name: value, "sampling_parameters": json.dumps(sampling), "stream": stream}
        return infer_request(model, {**inputs, **dict.fromkeys(_FLAGS, True)}, parameters, request_id)

    # -- what operators ask and tell a model --------------------------------------------------------------------------

    async def check_live(self) -> None:
        """Raise if nothing answers at the server's port, whatever it says.

        Raises:
            Disconnected: nothing listens there.
            DeadlineExceeded: it does not answer within two seconds.
        """
        try:
            await self._stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=_LIVE_S)
        except grpc.aio.AioRpcError as error:
            failure = self._failure(error)
            if isinstance(failure, Disconnected | DeadlineExceeded):
                raise failure from None

    async def models(self) -> list[str]:
        """The models that are ready.

        Raises:
            ClientError: the server is away.
        """
        try:
            index = await self._stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(ready=True), timeout=_ANSWER_S)
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from None
        return sorted({model.name for model in index.models})

    async def health(self, model: str) -> bool:
        """Whether the model's engine runs. The server alone does not know: to it, a model is ready while its engine is
        started again.

        Raises:
            ClientError: the server is away, or there is no such model.
        """
        return bool((await self.ask(model, "health", "healthy"))["healthy"])

    async def has_chat_template(self, model: str) -> bool:
        """Whether the model's checkpoint says how a chat is written.

        Raises:
            ClientError: the server is away, or does not say.
        """
        return bool((await self.ask(model, "chat_format", "has_chat_template"))["has_chat_template"])

    async def snapshot(self, model: str) -> Snapshot:
        """The model's requests, blocks and ranks, now. Needs the token.

        Raises:
            ClientError: the server is away, or does not allow it.
        """
        return Snapshot.from_answer(await self.ask(model, "snapshot", "engine", token=self._token))

    async def ended(self, model: str, cursor: str = "") -> EndedAnswer:
        """The model's requests that have ended: those since the answer with this cursor; without one all that it keeps.
        Needs the token.

        Raises:
            ClientError: the server is away, or does not allow it.
        """
        shown = {"cursor": cursor} if cursor else None
        return EndedAnswer.from_answer(await self.ask(model, "ended", "cursor", shown, token=self._token))

    async def cancel(self, model: str, request_id: str) -> bool:
        """Cancel a request by its id in the snapshot. Needs the token.

        Returns:
            False if it had ended.

        Raises:
            ClientError: the server is away, or does not allow it.
        """
        said = await self.ask(model, "cancel", "cancelled", {"cancel_request_id": request_id}, token=self._token)
        return bool(said["cancelled"])

    async def scale(self, model: str, num_replicas: int) -> Scaled:
        """Have the model run so many replicas on the server's host; it takes as long as they take to start.

        Raises:
            ClientError: the server is away, or the model has rejected it.
        """
        said = await self.ask(model, "scale", "replicas", {"replicas": num_replicas}, token=self._token, timeout=None)
        try:
            others = said.get("of_other_hosts")
            return Scaled(
                replicas=int(said["replicas"]), before=int(said["before"]),
                of_other_hosts=None if others is None else int(others),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError):
            raise ClientError(f"{model} answers scale with {str(said)[:80]!r}") from None

    async def ask(
        self, model: str, question: str, key: str, parameters: Mapping[str, Any] | None = None, *, token: str = "",
        timeout: float | None = _ANSWER_S,
    ) -> dict[str, Any]:  # fmt: skip
        """The model's answer to `introspect`.

        Args:
            model: its name.
            question: the kind.
            key: that the answer has.
            parameters: of the question.
            token: if it is one of those that need it.
            timeout: in seconds.

        Raises:
            ClientError: there is no such answer.
        """
        proof = {"introspection_token": token} if token else {}
        request = infer_request(model, {}, {"introspect": question, **(parameters or {}), **proof})
        texts: list[str] = []
        async with aclosing(self._responses(request, timeout)) as responses:
            async for response in responses:
                texts += outputs_of(response).get("text_output", ())
        try:
            answer = json.loads("".join(texts))
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or key not in answer:
            said = "".join(texts)[:80]
            raise ClientError(f"{model} answers {question} with {said!r}; is it a model of Quire, of this version?")
        return answer

    async def _responses(self, request: Any, timeout: float | None) -> AsyncGenerator[Any, None]:
        call = self._stub.ModelStreamInfer(iter([request]), timeout=timeout, metadata=METADATA)
        rejected = ""
        try:
            async with aclosing(responses_of(call)) as responses:
                async for response in responses:
                    if response.error_message:
                        rejected = response.error_message  # raised when the stream has ended
                    else:
                        yield response.infer_response
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from None
        if rejected:
            raise InvalidArgument(rejected)

    def _failure(self, error: grpc.aio.AioRpcError) -> ClientError:
        failure = error_of(error)
        if isinstance(failure, Disconnected):
            words = f"the server at {self.url} does not answer (gRPC); is it running, and is this its gRPC port?"
            return Disconnected(words)
        if isinstance(failure, DeadlineExceeded) and "Deadline Exceeded" in str(failure):  # as gRPC itself says it
            return DeadlineExceeded(f"the server at {self.url} did not answer in time (gRPC)")
        return failure


def _prompt_input(prompt: Prompt) -> tuple[str, Value]:
    """The input that a prompt goes into, and its value."""
    if isinstance(prompt, str):
        return "text_input", prompt
    if isinstance(prompt, np.ndarray):
        return "prompt_embeds", prompt
    if prompt and isinstance(prompt[0], Mapping):
        return "messages", json.dumps(prompt, ensure_ascii=False)
    return "input_ids", cast("list[int]", prompt)


def _chunk(response: Any, seconds: float) -> Chunk:
    outputs = outputs_of(response)
    try:
        metrics = json.loads((outputs.get("perf_metrics") or ["null"])[0]) or {}
    except ValueError:
        metrics = {}
    return Chunk(
        texts=outputs.get("text_output", ()),
        finish_reasons=["" if reason == "None" else reason for reason in outputs.get("finish_reason", ())],
        num_prompt_tokens=next(iter(outputs.get("num_input_tokens", ())), 0),
        num_output_tokens=sum(outputs.get("num_output_tokens", ())),
        seconds=seconds,
        is_final=is_final(response),
        metrics=metrics if isinstance(metrics, dict) else {},
    )


class Client:
    """`AsyncClient` for programs without an event loop: the same methods, which wait. Thread-safe.

    Args:
        url: see `AsyncClient`.
        token: likewise.
    """

    def __init__(self, url: str = "127.0.0.1:8001", token: str | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="quire-client", daemon=True)
        self._thread.start()
        self._client = self._wait(_made(url, token))

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what goes on, and close the connection. Idempotent."""
        if not self._loop.is_closed():
            self._wait(_cancel_all())
            self._wait(self._client.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def stream(
        self, model: str, prompt: Prompt, *, beat: float | None = None, **options: Any
    ) -> Generator[Chunk, None, None]:
        """Generate, a response at a time. Closing the iterator early cancels the request.

        Args:
            model: its name.
            prompt: see `Prompt`.
            beat: after so many seconds of silence comes an empty chunk, for callers that look up meanwhile.
            options: those of `AsyncClient.stream`.

        Raises:
            ClientError: the model has rejected it, or failed; or the server is away.
        """
        arrived: queue.SimpleQueue[Chunk | BaseException | None] = queue.SimpleQueue()
        pumping = self._submit(self._pump(arrived, model, prompt, options))
        start = time.perf_counter()
        try:
            while True:
                try:
                    item = arrived.get(timeout=beat)
                except queue.Empty:
                    yield Chunk(seconds=time.perf_counter() - start)
                    continue
                if item is None:
                    return
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            pumping.cancel()

    async def _pump(self, arrived: Any, model: str, prompt: Prompt, options: Mapping[str, Any]) -> None:
        end: BaseException | None = None
        try:
            async with aclosing(self._client.stream(model, prompt, **options)) as chunks:
                async for chunk in chunks:
                    arrived.put(chunk)
        except asyncio.CancelledError:
            end = Cancelled("the client was closed")
            raise
        except BaseException as error:
            end = error
        finally:
            arrived.put(end)

    def generate(self, model: str, prompt: Prompt, **options: Any) -> Chunk:
        """Generate, and return the whole answer; see `AsyncClient.generate`."""
        return self._wait(self._client.generate(model, prompt, **options))

    def check_live(self) -> None:
        """See `AsyncClient.check_live`."""
        self._wait(self._client.check_live())

    def models(self) -> list[str]:
        """See `AsyncClient.models`."""
        return self._wait(self._client.models())

    def health(self, model: str) -> bool:
        """See `AsyncClient.health`."""
        return self._wait(self._client.health(model))

    def has_chat_template(self, model: str) -> bool:
        """See `AsyncClient.has_chat_template`."""
        return self._wait(self._client.has_chat_template(model))

    def snapshot(self, model: str) -> Snapshot:
        """See `AsyncClient.snapshot`."""
        return self._wait(self._client.snapshot(model))

    def ended(self, model: str, cursor: str = "") -> EndedAnswer:
        """See `AsyncClient.ended`."""
        return self._wait(self._client.ended(model, cursor))

    def cancel(self, model: str, request_id: str) -> bool:
        """See `AsyncClient.cancel`."""
        return self._wait(self._client.cancel(model, request_id))

    def scale(self, model: str, num_replicas: int) -> Scaled:
        """See `AsyncClient.scale`."""
        return self._wait(self._client.scale(model, num_replicas))

    def _submit(self, coroutine: Coroutine[Any, Any, _T]) -> "Future[_T]":
        if self._loop.is_closed():
            coroutine.close()
            raise Cancelled("the client was closed")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _wait(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        future = self._submit(coroutine)
        try:
            return future.result()
        finally:
            future.cancel()  # if Ctrl-C has ended the wait


async def _made(url: str, token: str | None) -> AsyncClient:
    return AsyncClient(url, token)


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
