"""A stand-in for the server, and what is left of a dashboard in this process."""

from collections.abc import Iterator

import pytest
from quire_dashboard.settings import Settings, to_environment
from quire_dashboard.views.load import stop_all
from quire_dashboard.watchers import close_monitors
from support.fake_triton import TOKEN, FakeTriton, fake_triton


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTriton]:
    """A running stand-in, which this process' dashboard is pointed at."""
    with fake_triton() as running:
        settings = Settings(url=running.url, metrics=running.metrics, introspection_token=TOKEN)
        for name, value in to_environment([settings]).items():
            monkeypatch.setenv(name, value)
        yield running
        stop_all()
        close_monitors()
