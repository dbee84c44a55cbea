"""FolderStore: block files in a folder that several processes use at once.

::

    shared_storage_path/
      usage                         bytes in use, as text; who reads or writes it holds a lock on it
      0f3a…/                        a namespace, in hex
        namespace.json              what it stands for, for people
        0/                          a rank
          a7/a7c0…                  a block file, by its hash in hex; it was last used at its time of modification
          a7/.a7c0….91be03c2.tmp    one that is being written

The folder never holds more than `max_bytes`, whoever writes:

1. Files are made under the lock, some at once, with all their bytes, which are counted in `usage`. They are written
   without it.
2. They get their names under the lock: whoever counts all files meets each of them once.
3. When there is no room, the files that were not used for longest are deleted, of all namespaces, until a tenth is
   free. That counts all files anew, so what a crash left uncounted or counted twice is put right.

A file appears whole or not at all (`rename`), and may go at any moment: who reads it finds the digest right, or
computes the block.
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

__all__ = ["FolderStore", "require_writable"]

logger = logging.getLogger(__name__)

USAGE = "usage"
NAMESPACE = "namespace.json"
PART_SUFFIX = ".tmp"
SHARE_KEPT = 0.9
"""Of `max_bytes`, after files were deleted: each time all files are looked at."""
STALE_SECONDS = 600.0
"""After so long a file that was never finished is deleted: its writer is gone."""
_OWN_NAME = re.compile(r"[0-9a-f]{64}|\..+\.tmp")
"""Of blocks, and of those that are being written. Whatever else is in the folder is not touched."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class _NewFile(NamedTuple):
    """A block that is to be written."""

    path: str
    part: str
    """Its name until it is written."""
    block_hash: bytes
    payload: memoryview

    @classmethod
    def of(cls, path: str, block_hash: bytes, payload: memoryview) -> "_NewFile":
        folder, name = os.path.split(path)
        return cls(path, f"{folder}/.{name}.{os.urandom(4).hex()}{PART_SUFFIX}", block_hash, payload)

    @property
    def num_bytes(self) -> int:
        return HEADER_BYTES + len(self.payload)

    def make(self) -> io.BufferedWriter:
        """It has all its bytes from its beginning on. The folder that it belongs in may not be there yet."""
        try:
            descriptor = os.open(self.part, _NEW, 0o600)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(self.part), mode=0o700, exist_ok=True)
            descriptor = os.open(self.part, _NEW, 0o600)
        file = open(descriptor, "wb")  # noqa: SIM115
        try:
            os.truncate(descriptor, self.num_bytes)
        except BaseException:
            file.close()
            raise
        return file


