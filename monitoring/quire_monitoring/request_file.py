"""RequestFile: what of a list of ended requests survives its server, one JSON line for each event.

::

    log     whose it is; always the first line
    begun   a request is live, or more of it is known
    ended   an entry of the ring
    gone    a request is no longer live: its client has the last response
    died    by `quire serve`: why the server ended; what is live then was lost

A line is in the page cache as soon as it is written.
"""

import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from quire_engine.sampling_params import NO_OPTIONS, RequestOptions
from quire_engine.snapshot import EndedRequest
from quire_engine.system.process_state import is_alive, process_stat

FILE_SUFFIX = ".requests"
"""Of a `RequestFile`; `quire serve` removes everything else of a server that died."""
_FILE_NAME = re.compile(rf"(\d+)-(\d+){re.escape(FILE_SUFFIX)}")


class Header(msgspec.Struct, tag="log"):
    """Whose log it is."""

    owner: list[str]
    ring: str
    since_unix: float


class Begun(msgspec.Struct, tag="begun", omit_defaults=True):
    """A request is live, or more of it is known."""

    key: int
    time_unix: float
    id: str = ""
    options: RequestOptions = NO_OPTIONS
    num_prompt_tokens: int = 0
    missed: bool = False
    """Whether it was counted as a miss while it was live."""


class Ended(msgspec.Struct, tag="ended"):
    """An entry of the ring."""

    request: EndedRequest


class Gone(msgspec.Struct, tag="gone"):
    """A request is no longer live."""

    key: int


class Died(msgspec.Struct, tag="died"):
    """Why the server ended."""

    why: str
    time_unix: float


Line = Header | Begun | Ended | Gone | Died


class RequestFile:
    """The file of one log.

    Args:
        folder: of the run of `quire serve`.
        header: the first line.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, folder: Path, header: Header) -> None:
        own = process_stat(os.getpid())
        assert own is not None, "a process can see itself"
        self._path = folder / f"{os.getpid()}-{own.start_time}{FILE_SUFFIX}"
        self._header = header
        self._parent = os.getppid()
        self._descriptor = -1
        self._encode = msgspec.json.Encoder().encode
        self.num_lines = 0

    def rewrite(self, lines: Sequence[Line]) -> None:
        """Begin anew with these lines."""
        fresh = self._path.with_suffix(".new")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        before, self._descriptor, self.num_lines = self._descriptor, descriptor, 0
        if before >= 0:
            os.close(before)
        os.write(descriptor, b"".join(map(self._line, (self._header, *lines))))
        self.num_lines = len(lines)
        fresh.rename(self._path)

    def append(self, line: Line) -> None:
        """Write one line."""
        os.write(self._descriptor, self._line(line))
        self.num_lines += 1

    def _line(self, line: Line) -> bytes:
        return self._encode(line) + b"\n"

    def remove(self) -> None:
        """The log has ended with its model, unless it ends because the server has died."""
        os.close(self._descriptor)
        if os.getppid() == self._parent:
            self._path.unlink(missing_ok=True)


def note_death(folder: Path, why: str) -> None:
    """Say in the files that a server left why it died, for the logs that go on with them.

    Args:
        folder: of the run of `quire serve`, in which no server is alive.
        why: in words.
    """
    line = msgspec.json.encode(Died(why=why, time_unix=time.time()))
    for path in left_by_the_dead(folder):
        with contextlib.suppress(OSError), path.open("ab") as file:  # such as a full disk: they lack the reason
            file.write(b"\n" + line + b"\n")  # its last line may have been cut short


def left_by_the_dead(folder: Path) -> Iterator[Path]:
    """The files in a folder whose processes have ended."""
    for path in folder.glob(f"*{FILE_SUFFIX}"):
        match = _FILE_NAME.fullmatch(path.name)
        if match and not is_alive(int(match[1]), int(match[2])):
            yield path


def read_lines(path: Path) -> list[Any]:
    """The lines of a file, the header first; none if it has no header. A malformed line is left out."""
    decode = msgspec.json.Decoder(Line).decode
    lines: list[Line] = []
    for text in path.read_bytes().splitlines():
        with contextlib.suppress(msgspec.DecodeError):
            lines.append(decode(text))
    return lines if lines and isinstance(lines[0], Header) else []
