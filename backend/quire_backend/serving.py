"""Serving: the engine in its event loop, and the life of every request between the server's stub and it.

Four threads meet here: the stub's (`submit`, `shutdown`), the event loop's (engine), the response queue's and the
cancellation poller's. A request belongs to the loop; the others only post to it.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from quire_engine.config import FrontendConfig
from quire_engine.errors import EngineDeadError, RequestError
from quire_engine.sampling_params import SamplingParams
from quire_engine.slo import DEFAULT_CLASS, RequestSLO

from quire_backend.cancellation import CancellationPoller
from quire_backend.request import GenerateRequest, UnknownLoRAError, parse_request
from quire_backend.response_queue import ResponseQueue, ResponseStream
from quire_backend.responses import failure_of
from quire_backend.triton_api import ErrorCode, TritonRequest, trace_context

if TYPE_CHECKING:
    from quire_engine.input_processor import ProcessedRequest
    from quire_engine.outputs import RequestOutput

__all__ = ["Engine", "Serving"]

logger = logging.getLogger(__name__)

START_TIMEOUT_SECONDS = 60.0
DRAIN_TIMEOUT_SECONDS = 5.0
"""How long `shutdown` waits for the last responses of the requests that it has aborted."""

_INPUT_NAMES = {"prompt": "text_input", "prompt_token_ids": "input_ids"}
"""What our clients know the engine's parameters as, where it is not the same."""


class InputProcessor(Protocol):
    """As much of the engine's input processor as is needed here."""

    def process(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        deadline_ms: float | None = None,
        slo: RequestSLO | None = None,
        traceparent: str | None = None,
        label: str = "",
    ) -> "ProcessedRequest":
        """Tokenize and validate; raises RequestError."""
        ...


class Engine(Protocol):
    """As much of `AsyncLLM` as is needed here."""

    @property
    def input_processor(self) -> InputProcessor: ...
    @property
    def is_healthy(self) -> bool: ...
    @property
    def dead_error(self) -> str | None: ...
    def add_request(self, request: "ProcessedRequest", on_output: "Callable[[RequestOutput], None]") -> None: ...
    def abort(self, request_id: str) -> None: ...
    async def start(self) -> None: ...
    def shutdown(self) -> None: ...


