"""What the model answers, in OpenAI's shapes: whole, or as the chunks of a stream. Chats are in `chat_answers`."""

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import msgspec

from quire_backend.openai.errors import ApiError
from quire_backend.openai.requests import GenerationRequest
from quire_backend.openai.triton_messages import Delta

__all__ = ["Answer", "ChoicesAnswer", "CompletionAnswer", "text_of"]


class Answer(ABC):
    """The answer to one request, which keeps count of what the model has sent.

    Args:
        request: what was asked for.
        answer_id: the answer's name.
    """

    ending = b"data: [DONE]\n\n"
    """What a stream ends with."""

    def __init__(self, request: GenerationRequest, answer_id: str) -> None:
        self._request = request
        self._head = {"id": answer_id, "created": int(time.time()), "model": request.model}
        self._num_prompt_tokens: dict[int, int] = {}
        self._num_cached_tokens: dict[int, int | None] = {}
        self._num_output_tokens = 0

    @abstractmethod
    def whole(self, deltas: list[tuple[int, Delta]]) -> dict[str, Any]:
        """The answer to a request that does not stream: one response of the model per prompt."""

    @abstractmethod
    def chunks(self, number: int, delta: Delta) -> Iterator[dict[str, Any]]:
        """What one response of the model becomes in a stream.

        Args:
            number: of the prompt.
            delta: the response.
        """

    @abstractmethod
    def last_chunks(self) -> Iterator[dict[str, Any]]:
        """What follows the last response in a stream."""

    def failure(self, error: ApiError) -> Iterator[dict[str, Any]]:
        """What follows when a stream fails."""
        yield error.body

    def frame(self, event: dict[str, Any]) -> bytes:
        """A chunk as it is sent."""
        return b"data: " + msgspec.json.encode(event) + b"\n\n"

    def _count_prompt(self, number: int, delta: Delta) -> None:
        self._num_prompt_tokens[number] = delta.num_prompt_tokens
        self._num_cached_tokens[number] = delta.num_cached_tokens

    def _count(self, number: int, delta: Delta) -> None:
        self._count_prompt(number, delta)
        self._num_output_tokens += sum(delta.num_output_tokens)

    def _usage(self) -> dict[str, Any]:
        num_prompt_tokens, cached = sum(self._num_prompt_tokens.values()), list(self._num_cached_tokens.values())
        known = [number for number in cached if number is not None]
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": self._num_output_tokens,
            "total_tokens": num_prompt_tokens + self._num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(known)} if len(known) == len(cached) else None,
        }


class ChoicesAnswer(Answer):
    """An answer of choices: one per prompt and sequence."""

    kind: str
    """OpenAI's name of the whole answer."""
    chunk_kind: str

    def whole(self, deltas: list[tuple[int, Delta]]) -> dict[str, Any]:
        """All choices, and the usage."""
        choices = [
            self._choice(number, delta, sequence)
            for number, delta in sorted(deltas, key=lambda item: item[0])
            for sequence in range(len(delta.texts))
        ]
        for number, delta in deltas:
            self._count(number, delta)
        return {**self._head, "object": self.kind, "choices": choices, "usage": self._usage()}

    def chunks(self, number: int, delta: Delta) -> Iterator[dict[str, Any]]:
        """A chunk per sequence that has anything new."""
        has_usage = self._request.continuous_usage
        if number not in self._num_prompt_tokens:
            self._count_prompt(number, delta)
            for sequence in range(len(delta.texts)):
                for choice in self._first_choices(number, delta, sequence):
                    yield self._chunk([choice], self._usage() if has_usage else None)
        self._count(number, delta)
        for sequence in range(len(delta.texts)):
            is_new = delta.texts[sequence] or delta.num_output_tokens[sequence] or delta.finish_reasons[sequence]
            if is_new and (news := self._chunk_choice(number, delta, sequence)) is not None:
                yield self._chunk([news], self._usage() if has_usage else None)

    def last_chunks(self) -> Iterator[dict[str, Any]]:
        """The usage, if it is wanted."""
        if self._request.include_usage:
            yield self._chunk([], self._usage())

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk_kind, "choices": choices}
        return {**chunk, "usage": usage} if self._request.include_usage else chunk

    def _first_choices(self, number: int, delta: Delta, sequence: int) -> Iterator[dict[str, Any]]:
        """What a sequence begins with in a stream, besides its first text."""
        return iter(())

    def _index(self, number: int, delta: Delta, sequence: int) -> int:
        return number * len(delta.texts) + sequence

    @abstractmethod
    def _choice(self, number: int, delta: Delta, sequence: int) -> dict[str, Any]: ...

    @abstractmethod
    def _chunk_choice(self, number: int, delta: Delta, sequence: int) -> dict[str, Any] | None:
        """What is new of a sequence; None: nothing that can be shown yet."""


class CompletionAnswer(ChoicesAnswer):
    """Of /v1/completions."""

    kind = chunk_kind = "text_completion"

    def __init__(self, request: GenerationRequest, answer_id: str) -> None:
        super().__init__(request, answer_id)
        self._offsets: dict[int, int] = {}
        """Characters of each choice that its tokens have taken so far."""

    def _first_choices(self, number: int, delta: Delta, sequence: int) -> Iterator[dict[str, Any]]:
        if self._request.echo:
            text = self._request.prompts[number]
            yield {"index": self._index(number, delta, sequence), "text": text, "logprobs": None, "finish_reason": None}

    def _choice(self, number: int, delta: Delta, sequence: int) -> dict[str, Any]:
        choice = self._chunk_choice(number, delta, sequence)
        if self._request.echo:
            choice["text"] = f"{self._request.prompts[number]}{choice['text']}"
        return choice

    def _chunk_choice(self, number: int, delta: Delta, sequence: int) -> dict[str, Any]:
        index = self._index(number, delta, sequence)
        choice = {
            "index": index,
            "text": delta.texts[sequence],
            "logprobs": self._logprobs(index, delta.logprobs[sequence]),
            "finish_reason": delta.finish_reasons[sequence],
        }
        if delta.prompt_logprobs is not None:
            choice["prompt_logprobs"] = delta.prompt_logprobs
        return choice

    def _logprobs(self, index: int, positions: list[dict[str, Any]] | None) -> dict[str, Any] | None:
        if positions is None:
            return None
        tokens = [[(text_of(token_id, item), item["logprob"]) for token_id, item in at.items()] for at in positions]
        sampled = [position[0] for position in tokens]
        lengths = [len(text) for text, _ in sampled]
        offsets = list(itertools.accumulate(lengths, initial=self._offsets.get(index, 0)))
        self._offsets[index] = offsets.pop()
        return {
            "tokens": [text for text, _ in sampled],
            "token_logprobs": [logprob for _, logprob in sampled],
            "top_logprobs": [dict(position) for position in tokens],
            "text_offset": offsets,
        }


def text_of(token_id: str, item: dict[str, Any]) -> str:
    """A token's text; vLLM's name of a token where the request makes no text."""
    text = item["decoded_token"]
    return f"token_id:{token_id}" if text is None else text
