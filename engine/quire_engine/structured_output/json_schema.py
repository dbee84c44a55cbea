"""JSON schemas as grammars: draft 2020-12 → xgrammar's EBNF, exactly, or an error that names what cannot be.

xgrammar has a converter of its own, which silently ignores or narrows much of a schema. With this one all texts are
valid, and every valid text is possible that is written as follows:

* Properties are in the schema's order; those that only `required` names are behind them, and others last.
* Properties that the schema does not name are possible only where `additionalProperties` or `unevaluatedProperties`
  says so, or where it has no `properties` at all; items behind those of `prefixItems` only where `items` says so.
* Without `type`, a schema with assertions only for objects, or only for arrays, is one of that type.
* Numbers with bounds have no exponent, and at most `MAX_DIGITS` digits.
* Strings with a `pattern`, and names of properties, are escaped as `json.dumps` does without `ensure_ascii`.
* White space is as `json.dumps` writes it, with or without `indent`.

`structured_outputs_params` has checked the schema before: its keywords, its depth, its references' cycles.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from functools import partial
from typing import Any

from quire_engine.scheduler.grammar import GrammarError
from quire_engine.structured_output.number_range import Bound, number_range
from quire_engine.structured_output.pattern import (
    Pattern,
    PatternError,
    any_of,
    characters_except,
    json_literal,
    literal,
)
from quire_engine.structured_outputs_params import resolve_reference

MAX_INDENTATION = 32
"""Spaces at the beginning of a line: eight levels of four; or eight tabs."""
MAX_DISJOINT_DEPTH = 4
"""Depth of the properties in which schemas of a `oneOf` may differ."""
MAX_BOUND = 1e40
"""Limit of a number's bounds: an expression for it has a branch per digit."""
MAX_STATES = 5_000
"""Limit of one object: its properties times the possible numbers of properties before each."""
_COMBINATIONS = ("$ref", "allOf", "anyOf", "oneOf")
_NAMES = ("null", "boolean", "integer", "number", "string", "array", "object")
_ASSERTIONS = {
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": ("prefixItems", "items", "additionalItems", "unevaluatedItems", "minItems", "maxItems"),
    "object": (
        "properties", "required", "additionalProperties", "unevaluatedProperties", "patternProperties",
        "propertyNames", "minProperties", "maxProperties",
    ),
}  # fmt: skip
_HEX = "[0-9a-fA-F]"
_RAW = r"[\x20-\x21\x23-\x5b\x5d-\ud7ff\ue000-\U0010ffff]"
"""Without halves of surrogate pairs, which a class with `^` would let through."""
_RULES = f"""
string ::= "\\"" string_rest
string_rest ::= ("\\"" | {_RAW} string_rest | "\\\\" escape string_rest) (=([ \\n\\t]* [,}}\\]:]))
character ::= {_RAW} | "\\\\" escape
escape ::= ["\\\\/bfnrt] | "u" ([0-9a-cA-CefEF] {_HEX}{{3}} | [dD] [0-7] {_HEX}{{2}} | surrogates)
surrogates ::= [dD] [89abAB] {_HEX}{{2}} "\\\\u" [dD] [c-fC-F] {_HEX}{{2}}
integer ::= "-"? ("0" | [1-9] [0-9]*)
number ::= integer ("." [0-9]+)? ([eE] [+\\-]? [0-9]+)?
boolean ::= "true" | "false"
null ::= "null"
"""
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_GROUP = "[0-9a-fA-F]{1,4}"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_URI = "([a-zA-Z0-9._~!$&'()*+,;=:@/?-]|%[0-9a-fA-F]{2})"
_DATE = (
    "([1-9][0-9]{3}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))|(19|2[0-9])(0[48]|[2468][048]|[13579][26])-02-29|2[048]00-02-29)"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
FORMAT_PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": (
        "P(([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)(T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?"
        "|[0-9]+S))?|T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)|[0-9]+W)"
    ),
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"{_OCTET}(\.{_OCTET}){{3}}",
    "ipv6": f"({_GROUP}:){{7}}{_GROUP}|"
    + "|".join(f"({_GROUP}(:{_GROUP}){{0,{n}}})?::({_GROUP}(:{_GROUP}){{0,{5 - n}}})?" for n in range(6)),
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "email": rf"[a-zA-Z0-9_+-]+(\.[a-zA-Z0-9_+-]+)*@{_LABEL}(\.{_LABEL})+",
    "uri": f"[a-zA-Z][a-zA-Z0-9+.-]*:{_URI}+(#{_URI}*)?",
}
"""`format` is an annotation, but these are enforced where neither a pattern nor a length is."""


