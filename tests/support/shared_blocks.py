"""The steps of a write and of a read of `SharedBlocks`, for tests that come between them."""

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from quire_kernels.cpu import structure
from quire_kernels.shared_blocks import LOCK_SECONDS, SharedBlocks, require_shared_blocks

__all__ = ["BlockSteps", "copy_digest"]

HASH_BYTES = 32


def copy_digest(source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8] | None, around: bool = False) -> int:
    """Copy bytes, and return their XXH3-128; up to 240 are padded with zeros to 256 for it. Both arrays are of one size
    and without gaps; without a target nothing is copied. A copy may go `around` the caches if nothing reads it soon."""
    place = None if target is None else target.ctypes.data
    return _copy_digest(source.ctypes.data, place, source.nbytes, around)


def _copy_digest(source: int, target: int | None, num_bytes: int, around: bool = False) -> int:
    digest = (ctypes.c_uint64 * 2)()
    require_shared_blocks().quire_copy_digest(
        ctypes.c_void_p(source), ctypes.c_void_p(target), ctypes.c_int64(num_bytes), ctypes.c_int64(around), digest
    )
    return int(digest[1]) << 64 | int(digest[0])


class BlockSteps:
    """Of the blocks of one view of the memory."""

    def __init__(self, blocks: SharedBlocks) -> None:
        self._blocks = blocks
        for name in ("reserve", "commit", "pin", "unpin", "list"):
            getattr(blocks._library, f"quire_shared_{name}").restype = ctypes.c_int64

    @property
    def address(self) -> int:
        """Of the first byte."""
        return self._blocks._memory

    def hashes(self) -> list[bytes]:
        """The hashes of the group's blocks that are there, last used first."""
        room = self._blocks.stats().num_blocks
        found = ctypes.create_string_buffer(HASH_BYTES * room or 1)
        count = self._run("list", found, room)
        return [found.raw[i * HASH_BYTES : (i + 1) * HASH_BYTES] for i in range(count)]

    def reserve(self, hashes: Sequence[bytes], num_bytes: int) -> list[int | None]:
        """Reserve slots for blocks until this process commits them, or dies. Returns the slot of each of the first;
        None for one that is there, or being written by another process. At most 64 are reserved at a time."""
        slots = (ctypes.c_uint32 * len(hashes))()
        count = self._run("reserve", _joined(hashes), len(hashes), num_bytes, slots)
        return [slots[i] - 1 if slots[i] else None for i in range(count)]

    def commit(self, hashes: Sequence[bytes], slots: Sequence[int | None], num_bytes: int) -> None:
        """Publish reserved blocks, whose bytes are in their slots."""
        self._finish("commit", hashes, slots, num_bytes)

    def pin(self, hashes: Sequence[bytes], num_bytes: int) -> list[int]:
        """Slots of the first of these blocks, which stay as they are until they are unpinned, or this process dies."""
        slots = (ctypes.c_uint32 * len(hashes))()
        count = self._run("pin", _joined(hashes), len(hashes), num_bytes, slots)
        return [slots[i] - 1 for i in range(count)]

    def unpin(self, hashes: Sequence[bytes], slots: Sequence[int], num_bytes: int) -> int:
        """Check what is in pinned slots, and release them. Returns how many of the first are sound."""
        return self._finish("unpin", hashes, slots, num_bytes)

    def slot(self, number: int) -> memoryview:
        """The bytes of a slot."""
        stats = self._blocks.stats()
        start = stats.slots_at + number * stats.slot_bytes
        return memoryview(self._blocks._map)[start : start + stats.slot_bytes]

    def _finish(self, name: str, hashes: Sequence[bytes], slots: Sequence[int | None], num_bytes: int) -> int:
        numbers = (ctypes.c_uint32 * len(slots))(*(0 if slot is None else slot + 1 for slot in slots))
        digests = (ctypes.c_uint64 * (2 * len(slots)))()
        stats = self._blocks.stats()
        for i, slot in enumerate(slots):
            if slot is not None:
                digest = _copy_digest(self.address + stats.slots_at + slot * stats.slot_bytes, None, num_bytes)
                digests[2 * i], digests[2 * i + 1] = digest & (1 << 64) - 1, digest >> 64
        return self._run(name, _joined(hashes[: len(slots)]), len(slots), num_bytes, numbers, digests)

    def _run(
        self,
        name: str,
        hashes: "ctypes.Array[ctypes.c_char]",
        blocks: int,
        num_bytes: int = 0,
        slots: "ctypes.Array[ctypes.c_uint32] | None" = None,
        digests: "ctypes.Array[ctypes.c_uint64] | None" = None,
    ) -> int:
        call = structure("SharedBlocksCall")(
            attachment=self._blocks._attachment, group=ctypes.addressof(self._blocks._group),
            hashes=ctypes.addressof(hashes), slots=None if slots is None else ctypes.addressof(slots),
            digests=None if digests is None else ctypes.addressof(digests), blocks=blocks, bytes=num_bytes,
            seconds=LOCK_SECONDS,
        )  # fmt: skip
        return self._blocks._run(name, call)


def _joined(hashes: Sequence[bytes]) -> "ctypes.Array[ctypes.c_char]":
    return ctypes.create_string_buffer(b"".join(hashes))
