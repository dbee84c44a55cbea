"""LockstepGroup: ranks of several engines that exchange tensors; any of them may die (`ipc/lockstep.py`).

::

    memory: the words of `Lockstep`, then │ buffers, turn 0: rank 0 … N-1 │ turn 1: rank 0 … N-1 │

Before a meeting a rank writes to its buffer of this turn; once all have arrived, it reads all buffers of the turn, in
the order of the ranks. Nothing is written for the first meeting of a generation: a rank that arrives there has stopped
reading what was there before.
"""

import contextlib
import os
import select
import time
from collections.abc import Iterator, Sequence

import torch

from quire_engine.errors import AbortedError
from quire_engine.ipc.lockstep import Lockstep, LockstepHandle
from quire_engine.ipc.semaphore import SPIN_SECONDS

CHECK_MS = 100


class LockstepGroup(Lockstep):
    """One rank's view.

    Args:
        handle: with buffers, whose size is a multiple of 64.
        rank: this one's place.
    """

    def __init__(self, handle: LockstepHandle, rank: int) -> None:
        super().__init__(handle, rank)
        self._room = handle.buffer_bytes
        buffers = torch.frombuffer(
            self._memory.view, dtype=torch.uint8, offset=handle.buffers_at, count=2 * self.size * self._room
        )
        self._buffers = buffers.view(2, self.size, self._room)
        self._poll = select.poll()
        self._poll.register(self.bell, select.POLLIN)
        self.waited_seconds = 0.0
        """The sum of all waits for others."""
        self.is_in_step = False
        """Whether the others take part. What is computed outside of a step, to measure it, is computed alone."""

    @property
    def rank(self) -> int:
        """This one's place."""
        return self._place

    @contextlib.contextmanager
    def step(self, generation: int) -> Iterator[None]:
        """Compute a step that all ranks compute. If it fails here, the generation ends, so that no rank waits for this
        one."""
        self.begin(generation)
        self.is_in_step = True
        try:
            yield
        except BaseException:
            self.end(generation)
            raise
        finally:
            self.is_in_step = False

    def all_gather(self, own: torch.Tensor) -> Sequence[torch.Tensor]:
        """The bytes of all ranks, by rank, of any sizes.

        Args:
            own: uint8, one dimension.

        Returns:
            uint8, by rank. Valid until this rank's call after the next.

        Raises:
            AbortedError: the generation has ended.
        """
        shards, sizes = self._meet(own[: self._room], len(own))
        if max(sizes) <= self._room:
            return [shard[:size] for shard, size in zip(shards, sizes, strict=True)]
        results = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        for start in range(0, max(sizes), self._room):
            if start:
                shards, _ = self._meet(own[start : start + self._room], len(own))
            for result, shard in zip(results, shards, strict=True):
                part = result[start : start + self._room]
                part.copy_(shard[: len(part)])
        return results

    def close(self) -> None:
        """Unmap the memory in this process, once nothing refers to it."""
        del self._buffers
        super().close()

    def _meet(self, piece: torch.Tensor, number: int) -> tuple[Sequence[torch.Tensor], list[int]]:
        self._check()
        if not self._meeting:
            self.arrive(None)
            self._wait()
        turn = (self._meeting + 1) & 1
        self._buffers[turn, self.rank, : len(piece)] = piece
        self.arrive(number)
        self._wait()
        return self._buffers[turn].unbind(), self.said()

    def _wait(self) -> None:
        """Wait until all have arrived: spin for a short while, then block."""
        if self.has_met:
            return
        began_at = time.monotonic()
        while not self.has_met:
            if time.monotonic() < began_at + SPIN_SECONDS:
                os.sched_yield()
                continue
            self.hear()
            if self.has_met:
                break
            self._check()
            self._poll.poll(CHECK_MS)
        self.waited_seconds += time.monotonic() - began_at

    def _check(self) -> None:
        if self.present_generation > self.generation:
            raise AbortedError("another replica failed")
