"""Bodies of /v1/responses → a chat. Nothing is kept, so each request has to bring its whole conversation."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire_gateway.chat import ChatRequest, content_of_parts, text_of_parts, translated
from quire_gateway.errors import InvalidRequestError
from quire_gateway.fields import Fields

_RENAMED = {
    "messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text",
    "reasoning_effort": "reasoning", "max_tokens": "max_output_tokens",
}  # fmt: skip
"""A chat's name of a field → the one here."""
_ABSENT: Mapping[str, tuple[Any, ...]] = {
    "previous_response_id": (), "conversation": (), "prompt": (), "background": (False,),
    "logprobs": (False,), "n": (1,), "truncation": ("disabled", "auto"),
    "return_token_ids": (False,), "return_tokens_as_token_ids": (False,),
}  # fmt: skip
"""What is not offered, with the values that ask for nothing."""
_WHY = {
    "previous_response_id": "responses are not kept here: send the whole conversation as input",
    "conversation": "conversations are not kept here: send the whole one as input",
}
_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (_LOGPROBS, "reasoning.encrypted_content")
"""The latter asks for nothing here, as reasoning comes as it is."""
_TEXT_PARTS = ("input_text", "output_text", "text")


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponsesRequest(ChatRequest):
    """What one request to /v1/responses asks of a model."""

    echoed: dict[str, Any] = field(default_factory=dict)
    """Fields that the response repeats."""


def parse_responses(fields: Fields) -> ResponsesRequest:
    """The body of /v1/responses."""
    fields.check_absent(_ABSENT, _WHY)
    top_logprobs, included = fields.take("top_logprobs"), _included(fields.take("include"))
    wants_logprobs = top_logprobs not in (None, 0) or _LOGPROBS in included
    for name in ("stream_options", "max_tool_calls"):  # how events are padded; of OpenAI's own tools
        fields.take(name)
    echoed = _echoed(fields)
    system = fields.take_as(str, "instructions", "a string")
    instructions: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    reasoning = fields.take_as(dict, "reasoning", "an object, such as one with effort") or {}
    values: dict[str, Any] = {
        "messages": instructions + _messages(fields.take("input")),
        "tools": _tools(fields.take("tools")),
        "tool_choice": _tool_choice(fields.take("tool_choice")),
        "logprobs": wants_logprobs,
        "top_logprobs": top_logprobs if wants_logprobs else None,
        "response_format": _format(fields.take("text")),
        "reasoning_effort": reasoning.get("effort"),
        "max_completion_tokens": fields.take("max_output_tokens"),
    }
    return ResponsesRequest(**translated(fields, values, _RENAMED), echoed=echoed)


def _echoed(fields: Fields) -> dict[str, Any]:
    said = fields.rest()
    neutral: dict[str, Any] = {
        "instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True,
        "reasoning": {"effort": None, "summary": None}, "temperature": 1.0, "text": {"format": {"type": "text"}},
        "tool_choice": "auto", "tools": [], "top_p": 1.0, "user": None,
    }  # fmt: skip
    return {name: said.get(name, value) for name, value in neutral.items()}


def _included(value: Any) -> list[Any]:
    items = value if isinstance(value, list) else [value]
    for item in items:
        if item is not None and item not in _INCLUDABLE:
            raise InvalidRequestError("include", f"include must be a list of {', '.join(_INCLUDABLE)}, or left out")
    return items


def _format(value: Any) -> Any:
    """`text.format` in the shape of a chat's `response_format`."""
    described = value.get("format") if isinstance(value, dict) else None
    if value is not None and (not isinstance(value, dict) or not isinstance(described or {}, dict)):
        raise InvalidRequestError("text", 'text must be an object, such as {"format": {"type": "text"}}')
    if isinstance(described, dict) and described.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": described}
    return described


def _tools(value: Any) -> Any:
    """Functions in the shape of a chat's, which are one level deeper."""
    if not isinstance(value, list):
        return value
    for i, tool in enumerate(value):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise InvalidRequestError(
                "tools", f'tools[{i}] must be {{"type": "function", "name": …}}; others are not offered'
            )
    return [_nested(tool) for tool in value]


def _nested(tool: Any) -> Any:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    return {"type": "function", "function": {name: part for name, part in tool.items() if name != "type"}}


def _tool_choice(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        tools = value.get("tools")
        nested = [_nested(tool) for tool in tools] if isinstance(tools, list) else tools
        return {"type": "allowed_tools", "allowed_tools": {**value, "tools": nested}}
    return _nested(value)


# -- the conversation -------------------------------------------------------------------------------------------------


def _messages(value: Any) -> list[dict[str, Any]]:
    """The messages of a chat. Reasoning and calls are items of their own here, and parts of a message there."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise InvalidRequestError("input", "input must be a string, or a list of one or more items")
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(value):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            content = _content(f"input[{i}].content", item.get("content") or "")
            _add(messages, {"role": item.get("role"), "content": content})
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary") or []
            text = _text(f"input[{i}].content", parts, ("reasoning_text", "summary_text"))
            _add(messages, {"role": "assistant", "reasoning_content": text})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            _add(messages, {"role": "assistant", "tool_calls": [call]})
        elif kind == "function_call_output":
            output = _content(f"input[{i}].output", item.get("output"))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        else:
            raise InvalidRequestError(
                "input", f"input[{i}] must be a message, reasoning, a function_call, or a function_call_output"
            )
    return messages


def _add(messages: list[dict[str, Any]], news: dict[str, Any]) -> None:
    """Add a message; what the assistant said in one turn is one."""
    last = messages[-1] if messages else {}
    if not last.get("role") == news["role"] == "assistant":
        messages.append(news)
    elif "tool_calls" in news:
        last["tool_calls"] = last.get("tool_calls", []) + news["tool_calls"]
    elif "tool_calls" in last or any(name in last for name in news if name != "role"):
        messages.append(news)
    else:
        last |= news


def _content(place: str, value: Any) -> str | list[dict[str, Any]]:
    """A text, or a list of texts and images in the form of chats."""
    if isinstance(value, list):
        return content_of_parts(place, value, _TEXT_PARTS, "input", ("input_image",))
    return _text(place, value)


def _text(place: str, value: Any, kinds: tuple[str, ...] = _TEXT_PARTS) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequestError("input", f"{place} must be a string, or a list of parts")
    return text_of_parts(place, value, kinds, "input")
