"""What a load is sent to: the contract of every endpoint, and how a request can fail there."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from quire_load.datasets import SampleRequest


@dataclass(frozen=True, slots=True)
class Chunk:
    """One response of a stream."""

    num_new_tokens: int
    """In it. Of OpenAI's streams, 1 for a response with text: only the end says how many there were."""
    num_input_tokens: int | None = None
    """Of the prompt, as the server counts; once it says so."""
    num_output_tokens: int | None = None
    """Of all that was generated, likewise."""
    is_vector: bool = False
    """Whether it is the answer to a request that generates no tokens."""


class EndpointError(Exception):
    """A request has failed.

    Attributes:
        kind: invalid, rejected, timeout, disconnected or error.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Endpoint(Protocol):
    """A model somewhere. Made and used in one event loop."""

    def generate(self, request: SampleRequest) -> AsyncGenerator[Chunk, None]:
        """Stream one answer. Closing the iterator early cancels the request.

        Raises:
            EndpointError: it has failed.
        """

    async def close(self) -> None:
        """Close the connections."""


def kind_of_status(status: int) -> str:
    """The kind of error that a status of HTTP is."""
    if status in (429, 503):
        return "rejected"
    if status in (408, 504):
        return "timeout"
    return "invalid" if 400 <= status < 500 else "error"
