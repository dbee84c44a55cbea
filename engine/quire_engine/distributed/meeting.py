"""MeetingPlace: where ranks that are processes of one machine find each other to form groups of torch.distributed.

A file in memory that has no name, of which every rank inherits the descriptor: nobody else can come, and nothing is
left behind however they end.
"""

import os

import msgspec

from quire_engine.ipc.semaphore import SharedMemory

__all__ = ["MeetingPlace"]


class MeetingPlace(msgspec.Struct, frozen=True):
    """The file, as told to the processes that inherit its descriptor and keep it open."""

    descriptor: int

    @classmethod
    def create(cls) -> "MeetingPlace":
        """A new one; whoever creates it has to `close` it."""
        return cls(SharedMemory.create("quire-meeting", 0))

    @property
    def init_method(self) -> str:
        """See `initialize_parallel_state`."""
        return f"file:///proc/self/fd/{self.descriptor}"

    def close(self) -> None:
        """Close this process's descriptor."""
        os.close(self.descriptor)
