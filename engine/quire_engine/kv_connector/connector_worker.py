"""ConnectorWorker: the half of a KV connector on each rank. It executes a step's `KVConnectorMetadata`. No step waits
for a file.

::

    step      saves: copy pages to host memory ──► queue ──► writing thread ──► files
              placements: copy to pages ◄── host memory ◄── reading thread ◄── files ◄── queue ◄── loads
              … computes

Each way uses at most `staging_bytes` of host memory.

On a GPU that memory is pinned, and PyTorch keeps it for the next rows. (The memory that processes share is not pinned:
that would allocate all of it, which takes seconds at each start.) Pages are gathered on the GPU before a step writes to
them, and copied to the host on a stream of their own while the step computes. Loaded blocks are copied on the step's
stream.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import torch
from torch.nn.functional import pad

from quire_engine.kv_cache import STATE, StateSpec
from quire_engine.kv_connector.block_file import MOST_TOGETHER, BlockFileError
from quire_engine.kv_connector.block_store import BlockStore
from quire_engine.kv_connector.board import TransferBoard
from quire_engine.kv_connector.pages import Pages
from quire_engine.messages import KVConnectorMetadata, KVLoad
from quire_engine.models.step_context import KVCaches
from quire_engine.system.crash_loop import CircuitBreaker

logger = logging.getLogger(__name__)

COMING_SECONDS = 1.0
"""Timeout of a block that another engine may still be saving, since the block before it."""
HURRY_SECONDS = 5.0
"""After such a timeout no block is waited for during this time: the other engine may be saving none."""
COMING_TURN_SECONDS = 0.001
"""Time between two polls for such a block."""
FLUSH_SECONDS = 2.0
"""Timeout of the last writes when the engine ends."""


def _pages_by_group(
    kv_caches: Callable[[], KVCaches], specs: Sequence[StateSpec], group_ids: Sequence[int]
) -> tuple[dict[int, Pages], Pages | None]:
    """The pages of each group of layers that the stage has, in the order of a block's row, and those of states."""
    pages = {
        group: Pages(
            kv_caches,
            specs,
            [layer for layer, own in enumerate(group_ids) if own == group and specs[layer].cache_of is None],
        )
        for group in sorted(set(group_ids))
    }
    states = {group for spec, group in zip(specs, group_ids, strict=True) if spec.window == STATE}
    return pages, pages.pop(states.pop()) if states else None


