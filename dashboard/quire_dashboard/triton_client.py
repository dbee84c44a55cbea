"""A client of Triton's gRPC for the dashboard: a model's snapshot, a cancellation, a streamed generation.

It uses the generated stub of tritonclient and not its client class: each call here has a deadline, and none leaves a
thread or an open stream behind when the server or the page goes away.
"""

import json
import queue
import threading
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from quire_load.triton_messages import infer_request, outputs_of
from tritonclient.grpc import service_pb2, service_pb2_grpc

from quire_dashboard.ended_requests import EndedAnswer
from quire_dashboard.snapshot_answer import Snapshot

_TIMEOUT_S = 5.0
_PROBE_S = 2.0
_BEAT_S = 0.25
_MOST_BYTES = 64 * 2**20
_OPTIONS = [
    ("grpc.max_receive_message_length", _MOST_BYTES), ("grpc.enable_http_proxy", 0),
    # By default minutes, for which a server that is back would not be found.
    ("grpc.max_reconnect_backoff_ms", 2000),
]  # fmt: skip


class TritonError(Exception):
    """The call failed; the text says why, for the person on call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """One response of a stream."""

    text: str = ""
    seconds: float = 0.0
    """Since the request was sent, by this process' clock."""
    is_final: bool = False
    finish_reason: str = ""
    num_output_tokens: int = 0
    """In this response."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """The server's own timings, with the last response."""


