"""Fixtures for tests against a real tritonserver."""

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from quire_cli.server.run_directory import sweep
from support import serving
from support.serving import Server, serve
from support.sweeps import no_sweeps


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The demo model, served with defaults."""
    with serve() as running:
        yield running


@pytest.fixture(scope="session")
def gateway_server() -> Iterator[Server]:
    """The demo model with a gateway; slow enough that a client can leave in between."""
    with serve("--openai", "--openai-port", "0", step_seconds=0.005) as running:
        yield running


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    """`support.serving.start` for servers that a test ends itself: one that it did not come to end is ended here."""
    servers: list[Server] = []

    def start_one(*args: str, **options: Any) -> Server:
        servers.append(serving.start(*args, **options))
        return servers[-1]

    yield start_one
    running = [server for server in servers if server.process.poll() is None]
    if running:
        with no_sweeps():
            for server in running:
                server.stop(signal.SIGKILL)
            sweep()
