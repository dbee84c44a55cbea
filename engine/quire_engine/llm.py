"""LLM: the offline face. Same engine core, same process, no server."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from quire_engine.config import EngineConfig
from quire_engine.core.client import InprocClient
from quire_engine.input_processor import InputProcessor, ProcessedRequest, Prompt, load_tokenizer
from quire_engine.output_processor import OutputProcessor, RequestOutput
from quire_engine.sampling_params import SamplingParams
from quire_engine.stats import SchedulerStats

__all__ = ["LLM"]


class LLM:
    """Generates for lists of prompts, synchronously.

    Args:
        model: path of a Hugging Face checkpoint folder.
        settings: any other setting of `model.json`, by name.

    Raises:
        CheckpointError: the folder cannot be served.
        ValueError: a setting is unknown or bad.
    """

    def __init__(self, model: str | Path, **settings: Any) -> None:
        config = EngineConfig.from_settings({"model": str(model), **settings})
        tokenizer = load_tokenizer(Path(config.model.tokenizer_path))
        self._core = InprocClient(config)
        self._inputs = InputProcessor(tokenizer, self._core.ready)
        self._outputs = OutputProcessor(tokenizer)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete every prompt.

        Args:
            prompts: one prompt or several; see `Prompt`. A flat list of ints is one prompt of token ids.
            sampling_params: one for all, or one per prompt.
            use_tqdm: show a progress bar.

        Returns:
            One finished output per prompt, in their order.

        Raises:
            RequestError: a prompt or its parameters cannot be served; nothing was started then.
        """
        prompt_list = _as_prompts(prompts)
        if sampling_params is None:
            sampling_params = SamplingParams()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompt_list)
        if len(sampling_params) != len(prompt_list):
            raise ValueError(f"sampling_params has {len(sampling_params)} entries for {len(prompt_list)} prompts")
        requests = [
            self._inputs.process(prompt, params) for prompt, params in zip(prompt_list, sampling_params, strict=True)
        ]
        results: dict[str, RequestOutput] = {}
        with tqdm(total=len(requests), desc="Processed prompts", unit="prompt", disable=not use_tqdm) as progress:
            for delta in self._run(requests):
                if delta.request_id in results:
                    results[delta.request_id].merge(delta)
                else:
                    results[delta.request_id] = delta
                progress.update(delta.finished)
        return [results[request.request_id] for request in requests]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding what is new as it comes.

        Raises:
            RequestError: the prompt or its parameters cannot be served.
        """
        return self._run([self._inputs.process(prompt, sampling_params or SamplingParams())])

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of `{"role": …, "content": …}`, by the checkpoint's template.

        Raises:
            RequestError: the checkpoint has no chat template, or a conversation cannot be served.
        """
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [self._inputs.apply_chat_template(conversation) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm)

    def get_stats(self) -> SchedulerStats:
        """The engine core's numbers of this moment."""
        return self._core.get_stats()

    def shutdown(self) -> None:
        """Give the workers and their memory back."""
        self._core.shutdown()

    def _run(self, requests: list[ProcessedRequest]) -> Iterator[RequestOutput]:
        """Add the requests and step until all are finished, yielding every delta."""
        if self._outputs.has_requests():
            raise RuntimeError("another generation of this LLM is under way; finish or close it first")
        deltas: list[RequestOutput] = []
        try:
            for request in requests:
                self._outputs.add_request(request, deltas.append)
                self._core.add_request(request.to_core())
            while self._outputs.has_requests():
                _, to_abort = self._outputs.process(self._core.get_output())
                for request_id in to_abort:
                    self._core.abort_request(request_id)
                yield from deltas
                deltas.clear()
        finally:  # the caller stopped listening, or a step raised
            for request_id in self._outputs.request_ids:
                self._core.abort_request(request_id)
                self._outputs.discard(request_id)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
