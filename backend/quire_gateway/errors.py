"""What goes wrong, as OpenAI's error object: `{"error": {"message": …, "type": …, "param": …, "code": …}}`."""

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

UNAVAILABLE = 503
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    UNAVAILABLE: "server_error",
}
_MESSAGES_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    UNAVAILABLE: "overloaded_error",
    504: "timeout_error",
}
RETRY_AFTER_S = 5
"""Of a 503 that does not say when: a server that is started again takes about so long."""
_RETRY_AFTER = re.compile(r"try again in about (\d+(?:\.\d+)?) s")
"""How the engine says how long its queue is."""
_TOO_LONG = re.compile(
    r"\w+(?:\[\d+\])? (?:has|holds) ((?:more than )?\d+ (?:tokens|characters|messages|items)\b)"
    r".*(?:max_model_len=|takes at most )(\d+)"
)
"""How the engine says that a prompt does not fit."""
_LEADING_NAME = re.compile(r"(?:unknown sampling parameter )?['\"]?(\w+)")

_TASK = "task"
"""How the model's message begins that says what else it can do."""


class ApiError(Exception):
    """A request ends with an error.

    Attributes:
        status: HTTP's.
        param: the field of the body that is wrong, if one is.
        code: what programs compare, for kinds of errors that OpenAI names.
        headers: that the answer has besides.
    """

    headers: Mapping[str, str] = {}

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """The JSON that the client gets."""
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class InvalidRequestError(ApiError):
    """A field of the body is wrong."""

    def __init__(self, param: str | None, message: str) -> None:
        super().__init__(400, message, param=param)


class ModelNotFoundError(ApiError):
    """There is no model of that name."""

    def __init__(self, model: str) -> None:
        super().__init__(404, f"The model {model[:200]!r} does not exist", param="model", code="model_not_found")


class UnavailableError(ApiError):
    """The request may succeed later, or elsewhere."""

    def __init__(self, message: str) -> None:
        super().__init__(UNAVAILABLE, message, code="service_unavailable")
        match = _RETRY_AFTER.search(message)
        self.headers = {"retry-after": str(math.ceil(float(match[1])) if match else RETRY_AFTER_S)}


def of_model(status: int, message: str, said: Collection[str], renamed: Mapping[str, str]) -> ApiError:
    """The error that a model's own message becomes: the model begins it with the name of the parameter.

    Args:
        status: HTTP's.
        message: the model's.
        said: fields of the body.
        renamed: the model's name → the field that it comes from, where they differ.
    """
    if status == UNAVAILABLE:
        return UnavailableError(message)
    leading = _LEADING_NAME.match(message)
    name = leading[1] if leading else ""
    param = renamed.get(name, name)
    if match := _TOO_LONG.match(message):
        # OpenAI's words and code: its clients, and programs that choose another model then, look for them.
        message = (
            f"This model's maximum context length is {match[2]} tokens. However, your {param} resulted in {match[1]}. "
            f"Please reduce the length of the {param}."
        )
        return ApiError(status, message, param=param, code="context_length_exceeded")
    if name == _TASK and _TASK not in said:  # such as embeddings, of a model that has none
        return ApiError(status, message, param="model")
    if param not in said:
        return ApiError(status, message)
    if param != name and leading:
        message = message[: leading.start(1)] + param + message[leading.end(1) :]
    return ApiError(status, message, param=param)


def messages_error(error: ApiError, request_id: str) -> dict[str, Any]:
    """The JSON that a client of Anthropic's API gets.

    Args:
        error: what went wrong.
        request_id: the request's name.
    """
    kind = _MESSAGES_KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}, "request_id": request_id}
