"""JSON schemas as grammars: each keyword of draft 2020-12 is enforced as `jsonschema` does, or rejected by name."""

import datetime
import enum
import json
import os
import random
import uuid
from collections.abc import Callable
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from jsonschema_specifications import REGISTRY
from openai.lib._pydantic import to_strict_json_schema
from pydantic import BaseModel, ConfigDict, Field
from quire_engine.errors import RequestError
from quire_engine.scheduler.grammar import GrammarError
from quire_engine.structured_output.json_schema import FORMAT_PATTERNS, MAX_INDENTATION, to_ebnf
from quire_engine.structured_outputs_params import MAX_SCHEMA_DEPTH, StructuredOutputsParams
from support.schema_fuzz import SchemaGrammar, as_generated, random_schema, random_value

DRAFT = "https://json-schema.org/draft/2020-12/"
NUM_FUZZED = int(os.environ.get("QUIRE_FUZZ_SCHEMAS", "150"))


def obj(**keywords: Any) -> dict[str, Any]:
    return {"type": "object", **keywords}


A = {"a": {"type": "integer"}, "b": {"type": "string"}}
NODE = obj(properties={"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}, required=["next"])
CAT = obj(properties={"kind": {"const": "cat"}, "lives": {"type": "integer"}}, required=["kind"])
DOG = obj(properties={"kind": {"enum": ["dog", "wolf"]}}, required=["kind"], additionalProperties=False)
DEFAULT_KINDS = {
    "oneOf": [{"$ref": "#/$defs/C"}, {"$ref": "#/$defs/D"}],
    "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/C"}},
    "$defs": {
        "C": obj(properties={"kind": {"const": "c", "default": "c", "type": "string"}, "child": {"$ref": "#"}}),
        "D": obj(properties={"kind": {"const": "d", "default": "d", "type": "string"}}),
    },
}

