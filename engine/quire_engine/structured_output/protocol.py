"""What the engine core and the grammar compiler's process say to each other over two pipes.

::

    stdin   CompilerArguments once, then CompileRequest, CancelRequest …
    stdout  CompilerReady once,     then CompileResult …          in any order, by job id

    frame   | 4 bytes: length, little endian | msgpack |
"""

import struct
from typing import IO

import msgspec

__all__ = [
    "CancelRequest",
    "CompileRequest",
    "CompileResult",
    "CompilerArguments",
    "CompilerReady",
    "read_frame",
    "to_frame",
]

_HEADER = struct.Struct("<I")


class CompilerArguments(msgspec.Struct, array_like=True):
    """What the compiler must know of the model."""

    tokenizer_path: str
    vocab_size: int
    """Of the logits, padding included."""
    stop_token_ids: list[int]
    """End-of-sequence ids; empty: the tokenizer's own."""


class CompilerReady(msgspec.Struct, array_like=True):
    """The vocabulary in the library's own form, or why there is none."""

    tokenizer_info: str = ""
    error: str | None = None


class CompileRequest(msgspec.Struct, array_like=True, tag=True):
    """One grammar to compile: `kind` and `text` are those of StructuredOutputsParams."""

    job_id: int
    kind: str
    text: str
    any_whitespace: bool = True


class CancelRequest(msgspec.Struct, array_like=True, tag=True):
    """Nobody waits for this job any more. It may have ended already."""

    job_id: int


class CompileResult(msgspec.Struct, array_like=True):
    """The compiled grammar in the library's own form, or why there is none."""

    job_id: int
    grammar: str = ""
    error: str | None = None
    cacheable: bool = True
    """False when another try might come out otherwise (a time-out on a busy machine)."""
    is_our_fault: bool = False


def to_frame(message: msgspec.Struct | bytes) -> bytes:
    """A message, or its msgpack, behind its length."""
    payload = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
    return _HEADER.pack(len(payload)) + payload


def read_frame(stream: IO[bytes]) -> bytes | None:
    """The next message's msgpack; None at the end of the stream, also one that comes within a message."""
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    (length,) = _HEADER.unpack(header)
    payload = stream.read(length)
    return payload if len(payload) == length else None
