"""Link: one engine core as the frontend sees it. LocalLink: an engine core in processes of this host, over ZMQ ipc."""

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import zmq
import zmq.asyncio

from quire_engine.config import EngineConfig
from quire_engine.core.heartbeat import Heartbeat
from quire_engine.errors import EngineDeadError, EngineError
from quire_engine.messages import (
    EngineCoreOutputs,
    EngineCoreReady,
    EngineCoreRequest,
    ProcessArguments,
    RequestType,
    UtilityCall,
    UtilityResult,
)
from quire_engine.replicas.engine_watch import EngineWatch, kill_group
from quire_engine.replicas.lockstep import LockstepOwner
from quire_engine.system.child_process import start_module
from quire_engine.system.process_state import is_stopped

logger = logging.getLogger(__name__)

MAX_SOCKET_PATH = 107
"""Bytes of a Unix socket's path on Linux."""
START_LOOK_MS = 100
"""Between two looks at a process that is starting: one that is stopped at two looks in a row is killed."""
SHUTDOWN_SECONDS = 5.0
"""Time that an engine core has to end by itself before it is killed."""
SPARE_DESCRIPTORS = 32
"""About twice what the sockets and pipes of one link take."""
CONTEXT_SECONDS = 1.0
"""Time that the sockets have to close; they usually take milliseconds."""


