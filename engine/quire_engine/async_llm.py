"""AsyncLLM: the engine for serving. Each engine core runs in processes of its own; this one talks to the clients."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from quire_engine.adapters.files import NICENESS
from quire_engine.adapters.registry import AdapterRegistry
from quire_engine.config import EngineConfig, ModelConfig
from quire_engine.encoders.family import check_same_tower
from quire_engine.encoders.image_encoder import make_image_encoder
from quire_engine.errors import (
    CheckpointError,
    DeadlineExceededError,
    EngineDeadError,
    EngineUnavailableError,
    RequestError,
    ScalingError,
    quote,
)
from quire_engine.frontend.beam_search import BeamSearch, BeamSearchParams, next_logprobs
from quire_engine.frontend.chat_template import Conversation
from quire_engine.frontend.default_sampling_params import read_default_sampling_params
from quire_engine.frontend.input_processor import InputProcessor, Prompt
from quire_engine.frontend.introspection import combine_blocks, combine_cores, combine_engines, combine_requests
from quire_engine.frontend.output_processor import OutputProcessor
from quire_engine.frontend.tokenizer import load_tokenizer
from quire_engine.kv_connector.kv_memory import KVMemory
from quire_engine.lora import Adapter, AdapterInfo, LoRARequest
from quire_engine.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    ErrorCode,
    FinishReason,
    PinAdapter,
    ResetPrefixCache,
    UtilityCall,
    UtilityResult,
    WakeUp,
)
from quire_engine.models import check_folder, check_replacement
from quire_engine.outputs import OnOutput, PoolingOutput, PoolingRequestOutput, RequestOutput
from quire_engine.pooling import PoolingInfo, PoolingParams
from quire_engine.replicas.replica import Replica
from quire_engine.replicas.replica_set import ReplicaSet
from quire_engine.sampling_params import RequestOptions, RequestOutputKind, SamplingParams, is_text
from quire_engine.slo import RequestSLO
from quire_engine.snapshot import (
    BlocksSnapshot,
    EngineCoreSnapshot,
    EngineSnapshot,
    PrefixTreeSnapshot,
    QueueDepths,
    RankSnapshot,
    Snapshot,
)
from quire_engine.stats import AbortedBy, AdapterStats, IterationStats, SchedulerStats, StatLogger
from quire_engine.system.process_state import is_running, lower_priority
from quire_engine.tasks.reading import read_pooling_info

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
MAX_IMAGE_THREADS = 8
"""Prompts with images that are processed at once; their images take turns, and those that are cached do not wait."""
LOOK_SECONDS = 0.25
"""Interval at which live requests are compared with their targets, also while an engine is down or hangs."""


class AsyncLLM:
    """Serves many requests at once in one event loop.

    The constructor blocks until the engine core is ready. `start` is awaited once, in the loop that serves; all else is
    called in that loop, but for `input_processor` and `shutdown`, which are thread-safe.

    Args:
        config: all settings.
        stat_loggers: receive the statistics of every step.

    Raises:
        CheckpointError: the checkpoint or its tokenizer cannot be served.
        EngineDeadError: the engine core could not start; the message says why.
    """

    def __init__(self, config: EngineConfig, stat_loggers: Sequence[StatLogger] = ()) -> None:
        self.dead_error: str | None = None
        self._stat_loggers = list(stat_loggers)
        self._loop: asyncio.AbstractEventLoop | None = None
        """The one that serves, once it does."""
        self._looking: asyncio.TimerHandle | None = None
        self._adapter_stats: dict[int, AdapterStats] = {}
        """The last ones of each engine."""
        self._aborted_at: dict[str, float] = {}
        """Requests that the engine core has to end, until it reports that they hold nothing any more."""
        tokenizer_path = Path(config.model.tokenizer_path)
        # This takes milliseconds, the start of a process seconds. The engine core checks the tensors, with torch.
        model = config.model
        self._checkpoint = check_folder(Path(model.model), tokenizer_path, model.load_format, model.model_impl)
        self.default_sampling_params = read_default_sampling_params(
            config.model.model, config.frontend.generation_config, config.frontend.override_generation_config
        )
        """Sampling parameters for what the server's requests leave out. `generate` does not apply them."""
        self._kv_memory = KVMemory(config)
        config = self._kv_memory.config
        self._client = ReplicaSet(config, self._take_outputs, self._on_recovery, self._on_failure)
        try:
            tokenizer = load_tokenizer(tokenizer_path, plain=True)  # while the engine core loads the weights
            images = make_image_encoder(config, tokenizer)
            ready = self._client.wait_until_ready()
            self.adapters = AdapterRegistry(config.lora, ready.adaptable)
            """What requests may name. Other threads may ask it for names."""
        except BaseException:
            self._client.shutdown()
            self._kv_memory.close()
            raise
        self.input_processor = InputProcessor(tokenizer, ready, config.frontend.slo, images)
        # The loop's executor has few threads, and starts the next engine when one has died.
        self._renderer = ThreadPoolExecutor(1, thread_name_prefix="chat-template")
        self._adapter_reader = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._large_adapters = ThreadPoolExecutor(
            1, thread_name_prefix="large-adapters", initializer=lower_priority, initargs=(NICENESS,)
        )
        self._image_threads = ThreadPoolExecutor(MAX_IMAGE_THREADS, thread_name_prefix="images")
        self._output_processor = OutputProcessor(tokenizer)

    @property
    def config(self) -> EngineConfig:
        """All settings, with the present weights."""
        return self._client.config

    @property
    def is_healthy(self) -> bool:
        """Whether an engine core is up."""
        return self.dead_error is None and self._client.is_alive

    def is_engine_up(self, engine_index: int = 0) -> bool:
        """Whether one of several engines is up. One that has left is not down."""
        replicas = self._client.replicas
        is_there = engine_index < len(replicas) and replicas[engine_index].is_present
        return self.dead_error is None and (not is_there or replicas[engine_index].is_alive)

    @property
    def outage(self) -> str | None:
        """Why the engine is down, and when it is restarted; None while it is up."""
        return self.dead_error or self._client.outage

    @property
    def partial_outage(self) -> str | None:
        """Which of several engines are down while others serve, and why; None while all are up."""
        down = [
            f"engine {index}: {replica.outage}"
            for index, replica in enumerate(self._client.replicas)
            if replica.is_present and not replica.is_alive
        ]
        return "; ".join(down) or None

    @property
    def engine_pid(self) -> int:
        """Process id of the first engine core."""
        return self.engine_pids[0]

    @property
    def engine_pids(self) -> list[int]:
        """Process ids of the engine cores."""
        return [replica.pid for replica in self._client.replicas if replica.is_present]

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of their workers; empty if the engine cores compute themselves."""
        return [pid for replica in self._client.replicas if replica.is_present for pid in replica.worker_pids]

    def cache_config_info(self, engine_index: int = 0) -> dict[str, str]:
        """The KV cache of an engine, under vLLM's names."""
        cache, ready = self.config.cache, self._client.replicas[engine_index].ready
        return {
            "block_size": str(ready.block_size),
            "cache_dtype": cache.kv_cache_dtype,
            "enable_prefix_caching": str(cache.enable_prefix_caching),
            "gpu_memory_utilization": str(cache.gpu_memory_utilization),
            "num_gpu_blocks": str(ready.num_blocks),
        }

    def workers_up(self, engine_index: int = 0) -> list[bool]:
        """By rank of an engine, whether its process runs; the engine core's, for ranks without a process."""
        replicas, is_up = self._client.replicas, self.is_engine_up(engine_index)
        pids = replicas[engine_index].worker_pids if engine_index < len(replicas) else []
        if not pids or not is_up:
            return [is_up] * self.config.parallel.world_size
        return [is_running(pid) for pid in pids]

    async def start(self) -> None:
        """Start to receive the engine core's messages."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._client.start()

    async def _start_alive(self) -> None:
        """Like `start`. Raises EngineDeadError if the engine has ended."""
        await self.start()
        if self.dead_error is not None:
            raise EngineDeadError(self.dead_error)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str | None = None,
        *,
        priority: int | None = None,
        deadline_ms: float | None = None,
        slo: RequestSLO | None = None,
        traceparent: str | None = None,
        lora_request: LoRARequest | Adapter | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt. Leaving the iteration early aborts the request.

        `output_kind` says whether an output holds everything so far or a delta, or there is only the last one.

        Args:
            prompt: see `Prompt`.
            sampling_params: its parameters.
            request_id: unique among live requests; unset: random.
            priority: instead of the parameters' own.
            deadline_ms: milliseconds from now within which it has to finish.
            slo: its objectives; unset: those of the default class of the setting `slo`.
            traceparent: the caller's trace context, in W3C's format; ignored if it is malformed.
            lora_request: the adapter to compute with. One that is not registered is read from its path first.

        Raises:
            RequestError: the prompt or its parameters are invalid.
            CheckpointError: the adapter's folder cannot be served.
            EngineUnavailableError: the queue is full, the request waited too long, the engine sleeps, or engine cores
                keep dying.
            DeadlineExceededError: `deadline_ms` passed before it was finished.
            EngineDeadError: the engine core died, and restarts fail or `replay_on_crash` is off.
        """
        await self.start()
        adapter = await self._find_adapter(lora_request)
        options = RequestOptions(
            deadline_ms=deadline_ms, slo=slo or RequestSLO(), traceparent=traceparent, adapter=adapter
        )
        request = await self._process(prompt, sampling_params, request_id, options, priority=priority)
        queue: asyncio.Queue[RequestOutput] = asyncio.Queue()
        self.add_request(request, queue.put_nowait)
        kind = sampling_params.output_kind
        output: RequestOutput | None = None
        finished = False
        try:
            while not finished:
                delta = await queue.get()
                if output is None or kind is RequestOutputKind.DELTA:
                    output = delta
                else:
                    output.merge(delta)
                while not queue.empty():
                    output.merge(queue.get_nowait())
                finished = output.finished
                if output.error is not None:
                    raise _error_of(output, output.error)
                if finished or kind is not RequestOutputKind.FINAL_ONLY:
                    yield output
        finally:
            if not finished:
                self.abort(request.request_id)

    async def _process(self, prompt: Prompt, *arguments: Any, **options: Any) -> EngineCoreRequest:
        """As `InputProcessor.process`; in a thread if there are images, which take long."""
        if not (isinstance(prompt, Mapping) and prompt.get("multi_modal_data")):
            return self.input_processor.process(prompt, *arguments, **options)
        process = partial(self.input_processor.process, prompt, *arguments, **options)
        return await self._run_in(self._image_threads, process)

    async def _run_in(self, threads: ThreadPoolExecutor, function: Callable[[], _T]) -> _T:
        """The result of a function that prepares a request. Raises EngineDeadError if `shutdown` comes meanwhile."""

        def run() -> _T:
            if self.dead_error is not None:
                raise EngineDeadError(self.dead_error)
            return function()

        try:
            return await asyncio.get_running_loop().run_in_executor(threads, run)
        except (RequestError, RuntimeError):
            if self.dead_error is not None:
                raise EngineDeadError(self.dead_error) from None
            raise

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams,
        request_id: str | None = None,
        *,
        priority: int | None = None,
        deadline_ms: float | None = None,
        slo: RequestSLO | None = None,
        traceparent: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Compute one prompt, and yield once what its hidden states give. Leaving early aborts the request.

        Args:
            prompt: see `Prompt`; pairs of texts as well.
            pooling_params: what is unset is as the checkpoint says (`pooling_info`).
            request_id: as in `generate`, like the others and what is raised.
            priority, deadline_ms, slo, traceparent, lora_request: as there.
        """
        await self.start()
        adapter = await self._find_adapter(lora_request)
        options = RequestOptions(
            deadline_ms=deadline_ms, slo=slo or RequestSLO(), traceparent=traceparent, pooling_params=pooling_params,
            adapter=adapter,
        )  # fmt: skip
        request = await self._process(prompt, request_id=request_id, options=options, priority=priority)
        last: asyncio.Future[RequestOutput] = asyncio.get_running_loop().create_future()

        def take(output: RequestOutput) -> None:
            if output.finished and not last.done():
                last.set_result(output)

        self.add_request(request, take)
        try:
            output = await last
        finally:
            if not last.done() or last.cancelled():
                self.abort(request.request_id)
        if output.error is not None:
            raise _error_of(output, output.error)
        if output.pooled is not None:  # else it was aborted
            result = PoolingOutput(output.pooled.array())
            yield PoolingRequestOutput(request.request_id, result, output.prompt_token_ids, output.num_cached_tokens)

    @property
    def pooling_info(self) -> PoolingInfo:
        """What the checkpoint offers besides generation."""
        return self._client.ready.pooling

    def add_request(self, request: EngineCoreRequest, on_output: OnOutput) -> None:
        """Start a request; `on_output` receives every delta, in the loop's thread, the last one with `finished`.

        With `n` sequences a delta belongs to the one that its `index` names.
        """
        core_requests = self._output_processor.add_request(request, on_output)
        if self.dead_error is not None:
            self._record(None, self._output_processor.finish(request.request_id, FinishReason.ERROR, self.dead_error))
            return
        try:
            for core_request in core_requests:
                timeline = self._output_processor.timeline_of(core_request.request_id)
                self._client.add_request(core_request, timeline)
        except BaseException:
            for core_request in core_requests:
                self._output_processor.discard(core_request.request_id)
            raise
        if self._looking is None and self._stat_loggers:
            self._looking = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        """Compare live requests with their targets, and once more when the last has ended."""
        self._looking = None
        client, max_model_len = self._client, self._client.ready.max_model_len
        for stats in self._output_processor.look(max_model_len, self.replica_indices, client.engine_index):
            self._record(None, stats)
        if self._output_processor.has_requests():
            self._looking = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def abort(self, request_id: str, by: AbortedBy = "client") -> None:
        """End a request wherever it is. Its last output has finish_reason "abort". Unknown ids are ignored.

        Args:
            request_id: the caller's.
            by: what ends it, for its statistics.
        """
        engine_index = 0
        if self.dead_error is None:
            now = time.monotonic()
            for core_request_id in self._output_processor.core_request_ids(request_id):
                engine_index = self._client.engine_index(core_request_id)
                if self._client.abort_request(core_request_id):
                    self._aborted_at[core_request_id] = now
        stats = self._output_processor.finish(request_id, FinishReason.ABORT, aborted_by=by)
        stats.engine_index = engine_index
        self._record(None, stats)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams,
        request_id: str | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation, a list of `{"role": …, "content": …}`, by the checkpoint's template; see `generate`,
        also for its `options`.

        Raises:
            RequestError: the checkpoint has no chat template, or the conversation cannot be served.
        """
        render = partial(self.input_processor.apply_chat_template, Conversation(messages))
        prompt = await self._run_in(self._renderer, render)
        outputs = self.generate(prompt, sampling_params, request_id, **options)
        async with aclosing(outputs):  # leaving this iteration early leaves that one, too
            async for output in outputs:
                yield output

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> RequestOutput:
        """Search for the most likely continuations of a prompt; see `LLM.beam_search`.

        Returns:
            The `beam_width` best sequences as the outputs of one request, the best first.

        Raises:
            RequestError: the prompt or the parameters cannot be served.
        """
        request = await self._process(prompt, SamplingParams(max_tokens=1), request_id)
        search = BeamSearch(request, params, self._client.ready)
        adapter = await self._find_adapter(lora_request)
        while search.beams:
            steps = [self._last_output(beam.tokens, search.step_params, adapter) for beam in search.beams]
            search.advance([next_logprobs(output) for output in await gather_or_cancel(steps)])
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=search.completions(self.input_processor.decode),
            finished=True,
        )

    async def _last_output(self, prompt: Prompt, params: SamplingParams, adapter: Adapter | None) -> RequestOutput:
        outputs = self.generate(prompt, params, lora_request=adapter)
        async with aclosing(outputs):
            async for output in outputs:
                if output.finished:
                    return output
        raise EngineDeadError("a request ended without an output")  # not reached: generate raises first

    async def add_lora(self, lora_request: LoRARequest) -> AdapterInfo:
        """Read an adapter's folder, in a thread, and let requests name it. An adapter of the same name is replaced; its
        pin ends, unless the content is equal. Raises the errors of `AdapterRegistry.add`."""

        def run_large(function: Callable[[], _T]) -> _T:
            return self._large_adapters.submit(function).result()

        info = await self._run_in(self._adapter_reader, partial(self.adapters.add, lora_request, run_large))
        await self._unpin()
        return info

    async def remove_lora(self, lora_name: str) -> None:
        """Forget an adapter; live requests go on with it. Raises UnknownAdapterError."""
        self.adapters.remove(lora_name)
        await self._unpin()

    async def _unpin(self) -> None:
        for adapter in self.adapters.take_unpinned():
            await self._call_utility(PinAdapter(adapter, is_pinned=False))

    async def list_loras(self) -> list[AdapterInfo]:
        """All registered adapters, with the numbers that the engines last sent."""
        present = self.replica_indices
        return self.adapters.infos(stats for index, stats in self._adapter_stats.items() if index in present)

    async def pin_lora(self, lora_name: str) -> None:
        """Load an adapter on all engines, and keep it in their memory. An engine that is started later loads it with
        its next request. Raises UnknownAdapterError; RequestError: too many are pinned."""
        await self._call_utility(PinAdapter(self.adapters.pin(lora_name)))

    async def _find_adapter(self, lora_request: LoRARequest | Adapter | None) -> Adapter | None:
        """The adapter that a request names. One that is not registered is read from its path first. Raises
        UnknownAdapterError if it is not registered and has no path, and the errors of `add_lora`."""
        if self.adapters.needs_reading(lora_request):
            return (await self.add_lora(lora_request)).adapter
        return self.adapters.find(lora_request)

    async def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache, for example after new weights. Running requests are not affected."""
        return bool(await self._call_utility(ResetPrefixCache()))

    async def sleep(self, level: int = 1, mode: str = "wait") -> None:
        """Free memory until `wake_up`. New requests are rejected, or wake the engine up (`wake_on_request`). Like
        `wake_up` and `update_weights` it is completed even if the caller is cancelled.

        Args:
            level: 1 frees the KV cache, and on a GPU moves the weights to host memory; 2 discards the weights as well,
                which `wake_up` loads from the checkpoint again.
            mode: `wait` for live requests to end, or `abort` them. (vLLM's default is `abort`, and it has `keep`.)

        Raises:
            RequestError: there is no such level or mode.
            OperationError: not now, or `wake_up` was called before the requests had ended.
            EngineError: an engine cannot sleep. All are awake, unless `sleep_level` says otherwise.
        """
        if type(level) is not int or level not in (1, 2):
            raise RequestError.of("level", f"is {quote(level)}; it must be 1 (KV cache) or 2 (weights as well)")
        if mode not in ("wait", "abort"):
            raise RequestError.of("mode", f"is {quote(mode)}; it must be 'wait' (for live requests) or 'abort'")
        await self._start_alive()
        await self._client.calls.sleep(level, self._abort_all if mode == "abort" else None)

    def _abort_all(self) -> None:
        for request_id in self._output_processor.request_ids:
            self.abort(request_id, by="operator")

    async def wake_up(self) -> None:
        """Undo `sleep`. The prefix cache is empty then. No effect on an engine that is awake.

        Raises:
            EngineError: there is no memory, or the checkpoint cannot be read. The engine still sleeps.
        """
        await self._call_utility(WakeUp())

    @property
    def sleep_level(self) -> int:
        """0 while the engine is awake."""
        return self._client.calls.sleep_level

    async def update_weights(self, weights_path: str) -> None:
        """Compute with the weights of another folder, on all replicas and ranks or on none. Live requests end first,
        with the present weights; new ones are held meanwhile. The prefix cache is empty then, and KV blocks that were
        kept elsewhere are not used. An engine that is started again loads them, too.

        Args:
            weights_path: the absolute path of a checkpoint of the same architecture and shapes, with the same
                tokenizer, and if the model takes images, with the same part for them.

        Raises:
            RequestError: it is none.
            OperationError: not for these settings, or not now.
            EngineError: the weights cannot be loaded. The present ones are used.
        """
        if not (isinstance(weights_path, str) and weights_path.startswith("/") and is_text(weights_path)):
            path = quote(weights_path)
            raise RequestError.of("weights_path", f"is {path}; it must be the absolute path of a checkpoint")
        await self._start_alive()
        config = replace(self.config, model=replace(self.config.model, model=weights_path))
        try:
            await asyncio.to_thread(self._check_replacement, config.model)
        except (OSError, CheckpointError) as error:
            raise RequestError.of("weights_path", f"is {quote(weights_path)}: {error}") from None
        await self._client.update_weights(config)

    def _check_replacement(self, model: ModelConfig) -> None:
        """Check that what this process has read of the present folder holds for another one, too. Raises OSError or
        CheckpointError."""
        folder, present = Path(model.model), Path(self.config.model.model)
        check_replacement(
            folder, Path(model.tokenizer_path), Path(self.config.model.tokenizer_path), self._checkpoint,
            model.load_format, model.model_impl,
        )  # fmt: skip
        there, here = (read_pooling_info(one, self._checkpoint) for one in (folder, present))
        for name in PoolingInfo.__struct_fields__:
            if getattr(there, name) != getattr(here, name):
                raise CheckpointError(
                    f"{folder}: {name} of its vectors is {quote(getattr(there, name))}, and "
                    f"{quote(getattr(here, name))} in {present}; copy the files of sentence-transformers there, or "
                    "load it as a model of its own"
                )
        if self.input_processor.images is not None:
            check_same_tower(folder, present)

    async def is_sleeping(self) -> bool:
        """Whether `sleep` was called, and `wake_up` was not."""
        return self.sleep_level > 0

    @property
    def num_replicas(self) -> int:
        """Engines of this host."""
        return sum(replica.is_present and not replica.is_remote for replica in self._client.replicas)

    @property
    def num_remote_replicas(self) -> int | None:
        """Engines of other hosts that are up; None if there can be none."""
        if not self.config.parallel.has_remote_replicas:
            return None
        return sum(replica.is_alive and replica.is_remote for replica in self._client.replicas)

    @property
    def replica_indices(self) -> list[int]:
        """Indices of all engines, also of those that are down. `watch_replicas` reports changes."""
        return [index for index, replica in enumerate(self._client.replicas) if replica.is_present]

    def watch_replicas(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` now, and in the event loop when an engine of another host joins or leaves."""
        self._client.on_change = on_change
        on_change()

    async def scale(self, num_replicas: int) -> None:
        """Change the number of replicas on this host. No request fails.

        New ones are started beside the others, and serve once all of them are ready. Of too many, the last ones leave:
        the others continue their requests, with the same tokens. The change is completed even if the caller is
        cancelled.

        Raises:
            ScalingError: this machine or these settings do not allow so many, a new one did not start, or another
                change is under way. Nothing has changed then.
            EngineDeadError: the engine was shut down.
        """
        await self._start_alive()
        try:
            self.config.for_replica(self.config.parallel.local_rank(num_replicas - 1), num_replicas)
        except ValueError as error:
            raise ScalingError(f"there cannot be {num_replicas} replicas: {error}") from None
        await self._client.scale(num_replicas)

    async def snapshot(self, labels: Mapping[str, str] | None = None) -> Snapshot:
        """The engine's state, for operators. It does not wait for an engine that is starting.

        Args:
            labels: callers' names for their requests, by request id.
        """
        await self.start()
        client, ready = self._client, self._client.ready
        present = [(index, replica) for index, replica in enumerate(client.replicas) if replica.is_present]
        asked = [self._ask(index, replica) for index, replica in present]
        engines, answers = zip(*await asyncio.gather(*asked), strict=True)
        engine = combine_engines(engines)
        answered = combine_cores(answers, [replica.ready.num_blocks for _, replica in present])
        live, now = self._output_processor.live, time.monotonic()
        core_requests = [] if answered is None else answered.requests
        requests = combine_requests(core_requests, live, labels or {}, client.is_held, now, ready.max_model_len)
        for request in requests:
            request.engine = client.engine_index(request.id)
        blocks, prefix_tree = BlocksSnapshot(ready.block_size, ready.num_blocks), PrefixTreeSnapshot()
        if answered is not None:
            blocks, prefix_tree = combine_blocks(answered, requests)
        return Snapshot(time.time(), self.config.settings(), engine, requests, len(live), blocks, prefix_tree)

    async def _ask(self, index: int, replica: Replica) -> tuple[EngineSnapshot, EngineCoreSnapshot | None]:
        """One engine, and its core's part, if that answers."""
        queues, answered = QueueDepths(to_engine=replica.link.num_messages_waiting), None
        if self.dead_error is None:
            with contextlib.suppress(asyncio.TimeoutError):  # the snapshot reports that it did not answer
                answered = await replica.snapshot()
        is_up, scheduler = self.is_engine_up(index), self.config.scheduler
        engine = EngineSnapshot(
            is_up, replica.pid, replica.num_restarts, scheduler.max_num_seqs, scheduler.max_num_batched_tokens,
            ranks=[RankSnapshot(rank, pid, is_up) for rank, pid in enumerate(replica.worker_pids or [replica.pid])],
            queues=queues, host=replica.host, index=index,
        )  # fmt: skip
        if answered is not None:
            engine.answered, engine.ranks = True, answered.ranks
            engine.step, engine.batches_in_flight = answered.step, answered.batches_in_flight
            engine.step_seconds, engine.last_step = answered.step_seconds, answered.last_step
        return engine, answered

    def cancel(self, request_id: str) -> bool:
        """End a request by its id in a snapshot, as `abort` does. Returns whether it was live."""
        caller_request_id = self._output_processor.caller_request_id(request_id)
        if caller_request_id is not None:
            self.abort(caller_request_id, by="operator")
        return caller_request_id is not None

    async def _call_utility(self, call: UtilityCall) -> UtilityResult:
        await self._start_alive()
        return await self._client.calls.call(call)

    def shutdown(self) -> None:
        """End the engine core and wait for it. Live requests end with an error. Idempotent."""
        if self._loop is not None and self._loop.is_running():
            self._loop.call_soon_threadsafe(self._die, "the engine was shut down")
        self.dead_error = self.dead_error or "the engine was shut down"
        self._renderer.shutdown(wait=False)
        self._adapter_reader.shutdown(wait=False)
        self._large_adapters.shutdown(wait=False)
        self._image_threads.shutdown(wait=False)
        self.input_processor.shutdown()
        self._client.shutdown()
        self._kv_memory.close()

    def _take_outputs(self, outputs: EngineCoreOutputs) -> None:
        stats, to_abort = self._output_processor.process(outputs)
        for request_id in to_abort:
            self._client.abort_request(request_id)
        stats.step, stats.engine_index = outputs.step_stats, outputs.engine_index
        if outputs.scheduler_stats is not None and outputs.scheduler_stats.adapters is not None:
            self._adapter_stats[outputs.engine_index] = outputs.scheduler_stats.adapters
        if outputs.freed_request_ids:
            now = time.monotonic()
            aborted_at = [self._aborted_at.pop(request_id, None) for request_id in outputs.freed_request_ids]
            stats.cancel_to_free_seconds = [now - at for at in aborted_at if at is not None]
        self._record(outputs.scheduler_stats, stats)

    def _record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
        if self.input_processor.images is not None:
            iteration_stats.images = self.input_processor.images.take_stats()
        for stat_logger in self._stat_loggers:
            stat_logger.record(scheduler_stats, iteration_stats)

    def _on_recovery(self, stats: IterationStats, replayed_ids: Sequence[str]) -> None:
        self._aborted_at.clear()  # the dead engine core will not answer
        self._output_processor.note_replay(replayed_ids)
        stats.num_requests_replayed = len(replayed_ids)
        self._record(None, stats)

    def _on_failure(self, error: BaseException) -> None:
        """No more outputs will come: that is the engine's death."""
        reason = (
            str(error) if isinstance(error, EngineDeadError) else "the engine's outputs cannot be taken in any more"
        )
        logger.error("%s; %d requests fail", reason, len(self._output_processor.request_ids))
        self._die(reason)

    def _die(self, reason: str) -> None:
        """End every live request with an error."""
        self.dead_error = self.dead_error or reason
        self._client.stop(self.dead_error)
        for request_id in self._output_processor.request_ids:
            self._record(None, self._output_processor.finish(request_id, FinishReason.ERROR, reason))


def _error_of(output: RequestOutput, message: str) -> Exception:
    if output.error_code is ErrorCode.UNAVAILABLE:
        return EngineUnavailableError(message, output.retry_after_seconds)
    if output.error_code is ErrorCode.DEADLINE:
        return DeadlineExceededError(message)
    if output.error_parameter is not None:
        return RequestError(output.error_parameter, message)
    return EngineDeadError(message)


async def gather_or_cancel(coroutines: Sequence[Coroutine[Any, Any, RequestOutput]]) -> list[RequestOutput]:
    """Run all; if one fails or the caller is cancelled, the others are cancelled."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
