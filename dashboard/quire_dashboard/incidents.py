"""IncidentLog: one row for each time that users were affected, kept over restarts of the page and of the server.

::

    $XDG_STATE_HOME/quire/incidents/127.0.0.1_8002.jsonl      one file per server, by its /metrics
    {"id": "1790000000-queue", "model": "tinypy", "cause": "queue", "began": …, "over": null, …}
    {"id": "1790000000-queue", …, "over": 1790000042.0, …}    the last line of an id is its row

The first dashboard that watches a server writes its file, and holds a lock on it; any other one, and `quire top`, reads
it. Rows come from the verdicts that the overview shows.
"""

import fcntl
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec.structs import replace
from quire_client import EndedRequest
from quire_client.symptoms import SYMPTOMS, Level

from quire_dashboard.ended_requests import why
from quire_dashboard.findings import Finding
from quire_dashboard.health import Health
from quire_dashboard.words import printable

MOST_ROWS = 200
MOST_HURT = 20
"""Requests that a row links to."""
_MOST_BYTES = 1 << 20
_LONGEST = 600
_SAME_S = 10.0
"""A cause that comes back within so long is the same incident."""
_OLD_S = 90 * 86400.0
"""Files of servers that have had no incident for so long are removed."""
_LATEST = 1e11
"""Seconds since the epoch that a row may hold, the year 5138: `datetime` ends with 9999."""
_LOOK_S = 10.0
"""Between two looks at the requests that were hurt, while nothing else changes."""
_NOT_HURT = ("invalid", "client left", "cancelled")
"""What clients and operators have ended themselves."""
_UNKNOWN = "slo"
"""The symptom while no cause is known."""


class Hurt(msgspec.Struct, frozen=True, kw_only=True):
    """A request that missed its objectives or failed."""

    id: str = ""
    label: str = ""
    why: str = ""
    trace_id: str = ""


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """One row."""

    id: str = ""
    model: str = ""
    """Empty: all of the server."""
    cause: str = ""
    """The finding's, such as `queue`; `slo` while none is known."""
    title: str = ""
    detail: str = ""
    began: float = 0.0
    """Seconds since the epoch."""
    over: float | None = None
    """None: it goes on."""
    num_hurt: int = 0
    hurt: tuple[Hurt, ...] = ()
    """The first of them that the model has listed."""
    alert: str = ""
    """The one that fires if it goes on."""


def family(cause: str) -> str:
    """What several causes that follow each other in one incident have in common."""
    symptom = SYMPTOMS.get(cause)  # None of a row that another version has written
    return symptom.family if symptom and symptom.family else cause


def incidents_file(metrics: str) -> Path | None:
    """Where the incidents of a server are kept, by HOST:PORT of its /metrics; None: there is no home folder."""
    try:
        base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    except RuntimeError:
        return None
    return base / "quire" / "incidents" / f"{re.sub(r'[^A-Za-z0-9.-]', '_', metrics)}.jsonl"


def read_incidents(path: Path | None) -> dict[str, Incident]:
    """The rows of a file by their id, in the order of their begin; none if there is no file. A malformed line is left
    out."""
    found: dict[str, Incident] = {}
    try:
        lines = path.read_bytes().splitlines() if path is not None else []
    except OSError:
        return found
    for line in lines:
        with suppress(ValueError, RecursionError):
            row = msgspec.json.decode(line, type=Incident)
            if 0 < row.began < _LATEST and (row.over is None or 0 < row.over < _LATEST):
                found[row.id] = row
    return dict(sorted(found.items(), key=lambda item: item[1].began)[-MOST_ROWS:])


