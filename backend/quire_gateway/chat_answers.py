"""What the model answers in a chat: content, reasoning and calls, whole or as the chunks of a stream."""

import secrets
import string
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from quire_gateway.answers import ChoicesAnswer, bytes_of, text_of
from quire_gateway.chat import ChatRequest
from quire_gateway.output_parser import CallStart, Content, OutputParser, Piece, Reasoning
from quire_gateway.requests import GenerationRequest
from quire_gateway.triton_messages import Delta, position_of

_CALL_ID_CHARACTERS = string.ascii_letters + string.digits


def call_id() -> str:
    """A name for a call: nine letters and digits, which is all that Mistral's chat template takes."""
    return "".join(secrets.choice(_CALL_ID_CHARACTERS) for _ in range(9))


class AnswerReader:
    """Reads the text of one sequence: which pieces of an answer it shows.

    Args:
        request: what was asked for.
        parser: of the text; None: all of it is content.
    """

    def __init__(self, request: ChatRequest, parser: OutputParser | None) -> None:
        self._request, self._parser = request, parser

    @property
    def num_calls(self) -> int:
        """How many calls have begun."""
        return self._parser.num_calls if self._parser else 0

    def read(self, text: str, *, is_last: bool) -> list[Piece]:
        """The new pieces, without reasoning that the client does not want, and without more calls than it takes.

        Args:
            text: what is new.
            is_last: whether no more comes.
        """
        if self._parser is None:
            return [Content(text)]
        pieces = self._parser.feed(text) + (self._parser.finish() if is_last else [])
        return [piece for piece in pieces if self._is_wanted(piece)]

    def _is_wanted(self, piece: Piece) -> bool:
        if isinstance(piece, Content):
            return True
        if isinstance(piece, Reasoning):
            return self._request.include_reasoning
        choice = self._request.tool_choice
        return choice is None or choice.is_parallel or piece.index == 0


class Said:
    """Some pieces of an answer, put together.

    Args:
        pieces: in their order.
    """

    def __init__(self, pieces: list[Piece]) -> None:
        self.content = ""
        self.reasoning = ""
        self.calls: dict[int, tuple[str | None, str]] = {}
        """Of each call the name, if it is among the pieces, and the arguments."""
        for piece in pieces:
            if isinstance(piece, Content):
                self.content += piece.text
            elif isinstance(piece, Reasoning):
                self.reasoning += piece.text
            elif isinstance(piece, CallStart):
                self.calls[piece.index] = piece.name, ""
            else:
                name, arguments = self.calls.get(piece.index, (None, ""))
                self.calls[piece.index] = name, arguments + piece.text