ENFORCED: list[tuple[str, Any, list[str], list[str]]] = [
    # keyword, schema, valid texts, invalid texts
    ("$schema", {"$schema": DRAFT + "schema", "type": "null"}, ["null"], ["1"]),
    ("$id", {"$id": "https://example.org/a", "type": "null"}, ["null"], ["1"]),
    ("$comment", {"$comment": "c", "type": "null"}, ["null"], ["1"]),
    ("$anchor", {"$anchor": "here", "type": "null"}, ["null"], ["1"]),
    ("$dynamicAnchor", {"$dynamicAnchor": "here", "type": "null"}, ["null"], ["1"]),
    ("$vocabulary", {"$vocabulary": {DRAFT + "vocab/core": True}, "type": "null"}, ["null"], ["1"]),
    ("$ref", {"$ref": "#/$defs/node", "$defs": {"node": NODE}}, ['{"next": {"next": null}}'], ["null", '{"next": {}}']),
    ("$ref", {"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"const": 1}}}, ["1"], ["2"]),
    ("$ref", {"$ref": "#/$defs/a", "type": "integer", "$defs": {"a": {"minimum": 5}}}, ["5"], ["4", '"a"']),
    ("$ref", {"properties": {"a": {"$ref": "#"}}, "type": ["object", "null"]}, ['{"a": {"a": null}}'], ['{"a": 1}']),
    ("$defs", {"$defs": {"x": False}, "type": "null"}, ["null"], ["1"]),
    ("definitions", {"$ref": "#/definitions/x", "definitions": {"x": {"const": 1}}}, ["1"], ["2"]),
    ("allOf", {"allOf": [{"minimum": 5, "type": "integer"}]}, ["5"], ["4"]),
    ("anyOf", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, ["1", "null"], ['"a"', "true"]),
    ("anyOf", {"anyOf": [False, {"const": 1}]}, ["1"], ["2"]),
    ("anyOf", {"type": "string", "anyOf": [{"minLength": 2}, {"const": "a"}]}, ['"a"', '"bc"'], ['"b"', "1"]),
    ("oneOf", {"oneOf": [{"type": "integer"}, {"type": "string"}]}, ["1", '"a"'], ["1.5", "null"]),
    ("oneOf", {"oneOf": [{"const": 1}, {"enum": [2, "1", True]}]}, ["1", "true", '"1"'], ["3"]),
    ("oneOf", {"oneOf": [CAT, DOG]}, ['{"kind": "cat", "lives": 7}', '{"kind": "wolf"}'], ['{"kind": "cow"}', "{}"]),
    ("oneOf", DEFAULT_KINDS, ['{"kind": "c", "child": {"kind": "d"}}'], ['{"kind": "e"}', "{}"]),
    ("oneOf", {"oneOf": [True]}, ["1"], []),
    ("prefixItems", {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}]}, ["[]", "[1]", "[1, 2]"], ["[2]"]),
    ("prefixItems", {"prefixItems": [{"const": 1}, False], "items": True}, ["[]", "[1]"], ["[1, 2]"]),
    ("prefixItems", {"prefixItems": [{"const": 1}], "minItems": 2}, ["[1, {}]"], ["[1]"]),
    ("items", {"type": "array", "items": {"const": 1}}, ["[]", "[1,1]", "[ 1, 1 ]"], ["[2]", "[1,]", "{}"]),
    ("items", {"type": "array", "items": False}, ["[]"], ["[1]"]),
    ("items", {"prefixItems": [{"const": 1}], "items": {"const": 2}}, ["[1, 2, 2]"], ["[2]", "[1, 1]"]),
    ("minItems", {"type": "array", "minItems": 2}, ["[1, []]", "[1, 2, 3]"], ["[]", "[1]"]),
    ("maxItems", {"type": "array", "maxItems": 1}, ["[]", "[1]", "[{}]"], ["[1, 2]"]),
    ("maxItems", {"type": "array", "minItems": 2, "maxItems": 3}, ["[1, 2]", "[1, 2, 3]"], ["[1]"]),
    ("unevaluatedItems", {"prefixItems": [{"const": 1}], "unevaluatedItems": {"const": 2}}, ["[1, 2]"], ["[1, 1]"]),
    ("properties", obj(properties=A), ["{}", '{"a": 1}', '{"b": "x"}', '{"a": 1, "b": ""}'], ['{"a": "x"}']),
    ("properties", obj(properties={"a": False, "b": True}), ["{}", '{"b": []}'], ['{"a": 1}']),
    ("required", obj(properties=A, required=["b"]), ['{"b": ""}', '{"a": 1, "b": ""}'], ["{}", '{"a": 1}']),
    ("required", obj(required=["a"]), ['{"a": 1}', '{"a": 1, "x": 2}'], ["{}", '{"b": 1}']),
    ("required", obj(properties=A, required=["c"]), ['{"a": 1, "c": [{}]}'], ['{"a": 1}', "{}"]),
    ("required", obj(required=["a"], additionalProperties={"const": 1}), ['{"a": 1}'], ['{"a": 2}', "{}"]),
    ("additionalProperties", obj(properties=A, additionalProperties=False), ["{}", '{"a": 1}'], ['{"c": 1}']),
    (
        "additionalProperties", obj(properties=A, additionalProperties={"type": "null"}),
        ["{}", '{"x": null}', '{"a": 1, "ab": null, "": null}'],
        ['{"x": 1}', '{"a": null}', '{"x": null, "a": null}', '{"a": 1, "\\u0062": null}', '{"b": "", "b": null}'],
    ),
    ("additionalProperties", obj(additionalProperties=False), ["{}"], ['{"a": 1}']),
    ("patternProperties", obj(patternProperties={"^x": {"const": 1}}), ["{}", '{"x": 1, "xy": 1}'], ['{"x": 2}']),
    ("patternProperties", obj(properties=A, patternProperties={"x": True}), ['{"a": 1, "axe": 2}'], ['{"a": null}']),
    ("propertyNames", obj(propertyNames={"pattern": "^x$"}), ["{}", '{"x": 1}'], ['{"y": 1}']),
    ("propertyNames", obj(propertyNames={"maxLength": 1}), ["{}", '{"x": 1}'], ['{"xy": 1}']),
    (
        "propertyNames",
        obj(propertyNames={"enum": ["x", "y"]}, additionalProperties={"type": "integer"}, required=["x"]),
        ['{"x": 1, "y": 2}'], ["{}", '{"x": 1, "z": 1}', '{"x": null}'],
    ),
    ("propertyNames", obj(propertyNames={"type": "string"}), ["{}", '{"x": 1}'], ["1"]),
    ("propertyNames", obj(propertyNames=False), ["{}"], ['{"a": 1}']),
    ("propertyNames", obj(propertyNames={"minimum": 1}), ["{}", '{"a": 1}'], ["1"]),
    ("minProperties", obj(properties=A, minProperties=1), ['{"a": 1}', '{"b": ""}'], ["{}"]),
    ("minProperties", obj(properties=A, minProperties=2), ['{"a": 1, "b": ""}'], ["{}", '{"a": 1}', '{"b": ""}']),
    ("minProperties", obj(minProperties=1), ['{"a": 1}', '{"a": 1, "b": 2}'], ["{}"]),
    ("minProperties", obj(required=["a"], minProperties=2), ['{"a": 1, "b": 2}'], ['{"a": 1}', '{"a": 1, "a": 2}']),
    ("maxProperties", obj(maxProperties=1), ["{}", '{"a": 1}'], ['{"a": 1, "b": 2}']),
    ("maxProperties", obj(properties=A, maxProperties=1), ["{}", '{"a": 1}', '{"b": ""}'], ['{"a": 1, "b": ""}']),
    ("unevaluatedProperties", obj(properties=A, unevaluatedProperties=False), ['{"a": 1}'], ['{"c": 1}']),
    ("unevaluatedProperties", obj(properties=A, unevaluatedProperties={"const": 1}), ['{"c": 1}'], ['{"c": 2}']),
    ("type", {"type": "integer"}, ["0", "-1", "120"], ["1.5", "true", '"1"']),
    ("type", {"type": "number"}, ["0", "-1.5", "1e5", "1.5E-7"], ["true", "null"]),
    ("type", {"type": "boolean"}, ["true", "false"], ["0", "null"]),
    ("type", {"type": "null"}, ["null"], ["0"]),
    ("type", {"type": "string"}, ['""', '"é\\n\\u00e9\\ud83d\\ude00"'], ["0"]),
    ("type", {"type": "array"}, ["[]", '[1, [{"a": null}]]'], ["{}"]),
    ("type", {"type": "object"}, ["{}", '{"a": [1], "": {}}'], ["[]"]),
    ("type", {"type": ["string", "null"], "minLength": 1}, ["null", '"a"'], ['""', "1"]),
    ("type", {"type": ["integer", "number"], "minimum": 1}, ["1", "1.5"], ["0"]),
    ("enum", {"enum": ["a", 1, None, {"b": [1, {}]}]}, ['"a"', "1", "null", '{"b": [1, {}]}'], ["2", '"b"', "{}"]),
    ("enum", {"enum": ["a", 1, True, 2.0], "type": "integer"}, ["1", "2.0"], ['"a"', "true"]),
    ("enum", {"enum": ['q"\\', "é"], "type": "string", "format": "date"}, ['"q\\"\\\\"', '"é"'], ['"q"']),
    ("const", {"const": 1, "type": "integer"}, ["1"], ["2", "true"]),
    ("const", {"enum": [1, 2], "const": 2}, ["2"], ["1"]),
    ("minimum", {"type": "integer", "minimum": 5}, ["5", "17", "500"], ["4", "-5"]),
    ("minimum", {"minimum": 5}, ["5", "5.5", '"a"', "null", "[1]", "{}"], ["4", "4.9"]),
    ("minimum", {"type": "number", "minimum": -0.25}, ["-0.25", "-0.2", "0", "1.5"], ["-0.26", "-1"]),
    ("maximum", {"type": "integer", "maximum": 15}, ["15", "-200", "9", "0"], ["16", "99"]),
    ("maximum", {"type": "number", "minimum": 0.5, "maximum": 10}, ["0.5", "10", "9.99"], ["0.4", "10.1", "11"]),
    ("exclusiveMinimum", {"type": "number", "exclusiveMinimum": 0}, ["0.1", "1", "0.00001"], ["0", "0.0", "-1"]),
    ("exclusiveMaximum", {"type": "integer", "exclusiveMaximum": 10.5}, ["10", "-3"], ["11"]),
    ("exclusiveMaximum", {"type": "number", "minimum": 1, "exclusiveMaximum": 2}, ["1", "1.999"], ["2", "0.9", "2.0"]),
    ("multipleOf", {"type": "integer", "multipleOf": 1}, ["1"], ["1.5"]),
    ("minLength", {"type": "string", "minLength": 2}, ['"ab"', '"é\\n"', '"😀a"'], ['"a"', '"😀"', '"\\ud83d\\ude00"']),
    ("minLength", {"minLength": 2}, ['"ab"', "1", "[]"], ['"a"']),
    ("maxLength", {"type": "string", "maxLength": 2}, ['""', '"ab"', '"\\ud83d\\ude00a"'], ['"abc"']),
    ("pattern", {"type": "string", "pattern": "^a{\u0663}$"}, ['"a{\u0663}"'], ['"aaa"']),
    ("pattern", {"type": "string", "pattern": "b"}, ['"b"', '"abc"', '"\\nb\\""'], ['"ac"']),
    ("pattern", {"pattern": "^a"}, ['"a"', '"ab"', "1", "null"], ['"ba"']),
    ("pattern", {"type": "string", "pattern": "a|^b$"}, ['"b"', '"xax"'], ['"xb"']),
    ("pattern", {"type": "string", "pattern": "^.$"}, ['"\\""', '"\\\\"', '"\\t"', '"é"', '"😀"'], ['"ab"', '"\\n"']),
    ("pattern", {"type": "string", "pattern": r"^[^\da-f]{2}\.(?:x|(?P<n>yz))+?$"}, ['"z_.xyz"'], ['"az.x"']),
    ("pattern", {"type": "string", "pattern": r"^[\u00e9\x41\]\-\\]$"}, ['"é"', '"A"', '"]"', '"\\\\"'], ['"B"']),
    ("pattern", {"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": 3}, ['"abc"'], ['"a"']),
    ("format", {"type": "string", "format": "of our own"}, ['"x"'], ["1"]),
    ("uniqueItems", {"type": "array", "uniqueItems": False}, ["[1, 1]"], ["1"]),
    *[
        (name, {name: value, "type": "null"}, ["null"], ["1"])
        for name, value in {
            "title": "t", "description": "d", "default": 1, "examples": [1], "deprecated": True, "readOnly": True,
            "writeOnly": True, "contentEncoding": "base64", "contentMediaType": "text/plain",
            "contentSchema": {"const": 1},
            "x-of-our-own": {"not": 5},
        }.items()
    ],
]  # fmt: skip

