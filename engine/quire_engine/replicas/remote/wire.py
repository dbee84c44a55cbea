"""The messages between a front and an engine on another host: frames, the first of which is the type.

::

    engine                                             front
    JOIN      Join                      ──────►
                                        ◄──────        ACCEPTED  Accepted    or  REJECTED  Rejected
    READY     EngineCoreReady           ──────►        once it can take requests
                                        ◄──────        a RequestType, id, payload     as to any engine core
    OUTPUTS   EngineCoreOutputs         ──────►        as of any engine core
    GONE      Gone                      ──────►        the engine has died, and this session ends
    LEAVING                             ──────►        its host takes the engine away; the front does not wait for it
    BEAT      Beat                      ◄─────►        each second; without content from the front
"""

import enum
import hashlib
import json
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from quire_engine.messages import EngineCoreOutputs, EngineCoreReady, EngineCoreRequest, UtilityCall

BEAT_SECONDS = 1.0
MAX_MISSED_BEATS = 5
"""Own turns without a message after which the other side counts as lost. Turns and not seconds: a side that was stalled
itself has not received anything meanwhile."""


class MessageType(enum.Enum):
    """First frame of a message, besides those of `RequestType`."""

    JOIN = b"join"
    ACCEPTED = b"accepted"
    REJECTED = b"refused"  # the word of all versions: an older engine has to understand that it is rejected
    READY = b"ready"
    OUTPUTS = b"outputs"
    GONE = b"gone"
    LEAVING = b"leaving"
    BEAT = b"beat"


class Join(msgspec.Struct):
    """An engine requests to be a replica."""

    rank: int
    host: str
    """Its host's name, for operators."""
    description: dict[str, str] = {}
    """`describe_engine`: has to be equal on both sides."""


class Accepted(msgspec.Struct):
    """The engine is a replica, once it is ready."""

    num_blocks: int
    """Size of its KV cache: each replica has as many blocks, so that any of them can hold a request."""
    kv_namespace: str = ""
    """What its KV blocks have to depend on, in JSON, if other replicas load them; empty: none does."""


class Rejected(msgspec.Struct):
    """The engine is no replica."""

    reason: str
    is_final: bool
    """Whether a later attempt would fail as well."""


class Beat(msgspec.Struct):
    """The engine's host is there."""

    clock: float
    """Its `time.monotonic`."""
    num_messages_waiting: int = 0
    """Messages that its engine core has not received yet."""


class Gone(msgspec.Struct):
    """The engine has died."""

    reason: str
    begun: list[int] = []
    """The live requests that it had begun to compute, by the numbers of their messages in this session."""


def dialect() -> str:
    """The version, and a digest of the schemas of all messages: both sides need the same."""
    try:
        number = version("quire")
    except PackageNotFoundError:
        number = "unknown"
    types: list[Any] = [
        Join, Accepted, Rejected, Beat, Gone, EngineCoreReady, EngineCoreRequest, EngineCoreOutputs, UtilityCall
    ]  # fmt: skip
    schemas = msgspec.json.schema_components(types)
    return f"{number} ({hashlib.sha256(json.dumps(schemas, sort_keys=True).encode()).hexdigest()[:12]})"
