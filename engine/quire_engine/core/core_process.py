"""The process of one EngineCore: `python -m quire_engine.core.core_process`, started by `LocalLink` alone.

::

    stdin           one line of JSON (`ProcessArguments`), then open for as long as the parent lives
    input socket    PULL ◄── [RequestType, request id, payload]        ipc:// in a private directory
    output socket   PUSH ──► EngineCoreReady once, then EngineCoreOutputs, one message per step

One thread does it all: receive, step, send. When there is nothing to do it blocks in poll and uses no CPU. When the
parent dies, however it dies, stdin ends and so does this process.
"""

import faulthandler
import logging
import math
import signal
import sys
import time
import traceback
from pathlib import Path

import msgspec
import zmq

from quire_engine.config import EngineCoreConfig, ModelConfig
from quire_engine.core.heartbeat import Heartbeat
from quire_engine.errors import CheckpointError, EngineDeadError, EngineError, EngineUnavailableError, is_failure
from quire_engine.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReady,
    EngineCoreRequest,
    ErrorCode,
    FinishReason,
    ProcessArguments,
    RequestType,
    UtilityCall,
    UtilityOutput,
)
from quire_engine.models import read_checkpoint
from quire_engine.models.checkpoints import open_checkpoint
from quire_engine.stats import AdapterStats
from quire_engine.structured_output.compiler_messages import CompilerArguments
from quire_engine.structured_output.manager import StructuredOutputManager
from quire_engine.system.child_process import end_with_stdin
from quire_engine.system.log_lines import log_to_stderr
from quire_engine.system.memory import freeze_imported, paused_gc

logger = logging.getLogger(__name__)

WAITING_TURN_MS = 100
"""The loop turns this often while requests wait for their grammars, or it would count as hung."""
START_NICENESS = 5
"""Niceness of the grammar compiler at the first start: with too few cores, the weights are loaded first."""
ADAPTER_STATS_SECONDS = 0.25
"""Interval of the statistics of LoRA adapters while requests run."""
IDLE_CHECK_MS = 1000
"""After this long without work, the block pool's integrity is checked and statistics are sent, once per idle period."""


