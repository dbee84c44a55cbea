"""`quire kv-store`: what is wrong is told in one line; asked to stop, it does."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from quire_cli.main import run
from quire_engine.ipc.keys import add_peers
from support.remote import trusting_hosts


@pytest.mark.parametrize(
    ("listen", "keys", "code", "part"),
    [
        ("nowhere", "front.json", 2, "--listen is 'nowhere'; it must be HOST:PORT"),
        ("127.0.0.1:99999", "front.json", 2, "--listen is '127.0.0.1:99999'"),
        ("192.0.2.250:29600", "front.json", 1, "this host has no such address"),
        ("127.0.0.1:0", "none.json", 1, "none.json is not there; make it with: quire keys host"),
        ("127.0.0.1:0", "alone.json", 1, "alone.json trusts nobody"),
    ],
)
def test_wrong_usage(
    tmp_path: Path, listen: str, keys: str, code: int, part: str, capfd: pytest.CaptureFixture[str]
) -> None:
    trusting_hosts(tmp_path)
    add_peers(tmp_path / "alone.json", [])
    arguments = ["--listen", listen, "--key-file", str(tmp_path / keys)]
    assert run(["kv-store", str(tmp_path / "blocks"), *arguments]) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert part in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_when_asked(tmp_path: Path, number: signal.Signals) -> None:
    front, _ = trusting_hosts(tmp_path)
    command = [sys.executable, "-m", "quire_cli", "kv-store", str(tmp_path / "blocks"),
               "--listen", "localhost:0", "--key-file", str(front)]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("quire: ready kv_store=tcp://")
        process.send_signal(number)
        assert process.wait(60) == 0
