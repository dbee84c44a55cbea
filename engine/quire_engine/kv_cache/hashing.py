"""Hashes of full KV blocks: a chain, so that an equal hash means an equal prefix.

::

    NONE_HASH ─► h0 = H(NONE_HASH, tokens[0:16], extra) ─► h1 = H(h0, tokens[16:32], extra) ─► …

SHA-256 rather than a faster hash, because a collision would expose one user's context to another.
"""

import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import islice, takewhile

from quire_engine.messages import PromptPart

PartKey = tuple[bytes, int, int]
"""A part of a prompt that overlaps a block: its digest, its start relative to the block's, and its length."""

HASH_BYTES = 32
"""Length of a block's hash, without the suffix of a group."""
NONE_HASH = hashlib.sha256(b"quire block hash chain, version 1").digest()
"""The parent of a sequence's first block."""


def hash_block_tokens(parent: bytes, token_ids: Sequence[int], extra_keys: bytes = b"") -> bytes:
    """Hash of one full block.

    Args:
        parent: hash of the block before it, or `NONE_HASH`.
        token_ids: exactly the block's tokens.
        extra_keys: what else the content depends on (LoRA, cache salt, parts), as `encode_extra_keys` returns it.

    Returns:
        32 bytes.
    """
    # Parent and tokens have a fixed length for a given block size, so the concatenation is unambiguous.
    return hashlib.sha256(parent + array("q", token_ids).tobytes() + extra_keys).digest()


def extend_block_hashes(
    block_hashes: list[bytes],
    token_ids: Sequence[int],
    block_size: int,
    num_blocks: int,
    cache_salt: str | None = None,
    lora_id: str | None = None,
    parts: Sequence[PromptPart] = (),
) -> None:
    """Append the hashes of a request's next full blocks, up to `num_blocks` in all. `token_ids` are its first tokens,
    at least those of these blocks."""
    for index in range(len(block_hashes), num_blocks):
        start, end = index * block_size, (index + 1) * block_size
        extra_keys = encode_extra_keys(parts=part_keys(parts, start, end)) if parts else b""
        if index == 0:
            extra_keys = encode_extra_keys(cache_salt, lora_id) + extra_keys
        parent = block_hashes[-1] if block_hashes else NONE_HASH
        block_hashes.append(hash_block_tokens(parent, token_ids[start:end], extra_keys))


def part_keys(parts: Sequence[PromptPart], start: int, end: int) -> list[PartKey]:
    """What the hash of a block includes of the parts that it overlaps.

    Args:
        parts: of the prompt, in order.
        start: position of the block's first token.
        end: the position after its last.
    """
    first = bisect_right(parts, start, key=lambda part: part.end)
    overlapping = takewhile(lambda part: part.start < end, islice(parts, first, None))
    return [(part.digest, part.start - start, part.length) for part in overlapping]


def suffix_of_group(group: int) -> bytes:
    """What the hash of a group's block ends with: other groups' blocks hold other content for the same tokens."""
    return b"" if group == 0 else group.to_bytes(4, "little")


def hash_state_parts(block_hash: bytes, num_parts: int) -> list[bytes]:
    """Hashes under which the parts of a state are kept outside the KV cache, 32 bytes each.

    Args:
        block_hash: of the last block of tokens before the state.
        num_parts: how many parts the state is divided into.
    """
    return [hashlib.sha256(b"state" + block_hash + part.to_bytes(4, "little")).digest() for part in range(num_parts)]


def encode_extra_keys(
    cache_salt: str | None = None, lora_id: str | None = None, parts: Iterable[PartKey] = ()
) -> bytes:
    """Encode what a block's content depends on besides its tokens. Different keys never give the same bytes.

    ::

        │ tag │ length, 8 bytes │ value │  …one after the other; empty if there are no extra keys

    Salt and adapter belong to the whole request, so only its first block encodes them, and the chain passes them on.

    Args:
        cache_salt: the request's salt; first block only.
        lora_id: the request's adapter; first block only.
        parts: those that overlap this block.
    """
    keys = []
    if cache_salt is not None:
        keys.append((b"S", cache_salt.encode("utf-8", "surrogatepass")))
    if lora_id is not None:
        keys.append((b"L", lora_id.encode("utf-8", "surrogatepass")))
    for digest, offset, length in parts:
        keys.append((b"M", array("q", (offset, length)).tobytes() + digest))
    return b"".join(tag + len(value).to_bytes(8, "little") + value for tag, value in keys)
