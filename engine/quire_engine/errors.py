"""The errors a caller can meet. Each message names the parameter or file, what is wrong, and what would be right."""

__all__ = [
    "AbortedError",
    "CheckpointError",
    "DeadlineExceededError",
    "EngineDeadError",
    "EngineError",
    "EngineSleepingError",
    "EngineUnavailableError",
    "RequestError",
]


class EngineError(Exception):
    """Base of everything the engine raises on purpose."""


class RequestError(EngineError, ValueError):
    """One request is invalid. Nobody else is affected; the same request will fail again.

    Attributes:
        parameter: the name of the offending parameter, as the caller spells it.
    """

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(message)
        self.parameter = parameter


class CheckpointError(EngineError, ValueError):
    """A model folder cannot be served: a file is missing, truncated, or of an architecture that is not known."""


class EngineDeadError(EngineError):
    """The engine process is gone. The request in hand did not finish."""


class AbortedError(EngineError):
    """A step failed on this rank only because another rank did, in this step or in another one."""


class EngineUnavailableError(EngineError):
    """The engine had no place for the request; the same request can succeed later.

    Attributes:
        retry_after_seconds: an estimate of when it is worth trying again; None when that is for somebody to decide.
    """

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class EngineSleepingError(EngineUnavailableError):
    """The engine has given its memory back and takes no requests until it is woken up."""


class DeadlineExceededError(EngineError):
    """The request's own deadline passed before it was finished."""