REJECTED: list[tuple[str, Any, str]] = [
    ("$dynamicRef", {"$dynamicRef": "#here"}, r"'\$dynamicRef' at #"),
    ("$id", obj(properties={"a": {"$id": "b"}}), r"'\$id' within it at #/properties/a"),
    ("$ref", {"$ref": "#here", "$defs": {"a": {"$anchor": "here"}}}, "leads to no schema"),
    ("$ref", {"$ref": "#/examples/0", "examples": [{"not": {}}]}, "'not'"),
    (
        "$ref",
        {"$ref": "#/$defs/a", "unevaluatedProperties": False, "$defs": {"a": {}}},
        "'unevaluatedProperties' beside",
    ),
    ("$ref", {"$ref": "#/$defs/a", "$defs": {"a": False}}, "cannot accept any value"),
    ("allOf", {"allOf": [{"type": "integer"}, {"minimum": 1}]}, "'allOf' of several"),
    ("$ref", {"$ref": "#/a/" + "9" * 5000, "a": [True]}, "leads to no schema"),
    ("anyOf", {"anyOf": [True], "minimum": 5}, "'minimum' beside 'anyOf'"),
    ("anyOf", {"anyOf": []}, "'anyOf' of the json schema, at #, must be a list of schemas"),
    ("anyOf", {"anyOf": [5]}, "neither an object nor"),
    ("anyOf", {"type": "integer", "anyOf": [{"anyOf": [{"type": "string"}, {"type": "integer"}]}]}, "'type' beside"),
    ("oneOf", {"oneOf": [{"type": "integer"}, {"type": "number"}]}, "could match the same value"),
    ("oneOf", {"oneOf": [obj(properties=A), obj(properties={"c": True})]}, "could match the same value"),
    ("oneOf", {"oneOf": [{"minimum": 5}, {"type": "string"}]}, "could match the same value"),
    ("oneOf", {**DEFAULT_KINDS, "discriminator": {"propertyName": ["kind"]}}, "could match the same value"),
    ("not", {"not": {"type": "integer"}}, "'not' at #"),
    ("if", {"if": True}, "'if' at #"),
    ("then", {"then": True}, "'then' at #"),
    ("else", {"else": True}, "'else' at #"),
    ("dependentSchemas", obj(dependentSchemas={"a": False}), "'dependentSchemas' at #"),
    ("dependentRequired", obj(dependentRequired={"a": ["b"]}), "'dependentRequired' at #"),
    ("contains", {"type": "array", "contains": False}, "'contains' at #"),
    ("minContains", {"type": "array", "minContains": 1}, "'minContains' at #"),
    ("maxContains", {"type": "array", "maxContains": 1}, "'maxContains' at #"),
    ("uniqueItems", {"items": [{"uniqueItems": True}]}, "'uniqueItems' at #/items/0"),
    ("items", {"items": 5}, "neither an object nor"),
    ("multipleOf", {"type": "integer", "multipleOf": 3}, "'multipleOf'"),
    ("multipleOf", {"multipleOf": 1}, "'multipleOf'"),
    ("enum", {"enum": ["a", "bcd"], "maxLength": 1}, "'maxLength' beside 'enum'"),
    ("enum", {"enum": [1], "type": "string"}, "cannot accept any value"),
    ("const", {"const": 5, "minimum": 6}, "'minimum' beside 'const'"),
    ("type", {"type": "str"}, "the type 'str'"),
    ("type", {"type": []}, "the type"),
    ("minimum", {"minimum": "5"}, "'minimum' of the json schema, at #, must be a number"),
    ("minimum", {"exclusiveMinimum": True}, "must be a number"),
    ("minimum", {"minimum": 6, "maximum": 5, "type": "integer"}, "cannot accept any value"),
    ("maximum", {"maximum": 1e300, "type": "number"}, "below 1e"),
    ("maximum", {"maximum": 10**400, "type": "integer"}, "below 1e"),
    ("multipleOf", {"multipleOf": 10**400, "type": "integer"}, "'multipleOf'"),
    ("minLength", {"minLength": -1}, "must be an integer of at least 0"),
    ("minLength", {"minLength": 10**400}, "must be an integer of at least 0"),
    ("minLength", {"type": "string", "pattern": "ab", "minLength": 5}, "'minLength' or 'maxLength' beside a 'pattern'"),
    ("pattern", {"type": "string", "pattern": "(?=a)b"}, "lookahead"),
    ("pattern", {"type": "string", "pattern": r"(a)\1"}, r"'\\1'"),
    ("pattern", {"type": "string", "pattern": "a(^b|c)"}, "within it"),
    ("pattern", {"type": "string", "pattern": "(a"}, "without a '\\)'"),
    ("pattern", {"type": "string", "pattern": "a)"}, "without a '\\('"),
    ("pattern", {"type": "string", "pattern": "a{2,1}"}, "at position"),
    ("pattern", {"type": "string", "pattern": "^a{4294967297}$"}, "more than 2147483647 times"),
    ("pattern", {"type": "string", "pattern": "^a{1," + "9" * 5000 + "}$"}, "more than 2147483647 times"),
    ("pattern", {"type": "string", "pattern": "[a"}, "an end too early"),
    ("pattern", {"type": "string", "pattern": "(" * 60 + ")" * 60}, "groups within each other"),
    ("required", obj(required="a"), "'required' of the json schema, at #, must be a list of strings"),
    ("required", obj(required=["a"], additionalProperties=False), "cannot accept any value"),
    ("minProperties", obj(minProperties=2), "'minProperties' where properties have any name"),
    (
        "minProperties",
        obj(patternProperties={"x": True}, minProperties=1),
        "'minProperties' beside 'patternProperties'",
    ),
    ("maxProperties", obj(properties={str(i): True for i in range(300)}, maxProperties=200), "'maxProperties' of 200"),
    ("patternProperties", obj(patternProperties={"x": True, "y": True}), "several 'patternProperties'"),
    (
        "patternProperties",
        obj(properties=A, patternProperties={"a": {"const": 1}}),
        "which its 'patternProperties' match",
    ),
    (
        "patternProperties",
        obj(patternProperties={"a": True}, additionalProperties=True),
        "'additionalProperties' beside",
    ),
    ("propertyNames", obj(properties=A, propertyNames={"maxLength": 3}), "'propertyNames' beside"),
    ("propertyNames", obj(patternProperties={"a": True}, propertyNames=False), "'propertyNames' beside"),
    ("dependencies", obj(dependencies={"a": ["b"]}), "'dependencies' at #"),
    ("a boolean", False, "cannot accept any value"),
]

