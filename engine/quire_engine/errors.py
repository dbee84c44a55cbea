"""The errors a caller can meet. Each message names the parameter or file, what is wrong, and what would be right."""

__all__ = ["CheckpointError", "EngineDeadError", "EngineError", "RequestError"]


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
