"""CacheEvents: what a block pool has filed and evicted, in order, for an index that is kept elsewhere.

Each event is a word of 64 bits, the first of a block's hash but for the lowest bit, which says what happened::

    │ bits 63 … 1 of the hash │ 1 │   filed: an equal prefix finds it from now on
    │ bits 63 … 1 of the hash │ 0 │   evicted
    │ 0                           │   all are forgotten

With several groups of layers only the first one's blocks are reported: the others' are filed along with them.
"""

from array import array
from collections.abc import Iterator

from quire_engine.kv_cache.hashing import HASH_BYTES

FILED = 1
RESET = 0


def event_key(block_hash: bytes) -> int:
    """The word that says that a block with this hash was filed."""
    return int.from_bytes(block_hash[:8], "little") | FILED


def read_events(packed: bytes) -> Iterator[int]:
    """The words, in order."""
    words = array("Q")
    words.frombytes(packed)
    return iter(words)


class CacheEvents:
    """Notes events until they are taken."""

    def __init__(self) -> None:
        self._words = array("Q")

    def filed(self, block_hash: bytes) -> None:
        """A block was cached under this hash."""
        if len(block_hash) == HASH_BYTES:
            self._words.append(event_key(block_hash))

    def evicted(self, block_hash: bytes) -> None:
        """It lost its content."""
        if len(block_hash) == HASH_BYTES:
            self._words.append(event_key(block_hash) ^ FILED)

    def reset(self) -> None:
        """All cached content is forgotten."""
        self._words = array("Q", (RESET,))

    def take(self) -> bytes:
        """What has happened since this was last called."""
        if not self._words:
            return b""
        taken, self._words = self._words, array("Q")
        return taken.tobytes()
