"""Several stores, one after the other: the longest prefix from wherever it is, kept in all, whatever one does."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from quire_engine.kv_connector.block_file import HEADER_BYTES, BlockFileError
from quire_engine.kv_connector.block_index import BlockIndex
from quire_engine.kv_connector.board import ROW, TierOutcome, TransferBoard
from quire_engine.kv_connector.folder_store import FolderStore
from quire_engine.kv_connector.tiered_store import PAUSE_SECONDS, TieredIndex, TieredStore
from quire_engine.system.crash_loop import CircuitBreaker

SIZE = 300
HASHES = [bytes([number]) * 32 for number in range(8)]
SAVED, LOADED, SAVE_FAILED, LOAD_FAILED = TierOutcome


class Broken(FolderStore):
    """Its disk is gone."""

    def read(self, blocks: Sequence[tuple[bytes, memoryview]]) -> int:
        raise OSError("it is gone")

    def write(self, blocks: Sequence[tuple[bytes, memoryview]]) -> int:
        raise OSError("it is gone")


class Tiers:
    """Two stores, and what is counted of them."""

    def __init__(self, folder: Path, first: type[FolderStore] = FolderStore, max_blocks: int = 100) -> None:
        self.counts = [[0] * len(TierOutcome) for _ in range(2)]
        self.first = first(folder / "first", bytes(32), 0, max_blocks * (HEADER_BYTES + SIZE))
        self.second = FolderStore(folder / "second", bytes(32), 0, 1 << 20)
        self.both = TieredStore([self.first, self.second], self.count)

    def count(self, tier: int, outcome: TierOutcome, number: int) -> None:
        self.counts[tier][outcome] += number

    def read(self, *numbers: int) -> int:
        rooms = [(HASHES[number], memoryview(bytearray(SIZE))) for number in numbers]
        count = self.both.read(rooms)
        assert [room for _, room in rooms[:count]] == [payload(number) for number in numbers[:count]]
        return count


def payload(number: int) -> memoryview:
    return memoryview(bytes([number]) * SIZE)


def write(store: FolderStore | TieredStore, *numbers: int) -> int:
    return store.write([(HASHES[number], payload(number)) for number in numbers])


def test_blocks_come_from_the_first_that_has_them_and_are_kept_there_again(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path)
    write(tiers.first, 0, 1, 4)
    write(tiers.second, 2, 3, 4)
    assert tiers.read(0, 1, 2, 3, 4, 5) == 5
    assert tiers.counts == [[3, 2, 0, 0], [0, 3, 0, 0]]
    assert tiers.read(0, 1, 2, 3, 4) == 5
    assert tiers.counts == [[3, 7, 0, 0], [0, 3, 0, 0]]
    assert tiers.read(7) == 0


def test_who_only_loads_keeps_nothing_again(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path)
    write(tiers.second, 0)
    tiers.both = TieredStore([tiers.first, tiers.second], tiers.count, saves=False)
    assert [tiers.read(0), tiers.read(0)] == [1, 1]
    assert tiers.counts == [[0, 0, 0, 0], [0, 2, 0, 0]]


def test_all_keep_what_is_written_as_far_as_they_have_room(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path, max_blocks=2)
    assert write(tiers.both, *range(6)) == 6
    assert tiers.counts == [[6, 0, 0, 0], [6, 0, 0, 0]]
    assert tiers.read(*range(6)) == 6
    assert tiers.counts[1][LOADED] > 0, "the first one has room for two"


def test_where_one_fails_the_other_goes_on(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path, Broken)
    assert write(tiers.both, 0, 1) == 2
    assert tiers.read(0, 1) == 2
    assert tiers.counts[0] == [0, 0, 4, 1], "what it does not keep again counts, too"
    assert tiers.counts[1] == [2, 2, 0, 0]
    with pytest.raises(OSError, match="it is gone"):
        tiers.read(5)


def test_a_store_that_failed_is_not_written_before_its_pause_is_over(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path)
    now = 100.0
    tiers.both._breakers[0] = CircuitBreaker(lambda: now)
    tiers.both._breakers[0].trip(PAUSE_SECONDS)
    assert write(tiers.both, 0) == 1
    now += PAUSE_SECONDS - 1
    assert write(tiers.both, 1) == 1
    now += 1
    assert write(tiers.both, 2) == 1
    assert [len([*tiers.first.path.glob(f"{number:02}/*")]) for number in range(3)] == [0, 0, 1]
    assert tiers.counts[0] == [1, 0, 2, 0]


def test_a_failed_write_opens_the_breaker(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path, Broken)
    assert not tiers.both._breakers[0].is_open
    write(tiers.both, 0)
    assert [breaker.is_open for breaker in tiers.both._breakers] == [True, False]


def test_a_single_store_is_read_once_for_what_it_lacks(tmp_path: Path) -> None:
    calls = []

    class Counted(FolderStore):
        def read(self, blocks: Sequence[tuple[bytes, memoryview]]) -> int:
            calls.append(len(blocks))
            return super().read(blocks)

    store = Counted(tmp_path, bytes(32), 0, 1 << 20)
    write(store, 0, 1)
    rooms = [(HASHES[number], memoryview(bytearray(SIZE))) for number in range(4)]
    assert (TieredStore([store]).read(rooms), calls) == (2, [4])


def test_a_damaged_block_comes_from_the_other(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path)
    write(tiers.both, 0, 1)
    (path,) = tiers.first.path.glob("00/*")
    path.write_bytes(b"rubbish")
    assert tiers.read(0, 1) == 2
    assert tiers.counts[0][LOAD_FAILED] == 1
    for one in tmp_path.glob("*/*/0/01/*"):
        one.write_bytes(b"rubbish")
    assert tiers.read(0, 1) == 1
    assert tiers.read(1) == 0


def test_a_block_that_is_damaged_everywhere_is_an_error(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path)
    write(tiers.second, 1)
    for one in tmp_path.glob("*/*/0/01/*"):
        one.write_bytes(b"rubbish")
    with pytest.raises(BlockFileError, match="bytes instead of"):
        tiers.read(1)


def test_the_index_knows_what_is_in_any_and_what_is_in_all(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path)
    write(tiers.first, 0, 1, 3)
    write(tiers.second, 1, 2)
    index = TieredIndex([BlockIndex(tiers.first), BlockIndex(tiers.second)])
    assert index.num_stored(HASHES[:6]) == 4
    assert index.num_stored(HASHES[4:]) == 0
    assert [index.is_kept(one) for one in HASHES[:4]] == [False, True, False, False]
    index.forget(HASHES[1])
    assert index.num_stored(HASHES[:6]) == 1
    index.add(HASHES[1])
    assert index.num_stored(HASHES[:6]) == 4
    index.close()


def test_a_block_is_in_a_tier_when_all_ranks_have_their_part_there() -> None:
    board = TransferBoard(np.zeros((2, ROW), dtype=np.int64))
    for rank, number in ((0, 5), (1, 3)):
        board.count_tier(rank, 0, SAVED, number)
        board.count_tier(rank, 2, LOAD_FAILED, number)
        board.put(rank, 63, 7, 1)
    assert board.tiers(3) == [[3, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 5]]
    assert board.loaded(63, 7) == 1
    assert board.saved() == (0, 0, 0)
