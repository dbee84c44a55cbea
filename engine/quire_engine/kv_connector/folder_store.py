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

1. A file is made under the lock, with all its bytes, and they are counted in `usage`. They are written without it.
2. It gets its name under the lock: whoever counts all files meets each of them once.
3. When there is no room, the files that were not used for longest are deleted, of all namespaces, until a tenth is
   free. That counts all files anew, so what a crash left uncounted or counted twice is put right.

A file appears whole or not at all (`rename`), and may go at any moment: who reads it finds the digest right, or
computes the block.
"""

import contextlib
import fcntl
import io
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from quire_engine.kv_connector.block_file import HEADER_BYTES, BlockFileError, decode_block, encode_header

__all__ = ["FolderStore"]

USAGE = "usage"
NAMESPACE = "namespace.json"
PART_SUFFIX = ".tmp"
SHARE_KEPT = 0.9
"""Of `max_bytes`, after files were deleted: each time all files are looked at."""
STALE_SECONDS = 600.0
"""After so long a file that was never finished is deleted: its writer is gone."""


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
        with self._lock() as usage:
            self._count(usage, 0)

    def read(self, block_hash: bytes, payload_bytes: int) -> memoryview | None:
        """A block; None if there is none. It counts as used now.

        Args:
            block_hash: of the block.
            payload_bytes: what it should have.

        Raises:
            BlockFileError: there is something else. It is deleted.
            OSError: it cannot be read.
        """
        path = self._path_of(block_hash)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        with open(descriptor, "rb", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise BlockFileError(f"{path} is not a file")
            content = _read(file, HEADER_BYTES + payload_bytes)
        try:
            payload = decode_block(content, block_hash, self._namespace, payload_bytes)
        except BlockFileError as error:
            with contextlib.suppress(OSError):
                path.unlink()
            raise BlockFileError(f"{path}: {error}") from None
        with contextlib.suppress(OSError):
            os.utime(path)
        return payload

    def write(self, block_hash: bytes, payload: memoryview) -> bool:
        """Keep a block, if it is not there already.

        Returns:
            Whether it is there now: one alone may be larger than `max_bytes`.

        Raises:
            OSError: it cannot be written.
        """
        path = self._path_of(block_hash)
        if path.exists():
            return True
        num_bytes = HEADER_BYTES + len(payload)
        if num_bytes > self._max_bytes:
            return False
        path.parent.mkdir(mode=0o700, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.urandom(4).hex()}{PART_SUFFIX}")
        try:
            with self._lock() as usage:
                part.touch(mode=0o600, exist_ok=False)
                self._count(usage, num_bytes)
                os.truncate(part, num_bytes)
            with part.open("r+b") as file:
                file.write(encode_header(block_hash, self._namespace, payload))
                file.write(payload)
            with self._lock():
                os.rename(part, path)
        except BaseException:
            with contextlib.suppress(OSError), self._lock() as usage:
                part.unlink()
                self._count(usage, -num_bytes)
            raise
        return True

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

    def _path_of(self, block_hash: bytes) -> Path:
        name = block_hash.hex()
        return self.path / name[:2] / name

    @contextlib.contextmanager
    def _lock(self) -> Iterator[io.FileIO]:
        """`usage`, while no other process changes it or which files there are."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(self._folder / USAGE, flags, 0o600), "r+b", buffering=0) as usage:
            fcntl.flock(usage, fcntl.LOCK_EX)
            yield usage

    def _count(self, usage: io.FileIO, num_bytes: int) -> None:
        """Count bytes of a file that has none yet, and make room for them if there is none; or of one that is gone."""
        text = usage.read(32)
        used = int(text) if text.isdigit() else self._make_room(self._max_bytes)
        if num_bytes > 0 and used + num_bytes > self._max_bytes:
            used = self._make_room(min(int(self._max_bytes * SHARE_KEPT), self._max_bytes - num_bytes))
        usage.seek(0)
        usage.truncate()
        usage.write(str(max(used + num_bytes, 0)).encode())

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
                if name not in (USAGE, NAMESPACE):
                    with contextlib.suppress(FileNotFoundError):
                        status = os.stat(os.path.join(path, name), follow_symlinks=False)
                        yield status.st_mtime, status.st_size, os.path.join(path, name)


def _read(file: io.FileIO, num_bytes: int) -> bytes:
    """A whole file, or a little more than so many bytes of one that is too long."""
    pieces, left = [], num_bytes + 1
    while left and (piece := file.read(left)):
        pieces.append(piece)
        left -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
