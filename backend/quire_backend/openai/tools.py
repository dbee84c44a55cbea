"""Functions that a request offers to the model: what it may call, and what it must."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire_backend.openai.errors import InvalidRequestError
from quire_backend.openai.tool_schemas import DanglingReferenceError, hoist

__all__ = ["ToolChoice", "parse_tool_choice", "parse_tools"]

MAX_TOOLS = 128
"""As with OpenAI."""
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolChoice:
    """The functions of a request, and how far the model is free to call them."""

    tools: list[dict[str, Any]]
    """As the client gave them, for the chat template."""
    kind: str = "auto"
    """`auto`, `required` or `named`."""
    name: str = ""
    """The function that is to be called, if it is named."""
    is_parallel: bool = True
    """Whether there may be several calls."""

    @property
    def names(self) -> frozenset[str]:
        """Names of all functions."""
        return frozenset(tool["function"]["name"] for tool in self.tools)

    @property
    def structured_outputs(self) -> dict[str, Any] | None:
        """The grammar of a call that has to be made: a list of calls, or the named function's arguments. None: it is
        the model's choice.
        """
        if self.kind == "auto":
            return None
        definitions: dict[str, Any] = {}
        calls = []
        for number, tool in enumerate(self.tools):
            function = tool["function"]
            if self.kind == "required" or function["name"] == self.name:
                parameters, moved = _parameters(function, number)
                definitions |= moved
                calls.append(_call_schema(function["name"], parameters))
        if self.kind == "named":
            schema: dict[str, Any] = dict(parameters)
        else:
            schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
            schema |= {} if self.is_parallel else {"maxItems": 1}
        schema |= {"$defs": definitions} if definitions else {}
        # White space between values, which the model could go on with until the end of its context, has no meaning.
        return {"json": schema, "disable_any_whitespace": True}


def parse_tools(value: Any) -> list[dict[str, Any]]:
    """The field `tools`.

    Raises:
        InvalidRequestError: it holds something else than functions, too many, or two of one name.
    """
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise InvalidRequestError("tools", f"tools must be a list of up to {MAX_TOOLS} functions")
    names = set()
    for i, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict):
            raise InvalidRequestError("tools", f'tools[{i}] must be {{"type": "function", "function": {{"name": …}}}}')
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidRequestError("tools", f"tools[{i}].function.name must be 1 to 64 of a-z, A-Z, 0-9, _, -, .")
        if name in names:
            raise InvalidRequestError("tools", f"tools[{i}].function.name is {name!r}, as an earlier one's")
        names.add(name)
        if not isinstance(function.get("parameters") or {}, dict):
            raise InvalidRequestError("tools", f"tools[{i}].function.parameters must be a JSON schema")
    return value


def parse_tool_choice(tools: list[dict[str, Any]], choice: Any, *, is_parallel: bool) -> ToolChoice | None:
    """The functions that the model may call; None: there are none, or it is not to call them.

    Args:
        tools: all that are offered.
        choice: the field `tool_choice`.
        is_parallel: the field `parallel_tool_calls`.

    Raises:
        InvalidRequestError: it is none of what may be chosen.
    """
    names = [tool["function"]["name"] for tool in tools]
    kind: Any = choice
    name: Any = ""
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        kind, name = "named", function.get("name") if isinstance(function, dict) else None
    if kind == "none" or (not tools and kind in (None, "auto")):
        return None
    if kind not in (None, "auto", "required", "named") or choice == "named":
        raise InvalidRequestError(
            "tool_choice",
            'tool_choice must be none, auto, required, or {"type": "function", "function": {"name": …}}',
        )
    if not tools:
        raise InvalidRequestError("tool_choice", "tool_choice asks for a call, but there are no tools")
    if kind == "named" and name not in names:
        raise InvalidRequestError("tool_choice", "tool_choice.function.name must be that of one of the tools")
    return ToolChoice(tools=tools, kind=kind or "auto", name=name, is_parallel=is_parallel)


def _parameters(function: Mapping[str, Any], number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    try:
        return hoist(schema, str(number))
    except DanglingReferenceError as error:
        place = f"tools[{number}].function.parameters"
        raise InvalidRequestError("tools", f"{place}: $ref {str(error)[:100]!r} refers to no schema in it") from None


def _call_schema(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