NARROWER: list[tuple[Any, list[str]]] = [
    # Valid, but not what is generated: the documentation says so.
    (obj(properties=A), ['{"b": "", "a": 1}', '{"c": 1}']),
    ({"properties": A}, ["5"]),
    ({"prefixItems": [True]}, ["[1, 2]"]),
    ({"type": "number", "minimum": 5}, ["1e3"]),
    ({"type": "integer"}, ["1.0"]),
    ({"enum": [1]}, ["1.0"]),
    ({"type": "string", "pattern": "^é$"}, ['"\\u00e9"']),
    ({"type": "array"}, ["[1 , 2]", "[\n\n1]", "[1,  2]", " []"]),
    (DEFAULT_KINDS, ['{"child": {"kind": "d"}}']),
]


def is_valid(schema: Any, text: str) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))


@pytest.mark.parametrize(("keyword", "schema", "valid", "invalid"), ENFORCED, ids=lambda case: str(case)[:40])
def test_a_schema_takes_what_is_valid_and_nothing_else(
    keyword: str, schema: Any, valid: list[str], invalid: list[str]
) -> None:
    grammar = SchemaGrammar(schema)
    for text in valid:
        assert is_valid(schema, text), f"the case itself: {text}"
        assert grammar.accepts(text), text
    for text in invalid:
        assert not grammar.accepts(text), text
    rng = random.Random(0)
    for _ in range(20):
        generated = grammar.random_text(rng)
        assert generated is None or is_valid(schema, generated), generated