class Triton:
    """A channel to one server. It connects when it is first used, and again by itself.

    Args:
        url: HOST:PORT.
        introspection_token: the model's, for seeing and cancelling requests.
    """

    def __init__(self, url: str, introspection_token: str = "") -> None:
        self._url = url
        self._proof = {"introspection_token": introspection_token}
        self._channel = grpc.insecure_channel(url, options=_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def unreachable(self) -> str:
        """Why nothing listens at the server's port; empty if it answers, whatever it says."""
        try:
            self._stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=_PROBE_S)
        except grpc.RpcError as error:
            code = error.code() if isinstance(error, grpc.Call) else None
            if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                return self._why(error)
        return ""

    def models(self) -> list[str]:
        """The models that are ready.

        Raises:
            TritonError: the server is away.
        """
        try:
            answer = self._stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(ready=True), timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            raise TritonError(self._why(error)) from None
        return sorted({model.name for model in answer.models})

    def snapshot(self, model: str) -> Snapshot:
        """A model's requests, blocks and ranks, now.

        Raises:
            TritonError: the server is away, or does not allow it.
        """
        text = self._ask(model, {"introspect": "snapshot", **self._proof})
        try:
            return Snapshot.from_json(text)
        except ValueError as error:
            raise TritonError(f"{model}: {error}") from None

    def ended(self, model: str, cursor: str = "") -> EndedAnswer:
        """A model's ended requests: those since the answer with this cursor; without one all that it keeps.

        Raises:
            TritonError: the server is away, or does not allow it.
        """
        text = self._ask(model, {"introspect": "ended", **({"cursor": cursor} if cursor else {}), **self._proof})
        try:
            return EndedAnswer.from_json(text)
        except ValueError as error:
            raise TritonError(f"{model}: {error}") from None

    def has_chat_template(self, model: str) -> bool:
        """Whether a model's checkpoint says how a chat is written. It needs no token.

        Raises:
            TritonError: the server is away, or does not say.
        """
        return self._says(model, {"introspect": "chat_format"}, "has_chat_template")

    def cancel(self, model: str, request_id: str) -> bool:
        """Cancel a request by its id in the snapshot. Returns False if it had ended.

        Raises:
            TritonError: the server is away, or does not allow it.
        """
        return self._says(model, {"introspect": "cancel", "cancel_request_id": request_id, **self._proof}, "cancelled")

    def generate(
        self, model: str, inputs: Mapping[str, str], parameters: Mapping[str, Any], *, timeout_s: float = 600.0
    ) -> Generator[Chunk, None, None]:
        """Stream one completion. Closing the iterator before the final chunk cancels the request.

        While the server is silent there are empty chunks: a page can be stopped only when it draws.

        Args:
            model: its name.
            inputs: the prompt, as `text_input` or `messages`, and `sampling_parameters`.
            parameters: the request's own.
            timeout_s: of the whole stream.

        Raises:
            TritonError: the server is away, or refused.
        """
        asked = ("stream", "return_finish_reason", "return_num_output_tokens", "return_perf_metrics")
        request = infer_request(model, {**inputs, **dict.fromkeys(asked, True)}, parameters)
        start = time.perf_counter()
        rejected = ""
        call = self._stub.ModelStreamInfer(iter([request]), timeout=timeout_s)
        arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(call, arrived.put), name="quire-stream", daemon=True).start()
        has_ended = False
        try:
            while not has_ended:
                try:
                    response = arrived.get(timeout=_BEAT_S)
                except queue.Empty:
                    yield Chunk(seconds=time.perf_counter() - start)
                    continue
                if response is None:
                    has_ended = True
                elif isinstance(response, grpc.RpcError):
                    raise TritonError(self._why(response))
                elif response.error_message:
                    rejected = response.error_message  # raised when the stream has ended; see `_ask`
                else:
                    chunk = _chunk(response.infer_response, time.perf_counter() - start)
                    if chunk.is_final:  # the page may leave with it; see `_ask`
                        list(iter(arrived.get, None))
                        has_ended = True
                    yield chunk
        finally:
            if not has_ended:
                call.cancel()
        if rejected:
            raise TritonError(rejected)

    def _says(self, model: str, parameters: Mapping[str, Any], name: str) -> bool:
        text = self._ask(model, parameters)
        try:
            return bool(json.loads(text)[name])
        except (ValueError, KeyError, TypeError):
            raise TritonError(f"{model} answers {parameters['introspect']} with {text[:80]!r}") from None

    def _ask(self, model: str, parameters: Mapping[str, Any]) -> str:
        request = infer_request(model, {}, parameters)
        call = self._stub.ModelStreamInfer(iter([request]), timeout=_TIMEOUT_S)
        try:
            # To the end of the stream: tritonserver 2.51 never releases one that is cancelled just as it ends,
            # and waits for it when it is told to stop.
            responses = list(call)
        except grpc.RpcError as error:
            raise TritonError(self._why(error)) from None
        for response in responses:
            if response.error_message:
                raise TritonError(response.error_message)
            texts = outputs_of(response.infer_response).get("text_output")
            if texts:
                return str(texts[0])
        raise TritonError(f"{model} gave no answer")

    def _why(self, error: grpc.RpcError) -> str:
        code = error.code() if isinstance(error, grpc.Call) else None
        if code is grpc.StatusCode.UNAVAILABLE:
            return f"the server at {self._url} does not answer (gRPC); is it running, and is this its gRPC port?"
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"the server at {self._url} did not answer in time (gRPC)"
        details = error.details() if isinstance(error, grpc.Call) else str(error)
        return str(details or code)


def _read(call: Any, put: Callable[[Any], None]) -> None:
    """Pass on a stream's responses, the error that ends it if there is one, and None."""
    try:
        for response in call:
            put(response)
    except grpc.RpcError as error:
        put(error)
    finally:
        put(None)


def _chunk(response: Any, seconds: float) -> Chunk:
    outputs = outputs_of(response)
    try:
        metrics = json.loads((outputs.get("perf_metrics") or ["null"])[0]) or {}
    except ValueError:
        metrics = {}
    return Chunk(
        text="".join(outputs.get("text_output") or ()),
        seconds=seconds,
        is_final=response.parameters["triton_final_response"].bool_param,
        finish_reason=next(iter(outputs.get("finish_reason") or ()), "").replace("None", ""),
        num_output_tokens=sum(outputs.get("num_output_tokens") or ()),
        metrics=metrics if isinstance(metrics, dict) else {},
    )
