"""FolderStore: block files in a folder that several processes use at once.

::

    shared_storage_path/
      usage                         bytes in use, as text; locked while it is read or written
      0f3a…/                        a namespace, in hex
        namespace.json              what it stands for, to be read by people; without it the folder is another program's
        0/                          a rank
          a7/a7c0…                  a block file, by its hash in hex; it was last used at its time of modification
          a7/.a7c0….91be03c2.tmp    one that is being written

Other programs may keep files in the same folder: only files at exactly these places are listed, counted, read and
deleted. No symbolic link below `shared_storage_path` is followed.

The folder never holds more than `max_bytes`, however many processes write:

1. Files are created under the lock, several at once, with their full size, which is counted in `usage`. They are
   written without the lock.
2. They are renamed under the lock, so a count of all files meets each of them once.
3. When there is no room, the least recently used files of all namespaces are deleted until a tenth is free. That counts
   all files anew, and so corrects what a crash left uncounted or counted twice.

A file appears whole or not at all (`rename`), and may be deleted at any moment. A reader checks the digest, and
computes the block if there is none.
"""

import contextlib
import errno
import fcntl
import io
import logging
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from quire_engine.kv_connector.block_file import HEADER_BYTES, MOST_TOGETHER, BlockFileError, check_block, encode_header

logger = logging.getLogger(__name__)

USAGE = "usage"
NAMESPACE = "namespace.json"
PART_SUFFIX = ".tmp"
SHARE_KEPT = 0.9
"""The share of `max_bytes` that is left when files are deleted. Each time all files are listed."""
STALE_SECONDS = 600.0
"""A file that was not finished after so long is deleted: its writer is gone."""
USAGE_BYTES = 32
"""A longer `usage` is another program's file."""
_NAMESPACE_NAME = re.compile(r"[0-9a-f]{64}")
_RANK_NAME = re.compile(r"0|[1-9][0-9]{0,4}")
_PART_NAME = re.compile(r"[0-9a-f]{2}")
_BLOCK_NAME = re.compile(r"[0-9a-f]{64}|\.[0-9a-f]{64}\.[0-9a-f]{8}\.tmp")
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class _NewFile(NamedTuple):
    folder: int
    """A descriptor."""
    name: str
    part: str
    """The name until it is written."""
    block_hash: bytes
    payload: memoryview

    @property
    def num_bytes(self) -> int:
        return HEADER_BYTES + len(self.payload)

    def make(self) -> io.BufferedWriter:
        """Create it with its full size."""
        descriptor = os.open(self.part, _NEW, 0o600, dir_fd=self.folder)
        file = open(descriptor, "wb")  # noqa: SIM115
        try:
            os.truncate(descriptor, self.num_bytes)
        except BaseException:
            file.close()
            raise
        return file


