"""The OpenAI gateway beside a server, and the keys that it is given."""

import sys
from pathlib import Path

import pytest
from quire_cli import openai
from quire_cli.console import Console
from quire_cli.errors import UsageError
from quire_cli.openai import Gateway, GatewayOptions, read_api_keys, run_gateway
from quire_cli.ports import Endpoint
from support.ports import free_port
from support.processes import is_gone
from support.serving import wait_until

GRPC = Endpoint("127.0.0.1", 8001)
LISTEN = """
import socket, sys, time
listening = socket.create_server(("127.0.0.1", int(sys.argv[1])))
time.sleep(600)
"""


def runs(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(GatewayOptions, "command", lambda self: [sys.executable, "-c", *arguments, str(self.port)])


def test_one_that_dies_is_started_again_and_ends_with_the_context(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    runs(monkeypatch, LISTEN)
    with free_port() as port, Console() as console:
        with Gateway(Endpoint("127.0.0.1", port), GRPC, (), console) as gateway:
            wait_until(lambda: gateway.ready_word() == f" openai=127.0.0.1:{port}", "it listens")
            process = gateway._process
            assert process is not None
            first = process._popen
            first.kill()
            wait_until(lambda: process._popen is not first and process.is_listening(), "another one listens")
        assert is_gone(process._popen.pid)
    assert "the OpenAI gateway has died, and is started again" in capfd.readouterr().err


def test_one_that_never_works_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    runs(monkeypatch, "")
    monkeypatch.setattr(openai.CrashLoop, "delay_after_death", lambda self, worked: _count(self))
    with (
        free_port() as port,
        Console() as console,
        Gateway(Endpoint("127.0.0.1", port), GRPC, (), console) as gateway,
    ):
        wait_until(lambda: gateway.ready_word() == "", "it is given up")
    assert "is not started again" in capfd.readouterr().err


def _count(crash_loop: openai.CrashLoop) -> float:
    """Deaths in a row, without the pauses between them."""
    crash_loop.num_deaths += 1
    return 0.0


def test_keys_come_from_options_a_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(openai.API_KEYS, raising=False)
    assert read_api_keys([], None) == ()
    file = tmp_path / "keys"
    file.write_text("b\n\n  c\n")
    monkeypatch.setenv(openai.API_KEYS, "d\na")
    assert read_api_keys(["a"], file) == ("a", "d", "b", "c")
    command = GatewayOptions(api_keys=("sesam",)).command()
    assert "sesam" not in " ".join(command)
    assert GatewayOptions(api_keys=("sesam", "x")).environment()[openai.API_KEYS] == "sesam\nx"


@pytest.mark.parametrize("key", ["", "a b", "é", "a\nb"])
def test_a_key_that_no_header_can_carry_is_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(openai.API_KEYS, raising=False)
    with pytest.raises(UsageError, match="API key") as raised:
        read_api_keys([key], None)
    assert not key or key not in str(raised.value)


def test_a_file_without_keys_is_refused(tmp_path: Path) -> None:
    """Or everybody would be let in."""
    (tmp_path / "keys").write_text("\n")
    with pytest.raises(UsageError, match="holds no key"):
        read_api_keys([], tmp_path / "keys")
    with pytest.raises(UsageError, match="cannot be read"):
        read_api_keys([], tmp_path / "nothing")


def test_one_that_is_open_to_others_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(openai.os, "execve", lambda *arguments: 0)
    run_gateway(GatewayOptions(host="0.0.0.0", port=0))
    assert "without a key" in capsys.readouterr().err
    for quiet in (GatewayOptions(host="0.0.0.0", port=0, api_keys=("a",)), GatewayOptions(port=0)):
        run_gateway(quiet)
    assert capsys.readouterr().err == ""
