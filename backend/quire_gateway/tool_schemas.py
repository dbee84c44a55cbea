"""JSON schemas of functions as parts of one schema: what a `$ref` refers to moves to the root's `$defs`.

A reference is a JSON pointer from the root (RFC 6901), which no longer holds where the schema is part of another one.
Every target gets a plain name of its own, as the grammar compiler knows neither escapes nor lists in pointers::

    {"properties": {"at": {"$ref": "#/$defs/a~1b"}}, "$defs": {"a/b": {"type": "string"}}}
    → {"properties": {"at": {"$ref": "#/$defs/0_0"}}}      and      "0_0": {"type": "string"}
"""

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from quire_gateway.fields import MAX_DEPTH

_DATA = ("enum", "const", "default", "examples")
_DEFINITIONS = ("$defs", "definitions")
_SCHEMAS_BY_NAME = (*_DEFINITIONS, "properties", "patternProperties", "dependentSchemas")
"""Keys whose values are objects with any names, each of which is a schema."""


class DanglingReferenceError(ValueError):
    """A `$ref` refers to no schema; the message is the reference."""


@dataclass(slots=True)
class _Place:
    """A place in a schema that references lead to, or through."""

    name: str | None = None
    """In the `$defs`, if a reference leads here."""
    parts: dict[str, "_Place"] = field(default_factory=dict)


def hoist(schema: dict[str, Any], prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A schema as part of another one, and what belongs into that one's `$defs`.

    Args:
        schema: a whole one.
        prefix: that the names of its definitions begin with.

    Raises:
        DanglingReferenceError: one of its references leads nowhere.
    """
    names: dict[str, str] = {}
    _find_references(schema, names)
    if not names:
        return schema, {}
    root = _Place()
    for number, reference in enumerate(names):
        place = root
        for token in unquote(reference[1:]).split("/", MAX_DEPTH)[1:]:  # nothing nests deeper
            place = place.parts.setdefault(token.replace("~1", "/").replace("~0", "~"), _Place())
        place.name = place.name or f"{prefix}_{number}"
        names[reference] = place.name
    definitions: dict[str, Any] = {}
    moved = _moved(schema, root, names, definitions)
    for reference, name in names.items():
        if name not in definitions:
            raise DanglingReferenceError(reference)
    return moved, definitions


def _find_references(schema: Any, found: dict[str, str]) -> None:
    if isinstance(schema, list):
        for part in schema:
            _find_references(part, found)
    elif isinstance(schema, dict):
        for name, value in schema.items():
            if name == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
                found[value] = ""
            elif name in _SCHEMAS_BY_NAME and isinstance(value, dict):
                for part in value.values():
                    _find_references(part, found)
            elif name not in _DATA and isinstance(value, dict | list):
                _find_references(value, found)


def _moved(schema: Any, place: _Place | None, names: dict[str, str], definitions: dict[str, Any]) -> Any:
    parts = place.parts if place else {}
    new: Any = schema
    if isinstance(schema, list):
        new = [_moved(part, parts.get(str(i)), names, definitions) for i, part in enumerate(schema)]
    elif isinstance(schema, dict):
        new = {}
        for name, value in schema.items():
            if name == "$ref" and isinstance(value, str):
                new[name] = f"#/$defs/{names[value]}" if value in names else value
            elif name in _SCHEMAS_BY_NAME and isinstance(value, dict):
                within = parts[name].parts if name in parts else {}
                moved = {key: _moved(part, within.get(key), names, definitions) for key, part in value.items()}
                if name not in _DEFINITIONS:  # those that are referred to have moved
                    new[name] = moved
            else:
                new[name] = value if name in _DATA else _moved(value, parts.get(name), names, definitions)
    if place is None or place.name is None or not isinstance(schema, dict | bool):
        return new
    definitions[place.name] = new
    return {"$ref": f"#/$defs/{place.name}"}
