"""Random JSON schemas of all keywords, values for them, and texts that a grammar allows."""

import json
import random
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from quire_engine.structured_output.json_schema import FORMAT_PATTERNS, to_ebnf
from quire_engine.structured_output.xgrammar import xgrammar
from quire_engine.structured_outputs_params import StructuredOutputsParams

__all__ = ["SchemaGrammar", "as_generated", "random_schema", "random_value"]

END = 256
NAMES = ["a", "ab", "b", "é", 'q"', ""]
PATTERNS = ["^[a-c]*$", "b", "^a", "[^a]$", "^(a|bc){1,2}$", r"^\d+\.\w$", "^.$", r'^["\\\t]+$', "a|^b$", r"\s"]
FORMATS = ["date", "time", "date-time", "duration", "uuid", "ipv4", "ipv6", "hostname", "email", "uri", "unknown"]


@cache
def _byte_tokens() -> xgrammar.TokenizerInfo:
    return xgrammar.TokenizerInfo(
        [bytes([i]) for i in range(256)] + [b"</s>"], xgrammar.VocabType.RAW, vocab_size=257, stop_token_ids=[END]
    )


class SchemaGrammar:
    """The compiled grammar of a schema, byte by byte.

    Raises:
        RequestError, GrammarError: the schema is rejected.
    """

    def __init__(self, schema: Any, *, any_whitespace: bool = True) -> None:
        StructuredOutputsParams(json=schema if isinstance(schema, dict) else json.dumps(schema))
        grammar = xgrammar.Grammar.from_ebnf(to_ebnf(schema, any_whitespace=any_whitespace))
        compiler = xgrammar.GrammarCompiler(_byte_tokens(), max_threads=1, cache_enabled=False)
        self._compiled = compiler.compile_grammar(grammar)

    def accepts(self, text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(self._compiled)
        return all(matcher.accept_token(byte) for byte in text.encode()) and matcher.accept_token(END)

    def random_text(self, rng: random.Random, max_bytes: int = 300) -> str | None:
        """A text that the grammar allows; None if it does not come to an end, or no text does."""
        matcher = xgrammar.GrammarMatcher(self._compiled)
        bitmask = np.zeros((1, 9), np.int32)
        text = bytearray()
        while len(text) < max_bytes:
            if not matcher.fill_next_token_bitmask(bitmask, 0):
                bitmask[0] = -1
            allowed = np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little")[:257])
            if not len(allowed):
                return None
            closing = [token for token in allowed if token in (END, *b'"]}')]
            frequent = [token for token in allowed if token in set(b'abc01."\\,:{[')]
            chosen = rng.choice(
                closing
                if closing and rng.random() < 0.3
                else frequent
                if frequent and rng.random() < 0.7
                else list(allowed)
            )
            if chosen == END:
                return text.decode()
            assert matcher.accept_token(int(chosen))
            text.append(chosen)
        return None


def random_schema(rng: random.Random, depth: int = 0, definitions: tuple[str, ...] = ()) -> Any:
    """Any schema; often one that is rejected."""
    if depth == 0:
        names = ("x", "y")[: rng.choice([0, 0, 1, 2])]
        schema = random_schema(rng, 1, names)
        if isinstance(schema, dict) and names:
            schema["$defs"] = {name: random_schema(rng, 2, names) for name in names}
        return schema
    if rng.random() < 0.05:
        return rng.random() < 0.7
    if definitions and rng.random() < 0.15:
        return {"$ref": f"#/$defs/{rng.choice(definitions)}"}

    def inner() -> Any:
        return (
            random_schema(rng, depth + 1, definitions)
            if depth < 4
            else rng.choice([True, {"type": "null"}, {"const": 1}])
        )

    def schemas(least: int = 1) -> list[Any]:
        return [inner() for _ in range(rng.randint(least, 3))]

    number = rng.choice(
        [lambda: rng.randint(-120, 120), lambda: round(rng.uniform(-20, 20), rng.randint(0, 3)), lambda: 0]
    )
    values = [None, True, 0, 1, -2.5, "a", "", 'é"\n', [1, {}], {"a": 1, "b": [2]}]
    keywords: dict[str, Any] = {
        "minimum": number, "maximum": number, "exclusiveMinimum": number, "exclusiveMaximum": number,
        "minLength": lambda: rng.randint(0, 3), "maxLength": lambda: rng.randint(0, 4),
        "pattern": lambda: rng.choice(PATTERNS), "format": lambda: rng.choice(FORMATS),
        "items": inner, "prefixItems": schemas, "unevaluatedItems": inner,
        "minItems": lambda: rng.randint(0, 3), "maxItems": lambda: rng.randint(0, 3),
        "properties": lambda: {name: inner() for name in rng.sample(NAMES, rng.randint(0, 4))},
        "required": lambda: rng.sample(NAMES, rng.randint(0, 2)),
        "additionalProperties": inner, "unevaluatedProperties": inner,
        "minProperties": lambda: rng.randint(0, 3), "maxProperties": lambda: rng.randint(0, 3),
        "patternProperties": lambda: {rng.choice(PATTERNS): inner()},
        "propertyNames": lambda: rng.choice(
            [{"enum": NAMES[:3]}, {"pattern": "^b"}, {"maxLength": 2}, {"type": "string"}, {"minimum": 1}, True, False]
        ),
    }  # fmt: skip
    groups = {
        "number": ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"],
        "string": ["minLength", "maxLength", "pattern", "format"],
        "array": ["items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"],
        "object": ["properties", "properties", "required", "additionalProperties", "minProperties", "maxProperties",
                   "patternProperties", "propertyNames", "unevaluatedProperties"],
    }  # fmt: skip
    kind = rng.choice(
        ["number", "integer", "string", "array", "object", "object", "object", "values", "anyOf", "oneOf", "mix"]
    )
    schema: dict[str, Any] = {}
    if kind in ("anyOf", "oneOf"):
        schema[kind] = schemas()
    elif kind == "values":
        name = rng.choice(["enum", "const"])
        schema[name] = rng.sample(values, rng.randint(1, 4)) if name == "enum" else rng.choice(values)
    elif kind == "mix":
        for name in rng.sample(sorted(keywords), rng.randint(0, 3)):
            schema[name] = keywords[name]()
    else:
        for name in rng.sample(groups["number" if kind == "integer" else kind], rng.randint(0, 3)):
            schema[name] = keywords[name]()
        if rng.random() < 0.85:
            schema["type"] = (
                kind if rng.random() < 0.8 else [kind, rng.choice(["null", "string", "integer", "boolean"])]
            )
    if rng.random() < 0.1:
        schema["type"] = rng.choice(["string", "number", "object", ["integer", "null"]])
    if rng.random() < 0.1:
        schema["description"] = "any"
    return schema


def as_generated(schema: Any) -> Any:
    """The schema of what is generated: nothing undeclared, and of the type that is described where none is named."""
    if not isinstance(schema, dict):
        return schema
    objects = {"properties", "required", "additionalProperties", "unevaluatedProperties", "patternProperties",
               "propertyNames", "minProperties", "maxProperties"} & schema.keys()  # fmt: skip
    arrays = {"prefixItems", "items", "unevaluatedItems", "minItems", "maxItems"} & schema.keys()
    others = {
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "minLength",
        "maxLength",
        "pattern",
        "format",
    }
    result = dict(schema)
    if schema.get("format") in FORMAT_PATTERNS and not (
        {"pattern", "maxLength"} & schema.keys() or schema.get("minLength")
    ):
        result["pattern"] = f"^(?:{FORMAT_PATTERNS[schema['format']]})$"
    for name in ("properties", "patternProperties", "$defs"):
        if name in result:
            result[name] = {key: as_generated(part) for key, part in result[name].items()}
    for name in ("anyOf", "oneOf", "prefixItems"):
        if name in result:
            result[name] = [as_generated(part) for part in result[name]]
    for name in ("items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties"):
        if name in result:
            result[name] = as_generated(result[name])
    combined = {"anyOf", "oneOf", "enum", "const", "$ref"} & schema.keys()
    if "type" not in schema and not combined and not others & schema.keys() and bool(objects) != bool(arrays):
        result["type"] = "object" if objects else "array"
    is_open = {"additionalProperties", "unevaluatedProperties"} & schema.keys()
    if objects and not is_open and ("properties" in schema or schema.get("patternProperties")):
        properties = dict(result.get("properties", {}))
        names = schema.get("propertyNames")
        if not (isinstance(names, dict) and "enum" in names):
            for name in schema.get("required", []):
                properties.setdefault(name, True)
        result["properties"] = properties
        result["additionalProperties"] = False
    elif schema.get("patternProperties") and "additionalProperties" not in schema:
        result["additionalProperties"] = False
    is_closed = "prefixItems" in schema and not {"items", "unevaluatedItems"} & schema.keys()
    if is_closed and schema.get("minItems", 0) <= len(schema["prefixItems"]):
        result["items"] = False
    return result


def random_value(rng: random.Random, schema: Any, whole: Any, depth: int = 0) -> Any:
    """A value that is often valid, with properties in the order that is generated."""

    def free() -> Any:
        return rng.choice([None, True, rng.randint(-150, 150), rng.randint(-25, 25) + 0.125, rng.choice(
            ["", "a", "b", "abc", "bcbc", '"', "\t", "1.a", "é", "2024-02-29", "a b"]), [], [1], ["a", None], {},
            {"a": 1}, {"é": None}])  # fmt: skip

    if not isinstance(schema, dict) or depth > 8 or rng.random() < 0.08:
        return free()

    def inner(part: Any) -> Any:
        return random_value(rng, part, whole, depth + 1)

    if "$ref" in schema:
        return inner(whole["$defs"][schema["$ref"].rsplit("/", 1)[1]])
    for name in ("anyOf", "oneOf"):
        if name in schema:
            return inner(rng.choice(schema[name]))
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "const" in schema:
        return schema["const"]
    types = schema.get("type", ["object"] if "properties" in schema else ["array"] if "items" in schema else None)
    kind = rng.choice(types) if isinstance(types, list) else types
    if kind in ("integer", "number"):
        near = [
            schema[name] for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum") if name in schema
        ]
        value = rng.choice(near or [0]) + rng.choice([0, 0, 1, -1, 0.5, -0.001, 10, -100, 0.1])
        return round(value) if kind == "integer" or value == int(value) else round(value, 6)
    if kind == "string":
        return rng.choice(["", "a", "b", "abc", "aa", "abab", "bca", "1.a", '"\\\t', "é", "xb", "😀", "a b"])
    if kind == "array":
        prefix = schema.get("prefixItems", [])
        rest = schema.get("items", schema.get("unevaluatedItems", True))
        return [inner(prefix[i] if i < len(prefix) else rest) for i in range(rng.randint(0, 4))]
    if kind == "object":
        properties: Mapping[str, Any] = schema.get("properties", {})
        required = schema.get("required", [])
        names = [name for name in properties if name in required or rng.random() < 0.5]
        names += [name for name in required if name not in properties]
        if rng.random() < 0.4:
            names += [
                name
                for name in rng.sample([*NAMES, "abc", "bc"], rng.randint(1, 2))
                if name not in {*names, *properties}
            ]
        possible = schema.get("propertyNames")
        if isinstance(possible, dict) and "enum" in possible:
            names.sort(key=lambda name: possible["enum"].index(name) if name in possible["enum"] else 99)
        rest = schema.get("additionalProperties", next(iter(schema.get("patternProperties", {}).values()), True))
        return {name: inner(properties.get(name, rest)) for name in names}
    return free() if kind is None else {"null": None, "boolean": True}.get(kind, free())
