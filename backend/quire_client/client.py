"""AsyncClient and Client: generate and embed with a model, and operate it."""

import asyncio
import functools
import json
import os
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec
from tritonclient.grpc import service_pb2

from quire_client.ended import EndedAnswer
from quire_client.errors import Cancelled, ClientError, DeadlineExceeded, Disconnected
from quire_client.messages import Prompt, generation_request, infer_request, is_final, outputs_of
from quire_client.pooling import Pooled, Texts, pooling_request
from quire_client.snapshot import AdapterInfo, Snapshot
from quire_client.streams import ANSWER_S, Connection

TOKEN_VARIABLE = "QUIRE_INTROSPECTION_TOKEN"
_T = TypeVar("_T")
_P = ParamSpec("_P")
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
        """The first sequence's text."""
        return self.texts[0] if self.texts else ""

    @property
    def finish_reason(self) -> str:
        """The first sequence's finish reason."""
        return self.finish_reasons[0] if self.finish_reasons else ""


class Scaled(msgspec.Struct, frozen=True, kw_only=True):
    """What has become of a model's replicas."""

    replicas: int
    before: int
    of_other_hosts: int | None = None
    """None: all are on the server's host."""


class _Health(msgspec.Struct):
    healthy: bool
    is_sleeping: bool = False


class _ChatFormat(msgspec.Struct):
    has_chat_template: bool
    takes_images: bool = False  # an older server does not say


class _Cancelled(msgspec.Struct):
    cancelled: bool


