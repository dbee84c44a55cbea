"""Lockstep: processes of one machine that meet again and again; any of them may die and be replaced.

::

    memory of N members, and a bell for each
    │ arrived: N words │ ended: N + 1 words │ said, turn 0: N words │ turn 1: N words │ buffers (distributed) │

**A meeting** is the same for every member: write a number to its word of this turn (`said`), write its position to its
word of `arrived`, and ring the others' bells. Once all have arrived, read their numbers. The turns alternate: a member
that writes to a turn again, two meetings later, has seen all arrive at the meeting between, and a member that arrived
there has read the numbers of this one.

**Generations.** Meetings are counted from 1 in each generation. A word of `arrived` holds both::

    generation · 2^44 + meeting

A member that fails or dies never arrives, and the others would wait forever. So the member itself, or a process that
saw it die, ends the generation: `ended` has a word for each member and one for the owner, which is no member; the
present generation is the largest of them. All begin again at meeting 1 of that, and so does the process that replaces
the dead one. Nothing is reset, and words only grow: those of a dead member are smaller than all that can be waited for.
The callers have two duties:

* The owner ends the generation after a member's death, before another process replaces it.
* A member that has read numbers reads the `present_generation` afterwards: if it has changed, the numbers may be of the
  new one.

A bell is an eventfd, which only wakes. The words decide, and each is written after what it announces: x86 keeps that
order, and elsewhere a turn through the kernel's scheduler does, which is a barrier.
"""

import contextlib
import os
import platform
import threading

import msgspec

from quire_engine.ipc.semaphore import WORD_BYTES, SharedMemory

GENERATION = 1 << 44
IS_ORDERED = platform.machine() in ("x86_64", "AMD64")


def _fence() -> None:
    """Keep the order of what is read and written before and after."""
    if not IS_ORDERED:
        os.sched_yield()


class LockstepHandle(msgspec.Struct, frozen=True):
    """Descriptors and sizes, for the processes that inherit them."""

    memory: int
    size: int
    buffer_bytes: int
    """Bytes for each member and turn; see `distributed/lockstep_group.py`."""
    bells: list[int]

    @classmethod
    def create(cls, size: int, buffer_bytes: int = 0) -> "LockstepHandle":
        """For so many members; the caller has to `close` it. Pages are allocated when they are written."""
        memory = SharedMemory.create("quire-lockstep", (4 * size + 1) * WORD_BYTES + 2 * size * buffer_bytes)
        return cls(memory, size, buffer_bytes, [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(size)])

    @property
    def buffers_at(self) -> int:
        """Where the words end and the buffers begin."""
        return (4 * self.size + 1) * WORD_BYTES

    def descriptors(self) -> list[int]:
        """Descriptors that every member has to inherit."""
        return [self.memory, *self.bells]

    def close(self) -> None:
        """Close this process's descriptors."""
        for descriptor in self.descriptors():
            os.close(descriptor)


class Lockstep:
    """One process's view: a member's, or the owner's.

    Args:
        handle: the descriptors.
        member: its index; None: the owner.
    """

    def __init__(self, handle: LockstepHandle, member: int | None) -> None:
        self.size = handle.size
        self._place = handle.size if member is None else member
        self._memory = SharedMemory(handle.memory)
        self._words = self._memory.view[: handle.buffers_at].cast("q")
        self._bells = [bell for other, bell in enumerate(handle.bells) if other != member]
        self.bell = -1 if member is None else handle.bells[member]
        """Readable when a word may have changed."""
        self._lock = threading.Lock()
        self.generation = 0
        self._meeting = 0
        """The last one that this member has arrived at."""

    # -- generations -------------------------------------------------------------------------------------------------

    @property
    def present_generation(self) -> int:
        """The one that has not ended."""
        return max(self._word(self.size + place) for place in range(self.size + 1))

    def end(self, generation: int | None = None) -> int:
        """End a generation (the present one if unset), and wake all that wait in it. Any thread may call it.

        Returns:
            The generation that follows.
        """
        with self._lock:
            ended = 1 + (self.present_generation if generation is None else generation)
            self._set(self.size + self._place, max(self._word(self.size + self._place), ended))
            _fence()
            self._ring()
        return ended

    def begin(self, generation: int) -> None:
        """Join the meetings of a generation from the first on, unless this member has joined it already."""
        if generation != self.generation:
            self.generation, self._meeting = generation, 0

    # -- meetings ----------------------------------------------------------------------------------------------------

    def arrive(self, number: int | None) -> None:
        """Arrive at the next meeting. `has_met` has to be true before the one after it.

        Args:
            number: for all to read; None: none.
        """
        self._meeting += 1
        if number is not None:
            self._set(self._said_at + self._place, number)
        _fence()
        self._set(self._place, self._position)
        self._ring()

    @property
    def has_met(self) -> bool:
        """Whether all have arrived at this member's meeting."""
        if min(self.positions()) < self._position:
            return False
        _fence()
        return True

    @property
    def is_called(self) -> bool:
        """Whether another member has arrived at a meeting of the present generation where this one has not."""
        return max(self.positions()) > max(self._position, self.present_generation * GENERATION)

    def said(self) -> list[int]:
        """The numbers of the meeting, by member, once all have arrived."""
        return [self._word(self._said_at + member) for member in range(self.size)]

    def positions(self) -> list[int]:
        """Each member's position."""
        return [self._word(member) for member in range(self.size)]

    def present_positions(self) -> list[int]:
        """Each member's position, at least the beginning of the present generation."""
        beginning = self.present_generation * GENERATION
        return [max(position, beginning) for position in self.positions()]

    def hear(self) -> None:
        """Reset the bell."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.bell)

    def close(self) -> None:
        """Unmap the memory in this process, once nothing refers to it."""
        self._words.release()
        self._memory.close()

    @property
    def _position(self) -> int:
        return self.generation * GENERATION + self._meeting

    @property
    def _said_at(self) -> int:
        return 2 * self.size + 1 + (self._meeting & 1) * self.size

    def _word(self, place: int) -> int:
        return self._words[place * WORD_BYTES // 8]

    def _set(self, place: int, value: int) -> None:
        self._words[place * WORD_BYTES // 8] = value

    def _ring(self) -> None:
        for bell in self._bells:
            os.eventfd_write(bell, 1)
