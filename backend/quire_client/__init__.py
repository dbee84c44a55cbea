"""A client of Quire's models behind tritonserver's gRPC, for programs and for the other parts of Quire.

    from quire_client import Client

    with Client("localhost:8001") as client:
        for chunk in client.stream("demo", [{"role": "user", "content": "Explain gravity."}], max_tokens=64):
            print(chunk.text, end="", flush=True)

It needs the packages of the extra `server` or `openai` and nothing of the engine. The schemas and the table of symptoms
need msgspec alone.
"""

from typing import TYPE_CHECKING, Any

from quire_client.ended import EndedAnswer, EndedRequest
from quire_client.snapshot import AdapterInfo, Snapshot

if TYPE_CHECKING:
    from quire_client.client import AsyncClient, Chunk, Client, Scaled
    from quire_client.errors import (
        Cancelled,
        ClientError,
        DeadlineExceeded,
        Disconnected,
        InvalidArgument,
        NotFound,
        Unavailable,
    )
    from quire_client.messages import Prompt
    from quire_client.pooling import Pooled

__all__ = [
    "AdapterInfo", "AsyncClient", "Cancelled", "Chunk", "Client", "ClientError", "DeadlineExceeded", "Disconnected",
    "EndedAnswer", "EndedRequest", "InvalidArgument", "NotFound", "Pooled", "Prompt", "Scaled", "Snapshot",
    "Unavailable",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import on first use: a reader of the schemas or the symptoms does without gRPC."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from quire_client import client, errors

    return getattr(errors if hasattr(errors, name) else client, name)
