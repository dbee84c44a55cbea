"""RunDirectory: what one `quire serve` owns, and how the remains of a dead one are recognised and removed.

Everything that a run creates carries its run id, which identifies the process that owns it:

    <pid>-<start time>-<pid namespace>     start time in clock ticks since boot, so that a reused pid does not match

    processes      environment variable QUIRE_RUN_ID=<run id>, inherited by every child
    /dev/shm       quire-<run id>-…
    directory      <temporary folder>/quire-<uid>/<run id>/, mode 0700; the run's own temporary folder is in it

The temporary folder, not XDG_RUNTIME_DIR, which is removed when its user logs out, so that a later start could not see
it.

A run is dead when no process of that pid and start time exists. Runs of another pid namespace (a container, seen from
its host) cannot be checked from here and are left alone, as is everything of another user.
"""

import contextlib
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from quire_engine.system import process_state
from quire_monitoring.request_file import FILE_SUFFIX

from quire_cli import process
from quire_cli.errors import CommandError

RUN_ID_VARIABLE = "QUIRE_RUN_ID"
SHARED_MEMORY = Path("/dev/shm")
_KILL_DEADLINE_S = 10.0
# A socket's path has at most 107 bytes, and the engine's are made in the temporary folder: quire-abcdefgh/output.
_LONGEST_PATH = 107 - 30
# Characters that a shell takes literally everywhere.
_PLAIN = re.compile(r"[\w/.,:=@%+-]*")
_RUN_ID = r"(\d+)-(\d+)-(\d+)"


@dataclass(frozen=True, slots=True)
class RunId:
    """Identifies one run by the process that owns it."""

    pid: int
    start_time: int
    namespace: int

    def __str__(self) -> str:
        return f"{self.pid}-{self.start_time}-{self.namespace}"

    @classmethod
    def of(cls, pid: int) -> "RunId":
        """The id of a run that a living process owns."""
        owner = process_state.process_stat(pid)
        if owner is None:
            raise ProcessLookupError(pid)
        return cls(pid, owner.start_time, _pid_namespace())

    @classmethod
    def parse(cls, text: str) -> "RunId | None":
        """The id that `text` is; None if it is not one."""
        match = re.fullmatch(_RUN_ID, text)
        return cls(*map(int, match.groups())) if match else None

    @property
    def is_dead(self) -> bool:
        """True when the owner is gone for certain."""
        if self.namespace != _pid_namespace():
            return False
        return not process_state.is_alive(self.pid, self.start_time)

    @property
    def shared_memory_prefix(self) -> str:
        """Prefix of the names of this run's files in /dev/shm."""
        return f"quire-{self}-"

    def processes(self) -> list[int]:
        """The live processes of this run, except its owner."""
        return [pid for pid, run_id in _processes() if run_id == self]

    def shared_memory(self) -> list[Path]:
        """This run's files in /dev/shm."""
        return [path for path, run_id in _shared_memory() if run_id == self]

    def directories(self) -> list[Path]:
        """This run's directory, while it exists."""
        return [path for path, run_id in _directories() if run_id == self]


@dataclass(frozen=True, kw_only=True, slots=True)
class Leftovers:
    """What dead runs have left."""

    processes: tuple[int, ...] = ()
    shared_memory: tuple[Path, ...] = ()
    directories: tuple[Path, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.processes or self.shared_memory or self.directories)

    def __str__(self) -> str:
        counts = (
            (len(self.processes), "process", "processes"),
            (len(self.shared_memory), "file in /dev/shm", "files in /dev/shm"),
            (len(self.directories), "run directory", "run directories"),
        )
        return ", ".join(f"{count} {one if count == 1 else many}" for count, one, many in counts if count)