class EngineCoreProcess:
    """The engine core's loop between its two sockets."""

    @paused_gc()
    def __init__(self, arguments: ProcessArguments) -> None:
        self._context = zmq.Context()
        self._input = self._socket(zmq.PULL, arguments.input_address)
        self._output = self._socket(zmq.PUSH, arguments.output_address)
        self._encoder = msgspec.msgpack.Encoder()
        self._request_decoder = msgspec.msgpack.Decoder(EngineCoreRequest)
        self._utility_decoder = msgspec.msgpack.Decoder[UtilityCall](UtilityCall)
        self._rejected: list[EngineCoreOutput] = []
        self._utility_outputs: list[UtilityOutput] = []
        self._freed: list[str] = []
        self._stopping = False
        self._sent_adapters: AdapterStats | None = None
        self._sent_adapters_at = -math.inf
        self._heartbeat = Heartbeat(arguments.heartbeat_fd)
        is_restart = arguments.num_blocks is not None
        try:
            if is_restart:  # the frontend has checked it before the first start
                _check_checkpoint(arguments.config.model)
            structured_output = _start_grammar_compiler(arguments.config, is_restart)
            from quire_engine.core.build_engine import build_engine  # imports torch

            if structured_output is not None:
                structured_output.imports_are_done()
            self._core = build_engine(
                arguments.config,
                arguments.num_blocks,
                structured_output,
                None if arguments.lockstep is None else arguments.lockstep.ranks,
                self._heartbeat.begin,
                self._end_generation,
            )
        except BaseException as error:
            if not is_failure(error):
                raise
            known = isinstance(error, EngineError | ValueError | OSError)
            logger.log(logging.ERROR, "cannot start: %s", error if known else traceback.format_exc())
            self._send(EngineCoreReady(error=str(error) if known else f"{type(error).__name__}: {error}"))
            raise SystemExit(1) from None
        self._heartbeat.hold()
        self._poller = zmq.Poller()
        self._poller.register(self._input, zmq.POLLIN)
        self._poller.register(self._core.structured_output.fileno(), zmq.POLLIN)
        for descriptor in self._core.executor.death_descriptors:
            self._poller.register(descriptor, zmq.POLLIN)
        self._send(self._core.ready)

    def _end_generation(self) -> None:
        """Called when a step has failed that several engines compute together."""

    def run(self) -> None:
        """Serve until a message says to stop.

        Raises:
            EngineDeadError: a worker is lost. The rest of the engine ends then, and the frontend starts another.
        """
        freeze_imported()
        self._send_stats()  # so that the size of the KV cache is known before the first request
        try:
            self._serve()
        finally:
            self._core.shutdown()

    def _serve(self) -> None:
        while not self._stopping:
            self._heartbeat.turn(self._core.oldest_request_time)
            if self._core.has_requests():
                self._receive()
                if self._core.has_requests():
                    if self._freed:  # sent at once: the step may take long
                        self._send_stats()
                    self._heartbeat.step()
                    self._send_outputs(self._core.step())
                else:
                    self._send_stats()
            else:
                self._rest()
                self._receive()
                if not self._core.has_requests():
                    self._send_stats()

    def _rest(self) -> None:
        """Block until a message comes, a grammar is ready, or a request that waits for one is overdue; for a short
        time while something is being loaded.

        After a while without work, check the integrity of the block pool, and report what has changed since the last
        step: a KV connector saves blocks between steps.
        """
        adapters = self._core.scheduler.adapters
        if self._core.scheduler.requests or (adapters is not None and adapters.is_loading):
            seconds = self._core.scheduler.seconds_until_overdue()
            self._poll(WAITING_TURN_MS if seconds is None else min(math.ceil(1000 * seconds), WAITING_TURN_MS))
        elif not self._poll(IDLE_CHECK_MS):
            self._check_integrity()
            self._send_stats()
            self._poll()

    def _poll(self, milliseconds: int | None = None) -> bool:
        """Block until something comes, for so long at most; returns whether it did."""
        has_come = bool(self._poller.poll(milliseconds))
        self._core.executor.check_health()
        if has_come:
            self._core.structured_output.drain()
        return has_come

    def _check_integrity(self) -> None:
        try:
            self._core.scheduler.check_integrity()
        except AssertionError:
            logger.exception("the KV cache's books do not balance while idle; this is a bug")

    def _receive(self) -> None:
        """Receive all messages that have come, without waiting."""
        while True:
            try:
                frames = self._input.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            number = self._heartbeat.received()
            request_type, message_id = RequestType(frames[0]), frames[1].decode()
            if request_type is RequestType.ADD:
                self._heartbeat.handle(number)
                self._add(message_id, number, frames[2])
                self._heartbeat.handle(0)
            elif request_type is RequestType.ABORT:
                self._core.abort_request(message_id)
                self._freed.append(message_id)
            elif request_type is RequestType.UTILITY:
                self._call_utility(int(message_id), frames[2])
            else:
                self._stopping = True
                return

    def _add(self, request_id: str, number: int, payload: bytes) -> None:
        """Add a request; if its message does not decode or validate, only this request ends."""
        try:
            self._core.add_request(self._request_decoder.decode(payload), number)
        except Exception as error:
            parameter = getattr(error, "parameter", None) or getattr(error.__cause__, "parameter", None)
            output = EngineCoreOutput(
                request_id, finish_reason=FinishReason.ERROR, error=str(error), error_parameter=parameter
            )
            if isinstance(error, EngineUnavailableError):
                output.error_code = ErrorCode.UNAVAILABLE
            self._rejected.append(output)

    def _call_utility(self, call_id: int, payload: bytes) -> None:
        """Answer a call; with its error if it does not decode or fails. An `EngineDeadError` ends the process."""
        try:
            output = UtilityOutput(call_id, self._core.call_utility(self._utility_decoder.decode(payload)))
        except EngineDeadError:
            raise
        except EngineError as error:
            output = UtilityOutput(call_id, False, str(error))
        except msgspec.MsgspecError as error:
            output = UtilityOutput(call_id, False, f"the call is not valid: {error}")
        self._utility_outputs.append(output)

    def _send_outputs(self, outputs: EngineCoreOutputs) -> None:
        outputs.outputs += self._rejected
        outputs.utility_outputs = self._utility_outputs
        outputs.cache_events = self._core.take_cache_events()
        self._rejected, self._utility_outputs = [], []
        self._send(outputs)

    def _send_stats(self) -> None:
        stats = self._core.make_stats()
        self._send(
            EngineCoreOutputs(
                self._rejected, stats, self._utility_outputs,
                freed_request_ids=self._freed, cache_events=self._core.take_cache_events(),
            )
        )  # fmt: skip
        self._rejected, self._utility_outputs, self._freed = [], [], []

    def _send(self, message: EngineCoreOutputs | EngineCoreReady) -> None:
        stats = message.scheduler_stats if isinstance(message, EngineCoreOutputs) else None
        if stats is not None and stats.adapters is not None:
            stats.adapters = self._adapters_to_send(stats.adapters)
        self._output.send(self._encoder.encode(message), copy=False)

    def _adapters_to_send(self, stats: AdapterStats) -> AdapterStats | None:
        """They are large, so only changes are sent, and those seldom while there is work."""
        now = time.monotonic()
        if stats is self._sent_adapters:
            return None
        if self._core.has_requests() and now - self._sent_adapters_at < ADAPTER_STATS_SECONDS:
            return None
        self._sent_adapters, self._sent_adapters_at = stats, now
        return stats

    def _socket(self, kind: int, address: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.connect(address)
        return socket


def _check_checkpoint(model: ModelConfig) -> None:
    """Find in milliseconds that files are missing or damaged, which loading would find after seconds of imports: an
    engine that does not start is tried again and again. Raises CheckpointError."""
    if model.load_format != "dummy":
        _ = open_checkpoint(Path(model.model)).tensors


def _start_grammar_compiler(config: EngineCoreConfig, is_restart: bool) -> StructuredOutputManager | None:
    """Start the grammar compiler along with the engine, so that it is ready when the engine is. At a restart
    (`is_restart`) requests may be waiting for both; at the first start the loading of weights comes first. Returns None
    if the checkpoint cannot be read, or generates nothing."""
    try:
        checkpoint = read_checkpoint(Path(config.model.model), config.model.model_impl)
    except (CheckpointError, OSError, ValueError):
        return None  # loading the model fails of the same, and reports it
    if not checkpoint.can_generate:
        return None
    compiler = CompilerArguments.for_model(config.model.tokenizer_path, checkpoint.vocab_size, checkpoint.eos_token_ids)
    compiler.niceness = 0 if is_restart else START_NICENESS
    structured_output = StructuredOutputManager(compiler)
    structured_output.start()
    return structured_output


def main(kind: "type[EngineCoreProcess]" = EngineCoreProcess) -> None:
    """Entry point of the child process."""
    log_to_stderr("quire engine[%(process)d] %(levelname)s: %(message)s")
    for number in (signal.SIGINT, signal.SIGTERM):  # both may reach the whole group; the parent decides
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the frontend's watch sends it before it kills
    arguments = msgspec.json.decode(sys.stdin.buffer.readline(), type=ProcessArguments)
    end_with_stdin()
    try:
        kind(arguments).run()
    except EngineDeadError as error:
        logger.error("%s", error)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
