"""BlockIndex: which blocks are stored, as far as the engine core knows, without a look at the disk on a step's way.

It knows what was there at the start, what this engine has saved since, and after a while what others have. A store that
does not list its blocks at once holds up no start: they are known once it has. The index may be wrong: a file may have
gone. Then the load says so, and the block is not looked for again until it is saved again.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from quire_engine.kv_connector.block_store import BlockStore

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""So often at most, and only while requests come, a thread looks for what others have saved."""
FIRST_LOOK_SECONDS = 1.0
"""How long an engine's start waits for the first list, so that its first requests find what is there."""
MAX_BAD = 100_000
"""Hashes that are remembered because their blocks could not be loaded."""
MAX_LISTED = 4_000_000
"""Blocks that are known of a store: of 2 MiB each, they are 8 TB, and their hashes take 500 MB."""


class BlockIndex:
    """The blocks of one rank: those of the others come and go with them.

    Args:
        store: where they are.
        clock: seconds, monotonic.
        description: what the store is to write down first; unset: nothing.
    """

    def __init__(
        self, store: BlockStore, clock: Callable[[], float] = time.monotonic, description: str | None = None
    ) -> None:
        self._store = store
        self._clock = clock
        self._folders: dict[str, int] = {}
        self._by_folder: dict[str, set[bytes]] = {}
        self._saved: set[bytes] = set()
        """By this engine, since the last look at the folders; and between that look and the one before."""
        self._saved_before: set[bytes] = set()
        self._bad: set[bytes] = set()
        self._looked_at = clock()
        self._description = description
        self._is_full = False
        self._is_closed = False
        self._looking = self._start_looking()
        self._looking.join(FIRST_LOOK_SECONDS)

    def num_stored(self, block_hashes: Sequence[bytes]) -> int:
        """How many of these are there, up to the first that is not."""
        self._look_again()
        for i, block_hash in enumerate(block_hashes):
            if block_hash in self._bad or not (
                block_hash in self._by_folder.get(block_hash[:1].hex(), ())
                or block_hash in self._saved
                or block_hash in self._saved_before
            ):
                return i
        return len(block_hashes)

    def is_kept(self, block_hash: bytes) -> bool:
        """Whether it is there."""
        return self.num_stored([block_hash]) == 1

    def add(self, block_hash: bytes) -> None:
        """A block is being saved."""
        self._bad.discard(block_hash)
        self._saved.add(block_hash)

    def forget(self, block_hash: bytes) -> None:
        """A block could not be loaded."""
        if len(self._bad) >= MAX_BAD:
            self._bad.clear()
        self._bad.add(block_hash)

    def close(self) -> None:
        """End the looks at the folders."""
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
        except Exception as error:  # whatever a store answers, others find blocks as soon as it lists them again
            if not self._is_closed:
                logger.warning(
                    "stored KV blocks cannot be listed: %s", error if isinstance(error, OSError) else repr(error)
                )
            self._folders, self._by_folder, self._bad = {}, {}, set()  # the next time it can be is a new beginning

    def _look(self) -> None:
        """List the folders that have changed. What was saved before the last such time is written by now, or will not
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
