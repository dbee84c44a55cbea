"""Serving: runs the engine in an event loop, and takes requests from the server's stub to it and back.

Several threads call this: the stub's (`submit`, `shutdown`), the event loop's (engine), the response queue's, the
cancellation poller's, one that renders conversations, and one for long prompts. A request belongs to the loop; the
others only post to it.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from quire_engine.async_llm import MAX_IMAGE_THREADS
from quire_engine.config import FrontendConfig
from quire_engine.errors import (
    EngineDeadError,
    EngineSleepingError,
    EngineUnavailableError,
    OperationError,
    RequestError,
    UnknownAdapterError,
    is_failure,
)
from quire_engine.frontend.chat_template import Conversation
from quire_engine.sampling_params import RequestOptions
from quire_engine.stats import AbortedBy, FinishedRequestStats
from quire_monitoring.ended_requests import EndedRequestLog

from quire_backend.cancellation import CancellationPoller
from quire_backend.introspection import IntrospectionRequest, TokenGuard, parse_introspection
from quire_backend.operations import EXPECTED_ERRORS, Operations
from quire_backend.pooling import OPERATION, is_for_vectors, parse_pooling
from quire_backend.pooling_batches import PoolingBatches
from quire_backend.request import (
    INPUT_NAMES,
    LONG_PROMPT,
    Embeds,
    GenerateRequest,
    LongConversation,
    Prompt,
    decode_images,
    operation_of,
    parse_request,
    traceparent_parameter,
)
from quire_backend.response_queue import ResponseQueue, ResponseStream
from quire_backend.responses import BYTES_PER_LOGPROB, CANCELLED, MAX_RESPONSE_BYTES, answer_of, failure_of
from quire_backend.status_page import BEAT_SECONDS, StatusPage, StubState
from quire_backend.tokenization import TokenizationRequest, answer_tokenization, parse_tokenization
from quire_backend.triton_api import ErrorCode, TritonRequest, request_id, request_parameters, trace_context

if TYPE_CHECKING:
    from quire_engine.async_llm import AsyncLLM
    from quire_engine.messages import EngineCoreRequest
    from quire_engine.outputs import RequestOutput

logger = logging.getLogger(__name__)

START_TIMEOUT_SECONDS = 60.0
DRAIN_TIMEOUT_SECONDS = 5.0
"""How long `shutdown` waits for the last responses of the requests that it has aborted."""
COUNTING_TIMEOUT_SECONDS = 1.0
"""How long the last response of a request waits until the request is counted: milliseconds, unless metrics hang."""

LONG_EMBEDS = 1 << 20
"""Bytes of hidden states that take milliseconds to be checked and hashed."""


class Serving:
    """Serves requests with one engine.

    Args:
        engine: ready, but not started yet.
        config: how often streams are sent, and the introspection token.
        on_rejected: called for every request that is rejected before it reaches the engine; with a verdict, unless the
            request itself was wrong.
        when_counted: calls back when everything that the engine and `on_rejected` have reported is in the metrics. So a
            client that has its last response finds its request in the metrics, unless that takes too long.
        scale: changes the number of replicas; unset: the engine does.
        ended_requests: the log of ended requests that operators see; its maker feeds it.
        model: the model's name, for snapshots.
        version: its version.
        status: shows `quire serve` that the event loop turns; closed by `shutdown`.
        on_asked_to_end: called once, in a thread of its own, when `quire serve` wants the engine to be ended because
            the server has forgotten this stub.
        max_queued_requests: the engine's setting.
        num_instances: of the model. What operators change has to reach all, so there must be one then.
    """

    def __init__(
        self,
        engine: "AsyncLLM",
        config: FrontendConfig,
        on_rejected: Callable[[FinishedRequestStats], None] = lambda request: None,
        when_counted: Callable[[Callable[[], None]], None] = lambda callback: callback(),
        *,
        scale: Callable[[int], Awaitable[None]] | None = None,
        ended_requests: EndedRequestLog | None = None,
        model: str = "",
        version: str = "",
        status: StatusPage | None = None,
        on_asked_to_end: Callable[[], None] = lambda: None,
        max_queued_requests: int | None = None,
        num_instances: int = 1,
    ) -> None:
        self._engine = engine
        self._status = status
        self._token_guard = TokenGuard(config.introspection_token)
        self._report_cached_tokens = config.report_cached_tokens
        self._model = model
        self._ended_requests = ended_requests or EndedRequestLog(0, {})
        self._introspections: set[asyncio.Task[None]] = set()
        self._operations = Operations(
            engine, config, self._ended_requests, is_ready=lambda: self.is_ready, live_streams=self._live_streams,
            scale=scale or engine.scale, model=model, version=version, num_instances=num_instances,
        )  # fmt: skip
        self._on_rejected = on_rejected
        self._when_counted = when_counted
        self._is_traced = config.otlp_endpoint is not None
        self._counting_hangs = False
        """Whether last responses are sent before they are counted, since one has waited for too long."""
        self._on_asked_to_end = on_asked_to_end
        self._is_retired = False
        self.is_draining = False
        """Whether the model is being unloaded."""
        self._live: set[ResponseStream] = set()
        self._live_changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._loop_thread = threading.Thread(target=self._run_loop, name="quire-engine-loop", daemon=True)
        self._responses = ResponseQueue(
            stream_interval=config.stream_interval,
            stream_interval_ms=config.stream_interval_ms,
            on_broken=self._abort_broken,
            on_closed=self._forget,
            on_sending=lambda number: None if status is None else status.sending(number),
        )
        self._poller = CancellationPoller(on_cancelled=self._cancel)
        self._vectors = PoolingBatches(
            self, engine, self._responses, max_queued_requests=max_queued_requests,
            report_cached_tokens=config.report_cached_tokens,
        )  # fmt: skip
        # A template may take seconds, and so may a long prompt: only others of its kind wait for that.
        self._renderer = ThreadPoolExecutor(1, thread_name_prefix="quire-short-chats")
        self._long_renderer = ThreadPoolExecutor(1, thread_name_prefix="quire-long-prompts")
        self._image_encoder = ThreadPoolExecutor(MAX_IMAGE_THREADS, thread_name_prefix="quire-images")

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken and the engine steps."""
        return self._engine.is_healthy and not self.is_draining

    def start(self) -> None:
        """Start the threads, and the engine in its loop."""
        self._loop_thread.start()
        asyncio.run_coroutine_threadsafe(self._engine.start(), self._loop).result(START_TIMEOUT_SECONDS)
        self._responses.start()
        self._poller.start()
        if self._status is not None:
            self.call(self._beat, self._status)

    def end_engine(self) -> None:
        """Reject new requests, abort live ones and answer their clients, and end the engine. Idempotent."""
        if self.is_draining:
            return
        self.is_draining = True
        if self._status is not None:
            self.call(self._show, self._status)
        self.call(self._abort_all)
        with self._live_changed:
            if not self._live_changed.wait_for(lambda: not self._live, DRAIN_TIMEOUT_SECONDS):
                logger.warning("%d requests were still open when the model was unloaded", len(self._live))
        try:
            self._engine.shutdown()
        except BaseException:  # the rest has to end all the same
            logger.exception("the engine did not end as it should")

    def shutdown(self) -> None:
        """End the engine and all threads."""
        self.end_engine()
        self._renderer.shutdown(wait=False)
        self._long_renderer.shutdown(wait=False)
        self._image_encoder.shutdown(wait=False)
        self._poller.stop()
        self._responses.stop()
        if self._loop_thread.is_alive():
            self.call(self._loop.stop)
            self._loop_thread.join(timeout=5.0)
        if self._status is not None:
            self._status.close()

    # -- the stub's thread ------------------------------------------------------------------------------------------

    def submit(self, request: TritonRequest) -> None:
        """Take a request; never raises. A request that fails is an error of its own client."""
        try:
            stream = ResponseStream(request.get_response_sender())
        except BaseException as error:
            if not is_failure(error):
                raise
            logger.exception("a request cannot be answered")
            return
        with self._live_changed:
            self._live.add(stream)
            self._show_in_flight()
        try:
            if self._asks_about_the_model(request, stream):
                return
        except BaseException as error:  # it would not have generated, so it does not count as rejected
            if not is_failure(error):
                raise
            self.fail(stream, error)
            return
        try:
            self._submit(request, stream)
        except BaseException as error:
            if not is_failure(error):
                raise
            if self._is_traced and stream.request.traceparent is None:
                traceparent = traceparent_parameter(request) or trace_context(request)
                stream.request = msgspec.structs.replace(stream.request, traceparent=traceparent)
            self.reject(stream, error)

    def reject(self, stream: ResponseStream, error: BaseException) -> None:
        """End a request that never reached the engine."""
        _log_if_unforeseen(stream, error)
        code, message = _explain(error)
        is_asleep = isinstance(error, EngineSleepingError)
        if is_asleep:
            message += f" (quire model wake {self._model}, or POST /wake_up at the OpenAI gateway)"
        rejected = FinishedRequestStats(
            "rejected", e2e_seconds=time.monotonic() - stream.received_at, error_code=code.value.lower(),
            error=message, options=stream.request,
        )  # fmt: skip
        # The others are the client's fault, and an engine that sleeps is no outage: an operator has put it to sleep.
        if code not in (ErrorCode.INVALID_ARG, ErrorCode.NOT_FOUND) and not is_asleep:
            rejected.slo_verdict, rejected.slo_cause = "miss", "rejected"
        try:
            self._on_rejected(rejected)
        except BaseException:
            logger.exception("a rejected request was not recorded")
        self.end(stream, partial(self._responses.fail, stream, code, message))

    def fail(self, stream: ResponseStream, error: BaseException) -> None:
        """End a request with an error, without counting it."""
        _log_if_unforeseen(stream, error)
        self._responses.fail(stream, *_explain(error))

    def _asks_about_the_model(self, request: TritonRequest, stream: ResponseStream) -> bool:
        """Answer a request for introspection, which works while the engine is down, too, or for tokens or their text.
        False when it is another one."""
        introspection = parse_introspection(request_parameters(request), self._token_guard)
        tokenization = None if introspection else parse_tokenization(request)
        if introspection is None and tokenization is None:
            return False
        if self.is_draining:
            raise _UnavailableError("the model is being unloaded")
        stream.request = RequestOptions(label=request_id(request))
        if introspection is not None:
            self.call(self._start_answer, introspection, stream)
        if tokenization is not None:
            renderer = self._long_renderer if _is_long(tokenization.prompt) else self._renderer
            renderer = self._image_encoder if tokenization.images else renderer
            renderer.submit(self._answer_tokenization, tokenization, stream)
        return True

    def _answer_tokenization(self, tokenization: TokenizationRequest, stream: ResponseStream) -> None:
        """In the thread that renders conversations: long texts take a while, too."""
        try:
            answer = answer_tokenization(tokenization, self._engine.input_processor)
            self._responses.put(stream, answer_of(msgspec.json.encode(answer).decode()))
        except BaseException as error:
            self.fail(stream, error)

    def _submit(self, request: TritonRequest, stream: ResponseStream) -> None:
        info = self._engine.pooling_info
        names = [tensor.name() for tensor in request.inputs()]
        is_pooled = is_for_vectors(request, names, info)
        operation = OPERATION if is_pooled else operation_of(names)
        stream.request = RequestOptions(label=request_id(request), operation=operation)
        if is_pooled:
            pooling = parse_pooling(request, info, self._engine.adapters)
            self._take_options(request, stream, pooling.options)
            self.note_live(stream)
            self._poller.add(stream)  # its client may leave before it is tokenized
            if pooling.is_long:
                self._long_renderer.submit(self._vectors.process, pooling, stream)
            elif pooling.is_conversation:
                self._renderer.submit(self._vectors.process, pooling, stream)
            else:
                self._vectors.process(pooling, stream)
            return
        generate: GenerateRequest = parse_request(request, self._engine.default_sampling_params, self._engine.adapters)
        stream.options = replace(generate.options, report_cached_tokens=self._report_cached_tokens)
        self._take_options(request, stream, generate.request_options)
        self._check_logprobs(generate)
        prompt = generate.prompt
        if isinstance(prompt, Conversation | LongConversation) or _is_long(prompt) or generate.images:
            self._poller.add(stream)  # its client may leave before it is rendered
            self.note_live(stream)
            renderer = self._long_renderer if _is_long(prompt) else self._renderer
            renderer.submit(self._render, generate, stream)
            return
        processed = self._process(generate, prompt, stream)
        self.note_live(stream, processed)
        self.call(self._add, processed, stream)
        self._poller.add(stream)

    def _take_options(self, request: TritonRequest, stream: ResponseStream, options: RequestOptions) -> None:
        stream.request = options
        self.check_that_it_serves()
        if self._is_traced and options.traceparent is None:
            stream.request = msgspec.structs.replace(options, traceparent=trace_context(request))

    def note_live(
        self, stream: ResponseStream, processed: "EngineCoreRequest | None" = None, *, num_prompt_tokens: int = 0
    ) -> None:
        """Should the server die, the request is among those that it has lost."""
        if processed is not None:
            stream.request_id = processed.request_id
            num_prompt_tokens = len(processed.prompt_token_ids)
        self._ended_requests.begin(
            id(stream), stream.request, request_id=stream.request_id or "", num_prompt_tokens=num_prompt_tokens
        )

    def _check_logprobs(self, generate: GenerateRequest) -> None:
        """Reject a request whose answer would be computed and then not be sent.

        Raises:
            RequestError: its log-probabilities alone exceed `MAX_RESPONSE_BYTES`.
        """
        params = generate.sampling_params
        if not generate.options.shows_logprobs or params.logprobs is None:
            return
        num_tokens = min(params.max_tokens or 0, self._engine.input_processor.max_model_len)
        number = params.n * num_tokens * (params.logprobs + 1)
        if number * BYTES_PER_LOGPROB > MAX_RESPONSE_BYTES:
            raise RequestError(
                "logprobs",
                f"logprobs asks for {number} of them in all (of n times max_tokens), about {BYTES_PER_LOGPROB} bytes "
                f"each, which exceeds the {MAX_RESPONSE_BYTES} of an answer; ask for fewer",
            )

    def _render(self, generate: GenerateRequest, stream: ResponseStream) -> None:
        """The rest of `_submit` for a conversation or a long prompt, in the thread that renders these."""
        try:
            if stream.cancelled:
                self._responses.fail(stream, *CANCELLED)
                return
            self.check_that_it_serves()
            prompt: Any = generate.prompt
            if isinstance(prompt, LongConversation):
                prompt = prompt.parse(self._engine.input_processor.max_model_len)
            images = decode_images(generate.images)
            if isinstance(prompt, Conversation):
                prompt = msgspec.structs.replace(prompt, images=images) if images else prompt
                prompt = self._engine.input_processor.apply_chat_template(prompt)
            elif images:
                key = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
                prompt = {key: prompt, "multi_modal_data": {"image": images}}
            if isinstance(prompt, dict):
                self._image_encoder.submit(self._process_and_add, generate, prompt, stream)
            else:
                self._process_and_add(generate, prompt, stream)
        except BaseException as error:
            self.reject(stream, error)

    def _process_and_add(
        self, generate: GenerateRequest, prompt: str | list[int] | Embeds | dict[str, Any], stream: ResponseStream
    ) -> None:
        """The rest of `_render`, for a prompt with images in a thread that waits for these."""
        try:
            if stream.cancelled:
                self._responses.fail(stream, *CANCELLED)
                return
            self.check_that_it_serves()
            processed = self._process(generate, prompt, stream)
            self.note_live(stream, processed)
            self.call(self._add, processed, stream)
        except BaseException as error:
            self.reject(stream, error)

    def check_that_it_serves(self) -> None:
        """Raise an error if the model is being unloaded, or its engine has ended."""
        if self.is_draining:
            raise _UnavailableError("the model is being unloaded; send the request elsewhere or again later")
        if self._engine.dead_error is not None:  # while it is being started again, the request waits for it
            raise _UnavailableError(f"the engine is not running: {self._engine.dead_error}")

    def _process(
        self, generate: GenerateRequest, prompt: str | list[int] | Embeds | dict[str, Any], stream: ResponseStream
    ) -> "EngineCoreRequest":
        try:
            return self._engine.input_processor.process(
                {"prompt_embeds": prompt.rows} if isinstance(prompt, Embeds) else prompt,
                generate.sampling_params,
                options=stream.request,
            )
        except RequestError as error:
            name = INPUT_NAMES.get(error.parameter)
            if name is None:
                raise
            if isinstance(generate.prompt, Conversation | LongConversation):
                name = "messages"
            raise RequestError(name, name + str(error).removeprefix(error.parameter)) from None

    # -- the loop's thread ------------------------------------------------------------------------------------------

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _beat(self, status: StatusPage) -> None:
        if status.is_asked_to_end and not self._is_retired:
            self._is_retired = True
            threading.Thread(target=self._on_asked_to_end, name="quire-end", daemon=True).start()
        self._show(status)
        self._loop.call_later(BEAT_SECONDS, self._beat, status)

    def _show(self, status: StatusPage) -> None:
        """Update the status page."""
        outage = self._engine.outage
        if self.is_draining or self._is_retired:
            state = StubState.RETIRED if self._is_retired else StubState.ENDING
            status.beat(state, "the model is being unloaded")
        elif outage is None:
            status.beat(StubState.UP, self._engine.partial_outage or "")
        else:
            state = StubState.DOWN if self._engine.dead_error is None else StubState.DEAD
            status.beat(state, outage)

    def _add(self, processed: "EngineCoreRequest", stream: ResponseStream) -> None:
        try:
            self._engine.add_request(processed, lambda output: self._on_output(stream, output))
        except BaseException as error:
            if not is_failure(error):
                raise
            self.reject(stream, error)
            return
        if stream.cancelled:  # before it had an id to be aborted by
            self._engine.abort(processed.request_id)

    def _start_answer(self, introspection: IntrospectionRequest, stream: ResponseStream) -> None:
        task = self._loop.create_task(self._answer(introspection, stream))
        self._introspections.add(task)  # the loop keeps only weak references to tasks
        task.add_done_callback(self._introspections.discard)

    async def _answer(self, introspection: IntrospectionRequest, stream: ResponseStream) -> None:
        try:
            answer = await self._operations.answer(introspection)
            self._responses.put(stream, answer_of(msgspec.json.encode(answer).decode()))
        except asyncio.CancelledError:
            self._responses.fail(stream, *_explain(_UnavailableError("the model is being unloaded")))
            raise
        except BaseException as error:
            if not is_failure(error):
                raise
            if not isinstance(error, EXPECTED_ERRORS):
                logger.exception("introspection failed")
            self._responses.fail(stream, *_explain(error))

    def _on_output(self, stream: ResponseStream, output: "RequestOutput") -> None:
        try:
            self._take_output(stream, output)
        except BaseException as error:
            if not is_failure(error):
                raise
            self.fail(stream, error)
            self._abort(stream, by="server")

    def _take_output(self, stream: ResponseStream, output: "RequestOutput") -> None:
        if not output.finished:
            self._responses.put(stream, output)
            return
        if output.metrics is not None:  # recorded after this turn of the loop
            output.metrics.is_streamed = stream.options.stream
        failure = failure_of(output, cancelled=stream.cancelled, draining=self.is_draining)
        if failure is not None:
            if stream.cancelled:
                logger.debug("[vllm] Successfully cancelled the request %r", stream.label)
            end = partial(self._responses.fail, stream, *failure)
        else:
            end = partial(self._responses.put, stream, output)
        # The engine records a step after all its outputs were delivered: after this turn of the loop.
        self.call(self.end, stream, end)

    def _abort_all(self) -> None:
        for stream in self._live_streams():
            self._abort(stream, by="server")
        self._operations.cancel_scaling()

    # -- any thread -------------------------------------------------------------------------------------------------

    def _live_streams(self) -> list[ResponseStream]:
        with self._live_changed:
            return list(self._live)

    def end(self, stream: ResponseStream, end: Callable[[], None]) -> None:
        """Send a request's last response as soon as the request is counted, or after a timeout."""
        if self._counting_hangs:
            end()
            return
        try:
            self._when_counted(end)
        except BaseException:
            logger.exception("the end of request %r was not counted", stream.label)
            end()
            return
        self.call(self._loop.call_later, COUNTING_TIMEOUT_SECONDS, self._end_uncounted, stream, end)

    def _end_uncounted(self, stream: ResponseStream, end: Callable[[], None]) -> None:
        if stream.ending:
            return
        if not self._counting_hangs:
            logger.warning(
                "the server has taken no metrics for %g s: until it does, requests end before they are counted",
                COUNTING_TIMEOUT_SECONDS,
            )
            self._counting_hangs = True
            self._when_counted(self._counting_goes_on)
        end()

    def _counting_goes_on(self) -> None:
        self._counting_hangs = False
        logger.info("the server takes metrics again")

    def _cancel(self, stream: ResponseStream) -> None:
        logger.debug("[vllm] Cancelling the request %r: its client has left", stream.label)  # vllm_backend's message
        self._abort(stream)

    def _abort_broken(self, stream: ResponseStream) -> None:
        self._abort(stream, by="client" if stream.failure is None else "server")

    def _abort(self, stream: ResponseStream, by: AbortedBy = "client") -> None:
        if stream.batch is not None:
            self.call(self._vectors.abort, stream.batch, by)
        elif stream.request_id is not None:
            self.call(self._engine.abort, stream.request_id, by)

    def _forget(self, stream: ResponseStream) -> None:
        self._ended_requests.end(id(stream))
        with self._live_changed:
            self._live.discard(stream)
            self._show_in_flight()
            self._live_changed.notify()

    def _show_in_flight(self) -> None:
        if self._status is not None:
            self._status.in_flight(len(self._live))

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Run a function in the loop's thread, unless the loop has ended."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            logger.debug("the event loop has ended")


def _is_long(prompt: Prompt) -> bool:
    if isinstance(prompt, Embeds):
        return prompt.rows.nbytes > LONG_EMBEDS
    return isinstance(prompt, LongConversation) or (isinstance(prompt, str) and len(prompt) > LONG_PROMPT)


class _UnavailableError(Exception):
    """The request may succeed later or elsewhere."""


def _log_if_unforeseen(stream: ResponseStream, error: BaseException) -> None:
    if _explain(error)[0] is ErrorCode.INTERNAL:
        logger.error("request %r could not be taken", stream.label, exc_info=error)


def _explain(error: BaseException) -> tuple[ErrorCode, str]:
    """The error code and message that the client gets."""
    if isinstance(error, UnknownAdapterError):
        return ErrorCode.NOT_FOUND, str(error)
    if isinstance(error, RequestError):
        return ErrorCode.INVALID_ARG, str(error)
    if isinstance(error, _UnavailableError | EngineDeadError | EngineUnavailableError | OperationError):
        return ErrorCode.UNAVAILABLE, str(error)
    return ErrorCode.INTERNAL, "the backend failed at this request; the server's log has the cause"
