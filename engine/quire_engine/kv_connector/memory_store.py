"""MemoryStore: KV blocks in the memory that a model's engines share (`kv_memory`), with its index in there as well.

`kernels/csrc/shared_blocks.h` checks and bounds what is written and read. A crash leaves each block valid or absent.
"""

import ctypes
import hashlib
from collections.abc import Sequence

import numpy as np
from quire_kernels import SharedBlocks
from quire_kernels.shared_blocks import SharedBlocksStats

from quire_engine.kv_connector.block_file import BlockFileError
from quire_engine.kv_connector.block_store import StoredBlocks
from quire_engine.system.crash_loop import CircuitBreaker

GROUP_BYTES = 16
HURRY_SECONDS = 0.02
"""How long the engine core waits for the lock, which is held for microseconds."""
PAUSE_SECONDS = 1.0
"""For how long it does without the store after that: the process that holds the lock was stopped."""


class MemoryStore:
    """The blocks of one rank of one namespace: a `BlockStore`.

    Args:
        descriptor: of the memory; the caller closes it.
        namespace: 32 bytes.
        rank: whose blocks.

    Raises:
        OSError: there are no C++ kernels, or the memory cannot be mapped.
    """

    place = "memory that the engines of this model share"

    def __init__(self, descriptor: int, namespace: bytes, rank: int) -> None:
        group = hashlib.sha256(namespace + rank.to_bytes(4, "little")).digest()[:GROUP_BYTES]
        self.blocks = SharedBlocks(descriptor, group)

    def divide(self, block_bytes: int) -> None:
        """Divide the memory into slots, once, before a block is read or written. No block is larger.

        Raises:
            OSError: it is too small, or is divided into others.
        """
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

    def num_stored(self, block_hashes: Sequence[bytes]) -> int:
        """How many of these are there now, up to the first that is not. Takes microseconds.

        Raises:
            OSError: another process holds the lock for longer than `HURRY_SECONDS`.
        """
        return self.blocks.count(block_hashes, HURRY_SECONDS) if block_hashes else 0

    def stats(self) -> SharedBlocksStats:
        """The present numbers of all ranks and namespaces."""
        return self.blocks.stats()

    def close(self) -> None:
        self.blocks.close()


class MemoryIndex(StoredBlocks):
    """Reads the memory itself.

    Args:
        store: of one rank: the blocks of the others come and go with its.
    """

    def __init__(self, store: MemoryStore) -> None:
        super().__init__()
        self._store = store
        self._breaker = CircuitBreaker()

    def num_stored(self, block_hashes: Sequence[bytes]) -> int:
        if self._breaker.is_open:
            return 0
        if self._bad:
            first_bad = next((i for i, one in enumerate(block_hashes) if one in self._bad), len(block_hashes))
            block_hashes = block_hashes[:first_bad]
        try:
            return self._store.num_stored(block_hashes)
        except OSError:
            self._breaker.trip(PAUSE_SECONDS)
            return 0

    def close(self) -> None:
        self._store.close()


def _address(payload: memoryview) -> int:
    if payload.readonly:
        return int(np.frombuffer(payload, dtype=np.uint8).ctypes.data)
    return ctypes.addressof(ctypes.c_char.from_buffer(payload))
