"""ResponseQueue: one thread, which sends all responses to clients.

Sending a response blocks for a round trip to the server process, so the engine's event loop never does it. The loop
puts deltas here; those that arrive while a request's previous response is being sent are merged. So streams coalesce
under load, and `stream_interval_ms` makes them do so without load:

::

    put(delta) ──► stream.pending (merged) ──► heap of (due, stream) ──► send thread ──► response_sender.send
                                                                            └─ above LARGE_BYTES: a thread of its own

A stream is due at once for its first token and for its end, and `stream_interval_ms` after its last response otherwise.
Log-probabilities become JSON as they come: an answer with a million of them would hold up all others while it is built.
A large response is built and sent in a thread of its own, as its copies take longer than the others' deltas can wait.

`response_sender.send` returns as soon as the server has the response. What a client does not read waits in the server,
which does not report it. So the limit is on what is produced for one request in all, waiting here or there.
"""

import contextlib
import heapq
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quire_engine.sampling_params import RequestOptions

from quire_backend import triton_api
from quire_backend.request import ResponseOptions
from quire_backend.responses import MAX_RESPONSE_BYTES, encode_logprobs, num_bytes_of, tensors_of
from quire_backend.triton_api import ErrorCode, ResponseSender

if TYPE_CHECKING:
    from quire_engine.outputs import RequestOutput

    from quire_backend.pooling import PoolingBatch

logger = logging.getLogger(__name__)

NOT_DUE = math.inf
BYTES_PER_OUTPUT = 1024
"""What the server keeps for a waiting response besides its contents: 1.1 KB with one sequence (2.51)."""
BYTES_PER_TOKEN = 8
"""Text and id."""
LARGE_BYTES = 1 << 20
"""Larger responses do not go through the send thread: their copies take milliseconds."""


class ResponseStream:
    """The response sender of one live request, and what is still to be sent.

    ::

        open ──► ending (the last response is queued) ──► closed (it is on its way; the sender is not touched again)
    """

    def __init__(self, sender: ResponseSender, label: str = "") -> None:
        self._sender = sender
        self._lock = threading.Lock()
        self._closed = False
        self.request = RequestOptions(label=label)
        """What the request says; the class of objectives may not exist."""
        self.options = ResponseOptions()
        self.make_tensors: Callable[[], dict[str, Any]] | None = None
        """Makes the one response of a request that does not generate; unset: it is made of outputs."""
        self.num_made_bytes = 0
        """The size of these tensors, about."""
        self.batch: PoolingBatch | None = None
        """The prompts of a request for vectors, once the engine has some of them."""
        self.request_id: str | None = None
        """The engine's name for it, once it has one."""
        self.received_at = time.monotonic()
        self.cancelled = False
        # Of the queue, under its lock:
        self.pending: RequestOutput | None = None
        self.failure: tuple[ErrorCode, str] | None = None
        self.ending = False
        self.num_bytes = 0
        """About how many bytes were produced for the client."""
        self.num_pending_bytes = 0
        self.is_large = False
        """Whether a large response is on its way: the next one waits for it."""
        self.due = NOT_DUE
        # Of the send thread:
        self.last_sent_at: float | None = None
        self.broken = False

    @property
    def label(self) -> str:
        """The client's name for the request; for logs."""
        return self.request.label

    def check_cancelled(self) -> bool:
        """Ask the server whether the client is gone. Returns True only once.

        After the final response the server frees the memory that this call reads, hence the lock.
        """
        with self._lock:
            if self._closed or self.cancelled or not self._sender.is_cancelled():
                return False
            self.cancelled = True
            return True

    @property
    def closed(self) -> bool:
        """Whether the final response is being or was sent."""
        return self._closed

    def send(self, response: object) -> None:
        """Send one response that is not the last; from one thread at a time."""
        triton_api.send(self._sender, response, final=False)

    def end(self, response: object, num_bytes: int) -> str | None:
        """Send the last response, or an error where that fails. Returns why it failed.

        A send with the final flag that fails closes the stub's sender, and the client would wait for ever. So the flag
        follows alone where the response may find no room, and after a large one always: what was free is taken by
        others while it is copied.
        """
        with self._lock:
            self._closed = True
        if num_bytes <= LARGE_BYTES and triton_api.has_room(num_bytes):
            triton_api.send(self._sender, response, final=True)
            return None
        failure = None
        try:
            self.send(response)
        except BaseException as error:
            failure = str(error)
            message = f"the answer of {num_bytes} bytes could not be sent; the server's log has the cause"
            with contextlib.suppress(Exception):
                self.send(triton_api.error_response(ErrorCode.INTERNAL, message))
        triton_api.send(self._sender, None, final=True)
        return failure


