"""What the model answers to /v1/responses: a list of items, or the events in which they come about."""

import secrets
from collections.abc import Callable, Collection, Iterator
from typing import Any

from quire_backend.openai.answers import Answer
from quire_backend.openai.chat_answers import call_id, wanted
from quire_backend.openai.custom_tools import CustomInputs
from quire_backend.openai.errors import ApiError
from quire_backend.openai.output_parser import Arguments, CallStart, Content, OutputParser, Piece, plain
from quire_backend.openai.responses_request import ResponsesRequest
from quire_backend.openai.triton_messages import Delta

__all__ = ["ResponsesAnswer"]

_Event = dict[str, Any]
_ENDS: dict[str, tuple[str, dict[str, str] | None]] = {"length": ("incomplete", {"reason": "max_output_tokens"})}
"""Finish reason → the response's status, and why it is not complete."""


class _Item:
    """An item of the output that is coming about.

    Args:
        index: in the output.
        piece: its first one.
        custom: names of custom tools.
    """

    def __init__(self, index: int, piece: Piece, custom: Collection[str]) -> None:
        self.place: dict[str, Any] = {"output_index": index}
        self.kind = _kind_of(piece, custom)
        self._text = ""
        self._fixed: dict[str, Any] = {"id": f"{_PREFIXES[self.kind]}_{secrets.token_hex(12)}", "type": self.kind}
        if isinstance(piece, CallStart):
            self._fixed |= {"call_id": call_id(), "name": piece.name}
        elif self.kind == "message":
            self._fixed["role"] = "assistant"
        else:
            self._fixed["summary"] = []
        self.place["item_id"] = self._fixed["id"]

    def shown(self, status: str) -> dict[str, Any]:
        """As it is in the output."""
        if self.kind in _CALLS:
            content: dict[str, Any] = {_CALLS[self.kind]: self._text}
        else:
            content = {"content": [self._part()] if status != "in_progress" else []}
        return {**self._fixed, **content, "status": status}

    def begin(self) -> Iterator[_Event]:
        """Events at its beginning."""
        place = {"output_index": self.place["output_index"]}
        yield {"type": "response.output_item.added", **place, "item": self.shown("in_progress")}
        if self.kind not in _CALLS:
            yield {"type": "response.content_part.added", **self.place, "content_index": 0, "part": self._part()}

    def add(self, text: str) -> Iterator[_Event]:
        """Events of more text."""
        self._text += text
        if text:
            yield {"type": f"{_NAMES[self.kind]}.delta", **self.place, **self._logprobs(), "delta": text}

    def end(self, status: str) -> Iterator[_Event]:
        """Events at its end."""
        done = f"{_NAMES[self.kind]}.done"
        if self.kind in _CALLS:
            yield {"type": done, **self.place, "name": self._fixed["name"], _CALLS[self.kind]: self._text}
        else:
            yield {"type": done, **self.place, **self._logprobs(), "text": self._text}
            yield {"type": "response.content_part.done", **self.place, "content_index": 0, "part": self._part()}
        place = {"output_index": self.place["output_index"]}
        yield {"type": "response.output_item.done", **place, "item": self.shown(status)}

    def _part(self) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self._text}
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}

    def _logprobs(self) -> dict[str, Any]:
        extra: dict[str, Any] = {} if self.kind in _CALLS else {"content_index": 0}
        return extra | ({"logprobs": []} if self.kind == "message" else {})


_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
"""A kind of call → its name for what is said in one."""
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
_NAMES = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}


def _kind_of(piece: Piece, custom: Collection[str]) -> str:
    if isinstance(piece, CallStart):
        return "custom_tool_call" if piece.name in custom else "function_call"
    return "message" if isinstance(piece, Content) else "reasoning"


class ResponsesAnswer(Answer):
    """Of /v1/responses.

    Args:
        request: what was asked for.
        answer_id: the response's name.
        make_parser: makes the parser of the text; None: all of it is content.
    """

    ending = b""

    def __init__(
        self, request: ResponsesRequest, answer_id: str, make_parser: Callable[[], OutputParser] | None
    ) -> None:
        super().__init__(request, answer_id)
        self._asked = request
        self._parser = make_parser() if make_parser else OutputParser(plain)
        self._custom = request.tool_choice.custom if request.tool_choice else frozenset[str]()
        self._inputs = CustomInputs(self._custom)
        self._items: list[_Item] = []
        self._done: list[dict[str, Any]] = []
        self._status = "in_progress"
        self._incomplete: dict[str, str] | None = None
        self._num_events = 0

    def whole(self, deltas: list[tuple[int, Delta]]) -> dict[str, Any]:
        """The response."""
        for number, delta in deltas:
            self._count(number, delta)
            for _ in self._news(delta):
                pass
        return self._response()

    def chunks(self, number: int, delta: Delta) -> Iterator[_Event]:
        """The events of one response of the model."""
        if not self._num_prompt_tokens:
            yield self._numbered({"type": "response.created", "response": self._response()})
            yield self._numbered({"type": "response.in_progress", "response": self._response()})
        self._count(number, delta)
        for event in self._news(delta):
            yield self._numbered(event)

    def last_chunks(self) -> Iterator[_Event]:
        """The event with the whole response."""
        yield self._numbered({"type": f"response.{self._status}", "response": self._response()})

    def failure(self, error: ApiError) -> Iterator[_Event]:
        """The event of a failure in the middle."""
        said = error.body["error"]
        yield self._numbered(
            {"type": "error", "code": said["code"], "message": said["message"], "param": said["param"]}
        )

    def frame(self, event: _Event) -> bytes:
        """An event as it is sent."""
        return f"event: {event['type']}\n".encode() + super().frame(event)

    def _numbered(self, event: _Event) -> _Event:
        self._num_events += 1
        return event | {"sequence_number": self._num_events - 1}

    def _news(self, delta: Delta) -> Iterator[_Event]:
        reason = delta.finish_reasons[0]
        pieces = self._parser.feed(delta.texts[0])
        if reason is not None:
            pieces += self._parser.finish()
        if self._custom:
            pieces = self._inputs.read(pieces, is_last=reason is not None)
        for piece in wanted(pieces, self._asked):
            yield from self._piece(piece)
        if reason is not None:
            self._status, self._incomplete = _ENDS.get(reason, ("completed", None))
            yield from self._end_item(self._status)

    def _piece(self, piece: Piece) -> Iterator[_Event]:
        is_open = len(self._items) > len(self._done)
        goes_on = is_open and (isinstance(piece, Arguments) or self._items[-1].kind == _kind_of(piece, self._custom))
        if not goes_on or isinstance(piece, CallStart):
            yield from self._end_item("completed")
            self._items.append(_Item(len(self._items), piece, self._custom))
            yield from self._items[-1].begin()
        if not isinstance(piece, CallStart):
            yield from self._items[-1].add(piece.text)

    def _end_item(self, status: str) -> Iterator[_Event]:
        if len(self._items) > len(self._done):
            yield from self._items[-1].end(status)
            self._done.append(self._items[-1].shown(status))

    def _response(self) -> dict[str, Any]:
        usage = self._usage()
        cached = usage["prompt_tokens_details"]
        return {
            "id": self._head["id"],
            "object": "response",
            "created_at": self._head["created"],
            "model": self._head["model"],
            "status": self._status,
            "error": None,
            "incomplete_details": self._incomplete,
            "output": self._done,
            **self._asked.echoed,
            "background": False,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None if self._status == "in_progress" else {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": cached["cached_tokens"] if cached else 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }  # fmt: skip
