"""SharedMemoryCommunicator: communication of one machine's ranks, over unnamed memory that they inherit.

::

    memory of a group of N ranks
    │ words of the semaphores │ buffers, turn 0: rank 0 … N-1 │ turn 1: rank 0 … N-1 │ a ring for every ordered pair │

**Collective operations** go piece by piece, each in the same three steps on every rank:

1. copy the rank's own piece into its buffer of this turn,
2. barrier: signal the arrival to every other rank, and wait until all of them have arrived,
3. read all buffers of this turn, in the order of the ranks, so that all compute the same bits.

The turns alternate, so one barrier is enough. A rank writes to a buffer of turn 0 again, in piece k + 2, only after the
barrier of piece k + 1. Every rank arrives at that barrier only after its own step 3 of piece k. So no rank still reads
the buffers of piece k. Arrivals cannot be mixed up either: each ordered pair of ranks has its own counting semaphore,
and each rank takes one arrival of each other rank per piece.

**Send and receive** pass pieces through a ring of `NUM_SLOTS` slots per ordered pair, as `ipc.message_queue` does.

**Abort.** A rank that fails never arrives, and the others would wait forever. So it raises the abort flag, which wakes
them. Until the flag is reset, all operations in any of their groups raise `AbortedError`:

1. Every rank stops using its groups, and calls `forget`.
2. The owner of the groups calls `reset` on them and on the flag.
3. The ranks go on.
"""

import itertools
import os

import msgspec
import torch

from quire_engine.errors import AbortedError
from quire_engine.ipc.semaphore import WORD_BYTES, Semaphore, SemaphoreHandle, SharedMemory, Waiter, Watch

PIECE_BYTES = 1024 * 1024
"""Size of a piece of a tensor: the buffers of a few ranks fit into a CPU cache together."""
NUM_SLOTS = 4


class AbortFlagHandle(msgspec.Struct, frozen=True):
    """Descriptors of the flag that all ranks of an engine share, for the processes that inherit them."""

    memory: int
    flag: SemaphoreHandle

    @classmethod
    def create(cls) -> "AbortFlagHandle":
        """A new flag, not raised."""
        return cls(SharedMemory.create("quire-abort", WORD_BYTES), SemaphoreHandle.create(0))

    def descriptors(self) -> list[int]:
        """Descriptors that every rank has to inherit."""
        return [self.memory, self.flag.descriptor]

    def close(self) -> None:
        """Close this process's descriptors."""
        for descriptor in self.descriptors():
            os.close(descriptor)


class MeetingPlace(msgspec.Struct, frozen=True):
    """Where ranks of one machine rendezvous to form groups of torch.distributed: an unnamed file in memory. Only
    processes that inherit the descriptor can join, and nothing is left behind however the ranks end."""

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


class AbortFlag:
    """Any rank can raise it. No rank ever acquires its semaphore, so it stays readable for all that wait."""

    def __init__(self, handle: AbortFlagHandle) -> None:
        self._memory = SharedMemory(handle.memory)
        self._flag = Semaphore(handle.flag, self._memory)
        self.watch = Watch([handle.flag.descriptor], self.check)

    def set(self) -> None:
        """Make all ranks stop waiting for each other."""
        self._flag.release()

    def check(self) -> None:
        """Check that the flag is not raised.

        Raises:
            AbortedError: it is.
        """
        if self._flag.is_released():
            raise AbortedError("another rank failed")

    def reset(self) -> None:
        """Let the ranks go on; see the module."""
        self._flag.reset()

    def close(self) -> None:
        """Unmap the memory."""
        self._flag.close()
        self._memory.close()


class _Pair(msgspec.Struct, frozen=True):
    arrived: SemaphoreHandle
    filled: SemaphoreHandle
    free: SemaphoreHandle


class SharedMemoryGroup(msgspec.Struct, frozen=True):
    """Descriptors and sizes of a group, for the processes that inherit them."""

    memory: int
    size: int
    piece_bytes: int
    pairs: list[_Pair | None]
    """From rank i to rank j at `i · size + j`; None if i equals j."""

    @classmethod
    def create(cls, size: int, piece_bytes: int = PIECE_BYTES) -> "SharedMemoryGroup":
        """A new group; the caller has to `close` it. `piece_bytes` must be a multiple of 64."""
        offsets = itertools.count(0, WORD_BYTES)
        pairs = [
            _Pair(
                SemaphoreHandle.create(next(offsets)),
                SemaphoreHandle.create(next(offsets)),
                SemaphoreHandle.create(next(offsets), NUM_SLOTS),
            )
            if sender != receiver
            else None
            for sender in range(size)
            for receiver in range(size)
        ]
        num_bytes = next(offsets) + (2 * size + size * size * NUM_SLOTS) * piece_bytes
        return cls(SharedMemory.create("quire-group", num_bytes), size, piece_bytes, pairs)

    @property
    def pieces_at(self) -> int:
        """Where the words end and the buffers begin."""
        return 3 * self.size * (self.size - 1) * WORD_BYTES

    def pair(self, sender: int, receiver: int) -> _Pair:
        """The semaphores from one rank to another."""
        pair = self.pairs[sender * self.size + receiver]
        assert pair is not None
        return pair

    def _semaphores(self, rank: int | None = None) -> list[SemaphoreHandle]:
        """All semaphores, or those between this rank and the others."""
        return [
            semaphore
            for sender, receiver in itertools.permutations(range(self.size), 2)
            if rank is None or rank in (sender, receiver)
            for pair in [self.pair(sender, receiver)]
            for semaphore in (pair.arrived, pair.filled, pair.free)
        ]

    def descriptors(self, rank: int) -> list[int]:
        """Descriptors that the process of this rank has to inherit."""
        return [self.memory, *(item.descriptor for item in self._semaphores(rank))]

    def reset(self) -> None:
        """Restore the initial state; see the module."""
        memory = SharedMemory(self.memory)
        for handle in self._semaphores():
            semaphore = Semaphore(handle, memory)
            semaphore.reset()
            semaphore.close()
        memory.close()

    def close(self) -> None:
        """Close this process's descriptors."""
        for descriptor in (self.memory, *(item.descriptor for item in self._semaphores())):
            os.close(descriptor)


