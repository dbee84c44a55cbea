"""MemoryStore: KV blocks in the memory that a model's engines share (`kv_memory`), with its index in there as well.

What is written and read is checked and bounded in `kernels/csrc/shared_blocks.h`. Whatever happens to a process in the
middle of it, others find sound blocks or none.
"""

import ctypes
import hashlib
import time
from collections.abc import Sequence

import numpy as np
from quire_kernels import SharedBlocks
from quire_kernels.shared_blocks import SharedBlocksStats

from quire_engine.kv_connector.block_file import BlockFileError

GROUP_BYTES = 16
MAX_BAD = 100_000
"""Hashes that are remembered because their blocks could not be loaded."""
HURRY_SECONDS = 0.02
"""How long the engine core waits for the lock, which is held for microseconds; then it does without."""
BLIND_SECONDS = 1.0
"""How long it then does without."""


class MemoryStore:
    """The blocks of one rank of one namespace; see `BlockStore`.

    Args:
        descriptor: of the memory; it stays the caller's.
        namespace: 32 bytes.
        rank: whose blocks.

    Raises:
        OSError: there are no C++ kernels, or the memory cannot be mapped.
    """

    place = "memory that the engines of this model share"

    def __init__(self, descriptor: int, namespace: bytes, rank: int) -> None:
        group = hashlib.sha256(namespace + rank.to_bytes(4, "little")).digest()[:GROUP_BYTES]
        self.blocks = SharedBlocks(descriptor, group)

    def prepare(self, block_bytes: int) -> None:
        try:
            num_slots = self.blocks.divide(block_bytes)
        except ValueError as error:
            raise OSError(str(error)) from None
        if num_slots == 0:
            raise OSError(f"{self.blocks.num_bytes} bytes do not hold a block of {block_bytes} and the index; raise "
                          "max_bytes")  # fmt: skip

    def read(self, blocks: Sequence[tuple[bytes, memoryview]]) -> int:
        if not blocks:
            return 0
        hashes, payloads = zip(*blocks, strict=True)
        count, is_damaged = self.blocks.read(hashes, [_address(one) for one in payloads], len(payloads[0]))
        if count == 0 and is_damaged:
            raise BlockFileError(f"{hashes[0].hex()} in {self.place}: its content does not match its digest")
        return count

    def write(self, blocks: Sequence[tuple[bytes, memoryview]]) -> int:
        if not blocks:
            return 0
        hashes, payloads = zip(*blocks, strict=True)
        return self.blocks.write(hashes, [_address(one) for one in payloads], len(payloads[0]))

    def describe(self, text: str) -> None:
        """Nothing: the memory has no place for it."""

    def folders(self) -> dict[str, int]:
        """See `BlockStore`: all are in one, which is always looked into."""
        return {"": self.blocks.stats().num_blocks}

    def hashes(self, folder: str) -> set[bytes]:
        return set(self.blocks.hashes())

    def num_stored(self, block_hashes: Sequence[bytes]) -> int:
        """How many of these are there now, up to the first that is not. Takes microseconds.

        Raises:
            OSError: another process holds the lock for longer than `HURRY_SECONDS`.
        """
        return self.blocks.count(block_hashes, HURRY_SECONDS) if block_hashes else 0

    def stats(self) -> SharedBlocksStats:
        """The present numbers, of all ranks and namespaces."""
        return self.blocks.stats()

    def close(self) -> None:
        self.blocks.close()


class MemoryIndex:
    """Which blocks are stored (`connector_scheduler.StoredBlocks`): the memory itself knows.

    Args:
        store: of one rank: the blocks of the others come and go with its.
    """

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._bad: set[bytes] = set()
        self._blind_until = 0.0
        """By `time.monotonic`. Until then the store is not used: a process holds the lock and does not go on."""

    def num_stored(self, block_hashes: Sequence[bytes]) -> int:
        """How many of these are there, up to the first that is not."""
        if time.monotonic() < self._blind_until:
            return 0
        if self._bad:
            first_bad = next((i for i, one in enumerate(block_hashes) if one in self._bad), len(block_hashes))
            block_hashes = block_hashes[:first_bad]
        try:
            return self._store.num_stored(block_hashes)
        except OSError:
            self._blind_until = time.monotonic() + BLIND_SECONDS
            return 0

    def is_kept(self, block_hash: bytes) -> bool:
        """Whether it is there."""
        return self.num_stored([block_hash]) == 1

    def add(self, block_hash: bytes) -> None:
        """A block is being saved: it is looked for again."""
        self._bad.discard(block_hash)

    def forget(self, block_hash: bytes) -> None:
        """A block could not be loaded; another rank may lack it."""
        if len(self._bad) >= MAX_BAD:
            self._bad.clear()
        self._bad.add(block_hash)

    def close(self) -> None:
        """The process lets go of the memory."""
        self._store.close()


def _address(payload: memoryview) -> int:
    """Where its bytes are."""
    if payload.readonly:
        return int(np.frombuffer(payload, dtype=np.uint8).ctypes.data)
    return ctypes.addressof(ctypes.c_char.from_buffer(payload))
