"""CancellationPoller: detects which clients have disconnected or cancelled.

The server does not call us when a client cancels or disconnects; it has to be asked, per request. One question is a
round trip of 28 µs on an idle machine, more on a busy one, so all live requests are asked every 50 ms, or less often
where that would take more than a twentieth of the time (about a hundred live requests).

The server notices at once when a gRPC client is gone, and an HTTP client when it next writes to it: with the next delta
of `generate_stream`, but only with the whole answer of `generate`.
"""

import logging
import threading
import time
from collections.abc import Callable

from quire_backend.response_queue import ResponseStream

logger = logging.getLogger(__name__)

POLL_INTERVAL_SECONDS = 0.05
MAX_DUTY = 0.05
"""Share of the time that polling may take."""


class CancellationPoller:
    """Polls all live requests in a thread of its own; without live requests it sleeps.

    Args:
        on_cancelled: called once, from the poller's thread, for a request whose client is gone.
    """

    def __init__(self, on_cancelled: Callable[[ResponseStream], None]) -> None:
        self._on_cancelled = on_cancelled
        self._condition = threading.Condition()
        self._streams: list[ResponseStream] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="quire-cancellation", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        self._thread.join(timeout=5.0)

    def add(self, stream: ResponseStream) -> None:
        """Poll this request from now on, until it is closed."""
        with self._condition:
            self._streams.append(stream)
            if len(self._streams) == 1:
                self._condition.notify()

    def _run(self) -> None:
        pause = POLL_INTERVAL_SECONDS
        while True:
            with self._condition:
                while not self._streams and not self._stopping:
                    self._condition.wait()
                # `add` notifies only a poller that has nothing to do; it never cuts this pause short.
                if self._condition.wait_for(lambda: self._stopping, pause):
                    return
                self._streams = [stream for stream in self._streams if not stream.closed]
                streams = self._streams.copy()
            started = time.monotonic()
            for stream in streams:
                self._ask(stream)
            pause = max(POLL_INTERVAL_SECONDS, (time.monotonic() - started) / MAX_DUTY)

    def _ask(self, stream: ResponseStream) -> None:
        try:
            if stream.check_cancelled():
                self._on_cancelled(stream)
        except BaseException as error:  # a panic of foreign code must not end the thread
            logger.warning("request %r: whether it is cancelled could not be asked: %s", stream.label, error)
