"""A fleet: the client of several engines, which compute nothing."""

import threading
from collections.abc import Callable, Iterator

import pytest
from quire_engine.replicas import local_replica
from support.fleet import Engine, Fleet


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Fleet]]:
    monkeypatch.setattr(local_replica, "LocalLink", Engine)
    Engine.all, Engine.may_start, Engine.fails_to_start = [], threading.Event(), set()
    Engine.may_start.set()
    yield Fleet
    Engine.may_start.set()