@pytest.mark.parametrize(("keyword", "schema", "message"), REJECTED, ids=lambda case: str(case)[:40])
def test_what_cannot_be_enforced_is_rejected_by_name(keyword: str, schema: Any, message: str) -> None:
    with pytest.raises((RequestError, GrammarError), match=message):
        SchemaGrammar(schema)


@pytest.mark.parametrize(("schema", "texts"), NARROWER, ids=lambda case: str(case)[:40])
def test_what_is_valid_and_not_generated(schema: Any, texts: list[str]) -> None:
    grammar = SchemaGrammar(schema)
    for text in texts:
        assert not grammar.accepts(text), text


def test_no_keyword_of_any_vocabulary_is_left_out() -> None:
    tested = {keyword for keyword, *_ in (*ENFORCED, *REJECTED)}
    vocabularies = ("core", "applicator", "unevaluated", "validation", "meta-data", "format-annotation", "content")
    for vocabulary in vocabularies:
        keywords = REGISTRY.contents(f"{DRAFT}meta/{vocabulary}")["properties"].keys()
        assert keywords <= tested, vocabulary


FORMATS = {
    "date": (["2024-02-29", "1999-12-31", "2000-02-29"], ["2023-02-29", "2024-04-31", "1900-02-29", "24-01-01"]),
    "time": (["23:59:59Z", "00:00:00.25+01:30"], ["24:00:00Z", "12:00:00"]),
    "date-time": (["2024-02-29T12:00:00Z"], ["2024-02-29 12:00:00Z", "2023-02-29T12:00:00Z"]),
    "duration": (["P1Y2M3DT4H5M6S", "PT5M", "P2W"], ["P", "PT", "1Y"]),
    "uuid": (["123e4567-e89b-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000"]),
    "ipv4": (["0.0.0.0", "255.255.1.20"], ["256.1.1.1", "1.1.1"]),
    "ipv6": (
        ["::", "::1", "fe80::1:2", "1:2:3:4:5:6:7:8", "1::8"],
        ["1:2:3", "1::2::3", "1:2:3:4:5:6:7:8:9", "12345::"],
    ),
    "hostname": (["a", "example.org"], ["-a", "a..b", ""]),
    "email": (["a.b+c@example.org"], ["a", "a@b", "@example.org", ".a@example.org"]),
    "uri": (["https://example.org/a?b=%20#c", "urn:a:b"], ["a b:c", "//x", "http://a/%2"]),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str) -> None:
    good, bad = FORMATS[name]
    grammar = SchemaGrammar({"type": "string", "format": name})
    assert all(grammar.accepts(json.dumps(text)) for text in good)
    assert not any(grammar.accepts(json.dumps(text)) for text in bad)
    assert FORMATS.keys() == FORMAT_PATTERNS.keys()


