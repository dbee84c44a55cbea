"""AdapterScheduler: which adapters are in memory, which of them have a slot, and which requests wait for one.

::

    add ──► waiting ──► its adapter is loaded, and has a slot ──► the scheduler's queue ──► …
                │ the load fails
                └──► ends with an error

A digest identifies an adapter: two names of the same content share everything. A load reads the folder of one of them;
if that folder has lost its files, only the requests that name it end.

A step computes with at most `max_loras` adapters: those that have a *slot*. An adapter keeps its slot as long as any
request is past `waiting`; requests that arrive meanwhile pass at once. Then the slot is free, and goes to the adapter
whose request waits first. While any request waits for a slot, at most `max_overtakes` that arrive later pass; then none
do until a slot is given. So slots become free as soon as the requests that use them have ended, and an adapter waits
for no more turns than there are adapters before it.

Memory has a *cell* for each of `num_cells` adapters. A load takes a free one, or that of an adapter that is neither
pinned nor used nor wanted by an earlier request: the one whose requests come last, or that has none and was used
longest ago. Loads go on beside the steps; ranks report on the board.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from quire_engine.adapters.board import AdapterBoard, LoadOutcome
from quire_engine.errors import quote
from quire_engine.lora import Adapter
from quire_engine.messages import (
    AdapterLoad,
    AdapterOrders,
    EngineCoreOutput,
    ErrorCode,
    FinishReason,
    SchedulerOutput,
)
from quire_engine.scheduler.request import Request, RequestStatus
from quire_engine.scheduler.request_queue import PriorityRequestQueue, RequestQueue
from quire_engine.stats import AdapterStats

MAX_COUNTED = 1024
"""Adapters whose loads are counted one by one: the counts travel with the statistics."""
_REASONS = {
    LoadOutcome.FAILED: "could not be loaded; the engine's log has the cause",
    LoadOutcome.NO_MEMORY: "could not be loaded: there is not enough memory; lower max_cpu_loras or max_lora_rank",
    LoadOutcome.MISSING: "could not be loaded: its files cannot be read any more",
    LoadOutcome.CHANGED: "could not be loaded: its files have changed since it was registered; load it again in place",
}
_OF_FOLDERS = (LoadOutcome.MISSING, LoadOutcome.CHANGED)
"""Outcomes that another folder of the same content need not have."""


@dataclass(slots=True)
class _Resident:
    """An adapter in a cell."""

    adapter: Adapter
    cell: int
    number: int
    """The number of its load."""
    is_ready: bool = False
    slot: int | None = None
    num_live: int = 0
    """Requests that use it: all but those that wait."""


class AdapterScheduler:
    """Assigns cells and slots, and writes the orders of each step.

    Args:
        max_loras: slots.
        num_cells: adapters in memory, at least as many.
        max_overtakes: of a request that waits for a slot.
        board: where the ranks report.
    """

    def __init__(self, max_loras: int, num_cells: int, max_overtakes: int, board: AdapterBoard) -> None:
        self._max_overtakes, self._max_pinned, self._board = max_overtakes, num_cells - 1, board
        self.waiting = PriorityRequestQueue()
        """Requests that wait for their adapters. By priority, which are all 0 unless the policy heeds them."""
        self._residents: OrderedDict[str, _Resident] = OrderedDict()
        """By digest, the one that was used longest ago first."""
        self._free_cells = list(range(num_cells - 1, -1, -1))
        self._slots: list[str | None] = [None] * max_loras
        self._pinned: dict[str, Adapter] = {}
        self._num_overtakes = 0
        self._is_held_up = False
        """Whether a request waits for a slot or a cell, and not for a load."""
        self._is_settled = True
        """Whether no request in `waiting` can go on before something changes."""
        self._orders = AdapterOrders()
        self._num_orders = 0
        """Loads that were ordered so far."""
        self._running: Counter[str] = Counter()
        self._arrived: Counter[str] = Counter()
        self._loads: Counter[str] = Counter()
        self._num_loads = self._num_evictions = self._num_failed_loads = 0
        self._stats: AdapterStats | None = None
        """Unless something has changed since."""

    # -- requests -----------------------------------------------------------------------------------------------------

    def hold(self, request: Request) -> bool:
        """Take in a request, and return whether it has to wait; then it is in `waiting`."""
        adapter = request.options.adapter
        if adapter is None:
            return False
        self._stats = None
        self._arrived[adapter.name] += 1
        if adapter.is_pinned:
            self._pin(adapter)
        resident = self._residents.get(adapter.digest)
        if resident is not None and resident.slot is not None and not self._is_closed:
            self._use(resident, request)
            self._num_overtakes += self._is_held_up
            return False
        request.status = RequestStatus.WAITING_FOR_ADAPTER
        self.waiting.add(request)
        self._is_settled = False
        return True

    def begin(self, request: Request) -> None:
        """Count a request that begins to run."""
        if request.options.adapter is not None:
            self._running[request.options.adapter.name] += 1
            self._stats = None

    def request_ended(self, request: Request) -> None:
        """Count a request no longer; called before it leaves its queue."""
        adapter = request.options.adapter
        if adapter is None or request.status is RequestStatus.WAITING_FOR_FSM:  # `hold` comes after its grammar
            return
        self._stats = None
        for counter, counts in ((self._arrived, True), (self._running, request.scheduled_at is not None)):
            counter[adapter.name] -= counts
            if not counter[adapter.name]:
                del counter[adapter.name]
        if request in self.waiting:
            self._is_settled = False  # one that was first may have kept others from passing
            return
        resident = self._residents[adapter.digest]
        resident.num_live -= 1
        self._is_settled &= resident.num_live > 0

    def pin(self, adapter: Adapter, is_pinned: bool) -> None:
        """Load an adapter as soon as there is room, and keep it; or keep it no longer."""
        if is_pinned:
            self._pin(adapter)
        else:
            self._pinned.pop(adapter.digest, None)
        self._is_settled &= not (is_pinned or self.waiting)

    # -- steps --------------------------------------------------------------------------------------------------------

    @property
    def is_loading(self) -> bool:
        """Whether a load is under way."""
        return any(not resident.is_ready for resident in self._residents.values())

    def has_work(self) -> bool:
        """Whether a step has something to do for it, even if it computes nothing."""
        if not self._is_settled or self._orders.loads or self._orders.slots:
            return True
        return any(self._has_ended(resident) for resident in self._residents.values())

    def begin_step(self, output: SchedulerOutput, queue: RequestQueue) -> list[EngineCoreOutput]:
        """Take note of loads that have ended, put the requests that can go on into the scheduler's queue, and set the
        step's orders. Returns the outputs of the requests whose adapters cannot be loaded, which are still waiting."""
        failed = self._take_loads() if self.is_loading else []
        if not self._is_settled:
            self._is_settled = True
            self._settle(queue, {output.request_id for output in failed})
        if self._orders.loads or self._orders.slots:
            output.adapter_orders, self._orders = self._orders, AdapterOrders()
        return failed

    def step_was_not_sent(self, output: SchedulerOutput) -> None:
        """Give a step's orders with the next one: the workers never received them."""
        if output.adapter_orders is not None:
            self._orders.loads[:0] = output.adapter_orders.loads
            self._orders.slots[:0] = output.adapter_orders.slots

    def forget_all(self) -> None:
        """The workers have dropped all adapters; no request is live. Those that are pinned are loaded when they are
        used again."""
        assert not self.waiting
        for resident in self._residents.values():
            self._free_cells.append(resident.cell)
        self._residents.clear()
        self._slots = [None] * len(self._slots)
        self._orders, self._stats, self._is_settled = AdapterOrders(), None, True

    def make_stats(self) -> AdapterStats:
        """The present numbers; the same object if nothing has changed."""
        if self._stats is None:
            residents = self._residents.items()
            self._stats = AdapterStats(
                running=dict(self._running),
                waiting={
                    name: number - self._running[name]
                    for name, number in self._arrived.items()
                    if number > self._running[name]
                },
                num_waiting=len(self.waiting),
                ready=[digest for digest, resident in residents if resident.is_ready],
                in_use=[digest for digest, resident in residents if resident.num_live],
                loads=dict(self._loads),
                num_loads=self._num_loads,
                num_evictions=self._num_evictions,
                num_failed_loads=self._num_failed_loads,
            )
        return self._stats

    def check_integrity(self) -> None:
        """Raises AssertionError if a cell or a slot is lost, or shared by mistake."""
        cells = [*self._free_cells, *(resident.cell for resident in self._residents.values())]
        assert len(set(cells)) == len(cells), "two adapters share a cell"
        for digest, resident in self._residents.items():
            assert resident.num_live >= 0
            assert resident.slot is None or self._slots[resident.slot] == digest, "two adapters share a slot"
            assert not resident.num_live or resident.slot is not None, "an adapter is used without a slot"

    # -- inside -------------------------------------------------------------------------------------------------------

    @property
    def _is_closed(self) -> bool:
        return self._num_overtakes >= self._max_overtakes

    def _pin(self, adapter: Adapter) -> None:
        """The oldest pin ends if no cell were left for others: a replayed request may pin one too many."""
        self._pinned.pop(adapter.digest, None)
        self._pinned[adapter.digest] = adapter
        if len(self._pinned) > self._max_pinned:
            del self._pinned[next(iter(self._pinned))]

    def _has_ended(self, resident: _Resident) -> bool:
        return not resident.is_ready and self._board.outcome(resident.cell, resident.number) is not None

    def _take_loads(self) -> list[EngineCoreOutput]:
        failed: list[EngineCoreOutput] = []
        for digest, resident in [*self._residents.items()]:
            outcome = None if resident.is_ready else self._board.outcome(resident.cell, resident.number)
            if outcome is None:
                continue
            self._is_settled, self._stats = False, None
            if outcome is LoadOutcome.READY:
                resident.is_ready = True
                self._num_loads += 1
                self._loads[digest] += 1
                if len(self._loads) > MAX_COUNTED:
                    self._loads.pop(next((one for one in self._loads if one not in self._residents), digest))
                continue
            self._num_failed_loads += 1
            self._free_cells.append(resident.cell)
            del self._residents[digest]
            folder = resident.adapter.folder if outcome in _OF_FOLDERS else None
            if folder in (None, self._pinned.get(digest, resident.adapter).folder):
                self._pinned.pop(digest, None)
            for request in self.waiting:
                adapter = request.options.adapter
                if adapter is not None and adapter.digest == digest and folder in (None, adapter.folder):
                    failed.append(_failure(request, outcome))
        return failed

    def _settle(self, queue: RequestQueue, failed: set[str]) -> None:
        """Let requests go on, in their order, and begin loads."""
        waiting = list(self.waiting)
        order = {digest: number for number, digest in enumerate(dict.fromkeys(one.lora_id for one in waiting))}
        self._is_held_up = False
        for request in waiting:
            adapter = request.options.adapter
            if adapter is None or request.request_id in failed:
                continue
            resident = self._residents.get(adapter.digest) or self._begin_load(adapter, order)
            if (resident is not None and not resident.is_ready) or (self._is_held_up and self._is_closed):
                continue
            if resident is None or not (resident.slot is not None or self._take_slot(resident)):
                self._is_held_up = True
            else:
                self.waiting.remove(request)
                self._use(resident, request)
                request.status = RequestStatus.WAITING
                queue.add(request)
        if not self._is_held_up:
            self._num_overtakes = 0
        for adapter in self._pinned.values():
            if adapter.digest not in self._residents:
                self._begin_load(adapter, order)

    def _use(self, resident: _Resident, request: Request) -> None:
        assert resident.slot is not None
        resident.num_live += 1
        request.adapter_slot = resident.slot
        self._residents.move_to_end(resident.adapter.digest)
        self._stats = None

    def _begin_load(self, adapter: Adapter, order: Mapping[str | None, int]) -> _Resident | None:
        """Load an adapter, if a cell is free or can be made free. `order` is that of the digests that are wanted."""
        if not self._free_cells and not self._evict(adapter, order):
            return None
        self._num_orders += 1
        resident = _Resident(adapter, self._free_cells.pop(), self._num_orders)
        self._residents[adapter.digest] = resident
        self._orders.loads.append(AdapterLoad(resident.number, resident.cell, adapter))
        return resident

    def _evict(self, adapter: Adapter, order: Mapping[str | None, int]) -> bool:
        """Make a cell free for an adapter."""
        own, last = order.get(adapter.digest, len(order)), math.inf
        unused = [
            (order.get(digest, last), resident)
            for digest, resident in self._residents.items()
            if resident.is_ready and not resident.num_live and digest not in self._pinned
        ]
        place, resident = max(unused, key=lambda item: item[0], default=(-1, None))
        if resident is None or place <= own:
            return False
        self._give_up_slot(resident)
        self._free_cells.append(resident.cell)
        del self._residents[resident.adapter.digest]
        self._num_evictions += 1
        self._stats = None
        return True

    def _take_slot(self, resident: _Resident) -> bool:
        """Give an adapter a slot that is free, or that of the unused one that was used longest ago."""
        if None not in self._slots:
            idle = next((one for one in self._residents.values() if one.slot is not None and not one.num_live), None)
            if idle is None:
                return False
            self._give_up_slot(idle, clears=False)
        if not self._is_held_up:  # else an earlier request waits for a cell
            self._num_overtakes = 0
        slot = self._slots.index(None)
        self._slots[slot], resident.slot = resident.adapter.digest, slot
        self._orders.slots.append((slot, resident.cell))
        return True

    def _give_up_slot(self, resident: _Resident, clears: bool = True) -> None:
        if resident.slot is not None:
            self._slots[resident.slot] = None
            if clears:  # else it is filled at once
                self._orders.slots.append((resident.slot, -1))
            resident.slot = None


def _failure(request: Request, outcome: LoadOutcome) -> EngineCoreOutput:
    adapter = request.options.adapter
    assert adapter is not None
    is_unavailable = outcome is LoadOutcome.NO_MEMORY
    return EngineCoreOutput(
        request.request_id,
        finish_reason=FinishReason.ERROR,
        error=f"lora_name is {quote(adapter.name)}; its adapter in {adapter.folder} {_REASONS[outcome]}",
        error_parameter=None if is_unavailable else "lora_name",
        error_code=ErrorCode.UNAVAILABLE if is_unavailable else None,
        num_preemptions=request.num_preemptions,
    )