class ChatAnswer(ChoicesAnswer):
    """Of /v1/chat/completions.

    Args:
        request: what was asked for.
        answer_id: the answer's name.
        make_parser: makes the parser of a choice; None: all text is content.
    """

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self, request: ChatRequest, answer_id: str, make_parser: Callable[[], OutputParser] | None = None
    ) -> None:
        super().__init__(request, answer_id)
        self._chat = request
        self._readers = defaultdict[int, AnswerReader](
            lambda: AnswerReader(request, make_parser() if make_parser else None)
        )
        """By sequence."""

    def whole(self, deltas: list[tuple[int, Delta]]) -> dict[str, Any]:
        """As of all, with what vLLM says of the prompt."""
        return super().whole(deltas) | _of_prompt(deltas[0][1])

    def chunks(self, number: int, delta: Delta) -> Iterator[dict[str, Any]]:
        """As of all; the first one has what vLLM says of the prompt."""
        said = {name: value for name, value in _of_prompt(delta).items() if value is not None}
        for chunk in super().chunks(number, delta):
            yield chunk | said if said else chunk
            said = {}

    def _first_choices(self, number: int, delta: Delta, sequence: int) -> Iterator[dict[str, Any]]:
        choice = {"index": self._index(number, delta, sequence), "logprobs": None, "finish_reason": None}
        yield choice | {"delta": {"role": "assistant", "content": ""}}
        if self._chat.echoed_text:
            yield choice | {"delta": {"content": self._chat.echoed_text}}

    def _choice(self, number: int, delta: Delta, sequence: int) -> dict[str, Any]:
        said = self._said(delta, sequence)
        content = self._chat.echoed_text + said.content
        message: dict[str, Any] = {
            "role": "assistant", "content": content, "refusal": None, "reasoning_content": said.reasoning or None,
        }  # fmt: skip
        if said.calls:
            message["content"] = content or None
            message["tool_calls"] = _calls(said)
        return {"token_ids": None} | self._any_choice(number, delta, sequence, "message", message)

    def _chunk_choice(self, number: int, delta: Delta, sequence: int) -> dict[str, Any] | None:
        said = self._said(delta, sequence)
        news: dict[str, Any] = {}
        if said.reasoning:
            news["reasoning_content"] = said.reasoning
        if said.content:
            news["content"] = said.content
        if said.calls:
            news["tool_calls"] = [{"index": index} | call for index, call in zip(said.calls, _calls(said), strict=True)]
        if (
            not news
            and delta.token_ids is None
            and delta.prompt_logprobs is None
            and delta.logprobs[sequence] is None
            and delta.finish_reasons[sequence] is None
        ):
            return None  # it may be the beginning of a mark
        return self._any_choice(number, delta, sequence, "delta", news)

    def _said(self, delta: Delta, sequence: int) -> Said:
        """What the new text of a sequence shows. A chat has one prompt."""
        is_last = delta.finish_reasons[sequence] is not None
        return Said(self._readers[sequence].read(delta.texts[sequence], is_last=is_last))

    def _any_choice(self, number: int, delta: Delta, sequence: int, name: str, content: Any) -> dict[str, Any]:
        positions = delta.logprobs[sequence]
        choice = {
            "index": self._index(number, delta, sequence),
            name: content,
            "logprobs": None
            if positions is None
            else {"content": [logprobs_of(at, self._request) for at in positions]},
            "finish_reason": self._finish_reason(delta, sequence),
        }
        if delta.token_ids is not None:
            choice["token_ids"] = delta.token_ids[sequence]
        return choice

    def _finish_reason(self, delta: Delta, sequence: int) -> str | None:
        """Where a function was named, there was nothing to choose: as with OpenAI and vLLM, that is a plain stop."""
        reason, choice = delta.finish_reasons[sequence], self._chat.tool_choice
        has_chosen = choice is not None and choice.kind != "named" and self._readers[sequence].num_calls
        return "tool_calls" if reason == "stop" and has_chosen else reason


def logprobs_of(at: msgspec.Raw, request: GenerationRequest) -> msgspec.Raw:
    """As JSON, the sampled token, and beside it the most likely ones, which it may be among.

    Args:
        at: of a `Delta`, at one position.
        request: says how many are wanted, and how tokens are named.
    """
    position = position_of(at)
    (sampled_id, sampled) = next(iter(position.items()))
    num_top = int(request.sampling["logprobs"])
    top = sorted(
        ((item["rank"], token_id, item) for token_id, item in position.items() if item["rank"] <= num_top),
        key=lambda ranked: ranked[0],
    )
    tokens = [_token(token_id, item, request) for _, token_id, item in top[:num_top]]
    return msgspec.Raw(msgspec.json.encode({**_token(sampled_id, sampled, request), "top_logprobs": tokens}))


def _token(token_id: str, item: dict[str, Any], request: GenerationRequest) -> dict[str, Any]:
    return {"token": text_of(token_id, item, request), "logprob": item["logprob"], "bytes": bytes_of(item)}


def _calls(said: Said) -> list[dict[str, Any]]:
    """Each call, or what follows of one that has begun."""
    return [
        {"function": {"arguments": arguments}} if name is None
        else {"id": call_id(), "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in said.calls.values()
    ]  # fmt: skip


def _of_prompt(delta: Delta) -> dict[str, Any]:
    return {"prompt_token_ids": delta.prompt_token_ids, "prompt_logprobs": delta.prompt_logprobs}
