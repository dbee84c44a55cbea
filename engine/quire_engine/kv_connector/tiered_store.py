"""TieredStore: several stores, one after the other: memory first, and files behind it.

::

    read    memory │ b0 b1 b2 ·  ·  b5 │      the longest prefix, wherever each block is;
            files  │ ·  ·  ·  b3 b4 ·  │      what is found further down is kept in the ones before it as well
    write   all of them
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from quire_engine.kv_connector.block_file import BlockFileError
from quire_engine.kv_connector.block_store import Block, BlockStore
from quire_engine.kv_connector.board import TierOutcome
from quire_engine.kv_connector.connector_scheduler import StoredBlocks

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 30.0
"""After a store could not be written, for so long it is not: the others go on."""

Count = Callable[[int, TierOutcome, int], None]
"""Told of a tier, what became of blocks, and how many these are."""


class TieredStore:
    """See `BlockStore`.

    Args:
        stores: in the order in which they are asked.
        count: hears what each of them does.
        saves: whether what is found in one store is kept in those before it.
    """

    def __init__(
        self, stores: Sequence[BlockStore], count: Count = lambda tier, outcome, number: None, saves: bool = True
    ) -> None:
        self._stores = stores
        self._saves = saves
        self._count = count
        self._lock = threading.Lock()
        self._paused_until = [0.0] * len(stores)

    @property
    def place(self) -> str:
        """All of their places."""
        return ", then ".join(store.place for store in self._stores)

    def prepare(self, block_bytes: int) -> None:
        for store in self._stores:
            store.prepare(block_bytes)

    def read(self, blocks: Sequence[Block]) -> int:
        """See `BlockStore`. Where one store cannot be asked, or has something else, the others are."""
        num_read = 0
        error: Exception | None = None
        while num_read < len(blocks):
            found = 0
            for tier, store in enumerate(self._stores):
                wanted = blocks[num_read:]
                try:
                    found = store.read(wanted)
                except (BlockFileError, OSError) as failure:
                    logger.warning("a KV block cannot be loaded from %s: %s", store.place, failure)
                    self._note(tier, TierOutcome.LOAD_FAILED, 1)
                    error = failure
                    continue
                if found:
                    self._note(tier, TierOutcome.LOADED, found)
                    self._keep_before(tier, wanted[:found])
                    break
            if not found:
                break
            num_read += found
        if num_read == 0 and error is not None:
            raise error
        return num_read

    def write(self, blocks: Sequence[Block]) -> int:
        """See `BlockStore`. What one of them has is kept."""
        return max(self._write_to(tier, blocks) for tier in range(len(self._stores)))

    def describe(self, text: str) -> None:
        for store in self._stores:
            store.describe(text)

    def folders(self) -> dict[str, int]:
        """See `BlockStore`: they are looked into one by one (`TieredIndex`)."""
        return {}

    def hashes(self, folder: str) -> set[bytes]:
        return set()

    def close(self) -> None:
        for store in self._stores:
            store.close()

    def _note(self, tier: int, outcome: TierOutcome, number: int) -> None:
        with self._lock:  # threads that read and write both keep blocks
            self._count(tier, outcome, number)

    def _write_to(self, tier: int, blocks: Sequence[Block]) -> int:
        store, num_kept = self._stores[tier], 0
        if time.monotonic() >= self._paused_until[tier]:
            try:
                num_kept = store.write(blocks)
            except OSError as error:
                with self._lock:
                    self._paused_until[tier] = time.monotonic() + PAUSE_SECONDS
                logger.warning("no KV blocks are kept in %s for %.0f s: %s", store.place, PAUSE_SECONDS, error)
        self._note(tier, TierOutcome.SAVED, num_kept)
        self._note(tier, TierOutcome.SAVE_FAILED, len(blocks) - num_kept)
        return num_kept

    def _keep_before(self, tier: int, blocks: Sequence[Block]) -> None:
        """What was found in one store is wanted soon again: the ones before it keep it, too."""
        if self._saves:
            for earlier in range(tier):
                self._write_to(earlier, blocks)


class TieredIndex:
    """What is stored in any of several stores (`connector_scheduler.StoredBlocks`).

    Args:
        indexes: of each.
    """

    def __init__(self, indexes: Sequence[StoredBlocks]) -> None:
        self._indexes = indexes

    def num_stored(self, block_hashes: Sequence[bytes]) -> int:
        """How many of these are in one or the other, up to the first that is in none."""
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
        """A block is being saved."""
        for index in self._indexes:
            index.add(block_hash)

    def forget(self, block_hash: bytes) -> None:
        """A block could not be loaded from any of them."""
        for index in self._indexes:
            index.forget(block_hash)

    def close(self) -> None:
        """End what they have open."""
        for index in self._indexes:
            index.close()
