"""The JSON object that the body of a request is."""

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from quire_gateway.errors import InvalidRequestError

_T = TypeVar("_T")
MAX_STRUCTURE = 1 << 18
"""Commas and brackets of a body, those within strings included. No stream goes on during the call that decodes them:
40 ms for as many as this, seconds for 16 MB of small ones. A context of a million tokens has room for about as many."""
MAX_DEPTH = 100
"""Of lists and objects within each other: far more than any schema has, and less than the reader's own stack."""


class Fields:
    """The fields of a body that nothing has taken yet; null counts as absent."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.said = frozenset(values)
        """All of the body's, whether or not they were taken."""
        self._values = {name: value for name, value in values.items() if value is not None}

    def take(self, name: str) -> Any:
        """The value of a field, once; None if it is absent."""
        return self._values.pop(name, None)

    def provide(self, name: str, value: Any) -> None:
        """Give a field that is absent a value."""
        self._values.setdefault(name, value)

    def take_as(self, kind: type[_T], name: str, what: str) -> _T | None:
        """The value of a field, once; None if it is absent.

        Args:
            kind: its type.
            name: of the field.
            what: it must be, in words.

        Raises:
            InvalidRequestError: it is of another type.
        """
        value = self.take(name)
        if value is not None and not isinstance(value, kind):
            raise InvalidRequestError(name, f"{name} must be {what}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """The value of a field that is true or false. Raises InvalidRequestError if it is neither."""
        value = self.take_as(bool, name, "true or false")
        return default if value is None else value

    def check_absent(self, absent: Mapping[str, tuple[Any, ...]], why: Mapping[str, str] | None = None) -> None:
        """Take the fields of what is not offered.

        Args:
            absent: names, with the values that ask for nothing.
            why: of some of them, what to do.

        Raises:
            InvalidRequestError: one asks for something.
        """
        for name, neutral in absent.items():
            value = self.take(name)
            if value is not None and value not in neutral:
                raise InvalidRequestError(name, f"{name} is not offered: {(why or {}).get(name, 'leave it out')}")

    def check_all_taken(self) -> None:
        """Raise InvalidRequestError if a field is left that this route does not have."""
        for name in self._values:
            raise InvalidRequestError(name, f"{name[:100]} is not a field of this route")

    def rest(self) -> dict[str, Any]:
        """What is left."""
        return self._values


def parse_object(body: bytes) -> Fields:
    """The JSON object of a body.

    Raises:
        InvalidRequestError: it is none.
    """
    size = sum(body.count(mark) for mark in (b",", b"[", b"{"))
    if size > MAX_STRUCTURE:
        raise InvalidRequestError(None, f"the body holds {size} commas and brackets; at most {MAX_STRUCTURE} are taken")
    too_deep = InvalidRequestError(None, f"the body is not JSON that can be read: it nests deeper than {MAX_DEPTH}")
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise too_deep from None
    except ValueError as error:
        raise InvalidRequestError(None, f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(None, "the body must be a JSON object")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        for name, part in value.items():
            if _is_deep(part):
                raise InvalidRequestError(name, f"{name[:100]} nests deeper than {MAX_DEPTH} lists and objects")
    return Fields(value)


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [part for parent in level for part in _parts(parent)]
        if not level:
            return False
    return True


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value
