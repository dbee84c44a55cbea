"""Tools of the type `custom`, whose input is plain text: to the model, functions with one string.

A model writes `{"input": "…"}` as it writes the arguments of any function; the client gets the text in it.
"""

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from quire_gateway.errors import InvalidRequestError
from quire_gateway.output_parser import Arguments, CallStart, Piece

_PARAMETERS = {
    "type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"], "additionalProperties": False,
}  # fmt: skip


def as_function(place: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    """A function that stands for a custom tool.

    Args:
        place: of the tool, for messages.
        tool: a chat's `{"type": "custom", "custom": {"name": …}}`.

    Raises:
        InvalidRequestError: its input is to follow a grammar.
    """
    custom: Mapping[str, Any] = tool["custom"]
    described = custom.get("format") or {"type": "text"}
    if not isinstance(described, dict) or described.get("type") != "text":
        raise InvalidRequestError(
            "tools", f'{place}.custom.format is not offered: leave it out, or give {{"type": "text"}}'
        )
    function = {name: custom[name] for name in ("name", "description") if custom.get(name) is not None}
    return {"type": "function", "function": function | {"parameters": _PARAMETERS}}


def arguments_of(text: Any) -> dict[str, Any]:
    """The arguments of the function that stands for a custom tool, whose input was some text."""
    return {"input": text if isinstance(text, str) else ""}


class CustomInputs:
    """Has the arguments of custom tools' calls wait until they are whole, and takes the input out of them.

    Args:
        names: of the custom tools.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._texts: dict[int, str] = {}
        """Of each call of a custom tool: what has come of its arguments."""
        self._open: int | None = None

    def read(self, pieces: list[Piece], *, is_last: bool) -> list[Piece]:
        """The same pieces, with texts in the place of custom tools' arguments.

        Args:
            pieces: what is new.
            is_last: whether no more comes.
        """
        found: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, Arguments) and piece.index == self._open:
                self._texts[piece.index] += piece.text
                continue
            found += self._end()
            found.append(piece)
            if isinstance(piece, CallStart) and piece.name in self._names:
                self._open, self._texts[piece.index] = piece.index, ""
        return found + (self._end() if is_last else [])

    def is_custom(self, index: int) -> bool:
        """Whether a call is a custom tool's."""
        return index in self._texts

    def _end(self) -> list[Piece]:
        if self._open is None:
            return []
        index, self._open = self._open, None
        text = self._texts[index]
        # One that is cut off, or has another shape, goes to the client as the model has written it.
        with suppress(msgspec.DecodeError, RecursionError):
            text = msgspec.json.decode(text, type=_Input).input
        return [Arguments(index, text)]


class _Input(msgspec.Struct):
    input: str