class FolderStore:
    """The files of one rank of one namespace. Every method may be called by any thread.

    Args:
        folder: `shared_storage_path`.
        namespace: 32 bytes.
        rank: whose blocks.
        max_bytes: of all files of the folder.

    Raises:
        OSError: the folder is not there and cannot be made, or cannot be written.
    """

    def __init__(self, folder: Path, namespace: bytes, rank: int, max_bytes: int) -> None:
        self._folder = folder
        self._namespace = namespace
        self._max_bytes = max_bytes
        self.path = folder / namespace.hex() / str(rank)
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_writable(self.path)
        for entry in os.scandir(self.path):  # of another user, from an earlier time
            if entry.is_dir() and not os.access(entry.path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), entry.path)
        with self._lock() as usage:
            self._count(usage, 0)

    @property
    def place(self) -> str:
        """The namespace's folder."""
        return str(self.path.parent)

    def read(self, blocks: Sequence[tuple[bytes, memoryview]]) -> int:
        """Read blocks. They count as used now.

        Args:
            blocks: the hash of each, and where to; of as many bytes as it should have.

        Returns:
            How many of them are there, up to the first that is not.

        Raises:
            BlockFileError: there is something else in the place of the first. Such files are deleted.
            OSError: it cannot be read.
        """
        num_read = 0
        try:
            for block_hash, payload in blocks:
                if not self._read_one(self._path_of(block_hash), block_hash, payload):
                    break
                num_read += 1
        except (BlockFileError, OSError) as error:
            if num_read == 0:
                raise
            logger.warning("a KV block cannot be read: %s", error)
        return num_read

    def _read_one(self, path: str, block_hash: bytes, payload: memoryview) -> bool:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise BlockFileError("it is not a file")
            if status.st_size != HEADER_BYTES + len(payload):
                raise BlockFileError(f"it has {status.st_size} bytes instead of {HEADER_BYTES + len(payload)}")
            check_block(_read(descriptor, payload), block_hash, self._namespace, payload)
            with contextlib.suppress(OSError):
                os.utime(descriptor)
        except BlockFileError as error:
            with contextlib.suppress(OSError):
                os.unlink(path)  # else it would stand in the way of the block that is saved next
            raise BlockFileError(f"{path}: {error}") from None
        finally:
            os.close(descriptor)
        return True

    def write(self, blocks: Sequence[tuple[bytes, memoryview]]) -> int:
        """Keep blocks that are not there already.

        Args:
            blocks: each with its hash; of one size.

        Returns:
            How many of them are there now, the first ones: there may be no room for all at once.

        Raises:
            OSError: one cannot be written, and some of those are not that would have been written with it.
        """
        size = HEADER_BYTES + max((len(payload) for _, payload in blocks), default=0)
        together = max(min(int(self._max_bytes * (1 - SHARE_KEPT)) // size, MOST_TOGETHER), 1)
        for first in range(0, len(blocks), together):
            if not self._write_together(blocks[first : first + together]):
                return first
        return len(blocks)

    def _write_together(self, blocks: Sequence[tuple[bytes, memoryview]]) -> bool:
        found = [_NewFile.of(self._path_of(block_hash), block_hash, payload) for block_hash, payload in blocks]
        new = [one for one in found if not os.path.exists(one.path)]
        if not new:
            return True
        with contextlib.ExitStack() as stack:
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
                        os.rename(one.part, one.path)
            except BaseException:
                self._take_back(new)
                raise
        return True

    def prepare(self, block_bytes: int) -> None:
        """See `BlockStore`: they may be of any size."""

    def describe(self, text: str) -> None:
        """Write down what the namespace stands for.

        Raises:
            OSError: it cannot be written.
        """
        (self.path.parent / NAMESPACE).write_text(text)

    def folders(self) -> dict[str, int]:
        """Those of blocks, and when each last changed, in nanoseconds.

        Raises:
            OSError: the folder cannot be read.
        """
        return {entry.name: entry.stat().st_mtime_ns for entry in os.scandir(self.path)}

    def hashes(self, folder: str) -> set[bytes]:
        """Of the blocks that are in one of them now.

        Raises:
            OSError: it cannot be read.
        """
        names = os.listdir(self.path / folder)
        return {bytes.fromhex(name) for name in names if len(name) == 64 and not name.startswith(".")}

    def close(self) -> None:
        """Nothing is open between two calls."""

    def _path_of(self, block_hash: bytes) -> str:
        name = block_hash.hex()
        return f"{self.path}/{name[:2]}/{name}"

    @contextlib.contextmanager
    def _lock(self) -> Iterator[io.FileIO]:
        """`usage`, while no other process changes it or which files there are."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(self._folder / USAGE, flags, 0o600), "r+b", buffering=0) as usage:
            fcntl.flock(usage, fcntl.LOCK_EX)
            yield usage

    def _count(self, usage: io.FileIO, num_bytes: int) -> bool:
        """Count bytes of files that are about to be made, after making room for them if there is none; or of those that
        are gone. Returns whether there is room."""
        if num_bytes > self._max_bytes:
            return False
        text = usage.read(32)
        used = int(text) if text.isdigit() else self._make_room(self._max_bytes)
        if num_bytes > 0 and used + num_bytes > self._max_bytes:
            used = self._make_room(max(min(int(self._max_bytes * SHARE_KEPT), self._max_bytes - num_bytes), 0))
        has_room = used + num_bytes <= self._max_bytes
        usage.seek(0)
        usage.truncate()
        usage.write(str(max(used + num_bytes * has_room, 0)).encode())
        return has_room

    def _take_back(self, new: Sequence["_NewFile"]) -> None:
        """Delete those of the files that have not got their names."""
        with contextlib.suppress(OSError), self._lock() as usage:
            num_bytes = 0
            for one in new:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(one.part)
                    num_bytes += one.num_bytes
            self._count(usage, -num_bytes)

    def _make_room(self, max_bytes: int) -> int:
        """Delete the files that were not used for longest until at most so many bytes are left.

        Returns:
            How many are left.
        """
        files = sorted(self._files())
        used, began_at = sum(size for _, size, _ in files), time.time()
        for used_at, size, path in files:
            is_left_over = path.endswith(PART_SUFFIX) and used_at < began_at - STALE_SECONDS
            if (used > max_bytes and not path.endswith(PART_SUFFIX)) or is_left_over:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                used -= size
        return used

    def _files(self) -> Iterator[tuple[float, int, str]]:
        """All files of blocks in the folder, of any namespace: when each was last used, its size and its path."""
        for path, _, names in os.walk(self._folder):
            for name in names:
                if _OWN_NAME.fullmatch(name):
                    with contextlib.suppress(FileNotFoundError):
                        status = os.stat(os.path.join(path, name), follow_symlinks=False)
                        yield status.st_mtime, status.st_size, os.path.join(path, name)


def require_writable(folder: Path) -> None:
    """Make sure that files can be made in a folder, now and not when the first block is to be kept.

    Raises:
        OSError: they cannot.
    """
    part = folder / f".probe.{os.urandom(4).hex()}{PART_SUFFIX}"
    os.close(os.open(part, _NEW, 0o600))
    part.unlink()


def _read(descriptor: int, payload: memoryview) -> bytes:
    """Read a file into `payload`, but for its header, which is returned. What is missing is not noticed here."""
    header = bytearray(HEADER_BYTES)
    place = os.readv(descriptor, [header, payload])
    while place < HEADER_BYTES + len(payload):
        if place < HEADER_BYTES or not (more := os.readv(descriptor, [payload[place - HEADER_BYTES :]])):
            break
        place += more
    return bytes(header)
