"""Connection: a server's gRPC, how a stream is read, and how it is left early.

A request is a `ModelStreamInfer` of its own, whose sending side is closed at once: so the server ends it after the last
response, and each request can be cancelled, and read as slowly as its client reads, without regard to others. One
response is read ahead: what else a slow client does not take waits in HTTP/2's window, and then in tritonserver, where
the model's limit of an answer's bytes bounds it.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from quire_client.errors import error_of, error_with
from quire_client.messages import is_final, outputs_of
from quire_client.pooling import Pooled, pooled_of

MANY_STREAMS = 4
"""Channels for many streams at once: those of one share its flow-control window and its thread in the server."""
ANSWER_S = 5.0
"""Timeout of questions that the server or a model answers at once, if it answers."""
_OPTIONS = [
    ("grpc.max_receive_message_length", -1),  # the server bounds it: MAX_RESPONSE_BYTES of the backend
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # or all channels would share one connection
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),  # a server that is started again is found within a second
]
"""Of a channel."""
_METADATA = (("triton_grpc_error", "true"),)
"""Has the server end a stream that failed with the error's status, and not with its text alone."""
_LEAVING_S = 0.05
"""tritonserver 2.51 never releases a request that is cancelled just as its stream ends; one that is about to may."""
_leaving: set["asyncio.Task[None]"] = set()
"""Tasks that end streams, which nothing else would keep."""


class Connection:
    """Calls one tritonserver. Made and used in one event loop; connects when it is first used, and again by itself.

    Args:
        url: HOST:PORT of its gRPC.
        num_channels: TCP connections, among which the streams take turns.
    """

    def __init__(self, url: str, num_channels: int = 1) -> None:
        self._channels = [grpc.aio.insecure_channel(url, options=_OPTIONS) for _ in range(num_channels)]
        self._stubs = [service_pb2_grpc.GRPCInferenceServiceStub(channel) for channel in self._channels]
        self._next_stub = itertools.cycle(self._stubs)

    async def close(self) -> None:
        """Close the connection."""
        for channel in self._channels:
            await channel.close()

    async def call(self, method: str, request: Any, timeout: float = ANSWER_S) -> Any:
        """The server's answer to a call that is no stream.

        Args:
            method: of `inference.GRPCInferenceService`.
            request: its message.
            timeout: in seconds.

        Raises:
            ClientError: it has failed.
        """
        try:
            return await getattr(self._stubs[0], method)(request, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from None

    async def ready_models(self) -> list[str]:
        """The names of the models that are ready.

        Raises:
            ClientError: the server is away.
        """
        index = await self.call("RepositoryIndex", service_pb2.RepositoryIndexRequest(ready=True))
        return sorted({model.name for model in index.models})

    async def backend_of(self, model: str) -> str:
        """The name of the backend that serves a model.

        Raises:
            ClientError: the server is away, or has no such model.
        """
        answer = await self.call("ModelConfig", service_pb2.ModelConfigRequest(name=model))
        return str(answer.config.backend)

    async def responses(self, request: Any, timeout: float | None = None) -> AsyncGenerator[Any, None]:
        """The responses to a request. Closing the iterator early cancels the request, unless it is about to end.

        Args:
            request: a `ModelInferRequest`.
            timeout: in seconds, for all of it.

        Raises:
            ClientError: the request has failed or was rejected.
        """
        call = next(self._next_stub).ModelStreamInfer(iter([request]), timeout=timeout, metadata=_METADATA)
        reader = _Reader(call)
        has_ended, last, rejected = False, None, ""
        try:
            while (response := await reader.next()) is not grpc.aio.EOF:
                if response.error_message:
                    rejected = response.error_message  # raised when the stream has ended
                    continue
                last = response.infer_response
                yield last
            has_ended = True
        except grpc.aio.AioRpcError as error:
            has_ended = True
            raise error_of(error) from None
        finally:
            if not has_ended:
                task = asyncio.create_task(_leave(call, reader, last is not None and is_final(last)))
                _leaving.add(task)
                task.add_done_callback(_leaving.discard)
        if rejected:
            raise error_with(grpc.StatusCode.INVALID_ARGUMENT, rejected)

    async def text(self, request: Any, timeout: float | None = None) -> str:
        """All of `text_output` in the responses to a request; see `responses`."""
        async with aclosing(self.responses(request, timeout)) as responses:
            return "".join([text async for one in responses for text in outputs_of(one).get("text_output", ())])

    async def pooled(self, request: Any, timeout: float | None = None) -> Pooled | None:
        """The vectors in the responses to a request; None: there are none. See `responses`."""
        async with aclosing(self.responses(request, timeout)) as responses:
            found = [pooled async for one in responses if (pooled := pooled_of(one)) is not None]
        return found[-1] if found else None


async def _leave(call: Any, reader: "_Reader", is_over: bool) -> None:
    reader.leave()
    await asyncio.wait({reader.reading}, timeout=None if is_over else _LEAVING_S)
    if not reader.reading.done():
        call.cancel()
    # Cancelled with its call.
    await asyncio.gather(reader.reading, return_exceptions=True)


class _Reader:
    """Reads the responses of a call in a task of its own, which is one response ahead.

    A read that is cancelled cancels its call, at once; so it must not be cancelled together with who waits for it.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._response: Any = None
        """The next one, when it is there."""
        self._changed: asyncio.Future[None] | None = None
        """The side that waits for the other."""
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
