"""What a request can fail with, by the status that the server ends it with."""

import re

import grpc

_TRANSPORT = re.compile(r"failed to connect|Socket closed|Connection (reset|refused)|ipv[46]:|DNS|GOAWAY|Broken pipe")
"""In what gRPC itself says of a server that is away; the server's own UNAVAILABLE is a full queue or an engine that is
down."""

_UNKNOWN_MODEL = re.compile(r"Request for unknown model: .*(not found|no available versions)")
"""tritonserver ends such a request with INVALID_ARGUMENT."""


class ClientError(Exception):
    """A request has failed; the text is the server's. Of a status that has no class of its own: INTERNAL and others."""


class InvalidArgument(ClientError):
    """The model rejects what the request asks for."""


class NotFound(ClientError):
    """There is no such model or version, or the model has no such adapter."""

    @property
    def is_unknown_model(self) -> bool:
        """Whether the server has no such model, or is still loading it."""
        return bool(_UNKNOWN_MODEL.match(str(self)))


class Unavailable(ClientError):
    """The request may be sent again later: the queue is full, or the engine is down."""


class Disconnected(Unavailable):
    """There is no server, or the connection to it was lost."""


class Cancelled(ClientError):
    """The request was cancelled: by an operator, or as the server ends."""


class DeadlineExceeded(ClientError):
    """The request's deadline, or the timeout of the call, has passed."""


_KINDS: dict[grpc.StatusCode, type[ClientError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
}


def error_of(error: grpc.aio.AioRpcError) -> ClientError:
    """What a call has failed with."""
    return error_with(error.code(), error.details() or error.code().name)


def error_with(code: grpc.StatusCode, text: str) -> ClientError:
    """The error of this status and text."""
    kind = _KINDS.get(code, ClientError)
    if kind is Unavailable and _TRANSPORT.search(text):
        kind = Disconnected
    elif _UNKNOWN_MODEL.match(text):
        kind = NotFound
    return kind(text)
