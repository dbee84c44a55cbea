"""LLM: the engine for offline use. Same engine core, same process, no server."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from tqdm import tqdm

from quire_engine.adapters.registry import AdapterRegistry
from quire_engine.config import EngineConfig
from quire_engine.encoders.image_encoder import make_image_encoder
from quire_engine.errors import EngineError, RequestError
from quire_engine.frontend.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams, next_logprobs
from quire_engine.frontend.chat_template import Conversation
from quire_engine.frontend.default_sampling_params import read_default_sampling_params
from quire_engine.frontend.input_processor import InputProcessor, Prompt
from quire_engine.frontend.output_processor import OutputProcessor
from quire_engine.frontend.tokenizer import load_tokenizer
from quire_engine.kv_connector.kv_memory import KVMemory
from quire_engine.lora import Adapter, AdapterInfo, LoRARequest
from quire_engine.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    PinAdapter,
    ResetPrefixCache,
    Sleep,
    WakeUp,
)
from quire_engine.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    PoolingRequestOutput,
    PoolingResult,
    RequestOutput,
    ScoringOutput,
)
from quire_engine.pooling import PoolingInfo, PoolingParams, number_texts, pair_texts, similarity
from quire_engine.sampling_params import NO_OPTIONS, RequestOptions, SamplingParams
from quire_engine.stats import SchedulerStats
from quire_engine.system.memory import freeze_imported, paused_gc

LoRAs = LoRARequest | Adapter | Sequence[LoRARequest | Adapter | None] | None
"""One adapter for all prompts, or one or none for each."""
Output = TypeVar("Output", RequestOutput, EngineCoreOutput)
MAX_LIVE_REQUESTS = 256
"""Live requests of `generate_each`: more than run at once, but not more than the grammar compiler's queue holds."""


