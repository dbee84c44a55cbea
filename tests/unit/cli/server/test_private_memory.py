"""The files of a server are its user's alone, also where it opens them to all."""

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from quire_cli.console import Console
from quire_cli.server.private_memory import keep_memory_private
from quire_cli.server.server_process import ServerProcess

# As tritonserver makes a region: the mode is set once more, past the umask.
MAKE = """
import os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
os.fchmod(descriptor, 0o644)
print(oct(os.fstat(descriptor).st_mode & 0o777))
os.fchmod(descriptor, 0o640)
print(oct(os.fstat(descriptor).st_mode & 0o777))
"""


def test_a_region_is_private_from_the_beginning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MAKE, str(tmp_path / "region")],
        preexec_fn=keep_memory_private, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["0o600", "0o640"], "only what tritonserver does is not done"


def status_of_a_child(begins: Callable[[], object]) -> dict[str, str]:
    done = subprocess.run(["cat", "/proc/self/status"], preexec_fn=begins, capture_output=True, text=True, check=True)
    return dict(line.split(":\t", 1) for line in done.stdout.splitlines())


def test_setuid_programs_are_given_up_only_where_the_filter_asks_for_it() -> None:
    status = status_of_a_child(keep_memory_private)
    assert status["Seccomp"] == "2"
    has_cap_sys_admin = bool(int(status["CapEff"], 16) & 1 << 21)
    assert status["NoNewPrivs"] == ("0" if has_cap_sys_admin else "1")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_user_without_privileges_has_the_filter_too() -> None:
    def as_nobody() -> None:
        os.setuid(65534)
        assert keep_memory_private()

    status = status_of_a_child(as_nobody)
    assert (status["Seccomp"], status["NoNewPrivs"]) == ("2", "1")


@pytest.mark.parametrize("machine", [platform.machine(), "riscv64"])
def test_it_is_told_where_memory_is_not_private(
    machine: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    real = platform.machine()
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with Console() as console:
        ServerProcess([sys.executable, "-c", ""], os.environ, console, show_whole_log=False).close()
    assert ("other users of the machine can open its shared memory" in capfd.readouterr().err) is (machine != real)
