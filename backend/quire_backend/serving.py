"""Serving: runs the engine in an event loop, and takes requests from the server's stub to it and back.

Several threads call this: the stub's (`submit`, `shutdown`), the event loop's (engine), the response queue's, the
cancellation poller's, one that renders conversations, and one for long prompts. A request belongs to the loop; the
others only post to it.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from quire_engine.async_llm import MAX_IMAGE_THREADS
from quire_engine.config import FrontendConfig
from quire_engine.errors import (
    CheckpointError,
    EngineDeadError,
    EngineError,
    EngineSleepingError,
    EngineUnavailableError,
    OperationError,
    RequestError,
    ScalingError,
    UnknownAdapterError,
    is_failure,
    quote,
)
from quire_engine.frontend.chat_template import Conversation
from quire_engine.lora import LoRARequest
from quire_engine.sampling_params import RequestOptions
from quire_engine.stats import AbortedBy, FinishedRequestStats
from quire_monitoring.ended_requests import EndedRequestLog

from quire_backend.cancellation import CancellationPoller
from quire_backend.chat_format import chat_format
from quire_backend.engine import Engine
from quire_backend.introspection import (
    IntrospectionRequest,
    TokenGuard,
    parse_introspection,
)
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
    from quire_engine.messages import EngineCoreRequest
    from quire_engine.outputs import RequestOutput
    from quire_engine.snapshot import Snapshot

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
        engine: Engine,
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
        self._parsers = config.tool_call_parser, config.reasoning_parser
        self._model, self._version = model, version
        self._ended_requests = ended_requests or EndedRequestLog(0, {})
        self._introspections: set[asyncio.Task[None]] = set()
        self._scale_engine = scale or engine.scale
        self._scaling: asyncio.Future[None] | None = None
        self._num_instances = num_instances
        self._changing_adapters = asyncio.Lock()
        self._on_rejected = on_rejected
        self._when_counted = when_counted
        self._is_traced = config.otlp_endpoint is not None
        self._counting_hangs = False
        """Whether last responses are sent before they are counted, since one has waited for too long."""
        self._on_asked_to_end = on_asked_to_end
        self._is_retired = False
        self._draining = False
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
            engine, self._responses, call=self._call, end=self._end, fail=self._fail, reject=self._reject,
            check_that_it_serves=self._check_that_it_serves, note_live=self._note_live,
            is_draining=lambda: self._draining, max_queued_requests=max_queued_requests,
            report_cached_tokens=config.report_cached_tokens,
        )  # fmt: skip
        self._num_instances = num_instances
        # A template may take seconds, and so may a long prompt: only others of its kind wait for that.
        self._renderer = ThreadPoolExecutor(1, thread_name_prefix="quire-short-chats")
        self._long_renderer = ThreadPoolExecutor(1, thread_name_prefix="quire-long-prompts")
        self._image_encoder = ThreadPoolExecutor(MAX_IMAGE_THREADS, thread_name_prefix="quire-images")

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
        if self._status is not None:
            self._call(self._beat, self._status)

    def end_engine(self) -> None:
        """Reject new requests, abort live ones and answer their clients, and end the engine. Idempotent."""
        if self._draining:
            return
        self._draining = True
        if self._status is not None:
            self._call(self._show, self._status)
        self._call(self._abort_all)
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
            self._call(self._loop.stop)
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
            if self._introspect(request, stream) or self._tokenize(request, stream):
                return
        except BaseException as error:  # it would not have generated, so it does not count as rejected
            if not is_failure(error):
                raise
            if _explain(error)[0] is ErrorCode.INTERNAL:
                logger.exception("a request could not be read")
            self._responses.fail(stream, *_explain(error))
            return
        try:
            self._submit(request, stream)
        except BaseException as error:
            if not is_failure(error):
                raise
            if self._is_traced and stream.request.traceparent is None:
                traceparent = traceparent_parameter(request) or trace_context(request)
                stream.request = msgspec.structs.replace(stream.request, traceparent=traceparent)
            self._reject(stream, error)

    def _reject(self, stream: ResponseStream, error: BaseException) -> None:
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
        self._end(stream, partial(self._responses.fail, stream, code, message))

    def _fail(self, stream: ResponseStream, error: BaseException) -> None:
        _log_if_unforeseen(stream, error)
        self._responses.fail(stream, *_explain(error))

    def _introspect(self, request: TritonRequest, stream: ResponseStream) -> bool:
        """Answer a request for introspection; False when it is another one. Works while the engine is down, too."""
        introspection = parse_introspection(request_parameters(request), self._token_guard)
        if introspection is None:
            return False
        if self._draining:
            raise _UnavailableError("the model is being unloaded")
        stream.request = RequestOptions(label=request_id(request))
        self._call(self._start_answer, introspection, stream)
        return True

    def _tokenize(self, request: TritonRequest, stream: ResponseStream) -> bool:
        """Answer a request for tokens, or for their text; False when it is another one."""
        tokenization = parse_tokenization(request)
        if tokenization is None:
            return False
        if self._draining:
            raise _UnavailableError("the model is being unloaded")
        stream.request = RequestOptions(label=request_id(request))
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
            self._fail(stream, error)

    def _submit(self, request: TritonRequest, stream: ResponseStream) -> None:
        info = self._engine.pooling_info
        names = [tensor.name() for tensor in request.inputs()]
        is_pooled = is_for_vectors(request, names, info)
        operation = OPERATION if is_pooled else operation_of(names)
        stream.request = RequestOptions(label=request_id(request), operation=operation)
        if is_pooled:
            pooling = parse_pooling(request, info, self._engine.adapters)
            self._take_options(request, stream, pooling.options)
            self._note_live(stream)
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
            self._note_live(stream)
            renderer = self._long_renderer if _is_long(prompt) else self._renderer
            renderer.submit(self._render, generate, stream)
            return
        processed = self._process(generate, prompt, stream)
        self._note_live(stream, processed)
        self._call(self._add, processed, stream)
        self._poller.add(stream)

    def _take_options(self, request: TritonRequest, stream: ResponseStream, options: RequestOptions) -> None:
        stream.request = options
        self._check_that_it_serves()
        if self._is_traced and options.traceparent is None:
            stream.request = msgspec.structs.replace(options, traceparent=trace_context(request))

    def _note_live(
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
            self._check_that_it_serves()
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
            self._reject(stream, error)

    def _process_and_add(
        self, generate: GenerateRequest, prompt: str | list[int] | Embeds | dict[str, Any], stream: ResponseStream
    ) -> None:
        """The rest of `_render`, for a prompt with images in a thread that waits for these."""
        try:
            if stream.cancelled:
                self._responses.fail(stream, *CANCELLED)
                return
            self._check_that_it_serves()
            processed = self._process(generate, prompt, stream)
            self._note_live(stream, processed)
            self._call(self._add, processed, stream)
        except BaseException as error:
            self._reject(stream, error)

    def _check_that_it_serves(self) -> None:
        if self._draining:
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
        if self._draining or self._is_retired:
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
            self._reject(stream, error)
            return
        if stream.cancelled:  # before it had an id to be aborted by
            self._engine.abort(processed.request_id)

    def _start_answer(self, introspection: IntrospectionRequest, stream: ResponseStream) -> None:
        task = self._loop.create_task(self._answer(introspection, stream))
        self._introspections.add(task)  # the loop keeps only weak references to tasks
        task.add_done_callback(self._introspections.discard)

    async def _answer(self, introspection: IntrospectionRequest, stream: ResponseStream) -> None:
        try:
            if introspection.health_only:
                text = msgspec.json.encode({"healthy": self.is_ready, "is_sleeping": self._engine.sleep_level > 0})
            elif introspection.chat_format_only:
                inputs, defaults = self._engine.input_processor, self._engine.default_sampling_params.values
                sampling = {name: defaults[name] for name in ("temperature", "top_p") if name in defaults}
                template = inputs.chat_template
                shown = chat_format(template, *self._parsers)
                info = self._engine.pooling_info
                tasks = [*(["generate"] if info.can_generate else []), *info.tasks]
                limits = {
                    "has_chat_template": template is not None, "max_model_len": inputs.max_model_len, "tasks": tasks,
                }  # fmt: skip
                adapters = self._engine.adapters
                loras = {"loras": adapters.names} if adapters.is_enabled else {}
                text = msgspec.json.encode({**shown, **sampling, **limits, **loras})
            elif introspection.cancel_request_id is not None:
                text = msgspec.json.encode({"cancelled": self._engine.cancel(introspection.cancel_request_id)})
            elif introspection.num_replicas is not None:
                text = msgspec.json.encode(await self._scale(introspection.num_replicas))
            elif introspection.operation is not None:
                text = msgspec.json.encode(await self._operate(introspection.operation, introspection.arguments))
            elif introspection.ended_since is not None:
                text = msgspec.json.encode(self._ended_requests.since(introspection.ended_since))
            else:
                text = msgspec.json.encode(await self._snapshot())
            self._responses.put(stream, answer_of(text.decode()))
        except asyncio.CancelledError:
            self._responses.fail(stream, *_explain(_UnavailableError("the model is being unloaded")))
            raise
        except BaseException as error:
            if not is_failure(error):
                raise
            if not isinstance(error, RequestError | OperationError | EngineDeadError | EngineUnavailableError):
                logger.exception("introspection failed")
            self._responses.fail(stream, *_explain(error))

    async def _scale(self, num_replicas: int) -> dict[str, int]:
        """Change the number of replicas; goes on to the end even if the client has left.

        Raises:
            OperationError: it cannot be changed, or not now.
            EngineDeadError: the model is unloaded meanwhile.
        """
        self._check_that_it_is_alone()
        if self._scaling is not None and not self._scaling.done():
            raise ScalingError("the replicas are being changed; try again when that is done")
        before = self._engine.num_replicas
        self._scaling = asyncio.ensure_future(self._scale_engine(num_replicas))
        await asyncio.wait((self._scaling,))
        if self._scaling.cancelled():
            raise EngineDeadError("the model is being unloaded")
        self._scaling.result()
        answer, num_remote = {"replicas": self._engine.num_replicas, "before": before}, self._engine.num_remote_replicas
        return answer if num_remote is None else {**answer, "of_other_hosts": num_remote}

    def _check_that_it_is_alone(self) -> None:
        if self._num_instances > 1:  # which of them is asked is the server's choice
            raise OperationError(
                f"the model has {self._num_instances} instances (instance_group in its config.pbtxt), and this request "
                "has reached one of them; give it one instance, and data_parallel_size replicas of the engine behind it"
            )

    async def _operate(self, operation: str, arguments: Mapping[str, Any]) -> Any:
        """Have the engine do it; goes on to the end even if the client has left.

        Raises:
            RequestError: an argument is wrong.
            OperationError: it cannot be done, or not now; all is as before.
            EngineDeadError: the engine died, or the model is unloaded meanwhile.
        """
        engine = self._engine
        if operation == "loras":
            return await engine.list_loras()
        self._check_that_it_is_alone()
        try:
            match operation:
                case "load_lora" | "unload_lora" | "pin_lora":
                    async with self._changing_adapters:
                        return await self._change_adapter(operation, **arguments)
                case "sleep":
                    await engine.sleep(**arguments)
                case "wake_up":
                    await engine.wake_up()
                case "update_weights":
                    await engine.update_weights(arguments.get("weights_path", ""))
                    return dict(arguments)
                case "reset_prefix_cache":
                    return {"reset": await engine.reset_prefix_cache()}
        except EngineError as error:
            if isinstance(error, RequestError | OperationError | EngineDeadError | EngineUnavailableError):
                raise
            raise OperationError(str(error)) from error
        return {"is_sleeping": engine.sleep_level > 0}

    async def _change_adapter(
        self, operation: str, lora_name: str, lora_path: str = "", load_inplace: bool = False
    ) -> Any:
        """Returns the adapter, unless it is unloaded. Raises RequestError: the name or the folder is wrong."""
        engine = self._engine
        if operation == "unload_lora":
            await engine.remove_lora(lora_name)
            return {}
        if operation == "pin_lora":
            await engine.pin_lora(lora_name)
        else:
            await self._load_adapter(lora_name, lora_path, load_inplace)
        return next((info for info in await engine.list_loras() if info.name == lora_name), {})

    async def _load_adapter(self, name: str, path: str, in_place: bool) -> None:
        if name == self._model:
            raise RequestError("lora_name", f"lora_name is {quote(name)}, the model's own name; choose another")
        if name in self._engine.adapters.names and not in_place:  # vLLM's words
            raise RequestError(
                "lora_name",
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, "
                "set 'load_inplace' to True.",
            )
        if not Path(path).is_absolute():
            raise RequestError("lora_path", f"lora_path is {quote(path)}; it must be an absolute path")
        try:
            await self._engine.add_lora(LoRARequest(name, lora_path=path))
        except CheckpointError as error:
            raise RequestError("lora_path", str(error)) from None

    async def _snapshot(self) -> "Snapshot":
        with self._live_changed:
            streams = list(self._live)
        labels = {stream.request_id: stream.label for stream in streams if stream.request_id is not None}
        labels |= {one: stream.label for stream in streams if stream.batch is not None for one in stream.batch.live}
        snapshot = await self._engine.snapshot(labels)
        snapshot.model, snapshot.version = self._model, self._version
        snapshot.adapters = await self._engine.list_loras()
        snapshot.engine.queues.responses = sum(stream.pending is not None for stream in streams)
        return snapshot

    def _on_output(self, stream: ResponseStream, output: "RequestOutput") -> None:
        try:
            self._take_output(stream, output)
        except BaseException as error:
            if not is_failure(error):
                raise
            self._fail(stream, error)
            self._abort(stream, by="server")

    def _take_output(self, stream: ResponseStream, output: "RequestOutput") -> None:
        if not output.finished:
            self._responses.put(stream, output)
            return
        if output.metrics is not None:  # recorded after this turn of the loop
            output.metrics.is_streamed = stream.options.stream
        failure = failure_of(output, cancelled=stream.cancelled, draining=self._draining)
        if failure is not None:
            if stream.cancelled:
                logger.debug("[vllm] Successfully cancelled the request %r", stream.label)
            end = partial(self._responses.fail, stream, *failure)
        else:
            end = partial(self._responses.put, stream, output)
        # The engine records a step after all its outputs were delivered: after this turn of the loop.
        self._call(self._end, stream, end)

    def _abort_all(self) -> None:
        with self._live_changed:
            streams = list(self._live)
        for stream in streams:
            self._abort(stream, by="server")
        if self._scaling is not None:
            self._scaling.cancel()

    # -- any thread -------------------------------------------------------------------------------------------------

    def _end(self, stream: ResponseStream, end: Callable[[], None]) -> None:
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
        self._call(self._loop.call_later, COUNTING_TIMEOUT_SECONDS, self._end_uncounted, stream, end)

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
            self._call(self._vectors.abort, stream.batch, by)
        elif stream.request_id is not None:
            self._call(self._engine.abort, stream.request_id, by)

    def _forget(self, stream: ResponseStream) -> None:
        self._ended_requests.end(id(stream))
        with self._live_changed:
            self._live.discard(stream)
            self._show_in_flight()
            self._live_changed.notify()

    def _show_in_flight(self) -> None:
        if self._status is not None:
            self._status.in_flight(len(self._live))

    def _call(self, function: Callable[..., object], *args: object) -> None:
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
