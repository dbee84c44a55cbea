"""Bodies of OpenAI's requests → prompts and sampling parameters of the model.

Only what the gateway itself needs is looked at here. Everything else goes to the model under the name that the client
gave it, and the model says what is wrong with it, unknown names included: vLLM's extra parameters are its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire_backend.openai.errors import InvalidRequestError
from quire_backend.openai.triton_client import Prompt

__all__ = ["GenerationRequest", "parse_chat", "parse_completion", "parse_object"]

MAX_PROMPTS = 2048
"""Of one request to /v1/completions, as with OpenAI."""
_IGNORED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
)  # fmt: skip
"""Fields that change nothing in the answer: OpenAI's own bookkeeping."""
_ABSENT_CHAT: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False), "modalities": (["text"],), "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}  # fmt: skip
"""What the gateway does not offer, with the values that ask for nothing."""
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""vLLM's older names → kinds of `structured_outputs`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """What one HTTP request asks of a model."""

    model: str
    prompts: list[Prompt]
    sampling: dict[str, Any]
    """Sampling parameters, under the model's names."""
    said: frozenset[str]
    """All fields of the body."""
    renamed: dict[str, str] = field(default_factory=dict)
    """The model's name of a parameter → the client's, where they differ."""
    stream: bool = False
    include_usage: bool = False
    echo: bool = False


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body.

    Raises:
        InvalidRequestError: it is none.
    """
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise InvalidRequestError(None, "the body is not JSON that can be read: it nests too deeply") from None
    except ValueError as error:
        raise InvalidRequestError(None, f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(None, "the body must be a JSON object")
    return value


def parse_completion(body: bytes) -> GenerationRequest:
    """The body of /v1/completions.

    Raises:
        InvalidRequestError: it is no JSON, or a field that the gateway reads is wrong.
    """
    values = parse_object(body)
    said = frozenset(values)
    fields = _Fields(values)
    prompts = _prompts(fields.take("prompt"))
    echo = fields.flag("echo")
    common = _common(fields, {})
    if echo and not all(isinstance(prompt, str) for prompt in prompts):
        raise InvalidRequestError("echo", "echo is true; it is only offered for prompts that are text")
    if echo and "logprobs" in common["sampling"]:
        raise InvalidRequestError("echo", "echo is true; it is not offered together with logprobs: see prompt_logprobs")
    renamed = common["renamed"] | {"text_input": "prompt", "input_ids": "prompt"}
    return GenerationRequest(**common | {"prompts": prompts, "echo": echo, "said": said, "renamed": renamed})


def parse_chat(body: bytes) -> GenerationRequest:
    """The body of /v1/chat/completions.

    Raises:
        InvalidRequestError: it is no JSON, or a field that the gateway reads is wrong.
    """
    values = parse_object(body)
    said = frozenset(values)
    fields = _Fields(values)
    messages = _messages(fields.take("messages"))
    for name, neutral in _ABSENT_CHAT.items():
        value = fields.take(name)
        if value is not None and value not in neutral:
            raise InvalidRequestError(name, f"{name} is not offered here: leave it out")
    sampling: dict[str, Any] = {}
    renamed: dict[str, str] = {}
    if fields.flag("logprobs"):
        top = fields.take("top_logprobs")
        sampling["logprobs"], renamed["logprobs"] = 0 if top is None else top, "top_logprobs"
    elif fields.take("top_logprobs") is not None:
        raise InvalidRequestError("top_logprobs", "top_logprobs is given without logprobs, which must then be true")
    max_tokens = fields.take("max_completion_tokens")
    if max_tokens is not None:
        if values.get("max_tokens") not in (None, max_tokens):
            raise InvalidRequestError(
                "max_tokens", "max_tokens and max_completion_tokens are both given; they must agree"
            )
        sampling["max_tokens"], renamed["max_tokens"] = max_tokens, "max_completion_tokens"
    common = _common(fields, renamed)
    return GenerationRequest(
        **common | {"prompts": [messages], "said": said, "sampling": common["sampling"] | sampling}
    )


class _Fields:
    """The fields of a body that nothing has taken yet; null counts as absent."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = {name: value for name, value in values.items() if value is not None}

    def take(self, name: str) -> Any:
        return self._values.pop(name, None)

    def flag(self, name: str) -> bool:
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise InvalidRequestError(name, f"{name} must be true or false")
        return bool(value)

    def rest(self) -> dict[str, Any]:
        return self._values


