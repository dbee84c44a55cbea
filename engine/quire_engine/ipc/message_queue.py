"""MessageQueue: one writer and many readers, each of which receives every message in order; bytes in, bytes out.

It is a ring of chunks in unnamed shared memory, whose descriptor child processes inherit: nothing is left in /dev/shm
however they end.

::

    memory   │ words of the semaphores │ length │ chunk 0 │ length │ chunk 1 │ … │ length │ chunk n-1 │

    the states of a chunk, for each reader by itself:

              filled.release() by the writer           the reader may read it
      FREE ──────────────────────────────────► FILLED
        ▲                                         │
        └─────────────────────────────────────────┘
              free.release() by the reader             the writer may write it, when it is free for all readers

Two semaphores for each reader count the chunks in either state, `num_chunks` together. The writer acquires `free` of
all readers before it writes a chunk, and a reader acquires `filled` before it reads one. Both take the chunks in turn.

A message that is longer than a chunk goes as a run of chunks, and the writer waits for room as the readers take them.
The first chunk's length is the whole message's:

::

    length 10 │ABCD│   length – │EFGH│   length – │IJ│          chunk_bytes = 4
"""

import os
from collections.abc import Callable
from typing import TypeVar

import msgspec

from quire_engine.ipc.semaphore import WORD_BYTES, Semaphore, SemaphoreHandle, SharedMemory, Waiter, Watch

NUM_CHUNKS = 8
CHUNK_BYTES = 256 * 1024
"""Almost every step's message fits into one chunk. A message of 1 MB is written and read chunk by chunk at once."""

T = TypeVar("T")


class MessageQueueHandle(msgspec.Struct, frozen=True):
    """Descriptors and sizes, for the processes that inherit them."""

    memory: int
    filled: list[SemaphoreHandle]
    """By reader."""
    free: list[SemaphoreHandle]
    num_chunks: int
    chunk_bytes: int

    @classmethod
    def create(
        cls, num_readers: int, num_chunks: int = NUM_CHUNKS, chunk_bytes: int = CHUNK_BYTES
    ) -> "MessageQueueHandle":
        """A new queue; the caller has to `close` it, once the other processes have it."""
        chunks_at = 2 * num_readers * WORD_BYTES
        memory = SharedMemory.create("quire-queue", chunks_at + num_chunks * (8 + _aligned(chunk_bytes)))
        filled = [SemaphoreHandle.create(2 * i * WORD_BYTES) for i in range(num_readers)]
        free = [SemaphoreHandle.create((2 * i + 1) * WORD_BYTES, num_chunks) for i in range(num_readers)]
        return cls(memory, filled, free, num_chunks, chunk_bytes)

    def descriptors(self, reader: int) -> list[int]:
        """Descriptors that this reader's process has to inherit; the writer's too, with a single reader."""
        return [self.memory, self.filled[reader].descriptor, self.free[reader].descriptor]

    def close(self) -> None:
        """Close this process's descriptors. The queue stays usable in processes that have inherited them."""
        for descriptor in (self.memory, *(item.descriptor for item in (*self.filled, *self.free))):
            os.close(descriptor)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 8) * 8


class _Ring:
    """The chunks, seen from one end."""

    def __init__(self, handle: MessageQueueHandle) -> None:
        self.memory = SharedMemory(handle.memory)
        self.chunk_bytes = handle.chunk_bytes
        self.num_chunks = handle.num_chunks
        self._first_at = 2 * len(handle.filled) * WORD_BYTES
        self._stride = 8 + _aligned(handle.chunk_bytes)
        self._position = 0

    def next_chunk(self) -> memoryview:
        """Length and content of the next chunk."""
        start = self._first_at + self._position * self._stride
        self._position = (self._position + 1) % self.num_chunks
        return self.memory.view[start : start + 8 + self.chunk_bytes]


class MessageWriter:
    """The writing end. One process has it."""

    def __init__(self, handle: MessageQueueHandle, watch: Watch | None = None) -> None:
        self._ring = _Ring(handle)
        self._filled = [Semaphore(item, self._ring.memory) for item in handle.filled]
        self._free = [Semaphore(item, self._ring.memory) for item in handle.free]
        self._waiters = [Waiter([semaphore], watch) for semaphore in self._free]
        self._broken = False

    def write(self, message: bytes | bytearray | memoryview, timeout: float | None = None) -> None:
        """Send a message to all readers; waits for room if the slowest is behind.

        Raises:
            TimeoutError: no room within `timeout` seconds. If that happens in the middle of a message, the queue is
                unusable: every later call raises RuntimeError.
            Exception: what the watch's check raised.
        """
        if self._broken:
            raise RuntimeError("an earlier message was cut off, so nothing can be written to this queue any more")
        content = memoryview(message).cast("B")
        total, start = len(content), 0
        while True:
            for semaphore, waiter in zip(self._free, self._waiters, strict=True):
                waiter.wait_until(semaphore.can_acquire, timeout)
            self._broken = True
            for semaphore in self._free:
                semaphore.try_acquire()
            piece = content[start : start + self._ring.chunk_bytes]
            with self._ring.next_chunk() as chunk:
                chunk[:8] = total.to_bytes(8, "little")
                chunk[8 : 8 + len(piece)] = piece
            for semaphore in self._filled:
                semaphore.release()
            start += self._ring.chunk_bytes
            if start >= total:
                self._broken = False
                return

    def close(self) -> None:
        """Unmap the memory."""
        for semaphore in (*self._filled, *self._free):
            semaphore.close()
        self._ring.memory.close()


class MessageReader:
    """A reading end. Each reader has its own index, and belongs to one process."""

    def __init__(self, handle: MessageQueueHandle, index: int, watch: Watch | None = None) -> None:
        self._ring = _Ring(handle)
        self.filled = Semaphore(handle.filled[index], self._ring.memory)
        """For waiting for several queues at once; see `Waiter`."""
        self._free = Semaphore(handle.free[index], self._ring.memory)
        self._waiter = Waiter([self.filled], watch)
        self._partial = bytearray()
        self._total = 0

    def read(self, timeout: float | None = None) -> bytes:
        """The next message; waits for it.

        Raises:
            TimeoutError: it was not complete within `timeout` seconds. The next call goes on from there.
            Exception: what the watch's check raised.
        """
        return self.read_with(bytes, timeout)

    def read_with(self, decode: Callable[[memoryview], T], timeout: float | None = None) -> T:
        """`decode` applied to the next message in place: it must not keep the view. Raises like `read`."""
        while True:
            self.filled.acquire(self._waiter, timeout)
            try:
                with self._ring.next_chunk() as chunk:
                    if not self._partial:
                        self._total = int.from_bytes(chunk[:8], "little")
                        if self._total <= self._ring.chunk_bytes:
                            return _decode(decode, chunk[8 : 8 + self._total])
                    self._partial += chunk[8 : 8 + min(self._ring.chunk_bytes, self._total - len(self._partial))]
            finally:
                self._free.release()
            if len(self._partial) == self._total:
                message, self._partial = self._partial, bytearray()
                return _decode(decode, memoryview(message))

    def close(self) -> None:
        """Unmap the memory."""
        self.filled.close()
        self._free.close()
        self._ring.memory.close()


def _decode(decode: Callable[[memoryview], T], content: memoryview) -> T:
    with content:
        return decode(content)
