"""Bodies of /v1/messages, Anthropic's API → a chat. Nothing is kept: each request brings its whole conversation."""

from collections.abc import Mapping
from typing import Any

from quire_gateway.chat import ChatRequest, image_part, translated
from quire_gateway.errors import InvalidRequestError
from quire_gateway.fields import Fields

_RENAMED = {
    "stop": "stop_sequences", "response_format": "output_config", "reasoning_effort": "output_config",
    "max_completion_tokens": "max_tokens", "parallel_tool_calls": "tool_choice", "include_reasoning": "thinking",
    "continue_final_message": "messages",
}  # fmt: skip
"""A chat's name of a field → the one here."""
_ABSENT: Mapping[str, tuple[Any, ...]] = {
    "container": (), "mcp_servers": ([],), "n": (1,), "logprobs": (False,), "top_logprobs": (0,),
    "return_token_ids": (False,), "return_tokens_as_token_ids": (False,), "stream_options": (),
}  # fmt: skip
"""What is not offered, with the values that ask for nothing."""
_IGNORED = (
    "cache_control", "context_management", "diagnostics", "inference_geo", "speed", "user_profile_id",
)  # fmt: skip
"""Fields that change nothing in the answer, besides those of chats: prefixes are always cached."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def parse_messages(fields: Fields, *, is_counted: bool = False) -> ChatRequest:
    """The body of /v1/messages.

    Args:
        fields: of the body.
        is_counted: it is one of /v1/messages/count_tokens, which has no `max_tokens`.
    """
    fields.check_absent(_ABSENT)
    for name in _IGNORED:
        fields.take(name)
    if not is_counted and "max_tokens" not in fields.rest():
        raise InvalidRequestError("max_tokens", "max_tokens is missing; give the most tokens to generate")
    system = fields.take("system")
    messages: list[dict[str, Any]] = (
        [] if system in (None, "", []) else [{"role": "system", "content": _text("system", system)}]
    )
    for i, message in enumerate(_list("messages", fields.take("messages"))):
        _add_turn(messages, f"messages[{i}]", message)
    if "tool_calls" in messages[-1]:
        raise InvalidRequestError("messages", "messages ends with a tool_use; its tool_result must follow")
    stop = fields.take("stop_sequences")
    choice = fields.take_as(dict, "tool_choice", "an object") or {}
    config = fields.take_as(dict, "output_config", "an object") or {}
    thinking = (fields.take_as(dict, "thinking", "an object") or {}).get("type", "absent")
    values: dict[str, Any] = {
        "messages": messages,
        "tools": _tools(fields.take("tools")),
        "tool_choice": _tool_choice(choice) if choice else None,
        "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
        "stop": stop,
        "response_format": _format(config.get("format")),
        "reasoning_effort": config.get("effort"),
        "include_reasoning": thinking not in ("absent", "disabled"),
        "continue_final_message": messages[-1]["role"] == "assistant",
    }
    if thinking == "disabled":  # the name that chat templates have for it
        variables = fields.take_as(dict, "chat_template_kwargs", "an object") or {}
        values["chat_template_kwargs"] = {"enable_thinking": False} | variables
    try:
        chat = translated(fields, values, _RENAMED)
    except InvalidRequestError as error:
        # A function's parts are one level deeper in a chat.
        text = str(error).replace(".function.parameters", ".input_schema").replace(".function.", ".")
        raise InvalidRequestError(error.param, text) from None
    return ChatRequest(**chat | {"outputs": frozenset({"stop_reason"} if stop else ())})


def _list(place: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        raise InvalidRequestError(place.partition("[")[0], f"{place} must be a list of one or more objects")
    return value


def _format(value: Any) -> Any:
    """`output_config.format` in the shape of a chat's `response_format`."""
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("type") != "json_schema":
        raise InvalidRequestError(
            "output_config", 'output_config.format must be {"type": "json_schema", "schema": {…}}'
        )
    return {"type": "json_schema", "json_schema": {"schema": value.get("schema")}}


def _tools(value: Any) -> Any:
    if value is None or value == []:
        return None
    tools = []
    for i, tool in enumerate(_list("tools", value)):
        if tool.get("type", "custom") not in ("custom", None):
            kind = str(tool["type"])[:100]
            raise InvalidRequestError("tools", f"tools[{i}] is of the type {kind}; only tools of your own are offered")
        if not isinstance(tool.get("input_schema"), dict):
            raise InvalidRequestError("tools", f"tools[{i}].input_schema must be a JSON schema")
        function = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
        tools.append({"type": "function", "function": function | {"parameters": tool["input_schema"]}})
    return tools


