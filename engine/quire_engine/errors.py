"""The errors that callers see. Each message names the parameter or file, what is wrong, and what is allowed."""

import json
from collections.abc import Collection
from difflib import get_close_matches
from typing import Any

import msgspec

MAX_QUOTED = 200


def quote(value: object) -> str:
    """A client's value for a message: as JSON, cut to a reasonable length."""
    try:
        text = repr(value) if isinstance(value, str | float) else json.dumps(value, ensure_ascii=False, default=_plain)
    except (ValueError, TypeError, RecursionError):  # no JSON, or a number of thousands of digits
        return f"of a kind that cannot be shown ({json_type(value)})"
    return cut(text)


def cut(text: str) -> str:
    """Foreign text, cut to the length that a message may quote."""
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}… ({len(text)} characters)"


def one_line(error: BaseException) -> str:
    """The text of an error of foreign code, for a message."""
    return cut(" ".join(str(error).split()))


def did_you_mean(name: str, known: Collection[str], *, else_all: bool = False) -> str:
    """The end of a message about an unknown name: the known one that is nearest, if one is near. Else nothing, or
    `else_all` of them."""
    if near := get_close_matches(name[:MAX_QUOTED], known, n=1):
        return f"; did you mean {near[0]!r}?"
    return f"; known are {', '.join(sorted(known))}" if else_all else ""


def is_failure(error: BaseException) -> bool:
    """Whether an error of foreign code is a failure, and not a request to end. A panic of a library in Rust is one,
    although it is no Exception.
    """
    return isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime"


def _plain(value: object) -> Any:
    """A struct as the JSON that it was read from."""
    return repr(value) if not isinstance(value, msgspec.Struct) else {
        name: item for name, item in msgspec.structs.asdict(value).items() if item is not None
    }  # fmt: skip


def json_type(value: object) -> str:
    """JSON's name of a value's type, with its article."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "a boolean"
    names = {str: "a string", int | float: "a number", list | tuple: "an array", dict: "an object"}
    return next((name for kind, name in names.items() if isinstance(value, kind)), "something else")


class EngineError(Exception):
    """Base of everything the engine raises on purpose."""


class RequestError(EngineError, ValueError):
    """One request is invalid. No other is affected; the same request will fail again.

    Attributes:
        parameter: the name of the offending parameter, as the caller spells it.
    """

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(message)
        self.parameter = parameter

    @classmethod
    def of(cls, parameter: str, predicate: str) -> "RequestError":
        """The error whose message is a sentence about the parameter: its name and a predicate, such as "is …"."""
        return cls(parameter, f"{parameter} {predicate}")

    @classmethod
    def because(cls, parameter: str, reason: str) -> "RequestError":
        """The error whose message is the parameter's name, a colon, and a reason that is a sentence of its own."""
        return cls(parameter, f"{parameter}: {reason}")


class CheckpointError(EngineError, ValueError):
    """A model folder cannot be served: a file is missing, truncated, or of an architecture that is not known."""


class EngineDeadError(EngineError):
    """The engine process has died. The request did not finish."""


class AbortedError(EngineError):
    """A step failed on this rank only because another rank did, in this step or in another one."""


class EngineUnavailableError(EngineError):
    """The engine had no capacity for the request; the same request may succeed later.

    Attributes:
        retry_after_seconds: an estimate of when to try again; None if it is not known.
    """

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class EngineSleepingError(EngineUnavailableError):
    """The engine has freed its memory, and rejects requests until it is woken up."""


class OperationError(EngineError):
    """What an operator asked for is not possible, or not now. The engine goes on as before."""


class ScalingError(OperationError):
    """The requested number of replicas is not possible, or not now. Nothing has changed."""


class DeadlineExceededError(EngineError):
    """The request's own deadline passed before it was finished."""


class UnknownAdapterError(RequestError):
    """A request names a LoRA adapter that is not registered, or the engine serves none."""
