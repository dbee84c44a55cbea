"""FrontConnection: one session with the front on another host, on the engine's side."""

import asyncio
import time
from collections import deque
from types import TracebackType

import zmq

from quire_engine.ipc.curve import connect_securely, tcp_address
from quire_engine.ipc.keys import HostKeys
from quire_engine.replicas.remote.sockets import LoopSocket, monitor
from quire_engine.replicas.remote.wire import BEAT_SECONDS, MAX_MISSED_BEATS, MessageType

CONNECT_SECONDS = 10.0
LINGER_MS = 1000
"""For the last message, which says why the session ends."""
_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
)  # fmt: skip


class FrontLostError(Exception):
    """No front is at the other end, or it does not accept this engine now. A later attempt may succeed."""


class FrontConnection:
    """Connects once, and never again: messages that are lost with a connection would be missing in the next.

    Args:
        context: of the sockets.
        host: of the front.
        port: where it listens.
        keys: of this host, which trust the front alone.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", host: str, port: int, keys: HostKeys) -> None:
        self.address = f"{host}:{port}"
        self._public_key = keys.public_key
        self._inbox: deque[list[bytes]] = deque()
        self._wakes = asyncio.Event()
        self._is_connected = self._has_ended = False
        self._loss: str | None = None
        dealer = context.socket(zmq.DEALER)
        for option, value in (
            (zmq.RECONNECT_IVL, -1), (zmq.IMMEDIATE, 1), (zmq.HANDSHAKE_IVL, int(1000 * CONNECT_SECONDS)),
            (zmq.SNDHWM, 0), (zmq.RCVHWM, 0),
        ):  # fmt: skip
            dealer.setsockopt(option, value)
        connect_securely(dealer, keys)
        self._dealer = LoopSocket(dealer, self._on_message)
        self._monitor = monitor(dealer, _EVENTS, self._on_event)
        self._monitor.start()
        self._dealer.start()
        try:
            dealer.connect(tcp_address(host, port))
        except zmq.ZMQError as error:
            self._loss = f"data_parallel_address {host} cannot be connected to: {error.strerror}"

    async def __aenter__(self) -> "FrontConnection":
        """Wait for the front.

        Raises:
            FrontLostError: there is none, or it does not trust this host.
        """
        deadline = time.monotonic() + CONNECT_SECONDS
        try:
            while not self._is_connected:
                if time.monotonic() >= deadline:
                    raise FrontLostError(f"{self.address} does not answer; is the front there, behind no firewall?")
                await self._hears(deadline - time.monotonic())
        except BaseException:
            self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    def send(self, kind: MessageType, *frames: bytes) -> None:
        """Send a message, or drop it if the front is lost, which `receive` raises."""
        try:
            self._dealer.send([kind.value, *frames])
        except zmq.ZMQError:
            self._lose("the connection to the front has ended")

    async def receive(self) -> list[bytes]:
        """Wait for the next message, beats left out.

        Raises:
            FrontLostError: the front is lost, or has sent nothing for some seconds.
        """
        num_missed = 0
        while not self._inbox:
            num_missed = 0 if await self._hears(BEAT_SECONDS) else num_missed + 1
            if num_missed > MAX_MISSED_BEATS:
                raise FrontLostError(f"the front has said nothing for {BEAT_SECONDS * MAX_MISSED_BEATS:.0f} s")
        return self._inbox.popleft()

    async def _hears(self, seconds: float) -> bool:
        """Wait until something happens, at most for these seconds. Returns whether it has."""
        if self._loss is not None:
            raise FrontLostError(self._loss)
        self._wakes.clear()
        waking = asyncio.ensure_future(self._wakes.wait())
        try:  # `wait_for` of Python 3.11 forgets a cancellation that comes with what it waits for
            return bool((await asyncio.wait((waking,), timeout=max(seconds, 0.0)))[0])
        finally:
            waking.cancel()

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        if frames[0].bytes != MessageType.BEAT.value and not self._has_ended:
            self._inbox.append([frame.bytes for frame in frames])
        self._wakes.set()

    def _on_event(self, event: int, value: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._is_connected = True
            self._wakes.set()
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._lose("the front does not trust this host; have it do so with: quire keys host FILE --trust "
                       f"{self._public_key.hex()}")  # fmt: skip
        elif event == zmq.EVENT_CLOSED:
            self._lose(f"no front listens at {self.address}")
        elif self._is_connected:
            self._lose("the connection to the front has ended")
        else:
            self._lose(
                f"what listens at {self.address} is no front with the public key that this host trusts, or is starting"
            )

    def end(self, reason: str) -> None:
        """End the session: `receive` raises, whatever has come or comes."""
        self._has_ended = True
        self._inbox.clear()
        self._lose(reason)

    def _lose(self, reason: str) -> None:
        self._loss = self._loss or reason
        self._wakes.set()

    def _close(self) -> None:
        self._dealer.close(LINGER_MS)
        self._monitor.close()  # after the socket: libzmq could wait for the monitor otherwise
