"""The prompts of requests for vectors on their way through the engine.

::

    PoolingRequest ─ process ─► PoolingBatch ─ add ─► engine ─ take ─► tensors_of_vectors ─► one response
                    (tokenizes)               └── at most `MAX_LIVE_PROMPTS` ──┘

The engine has the prompts of a request as requests of its own, at most `MAX_LIVE_PROMPTS` of them at once, so that a
large batch is no flood: other clients' requests wait for some of it, and not for all.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from quire_engine.errors import RequestError, is_failure
from quire_engine.frontend.chat_template import Conversation
from quire_engine.pooling import HEAD_TASKS, TOKEN_TASKS, PoolingInfo, similarity
from quire_engine.sampling_params import RequestOptions
from quire_engine.stats import AbortedBy

from quire_backend.pooling import EMBEDDING_REQUEST, PoolingBatch, PoolingRequest, bytes_in_response
from quire_backend.request import INPUT_NAMES, LongConversation
from quire_backend.response_queue import ResponseQueue, ResponseStream
from quire_backend.responses import CANCELLED, MAX_RESPONSE_BYTES, answer_of, failure_of, perf_metrics
from quire_backend.triton_api import strings

if TYPE_CHECKING:
    from quire_engine.async_llm import AsyncLLM
    from quire_engine.messages import EngineCoreRequest
    from quire_engine.outputs import RequestOutput

MAX_LIVE_PROMPTS = 256
"""Prompts of one request that the engine has at once, at most."""
_PROMPTS_PER_TURN = 32
"""Prompts of a batch that the engine is given in one turn of the event loop, between which outputs are sent."""


def most_live_prompts(max_queued_requests: int | None) -> int:
    """How many prompts of one request the engine may have at once, so that they alone never fill its queue.

    Args:
        max_queued_requests: the engine's setting; None: its queue has no bound.
    """
    return MAX_LIVE_PROMPTS if max_queued_requests is None else max(1, min(MAX_LIVE_PROMPTS, max_queued_requests))


class RequestOwner(Protocol):
    """The part of `Serving` that is used here."""

    @property
    def is_draining(self) -> bool: ...
    def call(self, function: Callable[..., object], *args: object) -> None: ...
    def end(self, stream: ResponseStream, end: Callable[[], None]) -> None: ...
    def fail(self, stream: ResponseStream, error: BaseException) -> None: ...
    def reject(self, stream: ResponseStream, error: BaseException) -> None: ...
    def check_that_it_serves(self) -> None: ...
    def note_live(self, stream: ResponseStream, *, num_prompt_tokens: int) -> None: ...


class PoolingBatches:
    """Takes batches through the engine. But for `process`, only the event loop's thread uses it.

    Args:
        serving: runs the engine, and ends the requests.
        engine: the model's engine.
        responses: where the answers go.
        max_queued_requests, report_cached_tokens: the settings.
    """

    def __init__(
        self,
        serving: RequestOwner,
        engine: "AsyncLLM",
        responses: ResponseQueue,
        *,
        max_queued_requests: int | None,
        report_cached_tokens: bool,
    ) -> None:
        self._serving, self._engine, self._responses = serving, engine, responses
        self._report_cached_tokens = report_cached_tokens
        self._most_live_prompts = most_live_prompts(max_queued_requests)

    def process(self, pooling: PoolingRequest, stream: ResponseStream) -> None:
        """Tokenize the prompts of a batch, in any thread, and give them to the loop."""
        batch, info, num_bytes = PoolingBatch(request=pooling), self._engine.pooling_info, 0
        try:
            for number, prompt in enumerate(pooling.prompts):
                if stream.cancelled:
                    self._responses.fail(stream, *CANCELLED)
                    return
                self._serving.check_that_it_serves()
                processed = self._process_prompt(pooling, number, prompt, stream.request)
                batch.waiting.append((number, processed))
                if processed.options.pooling_params is not None and not pooling.compared:
                    num_bytes += info.num_bytes(processed.options.pooling_params, processed.prompt_token_ids)
                    check_size(pooling, num_bytes)
            self._serving.note_live(stream, num_prompt_tokens=batch.num_prompt_tokens)
            self._serving.call(self._begin, batch, stream)
        except BaseException as error:
            self._serving.reject(stream, error)

    def _process_prompt(
        self, pooling: PoolingRequest, number: int, prompt: Any, options: RequestOptions
    ) -> "EngineCoreRequest":
        inputs = self._engine.input_processor
        try:
            if isinstance(prompt, LongConversation):
                prompt = prompt.parse(inputs.max_model_len)
            if isinstance(prompt, Conversation):
                prompt = inputs.apply_chat_template(prompt)
            return inputs.process(prompt, options=options, priority=pooling.priority)
        except RequestError as error:
            if error.parameter not in INPUT_NAMES:
                raise
            name = EMBEDDING_REQUEST if pooling.as_text else INPUT_NAMES[error.parameter]
            name = "messages" if pooling.is_conversation else name
            which = f"[{number}]" if len(pooling.prompts) > 1 and not pooling.compared else ""
            raise RequestError(name, name + which + str(error).removeprefix(error.parameter)) from None

    def _begin(self, batch: PoolingBatch, stream: ResponseStream) -> None:
        stream.batch = batch
        if stream.cancelled:  # before there was anything to abort
            self._responses.fail(stream, *CANCELLED)
        else:
            self._add_prompts(batch, stream)

    def _add_prompts(self, batch: PoolingBatch, stream: ResponseStream, most: int = _PROMPTS_PER_TURN) -> None:
        """Give the engine some prompts of a batch, and if there is room for all of these, more in the next turn."""
        for _ in range(most):
            if not batch.waiting or len(batch.live) >= self._most_live_prompts:
                return
            number, processed = batch.waiting.popleft()
            batch.live.add(processed.request_id)
            try:
                self._engine.add_request(processed, partial(self._on_vector, batch, stream, number))
            except BaseException as error:
                if not is_failure(error):
                    raise
                batch.live.discard(processed.request_id)
                self._drop(batch, by="server")
                self._serving.reject(stream, error)
                return
        if most > 1:
            self._serving.call(self._add_prompts, batch, stream)

    def _on_vector(self, batch: PoolingBatch, stream: ResponseStream, number: int, output: "RequestOutput") -> None:
        try:
            if output.finished:
                self._take_vector(batch, stream, number, output)
        except BaseException as error:
            if not is_failure(error):
                raise
            self._serving.fail(stream, error)
            self._drop(batch, by="server")

    def _take_vector(self, batch: PoolingBatch, stream: ResponseStream, number: int, output: "RequestOutput") -> None:
        batch.live.discard(output.request_id)
        if batch.has_failed:
            return
        failure = failure_of(output, cancelled=stream.cancelled, draining=self._serving.is_draining)
        if failure is not None:
            self._drop(batch, by="client" if stream.cancelled else "server")
            self._serving.call(self._serving.end, stream, partial(self._responses.fail, stream, *failure))
            return
        batch.done[number] = output
        if batch.waiting:
            self._add_prompts(batch, stream, most=1)
        elif not batch.live:
            stream.num_made_bytes = batch.num_bytes
            if batch.request.compared:  # if they are many, in a thread of their own
                stream.num_pending_bytes += batch.num_vector_bytes
            stream.make_tensors = partial(
                tensors_of_vectors, batch, self._engine.pooling_info, report_cached_tokens=self._report_cached_tokens
            )
            # As in `Serving._take_output`.
            self._serving.call(self._serving.end, stream, partial(self._responses.put, stream, answer_of("")))

    def _drop(self, batch: PoolingBatch, by: AbortedBy) -> None:
        """Forget what is left of a batch that has failed."""
        batch.has_failed = True
        batch.waiting.clear()
        for id_ in list(batch.live):
            self._engine.abort(id_, by)

    def abort(self, batch: PoolingBatch, by: AbortedBy) -> None:
        """Abort a batch: the end of one of its prompts is the end of all."""
        for id_ in list(batch.live)[:1]:
            self._engine.abort(id_, by)


def check_size(request: PoolingRequest, num_bytes: int) -> None:
    """Reject a request whose vectors would be computed and then not be sent.

    Args:
        request: whose vectors are in the response.
        num_bytes: of some of its vectors.

    Raises:
        RequestError: they exceed `MAX_RESPONSE_BYTES`.
    """
    num_bytes = bytes_in_response(request, num_bytes)
    if num_bytes > MAX_RESPONSE_BYTES:
        name = EMBEDDING_REQUEST if request.as_text else request.input_name
        raise RequestError(
            name,
            f"{name} asks for more than {MAX_RESPONSE_BYTES} bytes of numbers; send fewer prompts in one request",
        )


def tensors_of_vectors(batch: PoolingBatch, info: PoolingInfo, *, report_cached_tokens: bool) -> dict[str, Any]:
    """The outputs of the response.

    Args:
        batch: all of whose prompts have ended.
        info: of the model.
        report_cached_tokens: the setting of that name.
    """
    request, done = batch.request, [batch.done[number] for number in range(len(batch.done))]
    params = request.options.pooling_params
    task = (params and params.task) or ""
    arrays = [output.pooled.array() for output in done if output.pooled is not None]
    tensors: dict[str, npt.NDArray[Any]] = {}
    if request.compared:
        # Lists of all vectors at once would take eight times their memory.
        rows = [[similarity(info.similarity, arrays[a].tolist(), arrays[b].tolist())] for a, b in request.compared]
        tensors["scores"] = np.array(rows, np.float32)
    else:
        is_head = task in HEAD_TASKS
        # Rows of tokens go below each other; a vector is a row.
        tensors["scores" if is_head else "embeddings"] = np.concatenate([np.atleast_2d(array) for array in arrays])
        if task in TOKEN_TASKS:
            tensors["num_rows"] = np.array([len(array) for array in arrays], np.uint32)
        if is_head and task != "score" and len(info.labels) == arrays[0].shape[-1]:
            tensors["labels"] = strings(list(info.labels))
    if request.as_text:
        tensors["text_output"] = strings([msgspec.json.encode(array.tolist()).decode() for array in arrays])
    if "num_input_tokens" in request.outputs:
        tensors["num_input_tokens"] = np.array([len(output.prompt_token_ids) for output in done], np.uint32)
    if "num_output_tokens" in request.outputs:
        tensors["num_output_tokens"] = np.zeros(len(done), np.uint32)
    if "perf_metrics" in request.outputs:
        tensors["perf_metrics"] = strings(
            [perf_metrics(output.metrics, report_cached_tokens=report_cached_tokens) for output in done]
        )
    return tensors