class _Channel:
    """One direction between this rank and another: its semaphores, and a waiter for each."""

    def __init__(self, pair: _Pair, memory: SharedMemory, watch: Watch, ring: torch.Tensor) -> None:
        self.arrived, self.filled, self.free = (
            Semaphore(handle, memory) for handle in (pair.arrived, pair.filled, pair.free)
        )
        self.arrived_waiter, self.filled_waiter, self.free_waiter = (
            Waiter([semaphore], watch) for semaphore in (self.arrived, self.filled, self.free)
        )
        self._ring = ring
        self._position = 0

    def next_slot(self) -> torch.Tensor:
        """The ring's next slot: uint8, [piece_bytes]."""
        slot = self._ring[self._position]
        self._position = (self._position + 1) % NUM_SLOTS
        return slot

    @property
    def waited_seconds(self) -> float:
        """Time spent in waits so far."""
        waiters = (self.arrived_waiter, self.filled_waiter, self.free_waiter)
        return sum(waiter.waited_seconds for waiter in waiters)

    def forget(self) -> None:
        """Start afresh after an abort; see the module."""
        self._position = 0
        for semaphore in (self.arrived, self.filled, self.free):
            semaphore.forget()


class SharedMemoryCommunicator:
    """One rank's end of a group; see `Communicator`. In addition, every operation raises `AbortedError` after an
    abort."""

    def __init__(self, group: SharedMemoryGroup, rank: int, abort: AbortFlag) -> None:
        self._rank, self._size, self._piece_bytes, self._abort = rank, group.size, group.piece_bytes, abort
        memory = SharedMemory(group.memory)
        pieces = torch.frombuffer(memory.view, dtype=torch.uint8, offset=group.pieces_at)
        num_buffers = 2 * self._size * self._piece_bytes
        self._buffers = pieces[:num_buffers].view(2, self._size, self._piece_bytes)
        rings = pieces[num_buffers:][: self._size**2 * NUM_SLOTS * self._piece_bytes]
        rings = rings.view(self._size, self._size, NUM_SLOTS, self._piece_bytes)
        peers = [peer for peer in range(self._size) if peer != rank]
        self._to = {p: _Channel(group.pair(rank, p), memory, abort.watch, rings[rank, p]) for p in peers}
        self._from = {p: _Channel(group.pair(p, rank), memory, abort.watch, rings[p, rank]) for p in peers}
        self._turn = 0

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def waited_seconds(self) -> float:
        """Time that this rank has waited for others so far."""
        return sum(channel.waited_seconds for channel in (*self._to.values(), *self._from.values()))

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Half-precision values are added in float32 and rounded once."""
        result = tensor.contiguous()
        for piece in self._pieces(result):
            _sum(self._exchange(piece), piece)
        return result

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self._size if self._rank == 0 else 0)]
        pieces_of_parts = [self._pieces(part) for part in parts]
        for i, piece in enumerate(self._pieces(tensor)):
            shards = self._exchange(piece)
            for pieces, shard in zip(pieces_of_parts, shards, strict=False):
                pieces[i].copy_(shard)
        return torch.cat(parts, dim=1) if self._rank == 0 else None

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """Runs ahead of the receiver by at most `NUM_SLOTS` pieces."""
        channel = self._to[rank]
        for piece in self._pieces(tensor.contiguous()):
            self._abort.check()
            channel.free.acquire(channel.free_waiter)
            channel.next_slot()[: piece.nbytes].view(piece.dtype).copy_(piece)
            channel.filled.release()

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> torch.Tensor:
        channel = self._from[rank]
        tensor = torch.empty(shape, dtype=dtype)
        for piece in self._pieces(tensor):
            self._abort.check()
            channel.filled.acquire(channel.filled_waiter)
            piece.copy_(channel.next_slot()[: piece.nbytes].view(dtype))
            channel.free.release()
        return tensor

    def forget(self) -> None:
        """Start this rank afresh after an abort; see the module."""
        self._turn = 0
        for channel in (*self._to.values(), *self._from.values()):
            channel.forget()

    def _pieces(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Flat views of a contiguous tensor, each of at most `piece_bytes`."""
        flat, step = tensor.view(-1), self._piece_bytes // tensor.itemsize
        return [flat[start : start + step] for start in range(0, flat.numel(), step)]

    def _exchange(self, piece: torch.Tensor) -> list[torch.Tensor]:
        """All ranks' pieces, by rank. They stay valid until this rank's call after the next."""
        self._abort.check()
        shards = list(self._buffers[self._turn, :, : piece.nbytes].view(piece.dtype).unbind())
        self._turn = 1 - self._turn
        shards[self._rank].copy_(piece)
        for channel in self._to.values():
            channel.arrived.release()
        for channel in self._from.values():
            channel.arrived.acquire(channel.arrived_waiter)
        return shards


def _sum(shards: list[torch.Tensor], out: torch.Tensor) -> None:
    """Add in the order of the ranks."""
    if len(shards) == 1:
        out.copy_(shards[0])
    elif len(shards) == 2:
        torch.add(shards[0], shards[1], out=out)
    else:
        total = shards[0].to(torch.float32, copy=True)
        for shard in shards[1:]:
            total += shard
        out.copy_(total)
