"""The repository index: which models tritonserver has, asked over HTTP."""

import http.client
import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class IndexedModel:
    """One version of a model, or a model without versions."""

    name: str
    version: str = ""
    state: str = ""
    """`READY`, `LOADING`, `UNLOADING` or `UNAVAILABLE`; empty when it was never loaded."""
    reason: str = ""
    """Why it is unavailable: `unloaded`, or why loading it failed."""


def ask_index(connection: http.client.HTTPConnection) -> list[IndexedModel] | None:
    """All models of the repository; None if the server refuses to answer, for example because that API is restricted.

    Raises:
        OSError, http.client.HTTPException: there is no answer.
    """
    connection.request("POST", "/v2/repository/index")
    answer = connection.getresponse().read()
    try:
        return [
            IndexedModel(*(" ".join(str(entry.get(key, "")).split()) for key in ("name", "version", "state", "reason")))
            for entry in json.loads(answer)
        ]
    except (ValueError, TypeError, AttributeError):
        return None
