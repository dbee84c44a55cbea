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

from quire_kernels.cpu import MEND, Call, library, status, structure

GROUP_BYTES = 16
LOCK_SECONDS = 1.0
"""After so long a lock counts as held by a process that is stopped: it is held for microseconds."""
_LOCKED, _TOO_MANY, _OTHER_SIZE, _NOT_ATTACHED, _NO_PROC = range(-1, -6, -1)
_attaching = threading.Lock()
"""A lock on a file is the process's, not the thread's."""
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
    """Repairs of the index, after a process died while it changed it."""
    slots_at: int
    """Where the first slot is, in bytes from the beginning."""


def require_shared_blocks() -> ctypes.CDLL:
    """The library; OSError if it is not there."""
    handle = library()
    if handle is None:
        raise OSError(f"shared memory needs the C++ kernels, and there are none ({status().reason}); {MEND}")
    return handle


class SharedBlocks:
    """One process's view of the memory, of which the descriptor stays the caller's, and of the blocks of one group, 16
    bytes. Raises OSError if there are no C++ kernels, the memory cannot be mapped, or too many have attached. All calls
    raise OSError if a process that is stopped holds the lock."""

    def __init__(self, descriptor: int, group: bytes) -> None:
        assert len(group) == GROUP_BYTES
        self._library = require_shared_blocks()
        for name in ("write", "read", "count", "attach", "detach", "divide", "describe"):
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
    def num_bytes(self) -> int:
        return len(self._map)

    def divide(self, block_bytes: int) -> int:
        """Make slots for blocks of so many bytes, unless that was done, and return their number. Raises ValueError if
        there are slots for blocks of another size."""
        return self._ask("divide", ctypes.c_int64(block_bytes))

    def stats(self) -> SharedBlocksStats:
        state = _SharedBlocksState()
        self._ask("describe", ctypes.byref(state))
        return SharedBlocksStats(*(getattr(state, name) for name, *_ in state._fields_))

    def count(self, hashes: Sequence[bytes], seconds: float = LOCK_SECONDS) -> int:
        """How many of these are there, up to the first that is not."""
        return self._call("count", hashes, seconds=seconds)

    def write(self, hashes: Sequence[bytes], places: Sequence[int], num_bytes: int) -> int:
        """Write blocks of so many bytes, from their addresses, that are not there already. Returns how many of the
        first are there now, or are being written by another process. Raises ValueError if they are larger than a
        slot."""
        return self._call("write", hashes, places, num_bytes)

    def read(self, hashes: Sequence[bytes], places: Sequence[int], num_bytes: int) -> tuple[int, bool]:
        """Copy blocks to addresses. They count as used now. Returns how many of the first are there and sound, and
        whether the one after them is there, but not sound: it is evicted. Raises ValueError if they are larger than a
        slot."""
        damaged = ctypes.c_int64()
        return self._call("read", hashes, places, num_bytes, extra=(ctypes.byref(damaged),)), bool(damaged.value)

    def close(self) -> None:
        """Release all that this one has reserved or pinned, and the memory: at once, or when the calls that other
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
            with contextlib.suppress(BufferError):  # there still is a view of it
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

    def _call(
        self,
        name: str,
        hashes: Sequence[bytes],
        places: Sequence[int] = (),
        num_bytes: int = 0,
        extra: tuple[object, ...] = (),
        seconds: float = LOCK_SECONDS,
    ) -> int:
        keys = ctypes.create_string_buffer(b"".join(hashes))
        addresses = (ctypes.c_uint64 * len(places))(*places)
        call = _SharedBlocksCall(
            attachment=self._attachment, group=ctypes.addressof(self._group), hashes=ctypes.addressof(keys),
            places=ctypes.addressof(addresses), blocks=len(hashes), bytes=num_bytes, seconds=seconds,
        )  # fmt: skip
        return self._run(name, call, *extra)

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
            _NO_PROC: "this process cannot read /proc/self/stat, by which others see whether it is alive; has it "
            "no descriptors left?",
        }[result]
    )