def test_white_space_is_that_of_json_dumps() -> None:
    value = {"a": [1, {"b": [[], {}, [{"c": None}]]}], "d": {"e": "f"}}
    grammar = SchemaGrammar({"type": "object"})
    for indent in (None, 0, 1, 2, 4, "\t"):
        assert grammar.accepts(json.dumps(value, indent=indent)), indent
    assert grammar.accepts(json.dumps(value, separators=(",", ":")))
    deep = "[\n" + " " * MAX_INDENTATION + "1]"
    assert SchemaGrammar({"type": "array"}).accepts(deep)
    assert not SchemaGrammar({"type": "array"}).accepts(deep.replace("1", " 1"))
    line = SchemaGrammar({"type": "object"}, any_whitespace=False)
    assert line.accepts(json.dumps(value))
    assert not line.accepts(json.dumps(value, indent=1))
    assert not line.accepts(json.dumps(value, separators=(",", ":")))


@pytest.mark.parametrize(
    "text", ['"\\ud83d"', '"\\udc00"', '"\\ud83d\\u0041"', '"\x01"', '"\\x41"', "01", "1.", ".5", "+1"]
)
def test_no_schema_allows_what_readers_of_json_trip_over(text: str) -> None:
    assert not SchemaGrammar(True).accepts(text)


