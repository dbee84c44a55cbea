"""Hosts whose engines compute nothing, and a front for them."""

from collections.abc import Callable
from pathlib import Path

import pytest
from quire_engine.replicas.remote import front_connection, headless, listener
from support.fleet import Fleet
from support.remote import Hosts


@pytest.fixture
def hosts(tmp_path: Path, fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch) -> Hosts:
    for module in (front_connection, headless, listener):
        monkeypatch.setattr(module, "BEAT_SECONDS", 0.05)
    for module in (front_connection, listener):
        monkeypatch.setattr(module, "MAX_MISSED_BEATS", 400)  # a machine with other things to do is not a dead one
    monkeypatch.setattr(headless, "RETRY_SECONDS", 0.02)
    return Hosts(tmp_path)