class ResponseQueue:
    """Merges deltas and sends them from a thread of its own.

    Args:
        stream_interval: tokens per streamed response after the first, at least.
        stream_interval_ms: time between two responses of one stream, at least.
        on_broken: called, from any thread, for a stream that can no longer be sent though its request goes on.
        on_closed: called from the send thread when a stream's last response was sent.
        on_sending: called from the send thread with the number of a response before it is sent, and with 0 afterwards:
            it blocks in between for as long as the server does not take the response.
    """

    def __init__(
        self,
        *,
        stream_interval: int,
        stream_interval_ms: float,
        on_broken: Callable[[ResponseStream], None],
        on_closed: Callable[[ResponseStream], None],
        on_sending: Callable[[int], None] = lambda number: None,
    ) -> None:
        self._stream_interval = stream_interval
        self._interval = stream_interval_ms / 1000
        self._on_broken = on_broken
        self._on_closed = on_closed
        self._on_sending = on_sending
        self._num_sent = 0
        self._condition = threading.Condition()
        self._heap: list[tuple[float, int, ResponseStream]] = []
        self._order = itertools.count()
        self._stopping = False
        self._one_large = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="quire-responses", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Send what is due, then end the thread."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        self._thread.join(timeout=5.0)

    # -- any thread -------------------------------------------------------------------------------------------------

    def put(self, stream: ResponseStream, output: "RequestOutput") -> None:
        """Add a delta of a request; the last one has `output.finished`."""
        if stream.ending:
            return
        num_bytes = encode_logprobs(output, stream.options)
        num_bytes += BYTES_PER_TOKEN * sum(len(item.token_ids) for item in output.outputs) + stream.num_made_bytes
        with self._condition:
            if stream.ending:
                return
            stream.num_bytes += num_bytes
            stream.num_pending_bytes += num_bytes
            if stream.num_bytes <= MAX_RESPONSE_BYTES:
                if stream.pending is None:
                    stream.pending = output
                else:
                    stream.pending.merge(output)
                stream.ending = output.finished
                self._schedule(stream)
                return
        self.fail(
            stream,
            ErrorCode.INVALID_ARG,
            f"the answer has grown beyond {MAX_RESPONSE_BYTES} bytes; ask for fewer tokens, "
            "sequences (n) or log-probabilities",
        )
        if not output.finished:
            self._on_broken(stream)

    def fail(self, stream: ResponseStream, code: ErrorCode, message: str) -> None:
        """End a request with an error; nothing that is still pending is sent."""
        with self._condition:
            if stream.ending:
                return
            stream.pending, stream.failure, stream.ending = None, (code, message), True
            self._schedule(stream)

    def _schedule(self, stream: ResponseStream) -> None:
        """Update when the stream is due, if that is earlier than before."""
        due = self._due(stream)
        if due < stream.due:
            stream.due = due
            heapq.heappush(self._heap, (due, next(self._order), stream))
            if self._heap[0][2] is stream:
                self._condition.notify()

    def _due(self, stream: ResponseStream) -> float:
        if stream.is_large:
            return NOT_DUE
        if stream.ending:
            return 0.0
        if not stream.options.stream or stream.pending is None:
            return NOT_DUE
        if stream.last_sent_at is None:
            return 0.0
        if sum(len(item.token_ids) for item in stream.pending.outputs) < self._stream_interval:
            return NOT_DUE
        return stream.last_sent_at + self._interval

    # -- the send thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._condition:
                stream = self._wait_for_due()
                if stream is None:
                    return
                output, stream.pending = stream.pending, None
                failure, final = stream.failure, stream.ending
                stream.is_large = stream.num_pending_bytes > LARGE_BYTES and failure is None
                stream.num_pending_bytes = 0
                stream.due = NOT_DUE
                stream.num_bytes += BYTES_PER_OUTPUT * stream.options.num_sequences
                stream.last_sent_at = time.monotonic()
            arguments = (stream, output, failure, final)
            if stream.is_large:
                threading.Thread(target=self._send_large, args=arguments, name="quire-large", daemon=True).start()
            else:
                self._send(*arguments)

    def _send_large(
        self,
        stream: ResponseStream,
        output: "RequestOutput | None",
        failure: tuple[ErrorCode, str] | None,
        final: bool,
    ) -> None:
        with self._one_large:
            self._send(stream, output, failure, final, is_watched=False)
        with self._condition:
            stream.is_large = False
            if not stream.closed:
                self._schedule(stream)

    def _wait_for_due(self) -> ResponseStream | None:
        """The next stream that is due; None when stopping and nothing is due at once."""
        while True:
            while self._heap and self._heap[0][0] != self._heap[0][2].due:
                heapq.heappop(self._heap)  # it became due earlier and was sent then
            wait = self._heap[0][0] - time.monotonic() if self._heap else None
            if wait is not None and wait <= 0:
                return heapq.heappop(self._heap)[2]
            if self._stopping:
                return None
            self._condition.wait(wait)

    def _send(
        self,
        stream: ResponseStream,
        output: "RequestOutput | None",
        failure: tuple[ErrorCode, str] | None,
        final: bool,
        is_watched: bool = True,
    ) -> None:
        """Build and send one response. An error affects that request alone, a panic of foreign code included."""
        if not final and (stream.broken or output is None):
            return
        num_bytes = 0
        try:
            if failure is not None:
                response = triton_api.error_response(*failure)
            elif stream.broken or output is None:
                response = triton_api.error_response(ErrorCode.INTERNAL, "a response could not be sent")
            else:
                tensors = tensors_of(output, stream.options) if stream.make_tensors is None else stream.make_tensors()
                num_bytes = num_bytes_of(tensors) if final else 0
                response = triton_api.response(tensors)
        except BaseException as error:
            self._log_failure(stream, error)
            response = triton_api.error_response(ErrorCode.INTERNAL, "the response is invalid")
            if not final:
                self._break(stream)
                return
        if is_watched:
            self._num_sent += 1
            self._on_sending(self._num_sent)
        try:
            if not final:
                stream.send(response)
            elif (reason := stream.end(response, num_bytes)) is not None:
                self._log_failure(stream, reason)
        except BaseException as error:
            self._log_failure(stream, error)
            if not final:
                self._break(stream)
        finally:
            if is_watched:
                self._on_sending(0)
        if final:
            self._on_closed(stream)

    def _break(self, stream: ResponseStream) -> None:
        stream.broken = True
        self._on_broken(stream)

    @staticmethod
    def _log_failure(stream: ResponseStream, error: object) -> None:
        logger.warning("request %r: a response could not be sent: %s", stream.label, error)
