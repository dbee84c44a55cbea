"""Bodies of /v1/chat/completions → a conversation and sampling parameters of the model.

A field that is wrong is an InvalidRequestError.
"""

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from dataclasses import fields as fields_of
from typing import Any

import msgspec
from quire_engine.encoders.embeds import ROWS, ImageEmbeds
from quire_engine.encoders.video import Video
from quire_engine.errors import RequestError
from quire_engine.frontend.chat_template import TWO_ENDINGS
from quire_engine.frontend.image_parts import read_image, split_images

from quire_gateway.errors import InvalidRequestError
from quire_gateway.fields import Fields
from quire_gateway.requests import GenerationRequest, take_common
from quire_gateway.tools import ToolChoice, parse_tool_choice, parse_tools

logger = logging.getLogger("quire_gateway")

_ABSENT: Mapping[str, tuple[Any, ...]] = {
    "functions": ([],), "function_call": ("none", "auto"), "modalities": (["text"],), "add_special_tokens": (False,),
}  # fmt: skip
"""What the gateway does not offer, with the values that ask for nothing."""


_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest(GenerationRequest):
    """What one chat asks of a model."""

    tool_choice: ToolChoice | None = None
    """None: it is not to call anything."""
    include_reasoning: bool = True
    """Whether the client wants to see it."""
    echoed_text: str = ""
    """What the content begins with."""


def chat_request(fields: Fields) -> ChatRequest:
    """The chat that some fields ask for."""
    conversation, tool_choice = _conversation(fields)
    include_reasoning = fields.flag("include_reasoning", True)
    echoed_text = _last_text(conversation) if fields.flag("echo") else ""
    sampling, renamed = _logprobs_and_length(fields)
    common = take_common(fields, renamed)
    common["sampling"] |= sampling
    _constrain(common, tool_choice)
    return ChatRequest(
        **common, prompts=[conversation], tool_choice=tool_choice, include_reasoning=include_reasoning,
        echoed_text=echoed_text,
    )  # fmt: skip


def translated(fields: Fields, values: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The chat that a body of another API asks for, as arguments of `ChatRequest`.

    Args:
        fields: what is left of the body; it means the same in a chat.
        values: the fields of the chat that were made of the others.
        names: a chat's name of a field → the other API's.

    Raises:
        InvalidRequestError: a field is wrong, or has a chat's name.
    """
    for name, other in names.items():
        if name in fields.rest():
            raise InvalidRequestError(name, f"{name} is a chat's name: give {other}")
    fields.check_absent({"echo": (False,)})
    try:
        chat = chat_request(Fields(values | fields.rest()))
    except InvalidRequestError as error:
        param, message = names.get(error.param or "", error.param), str(error)
        if param != error.param and message.startswith(str(error.param)):
            message = f"{param}{message[len(str(error.param)) :]}"
        raise InvalidRequestError(param, message) from None
    renamed = {name: names.get(ours, ours) for name, ours in ({**names} | chat.renamed).items()}
    asked = {item.name: getattr(chat, item.name) for item in fields_of(chat)}
    return asked | {"said": fields.said, "renamed": renamed}


def take_conversation(fields: Fields) -> Mapping[str, Any]:
    """What the chat template is given."""
    return _conversation(fields)[0]


def _conversation(fields: Fields) -> tuple[Mapping[str, Any], ToolChoice | None]:
    try:
        messages, images = split_images(_messages(fields.take("messages")))
    except RequestError as error:
        raise InvalidRequestError("messages", str(error)) from None
    fields.check_absent(_ABSENT)
    tools = parse_tools(fields.take("tools") or [])
    tool_choice = parse_tool_choice(
        tools, fields.take("tool_choice"), is_parallel=fields.flag("parallel_tool_calls", True)
    )
    conversation: dict[str, Any] = {"messages": messages} | ({"images": images} if images else {})
    conversation |= {"tools": tool_choice.tools} if tool_choice else {}
    variables = _variables(fields)
    conversation |= {"chat_template_kwargs": variables} if variables else {}
    conversation |= _ending(fields)
    return conversation, tool_choice


def _ending(fields: Fields) -> dict[str, bool]:
    """How the conversation ends, if it is not with the beginning of an answer."""
    begins = fields.take_as(bool, "add_generation_prompt", "true or false")
    continues = fields.flag("continue_final_message")
    if begins and continues:
        raise InvalidRequestError("continue_final_message", TWO_ENDINGS)
    ending = {"continue_final_message": True} if continues else {}
    return ending | ({"add_generation_prompt": False} if begins is False else {})


def _last_text(conversation: Mapping[str, Any]) -> str:
    """Of the message that the answer belongs to; as in vLLM, an answer of its own repeats no other role's message."""
    last = conversation["messages"][-1]
    is_own = conversation.get("add_generation_prompt", True) and not conversation.get("continue_final_message")
    content = "" if is_own and last["role"] != "assistant" else last["content"] or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content if "text" in part)


def _constrain(common: dict[str, Any], tool_choice: ToolChoice | None) -> None:
    """Have a call that must be made follow its grammar."""
    structure = tool_choice.structured_outputs if tool_choice else None
    if structure is None:
        return
    name = common["renamed"].get("structured_outputs", "response_format")
    if name != "response_format":  # of the call and the text, only the call comes about
        raise InvalidRequestError(name, f"{name} is given with a tool_choice that asks for a call; give one of them")
    common["sampling"]["structured_outputs"] = structure
    common["renamed"]["structured_outputs"] = "tools"


