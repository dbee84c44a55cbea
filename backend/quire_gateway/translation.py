"""Bodies of other APIs → a chat, with a field's own name in errors, and the chat's name to the model."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from quire_gateway.chat import chat_request
from quire_gateway.errors import InvalidRequestError
from quire_gateway.fields import Fields


def translated(fields: Fields, values: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The chat that a body of another API asks for, as arguments of `ChatRequest`.

    Args:
        fields: what is left of the body; it means the same in a chat.
        values: the fields of the chat that were made of the others.
        names: a chat's name of a field → the other API's.

    Raises:
        InvalidRequestError: a field is wrong, or has a chat's name.
    """
    for name, other in names.items():
        if name in fields.rest():
            raise InvalidRequestError(name, f"{name} is a chat's name: give {other}")
    fields.check_absent({"echo": (False,)})
    try:
        chat = chat_request(Fields(values | fields.rest()))
    except InvalidRequestError as error:
        param, message = names.get(error.param or "", error.param), str(error)
        if param != error.param and message.startswith(str(error.param)):
            message = f"{param}{message[len(str(error.param)) :]}"
        raise InvalidRequestError(param, message) from None
    renamed = {name: names.get(ours, ours) for name, ours in ({**names} | chat.renamed).items()}
    asked = {item.name: getattr(chat, item.name) for item in dataclasses.fields(chat)}
    return asked | {"said": fields.said, "renamed": renamed}
