"""Fixtures for tests against a real tritonserver. Test modules can `from serving import …`."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# --import-mode=importlib leaves sys.path alone, so helpers beside the tests would not be found.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from serving import Server, serve


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The demo model, served with defaults."""
    with serve() as running:
        yield running
