"""JSON schemas of functions as parts of one schema: what a `$ref` refers to moves to the root's `$defs`.

A reference is a JSON pointer from the root (RFC 6901), which no longer holds where the schema is part of another one.
Every target gets a plain name of its own, as the grammar compiler knows neither escapes nor lists in pointers::

    {"properties": {"at": {"$ref": "#/$defs/a~1b"}}, "$defs": {"a/b": {"type": "string"}}}
    → {"properties": {"at": {"$ref": "#/$defs/0_0"}}}      and      "0_0": {"type": "string"}
"""

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

__all__ = ["DanglingReferenceError", "hoist"]

_Path = tuple[str, ...]
_DATA = ("enum", "const", "default", "examples")
_DEFINITIONS = ("$defs", "definitions")
_SCHEMAS_BY_NAME = (*_DEFINITIONS, "properties", "patternProperties", "dependentSchemas")
"""Keys whose values are objects with any names, each of which is a schema."""


class DanglingReferenceError(ValueError):
    """A `$ref` refers to no schema; the message is the reference."""


def hoist(schema: dict[str, Any], prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A schema as part of another one, and what belongs into that one's `$defs`.

    Args:
        schema: a whole one.
        prefix: that the names of its definitions begin with.

    Raises:
        DanglingReferenceError: one of its references leads nowhere.
    """
    targets = dict.fromkeys(_references(schema))
    if not targets:
        return schema, {}
    names = {_path(reference): f"{prefix}_{number}" for number, reference in enumerate(targets)}
    definitions: dict[str, Any] = {}
    moved = _moved(schema, (), names, definitions)
    for reference in targets:
        if names[_path(reference)] not in definitions:
            raise DanglingReferenceError(reference)
    return moved, definitions


def _is_local(name: str, value: Any) -> bool:
    return name == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/"))


def _path(reference: str) -> _Path:
    tokens = unquote(reference[1:]).split("/")[1:]
    return tuple(token.replace("~1", "/").replace("~0", "~") for token in tokens)


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        yield from (value for name, value in schema.items() if _is_local(name, value))
    for _, part in _parts(schema):
        yield from _references(part)


def _parts(schema: Any) -> Iterator[tuple[_Path, Any]]:
    """Where the schemas within a schema are, and they themselves; data are none."""
    if isinstance(schema, list):
        yield from (((str(number),), part) for number, part in enumerate(schema))
    elif isinstance(schema, dict):
        for name, value in schema.items():
            if name in _SCHEMAS_BY_NAME and isinstance(value, dict):
                yield from (((name, key), part) for key, part in value.items())
            elif name not in _DATA:
                yield (name,), value


def _moved(schema: Any, path: _Path, names: dict[_Path, str], definitions: dict[str, Any]) -> Any:
    if isinstance(schema, dict):
        parts = {place: _moved(part, path + place, names, definitions) for place, part in _parts(schema)}
        new: Any = {}
        for name, value in schema.items():
            if _is_local(name, value):
                new[name] = f"#/$defs/{names[_path(value)]}"
            elif name in _SCHEMAS_BY_NAME and isinstance(value, dict):
                if name not in _DEFINITIONS:  # those that are referred to have moved
                    new[name] = {key: parts[name, key] for key in value}
            else:
                new[name] = parts.get((name,), value)
    elif isinstance(schema, list):
        new = [_moved(part, path + place, names, definitions) for place, part in _parts(schema)]
    else:
        new = schema
    if path not in names or not isinstance(schema, dict | bool):
        return new
    definitions[names[path]] = new
    return {"$ref": f"#/$defs/{names[path]}"}
