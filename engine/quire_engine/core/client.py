"""Clients of the engine core: in the same process, or in one of its own.

::

    LLM      ─► InprocClient   ─► EngineCore
    AsyncLLM ─► SupervisedClient ─► AsyncMPClient ─► ZMQ over ipc:// ─► EngineCoreProcess ─► EngineCore
"""

import asyncio
import contextlib
import gc
import logging
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from quire_engine.config import EngineConfig
from quire_engine.core.connection import EngineConnection
from quire_engine.core.engine_watch import EngineWatch, kill_group
from quire_engine.core.heartbeat import Heartbeat
from quire_engine.core.lockstep.owner import LockstepOwner
from quire_engine.errors import EngineDeadError
from quire_engine.messages import (
    EngineCoreOutputs,
    EngineCoreReady,
    EngineCoreRequest,
    ProcessArguments,
    RequestType,
    UtilityCall,
    UtilityResult,
)
from quire_engine.stats import SchedulerStats
from quire_engine.system.child_process import start_module
from quire_engine.system.memory import paused_gc
from quire_engine.system.process_state import is_stopped

logger = logging.getLogger(__name__)

MAX_SOCKET_PATH = 107
"""Bytes of a Unix socket's path on Linux."""
START_LOOK_MS = 100
"""Seconds between looks at a process that is starting: one found stopped at two in a row is killed."""
SHUTDOWN_SECONDS = 5.0
"""How long an engine core may take to end by itself before it is killed."""
SPARE_DESCRIPTORS = 32
"""About twice what the sockets and pipes of one client take."""
CONTEXT_SECONDS = 1.0
"""How long the sockets may take to close: milliseconds, usually."""


def import_engine() -> None:
    """Import what computes, and torch, which a frontend does without."""
    with paused_gc():
        import quire_engine.core.build_engine  # noqa: F401

        gc.freeze()  # the first collection would walk all that was imported


class InprocClient:
    """Calls an EngineCore directly. For offline use: nothing runs unless `get_output` is called."""

    def __init__(self, config: EngineConfig) -> None:
        import_engine()
        from quire_engine.core.build_engine import build_engine

        self._core = build_engine(config.core)
        self.ready = self._core.ready

    def add_request(self, request: EngineCoreRequest) -> None:
        """Hand a request over.

        Raises:
            RequestError: it could never be served.
        """
        self._core.add_request(request)

    def abort_request(self, request_id: str) -> None:
        """End a request wherever it is."""
        self._core.abort_request(request_id)

    def get_output(self) -> EngineCoreOutputs:
        """Run one step."""
        self._core.wait_for_grammar()
        return self._core.step() if self._core.has_requests() else EngineCoreOutputs()

    def call_utility(self, call: UtilityCall) -> UtilityResult:
        """`EngineCore.call_utility`.

        Raises:
            EngineError: it could not.
        """
        return self._core.call_utility(call)

    def get_stats(self) -> SchedulerStats:
        """The numbers of this moment."""
        return self._core.make_stats()

    def shutdown(self) -> None:
        """End the workers."""
        self._core.shutdown()


