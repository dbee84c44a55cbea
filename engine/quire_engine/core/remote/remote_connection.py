"""RemoteConnection: one session of an engine on another host, as its front sees it."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

import msgspec

from quire_engine.core.connection import EngineConnection
from quire_engine.core.remote.wire import Beat
from quire_engine.errors import EngineDeadError
from quire_engine.messages import EngineCoreOutputs, EngineCoreReady, EngineCoreRequest, RequestType

Send = Callable[[Sequence[bytes]], None]


class RemoteConnection(EngineConnection):
    """From the engine's joining to the end of its session; the listener tells it what comes.

    Args:
        rank: which replica the engine is.
        host: where it runs, for operators.
        send: sends frames to it, or drops them if it is gone.
    """

    def __init__(self, rank: int, host: str, send: Send) -> None:
        super().__init__()
        self.rank = rank
        self.host = host
        self._send_frames = send
        self._pid = 0
        self._inbox: deque[bytes] = deque()
        self._begun: Collection[int] = ()
        self._clock_offset: float | None = None
        self._num_messages_waiting = 0
        self.has_left = False
        """Whether its host has taken it away."""

    @classmethod
    def absent(cls, rank: int, reason: str) -> "RemoteConnection":
        """Stands for an engine that has not joined yet."""
        connection = cls(rank, "", lambda frames: None)
        connection.death = reason
        return connection

    # -- what the listener tells it ------------------------------------------------------------------------------------

    def send(self, frames: Sequence[bytes]) -> None:
        """Send a message of the session itself."""
        self._send_frames(frames)

    def note_ready(self, ready: EngineCoreReady, pid: int) -> None:
        """It can take requests. Its processes are on another host, and are not supervised here."""
        self._pid = pid
        self.ready = msgspec.structs.replace(ready, worker_pids=[])

    def note_beat(self, beat: Beat) -> None:
        """It is there. Its clock cannot be before this: what has been on the way for long says less than the rest."""
        offset = beat.clock - time.monotonic()
        self._clock_offset = offset if self._clock_offset is None else max(self._clock_offset, offset)
        self._num_messages_waiting = beat.num_messages_waiting

    def note_output(self, payload: bytes) -> None:
        """Outputs have come."""
        if self._pending is not None and not self._pending.done():
            self._pending.set_result(payload)
        else:
            self._inbox.append(payload)

    def note_end(self, reason: str, begun: Collection[int] = (), *, has_left: bool = False) -> None:
        """The session has ended.

        Args:
            reason: why.
            begun: if the engine has died, the messages whose requests it had begun to work for. A connection that ends
                says nothing of any request.
            has_left: whether its host has taken it away.
        """
        self._begun = begun
        self.has_left = has_left
        self._die(reason)

    # -- what it is to the front ---------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def is_alive(self) -> bool:
        return self.death is None

    @property
    def num_messages_waiting(self) -> int:
        """As it was a second ago, at most."""
        return self._num_messages_waiting if self.is_alive else 0

    def wait_until_ready(self, cancelled: threading.Event | None = None) -> EngineCoreReady:
        """Never waits: an engine of another host may join at any time."""
        raise EngineDeadError(self.death or "the engine has not joined yet")

    def watch(self, is_busy: Callable[[], bool]) -> None:
        """Its own host watches it, and says so if it dies or hangs; the listener watches the connection."""

    def add_request(self, request: EngineCoreRequest) -> int:
        """Hand a request over. Never blocks. Returns the number of the message, for `has_begun`."""
        arrived_at = request.arrived_at + (self._clock_offset or 0.0)
        return super().add_request(msgspec.structs.replace(request, arrived_at=arrived_at))

    def has_begun(self, message_number: int) -> bool:
        return message_number in self._begun

    async def get_output(self) -> EngineCoreOutputs:
        """The next message of the engine core; waits for it.

        Raises:
            EngineDeadError: its session has ended, for example because its messages do not decode.
        """
        try:
            return await super().get_output()
        except msgspec.MsgspecError as error:
            self._die(f"the engine on {self.host} says what its front does not understand: {error}")
            raise EngineDeadError(self.death) from None

    def stop_listening(self) -> None:
        """The listener closes what there is to close."""

    def end_processes(self) -> None:
        """They are its own host's."""

    def shutdown(self) -> None:
        """The listener ends the session."""

    def _receive(self) -> "asyncio.Future[bytes]":
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        if self._inbox:
            future.set_result(self._inbox.popleft())
        return future

    def _send(self, request_type: RequestType, message_id: str, payload: bytes = b"") -> None:
        self._num_sent += 1
        if self.is_alive:
            self._send_frames((request_type.value, message_id.encode(), payload))
