"""The command that serves the dashboard: Streamlit, with flags for an operator's page."""

import sys
from pathlib import Path

from quire_dashboard.settings import is_loopback

_COLOUR, _COLOUR_ON_DARK = "#2a66b8", "#5a95dd"


def streamlit_command(host: str, port: int) -> list[str]:
    """The command. Its flags override every config file of Streamlit; the settings come by environment.

    Args:
        host: where it listens.
        port: likewise.
    """
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
    script = str(Path(__file__).with_name("server.py"))
    return [sys.executable, "-m", "streamlit", "run", script, *flags]