class LLM:
    """Generates for lists of prompts, synchronously.

    Args:
        model: path of a Hugging Face checkpoint folder, or of a GGUF file.
        settings: any other setting of `model.json`, by name.

    Raises:
        CheckpointError: the folder cannot be served.
        ValueError: a setting is unknown or bad.
    """

    def __init__(self, model: str | Path, **settings: Any) -> None:
        config = EngineConfig.from_settings({"model": str(model), **settings})
        if config.parallel.num_ranks > 1:
            name = "data_parallel_size" if config.parallel.data_parallel_size > 1 else "data_parallel_max_size"
            raise ValueError(
                f"{name} is {getattr(config.parallel, name)}; LLM runs one engine in its own process: "
                "use AsyncLLM or the server for several"
            )
        self._default_sampling_params = read_default_sampling_params(
            config.model.model, config.frontend.generation_config, config.frontend.override_generation_config
        ).params
        with ThreadPoolExecutor(1) as thread:
            loading = thread.submit(load_tokenizer, Path(config.model.tokenizer_path), plain=True)
            with paused_gc():  # this imports torch, while a process tries the tokenizer
                from quire_engine.core.build_engine import build_engine

                freeze_imported()
            tokenizer = loading.result()
        with contextlib.ExitStack() as on_failure:
            self._kv_memory = KVMemory(config)
            on_failure.callback(self._kv_memory.close)
            self._core = build_engine(self._kv_memory.config.core)
            on_failure.callback(self._core.shutdown)
            self._adapters = AdapterRegistry(config.lora, self._core.ready.adaptable)
            images = make_image_encoder(config, tokenizer)
            on_failure.pop_all()
        self._inputs = InputProcessor(tokenizer, self._core.ready, images=images)
        self._outputs = OutputProcessor(tokenizer)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] | None = None,
        lora_request: LoRAs = None,
    ) -> list[RequestOutput]:
        """Complete every prompt.

        Args:
            prompts: one prompt or several; see `Prompt`. A flat list of ints is one prompt of token ids.
            sampling_params: one for all, or one per prompt; unset: `get_default_sampling_params`.
            use_tqdm: show a progress bar.
            priority: instead of the parameters' own; one for all, or one per prompt.
            lora_request: the adapter to compute with; one for all, or one or None per prompt.

        Returns:
            One finished output per prompt, in their order.

        Raises:
            RequestError: a prompt or its parameters cannot be served; nothing was started then.
            CheckpointError: an adapter's folder cannot be served.
            EngineSleepingError: `sleep` was called, and `wake_up` was not.
        """
        prompt_list = _as_prompts(prompts)
        if sampling_params is None:
            sampling_params = self._default_sampling_params
        num_prompts = len(prompt_list)
        all_params = [sampling_params] * num_prompts if isinstance(sampling_params, SamplingParams) else sampling_params
        priorities = [priority] * num_prompts if priority is None or isinstance(priority, int) else priority
        for name, values in (("sampling_params", all_params), ("priority", priorities)):
            if len(values) != num_prompts:
                raise ValueError(f"{name} has {len(values)} entries for {num_prompts} prompts")
        adapters = self._find_adapters(lora_request, num_prompts)
        requests = [
            self._inputs.process(prompt, params, priority=own_priority, options=_options_of(adapter))
            for prompt, params, own_priority, adapter in zip(prompt_list, all_params, priorities, adapters, strict=True)
        ]
        return self._run_all(requests, use_tqdm)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        *,
        pooling_task: str | None = None,
        lora_request: LoRAs = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Compute every prompt, and return what its hidden states give instead of generating.

        Args:
            prompts: see `generate`.
            pooling_params: for all, or one per prompt; unset: as the checkpoint says (`pooling_info`).
            use_tqdm: show a progress bar.
            pooling_task: the task of parameters that name none.
            lora_request: see `generate`.

        Returns:
            One output per prompt, in their order; `outputs.data` is a float32 tensor, [D] or [tokens, D].

        Raises:
            RequestError: a prompt or its parameters cannot be served; nothing was started then.
            EngineSleepingError: `sleep` was called, and `wake_up` was not.
            EngineError: a request failed.
        """
        import torch

        prompt_list = _as_prompts(prompts)
        if pooling_params is None or isinstance(pooling_params, PoolingParams):
            pooling_params = [_with_task(pooling_params or PoolingParams(), pooling_task)] * len(prompt_list)
        if len(pooling_params) != len(prompt_list):
            raise ValueError(f"pooling_params has {len(pooling_params)} entries for {len(prompt_list)} prompts")
        requests = []
        adapters = self._find_adapters(lora_request, len(prompt_list))
        for prompt, params, adapter in zip(prompt_list, pooling_params, adapters, strict=True):
            options = RequestOptions(pooling_params=_with_task(params, pooling_task), adapter=adapter)
            requests.append(self._inputs.process(prompt, options=options))
        ends = {output.request_id: output for output in _with_progress(self._pool(requests), len(requests), use_tqdm)}
        answers = []
        for request in requests:
            output = ends[request.request_id]
            if output.pooled is None:
                raise EngineError(f"a prompt could not be encoded: {output.error or output.finish_reason!s}")
            result = PoolingOutput(torch.from_numpy(output.pooled.array().copy()))
            answers.append(
                PoolingRequestOutput(output.request_id, result, request.prompt_token_ids, output.num_cached_tokens)
            )
        return answers

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: LoRAs = None,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """The embedding of every prompt, `outputs.embedding`. For the arguments and errors see `encode`."""
        answers = self.encode(prompts, pooling_params, use_tqdm, pooling_task="embed", lora_request=lora_request)
        return [_answer(one, EmbeddingOutput(one.outputs.data.tolist())) for one in answers]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: LoRAs = None,
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """The probability of each of the checkpoint's labels for every prompt, `outputs.probs`; see `encode`."""
        answers = self.encode(prompts, pooling_params, use_tqdm, pooling_task="classify", lora_request=lora_request)
        return [_answer(one, ClassificationOutput(one.outputs.data.tolist())) for one in answers]

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: LoRAs = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """What a reward model gives each token of every prompt, or each step of it, `outputs.data`; see `encode`."""
        return self.encode(prompts, pooling_params, use_tqdm, pooling_task="token_classify", lora_request=lora_request)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        use_tqdm: bool = True,
        *,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """How well texts belong together, `outputs.score`: by the checkpoint's head for pairs, or by the similarity of
        their embeddings.

        Args:
            data_1: one text, for all of the others; or as many as these.
            data_2: the others; one text, or as many.
            use_tqdm: show a progress bar.
            pooling_params: for all.
            lora_request: for all; see `generate`.

        Returns:
            One output per pair, in their order. `prompt_token_ids` are those of both texts.

        Raises:
            RequestError: there are neither as many texts as others, nor one; see `encode` for the other errors.
        """
        firsts, seconds = ([data] if isinstance(data, str) else list(data) for data in (data_1, data_2))
        pairs = pair_texts(firsts, seconds, ("data_1", "data_2"))
        if pooling_params is not None and pooling_params.task == "score":  # whatever computes it
            pooling_params = msgspec.structs.replace(pooling_params, task=None)
        if "embed" not in self.pooling_info.tasks:
            prompts = [{"prompt": first, "pair": second} for first, second in pairs]
            answers = self.encode(prompts, pooling_params, use_tqdm, pooling_task="score", lora_request=lora_request)
            return [_answer(one, ScoringOutput(one.outputs.data.item())) for one in answers]
        texts, numbers = number_texts(pairs)
        embedded = self.embed(texts, pooling_params, use_tqdm, lora_request=lora_request)
        scores = []
        for first, second in numbers:
            one, other = embedded[first], embedded[second]
            score = similarity(self.pooling_info.similarity, one.outputs.embedding, other.outputs.embedding)
            token_ids = one.prompt_token_ids + other.prompt_token_ids
            num_cached_tokens = one.num_cached_tokens + other.num_cached_tokens
            scores.append(PoolingRequestOutput(one.request_id, ScoringOutput(score), token_ids, num_cached_tokens))
        return scores

    @property
    def pooling_info(self) -> PoolingInfo:
        """What the checkpoint offers besides generation."""
        return self._core.ready.pooling

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding deltas.

        Raises:
            RequestError: the prompt or its parameters cannot be served.
            CheckpointError: the adapter's folder cannot be served.
        """
        (adapter,) = self._find_adapters(lora_request, 1)
        params = sampling_params or self._default_sampling_params
        return self._run([self._inputs.process(prompt, params, options=_options_of(adapter))])

    def generate_each(
        self, entries: Iterable[tuple[Prompt, SamplingParams]]
    ) -> Iterator[tuple[int, RequestOutput | RequestError]]:
        """Complete any number of prompts; an invalid one does not affect the others.

        Args:
            entries: prompts, or conversations as `{"messages": [...]}`, and their parameters; read as capacity allows.

        Yields:
            The entry's number, from 0, and its finished output or why it was rejected; in the order of their ends.
        """
        numbers: dict[str, int] = {}
        rejected: list[tuple[int, RequestError]] = []

        def requests() -> Iterator[EngineCoreRequest]:
            for number, (prompt, params) in enumerate(entries):
                request = self._process_or_reject(prompt, params)
                if isinstance(request, RequestError):
                    rejected.append((number, request))
                else:
                    numbers[request.request_id] = number
                    yield request

        for output in self._finished(requests(), MAX_LIVE_REQUESTS):
            yield from rejected
            rejected.clear()
            yield numbers.pop(output.request_id), output
        yield from rejected

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: LoRAs = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of `{"role": …, "content": …}`, by the checkpoint's template.

        A content is a text, or a list of parts: `{"type": "text", "text": …}`, and images as
        `{"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}` or
        `{"type": "image_pil", "image_pil": image}`, which takes what `multi_modal_data` does. Videos are
        `{"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,FRAME,FRAME,…"}}` or
        `{"type": "video", "video": frames}`.

        Raises:
            RequestError: the checkpoint has no chat template, or a conversation cannot be served.
        """
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts: list[Prompt] = [self._inputs.apply_chat_template(Conversation(each)) for each in conversations]
        return self.generate(prompts, sampling_params, use_tqdm, lora_request=lora_request)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        use_tqdm: bool = False,
        *,
        lora_request: LoRAs = None,
    ) -> list[BeamSearchOutput]:
        """Search for the most likely continuations of every prompt, with the semantics of transformers' `num_beams`.

        Returns:
            For each prompt its `beam_width` best sequences, the best first.

        Raises:
            RequestError: a prompt or the parameters cannot be served.
        """
        prompt_list = _as_prompts(prompts)
        adapters = self._find_adapters(lora_request, len(prompt_list))
        searches = [
            BeamSearch(self._inputs.process(prompt, SamplingParams(max_tokens=1)), params, self._core.ready)
            for prompt in prompt_list
        ]
        adapter_of = {id(search): adapter for search, adapter in zip(searches, adapters, strict=True)}
        with tqdm(total=len(searches), desc="Searched prompts", unit="prompt", disable=not use_tqdm) as progress:
            live = searches
            while live:
                beams = [(search, beam.tokens) for search in live for beam in search.beams]
                outputs = self.generate(
                    [{"prompt_token_ids": tokens} for _, tokens in beams],
                    [search.step_params for search, _ in beams],
                    use_tqdm=False,
                    lora_request=[adapter_of[id(search)] for search, _ in beams],
                )
                steps = iter(outputs)
                for search in live:
                    search.advance([next_logprobs(next(steps)) for _ in search.beams])
                live = [search for search in live if search.beams]
                progress.update(len(searches) - len(live) - progress.n)
        for search in searches:
            for sequence in search.finished:
                sequence.text = self._inputs.decode(sequence.tokens)
        return [BeamSearchOutput(search.finished) for search in searches]

    def get_default_sampling_params(self) -> SamplingParams:
        """The checkpoint's own defaults, by its `generation_config.json` and the settings that change it."""
        return self._default_sampling_params

    def abort(self, request_id: str) -> None:
        """End the request of a `stream`; its last output has finish_reason "abort"."""
        for core_request_id in self._outputs.core_request_ids(request_id):
            self._core.abort_request(core_request_id)
        self._outputs.finish(request_id, FinishReason.ABORT)

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache, for example after new weights. Running requests are not affected."""
        return bool(self._core.call_utility(ResetPrefixCache()))

    def sleep(self, level: int = 1) -> None:
        """Free memory until `wake_up`. No request may be live, and new ones are rejected.

        Args:
            level: 1 frees the KV cache; 2 the weights as well, which `wake_up` loads from the checkpoint again.

        Raises:
            EngineError: a `stream` is not finished, or there is no such level.
        """
        self._core.call_utility(Sleep(level))

    def wake_up(self) -> None:
        """Undo `sleep`. The prefix cache is empty then. No effect on an engine that is awake."""
        self._core.call_utility(WakeUp())

    def is_sleeping(self) -> bool:
        """Whether `sleep` was called, and `wake_up` was not."""
        return self._core.sleep_level > 0

    def add_lora(self, lora_request: LoRARequest) -> AdapterInfo:
        """Read an adapter's folder, and let requests name it. An adapter of the same name is replaced; its pin ends,
        unless the content is equal. Raises the errors of `AdapterRegistry.add`."""
        info = self._adapters.add(lora_request)
        self._unpin()
        return info

    def remove_lora(self, lora_name: str) -> None:
        """Forget an adapter; live requests go on with it. Raises UnknownAdapterError."""
        self._adapters.remove(lora_name)
        self._unpin()

    def _unpin(self) -> None:
        for adapter in self._adapters.take_unpinned():
            self._core.call_utility(PinAdapter(adapter, is_pinned=False))

    def list_loras(self) -> list[AdapterInfo]:
        """All registered adapters."""
        stats = self._core.make_stats().adapters
        return self._adapters.infos([] if stats is None else [stats])

    def pin_lora(self, lora_name: str) -> None:
        """Load an adapter before its next request at the latest, and keep it in memory. Raises UnknownAdapterError;
        RequestError: too many are pinned."""
        self._core.call_utility(PinAdapter(self._adapters.pin(lora_name)))

    def _find_adapters(self, lora_request: LoRAs, number: int) -> list[Adapter | None]:
        """For each prompt its adapter, whose folder is read if it is named for the first time."""
        if lora_request is None or isinstance(lora_request, LoRARequest | Adapter):
            return [self._find_adapter(lora_request)] * number
        if len(lora_request) != number:
            raise ValueError(f"lora_request has {len(lora_request)} entries for {number} prompts")
        return [self._find_adapter(request) for request in lora_request]

    def _find_adapter(self, request: LoRARequest | Adapter | None) -> Adapter | None:
        if self._adapters.needs_reading(request):
            return self.add_lora(request).adapter
        return self._adapters.find(request)

    def get_stats(self) -> SchedulerStats:
        """Statistics of the engine core."""
        return self._core.make_stats()

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the ranks; empty if this process is the only one."""
        return self._core.ready.worker_pids

    def shutdown(self) -> None:
        """End the workers and free their memory, also on a GPU. Nothing can be generated afterwards."""
        self._inputs.shutdown()
        self._core.shutdown()
        self._kv_memory.close()

    def _process_or_reject(self, prompt: Prompt, params: SamplingParams) -> EngineCoreRequest | RequestError:
        try:
            if isinstance(prompt, Mapping) and set(prompt) == {"messages"}:
                prompt = self._inputs.apply_chat_template(Conversation(prompt["messages"]))
            return self._inputs.process(prompt, params)
        except RequestError as error:
            return error

    def _run_all(self, requests: Sequence[EngineCoreRequest], use_tqdm: bool) -> list[RequestOutput]:
        """Run the requests; returns their whole outputs, in order."""
        finished = _with_progress(self._finished(requests), len(requests), use_tqdm)
        results = {output.request_id: output for output in finished}
        return [results[request.request_id] for request in requests]

    def _finished(self, requests: Iterable[EngineCoreRequest], most: int | None = None) -> Iterator[RequestOutput]:
        """Like `_run`, but yields whole outputs, in the order of their ends."""
        outputs: dict[str, RequestOutput] = {}
        for delta in self._run(requests, most):
            output = outputs.setdefault(delta.request_id, delta)
            if output is not delta:
                output.merge(delta)
            if output.finished:
                yield outputs.pop(delta.request_id)

    def _run(self, requests: Iterable[EngineCoreRequest], most: int | None = None) -> Iterator[RequestOutput]:
        """Add the requests, at most `most` at a time, and step until all are finished; yields every delta."""
        self._check_idle()
        deltas: list[RequestOutput] = []
        waiting = iter(requests)
        try:
            while True:
                while most is None or len(self._outputs.request_ids) < most:
                    request = next(waiting, None)
                    if request is None:
                        break
                    for core_request in self._outputs.add_request(request, deltas.append):
                        self._core.add_request(core_request)
                if not self._outputs.has_requests():
                    break
                outputs = self._step()
                self._outputs.note_changes(outputs.phase_changes)
                _, to_abort = self._outputs.process(outputs)
                for request_id in to_abort:
                    self._core.abort_request(request_id)
                yield from deltas
                deltas.clear()
        finally:  # the caller left the iteration, or a step raised
            for request_id in self._outputs.request_ids:
                self._core.abort_request(request_id)
                self._outputs.discard(request_id)

    def _pool(self, requests: Sequence[EngineCoreRequest]) -> Iterator[EngineCoreOutput]:
        """Run requests that are pooled; yields the end of each. They have no text, and here no statistics, so that the
        output processor need not know of them."""
        self._check_idle()
        live = {request.request_id for request in requests}
        try:
            for request in requests:
                self._core.add_request(request)
            while live:
                outputs = self._step().outputs
                live.difference_update(output.request_id for output in outputs)
                yield from outputs
        finally:  # the caller left the iteration, or a step raised
            for request_id in live:
                self._core.abort_request(request_id)

    def _check_idle(self) -> None:
        if self._outputs.has_requests():
            raise RuntimeError("another generation of this LLM is under way; finish or close it first")

    def _step(self) -> EngineCoreOutputs:
        self._core.wait_for_grammar()
        return self._core.step() if self._core.has_requests() else EngineCoreOutputs()


def _with_progress(outputs: Iterator[Output], number: int, use_tqdm: bool) -> Iterable[Output]:
    return tqdm(outputs, total=number, desc="Processed prompts", unit="prompt") if use_tqdm else outputs


def _options_of(adapter: Adapter | None) -> RequestOptions:
    return NO_OPTIONS if adapter is None else RequestOptions(adapter=adapter)


def _with_task(params: PoolingParams, task: str | None) -> PoolingParams:
    if task is None or params.task == task:
        return params
    if params.task is not None:
        raise ValueError(f"pooling_task is {task!r}, and pooling_params name {params.task!r}")
    return msgspec.structs.replace(params, task=task)


def _answer(answer: PoolingRequestOutput[PoolingOutput], result: PoolingResult) -> PoolingRequestOutput[PoolingResult]:
    return PoolingRequestOutput(
        answer.request_id, result, answer.prompt_token_ids, answer.num_cached_tokens, answer.finished
    )


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
