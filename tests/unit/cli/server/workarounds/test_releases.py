"""`quire serve` with a server of some release: what a newer one runs without, and what it needs all the same."""

import json
import os
import resource
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from quire_cli.server.tritonserver import PYTHON
from quire_cli.server.workarounds import workarounds_for
from quire_engine.system import process_state
from support import fake_server
from support.serving import Server, health, start, wait_until

WORKAROUNDS = "quire_cli.server.workarounds.triton_2_51"
PLAN = {"in_flight": 0, "models": {"m": "READY"}}


class Installed:
    """A `tritonserver` that is installed in a folder, and the `quire serve` that runs it."""

    def __init__(self, folder: Path, version: str | None, **plan: Any) -> None:
        self.folder = folder
        python_backend = folder / "triton" / "backends" / "python"
        python_backend.mkdir(parents=True)
        for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
            (python_backend / name).touch()
        (python_backend / "triton_python_backend_stub").write_bytes(f"\0libpython{PYTHON}.so.1.0\0".encode())
        if version is not None:
            (folder / "triton" / "TRITON_VERSION").write_text(version)
        binary = folder / "triton" / "bin" / "tritonserver"
        binary.parent.mkdir()
        words = (sys.executable, str(fake_server.__file__), str(folder))
        binary.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        binary.chmod(0o755)
        (folder / "plan.json").write_text(json.dumps({**PLAN, **plan}))
        (folder / "triton_python_backend_stub").symlink_to(str(shutil.which("sleep")))
        self.server: Server = start(
            "--", f"--model-repository={folder}", "--model-control-mode=explicit", "--load-model=m",
            env={
                "PATH": os.pathsep.join([str(binary.parent), os.environ["PATH"]]),
                "PYTHONPROFILEIMPORTTIME": "1",  # lists on stderr what is imported
            },
        )  # fmt: skip

    def starts(self) -> list[int]:
        """The processes that have been this run's server."""
        return [int(line) for line in (self.folder / "starts").read_text().split()]

    def stub(self) -> int:
        """The stub of the present server."""
        stats = ((pid, process_state.process_stat(pid)) for pid in self.server.run_id.processes())
        return next(pid for pid, stat in stats if stat and stat.name == "triton_python_b")

    def is_well(self) -> bool:
        """Whether the health address says so."""
        status, body = health(self.server)
        return (status, body["problems"]) == (200, [])

    def has_imported(self, module: str) -> bool:
        """Whether `quire serve` has."""
        return f" {module}\n" in self.server.log()


@pytest.fixture
def install(tmp_path: Path) -> Iterator[Callable[..., Installed]]:
    installed: list[Installed] = []

    def run(version: str | None, **plan: Any) -> Installed:
        installed.append(Installed(tmp_path, version, **plan))
        return installed[-1]

    yield run
    for one in installed:
        one.server.stop()


def test_a_newer_server_is_supervised_and_drained_without_workarounds(install: Callable[..., Installed]) -> None:
    installed = install("2.70.0\n")
    server = installed.server
    wait_until(installed.is_well, "its model is served")
    assert resource.prlimit(installed.starts()[0], resource.RLIMIT_STACK) == resource.getrlimit(resource.RLIMIT_STACK)
    os.kill(installed.starts()[0], signal.SIGKILL)
    assert server.wait_for_ready_line() == (server.grpc, server.http, server.metrics)
    os.kill(installed.stub(), signal.SIGKILL)
    assert server.wait_for_ready_line() == (server.grpc, server.http, server.metrics)
    assert len(installed.starts()) == 3
    wait_until(installed.is_well, "the new one serves")
    assert server.stop() == 0, server.log()
    server.assert_nothing_left()
    log = server.log()
    assert "tritonserver was killed by SIGKILL; starting the server again now" in log
    assert "of model 'm' died; starting the server again" in log
    assert "draining" in log
    assert installed.has_imported("quire_cli.server.workarounds")
    assert not installed.has_imported(WORKAROUNDS)


@pytest.mark.parametrize("is_ending", [True, False], ids=["page", "index"])
def test_a_stub_that_is_killed_while_a_newer_server_unloads_its_model_is_no_death(
    install: Callable[..., Installed], is_ending: bool
) -> None:
    plan = {"is_ending": True} if is_ending else {"models": {"m": "UNLOADING"}}
    installed = install("2.70.0", **plan)
    wait_until(installed.is_well, "no problem")
    os.kill(installed.stub(), signal.SIGKILL)
    wait_until(lambda: "died while its model was being unloaded" in installed.server.log(), "it is reported")
    wait_until(installed.is_well, "no problem")
    assert installed.server.stop() == 0, installed.server.log()
    assert len(installed.starts()) == 1


@pytest.mark.parametrize(
    ("release", "has_some"),
    [((2, 51), True), ((1, 99), True), ((2, 68), True), ((2, 69), False), ((3, 0), False), (None, True)],
)
def test_releases_before_the_last_of_the_fixes_have_workarounds(
    tmp_path: Path, release: tuple[int, int] | None, has_some: bool
) -> None:
    assert (workarounds_for(release, tmp_path) is not None) is has_some


@pytest.mark.parametrize("version", ["2.51.0", "r25.07", None], ids=["2.51", "odd", "none"])
def test_an_older_server_and_one_that_does_not_say_have_them(
    install: Callable[..., Installed], version: str | None
) -> None:
    installed = install(version, ends=False)
    wait_until(installed.is_well, "its model is served")
    assert installed.has_imported(WORKAROUNDS)
    assert installed.server.stop() == 0, "nothing is in flight, though it does not end by itself"
    assert len(installed.starts()) == 1
