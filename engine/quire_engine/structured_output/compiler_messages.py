"""Messages between the engine core and the grammar compiler's process.

::

    stdin   CompilerArguments as a line of JSON, then frames: StartJob, KillJob …
    stdout  frames: CompilerReady once,          then JobEnded … in any order

    frame   | 4 bytes: length, little endian | msgpack |
"""

import struct
from collections.abc import Sequence

import msgspec

_HEADER = struct.Struct("<I")


class CompilerArguments(msgspec.Struct):
    """What the compiler must know of the model."""

    tokenizer_path: str
    vocab_size: int
    """Size of the logits, padding included."""
    stop_token_ids: list[int]
    """End-of-sequence ids; empty: the tokenizer's own."""
    niceness: int = 0
    """While it starts and waits; its jobs are always nice."""

    @classmethod
    def for_model(cls, tokenizer_path: str, vocab_size: int, eos_token_ids: Sequence[int]) -> "CompilerArguments":
        """From a checkpoint's configuration."""
        return cls(tokenizer_path, vocab_size, [i for i in eos_token_ids if i < vocab_size])


class CompilerReady(msgspec.Struct, array_like=True):
    """The vocabulary in the library's own form, or why there is none."""

    tokenizer_info: str = ""
    error: str | None = None


class CompileRequest(msgspec.Struct, array_like=True):
    """One grammar to compile: `kind` and `text` are those of StructuredOutputsParams."""

    job_id: int
    kind: str
    text: str
    any_whitespace: bool = True


class CompileResult(msgspec.Struct, array_like=True):
    """The compiled grammar in the library's own form, or why there is none."""

    job_id: int
    grammar: str = ""
    error: str | None = None
    cacheable: bool = True
    """False if another try might have another result (a timeout on a busy machine)."""
    is_our_fault: bool = False


class StartJob(msgspec.Struct, array_like=True, tag=True):
    """Fork a process that compiles one grammar."""

    number: int
    """Each start of a grammar has another one."""
    cpu_seconds: float | None
    """The process is ended by SIGPROF after this much CPU time."""
    request: bytes
    """`CompileRequest` in msgpack."""


class KillJob(msgspec.Struct, array_like=True, tag=True):
    """The job's result is not needed. It may have ended already."""

    number: int


class JobEnded(msgspec.Struct, array_like=True):
    """A process has ended, by itself or not."""

    number: int
    status: int
    """Wait status, as of `os.waitpid`."""
    result: bytes
    """`CompileResult` in msgpack, if the status is 0."""


def to_frame(message: msgspec.Struct) -> bytes:
    """A message behind its length."""
    payload = msgspec.msgpack.encode(message)
    return _HEADER.pack(len(payload)) + payload


class FrameReader:
    """Assembles frames from the pieces that are read from a pipe."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add a piece. Returns the payloads of the messages that it completes."""
        self._received += data
        payloads, begin = [], 0
        while len(self._received) >= begin + _HEADER.size:
            (length,) = _HEADER.unpack_from(self._received, begin)
            end = begin + _HEADER.size + length
            if len(self._received) < end:
                break
            payloads.append(bytes(memoryview(self._received)[begin + _HEADER.size : end]))
            begin = end
        del self._received[:begin]
        return payloads
