"""StructuredOutputsParams: the format of a request's text, with the checks that do not need the compiler.

It knows neither tokens nor the library that compiles grammars. What only the compiler can check (syntax, size of the
result) becomes an error of the request later, in `structured_output`.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import msgspec

from quire_engine.errors import RequestError, json_type, quote

MAX_CHOICES = 4096
MAX_STRUCTURED_OUTPUTS_BYTES = 256 * 1024
"""Bytes of the schema, expression or grammar as JSON: far more than a model can follow."""
MAX_SUBSCHEMAS = 10_000
"""Subschemas of a JSON schema, itself included."""
MAX_SCHEMA_DEPTH = 64
"""Levels of nested subschemas."""
MAX_PATH_CHARACTERS = 200
"""Length of a path into a schema, in a message."""

_JSON_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
"""msgspec's names of JSON's types."""
_MSGSPEC_TYPE = re.compile(rf"\b({'|'.join(_JSON_TYPES)})\b(?=[^`]*`)")
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class StructuredOutputsParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """vLLM's shape: exactly one of the first six fields is set.

    Raises:
        RequestError: none or several are set, one is too large, or a schema cannot be enforced.
    """

    json: dict[str, Any] | str | None = None
    """A JSON schema, as an object or as text."""
    regex: str | None = None
    choice: list[str] | None = None
    """Exactly one of these strings."""
    grammar: str | None = None
    """EBNF (with `::=`), or else Lark."""
    json_object: bool | None = None
    """Any JSON value that is an object."""
    structural_tag: dict[str, Any] | str | None = None
    """Free text with tagged parts that follow schemas (tool calls), as an object or as text."""
    disable_any_whitespace: bool = False
    """JSON in one line, with one space after each comma and colon."""
    disable_fallback: bool = False
    """No effect: there is one backend."""
    disable_additional_properties: bool = False
    """No effect: properties that a schema does not name appear only if it says so, or names none."""

    def __post_init__(self) -> None:
        """Check the shape; each error says what is allowed."""
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            _reject(f"given with {' and '.join(given) or 'nothing'}", f"exactly one of {', '.join(_KINDS)}")
        if self.choice is not None:
            if not 0 < len(self.choice) <= MAX_CHOICES:
                _reject(f"a choice of {len(self.choice)} strings", f"a choice of 1 to {MAX_CHOICES} strings")
            if not all(self.choice):
                _reject("a choice with an empty string", "a choice of strings that are not empty")
        if self.regex == "" or self.grammar == "":
            _reject(f"an empty {given[0]}", f"a {given[0]}")
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError as error:
            _reject(f"a {given[0]} with {error.object[error.start]!r}", "text that UTF-8 can encode")
        if size > MAX_STRUCTURED_OUTPUTS_BYTES:
            _reject(f"a {given[0]} of {size} bytes", f"at most {MAX_STRUCTURED_OUTPUTS_BYTES} bytes")
        if self.json is not None:
            _check_json_schema(_decode_json("json", self.text))
        elif self.structural_tag is not None:
            tag = _decode_json("structural_tag", self.text)
            if not isinstance(tag, dict):
                _reject("a structural_tag that is no JSON object", "a JSON object")
            for part in schemas_of_tag(tag):
                _check_json_schema(part.get("json_schema", part.get("schema")))

    @classmethod
    def from_value(cls, value: Any) -> "StructuredOutputsParams":
        """From a client's value: an object, or the JSON text of one.

        Raises:
            RequestError: it is neither, a key is unknown or has the wrong type, or the class rejects it.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            value = _decode_json("structured_outputs", value)
        if not isinstance(value, Mapping):
            _reject(json_type(value), "a JSON object")
        known = [field.name for field in msgspec.structs.fields(cls)]
        unknown = next((name for name in value if name not in known), None)
        if unknown is not None:
            _reject(f"given with the unknown field {quote(unknown)}", f"an object of {', '.join(known)}")
        try:
            return msgspec.convert(dict(value), cls)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, RequestError):
                raise error.__cause__ from None
            reason = _MSGSPEC_TYPE.sub(lambda match: _JSON_TYPES[match[0]], str(error)).replace("`", "")
            raise RequestError.because("structured_outputs", str(reason)) from None

    @property
    def kind(self) -> str:
        """The name of the field that is set."""
        return next(name for name in _KINDS if getattr(self, name) not in (None, False))

    @property
    def text(self) -> str:
        """That field as one string; objects and lists as JSON, in their order, which is the output's."""
        value = getattr(self, self.kind)
        if isinstance(value, str):
            return value
        try:
            return msgspec.json.encode(value).decode()
        except (RecursionError, TypeError, ValueError) as error:
            raise RequestError.because("structured_outputs", f"{self.kind} is no JSON: {error}") from None


