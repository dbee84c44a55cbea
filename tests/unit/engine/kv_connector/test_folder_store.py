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


def blob(path: Path, size: int = 20 * SIZE) -> Path:
    """A file of another program that was not used for long."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    os.utime(path, (1, 1))
    return path


def other_programs_files(folder: Path, store: FolderStore) -> list[Path]:
    """Each has a name that a block, or one that is being written, could have."""
    name, hub = hash_of(77).hex(), folder / "models--org--name"
    part = f".{name}.0123abcd.tmp"
    places = [
        hub / "blobs" / name,
        hub / "blobs" / f".{name}.tmp",
        folder / name,
        folder / part,
        store.path.parent / name,
        store.path / name,
        store.path / part,
        store.path / name[:2] / "deeper" / name,
        store.path / ("00" if name[:2] != "00" else "01") / name,  # of blocks that begin otherwise
        store.path / name[:2] / name.upper(),
        store.path / name[:2] / f"{name}.bak",
        store.path / name[:2] / f".{name}.tmp",
        store.path.parent / "one" / name[:2] / name,
        store.path.parent / "00" / name[:2] / name,
        folder / hash_of(78).hex() / "0" / name[:2] / name,  # no store has marked this folder as a namespace
        folder / "ab" / "0" / name[:2] / name,
    ]
    return [blob(place) for place in places]


def test_files_of_other_programs_are_neither_counted_nor_listed_nor_deleted(tmp_path: Path) -> None:
    """A cache of Hugging Face's hub names its files as blocks are named: by 64 hexadecimal digits."""
    store = make_store(tmp_path, max_blocks=10)
    theirs = other_programs_files(tmp_path, store)
    (tmp_path / "usage").unlink()  # all files are counted again
    for number in range(40):
        assert write(store, number) == 1
    assert [path for path in theirs if not path.exists() or path.stat().st_size != 20 * SIZE] == []
    own = sum(path_of(store, number).stat().st_size for number in range(40) if path_of(store, number).exists())
    assert int((tmp_path / "usage").read_text()) == own > 5 * SIZE
    listed = {one for part in store.folders() for one in store.hashes(part)}
    assert listed == {hash_of(number) for number in range(40) if path_of(store, number).exists()}


@pytest.mark.parametrize("place", ["namespace", "rank", "part", "block"])
def test_symbolic_links_lead_nowhere(tmp_path: Path, place: str) -> None:
    """What they point to is what another program keeps in the layout of this store, older than all blocks."""
    folder, elsewhere = tmp_path / "kv", tmp_path / "theirs"
    store, there = make_store(folder, max_blocks=5), make_store(elsewhere, bytes(32), max_blocks=100)
    write(there, *range(100, 120))
    for number in range(100, 120):
        os.utime(path_of(there, number), (1, 1))
    theirs = path_of(there, 100)
    linked = {"namespace": theirs.parents[2], "rank": theirs.parents[1], "part": theirs.parent, "block": theirs}[place]
    link = folder / linked.relative_to(elsewhere)
    for marked in (folder / bytes(32).hex(),) if place != "namespace" else ():
        marked.mkdir()
        (marked / "namespace.json").touch()
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(linked)
    for number in range(20):
        write(store, number)
    assert all(path_of(there, number).exists() for number in range(100, 120))
    assert link.is_symlink()
    assert int((folder / "usage").read_text()) <= 5 * (HEADER_BYTES + SIZE)
    if place in ("namespace", "rank"):
        with pytest.raises(NotADirectoryError):
            make_store(folder, bytes(32))
        return
    through = make_store(folder, bytes(32), max_blocks=5)
    assert {one for part in through.folders() for one in through.hashes(part)} == set()
    with pytest.raises(OSError, match=r"Not a directory|symbolic"):
        read(through, hash_of(100))
    assert theirs.exists()


def test_a_namespaces_description_is_not_written_through_a_link(tmp_path: Path) -> None:
    store, theirs = make_store(tmp_path / "kv"), blob(tmp_path / "theirs", 7)
    marker = store.path.parent / "namespace.json"
    marker.unlink(missing_ok=True)
    marker.symlink_to(theirs)
    store.describe("{}")
    assert theirs.read_bytes() == bytes(7)
    assert marker.read_text() == "{}"


def test_a_hard_link_elsewhere_keeps_a_blocks_content(tmp_path: Path) -> None:
    store = make_store(tmp_path / "kv", max_blocks=5)
    write(store, 1)
    os.link(path_of(store, 1), tmp_path / "kept")
    content = (tmp_path / "kept").read_bytes()
    for number in range(2, 30):
        write(store, number)
    assert not path_of(store, 1).exists()
    write(store, 1)
    assert (tmp_path / "kept").read_bytes() == content
    theirs = blob(tmp_path / "theirs", 300)
    path_of(store, 1).unlink()
    os.link(theirs, path_of(store, 1))
    with pytest.raises(BlockFileError, match="300 bytes"):
        read(store, hash_of(1))
    assert theirs.read_bytes() == bytes(300)


@pytest.mark.parametrize("kind", ["text", "pipe"])
def test_another_programs_usage_file_is_not_overwritten(tmp_path: Path, kind: str) -> None:
    usage = tmp_path / "usage"
    if kind == "pipe":
        os.mkfifo(usage)
    else:
        usage.write_text("how to use this program, in many words\n")
    with pytest.raises(OSError, match="another program's file"):
        make_store(tmp_path)
    assert usage.is_fifo() or usage.read_text().startswith("how to use")


def test_a_folder_that_vanishes_holds_no_blocks_and_is_used_again_once_it_is_back(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    store = make_store(folder)
    write(store, 1)
    os.rename(folder, tmp_path / "away")
    assert read(store, hash_of(1)) is None
    for ask in (lambda: write(store, 2), store.folders, lambda: store.hashes("ab"), lambda: store.describe("{}")):
        with pytest.raises(FileNotFoundError):
            ask()
    assert not folder.exists(), "it may be where a disk is mounted"
    os.rename(tmp_path / "away", folder)
    assert read(store, hash_of(1)) == payload_of(1)
    for path in sorted(folder.rglob("*"), reverse=True):  # emptied, with the store open
        path.rmdir() if path.is_dir() else path.unlink()
    assert read(store, hash_of(1)) is None
    assert write(store, 1)
    assert read(store, hash_of(1)) == payload_of(1)
    assert int((folder / "usage").read_text()) == path_of(store, 1).stat().st_size


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_blocks_of_another_user_stay_and_hinder_no_saves() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        other = make_store(folder, bytes(32), max_blocks=100)
        write(other, *range(100, 110))
        for path in (folder, other.path.parent, other.path):
            path.chmod(0o755)
        (folder / "usage").chmod(0o666)
        for number, part in enumerate(other.path.iterdir()):
            part.chmod(0o755 if number % 2 else 0o700)
        for number in range(100, 110):
            os.utime(path_of(other, number), (1, 1))
        mine = folder / NAMESPACE.hex()
        mine.mkdir()
        os.chown(mine, 65534, 65534)

        def fill() -> None:
            os.setuid(65534)
            store = make_store(folder, max_blocks=20)
            assert sum(write(store, number) for number in range(60)) == 60
            assert read(store, hash_of(59)) == payload_of(59)

        assert error_in_a_child(fill) == 0
        assert all(path_of(other, number).exists() for number in range(100, 110))


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
    left_over = path_of(store, 1).with_name(f".{path_of(store, 1).name}.0123abcd.tmp")
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

    def disk_is_full(*_: object, **__: object) -> None:
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
    index._looking.join(60)
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
    index._looking.join(60)
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
