"""ZMQ sockets in an event loop: a function is called with each message, in the loop's thread."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

logger = logging.getLogger(__name__)

MAX_MESSAGES = 100
"""Messages per turn of the loop, so that other tasks run in between."""
RARE_SECONDS = 10.0


class LoopSocket:
    """A socket that passes its messages on as they come. Belongs to the event loop in which `start` was called.

    Args:
        socket: it is closed with this.
        on_message: called with the frames of each message.
    """

    def __init__(self, socket: "zmq.Socket[Any]", on_message: Callable[[list[zmq.Frame]], None]) -> None:
        self._socket = socket
        self._on_message = on_message
        self._loop: asyncio.AbstractEventLoop | None = None
        self._descriptor = int(socket.getsockopt(zmq.FD))

    def start(self) -> None:
        """Begin to take messages, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self.take_in)
        self._loop.call_soon(self.take_in)  # earlier messages do not make the descriptor readable again

    def take_in(self) -> None:
        """Pass on the messages that have come."""
        for _ in range(MAX_MESSAGES):
            if self._socket.closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._on_message(frames)
        self._look_again()

    def send(self, frames: Sequence[bytes]) -> None:
        """Send a message. Never blocks.

        Raises:
            zmq.ZMQError: it cannot be sent.
        """
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        finally:
            # `send` may consume the event of messages that have come: the descriptor does not become readable then.
            if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._look_again()

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket. Idempotent."""
        if not self._socket.closed:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(self._descriptor)
            with contextlib.suppress(zmq.ZMQError):
                self._socket.disable_monitor()
            self._socket.close(linger_ms)

    def _look_again(self) -> None:
        if self._loop is not None:
            self._loop.call_soon(self.take_in)


def monitor(socket: "zmq.Socket[Any]", events: int, on_event: Callable[[int, int], None]) -> LoopSocket:
    """Watch a socket's connections: `on_event` is called with each event and its value.

    The monitor has to be closed after the socket: libzmq waits until an event can be read, and meanwhile holds a lock
    that the socket needs to end.
    """

    def on_message(frames: list[zmq.Frame]) -> None:
        message = parse_monitor_message([frame.bytes for frame in frames])
        on_event(message["event"], message["value"])

    return LoopSocket(socket.get_monitor_socket(events), on_message)


class RareLog:
    """Warns of unknown peers: of each kind at most once in `RARE_SECONDS`, with the number of lines left out."""

    def __init__(self) -> None:
        self._next_at: dict[str, float] = {}
        self._num_left_out: dict[str, int] = {}

    def warn(self, kind: str, text: str) -> None:
        """Log a line of a kind, unless the last one was less than `RARE_SECONDS` ago."""
        now = time.monotonic()
        if now < self._next_at.get(kind, float("-inf")):
            self._num_left_out[kind] = self._num_left_out.get(kind, 0) + 1
            return
        left_out = self._num_left_out.pop(kind, 0)
        self._next_at[kind] = now + RARE_SECONDS
        logger.warning("%s%s", text, f" (and {left_out} more like it since the last such line)" if left_out else "")
