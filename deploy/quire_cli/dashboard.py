"""The dashboard: beside a server as a process of its own, or alone; and the overview in the terminal.

Packages that they need may be missing, and are not imported here. The dashboard's settings are in its environment:
every user can see a command line.
"""

import os
import secrets
import sys
from collections.abc import Mapping
from urllib.parse import quote

from quire_dashboard.launch import streamlit_command
from quire_dashboard.settings import (
    DASHBOARD_TOKEN_VARIABLE,
    INTROSPECTION_TOKEN_VARIABLE,
    INTROSPECTION_TOKENS_VARIABLE,
    TRACES_VARIABLE,
    Settings,
    settings_of_servers,
    to_environment,
)
from quire_engine.system.extras import missing_package

from quire_cli.console import Console
from quire_cli.errors import CommandError, UsageError
from quire_cli.options import DashboardOptions, usage_errors
from quire_cli.ports import Endpoint, ReservedPorts, is_loopback, resolve
from quire_cli.server.companion import Companion

_NEEDS = ("streamlit", "prometheus_client", "tritonclient")


def how_to_install() -> str:
    """What is missing to start the dashboard, and how to install it; empty if nothing is."""
    return missing_package("dashboard", *_NEEDS)


def run_dashboard(options: DashboardOptions) -> int:
    """`quire dashboard`: this process becomes the dashboard.

    Raises:
        CommandError: something it needs is missing, or its port is taken.
        UsageError: an option has a bad value, or it would be open to others without a token.
    """
    missing = how_to_install()
    if missing:
        raise CommandError(f"the dashboard cannot be started: {missing}")
    host, token = resolve(options.host), options.token or os.environ.get(DASHBOARD_TOKEN_VARIABLE, "")
    if not is_loopback(host) and not token:
        raise UsageError(
            f"on {host} others reach the dashboard, which shows requests and can cancel them; "
            f"give it a token with --token or {DASHBOARD_TOKEN_VARIABLE}"
        )
    with usage_errors():
        servers = settings_of_servers(
            options.url or (), options.metrics or (), options.http or (), prometheus=options.prometheus,
            traces=options.traces, token=token,
            introspection_token=os.environ.get(INTROSPECTION_TOKEN_VARIABLE, ""),
            introspection_tokens=os.environ.get(INTROSPECTION_TOKENS_VARIABLE, ""),
        )  # fmt: skip
    with ReservedPorts(inheritable=True) as ports:
        endpoint = ports.take({"port": Endpoint(host, options.port)})["port"]
        print(f"quire: dashboard at http://{endpoint}/", flush=True)
        command = streamlit_command(endpoint.host, endpoint.port)
        return os.execve(sys.executable, command, {**os.environ, **to_environment(servers)})


def run_top(metrics: str, *, health: str, interval_s: float, once: bool) -> int:
    """`quire top`: the overview in the terminal.

    Returns:
        The exit code: 1 if with `once` the server does not answer.

    Raises:
        CommandError: something it needs is missing.
        UsageError: an address is wrong.
    """
    missing = how_to_install()
    if missing:
        raise CommandError(f"top cannot be started: {missing}")
    from quire_dashboard.top import Top, show

    with usage_errors():
        top = Top(metrics, interval_s, is_once=once, health=health)
    return show(top)


class Dashboard(Companion):
    """The dashboard of one `quire serve`. It outlives restarts of the server, and ends with the context.

    Args:
        endpoint: where it listens; on another host than loopback, it asks its visitors for a token.
        server: the server's endpoints by service, `grpc`, `http`, `metrics` and `health` among them.
        console: shows that the dashboard has ended by itself.

    Raises:
        UsageError: a variable of the environment has a bad value, such as a short token.
    """

    def __init__(self, endpoint: Endpoint, server: Mapping[str, Endpoint], console: Console) -> None:
        self._console = console
        token = os.environ.get(DASHBOARD_TOKEN_VARIABLE, "")
        self._is_given = bool(token)
        self._asks = not is_loopback(endpoint.host)
        if self._asks and not token:
            token = secrets.token_urlsafe(24)
        with usage_errors():
            self._settings = Settings(
                url=_client(server["grpc"]), http=_client(server["http"]), metrics=_client(server["metrics"]),
                health=_client(server["health"]), traces=os.environ.get(TRACES_VARIABLE, ""), token=token,
                introspection_token=os.environ.get(INTROSPECTION_TOKEN_VARIABLE) or secrets.token_urlsafe(24),
            )  # fmt: skip
        environment = {**os.environ, **to_environment([self._settings])}
        super().__init__("dashboard", endpoint, streamlit_command(endpoint.host, endpoint.port), environment)

    @property
    def server_environment(self) -> Mapping[str, str]:
        """The token with which the dashboard may see the server's requests."""
        return {INTROSPECTION_TOKEN_VARIABLE: self._settings.introspection_token}

    def __enter__(self) -> "Dashboard":
        super().__enter__()
        if self._asks:
            for line in self._how_to_enter():
                self._console.line(line)
        return self

    def on_end(self, served_s: float) -> None:
        """It is not started again."""
        own = self._settings
        self._console.line(
            "quire: the dashboard has ended; the server goes on, and another one starts with: quire dashboard "
            f"--url {own.url} --metrics {own.metrics} --http {own.http} --port {self._endpoint.port}"
        )

    def _how_to_enter(self) -> list[str]:
        """A link on a terminal. Others can read a log: it never holds a token that the operator has chosen."""
        url = f"http://{self._endpoint}/"
        if self._console.is_terminal:
            return [f"quire: the dashboard asks for a token: {url}?token={quote(self._settings.token, safe='')}"]
        whose = f"is that of {DASHBOARD_TOKEN_VARIABLE}" if self._is_given else f"of this run is {self._settings.token}"
        return [f"quire: the dashboard asks for a token: {url}", f"quire: the dashboard's token {whose}"]


def _client(endpoint: Endpoint) -> str:
    return f"{endpoint.client_host}:{endpoint.port}"
