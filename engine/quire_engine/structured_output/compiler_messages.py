"""Messages between the engine core and the grammar compiler's process.

::

    stdin    CompilerArguments as a line of JSON
    control  a socket that keeps the boundaries of messages

             ◄── READY, with a file that holds the vocabulary; or an error, as text: the process cannot start
             ──► START with a file that holds a CompileRequest: its job writes the CompileResult into the same file
             ──► KILL: the result is not needed
             ◄── ENDED, once for each START

Both structs are msgpack. The files are in memory and have no name.
"""

import os
import struct
from collections.abc import Sequence

import msgspec

READY = b"ready"
START = struct.Struct("<qd")
"""Job id, and the CPU time in seconds after which SIGPROF ends the job; infinity: no limit."""
KILL = struct.Struct("<q")
"""Job id. The job may have ended already."""
ENDED = struct.Struct("<qi")
"""Job id and wait status, as of `os.waitpid`. The file holds a result if the status is 0."""
MAX_CONTROL_BYTES = 4096

COMPILE_SECONDS = 5.0
"""Wall-clock time that one grammar may take; usual schemas take milliseconds."""
OUT_OF_MEMORY = 2
"""Exit code of a job that reached its memory limit after it had compiled."""


class CompilerArguments(msgspec.Struct):
    """What the compiler must know of the model."""

    tokenizer_path: str
    vocab_size: int
    """Size of the logits, padding included."""
    stop_token_ids: list[int]
    """End-of-sequence ids, beside the tokenizer's own."""
    niceness: int = 0
    """While it starts and waits; its jobs are always nice."""

    @classmethod
    def for_model(cls, tokenizer_path: str, vocab_size: int, eos_token_ids: Sequence[int]) -> "CompilerArguments":
        """From a checkpoint's configuration."""
        return cls(tokenizer_path, vocab_size, [i for i in eos_token_ids if i < vocab_size])


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


def memory_file(content: bytes) -> int:
    """A descriptor of a new file in memory. The caller closes it."""
    descriptor = os.memfd_create("grammar")
    os.pwrite(descriptor, content, 0)
    return descriptor


def read_file(descriptor: int) -> bytes:
    """The whole file, wherever its position is, which the processes share."""
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
