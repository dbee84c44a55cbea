"""BlockFile: the form of a KV block outside the KV cache, the same on all processors.

::

    byte  0           8                40               72              80               96
          │ QUIREKV2  │ the block's    │ the namespace, │ bytes of the  │ XXH3-128 of all  │ payload …
          │           │ hash, 32 bytes │ 32 bytes       │ payload, u64  │ else in the file │

    payload   layer 0: keys │ values │ layer 1: keys │ values │ …      the layers of one rank's stage, in their order;
                                                                       with several groups of layers, group by group
    keys      [K, B, D]: KV heads of the rank, tokens of the block, head size; so are values, where a layer keeps any
    states    in files of their own: the states of all layers, one after the other, in parts that are no larger than
              keys and values of a block; what is left of the last part are zeros

All numbers are little endian except the digest, which is big endian. Keys and values have the cache's dtype. The hash
is of `kv_cache/hashing.py`: it stands for the block's tokens, all tokens before it and the request's cache salt.
The namespace stands for all else that its numbers depend on (`namespace`).

The digest detects a torn, overwritten or misplaced file. It is no signature: a process that may write to the folder can
have any numbers loaded. So it is not cryptographic, which would take several times as long as copying the block.
"""

import struct

import xxhash

MAGIC = b"QUIREKV2"
_START = struct.Struct("<8s32s32sQ")
_DIGEST_BYTES = 16
HEADER_BYTES = _START.size + _DIGEST_BYTES
MOST_TOGETHER = 8
"""Limit of blocks that are written or sent at once: a lock or a message costs as much as a block of 64 KiB, and the
first block arrives with the last."""


class BlockFileError(Exception):
    """A file is not the block that its name says."""


def encode_header(block_hash: bytes, namespace: bytes, payload: memoryview) -> bytes:
    """The header of a block.

    Args:
        block_hash: 32 bytes.
        namespace: 32 bytes.
        payload: the block, as bytes.
    """
    start = _START.pack(MAGIC, block_hash, namespace, len(payload))
    return start + _digest(start, payload)


def check_block(header: bytes, block_hash: bytes, namespace: bytes, payload: memoryview) -> None:
    """Check the content of a file.

    Args:
        header: its first `HEADER_BYTES`.
        block_hash: the expected one.
        namespace: the expected one.
        payload: the rest.

    Raises:
        BlockFileError: it is another block, or damaged.
    """
    start = header[: _START.size]
    if start != _START.pack(MAGIC, block_hash, namespace, len(payload)):
        raise BlockFileError("its header is that of another block")
    if header[_START.size :] != _digest(start, payload):
        raise BlockFileError("its content does not match its digest")


def _digest(start: bytes, payload: memoryview) -> bytes:
    digest = xxhash.xxh3_128(start)
    digest.update(payload)
    return digest.digest()
