"""A KV connector for the stand-in model: blocks are kept in a dictionary, and loads end when the test says so.

With `SharedMemoryWorker` blocks are where they are in earnest, in memory that processes share, and so is the index.

Like `scheduler/` and `kv_cache/`, this module never imports torch, unless that memory is used.
"""

import os
from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
from quire_engine.config import KVTransferConfig
from quire_engine.kv_connector.board import ROW, TransferBoard
from quire_engine.kv_connector.connector_scheduler import ConnectorScheduler
from quire_engine.messages import KVConnectorMetadata, KVLoad
from quire_engine.scheduler.scheduler import Scheduler
from support.scheduling import FakeModelRunner

if TYPE_CHECKING:
    from quire_engine.kv_connector.memory_store import MemoryStore

__all__ = ["FakeConnector", "FakeConnectorWorker", "FakeIndex", "SharedMemoryWorker"]

HEADER_BYTES = 300_000
"""Of shared memory: what its lock and its processes take."""
NUMBER_BYTES = 16
"""Of a number in a slot."""
NUM_STATE_PARTS = 2


class FakeIndex:
    """What is stored, as far as the scheduler knows: now and then it is told of blocks that are not there."""

    def __init__(self, random: Random, share_of_lies: float) -> None:
        self.random = random
        self.share_of_lies = share_of_lies
        self.known: set[bytes] = set()

    def num_stored(self, block_hashes: Sequence[bytes]) -> int:
        """Up to the first that is not there."""
        for i, block_hash in enumerate(block_hashes):
            if block_hash not in self.known and self.random.random() >= self.share_of_lies:
                return i
        return len(block_hashes)

    def is_kept(self, block_hash: bytes) -> bool:
        """Whether it need not be saved."""
        return self.num_stored([block_hash]) == 1

    def add(self, block_hash: bytes) -> None:
        """A block is being saved."""
        self.known.add(block_hash)

    def forget(self, block_hash: bytes) -> None:
        """A block could not be loaded."""
        self.known.discard(block_hash)

    def close(self) -> None:
        """Nothing is open."""


class FakeConnectorWorker:
    """One rank: its files are a dictionary, and its threads wait until they are told to go on."""

    def __init__(self, runner: FakeModelRunner, board: TransferBoard, rank: int) -> None:
        self.runner = runner
        self.board = board
        self.rank = rank
        self.stored: dict[bytes, list[int]] = {}
        self.queue: list[KVLoad] = []
        self.wanted: set[int] = set()
        self.loaded: dict[int, list[list[int]]] = {}
        self.block_bytes = NUMBER_BYTES * runner.block_size * len(runner.windows)

    def begin_step(self, metadata: KVConnectorMetadata, slots: list[int], states: list[Any]) -> None:
        """See `ConnectorWorker`."""
        size = self.runner.block_size
        num_groups = self.runner.num_paged
        if metadata.forgets_loads:
            self.wanted.clear()
            self.loaded.clear()
        for block_hash, block_ids in metadata.saves:
            assert len(block_ids) == num_groups
            self.save(block_hash, [slot for i in block_ids for slot in slots[i * size : (i + 1) * size]])
            self.board.count_saved(self.rank, 1)
        for hashes, state_id in metadata.state_saves:
            assert len(hashes) == NUM_STATE_PARTS
            for part, one in enumerate(hashes):
                self.save(one, [states[state_id].state + part])
                self.board.count_saved(self.rank, 1)
        for placement in metadata.placements:
            loaded = self.loaded.pop(placement.number)
            blocks = loaded[placement.first :][: len(placement.block_ids)]
            if placement.state_id is not None:
                (first, *_), (second, *_) = loaded[-NUM_STATE_PARTS:]
                assert first + 1 == second, "parts of two states"
                states[placement.state_id] = type(states[placement.state_id])(first)
            for block_ids, block in zip(placement.block_ids, blocks, strict=True):
                assert len(block_ids) == num_groups
                for group, block_id in enumerate(block_ids):
                    if block_id is not None:
                        own = block[group * size : (group + 1) * size]
                        slots[block_id * size : (block_id + 1) * size] = own
        for number in metadata.ended_loads:
            self.wanted.discard(number)
            self.loaded.pop(number, None)
        for load in metadata.loads:
            self.wanted.add(load.number)
            self.queue.append(load)

    def save(self, block_hash: bytes, block: list[int]) -> None:
        """Keep a block."""
        self.stored[block_hash] = block

    def load(self, block_hash: bytes) -> list[int] | None:
        """What was kept, if it is there and sound."""
        return self.stored.get(block_hash)

    def spoil(self, block_hash: bytes) -> None:
        """Something happens to a block."""
        self.stored.pop(block_hash, None)

    def read_one(self, random: Random, share_of_failures: float) -> None:
        """End the oldest load."""
        load = self.queue.pop(0)
        blocks: list[list[int]] = []
        for block_hash in load.block_hashes:
            if random.random() < share_of_failures:
                self.spoil(block_hash)
            if (block := self.load(block_hash)) is None:
                break
            blocks.append(block)
        if load.number in self.wanted:
            self.loaded[load.number] = blocks
        self.board.put(self.rank, load.slot, load.number, len(blocks))


