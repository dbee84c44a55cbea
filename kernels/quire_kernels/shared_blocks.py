"""KV blocks in memory that processes share, with an index and a lock that survive any of them: the C++ of
`kernels/csrc/shared_blocks.h`, where the states are drawn.

What is here knows no engine: blocks are bytes under a hash of 32 bytes and a group of 16, slots are numbers. All calls
release Python's lock, and may be made by any thread.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from quire_kernels.cpu import MEND, Call, library, status, structure

HASH_BYTES = 32
GROUP_BYTES = 16
LOCK_SECONDS = 1.0
"""After so long a lock counts as held by a process that is stopped: it is held for microseconds."""
_LOCKED, _TOO_MANY, _OTHER_SIZE, _NOT_ATTACHED, _NO_PROC = range(-1, -6, -1)
_attaching = threading.Lock()
"""A lock on a file is the process's, not the thread's."""


_STATE_FIELDS = ("slots", "slot_bytes", "used", "there", "evicted", "damaged", "repairs", "slots_at")

_SharedBlocksCall = structure("SharedBlocksCall")


_SharedBlocksState = structure("SharedBlocksState")


@dataclass(frozen=True, slots=True)
class SharedBlocksStats:
    """What is in the memory at a moment, of all groups."""

    num_slots: int
    slot_bytes: int
    num_used: int
    """Slots that hold a block, or are being written or read."""
    num_blocks: int
    num_evicted: int
    """Since the beginning; so are the next two."""
    num_damaged: int
    num_repairs: int
    """Of the index, after a process died while it changed it."""
    slots_at: int
    """Where the first slot is, in bytes from the beginning."""


def require_shared_blocks() -> ctypes.CDLL:
    """The library.

    Raises:
        OSError: it is not there.
    """
    handle = library()
    if handle is None:
        raise OSError(f"shared memory needs the C++ kernels, and there are none ({status().reason}); {MEND}")
    return handle


def copy_digest(source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8] | None, around: bool = False) -> int:
    """Copy bytes, and return their XXH3-128; up to 240 are padded with zeros to 256 for it.

    Args:
        source: without gaps.
        target: of the same size; None: nothing is copied.
        around: whether the copy goes around the caches: nothing reads it soon.
    """
    digest = (ctypes.c_uint64 * 2)()
    place = None if target is None else ctypes.c_void_p(target.ctypes.data)
    require_shared_blocks().quire_copy_digest(
        ctypes.c_void_p(source.ctypes.data), place, ctypes.c_int64(source.nbytes), ctypes.c_int64(around), digest
    )
    return int(digest[1]) << 64 | int(digest[0])


class SharedBlocks:
    """One process's view of the memory.

    Args:
        descriptor: of the memory; it stays the caller's.
        group: 16 bytes: which blocks this one writes and finds.

    Raises:
        OSError: there are no C++ kernels, the memory cannot be mapped, or too many have attached.
    """

    def __init__(self, descriptor: int, group: bytes) -> None:
        assert len(group) == GROUP_BYTES
        self._library = require_shared_blocks()
        for name in ("write", "read", "reserve", "commit", "pin", "unpin", "count", "list", "attach", "detach",
                     "divide", "describe"):  # fmt: skip
            getattr(self._library, f"quire_shared_{name}").restype = ctypes.c_int64
        self._guard = threading.Lock()
        self._num_inside = 0
        """Calls that are being made, without the interpreter's lock: the memory stays mapped until they are over."""
        self._is_closed = False
        self._map = mmap.mmap(descriptor, 0)
        with contextlib.suppress(OSError):  # a kernel without huge pages for shared memory
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._first_byte = ctypes.c_char.from_buffer(self._map)
        self._memory = ctypes.addressof(self._first_byte)
        self._group = ctypes.create_string_buffer(group, GROUP_BYTES)
        self._seconds = ctypes.c_float(LOCK_SECONDS)
        with _attaching:
            file = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.lockf(file, fcntl.LOCK_EX)  # also against one that makes the lock in the memory
                self._attachment = self._ask("attach", ctypes.c_int64(len(self._map)))
            finally:
                os.close(file)

    @property
    def address(self) -> int:
        """Where the memory is mapped."""
        return self._memory

    @property
    def num_bytes(self) -> int:
        """Of all of it."""
        return len(self._map)

    def divide(self, block_bytes: int) -> int:
        """Make slots for blocks of so many bytes, unless that was done. Returns how many there are.

        Raises:
            ValueError: there are slots for blocks of another size.
            OSError: see `read`.
        """
        return self._ask("divide", ctypes.c_int64(block_bytes))

    def stats(self) -> SharedBlocksStats:
        """The present numbers."""
        state = _SharedBlocksState()
        self._ask("describe", ctypes.byref(state))
        return SharedBlocksStats(*(getattr(state, name) for name, *_ in state._fields_))

    def count(self, hashes: Sequence[bytes], seconds: float = LOCK_SECONDS) -> int:
        """How many of these are there, up to the first that is not."""
        return self._call("count", hashes, seconds=seconds)

    def hashes(self) -> list[bytes]:
        """Of the blocks of the group that are there, last used first."""
        room = self.stats().num_blocks
        found = ctypes.create_string_buffer(HASH_BYTES * room or 1)
        count = self._run("list", self._make_call(found, room, 0))
        return [found.raw[i * HASH_BYTES : (i + 1) * HASH_BYTES] for i in range(count)]

    def write(self, hashes: Sequence[bytes], places: Sequence[int], num_bytes: int) -> int:
        """Keep blocks that are not there already.

        Args:
            hashes: of the blocks.
            places: addresses of their bytes.
            num_bytes: of each.

        Returns:
            How many of the first are there now, or are being written by another.

        Raises:
            ValueError: they are larger than a slot.
            OSError: the lock is held by a process that does not go on.
        """
        return self._call("write", hashes, places, num_bytes)

    def read(self, hashes: Sequence[bytes], places: Sequence[int], num_bytes: int) -> tuple[int, bool]:
        """Copy blocks to some places. They count as used now.

        Returns:
            How many of the first are there and sound, and whether the one after them is there, but not sound: it is
            taken away.

        Raises:
            ValueError: they are larger than a slot.
            OSError: the lock is held by a process that does not go on.
        """
        damaged = ctypes.c_int64()
        return self._call("read", hashes, places, num_bytes, extra=(ctypes.byref(damaged),)), bool(damaged.value)

    # -- the same in two steps, for whoever copies in another way ------------------------------------------------------

    def reserve(self, hashes: Sequence[bytes], num_bytes: int) -> list[int | None]:
        """Slots for blocks, which are this process's alone until it commits them, or dies.

        Returns:
            Of each of the first the slot; None of one that is there, or being written by another. At most 64 are given
            out at a time.
        """
        slots = (ctypes.c_uint32 * len(hashes))()
        count = self._call("reserve", hashes, (), num_bytes, slots)
        return [slots[i] - 1 if slots[i] else None for i in range(count)]

    def commit(self, hashes: Sequence[bytes], slots: Sequence[int | None], num_bytes: int) -> None:
        """The bytes of reserved blocks are in their slots."""
        self._finish("commit", hashes, slots, num_bytes)

    def pin(self, hashes: Sequence[bytes], num_bytes: int) -> list[int]:
        """Slots of the first of these blocks, which stay as they are until they are unpinned, or this process dies."""
        slots = (ctypes.c_uint32 * len(hashes))()
        count = self._call("pin", hashes, (), num_bytes, slots)
        return [slots[i] - 1 for i in range(count)]

    def unpin(self, hashes: Sequence[bytes], slots: Sequence[int], num_bytes: int) -> int:
        """Check what is in pinned slots, and let them go. Returns how many of the first are sound."""
        return self._finish("unpin", hashes, slots, num_bytes)

    def slot(self, number: int) -> memoryview:
        """A slot's bytes."""
        stats = self.stats()
        start = stats.slots_at + number * stats.slot_bytes
        return memoryview(self._map)[start : start + stats.slot_bytes]

    def close(self) -> None:
        """Let go of all that this one has reserved or pinned, and of the memory: at once, or when the calls that other
        threads are making are over."""
        with self._guard:
            self._is_closed = True
            is_over = self._num_inside == 0
        if is_over:
            self._let_go()

    def _let_go(self) -> None:
        with self._guard:
            memory, self._memory = self._memory, 0
        if memory:
            with contextlib.suppress(OSError):
                self._check(
                    self._library.quire_shared_detach(
                        ctypes.c_void_p(memory), ctypes.c_int64(self._attachment), self._seconds
                    )
                )
            del self._first_byte
            with contextlib.suppress(BufferError):  # somebody has a view of it
                self._map.close()

    @contextlib.contextmanager
    def _inside(self) -> Iterator[int]:
        """The memory's address, which is mapped inside the block."""
        with self._guard:
            if self._is_closed:
                raise OSError("the engine ends")
            self._num_inside += 1
        try:
            yield self._memory
        finally:
            with self._guard:
                self._num_inside -= 1
                is_last = self._is_closed and self._num_inside == 0
            if is_last:
                self._let_go()

    def _finish(self, name: str, hashes: Sequence[bytes], slots: Sequence[int | None], num_bytes: int) -> int:
        numbers = (ctypes.c_uint32 * len(slots))(*(0 if slot is None else slot + 1 for slot in slots))
        digests = (ctypes.c_uint64 * (2 * len(slots)))()
        stats = self.stats()
        with self._inside() as memory:
            for i, slot in enumerate(slots):
                if slot is not None:
                    place = memory + stats.slots_at + slot * stats.slot_bytes
                    self._library.quire_copy_digest(
                        ctypes.c_void_p(place), None, ctypes.c_int64(num_bytes), ctypes.c_int64(0),
                        ctypes.byref(digests, 16 * i),
                    )  # fmt: skip
        return self._call(name, hashes[: len(slots)], (), num_bytes, numbers, digests)

    def _call(
        self,
        name: str,
        hashes: Sequence[bytes],
        places: Sequence[int] = (),
        num_bytes: int = 0,
        slots: "ctypes.Array[ctypes.c_uint32] | None" = None,
        digests: "ctypes.Array[ctypes.c_uint64] | None" = None,
        extra: tuple[object, ...] = (),
        seconds: float = LOCK_SECONDS,
    ) -> int:
        call = self._make_call(ctypes.c_char_p(b"".join(hashes)), len(hashes), num_bytes, seconds)
        addresses = (ctypes.c_uint64 * len(places))(*places)
        call.places = ctypes.addressof(addresses)
        call.slots = None if slots is None else ctypes.addressof(slots)
        call.digests = None if digests is None else ctypes.addressof(digests)
        return self._run(name, call, *extra)

    def _make_call(
        self, hashes: "ctypes.c_char_p | ctypes.Array[ctypes.c_char]", blocks: int, num_bytes: int,
        seconds: float = LOCK_SECONDS,
    ) -> Call:  # fmt: skip
        call = _SharedBlocksCall(
            attachment=self._attachment, group=ctypes.addressof(self._group),
            hashes=ctypes.cast(hashes, ctypes.c_void_p), blocks=blocks, bytes=num_bytes, seconds=seconds,
        )  # fmt: skip
        call.keep_alive = hashes
        return call

    def _run(self, name: str, call: Call, *extra: object) -> int:
        function: Callable[..., int] = getattr(self._library, f"quire_shared_{name}")
        with self._inside() as memory:
            call.memory = memory
            return self._check(function(ctypes.byref(call), *extra))

    def _ask(self, name: str, argument: object) -> int:
        function: Callable[..., int] = getattr(self._library, f"quire_shared_{name}")
        with self._inside() as memory:
            return self._check(function(ctypes.c_void_p(memory), argument, self._seconds))

    @staticmethod
    def _check(result: int) -> int:
        if result < 0:
            _fail(result)
        return result


def _fail(result: int) -> NoReturn:
    if result == _OTHER_SIZE:
        raise ValueError("the memory has slots for blocks of another size: engines of different settings share it")
    raise OSError(
        {
            _LOCKED: f"another process holds the lock for more than {LOCK_SECONDS:.0f} s; is it stopped?",
            _TOO_MANY: "512 ranks use it already",
            _NOT_ATTACHED: "this process was taken for dead",
            _NO_PROC: "this process cannot read /proc/self/stat, by which others see whether it lives; has it "
            "no descriptors left?",
        }[result]
    )