def _tool_choice(choice: Mapping[str, Any]) -> Any:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise InvalidRequestError("tool_choice", "tool_choice.type must be auto, any, tool (with name) or none")
    return _CHOICES[kind]


# -- the conversation -------------------------------------------------------------------------------------------------


def _text(place: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    return "\n".join(_text_of(f"{place}[{i}]", block) for i, block in enumerate(_list(place, value)))


def _text_of(place: str, block: Mapping[str, Any], name: str = "text") -> str:
    """The text of a block that can only hold that."""
    kind, text = block.get("type"), block.get(name)
    if kind != name and isinstance(kind, str):
        raise InvalidRequestError(place.partition("[")[0], f"{place}: {kind[:100]} blocks are not offered here")
    if kind != name or not isinstance(text, str):
        raise InvalidRequestError(place.partition("[")[0], f'{place} must be {{"type": "{name}", "{name}": …}}')
    return text


def _add_turn(messages: list[dict[str, Any]], place: str, message: Mapping[str, Any]) -> None:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise InvalidRequestError("messages", f"{place}.role must be user, assistant or system")
    place += ".content"
    if role == "assistant" and content == []:  # as an answer without text is
        content = ""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else _list(place, content)
    if role == "assistant":
        _add(messages, _assistant(place, blocks))
        return
    for i, block in enumerate(blocks):
        if block.get("type") == "tool_result" and role == "user":
            messages.append(_tool_result(f"{place}[{i}]", block))
        else:
            read = _text_or_image if role == "user" else _text_of
            _add(messages, {"role": role, "content": read(f"{place}[{i}]", block)})


def _add(messages: list[dict[str, Any]], news: dict[str, Any]) -> None:
    """Add a message; turns of one role are one, as templates may want them to alternate."""
    last = messages[-1] if messages else {}
    if last.get("role") != news["role"] or "tool_calls" in last or "reasoning_content" in news:
        messages.append(news)
    else:
        texts = [last["content"], news["content"]]
        if all(isinstance(text, str) for text in texts):
            last |= news | {"content": "\n".join(filter(None, texts))}
        else:
            last |= news | {"content": [part for content in texts for part in _parts(content)]}


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def _text_or_image(place: str, block: Mapping[str, Any]) -> str | list[dict[str, Any]]:
    """The text of a block, or its image in the form of a chat's."""
    if block.get("type") != "image":
        return _text_of(place, block)
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    value = source.get({"base64": "data", "url": "url"}.get(str(kind), "")) if isinstance(source, dict) else None
    if not isinstance(value, str) or (kind == "url" and value[:5].lower() == "data:"):
        raise InvalidRequestError("messages", f"{place}.source must be base64 with data, or url with an http(s) URL")
    url = value if kind == "url" else f"data:;base64,{value}"
    return [image_part(place, {"type": "image_url", "image_url": url}, "messages")]


def _assistant(place: str, blocks: list[dict[str, Any]]) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(blocks):
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(_text_of(f"{place}[{i}]", block, "thinking"))
        elif kind == "tool_use":
            call_input = block.get("input", {})
            if not all(isinstance(block.get(name), str) for name in ("id", "name")) or not isinstance(call_input, dict):
                raise InvalidRequestError("messages", f"{place}[{i}] must have an id, a name, and an object as input")
            function = {"name": block["name"], "arguments": call_input}
            calls.append({"id": block["id"], "type": "function", "function": function})
        elif kind != "redacted_thinking":
            texts.append(_text_of(f"{place}[{i}]", block))
    said: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    said |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    return said | ({"tool_calls": calls} if calls else {})


def _tool_result(place: str, block: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(block.get("tool_use_id"), str):
        raise InvalidRequestError("messages", f"{place}.tool_use_id must be the id of a call")
    said: dict[str, Any] = {"role": "tool", "tool_call_id": block["tool_use_id"], "content": ""}
    if content := block.get("content"):
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else _list(f"{place}.content", content)
        turn: list[dict[str, Any]] = []
        for i, inner in enumerate(blocks):
            _add(turn, {**said, "content": _text_or_image(f"{place}.content[{i}]", inner)})
        (said,) = turn
    if block.get("is_error") is True:  # chats have no field for it
        text = said["content"]
        said["content"] = f"Error: {text}" if isinstance(text, str) else [*_parts("Error:"), *text]
    return said