def _reject(what: str, allowed: str) -> NoReturn:
    raise RequestError.of("structured_outputs", f"is {what}; it must be {allowed}")


def _decode_json(name: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except RecursionError:
        raise RequestError.because("structured_outputs", f"{name} nests too deeply") from None
    except ValueError as error:
        raise RequestError.because("structured_outputs", f"{name} is no JSON: {error}") from None


def schemas_of_tag(tag: Any) -> list[dict[str, Any]]:
    """The parts of a structural tag with a JSON schema, `json_schema`, or `schema` in an older tag."""
    found, stack = [], [tag]
    while stack:
        part = stack.pop()
        if isinstance(part, list):
            stack += part
        elif isinstance(part, dict):
            if part.get("type") in ("json_schema", "qwen_xml_parameter") or "schema" in part:
                found.append(part)
            else:
                stack += part.values()
    return found


# -- JSON schema -------------------------------------------------------------------------------------------------------

_PERCENT = re.compile(rb"%([0-9a-fA-F]{2})")
"""A byte of a reference, which is a URI's fragment."""
_INDEX = re.compile("[0-9]{1,9}")
_Place = tuple[Any, str]
"""The place of a subschema: that of its parent (None for the root), and its name there."""
_UNSUPPORTED = (
    "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "contains",
    "minContains", "maxContains", "uniqueItems", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
"""Keywords that no grammar of a useful size can enforce."""
_COMBINATORS = ("anyOf", "oneOf", "allOf", "$ref", "enum", "const")
_ASSERTIONS = frozenset((
    "properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties", "items",
    "prefixItems", "minItems", "maxItems", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    "minLength", "maxLength", "pattern", "format", "enum", "const", "additionalItems", "propertyNames",
    "unevaluatedItems", "unevaluatedProperties",
))  # fmt: skip
_BESIDE_VALUES = frozenset(("enum", "const", "format"))
"""Assertions that may stand beside `enum` or `const`. Strictly, `format` is none."""


def _is_count(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 1 << 31 and value == int(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf


_SHAPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("properties", "patternProperties"), (lambda value: isinstance(value, dict), "an object")),
    **dict.fromkeys(("enum", "prefixItems"), (lambda value: isinstance(value, list), "a list")),
    **dict.fromkeys(
        ("anyOf", "oneOf", "allOf"), (lambda value: isinstance(value, list) and bool(value), "a list of schemas")
    ),
    "required": (
        lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value), "a list of strings"
    ),
    **dict.fromkeys(("pattern", "$ref"), (lambda value: isinstance(value, str), "a string")),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        (_is_count, "an integer of at least 0"),
    ),
    **dict.fromkeys(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), (_is_number, "a number")
    ),
}  # fmt: skip
"""What the value of a keyword must be."""


