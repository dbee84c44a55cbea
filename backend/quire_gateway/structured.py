"""The format that the text of an answer must have, under all of its names."""

from collections.abc import Callable
from typing import Any

from quire_gateway.errors import InvalidRequestError
from quire_gateway.fields import Fields

_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""vLLM's older names → kinds of `structured_outputs`."""


def take_structured_outputs(fields: Fields) -> tuple[Any, str]:
    """The model's `structured_outputs`, from any of its names, and that name. None: there is none.

    Raises:
        InvalidRequestError: there are several, or `response_format` is of no known type.
    """
    found: dict[str, Any] = {}
    structured = fields.take("structured_outputs")
    if structured is not None:
        found["structured_outputs"] = structured
    if (response_format := fields.take("response_format")) is not None:
        structure = _response_format(response_format)
        if structure is not None:
            found["response_format"] = structure
    for name, kind in _GUIDED.items():
        value = fields.take(name)
        if value is not None and structured is None:  # as in vLLM, the newer name decides
            found[name] = {kind: value}
    if len(found) > 1:
        names = " and ".join(found)
        raise InvalidRequestError(next(iter(found)), f"{names} are given together; give one of them")
    return next(((value, name) for name, value in found.items()), (None, ""))


def _response_format(value: Any) -> dict[str, Any] | None:
    kinds: dict[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = {
        "text": lambda value: None,
        "json_object": _json_object,
        "json_schema": _json_schema,
        "structural_tag": lambda value: {"structural_tag": value},
    }
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise InvalidRequestError(
            "response_format", f"response_format must be an object whose type is one of {', '.join(kinds)}"
        )
    return kinds[kind](value)


def _json_object(value: dict[str, Any]) -> dict[str, Any]:
    """Any object, or with `schema`, as other servers have it, one that follows it."""
    schema = value.get("schema")
    if schema is None:
        return {"json_object": True}
    if not isinstance(schema, dict):
        raise InvalidRequestError("response_format", "response_format.schema must be a JSON schema")
    return {"json": schema}


def _json_schema(value: dict[str, Any]) -> dict[str, Any]:
    described = value.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        raise InvalidRequestError("response_format", "response_format.json_schema.schema must be a JSON schema")
    return {"json": schema}
