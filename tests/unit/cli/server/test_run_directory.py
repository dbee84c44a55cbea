"""What dead runs leave is recognised and removed; what living ones and others own is not touched."""

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from quire_cli.errors import CommandError
from quire_cli.server import run_directory
from quire_cli.server.run_directory import RUN_ID_VARIABLE, RunDirectory, RunId, leftovers, sweep

# Starts a process of the run, writes into it, and says so; then waits to be killed, or ends when stdin does.
OWNER = """
import os, subprocess, sys
from quire_cli.server.run_directory import RunDirectory
with RunDirectory() as run:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                             env={**os.environ, **run.environment})
    os.close(os.open(f"/dev/shm/{run.run_id.shared_memory_prefix}test", os.O_CREAT, 0o600))
    print(run.run_id, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def root(alone_with_dead_runs: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary folder of the test; those of pytest would be too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        set_root(monkeypatch, Path(folder))
        yield Path(folder)


def set_root(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(root))  # for child processes
    monkeypatch.setattr(tempfile, "tempdir", str(root))


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        yield process
        process.kill()
    sweep()


def run_id_of(owner: subprocess.Popen[str]) -> RunId:
    assert owner.stdout is not None
    run_id = RunId.parse(owner.stdout.readline().strip())
    assert run_id is not None
    return run_id


def assert_all_there(run_id: RunId) -> None:
    assert len(run_id.processes()) == 1
    assert len(run_id.shared_memory()) == 1
    assert len(run_id.directories()) == 1


def assert_nothing_there(run_id: RunId) -> None:
    assert not run_id.processes()
    assert not run_id.shared_memory()
    assert not run_id.directories()


def test_run_removes_its_own_things(owner: subprocess.Popen[str]) -> None:
    run_id = run_id_of(owner)
    assert_all_there(run_id)
    owner.communicate("")
    assert owner.returncode == 0
    assert_nothing_there(run_id)


def test_sweep_removes_what_a_killed_run_left_and_only_that(owner: subprocess.Popen[str]) -> None:
    run_id = run_id_of(owner)
    sweep()
    assert_all_there(run_id)
    owner.send_signal(signal.SIGKILL)
    # A zombie is as dead as one that its parent has noticed.
    end = time.monotonic() + 10
    while not run_id.is_dead:
        assert time.monotonic() < end
    assert_all_there(run_id)
    assert run_id.processes()[0] in leftovers().processes
    found = sweep()
    assert len(found.processes) >= 1
    assert len(found.shared_memory) >= 1
    assert_nothing_there(run_id)
    assert not sweep()


def test_reused_pid_is_another_run() -> None:
    own = RunId.of(os.getpid())
    assert not own.is_dead
    assert RunId(own.pid, own.start_time - 1, own.namespace).is_dead
    assert not RunId(own.pid, own.start_time - 1, own.namespace + 1).is_dead, "another container cannot be judged"


def test_who_sweeps_from_within_a_dead_run_survives() -> None:
    dead = RunId(2**22 - 1, 1, RunId.of(os.getpid()).namespace)
    assert dead.is_dead
    code = "from quire_cli.server.run_directory import sweep; assert not sweep().processes; print('alive')"
    result = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, RUN_ID_VARIABLE: str(dead)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert result.stdout == "alive\n", result.stderr


@pytest.mark.parametrize("name", ["quire-1-2-x", "quire-", "quirex-1-2-3-x", "other", "quire-1-2-3"])
def test_files_of_others_in_shared_memory_are_not_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_directory, "SHARED_MEMORY", tmp_path)
    (tmp_path / name).write_text("x")
    sweep()
    assert (tmp_path / name).exists()


def test_files_of_another_user_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_directory, "SHARED_MEMORY", tmp_path)
    namespace = RunId.of(os.getpid()).namespace
    file = tmp_path / f"quire-{2**22 - 1}-1-{namespace}-x"
    file.write_text("x")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    sweep()
    assert file.exists()
    monkeypatch.undo()
    monkeypatch.setattr(run_directory, "SHARED_MEMORY", tmp_path)
    sweep()
    assert not file.exists()


def test_a_folder_of_another_user_in_the_place_of_ones_own_is_left(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = root / f"quire-{os.geteuid()}"
    folder.mkdir()

    def iterdir(_: Path) -> Iterator[Path]:  # root may read all
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    with monkeypatch.context() as patch:
        patch.setattr(run_directory, "SHARED_MEMORY", root / "none")
        patch.setattr(Path, "iterdir", iterdir)
        assert not leftovers()


def test_folder_that_others_can_enter_is_refused(root: Path) -> None:
    (root / f"quire-{os.geteuid()}").mkdir()
    (root / f"quire-{os.geteuid()}").chmod(0o755)
    with pytest.raises(CommandError, match=re.escape("not a private folder")):
        RunDirectory()


def test_run_directory_is_private(root: Path) -> None:
    with RunDirectory() as run:
        assert root in run.path.parents
        assert run.path.stat().st_mode & 0o777 == 0o700
        assert run.environment["TMPDIR"].startswith(str(run.path))
    assert not run.path.exists()


def test_run_directory_does_not_depend_on_a_login(
    owner: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = run_id_of(owner)
    owner.kill()
    owner.wait()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with RunDirectory() as run:
        assert tmp_path not in run.path.parents
    sweep()
    assert_nothing_there(run_id)


@pytest.mark.parametrize("length", [38, 39, 40, 41, 42, 43, 44, 60, 100])
def test_temporary_folder_that_is_too_long_for_sockets_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """Where a run can be made at all, the engine can make its sockets in it."""
    long = root / ("x" * (length - len(str(root)) - 1))
    long.mkdir()
    set_root(monkeypatch, long)
    if length >= 60:
        with pytest.raises(CommandError, match="bytes too long for sockets in it; set TMPDIR to a shorter one"):
            RunDirectory()
        assert not list(long.iterdir())
        return
    try:
        run = RunDirectory()
    except CommandError:
        return
    with run:
        folder = Path(run.environment["TMPDIR"]) / "quire-abcdefgh"
        folder.mkdir()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "output"))


def test_longest_run_id_leaves_room_for_an_ordinary_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = RunId(2**22, 10**10, 2**32 - 1)
    monkeypatch.setattr(RunId, "of", lambda pid: longest)
    set_root(monkeypatch, Path("/var/tmp"))
    monkeypatch.setattr(run_directory, "_make_private", lambda folder: None)
    RunDirectory()


def test_temporary_folder_that_forbids_execution_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC))
    with pytest.raises(CommandError, match="mounted noexec; set TMPDIR"):
        RunDirectory()
