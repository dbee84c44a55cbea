"""StatusPage: shared memory in which a model's stub shows its state to the `quire serve` that started it.

A page of memory in a file of the run's own directory, mapped by the stub and read by `quire serve`. It can be read when
the stub hangs, does not involve tritonserver, and needs no descriptor once it is mapped.

::

    bytes 0        8       16       24            32      40           48             56
          │ version │ beats │ state │ num_in_flight │ sending │ text_bytes │ asked_to_end │ text: JSON │   int64 each

* `version` is odd while the text is being written: a reader then reads it again.
* `beats` counts turns of the event loop, one every `BEAT_SECONDS`.
* `state` is one of `StubState`.
* `num_in_flight` counts the requests whose last response was not sent yet: the server never ends those of a stub that
  dies.
* `sending` is 0, or the number of the response that the send thread is handing to the server.
* `asked_to_end` is 0, or 1 once `quire serve` wants the stub to end its engine: the stub only reads it.

A stub that ends by itself removes its page; one that is killed leaves it.
"""

import contextlib
import enum
import json
import logging
import mmap
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quire_engine.system.process_state import process_stat

logger = logging.getLogger(__name__)

BEAT_SECONDS = 0.25
_RUN_VARIABLE = "QUIRE_RUN_ID"
_NUM_BYTES = 8192
_TEXT_START = 56
_VERSION, _BEATS, _STATE, _IN_FLIGHT, _SENDING, _TEXT_BYTES, _ASKED_TO_END = range(7)
_MOST_READS = 10
_NAME = re.compile(r"stub-(\d+)-(\d+)\.status")


class StubState(enum.IntEnum):
    """State of a model's engine."""

    UP = 1
    DOWN = 2
    """It died, and is being started again."""
    DEAD = 3
    """It died, and is not started again."""
    ENDING = 4
    """The model is being unloaded."""
    RETIRED = 5
    """`quire serve` has asked the stub to end its engine and remove its metrics; it waits for the server to end it."""


class StatusPage:
    """The stub's side of the page. The event loop's thread writes it, except `sending`, which the send thread writes,
    and `in_flight`, which is written under the lock of the live requests.

    Args:
        folder: where the file is made.
        model: the model's name.
        version: its version.
        instance: the name of this instance.
        num_instances: how many are loaded together.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, folder: Path, *, model: str, version: str, instance: str, num_instances: int = 1) -> None:
        own = process_stat(os.getpid())
        assert own is not None, "a process can see itself"
        self._path = folder / _file_name(os.getpid(), own.start_time)
        self._name = {"model": model, "version": version, "instance": instance, "num_instances": num_instances}
        self._reason: str | None = None
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, _NUM_BYTES)  # or writing to it on a full disk would be a SIGBUS later
            self._map = mmap.mmap(descriptor, _NUM_BYTES)
        except OSError:
            self._path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        self._words = memoryview(self._map)[:_TEXT_START].cast("q")
        self.beat(StubState.UP, "")

    @classmethod
    def of_run(cls, *, model: str, version: str, instance: str, num_instances: int = 1) -> "StatusPage | None":
        """A page in the directory of the `quire serve` that started this process; None if none did."""
        folder = run_folder()
        if folder is None:
            return None
        try:
            return cls(folder, model=model, version=version, instance=instance, num_instances=num_instances)
        except OSError as error:
            logger.warning("quire serve will not see how this model is: %s", error)
            return None

    def beat(self, state: StubState, reason: str) -> None:
        """Count a turn of the loop, and show the state.

        Args:
            state: the engine's.
            reason: why the state is not `UP`, or which of several engines is down meanwhile; empty: all is well.
        """
        if reason != self._reason:
            self._reason = reason
            self._write_text(reason)
        self._words[_STATE] = state
        self._words[_BEATS] += 1

    @property
    def is_asked_to_end(self) -> bool:
        """Whether `quire serve` wants the engine to be ended."""
        return self._words[_ASKED_TO_END] != 0

    def in_flight(self, number: int) -> None:
        """Set the number of live requests."""
        self._words[_IN_FLIGHT] = number

    def sending(self, number: int) -> None:
        """The send thread begins to send a response; 0: it has sent it."""
        self._words[_SENDING] = number

    def close(self) -> None:
        """Remove the page, as the stub ends. It must not be used afterwards. Idempotent."""
        self._path.unlink(missing_ok=True)

    def _write_text(self, reason: str) -> None:
        room = _NUM_BYTES - _TEXT_START - len(json.dumps(self._name)) - 100
        text = json.dumps({**self._name, "reason": reason[: room // 12]}).encode()  # a character takes 12 bytes at most
        self._words[_VERSION] += 1
        self._words[_TEXT_BYTES] = len(text)
        self._map[_TEXT_START : _TEXT_START + len(text)] = text
        self._words[_VERSION] += 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StubStatus:
    """Contents of a page at one moment."""

    pid: int
    start_time: int
    """Of the process, in clock ticks since the machine started."""
    model: str
    version: str
    instance: str
    num_instances: int
    """How many instances are loaded together."""
    beats: int
    state: StubState
    reason: str
    """Why the state is not `UP`, or which of several engines is down meanwhile; empty: all is well."""
    num_in_flight: int
    sending: int

    @property
    def stub(self) -> tuple[int, int]:
        """The process's id and start time, which together identify it."""
        return self.pid, self.start_time

    @property
    def problem(self) -> str:
        """The reason, and whose it is."""
        return f"model {self.model!r} version {self.version}: {self.reason}"

    @property
    def is_leaving(self) -> bool:
        """Whether it no longer takes requests, for good."""
        return self.state in (StubState.ENDING, StubState.RETIRED)

    @property
    def file_name(self) -> str:
        """Where it was read from."""
        return _file_name(self.pid, self.start_time)


