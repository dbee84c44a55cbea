"""Hashes of full KV blocks: a chain, so that an equal hash means an equal prefix.

::

    NONE_HASH ─► h0 = H(NONE_HASH, tokens[0:16], extra) ─► h1 = H(h0, tokens[16:32], extra) ─► …

SHA-256 rather than a faster hash, because a collision would expose one user's context to another.
"""

import hashlib
from array import array
from collections.abc import Iterable, Sequence

__all__ = ["NONE_HASH", "MultimodalHash", "encode_extra_keys", "hash_block_tokens", "suffix_of_group"]

MultimodalHash = tuple[bytes, int, int]
"""An image or other input in place of tokens: `(hash of its content, first position, number of tokens)`."""

NONE_HASH = hashlib.sha256(b"quire block hash chain, version 1").digest()
"""The parent of a sequence's first block."""


def hash_block_tokens(parent: bytes, token_ids: Sequence[int], extra_keys: bytes = b"") -> bytes:
    """Hash of one full block.

    Args:
        parent: hash of the block before it, or `NONE_HASH`.
        token_ids: exactly the block's tokens.
        extra_keys: what else the content depends on (LoRA, cache salt, image), as `encode_extra_keys` returns it.

    Returns:
        32 bytes.
    """
    # Parent and tokens have a fixed length for a given block size, so the concatenation is unambiguous.
    return hashlib.sha256(parent + array("q", token_ids).tobytes() + extra_keys).digest()


def suffix_of_group(group: int) -> bytes:
    """What the hash of a group's block ends with: other groups' blocks hold other content for the same tokens."""
    return b"" if group == 0 else group.to_bytes(4, "little")


def encode_extra_keys(
    cache_salt: str | None = None, lora_id: str | None = None, mm_hashes: Iterable[MultimodalHash] = ()
) -> bytes:
    """Encode what a block's content depends on besides its tokens. Different keys never give the same bytes.

    ::

        │ tag │ length, 8 bytes │ value │  …one after the other; empty if there are no extra keys

    Salt and adapter belong to the whole request, so only its first block encodes them, and the chain passes them on.

    Args:
        cache_salt: the request's salt; first block only.
        lora_id: the request's adapter; first block only.
        mm_hashes: inputs that overlap this block; their first position is relative to the block's.
    """
    parts = []
    if cache_salt is not None:
        parts.append((b"S", cache_salt.encode("utf-8", "surrogatepass")))
    if lora_id is not None:
        parts.append((b"L", lora_id.encode("utf-8", "surrogatepass")))
    for content, offset, num_tokens in mm_hashes:
        parts.append((b"M", array("q", (offset, num_tokens)).tobytes() + content))
    return b"".join(tag + len(value).to_bytes(8, "little") + value for tag, value in parts)
