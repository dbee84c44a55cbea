"""PrefixIndex: which blocks each replica has cached, as far as the frontend can know.

Two things make a block count as cached there:

* the replica said so, and has not said since that it was evicted (`CacheEvents`, with every message of its);
* a live request that was sent there has it in its prompt: by the time that another one comes to its turn, it is filed.

It knows the first 63 bits of a hash. A collision makes a routing decision worse, and no answer wrong.
"""

from collections import Counter
from collections.abc import Sequence

from quire_engine.kv_cache.events import FILED, RESET, event_key, read_events
from quire_engine.kv_cache.hashing import NONE_HASH, encode_extra_keys, hash_block_tokens, part_keys
from quire_engine.messages import PromptPart


def block_keys(
    token_ids: Sequence[int],
    block_size: int,
    cache_salt: str | None = None,
    prompt_parts: Sequence[PromptPart] = (),
) -> list[int]:
    """A key for each full block that a prefix cache may hold of these tokens; the last token is always computed."""
    keys: list[int] = []
    parent, extra = NONE_HASH, encode_extra_keys(cache_salt)
    for start in range(0, (len(token_ids) - 1) // block_size * block_size, block_size):
        if prompt_parts:
            parts = part_keys(prompt_parts, start, start + block_size)
            extra = encode_extra_keys(None if start else cache_salt, parts=parts)
        parent = hash_block_tokens(parent, token_ids[start : start + block_size], extra)
        extra = b""
        keys.append(event_key(parent))
    return keys


def forget(counts: Counter[int], keys: Sequence[int]) -> None:
    """Count each key once less; a key with a count of 0 takes no room."""
    for key in keys:
        if counts[key] > 1:
            counts[key] -= 1
        else:
            del counts[key]


class PrefixIndex:
    """One replica's part of the index."""

    def __init__(self) -> None:
        self._filed: set[int] = set()
        self._expected: Counter[int] = Counter()

    def apply(self, packed_events: bytes) -> None:
        """Take in what has changed there."""
        filed = self._filed
        for word in read_events(packed_events):
            if word & FILED:
                filed.add(word)
            elif word == RESET:
                filed.clear()
            else:
                filed.discard(word | FILED)

    def expect(self, keys: Sequence[int]) -> None:
        """A request with these blocks is sent there."""
        self._expected.update(keys)

    def forget(self, keys: Sequence[int]) -> None:
        """It has ended, or has gone elsewhere."""
        forget(self._expected, keys)

    def num_cached(self, keys: Sequence[int]) -> int:
        """Leading blocks that are cached there, or about to be."""
        filed, expected = self._filed, self._expected
        return next((i for i, key in enumerate(keys) if key not in filed and key not in expected), len(keys))

    def clear(self) -> None:
        """The replica has died: what it had filed is gone."""
        self._filed.clear()
