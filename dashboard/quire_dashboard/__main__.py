"""`python -m quire_dashboard`: start Streamlit with settings for an operator's page."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from quire_dashboard.settings import (
    DASHBOARD_TOKEN_VARIABLE,
    INTROSPECTION_TOKEN_VARIABLE,
    INTROSPECTION_TOKENS_VARIABLE,
    TRACES_VARIABLE,
    is_loopback,
    settings_of_servers,
    to_environment,
)

_COLOUR, _COLOUR_ON_DARK = "#2a66b8", "#5a95dd"


def streamlit_flags(host: str, port: int) -> list[str]:
    """Streamlit's flags, which override every config file."""
    options = {
        "server.address": host,
        "server.port": port,
        "server.headless": "true",
        "server.enableStaticServing": "false",
        "server.fileWatcherType": "none",
        "server.runOnSave": "false",
        "server.enableCORS": "true",
        "server.enableXsrfProtection": "true",
        "server.maxUploadSize": 1,
        "browser.gatherUsageStats": "false",
        "browser.serverAddress": host,
        "browser.serverPort": port,
        "client.toolbarMode": "viewer",
        # A traceback is for the log, not for visitors of the page.
        "client.showErrorDetails": "none",
        "client.showErrorLinks": "false",
        "logger.level": "warning",
        # A whole garbage collection after every refresh of every visitor was two thirds of what the dashboard cost.
        "runner.postScriptGC": "false",
        "theme.light.primaryColor": _COLOUR,
        "theme.dark.primaryColor": _COLOUR_ON_DARK,
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    if is_loopback(host):
        # A page of another site whose name resolves to 127.0.0.1 must not get in.
        names = dict.fromkeys((host, "127.0.0.1", "localhost", "[::1]"))
        flags += [f"--server.allowedHosts={name}" for name in names]
    return flags


def main(arguments: Sequence[str] | None = None) -> int:
    """Replace this process by Streamlit.

    Returns:
        2 for a wrong usage; otherwise it does not return.
    """
    parser = argparse.ArgumentParser(prog="python -m quire_dashboard", description=__doc__)
    parser.add_argument("--url", action="append", default=[], help="a server's gRPC; again for each other server")
    parser.add_argument("--metrics", action="append", default=[], help="of each, in order; default: port 8002 of it")
    parser.add_argument("--http", action="append", default=[], help="likewise; default: port 8000 of it")
    parser.add_argument("--health", default="")
    parser.add_argument("--prometheus", default="")
    parser.add_argument("--traces", default=os.environ.get(TRACES_VARIABLE, ""))
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8501)
    given = parser.parse_args(arguments)
    token = os.environ.get(DASHBOARD_TOKEN_VARIABLE, "")
    if not is_loopback(given.host) and not token:
        print(f"quire: on {given.host} the dashboard needs a token; set {DASHBOARD_TOKEN_VARIABLE}", file=sys.stderr)
        return 2
    try:
        servers = settings_of_servers(
            given.url, given.metrics, given.http, health=given.health, prometheus=given.prometheus, traces=given.traces,
            token=token, introspection_token=os.environ.get(INTROSPECTION_TOKEN_VARIABLE, ""),
            introspection_tokens=os.environ.get(INTROSPECTION_TOKENS_VARIABLE, ""),
        )  # fmt: skip
    except ValueError as error:
        print(f"quire: {error}", file=sys.stderr)
        return 2
    environment = {**os.environ, **to_environment(servers)}
    script = str(Path(__file__).with_name("server.py"))
    command = [sys.executable, "-m", "streamlit", "run", script, *streamlit_flags(given.host, given.port)]
    return os.execve(sys.executable, command, environment)


if __name__ == "__main__":
    sys.exit(main())
