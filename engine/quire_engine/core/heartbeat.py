"""Heartbeat: the page of memory in which an engine core shows that it moves, read by the frontend.

::

    byte  0        8       16                    24               32
          │ turns  │ steps │ oldest_request_time │ num_messages │   int64 each, written by the engine core alone

`turns` counts the rounds of its loop, `steps` those that computed something. `oldest_request_time` is the moment, in
nanoseconds of the machine's monotonic clock, at which the oldest live request came; 0 when there is none.
`num_messages` counts what it has taken in.

Memory, and not a message: it can be read when the other side does nothing any more. It is a memfd, so it has no name
and is gone with the last process that has it open.
"""

import mmap
import os

import numpy as np

__all__ = ["Heartbeat"]

_NUM_FIELDS = 4


class Heartbeat:
    """One side's view of the page.

    Args:
        fd: descriptor of the page; unset: a new page. It stays open, and is for the caller to close.
    """

    def __init__(self, fd: int | None = None) -> None:
        size = _NUM_FIELDS * 8
        if fd is None:
            fd = os.memfd_create("quire-heartbeat")
            os.ftruncate(fd, size)
        self.fd = fd
        self._page = np.frombuffer(mmap.mmap(fd, size), dtype=np.int64)

    @property
    def turns(self) -> int:
        """Rounds of the engine core's loop."""
        return int(self._page[0])

    @property
    def steps(self) -> int:
        """Steps that it has begun."""
        return int(self._page[1])

    @property
    def oldest_request_time(self) -> float | None:
        """When its oldest live request came, in seconds of `time.monotonic`; None without one."""
        return int(self._page[2]) / 1e9 or None

    @property
    def num_messages(self) -> int:
        """Messages that it has taken in."""
        return int(self._page[3])

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
