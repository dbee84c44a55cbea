"""TieredStore: several stores, one after the other: memory first, and files behind it.

::

    read    memory │ b0 b1 b2 ·  ·  b5 │      the longest prefix, wherever each block is;
            files  │ ·  ·  ·  b3 b4 ·  │      what is found further down is kept in the ones before it as well
    write   all of them
"""

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from quire_engine.config import KVTransferConfig, TierConfig
from quire_engine.kv_connector.block_file import BlockFileError
from quire_engine.kv_connector.block_store import Block, BlockStore, StoredBlocks
from quire_engine.kv_connector.board import TierOutcome, TransferBoard
from quire_engine.kv_connector.folder_store import FolderStore
from quire_engine.system.crash_loop import CircuitBreaker

if TYPE_CHECKING:
    from quire_engine.kv_connector.memory_store import MemoryStore
    from quire_engine.kv_connector.remote_store import RemoteStore

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 30.0
"""A store that could not be written is not written for so long; the others go on."""

MAX_FILE_BYTES = 16 << 30
"""The default of `max_bytes`."""

Count = Callable[[int, TierOutcome, int], None]
"""Called with a tier, an outcome, and the number of blocks with it."""


def open_store(
    tier: TierConfig, memory: int | None, namespace: bytes, rank: int
) -> "FolderStore | RemoteStore | MemoryStore":
    """The store of a rank.

    Args:
        tier: its settings.
        memory: the descriptor of the memory that blocks may be kept in.
        namespace: 32 bytes.
        rank: whose blocks.

    Raises:
        OSError: it cannot be opened, such as a folder that cannot be made.
        ValueError: the file of keys of this host is wrong.
    """
    storage = tier.kv_connector_extra_config
    match tier.kv_connector:
        case "RemoteStorageConnector":
            from quire_engine.kv_connector.remote_store import RemoteStore

            return RemoteStore.connect(storage, namespace, rank)
        case "SharedMemoryConnector":
            from quire_engine.kv_connector.memory_store import MemoryStore

            if memory is None:
                raise OSError("the process that starts the engine has allocated no memory for its KV blocks")
            return MemoryStore(memory, namespace, rank)
    max_bytes = MAX_FILE_BYTES if storage.max_bytes is None else storage.max_bytes
    return FolderStore(Path(storage.shared_storage_path), namespace, rank, max_bytes)


class TieredStore:
    """One or several stores as one `BlockStore`.

    Args:
        stores: in the order in which they are read.
        count: counts the outcomes of each.
        saves: whether what is found in one store is kept in those before it.
    """

    def __init__(
        self, stores: Sequence[BlockStore], count: Count = lambda tier, outcome, number: None, saves: bool = True
    ) -> None:
        self._stores = stores
        self._saves = saves
        self._count = count
        self._lock = threading.Lock()
        self._breakers = [CircuitBreaker() for _ in stores]

    @classmethod
    def open(
        cls, transfer: KVTransferConfig, memory: int | None, namespace: bytes, rank: int, board: TransferBoard
    ) -> "TieredStore":
        """The stores of the settings; the rest as for `open_store`."""
        stores = [open_store(tier, memory, namespace, rank) for tier in transfer.tiers]
        return cls(stores, partial(board.count_tier, rank), transfer.saves)

    @property
    def place(self) -> str:
        return ", then ".join(store.place for store in self._stores)

    def read(self, blocks: Sequence[Block]) -> int:
        """Where one store cannot be read, or has something else, the others are read."""
        num_read = 0
        error: Exception | None = None
        while num_read < len(blocks):
            found = 0
            for tier, store in enumerate(self._stores):
                wanted = blocks[num_read:]
                try:
                    found = store.read(wanted)
                except (BlockFileError, OSError) as failure:
                    self._note(tier, TierOutcome.LOAD_FAILED, 1)
                    error = failure
                    continue
                if found:
                    self._note(tier, TierOutcome.LOADED, found)
                    for earlier in range(tier if self._saves else 0):
                        self._write_to(earlier, wanted[:found])
                    break
            num_read += found
            if not found or len(self._stores) == 1:  # a single store has no more of them
                break
        if error is not None:
            if num_read == 0:
                raise error
            logger.warning("a KV block cannot be loaded: %s", error)
        return num_read

    def write(self, blocks: Sequence[Block]) -> int:
        """A block counts as kept when one of them has it."""
        return max(self._write_to(tier, blocks) for tier in range(len(self._stores)))

    def close(self) -> None:
        for store in self._stores:
            store.close()

    def _note(self, tier: int, outcome: TierOutcome, number: int) -> None:
        with self._lock:  # threads that read and write both keep blocks
            self._count(tier, outcome, number)

    def _write_to(self, tier: int, blocks: Sequence[Block]) -> int:
        store, num_kept = self._stores[tier], 0
        if not self._breakers[tier].is_open:
            try:
                num_kept = store.write(blocks)
            except OSError as error:
                self._breakers[tier].trip(PAUSE_SECONDS)
                logger.warning("no KV blocks are kept in %s for %.0f s: %s", store.place, PAUSE_SECONDS, error)
        self._note(tier, TierOutcome.SAVED, num_kept)
        self._note(tier, TierOutcome.SAVE_FAILED, len(blocks) - num_kept)
        return num_kept


class TieredIndex(StoredBlocks):
    """The indexes of several stores as one."""

    def __init__(self, indexes: Sequence[StoredBlocks]) -> None:
        self._indexes = indexes

    def num_stored(self, block_hashes: Sequence[bytes]) -> int:
        """A block counts when one of them has it."""
        count = 0
        while count < len(block_hashes):
            found = next((n for index in self._indexes if (n := index.num_stored(block_hashes[count:]))), 0)
            if not found:
                break
            count += found
        return count

    def is_kept(self, block_hash: bytes) -> bool:
        """Whether all of them have it."""
        return all(index.is_kept(block_hash) for index in self._indexes)

    def add(self, block_hash: bytes) -> None:
        for index in self._indexes:
            index.add(block_hash)

    def forget(self, block_hash: bytes) -> None:
        for index in self._indexes:
            index.forget(block_hash)

    def close(self) -> None:
        for index in self._indexes:
            index.close()
