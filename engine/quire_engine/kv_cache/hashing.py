"""Hashes of full KV blocks: a chain, so that an equal hash means an equal prefix.

::

    NONE_HASH ─► h0 = H(NONE_HASH, tokens[0:16], extra) ─► h1 = H(h0, tokens[16:32], extra) ─► …

SHA-256 rather than a faster hash: a collision would show one user's context to another.
"""

import hashlib
from array import array
from collections.abc import Sequence

__all__ = ["NONE_HASH", "hash_block_tokens"]

NONE_HASH = hashlib.sha256(b"quire block hash chain, version 1").digest()
"""The parent of a sequence's first block."""


def hash_block_tokens(parent: bytes, token_ids: Sequence[int], extra_keys: bytes = b"") -> bytes:
    """Hash of one full block.

    Args:
        parent: hash of the block before it, or `NONE_HASH`.
        token_ids: exactly the block's tokens.
        extra_keys: what else the content depends on (LoRA, cache salt, image), already encoded unambiguously.

    Returns:
        32 bytes.
    """
    # parent and tokens have a fixed length for a given block size, so nothing can shift between the parts.
    return hashlib.sha256(parent + array("q", token_ids).tobytes() + extra_keys).digest()
