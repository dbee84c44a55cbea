"""MeetingPlace: where the ranks of one machine rendezvous to form groups of torch.distributed.

It is an unnamed file in memory. Every rank inherits its descriptor, so no other process can join, and nothing is left
behind however the ranks end.
"""

import os

import msgspec

from quire_engine.ipc.semaphore import SharedMemory


class MeetingPlace(msgspec.Struct, frozen=True):
    """The file's descriptor, for the processes that inherit it and keep it open."""

    descriptor: int

    @classmethod
    def create(cls) -> "MeetingPlace":
        """A new one; the caller has to `close` it."""
        return cls(SharedMemory.create("quire-meeting", 0))

    @property
    def init_method(self) -> str:
        return f"file:///proc/self/fd/{self.descriptor}"

    def close(self) -> None:
        """Close this process's descriptor."""
        os.close(self.descriptor)