class Link:
    """One engine core, from its start or its joining to its death. Belongs to one event loop.

    This class alone stands for an engine core that is not there yet. A kind adds `_send` and `_receive`.

    Args:
        death: why it takes no requests, if it does not.
    """

    pid = 0
    """Process id of the engine core, on the host where it runs."""
    host = ""
    """The host's name for operators; empty: this host."""
    has_left = False
    """Whether its host has taken the engine away."""

    def __init__(self, death: str | None = None) -> None:
        self.ready = EngineCoreReady()
        self.death = death
        """Why the engine core takes no requests any more; None while it takes them."""
        self._pending: asyncio.Future[bytes] | None = None
        self._call_ids = itertools.count()
        self._calls: dict[int, asyncio.Future[UtilityResult]] = {}
        self._num_sent = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(EngineCoreOutputs)

    @property
    def is_alive(self) -> bool:
        """Whether the engine core takes requests."""
        return self.death is None

    @property
    def num_messages_waiting(self) -> int:
        """Messages that were sent and that the engine core has not received yet; known even while it hangs."""
        return 0

    def has_begun(self, message_number: int) -> bool:
        """Whether the engine core has begun to compute a request. Still known after its death."""
        return False

    def stop_listening(self) -> None:
        """Close what belongs to the event loop, in its thread."""

    def add_request(self, request: EngineCoreRequest) -> int:
        """Send a request. Never blocks. Returns the number of the message, for `has_begun`."""
        self._send(RequestType.ADD, request.request_id, self._encoder.encode(request))
        return self._num_sent

    def abort_request(self, request_id: str) -> None:
        """End a request in the engine core. Never blocks."""
        self._send(RequestType.ABORT, request_id)

    async def call_utility(self, call: UtilityCall) -> UtilityResult:
        """Make a call to the engine core between two steps. `get_output` has to be awaited meanwhile.

        Raises:
            EngineError: the call failed.
            EngineDeadError: the engine core died.
        """
        if self.death is not None:
            raise EngineDeadError(self.death)
        call_id = next(self._call_ids)
        future: asyncio.Future[UtilityResult] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        self._send(RequestType.UTILITY, str(call_id), self._encoder.encode(call))
        try:
            return await future
        finally:
            self._calls.pop(call_id, None)

    async def get_output(self) -> EngineCoreOutputs:
        """Wait for the next message of the engine core.

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
                continue  # the caller was cancelled
            if answer.error is None:
                future.set_result(answer.result)
            else:
                future.set_exception(EngineError(answer.error))
        return outputs

    def abandon(self, reason: str) -> None:
        """Take nothing more from the engine core: all that wait for it raise an EngineDeadError."""
        self.death = self.death or reason
        for future in (self._pending, *self._calls.values()):
            if future is not None and not future.done():
                future.set_exception(EngineDeadError(reason))

    def _send(self, request_type: RequestType, message_id: str, payload: bytes = b"") -> None:
        """Count and send a message, or drop it if the engine core is gone: its requests end or are replayed anyway."""
        raise NotImplementedError

    def _receive(self) -> "asyncio.Future[bytes]":
        """The next message of the engine core."""
        raise NotImplementedError


class LocalLink(Link):
    """Owns the processes of one engine core of this host, and the two sockets to it.

    The constructor starts the process and returns at once; `wait_until_ready` blocks. After `stop_listening`,
    `shutdown` may be called from any thread.

    Args:
        config: all settings.
        num_blocks: size of the KV cache; unset: what the settings and the memory say.
        lockstep: where the engines meet that share the experts.

    Raises:
        OSError: no descriptors, memory or processes are left.
        ValueError: the temporary folder's path is too long for a socket in it.
    """

    def __init__(
        self, config: EngineConfig, num_blocks: int | None = None, lockstep: LockstepOwner | None = None
    ) -> None:
        super().__init__()
        self._config, self._lockstep = config, lockstep
        self._closing = threading.Event()
        self._is_released = False
        self._watch: EngineWatch | None = None
        with contextlib.ExitStack() as opened:  # an attempt that fails leaves nothing behind: there may be many
            self._heartbeat = Heartbeat()
            opened.callback(self._heartbeat.close)
            _require_descriptors(self._heartbeat.descriptor)
            self._directory = _make_socket_directory()
            opened.callback(shutil.rmtree, self._directory, ignore_errors=True)
            self._context = zmq.Context()
            opened.callback(_end_context, self._context)
            self._input = self._context.socket(zmq.PUSH)
            self._output = zmq.asyncio.Socket(self._context, zmq.PULL)
            input_address, output_address = self._bind(self._input, "input"), self._bind(self._output, "output")
            arguments = ProcessArguments(
                config.core, input_address, output_address, self._heartbeat.descriptor, num_blocks
            )
            module = "quire_engine.core.core_process"
            if lockstep is not None:
                lockstep.end_generation()  # the engine before this one is dead
                module, arguments.lockstep = "quire_engine.core.lockstep_process", lockstep.arguments
            self._process = start_module(module, arguments, pass_fds=arguments.descriptors(), start_new_session=True)
            opened.pop_all()
        self.pid = self._process.pid

    @property
    def is_alive(self) -> bool:
        return self.death is None and self._process.returncode is None

    @property
    def num_messages_waiting(self) -> int:
        return max(self._num_sent - self._heartbeat.num_messages, 0) if self.is_alive else 0

    def wait_until_ready(self, cancelled: threading.Event | None = None) -> EngineCoreReady:
        """Block until the engine core can take requests.

        Args:
            cancelled: ends the wait when it is set.

        Raises:
            EngineDeadError: the engine core could not start; the message is its own.
        """
        was_stopped = False
        output: zmq.Socket[bytes] = zmq.Socket.shadow(self._output.underlying)  # there is no event loop yet
        while not output.poll(START_LOOK_MS):
            stopped = is_stopped(self.pid)  # the executor watches its own workers
            if stopped and was_stopped:
                self._fail("the engine process was stopped (SIGSTOP) at start-up")
            was_stopped = stopped
            if self._process.poll() is not None and not output.poll(100):
                self._fail(f"the engine process died at start-up with exit code {self._process.returncode}")
            if cancelled is not None and cancelled.is_set():
                self._fail("the engine was shut down")
        self.ready = msgspec.msgpack.decode(output.recv(), type=EngineCoreReady)
        if self.ready.error is not None:
            self._fail(self.ready.error)
        # Both sides are connected, so nothing needs the socket files any more.
        shutil.rmtree(self._directory, ignore_errors=True)
        return self.ready

    def _fail(self, reason: str) -> NoReturn:
        self.shutdown()
        raise EngineDeadError(reason)

    def watch(self, has_requests: Callable[[], bool]) -> None:
        """Begin to watch the process; when it dies, `get_output` raises in the running event loop.

        Args:
            has_requests: whether the engine core has requests; called from another thread.
        """
        loop, lockstep, rank = asyncio.get_running_loop(), self._lockstep, self._config.parallel.data_parallel_rank

        def is_due() -> bool:
            """Whether the engine core has to move: it has requests, or others wait for it that have some."""
            if lockstep is None:
                return has_requests()
            return lockstep.is_waited_for(rank) or (has_requests() and not lockstep.waits(rank))

        def on_death(reason: str) -> None:
            if lockstep is not None:
                lockstep.end_generation()  # at once: others wait for this engine in the middle of a step
            with contextlib.suppress(RuntimeError):  # the loop is closed: no call waits for an answer
                loop.call_soon_threadsafe(self.abandon, reason)

        self._watch = EngineWatch(
            self.pid,
            self.ready.worker_pids,
            self._heartbeat,
            self._config.frontend.step_timeout_s,
            is_due,
            on_death,
        )

    def has_begun(self, message_number: int) -> bool:
        return self._heartbeat.has_begun(message_number)

    def stop_listening(self) -> None:
        self._output.close(linger=0)

    def end_processes(self) -> None:
        """End all processes, by force if they do not end by themselves. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._watch is not None:
            self._watch.close()
        self._send(RequestType.SHUTDOWN, "")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(SHUTDOWN_SECONDS if self.ready.num_blocks else 0.1)
        if self._process.returncode is None:
            kill_group(self.pid)
            self._process.wait()

    def shutdown(self) -> None:
        """End all processes, and release everything. Idempotent."""
        self.end_processes()
        if self._is_released:
            return
        self._is_released = True
        if self._watch is not None:
            self._watch.join()
        self._heartbeat.close()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self.stop_listening()
        _end_context(self._context)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _bind(self, socket: "zmq.Socket[Any]", name: str) -> str:
        address = f"ipc://{self._directory / name}"
        socket.setsockopt(zmq.SNDHWM, 0)  # no limit: a full queue would block the event loop
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.bind(address)
        return address

    def _receive(self) -> "asyncio.Future[bytes]":
        return asyncio.ensure_future(self._output.recv())

    def _send(self, request_type: RequestType, message_id: str, payload: bytes = b"") -> None:
        self._num_sent += 1
        with contextlib.suppress(zmq.Again):  # the connection ends some moments before the death is noticed
            self._input.send_multipart((request_type.value, message_id.encode(), payload), zmq.NOBLOCK)


