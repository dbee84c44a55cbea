"""The watchers of all servers that this process was started for, shared by all visitors; each reads in its own thread.

A server that is away costs the others nothing: pages ask the chosen server alone, and of the others show what their
watchers have read.
"""

import threading
import time
from collections.abc import Mapping

import streamlit as st

from quire_dashboard.monitor import Monitor
from quire_dashboard.settings import Settings

SERVER = "server"
"""In the visitor's session, and in the address: the URL of the chosen one."""
_FIRST_READINGS_S = 1.0
"""How long the start waits for the readings of several servers, of which some may be away."""

_lock = threading.Lock()
_monitors: dict[Settings, Monitor] = {}


def monitors() -> Mapping[str, Monitor]:
    """All of them by the URL of their server, in the order that the servers were given in."""
    servers = Settings.all_from_environment()
    with _lock:
        fresh = [settings for settings in servers if settings not in _monitors]
        for settings in fresh:
            _monitors[settings] = Monitor(settings)
            _monitors[settings].start()
        end = time.monotonic() + _FIRST_READINGS_S
        for settings in fresh:
            _monitors[settings].wait(None if len(servers) == 1 else max(0.0, end - time.monotonic()))
        return {settings.url: _monitors[settings] for settings in servers}


def monitor() -> Monitor:
    """The watcher of the server that the visitor has chosen."""
    found = monitors()
    chosen = st.session_state.get(SERVER, "") if len(found) > 1 else ""
    return found.get(chosen) or next(iter(found.values()))


def close_monitors() -> None:
    """End all watchers."""
    with _lock:
        for found in _monitors.values():
            found.prepare_to_stop()
        for found in _monitors.values():
            found.stop()
        _monitors.clear()