class Serving:
    """Serves requests with one engine.

    Args:
        engine: ready, but not started yet.
        config: how often streams are sent.
        on_rejected: called for every request that is refused before it reaches the engine, with the class of objectives
            that it would have been judged by; None when the fault was the request's own.
    """

    def __init__(
        self,
        engine: Engine,
        config: FrontendConfig,
        on_rejected: Callable[[str | None], None] = lambda slo_class: None,
    ) -> None:
        self._engine = engine
        self._on_rejected = on_rejected
        self._is_traced = config.otlp_endpoint is not None
        self._draining = False
        self._live: set[ResponseStream] = set()
        self._live_changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._loop_thread = threading.Thread(target=self._run_loop, name="quire-engine-loop", daemon=True)
        self._responses = ResponseQueue(
            stream_interval=config.stream_interval,
            stream_interval_ms=config.stream_interval_ms,
            on_broken=self._abort,
            on_closed=self._forget,
        )
        self._poller = CancellationPoller(on_cancelled=self._abort)

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken and the engine steps."""
        return self._engine.is_healthy and not self._draining

    def start(self) -> None:
        """Start the threads, and the engine in its loop."""
        self._loop_thread.start()
        asyncio.run_coroutine_threadsafe(self._engine.start(), self._loop).result(START_TIMEOUT_SECONDS)
        self._responses.start()
        self._poller.start()

    def shutdown(self) -> None:
        """Refuse what comes, abort what lives, tell its clients, and end the engine and all threads."""
        self._draining = True
        self._call(self._abort_all)
        with self._live_changed:
            if not self._live_changed.wait_for(lambda: not self._live, DRAIN_TIMEOUT_SECONDS):
                logger.warning("%d requests were still open when the model was unloaded", len(self._live))
        self._poller.stop()
        self._responses.stop()
        self._engine.shutdown()
        if self._loop_thread.is_alive():
            self._call(self._loop.stop)
            self._loop_thread.join(timeout=5.0)

    # -- the stub's thread ------------------------------------------------------------------------------------------

    def submit(self, request: TritonRequest) -> None:
        """Take a request; never raises. Whatever is wrong with it, its client hears of it and nobody else does."""
        try:
            stream = ResponseStream(request.get_response_sender())
        except Exception:
            logger.exception("a request cannot be answered")
            return
        with self._live_changed:
            self._live.add(stream)
        try:
            self._submit(request, stream)
        except Exception as error:
            if _explain(error)[0] is ErrorCode.INTERNAL:
                logger.exception("request %r could not be taken", stream.label)
            self._reject(stream, error)

    def _reject(self, stream: ResponseStream, error: Exception) -> None:
        """End a request that never reached the engine."""
        code, message = _explain(error)
        is_callers_fault = code in (ErrorCode.INVALID_ARG, ErrorCode.NOT_FOUND)
        self._on_rejected(None if is_callers_fault else stream.slo_class)
        self._responses.fail(stream, code, message)

    def _submit(self, request: TritonRequest, stream: ResponseStream) -> None:
        generate: GenerateRequest = parse_request(request)
        stream.label, stream.options = generate.label, generate.options
        stream.slo_class = DEFAULT_CLASS if generate.slo is None else generate.slo.slo_class
        if self._draining:
            raise _UnavailableError("the model is being unloaded; send the request elsewhere or again later")
        if self._engine.dead_error is not None:  # while it is only started again, the request waits for it
            raise _UnavailableError(f"the engine is not running: {self._engine.dead_error}")
        if self._is_traced and generate.traceparent is None:
            generate = replace(generate, traceparent=trace_context(request))
        processed = self._process(generate)
        stream.request_id = processed.request_id
        self._call(self._add, processed, stream)
        self._poller.add(stream)

    def _process(self, generate: GenerateRequest) -> "ProcessedRequest":
        try:
            return self._engine.input_processor.process(
                generate.prompt,
                generate.sampling_params,
                deadline_ms=generate.deadline_ms,
                slo=generate.slo,
                traceparent=generate.traceparent,
                label=generate.label,
            )
        except RequestError as error:
            name = _INPUT_NAMES.get(error.parameter)
            if name is None:
                raise
            raise RequestError(name, name + str(error).removeprefix(error.parameter)) from None

    # -- the loop's thread ------------------------------------------------------------------------------------------

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _add(self, processed: "ProcessedRequest", stream: ResponseStream) -> None:
        try:
            self._engine.add_request(processed, lambda output: self._on_output(stream, output))
        except Exception as error:
            self._reject(stream, error)

    def _on_output(self, stream: ResponseStream, output: "RequestOutput") -> None:
        failure = failure_of(output, cancelled=stream.cancelled, draining=self._draining) if output.finished else None
        if failure is not None:
            self._responses.fail(stream, *failure)
        else:
            self._responses.put(stream, output)

    def _abort_all(self) -> None:
        with self._live_changed:
            streams = list(self._live)
        for stream in streams:
            if stream.request_id is not None:
                self._engine.abort(stream.request_id)

    # -- any thread -------------------------------------------------------------------------------------------------

    def _abort(self, stream: ResponseStream) -> None:
        if stream.request_id is not None:
            self._call(self._engine.abort, stream.request_id)

    def _forget(self, stream: ResponseStream) -> None:
        with self._live_changed:
            self._live.discard(stream)
            self._live_changed.notify()

    def _call(self, function: Callable[..., object], *args: object) -> None:
        """Run a function in the loop's thread; a loop that has ended runs nothing."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            logger.debug("the event loop has ended")


class _UnavailableError(Exception):
    """Not now."""


def _explain(error: Exception) -> tuple[ErrorCode, str]:
    """The kind of error that the client gets, and the words."""
    if isinstance(error, UnknownLoRAError):
        return ErrorCode.NOT_FOUND, str(error)
    if isinstance(error, RequestError):
        return ErrorCode.INVALID_ARG, str(error)
    if isinstance(error, _UnavailableError | EngineDeadError):
        return ErrorCode.UNAVAILABLE, str(error)
    return ErrorCode.INTERNAL, f"the backend failed: {type(error).__name__}: {error}"