def _common(fields: _Fields, renamed: dict[str, str]) -> dict[str, Any]:
    """What both kinds of requests have; takes everything that is left."""
    model = fields.take("model")
    if not isinstance(model, str) or not model:
        raise InvalidRequestError("model", "model must be the name of a model, as /v1/models lists them")
    stream = fields.flag("stream")
    options = fields.take("stream_options")
    if options is not None and not isinstance(options, dict):
        raise InvalidRequestError("stream_options", "stream_options must be an object")
    if options is not None and not stream:
        raise InvalidRequestError("stream_options", "stream_options is given without stream, which must then be true")
    for name in _IGNORED:
        fields.take(name)
    structure, origin = _structured_outputs(fields)
    sampling = fields.rest()
    if structure is not None:
        sampling = sampling | {"structured_outputs": structure}
        renamed = renamed | {"structured_outputs": origin}
    return {"model": model, "stream": stream, "include_usage": bool((options or {}).get("include_usage")),
            "sampling": sampling, "renamed": renamed}  # fmt: skip


def _prompts(prompt: Any) -> list[Prompt]:
    """Text, a list of texts, token ids, or a list of lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(_is_token_id(item) for item in prompt):
            return [prompt]
        if len(prompt) > MAX_PROMPTS:
            raise InvalidRequestError("prompt", f"prompt holds {len(prompt)} prompts; at most {MAX_PROMPTS} are taken")
        if all(isinstance(item, str) for item in prompt):
            return prompt
        if all(isinstance(item, list) and item and all(map(_is_token_id, item)) for item in prompt):
            return prompt
    raise InvalidRequestError(
        "prompt", "prompt must be a string, a list of strings, a list of token ids, or a list of such lists"
    )


def _is_token_id(value: object) -> bool:
    """What an INT32 can hold; whether the model has it, the model says."""
    return type(value) is int and -(2**31) <= value < 2**31


def _messages(messages: Any) -> list[Mapping[str, Any]]:
    if not isinstance(messages, list) or not messages or not all(isinstance(item, dict) for item in messages):
        raise InvalidRequestError("messages", "messages must be a list of one or more objects with role and content")
    return [message | {"content": _content(message.get("content"))} for message in messages]


def _content(content: Any) -> Any:
    """Text parts as one text, as vLLM joins them: templates expect a string."""
    if not isinstance(content, list):
        return content
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequestError(
                "messages", 'messages: each part of a content must be {"type": "text", "text": …}'
            )
    return "\n".join(part["text"] for part in content)


def _structured_outputs(fields: _Fields) -> tuple[Any, str]:
    """The model's `structured_outputs`, from any of its names, and that name."""
    found: dict[str, Any] = {}
    if (structured := fields.take("structured_outputs")) is not None:
        found["structured_outputs"] = structured
    if (response_format := fields.take("response_format")) is not None:
        structure = _response_format(response_format)
        if structure is not None:
            found["response_format"] = structure
    for name, kind in _GUIDED.items():
        if (value := fields.take(name)) is not None:
            found[name] = {kind: value}
    if len(found) > 1:
        names = " and ".join(found)
        raise InvalidRequestError(next(iter(found)), f"{names} are given together; give one of them")
    return next(((value, name) for name, value in found.items()), (None, ""))


def _response_format(value: Any) -> dict[str, Any] | None:
    kinds: dict[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = {
        "text": lambda value: None,
        "json_object": lambda value: {"json_object": True},
        "json_schema": _json_schema,
        "structural_tag": lambda value: {"structural_tag": value},
    }
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise InvalidRequestError(
            "response_format", f"response_format must be an object whose type is one of {', '.join(kinds)}"
        )
    return kinds[kind](value)


def _json_schema(value: dict[str, Any]) -> dict[str, Any]:
    described = value.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        raise InvalidRequestError("response_format", "response_format.json_schema.schema must be a JSON schema")
    return {"json": schema}