class AsyncClient:
    """Talks to one tritonserver. Made and used in one event loop; connects when it is first used, and again by itself.

    Every call raises `ClientError`, or the class of it that the status has, if the server is away, or the model rejects
    the request, does not allow it, or fails.

    Args:
        url: HOST:PORT of its gRPC.
        token: the models' `introspection_token`, for seeing and cancelling requests; None: that of the environment
            variable QUIRE_INTROSPECTION_TOKEN.
    """

    def __init__(self, url: str = "127.0.0.1:8001", token: str | None = None) -> None:
        self.url = url
        self._token = os.environ.get(TOKEN_VARIABLE, "") if token is None else token
        self._connection = Connection(url)

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.close()

    # -- generation ---------------------------------------------------------------------------------------------------

    async def stream(
        self, model: str, prompt: Prompt, *, images: Sequence[bytes | str] = (), request_id: str = "",
        timeout: float | None = None, parameters: Mapping[str, Any] | None = None, **sampling: Any,
    ) -> AsyncGenerator[Chunk, None]:  # fmt: skip
        """Generate, a response at a time. Closing the iterator early cancels the request.

        Args:
            model: its name.
            prompt: see `Prompt`.
            images: files, of the placeholders in a text, or of the parts `{"type": "image"}` in a conversation; videos
                are texts, `data:` URLs.
            request_id: a name for it, by which operators find it.
            timeout: seconds for all of it.
            parameters: the request's own, such as `slo_class`; `docs/requests.md` has them.
            sampling: sampling parameters under vLLM's names, such as `max_tokens` and `temperature`; and `lora_name`,
                the LoRA adapter to generate with.
        """
        request = generation_request(
            model, prompt, sampling, ("stream", *_FLAGS), images=images, parameters=parameters, request_id=request_id
        )
        async with aclosing(self._chunks(request, timeout)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def generate(
        self, /, model: str, prompt: Prompt, *, images: Sequence[bytes | str] = (), request_id: str = "",
        timeout: float | None = None, parameters: Mapping[str, Any] | None = None, **sampling: Any,
    ) -> Chunk:  # fmt: skip
        """Generate, and return the whole answer; see `stream`."""
        request = generation_request(
            model, prompt, sampling, _FLAGS, images=images, parameters=parameters, request_id=request_id
        )
        async with aclosing(self._chunks(request, timeout)) as chunks:
            found = [chunk async for chunk in chunks if chunk.texts]
        if not found:
            raise ClientError(f"{model} gave no answer")
        return found[-1]

    # -- vectors instead of text --------------------------------------------------------------------------------------

    async def embed(self, /, model: str, texts: Texts, **options: Any) -> Pooled:
        """Embed texts, all in one request.

        Args:
            model: its name.
            texts: a text or several, or token ids.
            options: as of `pool`; `dimensions`, `normalize` and `prompt_name` among the parameters.

        Returns:
            `data` is [texts, D].
        """
        return await self.pool(model, "embed", texts, **options)

    async def score(
        self, /, model: str, texts: str | Sequence[str], pairs: str | Sequence[str], **options: Any
    ) -> Pooled:
        """Compare each text with its pair, or one text with all: by a model that reads both, or by the cosine of their
        embeddings.

        Args:
            model: its name.
            texts: such as a query.
            pairs: such as documents.
            options: as of `pool`.

        Returns:
            `data` is [pairs, 1].
        """
        return await self.pool(model, "score", texts, pairs, **options)

    async def classify(self, /, model: str, texts: Texts, **options: Any) -> Pooled:
        """Classify texts, all in one request.

        Args:
            model: its name.
            texts: a text or several, or token ids.
            options: as of `pool`.

        Returns:
            `data` is [texts, classes], and `labels` names the classes.
        """
        return await self.pool(model, "classify", texts, **options)

    async def pool(
        self, /, model: str, task: str, texts: Texts, pairs: str | Sequence[str] | None = None, *,
        request_id: str = "", timeout: float | None = None, **parameters: Any,
    ) -> Pooled:  # fmt: skip
        """Any task that gives vectors; `docs/embeddings.md` has the tasks and their parameters.

        Args:
            model: its name.
            task: such as `token_embed`.
            texts: the prompts.
            pairs: of a score.
            request_id: a name for it, by which operators find it.
            timeout: seconds for all of it.
            parameters: of the task, and others such as `priority` and `slo_class`.
        """
        request = pooling_request(model, task, texts, pairs, parameters, request_id)
        try:
            pooled = await self._connection.pooled(request, timeout)
        except ClientError as error:
            raise self._named(error) from None
        if pooled is None:
            raise ClientError(f"{model} gave no answer")
        return pooled

    # -- for operators ------------------------------------------------------------------------------------------------

    async def check_live(self) -> None:
        """Raise if nothing answers at the server's port, whatever it says.

        Raises:
            Disconnected: nothing listens there.
            DeadlineExceeded: it does not answer within two seconds.
        """
        try:
            await self._connection.call("ServerLive", service_pb2.ServerLiveRequest(), _LIVE_S)
        except ClientError as error:
            if isinstance(error, Disconnected | DeadlineExceeded):
                raise self._named(error) from None

    async def models(self) -> list[str]:
        """The models that are ready."""
        try:
            return await self._connection.ready_models()
        except ClientError as error:
            raise self._named(error) from None

    async def health(self, model: str) -> bool:
        """Whether the model's engine runs. The server alone does not know: to it, a model is ready while its engine is
        started again.
        """
        return (await self._ask(model, "health", _Health)).healthy

    async def has_chat_template(self, model: str) -> bool:
        """Whether the model's checkpoint says how a chat is written."""
        return (await self._ask(model, "chat_format", _ChatFormat)).has_chat_template

    async def takes_images(self, model: str) -> bool:
        """Whether the model's prompts may have images."""
        return (await self._ask(model, "chat_format", _ChatFormat)).takes_images

    async def snapshot(self, model: str) -> Snapshot:
        """The model's requests, blocks and ranks, now. Needs the token."""
        return await self._ask(model, "snapshot", Snapshot, token=self._token)

    async def ended(self, model: str, cursor: str = "") -> EndedAnswer:
        """The model's requests that have ended: those since the answer with this cursor; without one all that it keeps.
        Needs the token.
        """
        shown = {"cursor": cursor} if cursor else None
        return await self._ask(model, "ended", EndedAnswer, shown, token=self._token)

    async def cancel(self, model: str, request_id: str) -> bool:
        """Cancel a request by its id in the snapshot. Needs the token.

        Returns:
            False if it had ended.
        """
        shown = {"cancel_request_id": request_id}
        return (await self._ask(model, "cancel", _Cancelled, shown, token=self._token)).cancelled

    async def scale(self, model: str, num_replicas: int) -> Scaled:
        """Have the model run so many replicas on the server's host; it takes as long as they take to start."""
        shown = {"replicas": num_replicas}
        return await self._ask(model, "scale", Scaled, shown, token=self._token, timeout=None)

    async def is_sleeping(self, model: str) -> bool:
        """Whether the model's engine sleeps."""
        return (await self._ask(model, "health", _Health)).is_sleeping

    async def sleep(self, model: str, level: int = 1, mode: str = "wait") -> None:
        """Free the memory of the model's engine until `wake_up`. Needs the token.

        Args:
            model: its name.
            level: 1 frees the KV cache, and on a GPU moves the weights to host memory; 2 discards the weights as well.
            mode: `wait` for live requests to end, however long that takes, or `abort` them.
        """
        await self._operate(model, "sleep", level=level, mode=mode)

    async def wake_up(self, model: str) -> None:
        """Undo `sleep`. Needs the token.

        Raises:
            ClientError: the server is away, or the model has rejected it, and still sleeps.
        """
        await self._operate(model, "wake_up")

    async def update_weights(self, model: str, weights_path: str) -> None:
        """Have the model compute with the weights of another folder of the server, once live requests have ended. Needs
        the token.

        Raises:
            ClientError: the server is away, or the model has rejected it, and computes with the weights that it had.
        """
        await self._operate(model, "update_weights", weights_path=weights_path)

    async def reset_prefix_cache(self, model: str) -> None:
        """Forget all cached prefixes; live requests go on. Needs the token."""
        await self._operate(model, "reset_prefix_cache")

    async def _operate(self, model: str, operation: str, **arguments: Any) -> None:
        await self._ask(model, operation, dict[str, Any], arguments, token=self._token, timeout=None)

    async def loras(self, model: str) -> list[AdapterInfo]:
        """The model's LoRA adapters. Needs the token."""
        return await self._ask(model, "loras", list[AdapterInfo], token=self._token)

    async def load_lora(
        self, model: str, lora_name: str, lora_path: str, *, load_inplace: bool = False, timeout: float | None = None
    ) -> AdapterInfo:
        """Have the model load an adapter, and wait until requests may name it. Needs the token.

        Args:
            model: its name.
            lora_name: the adapter's.
            lora_path: its folder on the server, in PEFT's format.
            load_inplace: replace the adapter of this name; else that is an error.
            timeout: seconds.

        Raises:
            InvalidArgument: the folder holds no adapter for this model, or the name is taken.
            ClientError: the server is away, or does not allow it.
        """
        shown = {"lora_name": lora_name, "lora_path": str(lora_path), "load_inplace": load_inplace}
        return await self._ask(model, "load_lora", AdapterInfo, shown, token=self._token, timeout=timeout)

    async def unload_lora(self, model: str, lora_name: str) -> None:
        """Have the model forget an adapter; requests that have begun with it go on. Needs the token.

        Raises:
            NotFound: the model has none of this name.
            ClientError: the server is away, or does not allow it.
        """
        await self._ask(model, "unload_lora", dict, {"lora_name": lora_name}, token=self._token, timeout=None)

    async def pin_lora(self, model: str, lora_name: str) -> AdapterInfo:
        """Have the model keep an adapter in memory until it is unloaded. Needs the token.

        Raises:
            NotFound: the model has none of this name.
            ClientError: the server is away, or does not allow it.
        """
        return await self._ask(
            model, "pin_lora", AdapterInfo, {"lora_name": lora_name}, token=self._token, timeout=None
        )

    async def _ask(
        self, model: str, question: str, kind: type[_T], parameters: Mapping[str, Any] | None = None, *,
        token: str = "", timeout: float | None = ANSWER_S,
    ) -> _T:  # fmt: skip
        """The model's answer to `introspect`."""
        proof = {"introspection_token": token} if token else {}
        request = infer_request(model, {}, {"introspect": question, **(parameters or {}), **proof})
        try:
            text = await self._connection.text(request, timeout)
        except ClientError as error:
            raise self._named(error) from None
        try:
            return msgspec.json.decode(text, type=kind)
        except ValueError:
            said = text[:80]
            raise ClientError(
                f"{model} answers {question} with {said!r}; is it a model of Quire, of this version?"
            ) from None

    async def _chunks(self, request: Any, timeout: float | None) -> AsyncGenerator[Chunk, None]:
        start = time.perf_counter()
        try:
            async with aclosing(self._connection.responses(request, timeout)) as responses:
                async for response in responses:
                    if response.outputs:
                        yield _chunk(response, time.perf_counter() - start)
        except ClientError as error:
            raise self._named(error) from None

    def _named(self, error: ClientError) -> ClientError:
        """The error, with the server's address if the server has said nothing."""
        if isinstance(error, Disconnected):
            words = f"the server at {self.url} does not answer (gRPC); is it running, and is this its gRPC port?"
            return Disconnected(words)
        if isinstance(error, DeadlineExceeded) and "Deadline Exceeded" in str(error):  # as gRPC itself says it
            return DeadlineExceeded(f"the server at {self.url} did not answer in time (gRPC)")
        return error


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


def _waiting(
    method: Callable[Concatenate[AsyncClient, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate["Client", _P], _T]:
    """The same method of `Client`: it waits for the result."""

    @functools.wraps(method)
    def wait(self: "Client", /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return self._wait(method(self._client, *args, **kwargs))

    return wait


class Client:
    """`AsyncClient` for programs without an event loop: the same methods, which wait. Thread-safe.

    Args:
        url: HOST:PORT of the server's gRPC.
        token: as of `AsyncClient`.
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

    generate = _waiting(AsyncClient.generate)
    embed = _waiting(AsyncClient.embed)
    score = _waiting(AsyncClient.score)
    classify = _waiting(AsyncClient.classify)
    pool = _waiting(AsyncClient.pool)
    check_live = _waiting(AsyncClient.check_live)
    models = _waiting(AsyncClient.models)
    health = _waiting(AsyncClient.health)
    has_chat_template = _waiting(AsyncClient.has_chat_template)
    takes_images = _waiting(AsyncClient.takes_images)
    snapshot = _waiting(AsyncClient.snapshot)
    ended = _waiting(AsyncClient.ended)
    cancel = _waiting(AsyncClient.cancel)
    scale = _waiting(AsyncClient.scale)
    is_sleeping = _waiting(AsyncClient.is_sleeping)
    sleep = _waiting(AsyncClient.sleep)
    wake_up = _waiting(AsyncClient.wake_up)
    update_weights = _waiting(AsyncClient.update_weights)
    reset_prefix_cache = _waiting(AsyncClient.reset_prefix_cache)
    loras = _waiting(AsyncClient.loras)
    load_lora = _waiting(AsyncClient.load_lora)
    unload_lora = _waiting(AsyncClient.unload_lora)
    pin_lora = _waiting(AsyncClient.pin_lora)

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
