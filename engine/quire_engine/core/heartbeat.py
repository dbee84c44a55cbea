"""Heartbeat: the page of memory in which an engine core shows that it moves, read by the frontend.

::

    byte  0        8       16                    24             32         40                         65576
          │ turns  │ steps │ oldest_request_time │ num_messages │ handling │ begun: one for each slot │ lock
                                                                  int64 each, written by the engine core alone

`turns` counts the rounds of its loop, `steps` those that computed something. `oldest_request_time` is the moment, in
nanoseconds of the machine's monotonic clock, at which the oldest live request came; 0 when there is none.
`num_messages` counts what it has taken in.

The number of its message identifies a request. `handling` is the request that is being decoded, 0 between two. A
request that the engine has begun to compute has its number in `begun`, in slot number % `NUM_SLOTS`; a larger number
there came so much later that the request has begun as well. So the frontend can tell which requests a dead engine had
only been sent. The engine core holds the lock for as long as it lives (`OwnerLock`).

It is memory and not a message because it has to be readable when the engine core hangs.
"""

import os

from quire_engine.ipc.owner_lock import LOCK_BYTES, OwnerLock
from quire_engine.ipc.semaphore import SharedMemory

_NUM_FIELDS = 5
NUM_SLOTS = 8192
_NUM_BYTES = 8 * (_NUM_FIELDS + NUM_SLOTS)


class Heartbeat:
    """One side's view of the page.

    Args:
        descriptor: of the page, inherited; unset: a new page.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = (
            SharedMemory.create("quire-heartbeat", _NUM_BYTES + LOCK_BYTES) if descriptor is None else descriptor
        )
        try:
            self._memory = SharedMemory(self.descriptor)  # takes another descriptor, and none may be left
        except OSError:
            if descriptor is None:
                os.close(self.descriptor)
            raise
        self._page = self._memory.view[:_NUM_BYTES].cast("q")
        self._lock = OwnerLock(self._memory.view, _NUM_BYTES, is_new=descriptor is None)

    @property
    def turns(self) -> int:
        """Rounds of the engine core's loop."""
        return self._page[0]

    @property
    def steps(self) -> int:
        """Steps that it has begun."""
        return self._page[1]

    @property
    def oldest_request_time(self) -> float | None:
        """When its oldest live request came, in seconds of `time.monotonic`; None without one."""
        return self._page[2] / 1e9 or None

    @property
    def num_messages(self) -> int:
        """Messages that it has received."""
        return self._page[3]

    def has_begun(self, number: int) -> bool:
        """Whether the engine core has begun to compute a request, by the number of its message."""
        return self._page[_NUM_FIELDS + number % NUM_SLOTS] >= number or self._page[4] == number

    def received(self) -> int:
        """Count a received message; returns its number."""
        self._page[3] += 1
        return self._page[3]

    def handle(self, number: int) -> None:
        """The request of this message is being decoded; 0: it has been."""
        self._page[4] = number

    def begin(self, number: int) -> None:
        """The request of this message is about to be computed."""
        self._page[_NUM_FIELDS + number % NUM_SLOTS] = number

    def turn(self, oldest_request_time: float | None) -> None:
        """The loop begins another round."""
        self._page[2] = int((oldest_request_time or 0.0) * 1e9)
        self._page[0] += 1

    def step(self) -> None:
        """A step begins."""
        self._page[1] += 1

    def hold(self) -> None:
        """The engine core's main thread serves from now on, until the process ends."""
        self._lock.hold()

    def wait_for_end(self, seconds: float) -> bool | None:
        """Wait until the engine core begins to end, at most for these seconds; None if that is not known here."""
        return self._lock.wait(seconds)

    def close(self) -> None:
        """Unmap the page on this side. It must not be used afterwards."""
        self._lock.close()
        self._page.release()
        self._memory.close()
        os.close(self.descriptor)
