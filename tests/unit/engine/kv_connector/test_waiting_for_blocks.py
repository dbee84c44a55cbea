"""A block that another engine is about to keep is waited for, but not for long, and nobody waits behind it."""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from quire_engine.kv_connector import connector_worker
from quire_engine.kv_connector.board import ROW, TransferBoard
from quire_engine.kv_connector.connector_worker import _Reader
from quire_engine.kv_connector.folder_store import FolderStore
from quire_engine.messages import KVLoad

HASHES = [bytes([number]) * 32 for number in range(4)]


class Reading:
    """A reader, and the folder that another engine writes to."""

    def __init__(self, folder: Path) -> None:
        self.store = FolderStore(folder, b"n" * 32, 0, 1 << 20)
        self.board = TransferBoard(np.zeros((1, ROW), dtype=np.int64))
        self.reader = _Reader(self.store, self.board, 0, 8)

    def write(self, number: int) -> None:
        self.store.write([(HASHES[number], memoryview(bytes([number]) * 8))])

    def loaded(self, number: int) -> int:
        """Waits for the end of a load; its slot is its number."""
        deadline = time.monotonic() + 30
        while (count := self.board.loaded(number, number)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return count


@pytest.fixture
def reading(tmp_path: Path) -> Iterator[Reading]:
    one = Reading(tmp_path)
    yield one
    one.reader.close()


def test_blocks_that_come_are_waited_for_and_others_are_not_held_up(reading: Reading) -> None:
    reading.write(0)
    reading.reader.begin(KVLoad(1, 1, HASHES[:2], is_coming=True))
    reading.reader.begin(KVLoad(2, 2, HASHES[:1]))
    reading.reader.begin(KVLoad(3, 3, HASHES[1:2]))
    assert (reading.loaded(2), reading.loaded(3)) == (1, 0)
    assert reading.board.loaded(1, 1) is None
    reading.write(1)
    assert reading.loaded(1) == 2
    assert np.array_equal(reading.reader.take(1).numpy(), np.repeat(np.uint8([[0], [1]]), 8, axis=1))


def test_after_a_vain_wait_nobody_waits_for_a_while(reading: Reading, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector_worker, "COMING_SECONDS", 0.01)
    reading.reader.begin(KVLoad(1, 1, HASHES, is_coming=True))
    assert reading.loaded(1) == 0
    monkeypatch.setattr(connector_worker, "COMING_SECONDS", 1e9)
    reading.reader.begin(KVLoad(2, 2, HASHES, is_coming=True))
    assert reading.loaded(2) == 0


def test_a_load_that_is_forgotten_says_nothing_about_the_next_one_in_its_slot(reading: Reading) -> None:
    reading.reader.begin(KVLoad(1, 1, HASHES, is_coming=True))
    reading.reader.begin(KVLoad(2, 2, HASHES))
    reading.loaded(2)  # the first one waits by now
    reading.reader.forget_all()
    reading.reader.begin(KVLoad(3, 1, HASHES[:1]))
    deadline = time.monotonic() + 30
    while (count := reading.board.loaded(1, 3)) is None:
        assert time.monotonic() < deadline
    reading.reader.begin(KVLoad(4, 4, HASHES))
    reading.loaded(4)
    assert (count, reading.board.loaded(1, 3)) == (0, 0)