@pytest.mark.parametrize("keyword", ["anyOf", "items", "allOf", "additionalProperties"])
def test_deep_nesting_is_rejected_before_anything_is_compiled(keyword: str) -> None:
    def nested(depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "integer"}
        for _ in range(depth):
            schema = {keyword: [schema] if keyword.endswith("Of") else schema}
        return schema

    SchemaGrammar(nested(MAX_SCHEMA_DEPTH))
    with pytest.raises(RequestError, match=f"more than {MAX_SCHEMA_DEPTH} levels"):
        StructuredOutputsParams(json=nested(MAX_SCHEMA_DEPTH + 1))


def test_schemas_of_structural_tags_are_checked_like_others() -> None:
    wrong = {"type": "array", "uniqueItems": True}
    new = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": wrong}, "end": "</f>"}
    old = {
        "type": "structural_tag",
        "triggers": ["<f"],
        "structures": [{"begin": "<f>", "schema": wrong, "end": "</f>"}],
    }
    for tag in ({"type": "structural_tag", "format": {"type": "sequence", "elements": [new]}}, old):
        with pytest.raises(RequestError, match="'uniqueItems' at #"):
            StructuredOutputsParams(structural_tag=tag)


class Color(str, enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=0, le=9, description="so far")


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: str | None = None


class Order(BaseModel):
    """All that pydantic's users write."""

    model_config = ConfigDict(title="An order", extra="forbid")
    id: uuid.UUID
    size: Annotated[float, Field(gt=0, lt=100)]
    code: str = Field(pattern=r"^[A-Z]{2}\d{2,4}$", examples=["AB12"])
    name: str = Field(min_length=1, max_length=5)
    color: Color
    when: datetime.date
    at: datetime.datetime | None = None
    pet: Cat | Dog = Field(discriminator="kind")
    other: Cat | int | list[bool] | None = None
    tags: list[str] = Field(default_factory=list, max_length=2)
    pair: tuple[int, str] = (1, "a")
    counts: dict[str, int] = {}
    prices: dict[Color, float] = {}
    anything: Any = None
    free: dict[str, Any] = {}
    children: list["Order"] = []


