"""Functions that a request offers to the model: what it may call, and what it must."""

import re
from dataclasses import dataclass
from typing import Any

from quire_gateway.errors import InvalidRequestError

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
        schemas = {
            tool["function"]["name"]: tool["function"].get("parameters") or {"type": "object", "properties": {}}
            for tool in self.tools
        }
        kind: dict[str, Any] = {"json": schemas[self.name]} if self.kind == "named" else self._list_of_calls(schemas)
        # White space between values, which the model could go on with until the end of its context, has no meaning.
        return {**kind, "disable_any_whitespace": True}

    def _list_of_calls(self, schemas: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """A structural tag, in which each schema stays whole: the references in it are relative to its own root."""
        tags = [
            {
                "type": "tag", "begin": f'{{"name": "{name}", "parameters": ', "end": "}",
                "content": {"type": "json_schema", "json_schema": schema},
            }
            for name, schema in schemas.items()
        ]  # fmt: skip
        calls = {
            "type": "tags_with_separator", "tags": tags, "separator": ", ", "at_least_one": True,
            "stop_after_first": not self.is_parallel,
        }  # fmt: skip
        begin, end = ({"type": "const_string", "value": bracket} for bracket in "[]")
        return {"structural_tag": {"format": {"type": "sequence", "elements": [begin, calls, end]}}}


def parse_tools(value: Any) -> list[dict[str, Any]]:
    """The field `tools`.

    Raises:
        InvalidRequestError: it holds something else than functions, too many, or two of one name.
    """
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise InvalidRequestError("tools", f"tools must be a list of up to {MAX_TOOLS} functions")
    names = set()
    for i, tool in enumerate(value):
        function = _function(tool)
        if function is None:
            raise InvalidRequestError(
                "tools",
                f'tools[{i}] must be {{"type": "function", "function": {{"name": …}}}}; others are not offered',
            )
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
        tools: all that are offered, see `parse_tools`.
        choice: the field `tool_choice`.
        is_parallel: the field `parallel_tool_calls`.

    Raises:
        InvalidRequestError: it is none of what may be chosen.
    """
    functions = {_named(tool): tool for tool in tools}
    kind: Any = choice
    name = ""
    if isinstance(choice, dict) and choice.get("type") == "function":
        kind, name = "named", _named(choice)
    elif isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        kind, functions = _allowed(choice.get("allowed_tools"), functions)
    if kind == "none" or (not tools and kind in (None, "auto")):
        return None
    if kind not in (None, "auto", "required", "named") or choice == "named":
        raise InvalidRequestError(
            "tool_choice",
            'tool_choice must be none, auto, required, {"type": "function", "function": {"name": …}}, or '
            '{"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": …}}',
        )
    if not tools:
        raise InvalidRequestError("tool_choice", "tool_choice asks for a call, but there are no tools")
    if kind == "named" and name not in functions:
        raise InvalidRequestError("tool_choice", "tool_choice.function.name must be that of one of the tools")
    return ToolChoice(tools=list(functions.values()), kind=kind or "auto", name=name, is_parallel=is_parallel)


def _function(tool: Any) -> dict[str, Any] | None:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    return function if isinstance(function, dict) else None


def _named(tool: Any) -> str:
    """The name in a tool, or in what refers to one; empty if it is neither."""
    name = (_function(tool) or {}).get("name")
    return name if isinstance(name, str) else ""


def _allowed(value: Any, functions: dict[str, dict[str, Any]]) -> tuple[Any, dict[str, dict[str, Any]]]:
    """The mode, and those of the functions that are allowed."""
    described = value if isinstance(value, dict) else {}
    mode, tools = described.get("mode", "auto"), described.get("tools")
    if mode not in ("auto", "required"):
        raise InvalidRequestError("tool_choice", "tool_choice.allowed_tools.mode must be auto or required")
    if not isinstance(tools, list) or not tools:
        raise InvalidRequestError("tool_choice", "tool_choice.allowed_tools.tools must be a list of one or more tools")
    names = {_named(tool) for tool in tools}
    if not functions.keys() >= names:
        raise InvalidRequestError("tool_choice", "tool_choice.allowed_tools.tools must hold tools of the request alone")
    return mode, {name: function for name, function in functions.items() if name in names}
