"""What a front and an engine on another host say to each other: frames, of which the first says what they are.

::

    engine                                             front
    JOIN      Join                      ──────►
                                        ◄──────        ACCEPTED  Accepted    or  REJECTED  Rejected
    READY     EngineCoreReady           ──────►        once it can take requests
                                        ◄──────        a RequestType, id, payload     as to any engine core
    OUTPUTS   EngineCoreOutputs         ──────►        as of any engine core
    GONE      Gone                      ──────►        the engine has died, and this session ends
    LEAVING                             ──────►        its host takes the engine away; the front does not wait for it
    BEAT      Beat                      ◄─────►        each second; of the front, without content
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
"""After so many own turns without a message, the other side counts as gone. Turns and not seconds: a side that was held
up itself has not listened meanwhile."""


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
    """The request of an engine to be a replica."""

    rank: int
    host: str
    """Its host's name, for operators."""
    description: dict[str, str] = {}
    """What has to be equal on both sides: `describe_engine`."""


class Accepted(msgspec.Struct):
    """It is one, once it is ready."""

    num_blocks: int
    """Of its KV cache: each replica has as many as the others, so that it holds what any of them does."""
    kv_namespace: str = ""
    """What its KV blocks have to depend on, in JSON, if other replicas load them; empty: none does."""


class Rejected(msgspec.Struct):
    """It is none."""

    reason: str
    is_final: bool
    """Whether it is no use to try again."""


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
    """Of its live requests those that it had begun to work for, by the numbers of their messages in this session."""


def dialect() -> str:
    """The version, and what stands for the form of all messages: only equal ones understand each other."""
    try:
        number = version("quire")
    except PackageNotFoundError:
        number = "unknown"
    types: list[Any] = [
        Join, Accepted, Rejected, Beat, Gone, EngineCoreReady, EngineCoreRequest, EngineCoreOutputs, UtilityCall
    ]  # fmt: skip
    schemas = msgspec.json.schema_components(types)
    return f"{number} ({hashlib.sha256(json.dumps(schemas, sort_keys=True).encode()).hexdigest()[:12]})"
