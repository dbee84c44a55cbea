"""Hashes of full KV blocks: a chain, so that an equal hash means an equal prefix.

::

    NONE_HASH ─► h0 = H(NONE_HASH, tokens[0:16], extra) ─► h1 = H(h0, tokens[16:32], extra) ─► …

SHA-256 rather than a faster hash: a collision would show one user's context to another.
"""

import hashlib
from array import array
from collections.abc import Iterable, Sequence

__all__ = ["NONE_HASH", "MultimodalHash", "encode_extra_keys", "hash_block_tokens"]

MultimodalHash = tuple[bytes, int, int]
"""An image or other input that takes the place of tokens: `(hash of its content, first position, number of tokens)`."""

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


def encode_extra_keys(
    cache_salt: str | None = None, lora_id: str | None = None, mm_hashes: Iterable[MultimodalHash] = ()
) -> bytes:
    """What a block's content depends on besides its tokens, so that different keys never give the same bytes.

    ::

        │ tag │ length, 8 bytes │ value │  …one after the other; nothing at all when there is nothing to tell apart

    Salt and adapter are the request's, so its first block tells them and the chain carries them on.

    Args:
        cache_salt: the request's salt; first block only.
        lora_id: the request's adapter; first block only.
        mm_hashes: what reaches into this block, its first position counted from the block's.
    """
    parts = []
    if cache_salt is not None:
        parts.append((b"S", cache_salt.encode("utf-8", "surrogatepass")))
    if lora_id is not None:
        parts.append((b"L", lora_id.encode("utf-8", "surrogatepass")))
    for content, offset, num_tokens in mm_hashes:
        parts.append((b"M", array("q", (offset, num_tokens)).tobytes() + content))
    return b"".join(tag + len(value).to_bytes(8, "little") + value for tag, value in parts)