class AsyncMPClient(EngineConnection):
    """Owns the process of one engine core, from its start to its death, and the two sockets to it.

    The constructor starts the process and returns at once; `wait_until_ready` blocks. All else belongs to one event
    loop.

    Args:
        config: all settings.
        num_blocks: size of the KV cache; unset: what the settings and the memory say.
        lockstep: what it meets the engines by that it shares the experts with; none of them meets its predecessor any
            more.

    Raises:
        OSError: there are no descriptors, no memory or no processes to be had.
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
                lockstep.end_generation()  # its predecessor is dead
                module, arguments.lockstep = "quire_engine.core.lockstep.process", lockstep.arguments
            self._process = start_module(module, arguments, pass_fds=arguments.descriptors(), start_new_session=True)
            opened.pop_all()

    @property
    def pid(self) -> int:
        """Process id of the engine core."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self.death is None and self._process.returncode is None

    @property
    def num_messages_waiting(self) -> int:
        """Messages that the engine core was sent and has not received yet; known even while it hangs."""
        return max(self._num_sent - self._heartbeat.num_messages, 0) if self.is_alive else 0

    def wait_until_ready(self, cancelled: threading.Event | None = None) -> EngineCoreReady:
        """Block until the engine core can take requests.

        Args:
            cancelled: ends the waiting when it is set.

        Raises:
            EngineDeadError: it could not start; the message is its own.
        """
        was_stopped = False
        output: zmq.Socket[bytes] = zmq.Socket.shadow(self._output.underlying)  # there is no event loop yet
        while not output.poll(START_LOOK_MS):
            stopped = is_stopped(self._process.pid)  # an executor looks after its workers itself
            if stopped and was_stopped:
                self.shutdown()
                raise EngineDeadError("the engine process was stopped (SIGSTOP) at start-up")
            was_stopped = stopped
            if self._process.poll() is not None and not output.poll(100):
                self.shutdown()
                raise EngineDeadError(f"the engine process died at start-up with exit code {self._process.returncode}")
            if cancelled is not None and cancelled.is_set():
                self.shutdown()
                raise EngineDeadError("the engine was shut down")
        self.ready = msgspec.msgpack.decode(output.recv(), type=EngineCoreReady)
        if self.ready.error is not None:
            self.shutdown()
            raise EngineDeadError(self.ready.error)
        # Both sides are connected, so the socket files have done their work: nothing is left on disk from here on.
        shutil.rmtree(self._directory, ignore_errors=True)
        return self.ready

    def watch(self, is_busy: Callable[[], bool]) -> None:
        """Begin to watch the process; when it dies, `get_output` raises in the running event loop.

        Args:
            is_busy: whether the engine core has requests; called from another thread.
        """
        loop = asyncio.get_running_loop()

        def on_death(reason: str) -> None:
            if self._lockstep is not None:
                self._lockstep.end_generation()  # at once: others wait for it in the middle of a step
            with contextlib.suppress(RuntimeError):  # the loop is closed: no call waits for an answer
                loop.call_soon_threadsafe(self._die, reason)

        self._watch = EngineWatch(
            self._process.pid,
            self.ready.worker_pids,
            self._heartbeat,
            self._config.frontend.step_timeout_s,
            is_busy,
            on_death,
        )

    def has_begun(self, message_number: int) -> bool:
        """Whether the engine core has begun to work for a request; known even when it is dead, until `shutdown`."""
        return self._heartbeat.has_begun(message_number)

    def stop_listening(self) -> None:
        """Close what belongs to the event loop, in its thread; after that, `shutdown` may be called from another."""
        self._output.close(linger=0)

    def end_processes(self) -> None:
        """End all processes, by force if they do not go by themselves. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._watch is not None:
            self._watch.close()
        self._send(RequestType.SHUTDOWN, "")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(SHUTDOWN_SECONDS if self.ready.num_blocks else 0.1)
        if self._process.returncode is None:
            kill_group(self._process.pid)
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
        with contextlib.suppress(zmq.Again):  # its socket goes some moments before the death is noticed
            self._input.send_multipart((request_type.value, message_id.encode(), payload), zmq.NOBLOCK)


def _end_context(context: "zmq.Context[Any]") -> None:
    """Close the sockets and end their threads, but wait only a moment for it.

    libzmq waits until each connection has acknowledged its end, and one whose other side was killed in the middle of it
    may never do so. The next engine must not wait for that; two idle threads stay behind then.
    """
    ending = threading.Thread(target=context.destroy, kwargs={"linger": 0}, name="end-of-sockets", daemon=True)
    ending.start()
    ending.join(CONTEXT_SECONDS)
    if ending.is_alive():
        logger.warning("the sockets to an engine that is gone do not close; nothing waits for them")


def _require_descriptors(descriptor: int) -> None:
    """Make sure that sockets can be made: libzmq ends the whole process when it finds no descriptor for its own use.

    Raises:
        OSError: there are none left.
    """
    spare: list[int] = []
    try:
        while len(spare) < SPARE_DESCRIPTORS:
            spare.append(os.dup(descriptor))
    finally:
        for one in spare:
            os.close(one)


def _make_socket_directory() -> Path:
    """A private folder (mode 0700) for the sockets.

    Raises:
        ValueError: the temporary folder's path is too long for a socket in it.
    """
    directory = Path(tempfile.mkdtemp(prefix="quire-"))
    if len(os.fsencode(directory / "output")) > MAX_SOCKET_PATH:
        directory.rmdir()
        raise ValueError(
            f"TMPDIR is {directory.parent}, too long for a Unix socket's path of {MAX_SOCKET_PATH} bytes; set it to a "
            "shorter folder, such as /tmp"
        )
    return directory