class SharedMemoryWorker(FakeConnectorWorker):
    """One rank, whose blocks are in a `MemoryStore`."""

    store: "MemoryStore"

    def save(self, block_hash: bytes, block: list[int]) -> None:
        content = b"".join(number.to_bytes(NUMBER_BYTES, "little", signed=True) for number in block)
        self.store.write([(block_hash, memoryview(content.ljust(self.block_bytes, b"\0")))])

    def load(self, block_hash: bytes) -> list[int] | None:
        from quire_engine.kv_connector.block_file import BlockFileError

        room = memoryview(bytearray(self.block_bytes))
        try:
            if not self.store.read([(block_hash, room)]):
                return None
        except BlockFileError:
            return None
        return [
            int.from_bytes(room[i : i + NUMBER_BYTES], "little", signed=True) for i in range(0, len(room), NUMBER_BYTES)
        ]

    def spoil(self, block_hash: bytes) -> None:
        """A bit in its slot."""
        from support.shared_blocks import BlockSteps

        size, steps = self.block_bytes, BlockSteps(self.store.blocks)
        for slot in steps.pin([block_hash], size):
            steps.slot(slot)[0] ^= 1
            assert steps.unpin([block_hash], [slot], size) == 0


class FakeConnector:
    """Connects a scheduler with its runners."""

    def __init__(
        self,
        scheduler: Scheduler,
        runners: Sequence[FakeModelRunner],
        random: Random,
        clock: Callable[[], float],
        *,
        staged_blocks: int = 1000,
        share_of_lies: float = 0.0,
        share_of_failures: float = 0.0,
        load_timeout_s: float = 10.0,
        memory_slots: int | None = None,
    ) -> None:
        self.random = random
        self.share_of_failures = share_of_failures
        self.board = TransferBoard(np.zeros((len(runners), ROW), dtype=np.int64))
        self.index = FakeIndex(random, share_of_lies)
        extra = {"shared_storage_path": "/none", "staging_bytes": staged_blocks, "load_timeout_s": load_timeout_s}
        config = KVTransferConfig.from_value(
            {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": extra}
        )
        block_bytes = [1] * len(runners)
        self.scheduler = ConnectorScheduler(
            config, scheduler.kv_cache, self.index, self.board, block_bytes, clock, num_state_parts=NUM_STATE_PARTS
        )
        scheduler._connector = self.scheduler  # its runners come after the scheduler
        kind = FakeConnectorWorker if memory_slots is None else SharedMemoryWorker
        self.workers = [kind(runner, self.board, rank) for rank, runner in enumerate(runners)]
        for runner, worker in zip(runners, self.workers, strict=True):
            runner.connector = worker
        if memory_slots is not None:
            self._share_memory(memory_slots)

    def _share_memory(self, num_slots: int) -> None:
        """Keep blocks in memory with room for about so many, and look there for them."""
        from quire_engine.ipc.semaphore import SharedMemory
        from quire_engine.kv_connector.memory_store import MemoryIndex, MemoryStore

        size = self.workers[0].block_bytes
        descriptor = SharedMemory.create("test-blocks", HEADER_BYTES + num_slots * (size + 200))
        for worker in self.workers:
            assert isinstance(worker, SharedMemoryWorker)
            worker.store = MemoryStore(descriptor, b"n" * 32, worker.rank)
            worker.store.divide(size)
        os.close(descriptor)
        self.scheduler._index = MemoryIndex(self.workers[0].store)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Let go of the memory, once nothing in it is written or read any more."""
        for worker in self.workers:
            if isinstance(worker, SharedMemoryWorker):
                stats = worker.store.stats()
                assert stats.num_blocks == stats.num_used <= stats.num_slots, "a slot is lost"
        for worker in self.workers:
            if isinstance(worker, SharedMemoryWorker):
                worker.store.close()

    def go_on(self, share: float = 1.0) -> None:
        """Some ranks end their oldest load."""
        for worker in self.workers:
            if worker.queue and self.random.random() < share:
                worker.read_one(self.random, self.share_of_failures)