class RunDirectory:
    """The private directory of a run. Leaving the context ends every process of the run and removes their files."""

    def __init__(self) -> None:
        self.run_id = RunId.of(os.getpid())
        root = _root()
        self.path = _user_folder(root) / str(self.run_id)
        self.temporary = self.path / "t"
        """The temporary folder of the run's processes."""
        excess = len(os.fsencode(self.temporary)) - _LONGEST_PATH
        if excess > 0:
            raise CommandError(
                f"the path of the temporary folder {root} is {excess} bytes too long for sockets in it; "
                "set TMPDIR to a shorter one, such as /tmp"
            )
        if not is_plain(root):
            raise CommandError(
                f"the path of the temporary folder {root} holds a space or another special character, and tritonserver "
                "starts its processes with an unquoted shell command; set TMPDIR to one without, such as /tmp"
            )
        if os.statvfs(root).f_flag & os.ST_NOEXEC:  # the Python backend is loaded from the run directory
            raise CommandError(f"the temporary folder {root} is mounted noexec; set TMPDIR to one that is not")
        _make_private(self.path.parent)

    def __enter__(self) -> "RunDirectory":
        self.path.mkdir(mode=0o700)
        self.temporary.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        _remove(self.run_id)
        _reap_children()

    def clean_up(self) -> None:
        """End every process of the run, and remove what they created except the lists of their requests. The run itself
        goes on, and can start others."""
        _end_processes(self.run_id)
        for path in self.temporary.iterdir():
            if path.suffix != FILE_SUFFIX:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        _reap_children()

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that every process of the run is started with, to recognise it and its temporary files."""
        return {RUN_ID_VARIABLE: str(self.run_id), "TMPDIR": str(self.temporary)}


def is_plain(path: Path) -> bool:
    """Whether an unquoted shell command can contain it: the Python backend starts its stubs with one."""
    return _PLAIN.fullmatch(str(path)) is not None


def leftovers() -> Leftovers:
    """Find what dead runs left, without changing anything."""
    return Leftovers(
        processes=tuple(pid for pid, run_id in _processes() if run_id.is_dead),
        shared_memory=tuple(path for path, run_id in _shared_memory() if run_id.is_dead),
        directories=tuple(path for path, run_id in _directories() if run_id.is_dead),
    )


def sweep() -> Leftovers:
    """End and remove what dead runs left; returns what was found."""
    found = leftovers()
    for run_id in {run_id for _, run_id in [*_processes(), *_shared_memory(), *_directories()] if run_id.is_dead}:
        _remove(run_id)
    return found


def _remove(run_id: RunId) -> None:
    """End the run's processes, then remove its files: a live process could still create new ones."""
    _end_processes(run_id)
    for path in run_id.directories():
        shutil.rmtree(path, ignore_errors=True)


def _end_processes(run_id: RunId) -> None:
    """End the run's processes, and remove the shared memory that they had."""
    deadline = time.monotonic() + _KILL_DEADLINE_S
    while pids := run_id.processes():
        if time.monotonic() > deadline:
            raise CommandError(
                f"processes {', '.join(map(str, pids))} of run {run_id} do not die; look at them with ps"
            )
        for pid in pids:
            process.kill(pid, lambda pid: _run_id_of(pid) == run_id)
        time.sleep(0.01)
    for path in run_id.shared_memory():
        path.unlink(missing_ok=True)


def _reap_children() -> None:
    """Collect the exit codes of children, adopted ones too, that are already dead."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _run_id_of(pid: int) -> RunId | None:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    prefix = f"{RUN_ID_VARIABLE}=".encode()
    values = [os.fsdecode(item.removeprefix(prefix)) for item in environment if item.startswith(prefix)]
    return RunId.parse(values[0]) if values else None


def _processes() -> Iterator[tuple[int, RunId]]:
    """Processes of runs, except this one and its ancestors: `quire` may be started from within a run."""
    spared: set[int] = set()
    pid = os.getpid()
    while pid not in spared and (one := process_state.process_stat(pid)):
        spared.add(pid)
        pid = one.parent
    for pid in process.own_processes():
        if pid not in spared and (run_id := _run_id_of(pid)):
            yield pid, run_id


def _shared_memory() -> Iterator[tuple[Path, RunId]]:
    return _own_entries(SHARED_MEMORY, re.compile(f"quire-({_RUN_ID})-.*"))


def _directories() -> Iterator[tuple[Path, RunId]]:
    return _own_entries(_user_folder(_root()), re.compile(f"({_RUN_ID})"))


def _own_entries(folder: Path, name: re.Pattern[str]) -> Iterator[tuple[Path, RunId]]:
    """Entries of this user in `folder` whose name has a run id as the pattern's first group."""
    try:
        entries = list(folder.iterdir()) if folder.is_dir() else []
    except PermissionError:  # another user has made a folder of this user's name
        return
    for path in entries:
        match = name.fullmatch(path.name)
        run_id = RunId.parse(match[1]) if match else None
        with contextlib.suppress(FileNotFoundError):
            if run_id and path.lstat().st_uid == os.geteuid():
                yield path, run_id


def _root() -> Path:
    """The folder that holds the folders of all users."""
    return Path(tempfile.gettempdir())


def _user_folder(root: Path) -> Path:
    return root / f"quire-{os.geteuid()}"


def _make_private(folder: Path) -> None:
    """Create this user's folder, in a place that others may write to as well."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise CommandError(f"{folder} is not a private folder of yours; remove it, or set TMPDIR to another place")


def _pid_namespace() -> int:
    match = re.search(r"\d+", os.readlink("/proc/self/ns/pid"))
    assert match is not None
    return int(match[0])