@pytest.mark.parametrize("is_strict", [False, True])
def test_what_pydantic_and_openais_client_emit_is_served(is_strict: bool) -> None:
    schema = to_strict_json_schema(Dog if is_strict else Order) if is_strict else Order.model_json_schema()
    grammar = SchemaGrammar(schema)
    rng = random.Random(0)
    texts = [text for text in (grammar.random_text(rng, 2000) for _ in range(30)) if text is not None]
    assert texts
    for text in texts:
        (Dog if is_strict else Order).model_validate_json(text)
    assert grammar.accepts('{"kind":"dog","name":null}') == is_strict


SERVED: dict[str, Any] = {
    "zod's object": obj(
        properties={
            "n": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
            "r": obj(propertyNames={"type": "string"}, additionalProperties={"type": "number"}),
            "e": obj(
                propertyNames={"type": "string", "enum": ["a", "b"]}, additionalProperties={"type": "string"},
                required=["a", "b"],
            ),
            "t": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "number"}]},
            "u": {"type": "string", "format": "uri"},
            "d": {"oneOf": [
                obj(properties={"k": {"type": "string", "const": "a"}}, required=["k"], additionalProperties=False),
                obj(properties={"k": {"type": "string", "const": "b"}}, required=["k"], additionalProperties=False),
            ]},
        },
        required=["n", "r", "e", "t", "u", "d"], additionalProperties=False,
    ) | {"$schema": DRAFT + "schema"},
    "older pydantic": {
        "$ref": "#/definitions/M",
        "definitions": {
            "M": obj(properties={"c": {"allOf": [{"$ref": "#/definitions/C"}], "default": "a", "title": "C"}}),
            "C": {"title": "C", "description": "An enumeration.", "enum": ["a", "b"], "type": "string"},
        },
    },
    "a tool without parameters": obj(properties={}),
    "a list of calls": {"type": "array", "minItems": 1, "items": {"anyOf": [
        obj(properties={"name": {"const": "f"}, "parameters": obj(properties={"x": {"type": "integer"}})},
            required=["name", "parameters"]),
    ]}},
    "no type": {"properties": {"a": {"type": "string"}}, "required": ["a"]},
}  # fmt: skip


@pytest.mark.parametrize("name", SERVED)
def test_what_others_emit_is_served(name: str) -> None:
    grammar = SchemaGrammar(SERVED[name])
    rng = random.Random(0)
    texts = [text for text in (grammar.random_text(rng, 1000) for _ in range(20)) if text is not None]
    assert texts
    assert all(is_valid(SERVED[name], text) for text in texts)


def check(seed: int) -> None:
    """One random schema against `jsonschema`."""
    rng = random.Random(seed)
    schema = random_schema(rng)
    try:
        grammar = SchemaGrammar(schema)
    except (RequestError, GrammarError):
        return
    validators = jsonschema.Draft202012Validator(schema), jsonschema.Draft202012Validator(as_generated(schema))

    def agree(text: str, expected: Callable[[bool, bool], bool]) -> None:
        try:
            is_valid, is_generated = (validator.is_valid(json.loads(text)) for validator in validators)
        except RecursionError:  # jsonschema's own, of schemas that lead to themselves
            return
        assert expected(is_valid, is_generated), f"seed {seed}: {json.dumps(schema)} and {text}"

    for _ in range(4):
        text = grammar.random_text(rng)
        if text is not None:
            agree(text, lambda is_valid, _: is_valid)
    for _ in range(12):
        value = json.dumps(random_value(rng, schema, schema), ensure_ascii=False, indent=rng.choice([None, 1, 4]))
        if grammar.accepts(value):
            agree(value, lambda is_valid, _: is_valid)
        else:
            agree(value, lambda is_valid, is_generated: not (is_valid and is_generated))


def test_random_schemas_agree_with_jsonschema() -> None:
    """`QUIRE_FUZZ_SCHEMAS` has as many, others each time."""
    first = random.randrange(1 << 40) if "QUIRE_FUZZ_SCHEMAS" in os.environ else 0
    for seed in range(first, first + NUM_FUZZED):
        check(seed)


def test_a_huge_object_is_written_in_time_and_once() -> None:
    schema = obj(properties={f"property {i}": {"type": "string"} for i in range(3000)}, additionalProperties=True)
    assert len(to_ebnf(schema)) < 1 << 20