def _logprobs_and_length(fields: Fields) -> tuple[dict[str, Any], dict[str, str]]:
    """Sampling parameters that chats have other names for, and these names."""
    sampling: dict[str, Any] = {}
    renamed: dict[str, str] = {}
    top = fields.take("top_logprobs")
    if fields.flag("logprobs"):
        sampling["logprobs"], renamed["logprobs"] = 0 if top is None else top, "top_logprobs"
    elif top not in (None, 0):  # 0 is the default of vLLM
        raise InvalidRequestError("top_logprobs", "top_logprobs is given without logprobs, which must then be true")
    max_tokens = fields.take("max_completion_tokens")
    if max_tokens is not None:
        fields.take("max_tokens")  # the older name: as with vLLM and Triton's own frontend, the newer one decides
        sampling["max_tokens"], renamed["max_tokens"] = max_tokens, "max_completion_tokens"
    return sampling, renamed


def _variables(fields: Fields) -> dict[str, Any]:
    """Further variables of the chat template: vLLM's `chat_template_kwargs`, and OpenAI's `reasoning_effort`."""
    variables = fields.take_as(dict, "chat_template_kwargs", "an object")
    effort = fields.take_as(str, "reasoning_effort", "a string, such as low or high")
    return ({} if effort is None else {"reasoning_effort": effort}) | (variables or {})


# -- messages ---------------------------------------------------------------------------------------------------------


def _messages(messages: Any) -> list[Mapping[str, Any]]:
    if not isinstance(messages, list) or not messages or not all(isinstance(item, dict) for item in messages):
        raise InvalidRequestError("messages", "messages must be a list of one or more objects with role and content")
    return [_message(i, message) for i, message in enumerate(messages)]


def _message(number: int, message: Mapping[str, Any]) -> Mapping[str, Any]:
    role = message.get("role")
    if not isinstance(role, str):
        raise InvalidRequestError("messages", f"messages[{number}].role must be a string, such as user")
    if role not in _ROLES:
        raise InvalidRequestError(
            "messages", f"messages[{number}].role is {role[:100]!r}; it must be one of {', '.join(_ROLES)}"
        )
    said = dict(message) | {"content": _content(f"messages[{number}].content", message.get("content"))}
    if said.get("reasoning_content", "") is None:
        del said["reasoning_content"]  # templates ask whether there is the field
    if (calls := message.get("tool_calls")) is not None:
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise InvalidRequestError("messages", f"messages[{number}].tool_calls must be a list of objects")
        said["tool_calls"] = [_call(f"messages[{number}].tool_calls[{i}]", call) for i, call in enumerate(calls)]
        if not calls:
            del said["tool_calls"]
    return said


def _call(place: str, call: Mapping[str, Any]) -> Mapping[str, Any]:
    """A call with its arguments as an object, as chat templates expect them."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequestError("messages", f"{place}.function must be an object with name and arguments")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = msgspec.json.decode(arguments)
    if not isinstance(arguments, dict):  # a model has written them: the conversation goes on all the same
        logger.warning("%s.function.arguments is no JSON object; the chat template gets {} instead", place)
        arguments = {}
    return {**call, "function": {**function, "arguments": arguments}}


def _content(place: str, content: Any) -> str | list[dict[str, Any]] | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError("messages", f"{place} must be a string, or a list of parts")
    return content_of_parts(place, content, ("text",), "messages", ("image_url", "video_url", ROWS))


def content_of_parts(
    place: str, parts: list[Any], kinds: tuple[str, ...], param: str, media: tuple[str, ...]
) -> str | list[dict[str, Any]]:
    """Text parts as one text, as vLLM joins them: templates expect a string. With images or videos, a list of texts and
    these in the form of chats.

    Args:
        place: of the parts.
        parts: of a content.
        kinds: types of those that hold text.
        param: the field that they are in.
        media: types of those that hold an image or a video.

    Raises:
        InvalidRequestError: one holds something else.
    """
    if not any(isinstance(part, dict) and part.get("type") in media for part in parts):
        return text_of_parts(place, parts, kinds, param)
    content: list[dict[str, Any]] = []
    for number, part in enumerate(parts):
        if isinstance(part, dict) and part.get("type") in media:
            content.append(image_part(f"{place}[{number}]", part, param))
        else:
            content.append({"type": "text", "text": text_of_parts(place, [part], kinds, param)})
    return content


def image_part(place: str, part: Mapping[str, Any], param: str) -> dict[str, Any]:
    """A part with an image or a video in the form of chats: its files, its http(s) URL, or its hidden states.

    Args:
        place: of the part.
        part: an `image_url`, a `video_url`, an `input_image`, or `image_embeds`.
        param: the field that it is in.

    Raises:
        InvalidRequestError: it holds no image, or no video.
    """
    try:
        value = read_image(part, place, param)
    except RequestError as error:
        raise InvalidRequestError(param, str(error)) from None
    kind = "video_url" if isinstance(value, Video) else ROWS if isinstance(value, ImageEmbeds) else "image_url"
    if not isinstance(value, str | bytes | Video | ImageEmbeds):
        raise InvalidRequestError(param, f"{place}.{kind} must be a URL, or an object with url")
    return {"type": kind, kind: value}


def text_of_parts(place: str, parts: list[Any], kinds: tuple[str, ...], param: str) -> str:
    """The texts of some parts, a line break between two.

    Args:
        place: of the parts.
        parts: of a content.
        kinds: types of those that hold text.
        param: the field that they are in.

    Raises:
        InvalidRequestError: one holds something else.
    """
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            raise InvalidRequestError(param, f"{place}[{number}]: {kind[:100]} parts are not offered by this model")
        if kind is None or not isinstance(part.get("text"), str):
            raise InvalidRequestError(param, f'{place}[{number}] must be {{"type": "{kinds[0]}", "text": …}}')
    return "\n".join(part["text"] for part in parts)