def num_state_parts(kv_caches: KVCaches, specs: Sequence[StateSpec], group_ids: Sequence[int]) -> int:
    """In how many parts a stage's state is kept, so that none is larger than the keys and values of a block: all that
    is kept has one size, as memory is divided into slots of one size and several blocks are sent at once."""
    pages, states = _pages_by_group(lambda: kv_caches, specs, group_ids)
    block_bytes = sum(one.block_bytes for one in pages.values())
    return -(-states.block_bytes // block_bytes) if states is not None and block_bytes else 1


class ConnectorWorker:
    """Copies pages, with a thread for each way.

    Args:
        kv_caches: returns the present ones.
        specs: of their layers.
        group_ids: each layer's group.
        store: of this rank.
        board: where to report what was loaded and saved.
        rank: this one.
        max_pending_bytes: limit of blocks that wait to be written.
        num_state_parts: in how many rows each rank keeps a state.
    """

    def __init__(
        self,
        kv_caches: Callable[[], KVCaches],
        specs: Sequence[StateSpec],
        group_ids: Sequence[int],
        store: BlockStore,
        board: TransferBoard,
        rank: int,
        max_pending_bytes: int,
        num_state_parts: int = 1,
    ) -> None:
        self._pages, self._states = _pages_by_group(kv_caches, specs, group_ids)
        self._num_state_parts = num_state_parts
        state_bytes = 0 if self._states is None else self._states.block_bytes
        own_bytes = sum(pages.block_bytes for pages in self._pages.values())
        self.block_bytes = max(own_bytes, -(-state_bytes // (4 * num_state_parts)) * 4)
        """Bytes of a row, whole numbers of float32: keys and values of a block, or a part of a state."""
        self._store = store
        self._board = board
        self._rank = rank
        self._max_pending_bytes = max_pending_bytes
        uses_gpu = kv_caches()[0][0].is_cuda
        self._reader = _Reader(store, board, rank, self.block_bytes, is_pinned=uses_gpu)
        self._writer = _Writer(store, board, rank)

    def begin_step(self, metadata: KVConnectorMetadata) -> None:
        """Execute a step's metadata, before the step computes."""
        if metadata.forgets_loads:
            self._reader.forget_all()
        if metadata.saves:
            self._save(metadata.saves)
        for hashes, state_id in metadata.state_saves:
            self._save_state(hashes, state_id)
        for placement in metadata.placements:
            rows = self._reader.take(placement.number)
            self._place(placement.block_ids, rows[placement.first : placement.first + len(placement.block_ids)])
            if placement.state_id is not None and self._states is not None:
                state = rows[len(rows) - self._num_state_parts :].reshape(1, -1)
                self._states.write([placement.state_id], state[:, : self._states.block_bytes])
        for number in metadata.ended_loads:
            self._reader.forget(number)
        for load in metadata.loads:
            self._reader.begin(load)

    def close(self) -> None:
        """End the threads; the last writes have `FLUSH_SECONDS`."""
        self._reader.close()
        self._writer.close()
        self._store.close()

    def _place(self, block_ids: list[list[int | None]], rows: torch.Tensor) -> None:
        start = 0
        for group, pages in self._pages.items():
            part = rows[:, start : start + pages.block_bytes]
            needed = [(row, own) for row, ids in enumerate(block_ids) if (own := ids[group]) is not None]
            if len(needed) < len(rows):
                part = part[[row for row, _ in needed]]
            if needed:
                pages.write([own for _, own in needed], part)
            start += pages.block_bytes

    def _save(self, saves: list[tuple[bytes, list[int]]]) -> None:
        room = max(self._max_pending_bytes - self._writer.pending_bytes, 0) // self.block_bytes
        for _ in saves[room:]:
            self._board.count_not_saved(self._rank)
        if saves[:room]:
            parts = [pages.read([ids[group] for _, ids in saves[:room]]) for group, pages in self._pages.items()]
            rows = parts[0] if len(parts) == 1 else torch.cat(parts or [_empty_rows(len(saves[:room]), 0)], 1)
            self._writer.put([block_hash for block_hash, _ in saves[:room]], _padded(rows, self.block_bytes))

    def _save_state(self, hashes: list[bytes], state_id: int) -> None:
        pending_bytes, num_bytes = self._writer.pending_bytes, len(hashes) * self.block_bytes
        if pending_bytes and pending_bytes + num_bytes > self._max_pending_bytes:  # one may be larger than the limit
            for _ in hashes:
                self._board.count_not_saved(self._rank)
            return
        rows = _empty_rows(1, 0) if self._states is None else self._states.read([state_id])
        self._writer.put(hashes, _padded(rows, num_bytes).view(len(hashes), self.block_bytes))


@dataclass(slots=True)
class _Reading:
    load: KVLoad
    waits: bool
    waits_until: float
    rows: torch.Tensor | None = None
    count: int = 0


class _Reader:
    """Reads blocks into host memory, one load after the other. Loads that wait for a block take turns."""

    def __init__(
        self, store: BlockStore, board: TransferBoard, rank: int, block_bytes: int, is_pinned: bool = False
    ) -> None:
        self._store = store
        self._board = board
        self._rank = rank
        self._block_bytes = block_bytes
        self._is_pinned = is_pinned
        self._lock = threading.Lock()
        self._wanted: set[int] = set()
        self._loaded: dict[int, torch.Tensor] = {}
        self._hurry = CircuitBreaker()
        """Open while blocks that another engine may be saving are not waited for."""
        self._queue: SimpleQueue[KVLoad | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="quire-kv-read", daemon=True)
        self._thread.start()

    def begin(self, load: KVLoad) -> None:
        with self._lock:
            self._wanted.add(load.number)
        self._queue.put(load)

    def take(self, number: int) -> torch.Tensor:
        """Returns the blocks of a load that has ended, and forgets it."""
        with self._lock:
            self._wanted.discard(number)
            return self._loaded.pop(number)

    def forget(self, number: int) -> None:
        with self._lock:
            self._wanted.discard(number)
            self._loaded.pop(number, None)

    def forget_all(self) -> None:
        with self._lock:
            self._wanted.clear()
            self._loaded.clear()

    def close(self) -> None:
        """End the thread after its present block, and wait `FLUSH_SECONDS` for it: it reports on slots of the board
        that another reader may use next."""
        self.forget_all()
        self._queue.put(None)
        self._thread.join(FLUSH_SECONDS)

    def _run(self) -> None:
        readings: list[_Reading] = []
        while True:
            try:
                load = self._queue.get(timeout=COMING_TURN_SECONDS if readings else None)
            except Empty:
                pass
            else:
                if load is None:
                    return
                now = time.monotonic()
                readings.append(_Reading(load, load.is_coming and not self._hurry.is_open, now + COMING_SECONDS))
            readings = [reading for reading in readings if not self._go_on(reading)]

    def _go_on(self, reading: _Reading) -> bool:
        """Read the blocks that are stored. Returns whether the load has ended.

        A load that was forgotten while it waited is not reported: its slot may belong to another by now.
        """
        load, rows = reading.load, reading.rows
        if rows is not None and load.number not in self._wanted:
            return True
        try:
            if rows is None:
                rows = reading.rows = _empty_rows(len(load.block_hashes), self._block_bytes, self._is_pinned)
            while reading.count < len(rows) and load.number in self._wanted:
                some = slice(reading.count, reading.count + MOST_TOGETHER)
                blocks = list(zip(load.block_hashes[some], (row.data for row in rows[some].numpy()), strict=True))
                num_read = self._store.read(blocks)
                reading.count += num_read
                if num_read > 0:
                    reading.waits_until = time.monotonic() + COMING_SECONDS
                if num_read < len(blocks):
                    if reading.waits and time.monotonic() < reading.waits_until:
                        return False
                    if reading.waits:
                        self._hurry.trip(HURRY_SECONDS)
                    break
        except (BlockFileError, OSError, MemoryError) as error:
            logger.warning("a KV block cannot be loaded, and is computed: %s", error)
        except Exception:
            logger.exception("a KV block cannot be loaded, and is computed")
        with self._lock:
            if load.number in self._wanted:
                self._loaded[load.number] = _empty_rows(0, 0) if rows is None else rows
        self._board.put(self._rank, load.slot, load.number, reading.count)
        return True


class _Writer:
    """Writes blocks from host memory, in order of arrival."""

    def __init__(self, store: BlockStore, board: TransferBoard, rank: int) -> None:
        self._store = store
        self._board = board
        self._rank = rank
        self.pending_bytes = 0
        """Queued bytes."""
        self._lock = threading.Lock()
        self._copies = _HostCopies()
        self._queue: SimpleQueue[tuple[list[bytes], torch.Tensor, torch.cuda.Event | None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="quire-kv-write", daemon=True)
        self._thread.start()

    def put(self, block_hashes: list[bytes], rows: torch.Tensor) -> None:
        """Queue blocks; on a GPU the copy to `rows` may still be running."""
        with self._lock:
            self.pending_bytes += rows.numel()
        self._queue.put((block_hashes, rows, self._copies.mark(rows)))

    def close(self) -> None:
        """Wait for queued blocks, at most `FLUSH_SECONDS`."""
        self._queue.put(None)
        self._thread.join(FLUSH_SECONDS)

    def _run(self) -> None:
        while (queued := self._queue.get()) is not None:
            block_hashes, rows, mark = queued
            try:
                content = self._copies.to_host(rows, mark).numpy()
                self._write([(block_hash, row.data) for block_hash, row in zip(block_hashes, content, strict=True)])
                del content
            except Exception as error:  # no memory on the host; there may be some for the next ones
                logger.warning("KV blocks cannot be saved: %r", error)
                for _ in block_hashes:
                    self._board.count_not_saved(self._rank)
            finally:
                with self._lock:
                    self.pending_bytes -= rows.numel()
            del queued, rows

    def _write(self, blocks: list[tuple[bytes, memoryview]]) -> None:
        for first in range(0, len(blocks), MOST_TOGETHER):
            some, num_saved = blocks[first : first + MOST_TOGETHER], 0
            try:
                num_saved = self._store.write(some)
            except Exception:
                logger.exception("KV blocks cannot be saved")
            for _, payload in some[:num_saved]:
                self._board.count_saved(self._rank, len(payload))
            for _ in some[num_saved:]:
                self._board.count_not_saved(self._rank)


def _empty_rows(num_rows: int, num_bytes: int, is_pinned: bool = False) -> torch.Tensor:
    """[rows, bytes] uint8 on the host, pinned for a GPU. Raises MemoryError if there is no memory for them."""
    try:
        return torch.empty(num_rows, num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
    except RuntimeError as error:
        raise MemoryError(str(error)) from None


def _padded(rows: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """Rows of so many bytes: a rank may have less of a block, or of a state, than of the other."""
    return rows if rows.shape[1] == num_bytes else pad(rows, (0, num_bytes - rows.shape[1]))


class _HostCopies:
    """Copies rows from their device to the host. The computing thread calls `mark`, another one `to_host`."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def mark(self, rows: torch.Tensor) -> "torch.cuda.Event | None":
        """An event after which the rows are complete; None if they are on the host."""
        if not rows.is_cuda:
            return None
        mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
        mark.record(torch.cuda.current_stream(rows.device))
        return mark

    def to_host(self, rows: torch.Tensor, mark: "torch.cuda.Event | None") -> torch.Tensor:
        """The rows in host memory. Waits for them, and delays nothing else on the GPU."""
        if mark is None:
            return rows
        if self._stream is None:
            self._stream = torch.cuda.Stream(rows.device)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            host = _empty_rows(len(rows), rows.shape[1], is_pinned=True)
            host.copy_(rows, non_blocking=True)
            end.record(self._stream)
        rows.record_stream(self._stream)
        end.synchronize()
        return host
