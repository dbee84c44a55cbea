"""Files in a bounded folder: what is read is what was written, or nothing."""

import errno
import hashlib
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quire_engine.kv_connector import block_index, folder_store
from quire_engine.kv_connector.block_file import HEADER_BYTES, BlockFileError, encode_header
from quire_engine.kv_connector.block_index import LOOK_SECONDS, BlockIndex
from quire_engine.kv_connector.folder_store import FolderStore
from support.processes import error_in_a_child

NAMESPACE = hashlib.sha256(b"a model").digest()
SIZE = 1000


def hash_of(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def payload_of(number: int) -> memoryview:
    return memoryview(bytes([number % 251]) * SIZE)


def make_store(folder: Path, namespace: bytes = NAMESPACE, rank: int = 0, max_blocks: int = 100) -> FolderStore:
    return FolderStore(folder, namespace, rank, max_blocks * (HEADER_BYTES + SIZE))


def write(store: FolderStore, *numbers: int) -> int:
    return store.write([(hash_of(number), payload_of(number)) for number in numbers])


def read(store: FolderStore, block_hash: bytes) -> memoryview | None:
    payload = memoryview(bytearray(SIZE))
    return payload if store.read([(block_hash, payload)]) else None


def path_of(store: FolderStore, number: int) -> Path:
    name = hash_of(number).hex()
    return store.path / name[:2] / name


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name != "usage")


def test_another_process_reads_what_one_has_written(tmp_path: Path) -> None:
    assert write(make_store(tmp_path), 1)
    store = make_store(tmp_path)
    assert read(store, hash_of(1)) == payload_of(1)
    assert read(store, hash_of(2)) is None
    assert read(make_store(tmp_path, rank=1), hash_of(1)) is None
    assert read(make_store(tmp_path, namespace=bytes(32)), hash_of(1)) is None


def test_many_are_written_together_and_what_is_there_is_not_written_again(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    write(store, 3, 4)
    kept = path_of(store, 3).stat().st_ino
    assert write(store, *range(20)) == 20
    assert path_of(store, 3).stat().st_ino == kept
    assert [read(store, hash_of(number)) for number in range(20)] == [payload_of(number) for number in range(20)]
    assert int((tmp_path / "usage").read_text()) == size_of(tmp_path) == 20 * (HEADER_BYTES + SIZE)
    assert store.write([]) == 0


def truncate(path: Path) -> None:
    os.truncate(path, 500)


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def flip_a_bit(path: Path, place: int = HEADER_BYTES + 77) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)


def flip_in_the_header(path: Path) -> None:
    flip_a_bit(path, 20)


def flip_in_the_digest(path: Path) -> None:
    flip_a_bit(path, HEADER_BYTES - 1)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [truncate, lengthen, flip_a_bit, flip_in_the_header, flip_in_the_digest, empty])