def run_folder() -> Path | None:
    """The temporary folder of the `quire serve` that started this process; None if none did."""
    return Path(tempfile.gettempdir()) if os.environ.get(_RUN_VARIABLE) else None


def read_status_pages(folder: Path) -> list[StubStatus]:
    """All pages in a folder, of live stubs and of killed ones, in the order of their start.

    Raises:
        OSError: they cannot be read, for example because this process has no descriptor left.
    """
    return sorted(_read_all(folder), key=lambda status: (status.start_time, status.pid))


def ask_to_end(folder: Path, status: StubStatus) -> None:
    """Ask a stub that the server no longer uses to end its engine and remove its metrics; its state shows when it has.

    Raises:
        OSError: its page cannot be written to.
    """
    with contextlib.suppress(FileNotFoundError):  # it has ended meanwhile
        descriptor = os.open(folder / status.file_name, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(descriptor, (1).to_bytes(8, sys.byteorder), 8 * _ASKED_TO_END)
        finally:
            os.close(descriptor)


def _read_all(folder: Path) -> Iterator[StubStatus]:
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:  # the run may be cleaning up
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            if match and (status := _read(Path(entry.path), int(match[1]), int(match[2]))):
                yield status


def _read(path: Path, pid: int, start_time: int) -> StubStatus | None:
    """None while it is being created, or when it is gone."""
    for _ in range(_MOST_READS):
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        if len(data) < _NUM_BYTES:
            return None
        words = memoryview(data)[:_TEXT_START].cast("q")
        text = data[_TEXT_START : _TEXT_START + words[_TEXT_BYTES]]
        try:
            names = json.loads(text)
            state = StubState(words[_STATE])
        except ValueError:
            continue  # read while it was being written
        if words[_VERSION] % 2 == 0:
            return StubStatus(
                pid=pid, start_time=start_time, model=names["model"], version=names["version"],
                instance=names["instance"], reason=names["reason"], beats=words[_BEATS], state=state,
                num_in_flight=words[_IN_FLIGHT], sending=words[_SENDING],
                num_instances=names["num_instances"],
            )  # fmt: skip
    return None


def _file_name(pid: int, start_time: int) -> str:
    return f"stub-{pid}-{start_time}.status"
