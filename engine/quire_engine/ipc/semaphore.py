"""Memory and semaphores that processes share by inheriting descriptors. Without names, nothing can be left behind.

A `Semaphore` is an eventfd and one word of shared memory that counts its releases:

::

    release()   what is handed over   │ stored ──► word += 1 ──► eventfd += 1          one process releases
    acquire()   spin on the word, then block in poll ──► take the eventfd's count      one process acquires

Why this order is right, also on processors that reorder stores and loads: only the eventfd decides. The kernel keeps
its count under a lock, so a process that reads a count sees all that was stored before the write that raised it. No
wake-up is lost, since poll reads the count before it sleeps. The word is a hint: it saves the system calls of a
spinning reader. Read too early, it costs one call; read too late, a few microseconds more of spinning. Linux only.
"""

import contextlib
import mmap
import os
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

WORD_BYTES = 64
"""Each word has a cache line of its own, or processes that use different words would slow each other down."""
SPIN_SECONDS = 30e-6
"""About the cost of blocking and waking up."""
CHECK_SECONDS = 0.1
"""Seconds between calls of a `Watch`'s check while nothing comes."""


class SharedMemory:
    """Bytes that every process with the descriptor maps; zero at first, and real memory only where written."""

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, 0)
        self.view = memoryview(self._map)

    @staticmethod
    def create(name: str, num_bytes: int) -> int:
        """A descriptor for `num_bytes`; the name is only shown in /proc."""
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.truncate(descriptor, num_bytes)
        return descriptor

    def close(self) -> None:
        """Unmap it, as soon as there is no view of it any more. Idempotent."""
        with contextlib.suppress(BufferError):
            self.view.release()
            self._map.close()


class SemaphoreHandle(msgspec.Struct, frozen=True):
    """For the processes that inherit the descriptor."""

    descriptor: int
    word_offset: int
    initial: int

    @classmethod
    def create(cls, word_offset: int, initial: int = 0) -> "SemaphoreHandle":
        """A semaphore that can be acquired `initial` times at once. The word there must be 0."""
        return cls(os.eventfd(initial, os.EFD_CLOEXEC | os.EFD_NONBLOCK), word_offset, initial)


class Semaphore:
    """One end of a semaphore: a process either releases it or acquires it."""

    def __init__(self, handle: SemaphoreHandle, memory: SharedMemory) -> None:
        self._descriptor = handle.descriptor
        self._initial = handle.initial
        self._word = memory.view[handle.word_offset : handle.word_offset + 8].cast("Q")
        self._taken = -self._initial
        self._available = 0

    def fileno(self) -> int:
        """Readable while there are releases that `can_acquire` has not read yet."""
        return self._descriptor

    def release(self) -> None:
        self._word[0] += 1
        os.eventfd_write(self._descriptor, 1)

    def is_released(self) -> bool:
        """Whether `try_acquire` would probably succeed; a hint, without a system call."""
        return self._available > 0 or self._word[0] > self._taken

    def try_acquire(self) -> bool:
        """Acquire if that needs no wait."""
        if not self.can_acquire():
            return False
        self._available -= 1
        return True

    def can_acquire(self) -> bool:
        """Whether `try_acquire` will succeed."""
        if not self._available:
            try:
                self._available = os.eventfd_read(self._descriptor)
            except BlockingIOError:
                return False
            self._taken += self._available
        return True

    def acquire(self, waiter: "Waiter", timeout: float | None = None) -> None:
        """Acquire with a waiter of this semaphore.

        Raises:
            TimeoutError: not within `timeout` seconds.
        """
        waiter.wait_until(self.try_acquire, timeout)

    def forget(self) -> None:
        """Count from zero at this end, after the semaphore was reset."""
        self._taken, self._available = -self._initial, 0

    def reset(self) -> None:
        """Reset it to its initial state, while nothing uses it; both ends then have to `forget` their counts."""
        self.forget()
        self.can_acquire()
        self.forget()
        self._word[0] = 0
        os.eventfd_write(self._descriptor, self._initial)

    def close(self) -> None:
        """Release the memory. The descriptor stays open."""
        self._word.release()


@dataclass(frozen=True, slots=True)
class Watch:
    """Something else to check during a wait: an error that `check` raises ends it."""

    descriptors: Sequence[int]
    """`check` is called when one becomes readable, and otherwise every `CHECK_SECONDS`."""
    check: Callable[[], None]


class Waiter:
    """Waits for any of several semaphores: spins for a short while, then blocks in poll."""

    def __init__(self, semaphores: Sequence[Semaphore], watch: Watch | None = None) -> None:
        self._semaphores = semaphores
        self._watch = watch
        self._poll = select.poll()
        for semaphore in semaphores:
            self._poll.register(semaphore.fileno(), select.POLLIN)
        for descriptor in watch.descriptors if watch is not None else ():
            self._poll.register(descriptor, select.POLLIN)
        self._own = {semaphore.fileno() for semaphore in semaphores}
        self.waited_seconds = 0.0
        """The sum of all waits that have ended."""

    def wait_until(self, ready: Callable[[], bool], timeout: float | None = None) -> None:
        """Return as soon as `ready()`, which is called again whenever a semaphore was released.

        Raises:
            TimeoutError: not within `timeout` seconds.
            Exception: what the watch's check raised.
        """
        if ready():
            return
        began_at = time.monotonic()
        deadline = None if timeout is None else began_at + timeout
        self._spin()
        while not ready():
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                raise TimeoutError(f"nothing came within {timeout} seconds")
            self._block(remaining)
        self.waited_seconds += time.monotonic() - began_at

    def _spin(self) -> None:
        end = time.perf_counter() + SPIN_SECONDS
        while time.perf_counter() < end:
            for semaphore in self._semaphores:
                if semaphore.is_released():
                    return
            os.sched_yield()

    def _block(self, seconds: float | None) -> None:
        if self._watch is not None:
            seconds = CHECK_SECONDS if seconds is None else min(seconds, CHECK_SECONDS)
        events = self._poll.poll(None if seconds is None else 1000 * seconds)
        if self._watch is not None and not any(descriptor in self._own for descriptor, _ in events):
            self._watch.check()
