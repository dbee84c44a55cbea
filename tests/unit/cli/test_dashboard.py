"""The dashboard beside a server: what the ready line says of it."""

import socket
import sys
from contextlib import closing, nullcontext
from typing import Any

import pytest
from quire_cli import dashboard
from quire_cli.console import Console
from quire_cli.dashboard import Dashboard, run_dashboard
from quire_cli.errors import UsageError
from quire_cli.options import DashboardOptions
from quire_cli.ports import Endpoint
from quire_cli.server import companion
from quire_dashboard.settings import Settings
from support.ports import free_port
from support.serving import wait_until

SERVER = {
    service: Endpoint("127.0.0.1", 8001 + number)
    for number, service in enumerate(("grpc", "http", "metrics", "health"))
}


LISTEN = """
import socket, sys, time
listening = socket.create_server(("127.0.0.1", int(sys.argv[1])))
time.sleep(600)
"""


def test_one_that_listens_is_named_however_long_the_server_took(monkeypatch: pytest.MonkeyPatch) -> None:
    with free_port() as port:
        endpoint = Endpoint("127.0.0.1", port)
        monkeypatch.setattr(
            dashboard, "streamlit_command", lambda host, port: [sys.executable, "-c", LISTEN, str(port)]
        )
        with Dashboard(endpoint, SERVER, Console()) as running:
            wait_until(lambda: running.ready_word() is not None, "it listens")
            monkeypatch.setattr(companion, "_START_S", 0.0)
            assert running.ready_word() == f" dashboard={endpoint}"


def test_one_that_does_not_start_in_time_holds_nobody_up_and_another_one_is_not_taken_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as another:
        endpoint = Endpoint("127.0.0.1", another.getsockname()[1])
        monkeypatch.setattr(
            dashboard, "streamlit_command", lambda *_: [sys.executable, "-c", "import time; time.sleep(600)"]
        )
        with Dashboard(endpoint, SERVER, Console()) as running:
            assert running.ready_word() is None
            monkeypatch.setattr(companion, "_START_S", 0.0)
            assert running.ready_word() == ""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """The commands that this process would have become, with their environments."""
    found: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.delenv("QUIRE_DASHBOARD_TOKEN", raising=False)
    monkeypatch.setattr(dashboard.os, "execve", lambda _, command, environment: found.append((command, environment)))
    return found


@pytest.mark.parametrize(
    ("host", "is_open"),
    [("127.0.0.1", False), ("127.0.0.2", False), ("localhost", False), ("0.0.0.0", True), ("192.0.2.1", True)],
)
def test_an_open_host_needs_a_token(host: str, is_open: bool, started: list[Any]) -> None:
    with pytest.raises(UsageError, match="give it a token") if is_open else nullcontext():
        run_dashboard(DashboardOptions(host=host, port=0))
    assert len(started) == (not is_open)


def test_no_secret_is_on_the_command_line(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_DASHBOARD_TOKEN", "a very secret token")
    monkeypatch.setenv("QUIRE_INTROSPECTION_TOKEN", "also secret")
    run_dashboard(DashboardOptions(host="0.0.0.0", port=0, url=["a:1"]))
    ((command, environment),) = started
    assert "secret" not in " ".join(command)
    (server,) = Settings.all_from_environment(environment)
    assert (server.url, server.token, server.introspection_token) == ("a:1", "a very secret token", "also secret")


@pytest.mark.parametrize("given", ["", "open sesame, please"])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_token_of_the_operators_own_never_comes_into_a_log(
    given: str, is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("QUIRE_DASHBOARD_TOKEN", given)
    monkeypatch.setattr(dashboard.secrets, "token_urlsafe", lambda size: "made-up-for-this-run")
    monkeypatch.setattr(dashboard, "streamlit_command", lambda *_: [sys.executable, "-c", ""])
    console = Console()
    console.is_terminal = is_terminal
    with Dashboard(Endpoint("0.0.0.0", 9), SERVER, console):
        said = capsys.readouterr().err
    assert "http://0.0.0.0:9/" in said
    if is_terminal:
        assert f"/?token={'open%20sesame%2C%20please' if given else 'made-up-for-this-run'}\n" in said
    else:
        assert "?token=" not in said
        assert "sesame" not in said
        assert ("is that of QUIRE_DASHBOARD_TOKEN" if given else "made-up-for-this-run") in said


def test_a_short_token_is_refused_and_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_DASHBOARD_TOKEN", "fifteen letters")
    for start in (
        lambda: Dashboard(Endpoint("127.0.0.1", 9), SERVER, Console()),
        lambda: run_dashboard(DashboardOptions()),
        lambda: run_dashboard(DashboardOptions(host="0.0.0.0", token="fifteen letters")),
    ):
        with pytest.raises(UsageError, match=r"QUIRE_DASHBOARD_TOKEN .* has 15 characters.*at least 16") as error:
            start()
        assert "letters" not in str(error.value)


def test_the_command_that_starts_another_one_names_all_addresses(capsys: pytest.CaptureFixture[str]) -> None:
    Dashboard(Endpoint("127.0.0.1", 7501), {**SERVER, "http": Endpoint("127.0.0.1", 7000)}, Console()).on_end(1.0)
    grpc, metrics = SERVER["grpc"], SERVER["metrics"]
    command = f"quire dashboard --url {grpc} --metrics {metrics} --http 127.0.0.1:7000 --port 7501\n"
    assert capsys.readouterr().err.endswith(command)
