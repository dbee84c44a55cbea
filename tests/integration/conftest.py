"""Fixtures for tests against a real tritonserver."""

from collections.abc import Iterator

import pytest
from support.serving import Server, serve


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The demo model, served with defaults."""
    with serve() as running:
        yield running
