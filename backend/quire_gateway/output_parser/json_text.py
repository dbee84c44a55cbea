"""Calls in JSON, passed on as they come.

Arguments are passed on as the model writes them, and not checked: the program that runs the function has to. What does
not begin like a call is no call, and is read again as text.
"""

import json
from collections.abc import Callable, Collection
from typing import Any

from quire_gateway.output_parser.message import Message
from quire_gateway.output_parser.text import Steps, Text

_ARGUMENTS = ("arguments", "parameters")
_CALL_KEYS = ("name", "type", "id", *_ARGUMENTS)
_NOTHING = "{}"


def read_value(text: Text, take: Callable[[str], object]) -> Steps[bool]:
    """Hand on one JSON value. Whether it is right inside is not checked.

    Returns:
        Whether it has an end.
    """
    rest = yield from text.rest()
    if rest[:1] not in ("{", "[", '"'):
        literal = yield from text.while_in(lambda character: character.isalnum() or character in "+-.")
        take(literal)
        return bool(literal)
    depth, is_in_string, is_escaped = 0, False, False
    while rest:
        for i, character in enumerate(rest):
            if is_in_string:
                is_in_string = is_escaped or character != '"'
                is_escaped = character == "\\" and not is_escaped
            elif character == '"':
                is_in_string = True
            elif character in "{[":
                depth += 1
            elif character in "}]":
                depth -= 1
            if depth == 0 and not is_in_string:
                text.skip(i + 1)
                take(rest[: i + 1])
                return True
        text.skip(len(rest))
        take(rest)
        rest = yield from text.rest()
    return False


def read_calls(text: Text, message: Message) -> Steps[bool]:
    """A list of calls.

    Returns:
        Whether one has begun; if not, nothing was read.
    """
    text.mark()
    num_before = message.num_calls
    separator = yield from text.character()
    is_list = separator == "["
    while is_list and separator in ("[", ","):
        yield from text.blank()
        if not (yield from read_call(text, message)):
            break
        yield from text.blank()
        separator = yield from text.character()
    has_begun = message.num_calls > num_before
    text.release(rewind=not has_begun)
    if has_begun and separator != "]":
        yield from text.until(take=lambda part: None)  # the rest of a broken list is nothing to show
    return has_begun


def read_call(text: Text, message: Message, names: Collection[str] | None = None) -> Steps[bool]:
    """A call: an object with a `name`, and `arguments` or `parameters`, in any order.

    Args:
        text: where it begins.
        message: is told of it.
        names: of functions. With them, an object of another name, or with other keys, is no call.

    Returns:
        Whether it has begun; if not, nothing was read.
    """
    text.mark()
    call = _Call(message, names)
    yield from call.read(text)
    text.release(rewind=not call.has_begun)
    return call.has_begun


class _Call:
    """One call. It begins when its name is known and its arguments begin; before, it may still turn out to be none."""

    def __init__(self, message: Message, names: Collection[str] | None) -> None:
        self.has_begun = False
        self._message = message
        self._names = names
        self._name = ""
        self._held = ""
        """Arguments that came before the name."""
        self._has_arguments = False

    def read(self, text: Text) -> Steps[None]:
        """Read as far as it is one."""
        separator = yield from text.character()
        is_object = separator == "{"
        while is_object and separator in ("{", ","):
            yield from text.blank()
            if (yield from text.starts_with("}")) and separator == "{":
                return  # empty
            key = yield from _decoded(text)
            yield from text.blank()
            colon = yield from text.character()
            is_taken = self._names is None or key in _CALL_KEYS
            if not isinstance(key, str) or colon != ":" or not is_taken:
                return
            yield from text.blank()
            if not (yield from self._value(key, text)):
                return
            yield from text.blank()
            separator = yield from text.character()
        if separator == "}" and self._name and not self._has_arguments:
            self._begin(_NOTHING)

    def _value(self, key: str, text: Text) -> Steps[bool]:
        """The value of one key; False when it has no end, or the object is no call."""
        if key == "name" and not self._name:
            name = yield from _decoded(text)
            if not isinstance(name, str) or not name or (self._names is not None and name not in self._names):
                return False
            self._name = name
            if self._has_arguments:
                self._begin(self._held)
            return True
        if key not in _ARGUMENTS or self._has_arguments:
            return (yield from read_value(text, lambda part: None))
        if (yield from text.starts_with("{")):
            if self._name:
                self._begin("")
            has_end = yield from read_value(text, self._more)
        else:
            value = yield from _decoded(text)
            has_end = value is not _NO_VALUE
            if has_end:
                self._more(_as_object(value))
                if self._name:
                    self._begin(self._held)
        self._has_arguments = True
        return has_end

    def _begin(self, arguments: str) -> None:
        self.has_begun = True
        self._message.call(self._name)
        if arguments:
            self._message.arguments(arguments)

    def _more(self, arguments: str) -> None:
        if self.has_begun:
            self._message.arguments(arguments)
        else:
            self._held += arguments


_NO_VALUE = object()


def _decoded(text: Text) -> Steps[Any]:
    """One value, or `_NO_VALUE`."""
    parts: list[str] = []
    has_end = yield from read_value(text, parts.append)
    try:
        return json.loads("".join(parts)) if has_end else _NO_VALUE
    except (ValueError, RecursionError):
        return _NO_VALUE


def _as_object(arguments: Any) -> str:
    """Some models write the object into a string, or null for none."""
    if isinstance(arguments, str):
        return arguments
    return _NOTHING if arguments is None else json.dumps(arguments, ensure_ascii=False)