def _check_json_schema(schema: Any) -> None:
    """Reject what is malformed or cannot be enforced, if one subschema shows it: the compiler rejects the rest."""
    if not isinstance(schema, dict | bool):
        _reject("a json schema that is no object", "an object, or the JSON text of one")
    stack: list[tuple[_Place | None, int, Any]] = [(None, 0, schema)]
    seen: set[int] = set()
    leads_somewhere: set[int] = set()
    while stack:
        place, depth, part = stack.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        if len(seen) > MAX_SUBSCHEMAS:
            _reject(f"a json schema of more than {MAX_SUBSCHEMAS} subschemas", f"at most {MAX_SUBSCHEMAS} of them")
        if depth > MAX_SCHEMA_DEPTH:
            _reject(f"a json schema of more than {MAX_SCHEMA_DEPTH} levels", f"at most {MAX_SCHEMA_DEPTH} levels deep")
        for name in _UNSUPPORTED:
            if name in part and part[name] is not None and not (name == "uniqueItems" and part[name] is False):
                raise _unsupported(place, repr(name))
        if place is not None and isinstance(part.get("$id"), str):
            raise _unsupported(place, "'$id' within it")
        for name, value in part.items():
            if name in _SHAPES and not _SHAPES[name][0](value):
                raise _malformed(place, name, _SHAPES[name][1])
        combinator = next((name for name in _COMBINATORS if name in part), None)
        if combinator is not None:
            allowed = _BESIDE_VALUES if combinator in _BESIDE_VALUES else {combinator}
            beside = sorted((_ASSERTIONS | set(_COMBINATORS)) & part.keys() - allowed)
            if beside:
                raise _unsupported(place, f"{beside[0]!r} beside {combinator!r}")
        if "allOf" in part and len(part["allOf"]) != 1:
            raise _unsupported(place, "'allOf' of several schemas")
        _check_reference(schema, part, leads_somewhere)
        stack += ((inside, depth + 1, value) for inside, value in _subschemas(place, part))
        if "$ref" in part:  # it may lead to where no keyword does
            stack.append((place and (place, "$ref"), 0, resolve_reference(schema, part["$ref"])))


def _check_reference(schema: Any, part: dict[str, Any], leads_somewhere: set[int]) -> None:
    """Reject references that lead only to each other: no text can match them. `leads_somewhere` has the ids of schemas
    that are known to be good; this function adds to them."""
    passed: list[str] = []
    seen: set[int] = set()
    while isinstance(part, dict) and id(part) not in leads_somewhere:
        if id(part) in seen:
            path = " → ".join(reference[:MAX_PATH_CHARACTERS] for reference in passed[-3:])
            _reject(f"a json schema with a cycle of '$ref' ({path})", "a schema in which each '$ref' leads to a type")
        seen.add(id(part))
        if isinstance(part.get("allOf"), list) and len(part["allOf"]) == 1:
            part = part["allOf"][0]
        elif isinstance(part.get("$ref"), str):
            passed.append(part["$ref"])
            part = resolve_reference(schema, part["$ref"])
        else:
            break
    leads_somewhere |= seen


def resolve_reference(schema: Any, reference: str) -> Any:
    """The target of a JSON pointer (RFC 6901) in the schema; None if there is none, which the compiler reports."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    encoded = reference.encode(errors="surrogatepass")
    decoded = _PERCENT.sub(lambda match: bytes.fromhex(match[1].decode()), encoded).decode(errors="replace")
    part = schema
    for name in decoded.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(part, dict):
            part = part.get(name)
        elif isinstance(part, list) and _INDEX.fullmatch(name) and int(name) < len(part):
            part = part[int(name)]
        else:
            return None
    return part


def _unsupported(place: _Place | None, what: str) -> RequestError:
    return RequestError.because(
        "structured_outputs", f"the json schema uses {what} at {_path(place)}, which cannot be enforced"
    )


def _malformed(place: _Place | None, name: str, allowed: str) -> RequestError:
    return RequestError.because(
        "structured_outputs", f"{name!r} of the json schema, at {_path(place)}, must be {allowed}"
    )


def _path(place: _Place | None) -> str:
    names = []
    while place is not None:
        place, name = place
        names.append(name[:MAX_PATH_CHARACTERS])
    path = "/".join(["#", *reversed(names)])
    if len(path) > MAX_PATH_CHARACTERS:
        path = path[:MAX_PATH_CHARACTERS] + "…"
    return path


def _subschemas(place: _Place | None, part: dict[str, Any]) -> Iterator[tuple[_Place, Any]]:
    for name in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(part.get(name), dict):
            inside = place, name
            yield from (((inside, key), value) for key, value in part[name].items())
    for name in ("anyOf", "oneOf", "allOf", "prefixItems", "items"):
        if isinstance(part.get(name), list):
            inside = place, name
            yield from (((inside, str(i)), value) for i, value in enumerate(part[name]))
    for name in ("items", "additionalItems", "additionalProperties", "propertyNames", "unevaluatedProperties",
                 "unevaluatedItems"):  # fmt: skip
        yield (place, name), part.get(name)
