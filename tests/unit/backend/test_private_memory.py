"""The server's shared memory is closed to other users before the first request."""

import logging
import os
import tempfile
from pathlib import Path

import pytest
from quire_backend.private_memory import make_private


def test_what_this_process_has_open_in_shared_memory_is_closed_to_others(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.touch()
    other.chmod(0o644)
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="quire-test-") as region, other.open():
        os.chmod(region.name, 0o644)
        make_private()
        assert os.stat(region.name).st_mode & 0o777 == 0o600
        assert other.stat().st_mode & 0o777 == 0o644


def test_a_region_that_is_elsewhere_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("quire_backend.private_memory._SHARED_MEMORY", "/nowhere/")
    with caplog.at_level(logging.WARNING):
        make_private()
    assert "/nowhere/" in caplog.text