class FolderStore:
    """The files of one rank of one namespace: a `ListedStore`.

    Args:
        folder: `shared_storage_path`.
        namespace: 32 bytes.
        rank: whose blocks.
        max_bytes: limit of all files in the folder.

    Raises:
        OSError: the folder cannot be made, or cannot be written.
    """

    def __init__(self, folder: Path, namespace: bytes, rank: int, max_bytes: int) -> None:
        self._folder = folder
        self._namespace = namespace
        self._max_bytes = max_bytes
        self._names = namespace.hex(), str(rank)
        self.path = folder.joinpath(*self._names)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._made() as own:
            require_writable(self.path)
            for entry in _entries(own, _PART_NAME):  # of another user, from an earlier time
                if entry.is_dir(follow_symlinks=False) and not os.access(entry.name, os.W_OK | os.X_OK, dir_fd=own):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self.path / entry.name))
        with self._lock() as usage:
            self._count(usage, 0)

    @property
    def place(self) -> str:
        return str(self.path.parent)

    def read(self, blocks: Sequence[tuple[bytes, memoryview]]) -> int:
        """The blocks count as used now. A file with something else in it is deleted."""
        num_read = 0
        try:
            with self._opened(*self._names) as own:
                for block_hash, payload in blocks:
                    if not self._read_one(own, block_hash, payload):
                        break
                    num_read += 1
        except FileNotFoundError:  # the folder is gone
            return num_read
        except (BlockFileError, OSError) as error:
            if num_read == 0:
                raise
            logger.warning("a KV block cannot be read: %s", error)
        return num_read

    def _read_one(self, own: int, block_hash: bytes, payload: memoryview) -> bool:
        name = block_hash.hex()
        try:
            with _inside(own, name[:2]) as folder:
                descriptor = os.open(name, os.O_RDONLY | _FILE, dir_fd=folder)
                try:
                    self._read_open(descriptor, block_hash, payload)
                except BlockFileError as error:
                    with contextlib.suppress(OSError):
                        os.unlink(name, dir_fd=folder)  # else it would stand in the way of the block that is saved next
                    raise BlockFileError(f"{self.path}/{name[:2]}/{name}: {error}") from None
                finally:
                    os.close(descriptor)
        except FileNotFoundError:
            return False
        return True

    def _read_open(self, descriptor: int, block_hash: bytes, payload: memoryview) -> None:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise BlockFileError("it is not a file")
        if status.st_size != HEADER_BYTES + len(payload):
            raise BlockFileError(f"it has {status.st_size} bytes instead of {HEADER_BYTES + len(payload)}")
        check_block(_read(descriptor, payload), block_hash, self._namespace, payload)
        with contextlib.suppress(OSError):
            os.utime(descriptor)

    def write(self, blocks: Sequence[tuple[bytes, memoryview]]) -> int:
        """There may be no room for all at once. When one cannot be written, those of its group are not."""
        size = HEADER_BYTES + max((len(payload) for _, payload in blocks), default=0)
        together = max(min(int(self._max_bytes * (1 - SHARE_KEPT)) // size, MOST_TOGETHER), 1)
        for first in range(0, len(blocks), together):
            if not self._write_together(blocks[first : first + together]):
                return first
        return len(blocks)

    def _write_together(self, blocks: Sequence[tuple[bytes, memoryview]]) -> bool:
        with contextlib.ExitStack() as stack:
            own = stack.enter_context(self._made())
            new: list[_NewFile] = []
            for block_hash, payload in blocks:
                name = block_hash.hex()
                folder = stack.enter_context(_inside(own, name[:2], makes=True))
                if not _is_there(name, folder):
                    part = f".{name}.{os.urandom(4).hex()}{PART_SUFFIX}"
                    new.append(_NewFile(folder, name, part, block_hash, payload))
            if not new:
                return True
            try:
                with self._lock() as usage:
                    if not self._count(usage, sum(one.num_bytes for one in new)):
                        return False
                    files = [stack.enter_context(one.make()) for one in new]
                for one, file in zip(new, files, strict=True):
                    file.write(encode_header(one.block_hash, self._namespace, one.payload))
                    file.write(one.payload)
                    file.close()
                with self._lock():
                    for one in new:
                        os.rename(one.part, one.name, src_dir_fd=one.folder, dst_dir_fd=one.folder)
            except BaseException:
                self._take_back(new)
                raise
        return True

    def describe(self, text: str) -> None:
        with self._opened(self._names[0]) as namespace:
            part = f".{NAMESPACE}.{os.urandom(4).hex()}{PART_SUFFIX}"
            _write_new(part, text, namespace)
            os.rename(part, NAMESPACE, src_dir_fd=namespace, dst_dir_fd=namespace)

    def folders(self) -> dict[str, int]:
        with self._opened(*self._names) as own:
            return {
                entry.name: entry.stat(follow_symlinks=False).st_mtime_ns
                for entry in _entries(own, _PART_NAME)
                if entry.is_dir(follow_symlinks=False)
            }

    def hashes(self, folder: str) -> set[bytes]:
        with self._opened(*self._names, folder) as part:
            return {bytes.fromhex(entry.name) for entry in _files(part, folder) if not entry.name.startswith(".")}

    def close(self) -> None:
        """Nothing is open between two calls."""

    @contextlib.contextmanager
    def _opened(self, *names: str) -> Iterator[int]:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(_at(self._folder))
            for name in names:
                folder = stack.enter_context(_inside(folder, name))
            yield folder

    @contextlib.contextmanager
    def _made(self) -> Iterator[int]:
        """A descriptor of the rank's folder, which is made if there is none, as is the mark of its namespace."""
        with self._opened() as root, _inside(root, self._names[0], makes=True) as namespace:
            if not _is_there(NAMESPACE, namespace):
                with contextlib.suppress(FileExistsError):
                    _write_new(NAMESPACE, "", namespace)
            with _inside(namespace, self._names[1], makes=True) as own:
                yield own

    @contextlib.contextmanager
    def _lock(self) -> Iterator[io.FileIO]:
        """`usage`, locked: meanwhile no other process changes it, or creates, renames or deletes files."""
        descriptor = os.open(self._folder / USAGE, os.O_RDWR | os.O_CREAT | _FILE, 0o600)
        with open(descriptor, "r+b", buffering=0) as usage:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size > USAGE_BYTES:
                raise FileExistsError(errno.EEXIST, "it is another program's file", str(self._folder / USAGE))
            fcntl.flock(usage, fcntl.LOCK_EX)
            yield usage

    def _count(self, usage: io.FileIO, num_bytes: int) -> bool:
        """Count the bytes of files that are about to be created, after making room for them; negative: of files that
        are gone. Returns whether there is room."""
        if num_bytes > self._max_bytes:
            return False
        text = usage.read(USAGE_BYTES)
        used = int(text) if text.isdigit() else self._make_room(self._max_bytes)
        if num_bytes > 0 and used + num_bytes > self._max_bytes:
            used = self._make_room(max(min(int(self._max_bytes * SHARE_KEPT), self._max_bytes - num_bytes), 0))
        has_room = used + num_bytes <= self._max_bytes
        usage.seek(0)
        usage.truncate()
        usage.write(str(max(used + num_bytes * has_room, 0)).encode())
        return has_room

    def _take_back(self, new: Sequence["_NewFile"]) -> None:
        with contextlib.suppress(OSError), self._lock() as usage:
            num_bytes = 0
            for one in new:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(one.part, dir_fd=one.folder)
                    num_bytes += one.num_bytes
            self._count(usage, -num_bytes)

    def _make_room(self, max_bytes: int) -> int:
        """Delete the least recently used files until at most so many bytes are left. Returns how many are left."""
        with self._opened() as root:
            files = sorted(_all_files(root))
            used, began_at = sum(file.num_bytes for file in files), time.time()
            for file in files:
                is_part = file.name.endswith(PART_SUFFIX)
                is_left_over = is_part and file.used_at < began_at - STALE_SECONDS
                if (used > max_bytes and not is_part) or is_left_over:
                    try:
                        file.delete(root)
                    except FileNotFoundError:
                        pass
                    except OSError:  # of another user: it stays, and counts
                        continue
                    used -= file.num_bytes
        return used


class _File(NamedTuple):
    """A block's file, finished or not, of any namespace."""

    used_at: float
    num_bytes: int
    folders: tuple[str, str, str]
    name: str

    def delete(self, root: int) -> None:
        namespace, rank, part = self.folders
        with _inside(root, namespace) as a, _inside(a, rank) as b, _inside(b, part) as folder:
            os.unlink(self.name, dir_fd=folder)


def num_places(folder: Path) -> int:
    """How many ranks of all namespaces have blocks in a folder.

    Raises:
        OSError: it cannot be read.
    """
    with _at(folder) as root:
        return sum(1 for _ in _ranks(root))


def _ranks(root: int) -> Iterator[tuple[int, str, str]]:
    """A descriptor of each rank's folder, its namespace and its number, without other users' folders."""
    for namespace in _folders(root, _NAMESPACE_NAME):
        with contextlib.suppress(OSError), _inside(root, namespace) as of_namespace:
            if _is_there(NAMESPACE, of_namespace):
                for rank in _folders(of_namespace, _RANK_NAME):
                    with contextlib.suppress(OSError), _inside(of_namespace, rank) as of_rank:
                        yield of_rank, namespace, rank


def _all_files(root: int) -> Iterator[_File]:
    for of_rank, namespace, rank in _ranks(root):
        for part in _folders(of_rank, _PART_NAME):
            with contextlib.suppress(OSError), _inside(of_rank, part) as folder:
                for entry in _files(folder, part):
                    with contextlib.suppress(OSError):
                        status = entry.stat(follow_symlinks=False)
                        yield _File(status.st_mtime, status.st_size, (namespace, rank, part), entry.name)


def require_writable(folder: Path) -> None:
    """Check that files can be created in a folder, now and not when the first block is kept.

    Raises:
        OSError: they cannot.
    """
    part = folder / f".probe.{os.urandom(4).hex()}{PART_SUFFIX}"
    os.close(os.open(part, _NEW, 0o600))
    part.unlink()


def _read(descriptor: int, payload: memoryview) -> bytes:
    """Read a file into `payload`, except its header, which is returned. A short file is not detected here."""
    header = bytearray(HEADER_BYTES)
    place = os.readv(descriptor, [header, payload])
    while place < HEADER_BYTES + len(payload):
        if place < HEADER_BYTES or not (more := os.readv(descriptor, [payload[place - HEADER_BYTES :]])):
            break
        place += more
    return bytes(header)


@contextlib.contextmanager
def _at(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _inside(folder: int, name: str, makes: bool = False) -> Iterator[int]:
    """A descriptor of a folder in a folder, not through a symbolic link."""
    try:
        descriptor = os.open(name, _FOLDER, dir_fd=folder)
    except FileNotFoundError:
        if not makes:
            raise
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=folder)
        descriptor = os.open(name, _FOLDER, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _is_there(name: str, folder: int) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _write_new(name: str, text: str, folder: int) -> None:
    with open(os.open(name, _NEW, 0o600, dir_fd=folder), "w") as file:
        file.write(text)


def _entries(folder: int, pattern: "re.Pattern[str]") -> "list[os.DirEntry[str]]":
    with os.scandir(folder) as entries:
        return [entry for entry in entries if pattern.fullmatch(entry.name)]


def _folders(folder: int, pattern: "re.Pattern[str]") -> list[str]:
    return [entry.name for entry in _entries(folder, pattern) if entry.is_dir(follow_symlinks=False)]


def _files(folder: int, part: str) -> "Iterator[os.DirEntry[str]]":
    for entry in _entries(folder, _BLOCK_NAME):
        if entry.name.lstrip(".").startswith(part) and entry.is_file(follow_symlinks=False):
            yield entry
