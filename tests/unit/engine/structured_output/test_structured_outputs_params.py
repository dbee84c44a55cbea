"""StructuredOutputsParams: one kind, of a sane size, and nothing in a schema that would silently not be enforced."""

from typing import Any

import msgspec
import pytest
from quire_engine import SamplingParams
from quire_engine.errors import RequestError
from quire_engine.structured_outputs_params import (
    MAX_CHOICES,
    MAX_STRUCTURED_OUTPUTS_BYTES,
    MAX_SUBSCHEMAS,
    StructuredOutputsParams,
)

GOOD: list[dict[str, Any]] = [
    {"json": {"type": "object"}},
    {"json": '{"type": "object"}'},
    {"json": "true"},
    {"regex": "a+"},
    {"choice": ["yes", "no"]},
    {"grammar": 'root ::= "a"'},
    {"json_object": True},
    {"structural_tag": {"type": "structural_tag", "format": {}}},
    {"structural_tag": "{}"},
    {"json": {"type": "object"}, "disable_any_whitespace": True, "disable_fallback": True},
    # Words of JSON Schema that are names or values here.
    {"json": {"type": "object", "properties": {"not": {"type": "integer"}, "if": {"enum": [{"contains": 1}]}}}},
    {"json": {"anyOf": [{"type": "integer"}, {"type": "null"}], "title": "T", "default": 1, "type": ["integer"]}},
    {"json": {"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}},
    {"json": {"type": "array", "uniqueItems": False}},
    {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#"}, {}]}}}},
    {
        "json": {
            "items": {"$ref": "#/missing/1"},
            "prefixItems": [{"$ref": "http://example.org"}, {"$ref": "#/items/x"}],
        }
    },
    {"json": {"allOf": [{"type": "integer"}]}},
]

BAD: list[tuple[Any, str]] = [
    ({}, "exactly one of json, regex"),
    ({"json_object": False}, "given with nothing; it must be exactly one"),
    ({"regex": "a", "choice": ["b"]}, "regex and choice; it must be exactly one"),
    ({"regex": ""}, "an empty regex"),
    ({"grammar": ""}, "an empty grammar"),
    ({"choice": []}, "a choice of 0 strings"),
    ({"choice": ["a", ""]}, "an empty string"),
    ({"choice": ["a"] * (MAX_CHOICES + 1)}, f"a choice of {MAX_CHOICES + 1} strings"),
    ({"regex": "a" * (MAX_STRUCTURED_OUTPUTS_BYTES + 1)}, "at most 262144 bytes"),
    ({"grammar": 'root ::= "a"' + " " * 1_000_000}, "at most 262144 bytes"),
    ({"json": {"enum": [f"value {i}" for i in range(30_000)]}}, "at most 262144 bytes"),
    ({"json": '{"type": '}, "json is no JSON"),
    ({"json": "[" * 100_000}, "json nests too deeply"),
    ({"json": "5"}, "must be an object"),
    ({"structural_tag": "[]"}, "a JSON object"),
    ({"json": {"not": {"type": "integer"}}}, "'not' at #,"),
    ({"json": {"type": "object", "properties": {"a": {"uniqueItems": True}}}}, "'uniqueItems' at #/properties/a"),
    ({"json": {"anyOf": [{"if": {}}]}}, "'if' at #/anyOf/0"),
    ({"json": {"type": "object", "required": ["a"], "anyOf": [{}]}}, "'required' beside 'anyOf'"),
    ({"json": {"$ref": "#/$defs/a", "minimum": 5}}, "'minimum' beside '\\$ref'"),
    ({"json": {"allOf": [{}, {}]}}, "'allOf' of several"),
    ({"json": {"$ref": "#"}}, r"a cycle of '\$ref' \(#\); it must be a schema in which each '\$ref' leads to a type"),
    (
        {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}}},
        r"a cycle of '\$ref' \(#/\$defs/a → #/\$defs/b → #/\$defs/a\)",
    ),
    ({"json": {"properties": {"a/b~": {"$ref": "#/properties/a~1b~0"}}}}, "a cycle of"),
    ({"json": {"anyOf": [{"type": "null"}, {"$ref": "#/anyOf/1"}]}}, "a cycle of"),
    ({"regexp": "a"}, "given with the unknown field 'regexp'; it must be an object of json, regex"),
    ({"x" * 100_000: 1}, "characters\\); it must be an object of json, regex"),
    ({"choice": [1]}, "Expected string, got integer - at \\$.choice\\[0\\]"),
    ({"json_object": "str"}, "Expected boolean | null, got string - at \\$.json_object"),
    ({"regex": 5}, "regex"),
    ({"choice": "a"}, "choice"),
    ({"json": [1]}, "json"),
    (5, "structured_outputs is a number; it must be a JSON object"),
    ("{", "is no JSON"),
    ("[]", "must be a JSON object"),
]


def short(case: object) -> str:
    """A name for a case."""
    return str(case)[:50]


@pytest.mark.parametrize("value", GOOD, ids=short)
def test_it_comes_as_an_object_as_text_and_over_the_wire(value: dict[str, Any]) -> None:
    params = SamplingParams(structured_outputs=value)  # type: ignore[arg-type]
    assert isinstance(params.structured_outputs, StructuredOutputsParams)
    as_text = msgspec.json.encode(value).decode()
    assert SamplingParams.from_mapping({"structured_outputs": value}) == params
    assert SamplingParams.from_mapping({"structured_outputs": as_text}) == params
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(("value", "message"), BAD, ids=short)
def test_what_is_wrong_is_said_by_name(value: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        SamplingParams.from_mapping({"structured_outputs": value})
    assert error.value.parameter == "structured_outputs"
    assert "structured_outputs" in str(error.value)
    if isinstance(value, dict):
        with pytest.raises(RequestError):
            SamplingParams(structured_outputs=value)  # type: ignore[arg-type]
        with pytest.raises((msgspec.ValidationError, msgspec.DecodeError)):
            msgspec.msgpack.decode(msgspec.msgpack.encode({"structured_outputs": value}), type=SamplingParams)


def test_a_schema_too_deep_to_write_is_refused() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(100_000):
        schema = {"items": schema}
    try:
        with pytest.raises(RequestError):
            SamplingParams.from_mapping({"structured_outputs": {"json": schema}})
    finally:
        while schema:  # Python itself would take it apart recursively
            schema = schema.pop("items", {})


def test_text_keeps_the_order_of_a_schema() -> None:
    params = StructuredOutputsParams(json={"properties": {"z": {}, "a": {}}})
    assert params.text == '{"properties":{"z":{},"a":{}}}'
    assert (params.kind, StructuredOutputsParams(choice=["b", "a"]).text) == ("json", '["b","a"]')


def test_a_long_name_over_many_subschemas_is_cheap_and_short_in_the_message() -> None:
    leaves = [{}] * 9_000
    StructuredOutputsParams(json={"properties": {"x" * 120_000: {"anyOf": leaves}}})
    with pytest.raises(RequestError, match="#/properties/xxx") as raised:
        StructuredOutputsParams(json={"properties": {"x" * 120_000: {"anyOf": [*leaves, {"not": {}}]}}})
    assert len(str(raised.value)) < 400
    with pytest.raises(RequestError, match=f"more than {MAX_SUBSCHEMAS} subschemas"):
        StructuredOutputsParams(json={"anyOf": [{}] * MAX_SUBSCHEMAS})


@pytest.mark.parametrize(
    "given",
    [
        {"regex": "a\ud800"},
        {"grammar": 'root ::= "\udfff"'},
        {"choice": ["a", "\ud800"]},
        {"json": '{"title": "\ud800"}'},
        {"json": {"title": "\ud800"}},
        {"structural_tag": '{"a": "\ud800"}'},
    ],
    ids=ascii,
)
def test_what_utf8_cannot_encode_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as raised:
        StructuredOutputsParams.from_value(given)
    assert raised.value.parameter == "structured_outputs"
    str(raised.value).encode()