def test_a_damaged_file_is_found_and_deleted(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    store = make_store(tmp_path)
    write(store, 1)
    damage(path_of(store, 1))
    with pytest.raises(BlockFileError, match=hash_of(1).hex()):
        read(store, hash_of(1))
    assert read(store, hash_of(1)) is None
    assert write(store, 1)
    assert read(store, hash_of(1)) == payload_of(1)


def test_one_among_several_is_deleted_so_that_it_can_be_saved_again(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    write(store, 1, 2, 3)
    flip_a_bit(path_of(store, 2))
    rooms = [(hash_of(number), memoryview(bytearray(SIZE))) for number in (1, 2, 3)]
    assert store.read(rooms) == 1
    assert write(store, 2) == 1
    assert store.read(rooms) == 3


def test_what_others_have_in_the_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "theirs.txt").write_bytes(bytes(20 * SIZE))
    write(make_store(tmp_path, max_blocks=2), *range(9))
    assert (tmp_path / "theirs.txt").exists()


def test_a_file_in_the_place_of_another_is_found(tmp_path: Path) -> None:
    store, other = make_store(tmp_path), make_store(tmp_path, namespace=bytes(32))
    for one in (store, other):
        write(one, 1)
    write(store, 2)
    os.replace(path_of(store, 2), path_of(store, 1))
    with pytest.raises(BlockFileError, match="another block"):
        read(store, hash_of(1))
    os.replace(path_of(other, 1), path_of(store, 1))
    with pytest.raises(BlockFileError, match="another block"):
        read(store, hash_of(1))


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    write(store, 1)
    path_of(store, 1).unlink()
    os.mkfifo(path_of(store, 1))
    with pytest.raises(BlockFileError, match="not a file"):
        read(store, hash_of(1))
    assert not path_of(store, 1).exists()
    path_of(store, 1).symlink_to("/dev/zero")
    with pytest.raises(OSError, match="symbolic"):
        read(store, hash_of(1))


def test_what_was_not_used_for_longest_makes_room_for_all_who_share_the_folder(tmp_path: Path) -> None:
    stores = [make_store(tmp_path, max_blocks=10), make_store(tmp_path, bytes(32), 1, max_blocks=10)]
    for number in range(10):
        write(stores[number % 2], number)
        os.utime(path_of(stores[number % 2], number), (number, number))
    assert read(stores[0], hash_of(0)) is not None  # it is used now
    for number in range(10, 40):
        assert write(stores[number % 2], number)
        assert size_of(tmp_path) <= 10 * (HEADER_BYTES + SIZE)
        if number == 10:
            assert read(stores[1], hash_of(1)) is None
            assert path_of(stores[0], 0).exists()
    assert read(stores[1], hash_of(39)) == payload_of(39)
    there = size_of(tmp_path)
    assert not stores[0].write([(hash_of(99), memoryview(bytes(12 * SIZE)))])
    assert size_of(tmp_path) == there, "what can never fit makes no room"


def test_writers_at_once_keep_to_the_limit(tmp_path: Path) -> None:
    def write_many(store: FolderStore, numbers: range, together: int) -> None:
        for number in numbers[::together]:
            write(store, *range(number, number + together))

    threads = [
        threading.Thread(
            target=write_many, args=(make_store(tmp_path, max_blocks=30), range(start, start + 40), together)
        )
        for start, together in ((0, 1), (20, 5), (40, 20))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 10 * SIZE < size_of(tmp_path) <= 30 * (HEADER_BYTES + SIZE)
    store = make_store(tmp_path)
    stored = [number for number in range(80) if read(store, hash_of(number)) == payload_of(number)]
    assert len(stored) * (HEADER_BYTES + SIZE) == size_of(tmp_path)


def test_the_room_of_a_file_that_is_being_written_is_not_given_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = make_store(tmp_path, max_blocks=5), make_store(tmp_path, max_blocks=5)

    def fill(*arguments: Any) -> bytes:
        monkeypatch.undo()
        for number in range(1, 12):
            write(other, number)
        assert size_of(tmp_path) <= 5 * (HEADER_BYTES + SIZE)
        return encode_header(*arguments)

    monkeypatch.setattr(folder_store, "encode_header", fill)
    assert write(store, 0)
    assert size_of(tmp_path) <= 5 * (HEADER_BYTES + SIZE)
    assert read(store, hash_of(0)) == payload_of(0)


def test_what_a_crash_leaves_is_counted_again(tmp_path: Path) -> None:
    store = make_store(tmp_path, max_blocks=10)
    write(store, 1)
    left_over = path_of(store, 1).with_name(".abc.1234.tmp")
    left_over.write_bytes(bytes(SIZE))
    os.utime(left_over, (1, 1))
    for usage in ("rubbish", str(10**9)):
        (tmp_path / "usage").write_text(usage)
        assert make_store(tmp_path, max_blocks=10).write([(hash_of(len(usage)), payload_of(2))])
        assert not left_over.exists()
        assert int((tmp_path / "usage").read_text()) == size_of(tmp_path)
    assert read(store, hash_of(1)) == payload_of(1)


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path)
    write(store, 1)

    def disk_is_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", disk_is_full)
    with pytest.raises(OSError, match="No space"):
        write(store, 2)
    assert int((tmp_path / "usage").read_text()) == size_of(tmp_path) == HEADER_BYTES + SIZE


def test_the_index_knows_own_blocks_at_once_and_those_of_others_after_a_while(tmp_path: Path) -> None:
    now = [0.0]
    store, other = make_store(tmp_path), make_store(tmp_path)
    write(store, 1)
    index = BlockIndex(store, lambda: now[0])
    assert index.num_stored([hash_of(1), hash_of(2)]) == 1
    index.add(hash_of(2))
    assert index.num_stored([hash_of(1), hash_of(2)]) == 2
    index.forget(hash_of(1))
    assert index.num_stored([hash_of(1), hash_of(2)]) == 0
    index.add(hash_of(1))
    write(other, 3)
    assert index.num_stored([hash_of(3)]) == 0
    now[0] += LOOK_SECONDS + 1
    index.num_stored([])
    index._looking.join(10)
    assert index.num_stored([hash_of(3), hash_of(1)]) == 2


def test_a_store_that_does_not_list_its_blocks_at_once_holds_up_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_index, "FIRST_LOOK_SECONDS", 0.01)
    store, may_answer, list_folders = make_store(tmp_path), threading.Event(), FolderStore.folders
    write(store, 1)

    def folders(self: FolderStore) -> dict[str, int]:
        may_answer.wait()
        return list_folders(self)

    monkeypatch.setattr(FolderStore, "folders", folders)
    index = BlockIndex(store, description="{}")
    index.add(hash_of(2))
    assert index.num_stored([hash_of(2), hash_of(1)]) == 1
    may_answer.set()
    index._looking.join(10)
    assert index.num_stored([hash_of(2), hash_of(1)]) == 2
    assert next(tmp_path.glob("*/namespace.json")).read_text() == "{}"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("place", ["the folder", "the rank's", "that of the blocks", "usage"])
def test_a_folder_that_cannot_be_written_is_told_at_once(place: str) -> None:
    """It was another user's before; what is in it may be read."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(make_store(folder), 1)
        everything = [folder, *folder.rglob("*")]
        for path in everything:
            path.chmod(0o777)
        rank = next(folder.glob("*/0"))
        closed = {"the folder": folder, "the rank's": rank, "that of the blocks": next(rank.iterdir())}.get(place)
        (closed or folder / "usage").chmod(0o555)

        def try_it() -> None:
            os.setuid(65534)
            if place == "the folder":
                make_store(folder, hashlib.sha256(b"another model").digest())
            else:
                make_store(folder)

        assert error_in_a_child(try_it) == errno.EACCES
