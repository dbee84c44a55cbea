"""What the model answers, in OpenAI's shapes: whole, or as the chunks of a stream. Chats are in `chat_answers`."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire_gateway.errors import ApiError
from quire_gateway.requests import GenerationRequest
from quire_gateway.triton_messages import Delta, position_of


class Answer(ABC):
    """The answer to one request, which keeps count of what the model has sent.

    Args:
        request: what was asked for.
        answer_id: the answer's name.
    """

    ending = b"data: [DONE]\n\n"
    """What a stream ends with."""

    def __init__(self, request: GenerationRequest, answer_id: str) -> None:
        self._request, self.answer_id = request, answer_id
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


@dataclass(slots=True)
class _Progress:
    """How far a choice of a completion has come."""

    start: int = 0
    """Characters of the prompt that it begins with."""
    end: int = 0
    """Characters so far."""
    pending: list[tuple[int, msgspec.Raw]] = field(default_factory=list)
    """Offset and log-probabilities of tokens whose text has not come yet, and may not come: a stop string may cut it
    off."""


class CompletionAnswer(ChoicesAnswer):
    """Of /v1/completions."""

    kind = chunk_kind = "text_completion"

    def __init__(self, request: GenerationRequest, answer_id: str) -> None:
        super().__init__(request, answer_id)
        self._progress: dict[int, _Progress] = {}
        """By choice; only where there are log-probabilities."""

    def _first_choices(self, number: int, delta: Delta, sequence: int) -> Iterator[dict[str, Any]]:
        if self._request.echo:
            text, logprobs = self._prompt(number, delta, sequence)
            index = self._index(number, delta, sequence)
            yield {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _choice(self, number: int, delta: Delta, sequence: int) -> dict[str, Any]:
        text, logprobs = self._prompt(number, delta, sequence) if self._request.echo else ("", None)
        choice = self._chunk_choice(number, delta, sequence)
        assert choice is not None, "it has a finish reason"
        choice["text"] = text + choice["text"]
        # Clients of vLLM read these without having asked for them.
        choice = {"token_ids": None, "prompt_token_ids": None, "prompt_logprobs": None} | choice
        if logprobs is not None:
            own = choice["logprobs"] or {}
            choice["logprobs"] = {name: values + own.get(name, []) for name, values in logprobs.items()}
        return choice

    def _chunk_choice(self, number: int, delta: Delta, sequence: int) -> dict[str, Any] | None:
        index, text = self._index(number, delta, sequence), delta.texts[sequence]
        reason, positions = delta.finish_reasons[sequence], delta.logprobs[sequence]
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
        if positions is not None or (reason is not None and "logprobs" in self._request.sampling):
            choice["logprobs"] = self._logprobs(index, text, positions or [], is_last=reason is not None)
        if self._request.returns_token_ids and delta.token_ids is not None:
            choice["token_ids"] = delta.token_ids[sequence]
            if delta.prompt_token_ids is not None:
                choice["prompt_token_ids"] = delta.prompt_token_ids
        if delta.prompt_logprobs is not None and "prompt_logprobs" in self._request.said:
            choice["prompt_logprobs"] = delta.prompt_logprobs
        is_held_back = positions is not None and choice["logprobs"] is None and not text and reason is None
        return None if is_held_back and "token_ids" not in choice else choice

    def _prompt(self, number: int, delta: Delta, sequence: int) -> tuple[str, dict[str, Any] | None]:
        """What the answer begins with, and its log-probabilities."""
        text = str(self._request.prompts[number]) if delta.prompt_text is None else delta.prompt_text
        if delta.first_token is None:
            return text, None
        assert delta.prompt_token_ids is not None
        self._progress[self._index(number, delta, sequence)] = _Progress(len(text), len(text))
        positions = (delta.prompt_logprobs or [])[1:]  # nothing comes before the first token
        whole = text.encode(errors="replace")
        others = [bytes(bytes_of(_first(position_of(position))) or ()) for position in positions]
        first: dict[str, Any] = {"decoded_token": delta.first_token}
        if "\N{REPLACEMENT CHARACTER}" in delta.first_token and whole.endswith(rest := b"".join(others)):
            first["bytes"] = list(whole.removesuffix(rest))  # it is a part of a character
        offsets = _offsets(whole, [bytes(bytes_of(first) or ()), *others])
        listed = self._listed(positions, offsets)
        listed["tokens"].insert(0, self._name(str(delta.prompt_token_ids[0]), first))
        listed["token_logprobs"].insert(0, None)
        listed["top_logprobs"].insert(0, None)
        return text, listed

    def _logprobs(self, index: int, text: str, positions: list[msgspec.Raw], *, is_last: bool) -> dict[str, Any] | None:
        """Those of the tokens whose text has come."""
        progress = self._progress.setdefault(index, _Progress())
        progress.end += len(text)
        pending = progress.pending + [
            (progress.start + _first(position_of(position)).get("text_offset", 0), position) for position in positions
        ]
        num_ready = len(pending) if is_last else sum(offset < progress.end for offset, _ in pending)
        ready, progress.pending = pending[:num_ready], pending[num_ready:]
        if not ready:
            return None
        offsets, ready_positions = zip(*ready, strict=True)
        return self._listed(ready_positions, (min(offset, progress.end) for offset in offsets))

    def _listed(self, positions: Iterable[msgspec.Raw], offsets: Iterable[int]) -> dict[str, Any]:
        tokens, logprobs, tops = [], [], []
        for position in map(position_of, positions):
            top: dict[str, float] = {}
            for token_id, item in position.items():
                name = self._name(token_id, item)
                top[f"token_id:{token_id}" if name in top else name] = item["logprob"]  # two tokens may be one text
            tops.append(top)
            tokens.append(next(iter(top)))
            logprobs.append(_first(position)["logprob"])
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": list(offsets)}

    def _name(self, token_id: str, item: dict[str, Any]) -> str:
        """A token's text; as OpenAI names them, the bytes of one that is part of a character."""
        own = None if self._request.names_tokens_by_id else item.get("bytes")
        if own is None:
            return text_of(token_id, item, self._request)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)


def text_of(token_id: str, item: dict[str, Any], request: GenerationRequest) -> str:
    """A token's text; vLLM's name of a token where the request makes no text, or asks for such names."""
    text: str | None = item["decoded_token"]
    return f"token_id:{token_id}" if text is None or request.names_tokens_by_id else text


def _first(position: dict[str, Any]) -> dict[str, Any]:
    """The entry of the token that is there, or was sampled."""
    entry: dict[str, Any] = next(iter(position.values()))
    return entry


def bytes_of(item: dict[str, Any]) -> list[int] | None:
    """A token's own bytes; None where the request makes no text."""
    text, own = item["decoded_token"], item.get("bytes")
    return own if own is not None or text is None else list(text.encode())


def _offsets(text: bytes, tokens: list[bytes]) -> Iterator[int]:
    """At which character of a text each token begins, or the character that it is part of. A token that is not in the
    text, such as a special one, takes none of it; the first one's leading space may be the tokenizer's own.
    """
    position = num_characters = 0
    for token in tokens:
        yield num_characters - (text[position : position + 1] > b"\x7f" and text[position] < 0xC0)
        if position == 0 and not text.startswith(token):
            token = token.removeprefix(b" ")
        if text.startswith(token, position):
            num_characters += sum(byte & 0xC0 != 0x80 for byte in token)
            position += len(token)
