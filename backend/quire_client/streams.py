"""How a stream is read, and left early.

A request is a `ModelStreamInfer` of its own, whose sending side is closed at once: so the server ends it after the last
response, and each request can be cancelled, and read as slowly as its client reads, without regard to others. One
response is read ahead: what else a slow client does not take waits in HTTP/2's window, and then in tritonserver, where
the setting `max_response_bytes` bounds it.
"""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc

from quire_client.messages import is_final

OPTIONS = [
    ("grpc.max_receive_message_length", -1),  # the server bounds it: see max_response_bytes
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # or all channels would share one connection
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),  # a server that is started again is found within a second
]
"""Of a channel."""
METADATA = (("triton_grpc_error", "true"),)
"""Has the server end a stream that failed with the error's status, and not with its text alone."""
_LEAVING_S = 0.05
"""tritonserver 2.51 never releases a request that is cancelled just as its stream ends; one that is about to may."""
_leaving: set["asyncio.Task[None]"] = set()
"""Tasks that end streams, which nothing else would keep."""


async def responses_of(call: Any) -> AsyncGenerator[Any, None]:
    """The responses of a call. Closing the iterator early cancels the call, unless it is about to end.

    Args:
        call: a stream of the server's, in this event loop.

    Raises:
        AioRpcError: the call has failed.
    """
    reader = _Reader(call)
    has_ended, last = False, None
    try:
        while (response := await reader.next()) is not grpc.aio.EOF:
            last = response
            yield response
        has_ended = True
    except grpc.aio.AioRpcError:
        has_ended = True
        raise
    finally:
        if not has_ended:
            task = asyncio.create_task(_leave(call, reader, last is not None and is_final(last.infer_response)))
            _leaving.add(task)
            task.add_done_callback(_leaving.discard)


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
