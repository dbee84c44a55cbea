"""The OpenAI gateway beside a server, and the keys that it is given."""

import json
import sys
from pathlib import Path

import pytest
from quire_cli import openai
from quire_cli.console import Console
from quire_cli.errors import UsageError
from quire_cli.main import run
from quire_cli.openai import Gateway, gateway_command, gateway_environment, read_api_keys, run_gateway
from quire_cli.ports import Endpoint
from quire_gateway.keys import KeyRing, parse_key
from quire_gateway.limits import RequestLimits
from quire_gateway.settings import API_KEYS_VARIABLE, GatewaySettings
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
    monkeypatch.setattr(
        openai, "gateway_command", lambda settings: [sys.executable, "-c", *arguments, str(settings.port)]
    )


def test_one_that_dies_is_started_again_and_ends_with_the_context(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    runs(monkeypatch, LISTEN)
    with free_port() as port, Console() as console:
        with Gateway(Endpoint("127.0.0.1", port), GRPC, (), console) as gateway:
            wait_until(lambda: gateway.ready_word() == f" openai=127.0.0.1:{port}", "it listens")
            first = gateway._popen
            first.kill()
            wait_until(lambda: gateway.ready_word() and gateway._popen is not first, "another one is started")
            wait_until(gateway.is_listening, "another one listens")
        assert is_gone(gateway.pid)
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
    monkeypatch.delenv(API_KEYS_VARIABLE, raising=False)
    assert read_api_keys([], None) == ()
    file = tmp_path / "keys"
    file.write_text("b\n\n  c\n")
    monkeypatch.setenv(API_KEYS_VARIABLE, "d\na")
    keys = read_api_keys(["a"], file)
    assert keys == tuple(parse_key(key).line() for key in "adbc")
    settings = GatewaySettings(api_keys=keys, limits=RequestLimits(max_n=3), ignored_fields=("num_ctx",))
    given = json.loads(gateway_command(settings)[-1])
    assert (given["ignored_fields"], given["limits"]["max_n"], given["api_keys"]) == (["num_ctx"], 3, [])
    assert gateway_environment(settings)[API_KEYS_VARIABLE] == "\n".join(keys)


def test_a_new_key_is_shown_once_and_its_line_lets_it_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(API_KEYS_VARIABLE, raising=False)
    assert run(["keys", "api", "batch", "--requests-per-minute", "60"]) == 0
    said = capsys.readouterr()
    key = said.err.split()[-1]
    assert key not in said.out
    file = tmp_path / "keys"
    file.write_text(f"# of the night\n{said.out}")
    ring = KeyRing(read_api_keys([], file))
    found = ring.find(f"Bearer {key}")
    assert found is not None
    assert (found.name, found.requests_per_minute, found.tokens_per_minute) == ("batch", 60, None)
    assert ring.find(f"Bearer {key}x") is None
    assert run(["keys", "api", "a b"]) == 2
    assert "the name is 'a b'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a sha256:12", "an API key holds a space"),
        (f"a sha256:{'0' * 64} burst=3", "the limit 'burst=3'; it must be one of requests_per_minute"),
        (f"a sha256:{'0' * 64} max_concurrent=0", "above 0"),
        (f"a sha256:{'0' * 64}\na sha256:{'1' * 64}", "two API keys have the name a"),
        (f"a sha256:{'0' * 64}\nb sha256:{'0' * 64}", "two API keys have the hash"),
    ],
)
def test_a_bad_line_is_named(line: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API_KEYS_VARIABLE, raising=False)
    (tmp_path / "keys").write_text(line)
    with pytest.raises(UsageError, match=message):
        read_api_keys([], tmp_path / "keys")


@pytest.mark.parametrize("key", ["", "a b", "é", "a\nb"])
def test_a_key_that_no_header_can_carry_is_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API_KEYS_VARIABLE, raising=False)
    with pytest.raises(UsageError, match="API key") as raised:
        read_api_keys([key], None)
    assert not key or key not in str(raised.value)


@pytest.mark.parametrize("content", ["\n", "# of the night\n  # of the day\n"], ids=["empty", "comments"])
def test_a_file_without_keys_is_rejected(tmp_path: Path, content: str) -> None:
    """Or the gateway would need no key at all."""
    (tmp_path / "keys").write_text(content)
    with pytest.raises(UsageError, match="holds no key"):
        read_api_keys([], tmp_path / "keys")
    with pytest.raises(UsageError, match="cannot be read"):
        read_api_keys([], tmp_path / "nothing")


def test_one_that_is_open_to_others_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(openai.os, "execve", lambda *arguments: 0)
    run_gateway(GatewaySettings(host="0.0.0.0", port=0))
    assert "without a key" in capsys.readouterr().err
    for quiet in (GatewaySettings(host="0.0.0.0", port=0, api_keys=("a",)), GatewaySettings(port=0)):
        run_gateway(quiet)
    assert capsys.readouterr().err == ""
