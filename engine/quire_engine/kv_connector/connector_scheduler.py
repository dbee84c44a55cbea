"""ConnectorScheduler: the half of a KV connector in the engine core. It knows blocks and requests, but no files.

::

    a block becomes full, and is filed ──► its step succeeds ──► still the same content? ──► saves of the next step
    request waiting, blocks stored ──► load ──► all ranks have checked theirs ──► placement: page, prefix cache, request

Why a page never holds anything else than its hash says:

1. Threads read and check blocks in host memory only. A block gets a page when every rank has found it valid. That step
   writes the page, on every rank, before it computes anything. So the block may be filed as soon as that step is
   scheduled, as blocks that a step computes are (`kv_cache/manager.py`).
2. A block is saved once its step has succeeded, and only if its page is still filed under the hash: then nothing has
   been written to it since, as no step in flight writes to a cached block. The save runs before anything is written in
   its step, so the page may be reused at once.
3. After a failed step all loads end, and nothing more is saved: earlier saves are of steps that succeeded before it.

With layers that keep states, these are stored under hashes of their own, in several parts, and only of some blocks: a
load needs the keys and values of all blocks up to one with a stored state, and that state, or it has failed.

A load outlives its request: when that goes on without it, or is aborted, the blocks are dropped once all ranks have
them.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from quire_engine.config import KVTransferConfig
from quire_engine.kv_cache import KVCacheManager
from quire_engine.kv_cache.block_pool import NULL_BLOCK, KVCacheBlock
from quire_engine.kv_cache.hashing import HASH_BYTES, hash_state_parts
from quire_engine.kv_connector.block_store import StoredBlocks
from quire_engine.kv_connector.board import MAX_LOADED_BLOCKS, NUM_SLOTS, TransferBoard
from quire_engine.messages import KVConnectorMetadata, KVLoad, KVPlacement, SchedulerOutput
from quire_engine.scheduler.request import Request, RequestStatus
from quire_engine.scheduler.request_queue import FCFSRequestQueue, RequestQueue
from quire_engine.stats import KVConnectorStats
from quire_engine.system.crash_loop import CircuitBreaker

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 30.0
"""Nothing is loaded for so long after a step that wrote loaded blocks to pages has failed: that may be the cause."""


@dataclass(slots=True)
class _Load:
    """Blocks that are being read, and their request."""

    number: int
    slot: int
    request: Request
    first: int
    """Index of the first block in the request."""
    end: int
    """Index of the block after the last."""
    hashes: list[bytes]
    """Hashes of all that is read: blocks, and the parts of a state."""
    began_at: float
    is_late: bool = False
    """Whether the request went on without it."""


class ConnectorScheduler:
    """Implements `scheduler.kv_connector.KVConnector`.

    Args:
        config: the connector's.
        kv_cache: the scheduler's.
        index: what is stored.
        board: where the ranks report.
        block_bytes: size of a block, by rank.
        clock: seconds, monotonic.
        num_loads: of an earlier one on the same board.
        num_state_parts: in how many parts a state is stored.
    """

    def __init__(
        self,
        config: KVTransferConfig,
        kv_cache: KVCacheManager,
        index: StoredBlocks,
        board: TransferBoard,
        block_bytes: list[int],
        clock: Callable[[], float] = time.monotonic,
        num_loads: int = 0,
        num_state_parts: int = 1,
    ) -> None:
        self._config = config
        self._kv_cache = kv_cache
        self._index = index
        self._board = board
        self._clock = clock
        self._block_bytes = sum(block_bytes)
        groups = kv_cache.groups
        self._has_states, self._num_paged = groups.has_states, groups.num_groups - groups.has_states
        self._num_state_parts = num_state_parts if groups.has_states else 0
        staged_blocks = config.kv_connector_extra_config.staging_bytes // max(*block_bytes, 1)
        # A load may have to reach the next snapshot.
        self._least_room = (groups.snapshot_blocks or 1) * min(self._num_paged, 1) + self._num_state_parts
        self._max_staged_blocks = min(max(staged_blocks, self._least_room), MAX_LOADED_BLOCKS)
        self.loading = FCFSRequestQueue()
        self._loads: list[_Load] = []
        """Oldest first."""
        self._followers: dict[str, tuple[Request, bytes]] = {}
        """Requests that wait for a block of another request's load."""
        self.num_loads = num_loads
        self._filed: dict[bytes, int] = {}
        """Hash of each block that was filed and not saved yet → the last step that filed it, in any group of layers but
        that of states, whose hashes end with `state_suffix`; ordered by step."""
        self._step = 0
        self._last_success = 0
        self._last_placement = 0
        self._breaker = CircuitBreaker(clock)
        self._metadata = KVConnectorMetadata()
        self._placed: list[KVCacheBlock] = []
        self._stats = KVConnectorStats()
        if config.saves:
            kv_cache.block_pool.on_filed = self._note_filed

    # -- called by the scheduler ---------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        if self._filed and next(iter(self._filed.values())) <= self._last_success:
            return True
        return bool(self.loading) and any(map(self._is_over, self._loads))

    def begin_step(self, scheduler_output: SchedulerOutput) -> None:
        self._step = scheduler_output.step
        while self._filed:
            block_hash, step = next(iter(self._filed.items()))
            if step > self._last_success:
                break
            del self._filed[block_hash]
            if self._is_state(block_hash):
                self._save_state(block_hash)
                continue
            block_ids = self._kv_cache.cached_block_ids(block_hash)
            if block_ids is not None:
                self._metadata.saves.append((block_hash, block_ids))
                self._index.add(block_hash)

    def place_loaded(self, waiting: RequestQueue) -> bool:
        """Blocks of requests that do not wait any more are dropped."""
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
                self._stats.num_failed_blocks += len(load.hashes)
                logger.warning("%d KV blocks took longer to load than load_timeout_s", len(load.hashes))
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
        """A request whose blocks are being loaded for another one waits for these. One without room waits for the
        oldest load to end. No load begins while one is late: assume that a stuck store stays stuck.
        """
        if request.skip_reading_prefix_cache or not self._config.loads:
            return False
        num_blocks = (request.num_tokens - 1) // self._kv_cache.block_size
        wanted = request.block_hashes[num_computed_blocks:num_blocks]
        if not request.was_looked_up:
            request.was_looked_up = True
            self._stats.queries += len(wanted) * self._kv_cache.block_size
        if not wanted or len(self.loading) >= NUM_SLOTS or self._breaker.is_open:
            return False
        awaited = self._awaited()
        if wanted[0] in awaited:
            self._followers[request.request_id] = request, wanted[0]
        else:
            room = self._max_staged_blocks - len(awaited)
            stored = self._stored(request, num_computed_blocks, wanted, max(room, self._least_room))
            used = {load.slot for load in self._loads}
            slot = next((slot for slot in range(NUM_SLOTS) if slot not in used), None)
            if not stored or slot is None or any(load.is_late for load in self._loads):
                return False
            if room >= stored * min(self._num_paged, 1) + self._num_state_parts:
                self._begin(request, slot, num_computed_blocks, wanted[:stored])
            else:
                self._followers[request.request_id] = request, self._loads[0].hashes[0]
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        self.loading.add(request)
        return True

    def end_step(self, scheduler_output: SchedulerOutput) -> None:
        """From here on only requests refer to the placed blocks."""
        if self._metadata != _NOTHING:
            scheduler_output.kv_connector_metadata, self._metadata = self._metadata, KVConnectorMetadata()
        self._kv_cache.release(self._placed)
        self._placed = []

    def step_succeeded(self, step: int) -> None:
        self._last_success = step

    def step_failed(self, waiting: RequestQueue) -> None:
        requests = list(self.loading)
        for request in requests:
            self.loading.remove(request)
        self._put_back(requests, waiting)
        self._loads.clear()
        self._followers.clear()
        self._filed.clear()
        self._metadata = KVConnectorMetadata(forgets_loads=True)
        if self._last_placement > self._last_success:
            self._breaker.trip(PAUSE_SECONDS)

    def make_stats(self) -> KVConnectorStats:
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
        return {block_hash for load in self._loads if not load.is_late for block_hash in load.hashes}

    def _is_over(self, load: _Load) -> bool:
        timeout = self._config.kv_connector_extra_config.load_timeout_s
        is_overdue = not load.is_late and self._clock() - load.began_at > timeout
        return is_overdue or self._board.loaded(load.slot, load.number) is not None

    def _num_coming(self, request: Request, num_computed_blocks: int) -> int:
        """How many of the next blocks the engine that computed the prompt has saved, or is about to save."""
        if not request.was_prefilled:
            return 0
        return max(request.num_prompt_tokens // self._kv_cache.block_size - num_computed_blocks, 0)

    def _stored(self, request: Request, num_computed_blocks: int, wanted: list[bytes], room: int) -> int:
        """How many of the wanted blocks may be loaded: up to the first that may not; and with states, up to the last
        whose state may be loaded."""
        num_coming = self._num_coming(request, num_computed_blocks)
        if self._num_paged:
            wanted = wanted[: room - self._num_state_parts]
            num_stored = min(num_coming, len(wanted))
            num_stored += self._index.num_stored(wanted[num_stored:])
        else:
            num_stored = len(wanted)
        if not self._has_states:
            return num_stored
        return next(
            (
                end
                for end in range(num_stored, 0, -1)
                if self._will_have_state(request, num_computed_blocks + end, num_coming > 0)
                or self._is_state_stored(wanted[end - 1])
            ),
            0,
        )

    def _will_have_state(self, request: Request, num_blocks: int, is_coming: bool) -> bool:
        """Whether the engine that computed the prompt saves the state after so many blocks."""
        num_tokens, size = request.num_prompt_tokens, self._kv_cache.block_size
        is_snapshot = num_blocks % self._kv_cache.groups.snapshot_blocks == 0
        return (
            is_coming and num_blocks <= num_tokens // size and (is_snapshot or num_blocks >= (num_tokens - 1) // size)
        )

    def _is_state_stored(self, block_hash: bytes) -> bool:
        if not self._index.num_stored(hash_state_parts(block_hash, 1)):  # of most blocks there is none
            return False
        return self._index.num_stored(hash_state_parts(block_hash, self._num_state_parts)) == self._num_state_parts

    def _begin(self, request: Request, slot: int, first: int, wanted: list[bytes]) -> None:
        self.num_loads += 1
        hashes = wanted.copy() if self._num_paged else []
        hashes += hash_state_parts(wanted[-1], self._num_state_parts)
        is_coming = self._num_coming(request, first) > 0
        load = _Load(self.num_loads, slot, request, first, first + len(wanted), hashes, self._clock())
        self._loads.append(load)
        self._metadata.loads.append(KVLoad(self.num_loads, slot, hashes.copy(), is_coming))

    def _end(self, load: _Load) -> None:
        self._loads.remove(load)
        self._metadata.ended_loads.append(load.number)

    def _place(self, load: _Load, num_blocks: int) -> bool:
        """Allocate pages for loaded blocks, behind those that the prefix cache has by now. Returns False if there is no
        room yet.

        If the prefix cache has fewer blocks than when the load began, there is a gap: the request is looked up again.
        """
        if num_blocks < len(load.hashes):
            load.request.was_prefilled = False
            self._index.forget(load.hashes[num_blocks])
            self._stats.num_failed_blocks += len(load.hashes) - num_blocks
            load.end = load.first if self._has_states else load.first + num_blocks
        computed = self._kv_cache.get_computed_blocks(load.request)
        num_groups, size = self._kv_cache.groups.num_groups, self._kv_cache.block_size
        start, end = len(computed) // num_groups, load.end
        if load.first <= start < end:
            added = self._kv_cache.add_loaded_blocks(load.request, computed, end - start)
            if added is None:
                return False
            self._placed += computed + added
            for block_hash in load.request.block_hashes[start:end]:
                self._filed.pop(block_hash, None)
            ids = [None if block is NULL_BLOCK else block.block_id for block in added]
            placement = KVPlacement(load.number, start - load.first, [])
            if self._num_paged:
                placement.block_ids = [ids[i : i + self._num_paged] for i in range(0, len(ids), num_groups)]
            if self._has_states:
                placement.state_id = ids[-1]
                self._filed.pop(load.request.block_hashes[end - 1] + self._kv_cache.state_suffix, None)
            self._last_placement = self._step
            self._metadata.placements.append(placement)
            self._stats.num_loaded_blocks += end - start
            self._stats.num_loaded_bytes += (len(placement.block_ids) + self._num_state_parts) * self._block_bytes
            if load.request.scheduled_at is None:
                self._stats.hits += (end - start) * size
        self._end(load)
        return True

    def _take_followers(self) -> list[Request]:
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
        is_state = self._is_state(block_hash)
        if not is_state:
            block_hash = block_hash[:HASH_BYTES]
        self._filed.pop(block_hash, None)
        kept = hash_state_parts(block_hash[:HASH_BYTES], self._num_state_parts) if is_state else [block_hash]
        if not all(map(self._index.is_kept, kept)):
            self._filed[block_hash] = self._step

    def _is_state(self, block_hash: bytes) -> bool:
        return self._has_states and block_hash[HASH_BYTES:] == self._kv_cache.state_suffix

    def _save_state(self, block_hash: bytes) -> None:
        block = self._kv_cache.block_pool.get_cached_block(block_hash)
        if block is not None:
            hashes = hash_state_parts(block_hash[:HASH_BYTES], self._num_state_parts)
            self._metadata.state_saves.append((hashes, block.block_id))
            for one in hashes:
                self._index.add(one)


_NOTHING = KVConnectorMetadata()
