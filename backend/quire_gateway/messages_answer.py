"""What the model answers to /v1/messages: a list of blocks, or the events in which they come about."""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from quire_gateway.chat import ChatRequest
from quire_gateway.chat_answers import call_id
from quire_gateway.errors import ApiError, messages_error
from quire_gateway.items_answer import Event, ItemsAnswer
from quire_gateway.output_parser import CallStart, OutputParser, Piece
from quire_gateway.triton_messages import Delta

_BLOCKS = {  # its type, the name of its text, the type of a delta and the name of the text in that
    "message": ("text", "text", "text_delta", "text"),
    "reasoning": ("thinking", "thinking", "thinking_delta", "thinking"),
    "function_call": ("tool_use", "input", "input_json_delta", "partial_json"),
}


class _Block:
    """A block of the content that is coming about.

    Args:
        index: in the content.
        piece: its first one.
        kind: what it is.
    """

    def __init__(self, index: int, piece: Piece, kind: str) -> None:
        self.kind = kind
        self._place = {"index": index}
        self._text = ""
        self._type, self._name, self._delta_type, self._delta_name = _BLOCKS[self.kind]
        self._fixed: dict[str, Any] = {"type": self._type}
        if isinstance(piece, CallStart):
            self._fixed |= {"id": call_id(), "name": piece.name}
        elif self.kind == "reasoning":
            self._fixed["signature"] = ""

    def begin(self) -> Iterator[Event]:
        """The event at its beginning."""
        empty: Any = {} if self.kind == "function_call" else ""
        block = {**self._fixed, self._name: empty}
        yield {"type": "content_block_start", **self._place, "content_block": block}

    def add(self, text: str) -> Iterator[Event]:
        """The event of more text."""
        self._text += text
        if text:
            delta = {"type": self._delta_type, self._delta_name: text}
            yield {"type": "content_block_delta", **self._place, "delta": delta}

    def end(self, status: str) -> Iterator[Event]:
        """The event at its end."""
        yield {"type": "content_block_stop", **self._place}

    def shown(self, status: str) -> dict[str, Any]:
        """As it is in the content."""
        return {**self._fixed, self._name: _object(self._text) if self.kind == "function_call" else self._text}


def _object(text: str) -> dict[str, Any]:
    """The arguments of a call; none where the model has written no object, or was cut off."""
    try:
        value = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


class MessagesAnswer(ItemsAnswer):
    """Of /v1/messages.

    Args:
        request: what was asked for.
        answer_id: the message's name.
        make_parser: makes the parser of the text; None: all of it is content.
        request_id: that an error in the middle of a stream shows.
    """

    def __init__(
        self, request: ChatRequest, answer_id: str, make_parser: Callable[[], OutputParser] | None, request_id: str
    ) -> None:
        super().__init__(request, answer_id, make_parser, _Block)
        self._request_id = request_id
        self._stop: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}

    def chunks(self, number: int, delta: Delta) -> Iterator[Event]:
        """The events of one response of the model."""
        is_first = not self._num_prompt_tokens
        if is_first:
            self._num_prompt_tokens[number] = delta.num_prompt_tokens
            yield {"type": "message_start", "message": self._shown()}
            yield {"type": "ping"}
        self._count(number, delta)
        yield from self._news(delta)

    def last_chunks(self) -> Iterator[Event]:
        """Why it ended, and the usage."""
        yield {"type": "message_delta", "delta": self._stop, "usage": self._tokens()}
        yield {"type": "message_stop"}

    def failure(self, error: ApiError) -> Iterator[Event]:
        """The event of a failure in the middle."""
        yield messages_error(error, self._request_id)

    def _end(self, delta: Delta, reason: str) -> str:
        stopped_by = delta.stop_reasons[0] if delta.stop_reasons else None
        if reason == "length":
            self._stop["stop_reason"] = "max_tokens"
        elif isinstance(stopped_by, str):
            self._stop |= {"stop_reason": "stop_sequence", "stop_sequence": stopped_by}
        else:
            self._stop["stop_reason"] = "tool_use" if self._reader.num_calls else "end_turn"
        return "completed"

    def _shown(self) -> dict[str, Any]:
        return {
            "id": self._head["id"], "type": "message", "role": "assistant", "model": self._head["model"],
            "content": self._done, **self._stop, "usage": self._tokens(),
        }  # fmt: skip

    def _tokens(self) -> dict[str, int]:
        """Anthropic counts what was read from the cache apart from the rest of the prompt."""
        usage = self._usage()
        details = usage["prompt_tokens_details"]
        cached = details["cached_tokens"] if details else 0
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }
