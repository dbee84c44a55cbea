"""BlockFile: a KV block outside the KV cache. Of the same form on all processors, in whatever order kernels keep it.

::

    byte  0           8                40               72              80               112
          │ QUIREKV1  │ the block's    │ the namespace, │ bytes of the  │ SHA-256 of all   │ payload …
          │           │ hash, 32 bytes │ 32 bytes       │ payload, u64  │ else in the file │

    payload   layer 0: keys │ values │ layer 1: keys │ values │ …      the layers of one rank's stage, in their order
    keys      [K, B, D]: KV heads of the rank, tokens of the block, head size; so are values

All numbers are little endian, and those of the payload are of the cache's dtype. The hash is that of the chain of
`kv_cache/hashing.py`: it stands for the block's tokens, all tokens before it and the request's cache salt. The
namespace stands for all else that its numbers depend on (`namespace`).

The digest finds what was torn, overwritten or put in another's place by mistake. It is no signature: who may write to
the folder can have any numbers loaded.
"""

import hashlib
import struct

__all__ = ["BlockFileError", "decode_block", "encode_header"]

MAGIC = b"QUIREKV1"
_START = struct.Struct("<8s32s32sQ")
HEADER_BYTES = _START.size + 32


class BlockFileError(Exception):
    """A file is not the block that it should be."""


def encode_header(block_hash: bytes, namespace: bytes, payload: memoryview) -> bytes:
    """What stands before a block's payload.

    Args:
        block_hash: 32 bytes.
        namespace: 32 bytes.
        payload: the block, as bytes.
    """
    start = _START.pack(MAGIC, block_hash, namespace, len(payload))
    return start + _digest(start, payload)


def decode_block(content: bytes, block_hash: bytes, namespace: bytes, payload_bytes: int) -> memoryview:
    """The payload of a file.

    Args:
        content: of the file.
        block_hash: what it should be.
        namespace: likewise.
        payload_bytes: likewise.

    Raises:
        BlockFileError: it is something else, or not whole.
    """
    if len(content) != HEADER_BYTES + payload_bytes:
        raise BlockFileError(f"it has {len(content)} bytes instead of {HEADER_BYTES + payload_bytes}")
    view = memoryview(content)
    start, payload = view[: _START.size], view[HEADER_BYTES:]
    if start != _START.pack(MAGIC, block_hash, namespace, payload_bytes):
        raise BlockFileError("its header is that of another block")
    if view[_START.size : HEADER_BYTES] != _digest(bytes(start), payload):
        raise BlockFileError("its content does not match its digest")
    return payload


def _digest(start: bytes, payload: memoryview) -> bytes:
    digest = hashlib.sha256(start)
    digest.update(payload)
    return digest.digest()