def is_written(path: Path | None) -> bool:
    """Whether a dashboard writes the file; else the last row may have ended without being noted."""
    try:
        descriptor = os.open(path or "", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def hurt_among(requests: Collection[EndedRequest], since: float) -> list[Hurt]:
    """Those that have missed their objectives or failed since a moment, the first `MOST_HURT`."""
    found: list[Hurt] = []
    for request in sorted(requests, key=lambda one: one.time_unix):
        if request.time_unix < since or not (request.is_slow or request.has_failed):
            continue
        cause = why(request)
        if cause.kind not in _NOT_HURT:
            found.append(
                Hurt(id=request.id, label=printable(request.label, 64), why=printable(cause.sentence, 120),
                     trace_id=request.trace_id)
            )  # fmt: skip
        if len(found) == MOST_HURT:
            break
    return found


class IncidentLog:
    """The incidents of one server. Thread-safe.

    Args:
        path: the file; None, or one that cannot be written: the rows are kept in memory.
        clock: seconds since the epoch.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = path, clock
        self._lock = threading.Lock()
        self._read_at: tuple[int, int] | None = None
        """Time and size of the file that the rows are from."""
        self._rows: dict[str, Incident] = {}
        self._descriptor: int | None = None
        self._looked: dict[str, float] = {}
        """When the requests that were hurt were last read, of rows that go on."""
        self.error = "" if path is not None else "there is no home folder; set XDG_STATE_HOME"
        """Why the rows are in memory alone; empty if they are not."""
        self._read()

    def close(self) -> None:
        """Let another dashboard write."""
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def rows(self) -> list[Incident]:
        """The latest first."""
        with self._lock:
            if self._descriptor is None and not self.error:
                self._read()
            return list(reversed(self._rows.values()))

    def _read(self) -> None:
        """What another dashboard has written since."""
        with suppress(OSError):
            found = None if self._path is None else self._path.stat()
            stamp = None if found is None else (found.st_mtime_ns, found.st_size)
            if stamp != self._read_at:
                self._rows, self._read_at = read_incidents(self._path), stamp

    def look(self, verdicts: Mapping[str, Health], hurt: Callable[[str, float], tuple[int, Sequence[Hurt]]]) -> None:
        """Note what begins, goes on and ends with a reading.

        Args:
            verdicts: by model; of a server that is away the one with an empty name.
            hurt: how many requests of a model (empty: of all) were hurt since a moment, and the first of them.
        """
        is_well = all(health.level is Level.OK for health in verdicts.values())
        with self._lock:
            if is_well and all(row.over is not None for row in self._rows.values()):
                return
            if self._can_write():
                self._look(verdicts, hurt)

    def _look(self, verdicts: Mapping[str, Health], hurt: Callable[[str, float], tuple[int, Sequence[Hurt]]]) -> None:
        now = self._clock()
        present: set[tuple[str, str]] = set()
        going: set[str] = set()
        news: set[str] = set()
        for model, health in verdicts.items():
            findings = [finding for finding in health.findings if finding.cause != "no_slo"]
            present |= {_key(model, finding.cause) for finding in findings}
            if health.level is Level.OK:
                continue
            title = SYMPTOMS[_UNKNOWN].title
            unknown = Finding(level=health.level, cause=_UNKNOWN, title=title, detail=health.headline)
            leading = findings[0] if findings else unknown
            row = self._row_of(model, leading, now)
            before = self._rows.get(row.id)
            if before is None or (before.cause, before.over) != (row.cause, row.over):
                news.add(row.id)
            going.add(row.id)
            self._rows[row.id] = row
        for row in [row for row in self._rows.values() if row.over is None]:
            # Nothing is known of the models of a server that is away.
            goes_on = row.id in going or (row.model and "" in verdicts) or (row.model, family(row.cause)) in present
            if row.id in news or not goes_on or now - self._looked.get(row.id, 0.0) >= _LOOK_S:
                self._looked[row.id] = now
                number, requests = hurt(row.model, row.began)
                kept = self._rows[row.id] = replace(
                    row, over=None if goes_on else now, num_hurt=max(number, row.num_hurt),
                    hurt=tuple(requests) or row.hurt,
                )  # fmt: skip
                if kept != row or row.id in news:
                    self._write(kept)
            if not goes_on:
                del self._looked[row.id]
        self._rows = dict(list(self._rows.items())[-MOST_ROWS:])

    def _row_of(self, model: str, leading: Finding, now: float) -> Incident:
        """The row that a leading cause continues, else a new one."""
        key = _key(model, leading.cause)
        for row in reversed(self._rows.values()):
            if key[0] and row.model not in (model, ""):
                continue
            if row.over is not None and (now - row.over > _SAME_S or leading.cause not in (row.cause, _UNKNOWN)):
                continue
            if key[1] == _UNKNOWN:  # the figures of a cause end before those of its misses
                return replace(row, over=None)
            if family(row.cause) in (key[1], _UNKNOWN):
                is_same = row.cause == leading.cause or (key[0] and not row.model)
                return replace(row, over=None) if is_same else _named(row, key[0], leading)
        began = Incident(id=f"{now:.0f}-{key[0]}-{leading.cause}", began=now)
        return _named(began, key[0], leading)

    def _can_write(self) -> bool:
        """Whether this dashboard is the one that writes."""
        if self._descriptor is not None or self.error or self._path is None:
            return True
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove_old(self._path.parent, self._clock())
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                raise
        except BlockingIOError:
            return False
        except OSError as error:
            self.error = f"{self._path}: {error.strerror}"
            return True
        self._descriptor = descriptor
        self._read()
        return True

    def _write(self, row: Incident) -> None:
        if self._descriptor is None:
            return
        try:
            size = os.lseek(self._descriptor, 0, os.SEEK_END)
            # A line that was cut short must not spoil this one.
            os.write(self._descriptor, b"\n" * (size > 0) + msgspec.json.encode(row))
            if size > _MOST_BYTES:
                # In place, as the lock is the file's: what is left of the longer content after a crash folds into it.
                kept = b"\n".join(map(msgspec.json.encode, self._rows.values()))
                os.pwrite(self._descriptor, kept, 0)
                os.ftruncate(self._descriptor, len(kept))
        except OSError as error:
            self.error = f"{self._path}: {error.strerror}"
            os.close(self._descriptor)
            self._descriptor = None


def _key(model: str, cause: str) -> tuple[str, str]:
    """The model that has a cause (empty: the whole server), and the cause's family."""
    return "" if SYMPTOMS[cause].is_of_server else model, family(cause)


def _named(row: Incident, model: str, leading: Finding) -> Incident:
    return replace(
        row, over=None, model=model, cause=leading.cause, title=printable(leading.title, _LONGEST),
        detail=printable(leading.detail, _LONGEST), alert=SYMPTOMS[leading.cause].alert,
    )  # fmt: skip


def _remove_old(folder: Path, now: float) -> None:
    for path in folder.glob("*.jsonl"):
        with suppress(OSError):
            if now - path.stat().st_mtime > _OLD_S:
                path.unlink()
