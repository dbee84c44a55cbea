"""What the model answers to /v1/responses: a list of items, or the events in which they come about."""

import secrets
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec

from quire_gateway.chat_answers import call_id, logprobs_of
from quire_gateway.errors import ApiError
from quire_gateway.items_answer import Event, ItemsAnswer
from quire_gateway.output_parser import CallStart, OutputParser, Piece
from quire_gateway.responses_request import ResponsesRequest
from quire_gateway.triton_messages import Delta

_ENDS: dict[str, tuple[str, dict[str, str] | None]] = {"length": ("incomplete", {"reason": "max_output_tokens"})}
"""Finish reason → the response's status, and why it is not complete."""


class _Item:
    """An item of the output that is coming about.

    Args:
        index: in the output.
        piece: its first one.
        kind: what it is.
        logprobs: log-probabilities that belong to no text yet; a message takes them.
    """

    def __init__(self, index: int, piece: Piece, kind: str, logprobs: list[msgspec.Raw]) -> None:
        self.place: dict[str, Any] = {"output_index": index}
        self.kind = kind
        self._is_call = kind == "function_call"
        self._logprobs: list[msgspec.Raw] = []
        self._new_logprobs = logprobs
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
        if self._is_call:
            content: dict[str, Any] = {"arguments": self._text}
        else:
            content = {"content": [self._part()] if status != "in_progress" else []}
        return {**self._fixed, **content, "status": status}

    def begin(self) -> Iterator[Event]:
        """Events at its beginning."""
        place = {"output_index": self.place["output_index"]}
        yield {"type": "response.output_item.added", **place, "item": self.shown("in_progress")}
        if not self._is_call:
            yield {"type": "response.content_part.added", **self.place, "content_index": 0, "part": self._part()}

    def add(self, text: str) -> Iterator[Event]:
        """Events of more text."""
        self._text += text
        if text:
            logprobs = self._take_logprobs()
            yield {"type": f"{_NAMES[self.kind]}.delta", **self.place, **self._extra(logprobs), "delta": text}

    def end(self, status: str) -> Iterator[Event]:
        """Events at its end."""
        done = f"{_NAMES[self.kind]}.done"
        self._take_logprobs()
        if self._is_call:
            yield {"type": done, **self.place, "name": self._fixed["name"], "arguments": self._text}
        else:
            yield {"type": done, **self.place, **self._extra(self._logprobs), "text": self._text}
            yield {"type": "response.content_part.done", **self.place, "content_index": 0, "part": self._part()}
        place = {"output_index": self.place["output_index"]}
        yield {"type": "response.output_item.done", **place, "item": self.shown(status)}

    def _part(self) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self._text}
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": self._logprobs}

    def _take_logprobs(self) -> list[msgspec.Raw]:
        if self.kind != "message":
            return []
        taken = self._new_logprobs[:]
        self._new_logprobs.clear()
        self._logprobs += taken
        return taken

    def _extra(self, logprobs: list[msgspec.Raw]) -> dict[str, Any]:
        extra: dict[str, Any] = {} if self._is_call else {"content_index": 0}
        return extra | ({"logprobs": logprobs} if self.kind == "message" else {})


_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_NAMES = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}


class ResponsesAnswer(ItemsAnswer):
    """Of /v1/responses.

    Args:
        request: what was asked for.
        answer_id: the response's name.
        make_parser: makes the parser of the text; None: all of it is content.
    """

    def __init__(
        self, request: ResponsesRequest, answer_id: str, make_parser: Callable[[], OutputParser] | None
    ) -> None:
        self._logprobs: list[msgspec.Raw] = []
        """Those that belong to no text yet."""
        super().__init__(request, answer_id, make_parser, partial(_Item, logprobs=self._logprobs))
        self._asked = request
        self._status = "in_progress"
        self._incomplete: dict[str, str] | None = None
        self._num_events = 0

    def chunks(self, number: int, delta: Delta) -> Iterator[Event]:
        """The events of one response of the model."""
        if not self._num_prompt_tokens:
            yield self._numbered({"type": "response.created", "response": self._shown()})
            yield self._numbered({"type": "response.in_progress", "response": self._shown()})
        self._count(number, delta)
        for event in self._news(delta):
            yield self._numbered(event)

    def last_chunks(self) -> Iterator[Event]:
        """The event with the whole response."""
        yield self._numbered({"type": f"response.{self._status}", "response": self._shown()})

    def failure(self, error: ApiError) -> Iterator[Event]:
        """The event of a failure in the middle."""
        said = error.body["error"]
        yield self._numbered(
            {"type": "error", "code": said["code"], "message": said["message"], "param": said["param"]}
        )

    def _numbered(self, event: Event) -> Event:
        self._num_events += 1
        return event | {"sequence_number": self._num_events - 1}

    def _news(self, delta: Delta) -> Iterator[Event]:
        self._logprobs += [logprobs_of(position, self._asked) for position in delta.logprobs[0] or ()]
        yield from super()._news(delta)

    def _end(self, delta: Delta, reason: str) -> str:
        self._status, self._incomplete = _ENDS.get(reason, ("completed", None))
        return self._status

    def _shown(self) -> dict[str, Any]:
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
