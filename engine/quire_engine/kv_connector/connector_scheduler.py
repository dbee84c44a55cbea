"""ConnectorScheduler: the half of a KV connector in the engine core. Knows blocks and requests, but no files.

What is read and what is written::

    a block becomes full, and is filed ──► its step succeeds ──► still the same content? ──► saves of the next step
    request waiting, blocks stored ──► load ──► all ranks have checked theirs ──► placement: page, prefix cache, request

Why no page ever holds something else than its hash says:

1. A load is read and checked in host memory. Only what every rank has found sound gets a page. The step in which it
   gets it writes the page, on every rank, before it computes anything; later steps come after it. So it may be filed as
   soon as that step is scheduled, as are blocks that a step computes (`kv_cache/manager.py`), and no page has to be
   kept back for a writer that may still come: threads that read files write to host memory alone, which is theirs until
   they are done.
2. A block is saved once its step is known to have succeeded, and only if its page is still filed under the hash: then
   nothing has been written to it since, as no step in flight writes to a cached block. The save runs before anything is
   written in its step, so the page may be given away at once.
3. After a failed step all loads end and nothing is saved that was not sent before: what was sent is of steps that
   succeeded before it.

A load is not bound to its request: if that goes on without it, or is aborted, the blocks are dropped when all ranks
have them.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from quire_engine.config import KVTransferConfig
from quire_engine.kv_cache import KVCacheManager
from quire_engine.kv_cache.block_pool import NULL_BLOCK, KVCacheBlock
from quire_engine.kv_cache.hashing import HASH_BYTES
from quire_engine.kv_connector.board import MAX_LOADED_BLOCKS, NUM_SLOTS, TransferBoard
from quire_engine.messages import KVConnectorMetadata, KVLoad, KVPlacement, SchedulerOutput
from quire_engine.scheduler.request import Request, RequestStatus
from quire_engine.scheduler.request_queue import FCFSRequestQueue, RequestQueue
from quire_engine.stats import KVConnectorStats

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 30.0
"""After a step that wrote loaded blocks to their pages has failed, for so long nothing is loaded: that may be why."""


class StoredBlocks(Protocol):
    """Which blocks are stored, as far as is known without looking; `BlockIndex` for those in files."""

    def num_stored(self, block_hashes: Sequence[bytes]) -> int:
        """How many of these are there, up to the first that is not."""

    def is_kept(self, block_hash: bytes) -> bool:
        """Whether a block need not be saved: it is in all places that keep it."""

    def add(self, block_hash: bytes) -> None:
        """A block is being saved."""

    def forget(self, block_hash: bytes) -> None:
        """A block could not be loaded."""

    def close(self) -> None:
        """End what it has open."""


@dataclass(slots=True)
class _Load:
    """Blocks on their way, and the request that they are for."""

    number: int
    slot: int
    request: Request
    first: int
    """Index of the first of them in the request."""
    block_hashes: list[bytes]
    began_at: float
    is_late: bool = False
    """Whether its request went on without it."""


class ConnectorScheduler:
    """Implements `scheduler.kv_connector.KVConnector`.

    Args:
        config: the connector's.
        kv_cache: the scheduler's.
        index: what is stored.
        board: where the ranks say what they have.
        block_bytes: of a block, by rank.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        config: KVTransferConfig,
        kv_cache: KVCacheManager,
        index: StoredBlocks,
        board: TransferBoard,
        block_bytes: list[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._kv_cache = kv_cache
        self._index = index
        self._board = board
        self._clock = clock
        self._block_bytes = sum(block_bytes)
        staged_blocks = config.kv_connector_extra_config.staging_bytes // max(*block_bytes, 1)
        self._max_staged_blocks = min(max(staged_blocks, 1), MAX_LOADED_BLOCKS)
        self.loading = FCFSRequestQueue()
        self._loads: list[_Load] = []
        """In the order in which they began."""
        self._followers: dict[str, tuple[Request, bytes]] = {}
        """Requests that wait for a block of another request's load."""
        self._num_loads = 0
        self._filed: dict[bytes, int] = {}
        """Hash of each block that was filed and not saved yet → the last step that filed it, in any group of layers.
        Ordered by step."""
        self._step = 0
        self._last_success = 0
        self._last_placement = 0
        self._loads_from = clock()
        self._metadata = KVConnectorMetadata()
        self._placed: list[KVCacheBlock] = []
        self._stats = KVConnectorStats()
        if config.saves:
            kv_cache.block_pool.on_filed = self._note_filed

    # -- what the scheduler asks ---------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Whether something is to be saved, or a request need not wait any longer."""
        if self._filed and next(iter(self._filed.values())) <= self._last_success:
            return True
        return bool(self.loading) and any(map(self._is_over, self._loads))

    def begin_step(self, scheduler_output: SchedulerOutput) -> None:
        """Choose what is saved, before anything of the step is allocated."""
        self._step = scheduler_output.step
        while self._filed:
            block_hash, step = next(iter(self._filed.items()))
            if step > self._last_success:
                break
            del self._filed[block_hash]
            block_ids = self._kv_cache.cached_block_ids(block_hash)
            if block_ids is not None:
                self._metadata.saves.append((block_hash, block_ids))
                self._index.add(block_hash)

    def place_loaded(self, waiting: RequestQueue) -> bool:
        """See `KVConnector`. Of requests that are not waiting for them any more, blocks are only dropped."""
        ready: list[Request] = []
        has_room = True
        for load in list(self._loads):
            num_blocks = self._board.loaded(load.slot, load.number)
            if load.request not in self.loading or load.is_late:
                if num_blocks is not None:
                    self._end(load)
                continue
            if num_blocks is None:
                if not self._is_over(load):
                    continue
                load.is_late = True
                load.request.was_prefilled = False
                self._stats.num_failed_blocks += len(load.block_hashes)
                logger.warning("%d KV blocks took longer to load than load_timeout_s", len(load.block_hashes))
            elif not self._place(load, num_blocks):
                has_room = False
                break
            ready.append(load.request)
        ready += self._take_followers()
        for request in ready:
            self.loading.remove(request)
        self._put_back(ready, waiting)
        return has_room or bool(ready)

    def begin_load(self, request: Request, num_computed_blocks: int) -> bool:
        """See `KVConnector`.

        A request whose blocks are on their way to another one waits for these, and one that there is no room for waits
        for the oldest load to end. No load begins while one is late: what hangs once does so again.
        """
        if request.skip_reading_prefix_cache or not self._config.loads:
            return False
        num_blocks = (request.num_tokens - 1) // self._kv_cache.block_size
        wanted = request.block_hashes[num_computed_blocks:num_blocks]
        if not request.was_looked_up:
            request.was_looked_up = True
            self._stats.queries += len(wanted) * self._kv_cache.block_size
        if not wanted or len(self.loading) >= NUM_SLOTS or self._clock() < self._loads_from:
            return False
        awaited = self._awaited()
        if wanted[0] in awaited:
            self._followers[request.request_id] = request, wanted[0]
        else:
            room = self._max_staged_blocks - len(awaited)
            is_coming = self._num_coming(request, num_computed_blocks) > 0
            stored, slot = self._stored(request, num_computed_blocks, wanted[: max(room, 1)]), self._free_slot()
            if not stored or slot is None or any(load.is_late for load in self._loads):
                return False
            if room > 0:
                self._begin(request, slot, num_computed_blocks, stored, is_coming)
            else:
                self._followers[request.request_id] = request, self._loads[0].block_hashes[0]
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        self.loading.add(request)
        return True

    def end_step(self, scheduler_output: SchedulerOutput) -> None:
        """Write into the step what its workers are to do. From here on only requests refer to the placed blocks."""
        if self._metadata != _NOTHING:
            scheduler_output.kv_connector_metadata, self._metadata = self._metadata, KVConnectorMetadata()
        self._kv_cache.release(self._placed)
        self._placed = []

    def step_succeeded(self, step: int) -> None:
        """All blocks that this step or an earlier one computed are there."""
        self._last_success = step

    def step_failed(self, waiting: RequestQueue) -> None:
        """End all loads, and put back their requests."""
        requests = list(self.loading)
        for request in requests:
            self.loading.remove(request)
        self._put_back(requests, waiting)
        self._loads.clear()
        self._followers.clear()
        self._filed.clear()
        self._metadata = KVConnectorMetadata(forgets_loads=True)
        if self._last_placement > self._last_success:
            self._loads_from = self._clock() + PAUSE_SECONDS

    def make_stats(self) -> KVConnectorStats:
        """The present numbers."""
        stats = self._stats
        stats.num_loading = len(self.loading)
        stats.num_saved_blocks, stats.num_saved_bytes, stats.num_unsaved_blocks = self._board.saved()
        tiers = [one.tier for one in self._config.kv_connector_extra_config.connectors]
        if tiers:
            stats.tiers = dict(zip(tiers, self._board.tiers(len(tiers)), strict=True))
        return msgspec.structs.replace(stats)

    def close(self) -> None:
        self._index.close()

    # -- loads ---------------------------------------------------------------------------------------------------------

    def _awaited(self) -> set[bytes]:
        """The blocks on their way."""
        return {block_hash for load in self._loads if not load.is_late for block_hash in load.block_hashes}

    def _is_over(self, load: _Load) -> bool:
        """Whether its blocks are there, or have to be done without."""
        timeout = self._config.kv_connector_extra_config.load_timeout_s
        is_overdue = not load.is_late and self._clock() - load.began_at > timeout
        return is_overdue or self._board.loaded(load.slot, load.number) is not None

    def _free_slot(self) -> int | None:
        """None if abandoned loads have all of them."""
        used = {load.slot for load in self._loads}
        return next((slot for slot in range(NUM_SLOTS) if slot not in used), None)

    def _num_coming(self, request: Request, num_computed_blocks: int) -> int:
        """Blocks that follow, and that the engine which has computed the request's prompt keeps, or is about to."""
        if not request.was_prefilled:
            return 0
        return max(request.num_prompt_tokens // self._kv_cache.block_size - num_computed_blocks, 0)

    def _stored(self, request: Request, num_computed_blocks: int, wanted: list[bytes]) -> list[bytes]:
        """Those that may be loaded, up to the first that may not."""
        num_coming = self._num_coming(request, num_computed_blocks)
        if num_coming >= len(wanted):
            return wanted
        return wanted[: num_coming + self._index.num_stored(wanted[num_coming:])]

    def _begin(self, request: Request, slot: int, first: int, block_hashes: list[bytes], is_coming: bool) -> None:
        self._num_loads += 1
        self._loads.append(_Load(self._num_loads, slot, request, first, block_hashes, self._clock()))
        self._metadata.loads.append(KVLoad(self._num_loads, slot, block_hashes.copy(), is_coming))

    def _end(self, load: _Load) -> None:
        self._loads.remove(load)
        self._metadata.ended_loads.append(load.number)

    def _place(self, load: _Load, num_blocks: int) -> bool:
        """Give pages to what was loaded, behind what the prefix cache has of it by now.

        If it has not even what it had when the load began, there is a gap: the request is looked up again.

        Returns:
            False if there is no room yet.
        """
        if num_blocks < len(load.block_hashes):
            load.request.was_prefilled = False
            self._index.forget(load.block_hashes[num_blocks])
            self._stats.num_failed_blocks += len(load.block_hashes) - num_blocks
            del load.block_hashes[num_blocks:]
        computed = self._kv_cache.get_computed_blocks(load.request)
        num_groups, size = self._kv_cache.groups.num_groups, self._kv_cache.block_size
        start, end = len(computed) // num_groups, load.first + len(load.block_hashes)
        if load.first <= start < end:
            added = self._kv_cache.add_loaded_blocks(load.request, computed, end - start)
            if added is None:
                return False
            self._placed += computed + added
            for block_hash in load.block_hashes[start - load.first :]:
                self._filed.pop(block_hash, None)
            ids = [None if block is NULL_BLOCK else block.block_id for block in added]
            block_ids = [ids[i : i + num_groups] for i in range(0, len(ids), num_groups)]
            self._last_placement = self._step
            self._metadata.placements.append(KVPlacement(load.number, start - load.first, block_ids))
            self._stats.num_loaded_blocks += len(block_ids)
            self._stats.num_loaded_bytes += len(block_ids) * self._block_bytes
            if load.request.scheduled_at is None:
                self._stats.hits += len(block_ids) * size
        self._end(load)
        return True

    def _take_followers(self) -> list[Request]:
        """Those whose block is not on its way any more."""
        awaited, taken = self._awaited(), []
        for request_id, (request, block_hash) in list(self._followers.items()):
            is_waiting = request in self.loading
            if not is_waiting or block_hash not in awaited:
                del self._followers[request_id]
                taken += [request] if is_waiting else []
        return taken

    def _put_back(self, requests: list[Request], waiting: RequestQueue) -> None:
        for request in reversed(requests):
            has_run = request.scheduled_at is not None
            request.status = RequestStatus.PREEMPTED if has_run else RequestStatus.WAITING
            waiting.prepend(request)

    def _note_filed(self, block_hash: bytes) -> None:
        """A block of one group becomes full in the present step, or did so in an earlier one."""
        block_hash = block_hash[:HASH_BYTES]
        self._filed.pop(block_hash, None)
        if not self._index.is_kept(block_hash):
            self._filed[block_hash] = self._step


_NOTHING = KVConnectorMetadata()
