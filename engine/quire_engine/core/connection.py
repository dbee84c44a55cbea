"""EngineConnection: what the frontend says to one engine core and hears from it, however the bytes get there."""

import asyncio
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

import msgspec

from quire_engine.errors import EngineDeadError, EngineError
from quire_engine.messages import (
    EngineCoreOutputs,
    EngineCoreReady,
    EngineCoreRequest,
    RequestType,
    TakeSnapshot,
    UseCores,
    UtilityCall,
    UtilityResult,
)
from quire_engine.snapshot import EngineCoreSnapshot


class EngineConnection(ABC):
    """One engine core, from its start or its joining to its death. Belongs to one event loop, but for `shutdown`."""

    def __init__(self) -> None:
        self.ready = EngineCoreReady()
        self.death: str | None = None
        """Why it died, once that is known."""
        self._pending: asyncio.Future[bytes] | None = None
        self._call_ids = itertools.count()
        self._calls: dict[int, asyncio.Future[UtilityResult]] = {}
        self._num_sent = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(EngineCoreOutputs)

    @property
    @abstractmethod
    def pid(self) -> int:
        """Process id of the engine core, on the host where it runs."""

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """Whether it takes requests."""

    @property
    @abstractmethod
    def num_messages_waiting(self) -> int:
        """Messages that the engine core was sent and has not received yet; known even while it hangs."""

    @abstractmethod
    def wait_until_ready(self, cancelled: threading.Event | None = None) -> EngineCoreReady:
        """Block until the engine core can take requests.

        Args:
            cancelled: ends the waiting when it is set.

        Raises:
            EngineDeadError: it could not start; the message is its own.
        """

    @abstractmethod
    def watch(self, is_busy: Callable[[], bool]) -> None:
        """Begin to watch the engine core; when it dies, `get_output` raises in the running event loop.

        Args:
            is_busy: whether the engine core has requests; called from another thread.
        """

    @abstractmethod
    def has_begun(self, message_number: int) -> bool:
        """Whether the engine core has begun to work for a request; known even when it is dead, until `shutdown`."""

    @abstractmethod
    def stop_listening(self) -> None:
        """Close what belongs to the event loop, in its thread; after that, `shutdown` may be called from another."""

    @abstractmethod
    def end_processes(self) -> None:
        """End all of the engine's processes, if they are this one's to end. Idempotent."""

    @abstractmethod
    def shutdown(self) -> None:
        """End all processes, and release everything. Idempotent."""

    @abstractmethod
    def _send(self, request_type: RequestType, message_id: str, payload: bytes = b"") -> None:
        """Count and send a message, or drop it if the engine core is gone: its requests end or are replayed anyway."""

    @abstractmethod
    def _receive(self) -> "asyncio.Future[bytes]":
        """The next message of the engine core."""

    def add_request(self, request: EngineCoreRequest) -> int:
        """Hand a request over. Never blocks. Returns the number of the message, for `has_begun`."""
        self._send(RequestType.ADD, request.request_id, self._encoder.encode(request))
        return self._num_sent

    def abort_request(self, request_id: str) -> None:
        """End a request wherever it is. Never blocks."""
        self._send(RequestType.ABORT, request_id)

    async def call_utility(self, call: UtilityCall) -> UtilityResult:
        """Have the engine core do something between two steps. `get_output` has to be awaited meanwhile.

        Raises:
            EngineError: it could not.
            EngineDeadError: the engine core died.
        """
        call_id = next(self._call_ids)
        future: asyncio.Future[UtilityResult] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        self._send(RequestType.UTILITY, str(call_id), self._encoder.encode(call))
        try:
            return await future
        finally:
            self._calls.pop(call_id, None)

    def tell(self, call: UseCores) -> None:
        """Have the engine core do something before it takes what is sent after this. No caller waits for the answer."""
        self._send(RequestType.UTILITY, str(next(self._call_ids)), self._encoder.encode(call))

    async def snapshot(self) -> EngineCoreSnapshot:
        """A snapshot of the engine core between two steps. `get_output` has to be awaited meanwhile.

        Raises:
            EngineDeadError: the engine core died.
        """
        snapshot = await self.call_utility(TakeSnapshot())
        assert isinstance(snapshot, EngineCoreSnapshot)
        return snapshot

    async def get_output(self) -> EngineCoreOutputs:
        """The next message of the engine core; waits for it.

        Raises:
            EngineDeadError: the engine core died. Outputs that were not taken yet are lost.
        """
        if self.death is not None:
            raise EngineDeadError(self.death)
        self._pending = self._receive()
        outputs = self._decoder.decode(await self._pending)
        for answer in outputs.utility_outputs:
            future = self._calls.get(answer.call_id)
            if future is None or future.done():
                continue  # the caller does not wait any more
            if answer.error is None:
                future.set_result(answer.result)
            else:
                future.set_exception(EngineError(answer.error))
        return outputs

    def _die(self, reason: str) -> None:
        """The engine is gone: wake up everything that waits for it."""
        self.death = self.death or reason
        for future in (self._pending, *self._calls.values()):
            if future is not None and not future.done():
                future.set_exception(EngineDeadError(reason))

    def abandon(self, reason: str) -> None:
        """Take nothing more from it: all that wait for it raise an EngineDeadError."""
        self._die(reason)
