"""The dashboard: beside a server as a process of its own, or alone.

It is another package, which may be missing. Nothing here imports it: it has its settings by arguments and environment.
"""

import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import replace
from urllib.parse import quote

from quire_engine.system.extras import missing_package

from quire_cli.console import Console
from quire_cli.errors import CommandError, UsageError
from quire_cli.options import DashboardOptions
from quire_cli.ports import Endpoint, ReservedPorts, is_loopback, resolve
from quire_cli.server.companion import Companion

INTROSPECTION_TOKEN = "QUIRE_INTROSPECTION_TOKEN"
DASHBOARD_TOKEN = "QUIRE_DASHBOARD_TOKEN"
_NEEDS = ("quire_dashboard", "streamlit", "prometheus_client", "tritonclient")
_MIN_TOKEN_CHARACTERS = 16


def how_to_install() -> str:
    """What is missing to start the dashboard, and how to install it; empty if nothing is."""
    return missing_package("dashboard", *_NEEDS)


def dashboard_command(options: DashboardOptions) -> list[str]:
    """The dashboard's command; tokens are passed by environment, as every user can see a command line."""
    addresses = (("--url", options.url), ("--metrics", options.metrics), ("--http", options.http))
    arguments = [part for option, values in addresses for value in values or () for part in (option, value)]
    arguments += ["--prometheus", options.prometheus, "--health", options.health]
    arguments += [*(["--traces", options.traces] if options.traces else [])]
    return [sys.executable, "-m", "quire_dashboard", *arguments, "--host", options.host, "--port", str(options.port)]


def run_dashboard(options: DashboardOptions) -> int:
    """`quire dashboard`: this process becomes the dashboard.

    Raises:
        CommandError: something it needs is missing, or its port is taken.
        UsageError: it would be open to others without a token.
    """
    missing = how_to_install()
    if missing:
        raise CommandError(f"the dashboard cannot be started: {missing}")
    options = replace(options, host=resolve(options.host))
    token = options.token or os.environ.get(DASHBOARD_TOKEN, "")
    if not is_loopback(options.host) and not token:
        raise UsageError(
            f"on {options.host} others reach the dashboard, which shows requests and can cancel them; "
            f"give it a token with --token or {DASHBOARD_TOKEN}"
        )
    _check(token)
    with ReservedPorts(inheritable=True) as ports:
        port = ports.take({"port": Endpoint(options.host, options.port)})["port"].port
        print(f"quire: dashboard at http://{Endpoint(options.host, port)}/", flush=True)
        command = dashboard_command(replace(options, port=port))
        return os.execve(sys.executable, command, {**os.environ, DASHBOARD_TOKEN: token})


def run_top(metrics: str, *, health: str, interval_s: float, once: bool) -> int:
    """`quire top`: this process becomes the overview in the terminal.

    Raises:
        CommandError: something it needs is missing.
    """
    missing = how_to_install()
    if missing:
        raise CommandError(f"top cannot be started: {missing}")
    command = [sys.executable, "-m", "quire_dashboard.top", "--metrics", metrics, "--interval", str(interval_s)]
    return os.execv(
        sys.executable, [*command, *(["--health", health] if health else []), *(["--once"] if once else [])]
    )


class Dashboard(Companion):
    """The dashboard of one `quire serve`. It outlives restarts of the server, and ends with the context.

    Args:
        endpoint: where it listens; on another host than loopback, it asks its visitors for a token.
        server: the server's endpoints by service, `grpc`, `metrics` and `health` among them.
        console: shows that the dashboard has ended by itself.

    Raises:
        UsageError: the token that it was given is too short.
    """

    def __init__(self, endpoint: Endpoint, server: Mapping[str, Endpoint], console: Console) -> None:
        self._console = console
        self._token = os.environ.get(DASHBOARD_TOKEN, "")
        _check(self._token)
        self._is_given = bool(self._token)
        self._asks = not is_loopback(endpoint.host)
        if self._asks and not self._token:
            self._token = secrets.token_urlsafe(24)
        self._server_environment = {
            INTROSPECTION_TOKEN: os.environ.get(INTROSPECTION_TOKEN) or secrets.token_urlsafe(24)
        }
        url, metrics = _client(server["grpc"]), _client(server["metrics"])
        http = [_client(server["http"])] if "http" in server else None
        self._again = f"--url {url} --metrics {metrics}{f' --http {http[0]}' if http else ''} --port {endpoint.port}"
        options = DashboardOptions(
            url=[url], metrics=[metrics], http=http,
            health=_client(server["health"]), host=endpoint.host, port=endpoint.port,
        )  # fmt: skip
        environment = {**os.environ, **self._server_environment, DASHBOARD_TOKEN: self._token}
        super().__init__("dashboard", endpoint, dashboard_command(options), environment)

    @property
    def server_environment(self) -> Mapping[str, str]:
        """The token with which the dashboard may see the server's requests."""
        return self._server_environment

    def __enter__(self) -> "Dashboard":
        super().__enter__()
        if self._asks:
            for line in self._how_to_enter():
                self._console.line(line)
        return self

    def on_end(self, served_s: float) -> None:
        """It is not started again."""
        self._console.line(
            "quire: the dashboard has ended; the server goes on, and another one starts with: quire dashboard "
            f"{self._again}"
        )

    def _how_to_enter(self) -> list[str]:
        """A link on a terminal. Others can read a log: it never holds a token that the operator has chosen."""
        url = f"http://{self._endpoint}/"
        if self._console.is_terminal:
            return [f"quire: the dashboard asks for a token: {url}?token={quote(self._token, safe='')}"]
        whose = f"is that of {DASHBOARD_TOKEN}" if self._is_given else f"of this run is {self._token}"
        return [f"quire: the dashboard asks for a token: {url}", f"quire: the dashboard's token {whose}"]


def _check(token: str) -> None:
    if token and len(token) < _MIN_TOKEN_CHARACTERS:
        raise UsageError(
            f"{DASHBOARD_TOKEN} (or --token) has {len(token)} characters; it must have at least "
            f"{_MIN_TOKEN_CHARACTERS}, such as openssl rand -hex 16 makes"
        )


def _client(endpoint: Endpoint) -> str:
    return f"{endpoint.client_host}:{endpoint.port}"