def _end_context(context: "zmq.Context[Any]") -> None:
    """Close the sockets and end their threads, but wait only a moment for it.

    libzmq waits until each connection has acknowledged its end. A connection whose other side was killed meanwhile may
    never do so. The next engine must not wait for that; two idle threads then stay behind.
    """
    ending = threading.Thread(target=context.destroy, kwargs={"linger": 0}, name="end-of-sockets", daemon=True)
    ending.start()
    ending.join(CONTEXT_SECONDS)
    if ending.is_alive():
        logger.warning("the sockets to an engine that is gone do not close; nothing waits for them")


def _require_descriptors(descriptor: int) -> None:
    """Raise OSError if no descriptors for sockets are left: libzmq aborts the whole process when it finds none for its
    own use."""
    spare: list[int] = []
    try:
        while len(spare) < SPARE_DESCRIPTORS:
            spare.append(os.dup(descriptor))
    finally:
        for one in spare:
            os.close(one)


def _make_socket_directory() -> Path:
    """A private folder (mode 0700) for the sockets. Raises ValueError if the temporary folder's path is too long for a
    socket in it."""
    directory = Path(tempfile.mkdtemp(prefix="quire-"))
    if len(os.fsencode(directory / "output")) > MAX_SOCKET_PATH:
        directory.rmdir()
        raise ValueError(
            f"TMPDIR is {directory.parent}, too long for a Unix socket's path of {MAX_SOCKET_PATH} bytes; set it to a "
            "shorter folder, such as /tmp"
        )
    return directory