def to_ebnf(schema: Any, *, any_whitespace: bool = True) -> str:
    """The grammar of the texts that a schema allows.

    Args:
        schema: the decoded JSON.
        any_whitespace: white space as described above; else one line, with one space after each comma and colon.

    Raises:
        GrammarError: it is malformed, allows no value, or cannot be enforced.
    """
    return _Converter(schema, any_whitespace).convert()


def _is_of(value: Any, name: str) -> bool:
    if isinstance(value, bool) or value is None:
        return name == ("null" if value is None else "boolean")
    if isinstance(value, int | float):
        return name == "number" or (name == "integer" and (isinstance(value, int) or value.is_integer()))
    return name == ("string" if isinstance(value, str) else "array" if isinstance(value, list) else "object")


def _same(left: Any, right: Any) -> bool:
    """Whether two values are equal in JSON, where `true` is not 1."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(value, right[name]) for name, value in left.items())
    return bool(left == right)


def _repeated(expression: str, least: int, most: int | None) -> str:
    return f"({expression}){{{least},{'' if most is None else most}}}"


def _counts(schema: Mapping[str, Any], least: str, most: str) -> tuple[int, int | None]:
    return int(schema.get(least, 0)), int(schema[most]) if most in schema else None


def _decimal(value: float) -> Decimal:
    if abs(value) >= MAX_BOUND:
        raise GrammarError(f"the json schema has a bound of a number that is too large; it must be below {MAX_BOUND:g}")
    return Decimal(repr(value)) + 0  # which makes -0 be 0


class _Converter:
    def __init__(self, schema: Any, any_whitespace: bool) -> None:
        self._schema = schema
        self._space = "space" if any_whitespace else '""'
        self._comma = '"," space' if any_whitespace else '", "'
        self._colon = '":" " "?' if any_whitespace else '": "'
        self._rules: dict[str, str] = {}
        """Name by expression, so that equal ones are written once."""
        self._references: dict[tuple[int, str | None], str] = {}
        """Name of a rule by the identity of its schema, and a property that it requires besides."""
        self._waiting: list[tuple[str, Any]] = []
        """The names and schemas that have no rule yet."""
        self._narrow: dict[tuple[int, tuple[str, ...]], Any] = {}
        """Copies of schemas with fewer types, by the schema's identity and the types."""
        self._possible: dict[int, set[str]] = {}
        self._kept: list[Any] = []
        """Keeps the schemas alive, whose identities are keys."""
        self._lines: list[str] = []

    def convert(self) -> str:
        if self._space == "space":
            # One tree of literals, and what follows them: then few tokens have to be tried at run time. With a
            # repetition the compiled grammar would be ten times as large.
            lines = [" " * count for count in range(MAX_INDENTATION + 1)]
            lines += ["\t" * count for count in range(1, MAX_INDENTATION // 4 + 1)]
            ends = " | ".join(f'"\\n{line}"' for line in lines)
            self._lines.append(f'space ::= ("" | " " | {ends}) (=["{{}}\\[\\]\\-0-9tfn])')
        item = f"string {self._colon} value"
        self._lines += [
            f'object ::= "{{" {self._space} ({item} ({self._comma} {item})* {self._space})? "}}"',
            f'array ::= "[" {self._space} (value ({self._comma} value)* {self._space})? "]"',
            "value ::= object | array | string | number | boolean | null",
        ]
        self._lines.append(f"root ::= {self._target(self._schema)}")
        while self._waiting:
            name, schema = self._waiting.pop()
            self._lines.append(f"{name} ::= {self._target(schema)}")
        return "\n".join(self._lines) + _RULES

    def _target(self, schema: Any) -> str:
        expression = self._expression(schema)
        if expression is None:
            raise GrammarError("the json schema, or what a '$ref' of it leads to, cannot accept any value")
        return expression

    def _name(self, expression: str) -> str:
        if expression not in self._rules:
            self._rules[expression] = name = f"r{len(self._rules)}"
            self._lines.append(f"{name} ::= {expression}")
        return self._rules[expression]

    # -- any schema ----------------------------------------------------------------------------------------------------

    def _expression(self, schema: Any) -> str | None:
        """The texts that a schema allows; None: there are none."""
        if isinstance(schema, bool):
            return "value" if schema else None
        if not isinstance(schema, dict):
            raise GrammarError("a subschema of the json schema is neither an object nor true or false")
        if "$ref" in schema or "allOf" in schema:
            return self._reference(self._inner(schema))
        for combination in ("anyOf", "oneOf"):
            if combination in schema:
                return self._alternatives(schema, combination)
        if "enum" in schema or "const" in schema:
            return any_of(self._constant(value) for value in self._values(schema))
        types = self._types(schema)
        if types == set(_NAMES) and not any(name in schema for names in _ASSERTIONS.values() for name in names):
            return "value"
        convert: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
            "integer": partial(self._number, name="integer"), "number": partial(self._number, name="number"),
            "string": self._string, "array": self._array, "object": self._object,
        }  # fmt: skip
        names = [name for name in _NAMES if name in types and not (name == "integer" and "number" in types)]
        return any_of(convert[name](schema) if name in convert else name for name in names)

    def _types(self, schema: Mapping[str, Any]) -> set[str]:
        """The types that `type` allows; without `type`, those of the assertions."""
        if "type" in schema:
            types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            unknown = next((name for name in types if name not in _NAMES), None)
            if unknown is not None or not types:
                raise GrammarError(
                    f"the json schema has the type {str(unknown)[:100]!r}; types are {', '.join(_NAMES)}"
                )
            return {*types, "integer"} if "number" in types else set(types)
        described = [kind for kind, names in _ASSERTIONS.items() if any(name in schema for name in names)]
        return set(described if described in (["array"], ["object"]) else _NAMES)

    def _values(self, schema: Mapping[str, Any]) -> list[Any]:
        values = schema.get("enum", [schema.get("const")])
        if "const" in schema:
            values = [value for value in values if _same(value, schema["const"])]
        types = self._types(schema)
        return [value for value in values if any(_is_of(value, name) for name in types)]

    def _inner(self, schema: Mapping[str, Any]) -> Any:
        """The one schema of a `$ref` or `allOf`."""
        if "$ref" not in schema:
            return self._narrowed(schema["allOf"][0], schema)
        inner = resolve_reference(self._schema, schema["$ref"])
        if not isinstance(inner, dict | bool):
            raise GrammarError(
                f"the '$ref' {schema['$ref'][:100]!r} of the json schema leads to no schema: it must be '#' or "
                "begin with '#/', as other URIs are not read"
            )
        return self._narrowed(inner, schema)

    def _narrowed(self, inner: Any, outer: Mapping[str, Any]) -> Any:
        """A schema in a combination, restricted to the `type` beside that."""
        if "type" not in outer:
            return inner
        if isinstance(inner, bool):
            return {"type": outer["type"]} if inner else False
        allowed = self._types(outer)
        is_combination = any(name in inner for name in _COMBINATIONS)
        if "type" in inner or is_combination:
            if self._possible_types(inner) <= allowed:
                return inner
            if is_combination:
                raise GrammarError(
                    "the json schema has 'type' beside a combination of other types; give it within that"
                )
            types = self._types(inner) & allowed
        else:
            types = allowed
        key = id(inner), tuple(name for name in _NAMES if name in types)
        if key not in self._narrow:
            self._narrow[key] = {**inner, "type": list(key[1])} if types else False
        return self._narrow[key]

    def _reference(self, schema: Any, required: str | None = None) -> str | None:
        """A rule for a schema that can be reached in several ways, also from within itself."""
        if not isinstance(schema, dict):
            return self._expression(schema)
        key = id(schema), required
        if key not in self._references:
            self._references[key] = name = f"ref{len(self._references)}"
            if required is not None:
                schema = {**schema, "required": [*schema.get("required", []), required]}
            self._waiting.append((name, schema))
        return self._references[key]

    def _resolved(self, schema: Any) -> Any:
        while isinstance(schema, dict) and ("$ref" in schema or "allOf" in schema):
            schema = self._inner(schema)
        return schema

    def _possible_types(self, schema: Any) -> set[str]:
        """Types that a schema's values may have; perhaps some more."""
        schema = self._resolved(schema)
        if not isinstance(schema, dict):
            return set(_NAMES) if schema else set()
        if id(schema) not in self._possible:
            self._possible[id(schema)] = set(_NAMES)  # if it refers to itself
            combination = next((name for name in ("anyOf", "oneOf") if name in schema), None)
            if combination is not None:
                parts = [self._narrowed(part, schema) for part in schema[combination]]
                types = set[str]().union(*map(self._possible_types, parts))
            elif "enum" in schema or "const" in schema:
                types = {name for name in _NAMES if any(_is_of(value, name) for value in self._values(schema))}
            else:
                types = self._types(schema)
            self._possible[id(schema)] = types
            self._kept.append(schema)
        return self._possible[id(schema)]

    def _alternatives(self, schema: Mapping[str, Any], combination: str) -> str | None:
        parts = [self._narrowed(part, schema) for part in schema[combination]]
        if combination == "anyOf":
            return any_of(self._expression(part) for part in parts)
        parts = [self._resolved(part) for part in parts]
        discriminator = schema.get("discriminator")
        name = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
        name = name if isinstance(name, str) else None
        for i, part in enumerate(parts):
            if not all(self._are_disjoint(part, other, name) for other in parts[:i]):
                raise GrammarError(
                    "the json schema has 'oneOf' of schemas that could match the same value, which cannot be enforced; "
                    "use 'anyOf', or require a property in each whose 'const' differs"
                )
        return any_of(
            self._reference(part, name if isinstance(part, dict) and not part.keys() & set(_COMBINATIONS) else None)
            for part in parts
        )

    def _are_disjoint(self, left: Any, right: Any, required: str | None = None, depth: int = 0) -> bool:
        """Whether it is certain that no value matches both schemas. `required` is a property that objects of both have
        besides those that they require."""
        left, right = self._resolved(left), self._resolved(right)
        if left is False or right is False:
            return True
        if depth > MAX_DISJOINT_DEPTH or not isinstance(left, dict) or not isinstance(right, dict):
            return False
        for one, other in ((left, right), (right, left)):
            for name in ("anyOf", "oneOf"):
                if name in one:
                    parts = [self._narrowed(part, one) for part in one[name]]
                    return all(self._are_disjoint(part, other, depth=depth + 1) for part in parts)
        are_values = ["enum" in schema or "const" in schema for schema in (left, right)]
        if all(are_values):
            values = self._values(right)
            return not any(_same(value, other) for value in self._values(left) for other in values)
        # Without `type`, assertions do not restrict values of other types.
        types = [self._possible_types(schema) if {"type", "enum", "const"} & schema.keys() else set(_NAMES)
                 for schema in (left, right)]  # fmt: skip
        if types[0] & types[1] != {"object"} or any(are_values):
            return not types[0] & types[1]
        for one, other in ((left, right), (right, left)):
            is_closed = other.get("additionalProperties") is False and "patternProperties" not in other
            for name in {*one.get("required", []), *([] if required is None else [required])}:
                mine, others = (schema.get("properties", {}).get(name) for schema in (one, other))
                if others is None:
                    if is_closed:
                        return True
                elif mine is not None and self._are_disjoint(mine, others, depth=depth + 1):
                    return True
        return False

    def _constant(self, value: Any) -> str:
        if isinstance(value, dict):
            items = [
                f'"\\"" {json_literal(name)} "\\"" {self._colon} {self._constant(item)}' for name, item in value.items()
            ]
            return f'"{{" {self._space} {self._joined(items)} {self._space} "}}"' if items else '"{}"'
        if isinstance(value, list):
            items = [self._constant(item) for item in value]
            return f'"[" {self._space} {self._joined(items)} {self._space} "]"' if items else '"[]"'
        if isinstance(value, str):
            return f'"\\"" {json_literal(value)} "\\""'
        return literal(json.dumps(value))

    def _joined(self, items: list[str]) -> str:
        return f" {self._comma} ".join(items)

    # -- numbers and strings -------------------------------------------------------------------------------------------

    def _number(self, schema: Mapping[str, Any], name: str) -> str | None:
        if "multipleOf" in schema and (name, schema["multipleOf"]) != ("integer", 1):
            raise GrammarError("the json schema uses 'multipleOf', which cannot be enforced")
        # When bounds are equal, the one that excludes the number is stricter.
        lows: list[Bound] = [
            (_decimal(schema[key]), key != "minimum") for key in ("minimum", "exclusiveMinimum") if key in schema
        ]
        highs: list[Bound] = [
            (_decimal(schema[key]), key != "maximum") for key in ("maximum", "exclusiveMaximum") if key in schema
        ]
        if not lows and not highs:
            return name
        lowest = max(lows, default=None)
        highest = min(highs, key=lambda bound: (bound[0], not bound[1]), default=None)
        expression = number_range(lowest, highest, is_integer=name == "integer")
        return expression and self._name(expression)

    def _string(self, schema: Mapping[str, Any]) -> str | None:
        least, most = _counts(schema, "minLength", "maxLength")
        if most is not None and least > most:
            return None
        text = schema.get("pattern")
        has_length = least > 0 or most is not None
        if (
            text is None
            and not has_length
            and isinstance(schema.get("format"), str)
            and schema["format"] in FORMAT_PATTERNS
        ):
            text = f"^(?:{FORMAT_PATTERNS[schema['format']]})$"
        if text is None:
            return self._name(f'"\\"" {_repeated("character", least, most)} "\\""') if has_length else "string"
        pattern = self._pattern(text)
        expression: str | None = pattern.expression
        if has_length:
            if pattern.repeated is None:
                raise GrammarError(
                    "the json schema has 'minLength' or 'maxLength' beside a 'pattern' other than '^[…]*$', which "
                    "cannot be enforced; give the length in the pattern"
                )
            character, low, high = pattern.repeated
            least = max(least, low)
            most = min((bound for bound in (most, high) if bound is not None), default=None)
            expression = _repeated(character, least, most) if most is None or least <= most else None
        return expression and self._name(f'"\\"" {expression} "\\""')

    def _pattern(self, text: str) -> Pattern:
        try:
            return Pattern(text, self._name)
        except PatternError as error:
            raise GrammarError(f"the json schema has the pattern {text[:100]!r}, which has {error}") from None

    # -- arrays and objects --------------------------------------------------------------------------------------------

    def _array(self, schema: Mapping[str, Any]) -> str | None:
        least, most = _counts(schema, "minItems", "maxItems")
        rest: Any = schema.get("items")
        if isinstance(rest, list):  # in older drafts
            prefix, rest = rest, schema.get("additionalItems")
        else:
            prefix = schema.get("prefixItems", [])
        if rest is None:
            rest = schema.get("unevaluatedItems", not prefix or least > len(prefix))
        expressions = [self._expression(part) for part in prefix]
        limit = next((i for i, expression in enumerate(expressions) if expression is None), None)
        item = self._expression(rest) if limit is None else None
        if limit is not None or item is None:
            limit = len(prefix) if limit is None else limit
            most = limit if most is None else min(most, limit)
        if most is not None and least > most:
            return None
        return self._name(f'"[" {self._space} {self._items(expressions[:most], item, least, most)} "]"')

    def _items(self, expressions: list[Any], item: str | None, least: int, most: int | None) -> str:
        """The items, and white space behind the last."""
        count = len(expressions)
        tail = self._space if count else '""'
        if item is not None and most != count:
            left, need = None if most is None else most - count, max(least - count, 0)
            more = f"{self._comma} {item}"
            if count:
                tail = f"{_repeated(more, need, left)} {self._space}"
            else:
                others = _repeated(more, max(need - 1, 0), None if left is None else left - 1)
                tail = f"{item} {others} {self._space}" if need else f"({item} {others} {self._space})?"
        for i in range(count - 1, -1, -1):
            separator = f"{self._comma} " if i else ""
            end = "" if i >= least else None
            if end is not None:
                end = self._space if i else '""'
            tail = self._name(any_of([end, f"{separator}{expressions[i]} {tail}"]) or "")
        return tail

    def _object(self, schema: Mapping[str, Any]) -> str | None:
        properties: dict[str, Any] = dict(schema.get("properties", {}))
        required = dict.fromkeys(schema.get("required", []))
        others: Any = schema.get("additionalProperties", schema.get("unevaluatedProperties"))
        undeclared = True if others is None else others
        """What JSON Schema allows; `others` is what this grammar allows."""
        if others is None:
            others = "properties" not in schema
        key = "string"
        if schema.get("patternProperties"):
            key, others, undeclared = self._pattern_properties(schema, undeclared)
        elif "propertyNames" in schema:
            names = self._resolved(schema["propertyNames"])
            possible = self._possible_names(names)
            if possible is not None:
                properties = {name: properties.get(name, others) for name in possible}
                if required.keys() - properties.keys():
                    return None
                others = False
            elif isinstance(names, dict) and any(name in names for name in ("minLength", "maxLength", "pattern")):
                if properties or required:
                    raise GrammarError(
                        "the json schema has 'propertyNames' beside 'properties' or 'required', which cannot be "
                        "enforced"
                    )
                key = self._string({name: value for name, value in names.items() if name != "format"}) or ""
                others = others if key else False
        for name in required:
            properties.setdefault(name, undeclared)
        other = self._expression(others)
        if other is not None and key == "string" and properties:
            key = self._name(f'"\\"" {self._other_names(properties)} "\\""')
        other = other and f"{key} {self._colon} {other}"
        items = []
        for name, part in properties.items():
            expression = self._expression(part)
            if expression is None and name in required:
                return None
            if expression is not None:
                item = f'"\\"" {json_literal(name)} "\\"" {self._colon} {expression}'
                items.append((self._name(item), name in required))
        body = self._properties(items, other, *_counts(schema, "minProperties", "maxProperties"))
        return body and self._name(f'"{{" {self._space} {body} "}}"')

    def _pattern_properties(self, schema: Mapping[str, Any], undeclared: Any) -> tuple[str, Any, Any]:
        """From `patternProperties`: the key, the value, and the value of properties with other keys."""
        beside = [name for name in ("required", "minProperties", "propertyNames") if schema.get(name)]
        beside += ["propertyNames"] * (schema.get("propertyNames") is False)
        for name in ("additionalProperties", "unevaluatedProperties"):
            beside += [name] * (schema.get(name) not in (None, False))
        if beside or len(schema["patternProperties"]) > 1:
            what = f"{beside[0]!r} beside 'patternProperties'" if beside else "several 'patternProperties'"
            raise GrammarError(f"the json schema has {what}, which cannot be enforced")
        ((pattern, value),) = schema["patternProperties"].items()
        key = self._name(f'"\\"" {self._pattern(pattern).expression} "\\""')
        try:
            matched = next((name for name in schema.get("properties", {}) if re.search(pattern, name)), None)
        except re.error as error:
            raise GrammarError(f"the json schema has the pattern {pattern[:100]!r}, which has {error}") from None
        if matched is not None:
            raise GrammarError(
                f"the json schema has the property {matched[:100]!r}, which its 'patternProperties' match, too, and "
                "both cannot be enforced"
            )
        return key, value, undeclared

    def _possible_names(self, names: Any) -> list[str] | None:
        """The names that `propertyNames` allows, if it lists them."""
        if not isinstance(names, dict):
            return None if names else []
        if names.keys() & {"anyOf", "oneOf"}:
            raise GrammarError("the json schema has a combination in 'propertyNames', which cannot be enforced")
        if "enum" in names or "const" in names:
            return [name for name in self._values(names) if isinstance(name, str)]
        return [] if "type" in names and "string" not in self._types(names) else None

    def _other_names(self, names: Iterable[str]) -> str:
        tree: dict[str, Any] = {}
        for name in names:
            node = tree
            for character in name:
                node = node.setdefault(character, {})
            node[""] = None
        rest = self._name(characters_except("")) + "*"

        def outside(node: Mapping[str, Any]) -> str:
            """What may follow a prefix in the tree, so that the whole name is not in it."""
            follow = [character for character in node if character]
            expressions = [f"{self._name(characters_except(follow))} {rest}"]
            expressions += [f"{json_literal(character)} {outside(node[character])}" for character in follow]
            return self._name(any_of(expressions if "" in node else ['""', *expressions]) or "")

        return outside(tree)

    def _properties(
        self, items: list[tuple[str, bool]], open_item: str | None, least: int, most: int | None
    ) -> str | None:
        """The properties, and white space behind the last. `items` are properties with a name, and whether they are
        required; `open_item` is any other property. There are from `least` to `most` in all."""
        num_required = sum(is_required for _, is_required in items)
        if most is not None and (most < num_required or least > most):
            return None
        if open_item is not None and least > num_required + 1:
            # Two others may have one name, which makes them one property.
            raise GrammarError(
                "the json schema has 'minProperties' where properties have any name, which cannot be enforced"
            )
        if open_item is None and most is not None and most >= len(items):
            most = None
        cap = most if most is not None else max(least, 1)
        if len(items) * cap > MAX_STATES:
            name = "minProperties" if most is None else "maxProperties"
            raise GrammarError(
                f"the json schema has {name!r} of {cap} beside {len(items)} properties, which is too complex"
            )
        states = [self._last_properties(open_item, count, max(least - count, 0), None if most is None else most - count)
                  for count in range(cap + 1)]  # fmt: skip
        for item, is_required in reversed(items):
            before = []
            for count, skipped in enumerate(states):
                after = states[min(count + 1, cap)] if most is None or count < most else None
                taken = after and f"{f'{self._comma} ' if count else ''}{item} {after}"
                state = any_of([taken, None if is_required else skipped])
                before.append(state and self._name(state))
            states = before
        return states[0]

    def _last_properties(self, open_item: str | None, count: int, need: int, left: int | None) -> str | None:
        end = self._space if count else '""'
        if open_item is None or left == 0:
            return None if need else end
        if need > 1:
            return None
        more = f"{self._comma} {open_item}"
        if count:
            return f"{_repeated(more, need, left)} {self._space}"
        others = f"{open_item} {_repeated(more, 0, None if left is None else left - 1)} {self._space}"
        return others if need else f"({others})?"
