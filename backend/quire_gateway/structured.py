"""The format that the text of an answer must have, under all of its names."""

from typing import Any

from quire_gateway.errors import InvalidRequestError
from quire_gateway.fields import Fields

_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""vLLM's older names → kinds of `structured_outputs`."""
_TYPES = ("text", "json_object", "json_schema", "structural_tag")
"""Of a `response_format`."""


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
    match value:
        case {"type": "text"}:
            return None
        case {"type": "structural_tag"}:
            return {"structural_tag": value}
        case {"type": "json_object", "schema": dict(schema)}:  # as other servers have it
            return {"json": schema}
        case {"type": "json_object"}:
            if value.get("schema") is not None:
                raise InvalidRequestError("response_format", "response_format.schema must be a JSON schema")
            return {"json_object": True}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return {"json": schema}
        case {"type": "json_schema"}:
            raise InvalidRequestError("response_format", "response_format.json_schema.schema must be a JSON schema")
    raise InvalidRequestError(
        "response_format", f"response_format must be an object whose type is one of {', '.join(_TYPES)}"
    )
