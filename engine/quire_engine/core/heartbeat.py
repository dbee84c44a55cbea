"""Heartbeat: the page of memory in which an engine core shows that it moves, read by the frontend.

::

    byte  0        8       16                    24               32
          │ turns  │ steps │ oldest_request_time │ num_messages │   int64 each, written by the engine core alone

`turns` counts the rounds of its loop, `steps` those that computed something. `oldest_request_time` is the moment, in
nanoseconds of the machine's monotonic clock, at which the oldest live request came; 0 when there is none.
`num_messages` counts what it has taken in.

Memory, and not a message: it can be read when the other side does nothing any more.
"""

import os

from quire_engine.semaphore import SharedMemory

__all__ = ["Heartbeat"]

_NUM_BYTES = 4 * 8


class Heartbeat:
    """One side's view of the page.

    Args:
        descriptor: of the page, inherited; unset: a new page.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = SharedMemory.create("quire-heartbeat", _NUM_BYTES) if descriptor is None else descriptor
        try:
            self._memory = SharedMemory(self.descriptor)  # takes a descriptor of its own, which may not be there
        except OSError:
            if descriptor is None:
                os.close(self.descriptor)
            raise
        self._page = self._memory.view[:_NUM_BYTES].cast("q")

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
        """Messages that it has taken in."""
        return self._page[3]

    def received(self) -> None:
        """Another message is taken in."""
        self._page[3] += 1

    def turn(self, oldest_request_time: float | None) -> None:
        """The loop begins another round."""
        self._page[2] = int((oldest_request_time or 0.0) * 1e9)
        self._page[0] += 1

    def step(self) -> None:
        """A step begins."""
        self._page[1] += 1

    def close(self) -> None:
        """Let go of the page, on this side. Nothing may be asked of it afterwards."""
        self._page.release()
        self._memory.close()
        os.close(self.descriptor)
