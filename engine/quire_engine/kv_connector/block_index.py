"""BlockIndex: which blocks are stored, as far as the engine core knows. No step waits for the disk.

It knows what was there at the start, what this engine has saved since, and after a while what others have saved. A
start does not wait for a store that lists its blocks slowly. The index may be wrong: a file may have gone. Then the
load fails, and the block is not loaded again until it is saved again.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from quire_engine.kv_connector.block_store import ListedStore, StoredBlocks

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""A thread lists what others have saved at most this often, and only while requests come."""
FIRST_LOOK_SECONDS = 1.0
"""How long an engine's start waits for the first list, so that its first requests find what is there."""
MAX_LISTED = 4_000_000
"""Blocks of a store. At 2 MiB each they are 8 TB, and their hashes take 500 MB."""


class BlockIndex(StoredBlocks):
    """The blocks of one rank: those of the others come and go with them.

    Args:
        store: where they are.
        clock: seconds, monotonic.
        description: to be written to the store first; unset: nothing.
    """

    def __init__(
        self, store: ListedStore, clock: Callable[[], float] = time.monotonic, description: str | None = None
    ) -> None:
        super().__init__()
        self._store = store
        self._clock = clock
        self._folders: dict[str, int] = {}
        self._by_folder: dict[str, set[bytes]] = {}
        self._saved: set[bytes] = set()
        """By this engine, since the last list; the next set: between that list and the one before."""
        self._saved_before: set[bytes] = set()
        self._looked_at = clock()
        self._description = description
        self._is_full = False
        self._is_closed = False
        self._looking = self._start_looking()
        self._looking.join(FIRST_LOOK_SECONDS)

    def num_stored(self, block_hashes: Sequence[bytes]) -> int:
        self._look_again()
        for i, block_hash in enumerate(block_hashes):
            if block_hash in self._bad or not (
                block_hash in self._by_folder.get(block_hash[:1].hex(), ())
                or block_hash in self._saved
                or block_hash in self._saved_before
            ):
                return i
        return len(block_hashes)

    def add(self, block_hash: bytes) -> None:
        super().add(block_hash)
        self._saved.add(block_hash)

    def close(self) -> None:
        self._is_closed = True
        self._store.close()

    def _look_again(self) -> None:
        now = self._clock()
        if now - self._looked_at < LOOK_SECONDS or self._looking.is_alive():
            return
        self._looked_at = now
        self._looking = self._start_looking()

    def _start_looking(self) -> threading.Thread:
        looking = threading.Thread(target=self._look_safely, name="quire-kv-index", daemon=True)
        looking.start()
        return looking

    def _look_safely(self) -> None:
        try:
            if self._description is not None:
                self._store.describe(self._description)
                self._description = None
            self._look()
        except Exception as error:  # whatever a store answers: the next list is a new beginning
            if not self._is_closed:
                logger.warning(
                    "stored KV blocks cannot be listed: %s", error if isinstance(error, OSError) else repr(error)
                )
            self._folders, self._by_folder, self._bad = {}, {}, set()

    def _look(self) -> None:
        """List the folders that have changed. What was saved before the last list is written by now, or never will
        be."""
        self._saved_before, self._saved = self._saved, set()
        for folder, changed_at in self._store.folders().items():
            if self._folders.get(folder) != changed_at:
                hashes = self._store.hashes(folder)
                others = sum(len(known) for name, known in self._by_folder.items() if name != folder)
                if others + len(hashes) > MAX_LISTED:
                    if not self._is_full:
                        logger.warning(
                            "%s lists more than %d KV blocks: some are not loaded", self._store.place, MAX_LISTED
                        )
                    self._is_full = True
                    break
                self._by_folder[folder] = hashes
                self._folders[folder] = changed_at
