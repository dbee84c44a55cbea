"""DataParallelClient: several engine cores behind one frontend. The death of one loses no request, and delays no other.

::

    AsyncLLM ─► DataParallelClient ─┬─ Router: what each replica has to do and has cached
                                    ├─ SupervisedClient 0 ─► engine core 0
                                    └─ SupervisedClient 1 ─► engine core 1 …

1. A new request goes to the replica that the router chooses among those that are up. One that has sent nothing for a
   while, or runs a suspect alone, gets none unless all are like that.
2. When a replica dies, its supervisor starts it again. Its live requests do not wait for that: the others go on with
   them from the journal, with the next token, and the same ones.
3. Suspects (see `Journal`) do wait, and run alone where they are: a request that kills engines has killed two by then,
   and kills no third.
4. While no replica is up, requests wait, and the first that is up again takes them all. Where one does not stay up,
   they wait for another; where none does, they end.
5. Replicas come and go: those of this host by `scale`, the last of them first, and those of other hosts by
   themselves. New ones get requests once they are ready. The requests of a replica that leaves go on on the others as
   after a death, but none is a suspect. Each replica has a place in the list, its rank, which stays free while it is
   away.

A single replica has nothing between it and the frontend until it is scaled. Then one of these is put `around` it.

With `disaggregation` the replicas have roles, and most requests go from one to another once: see there.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec

from quire_engine.config import EngineConfig
from quire_engine.core.catch_up import CatchUp
from quire_engine.core.disaggregation import Disaggregation
from quire_engine.core.journal import JournalEntry
from quire_engine.core.new_replicas import NewReplicas, require_room
from quire_engine.core.router import Router
from quire_engine.core.supervised_client import OnDown, OnRecovery, SupervisedClient
from quire_engine.errors import EngineDeadError, EngineError, ScalingError
from quire_engine.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReady,
    EngineCoreRequest,
    ReportPrefixCache,
    ResetPrefixCache,
    Sleep,
    UtilityCall,
    UtilityResult,
    WakeUp,
)
from quire_engine.stats import IterationStats
from quire_engine.timeline import Timeline

logger = logging.getLogger(__name__)


class DataParallelClient:
    """The same interface as `SupervisedClient`, over several of them.

    The constructor starts all engine cores and returns at once; `wait_until_ready` blocks. All else but `shutdown`
    belongs to one event loop.

    Args:
        config: all settings.
        on_recovery: called when an engine was started again or requests go on elsewhere, with what there is to count
            and the ids of these requests; requests of an engine that left are counted alone.
        make_replica: makes the client of one.
        replicas: that are there already, and watched; unset: `data_parallel_size` new ones.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_recovery: OnRecovery = lambda stats, replayed_ids: None,
        make_replica: Callable[..., SupervisedClient] = SupervisedClient,
        replicas: Sequence[SupervisedClient] = (),
    ) -> None:
        self._config = config
        self._on_recovery = on_recovery
        self._make_replica = make_replica
        self._replicas = list(replicas)
        self._outputs: asyncio.Queue[EngineCoreOutputs | Exception] = asyncio.Queue()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._busy: str | None = None
        """What all are doing that must not be disturbed: falling asleep, or being scaled."""
        self._scaling: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[None] | None = None
        self._catch_up = CatchUp()
        self._coming = NewReplicas()
        self._leaving: list[SupervisedClient] = []
        self._known: list[int] = []
        self.on_change: Callable[[], None] = lambda: None
        """Called when others of the replicas are present than before, other than by `scale`."""
        self.ready = EngineCoreReady()
        roles = config.parallel.disaggregation
        self._disaggregation = None if roles is None else Disaggregation(roles)
        self._router = Router(config.parallel.data_parallel_routing, config.parallel.num_ranks, 0)
        try:
            for index in range(0 if replicas else config.parallel.num_ranks):
                self._replicas.append(make_replica(config.for_replica(index), *self._listeners(index)))
        except BaseException:
            self.shutdown()
            raise

    @classmethod
    def around(
        cls,
        replica: SupervisedClient,
        config: EngineConfig,
        on_recovery: OnRecovery,
        last_output: "asyncio.Task[EngineCoreOutputs]",
    ) -> "DataParallelClient":
        """Put this in the place of the single client of an engine that serves, in the running event loop.

        Args:
            replica: that client.
            config: all settings.
            on_recovery: as above.
            last_output: the wait for its outputs: its result comes first, and nothing after it.
        """
        client = cls(config, on_recovery, replicas=[replica])
        replica.report_to(*client._listeners(0))
        client._make_ready()
        client._make_router()
        for entry in replica.entries:
            client._route(entry.request, [0], entry.output_token_ids)
            if entry.output_token_ids:
                client._router.note_outputs(0, EngineCoreOutputs([EngineCoreOutput(entry.request.request_id, [0])]))
        client._take_outputs_of(0, last_output)
        return client

    def _listeners(self, index: int) -> tuple[OnRecovery, OnDown]:
        return partial(self._on_up, index), partial(self._on_down, index)

    @property
    def replicas(self) -> Sequence[SupervisedClient]:
        """The clients of the engines, by their index; not all of them are present."""
        return self._replicas

    @property
    def _present(self) -> list[int]:
        return [index for index, replica in enumerate(self._replicas) if replica.is_present]

    @property
    def _local(self) -> list[int]:
        """Those of this host."""
        return [index for index in self._present if not self._replicas[index].is_remote]

    @property
    def is_alive(self) -> bool:
        """Whether any takes requests."""
        return any(replica.is_alive for replica in self._replicas)

    @property
    def outage(self) -> str | None:
        """Why none takes requests; None while one does."""
        return (
            None
            if self.is_alive
            else "; ".join(f"engine {index}: {self._replicas[index].outage}" for index in self._present)
        )

    def wait_until_ready(self) -> EngineCoreReady:
        """Block until all engine cores can take requests.

        Raises:
            EngineDeadError: one could not start; the message is its own.
        """
        for replica in self._replicas:
            replica.wait_until_ready()
        self._make_ready()
        self._make_router()
        return self.ready

    def _make_ready(self) -> None:
        self._known = self._present
        ready = [self._replicas[index].ready for index in self._known]
        self.ready = msgspec.structs.replace(
            ready[0],
            num_blocks=sum(one.num_blocks for one in ready),
            num_kv_cache_tokens=min(one.num_kv_cache_tokens for one in ready),
            worker_pids=[pid for one in ready for pid in one.worker_pids],
        )

    def _make_router(self) -> None:
        block_size = self.ready.block_size if self._config.cache.enable_prefix_caching else 0
        self._router = Router(self._config.parallel.data_parallel_routing, len(self._replicas), block_size)

    def start(self) -> None:
        """Begin to watch the engine cores and to take their outputs, in the running event loop."""
        for index, replica in enumerate(self._replicas):
            replica.start()
            self._take_outputs_of(index)

    def _take_outputs_of(self, index: int, first: "asyncio.Task[EngineCoreOutputs] | None" = None) -> None:
        taking = self._take_outputs(index, self._replicas[index], first)
        self._tasks[index] = asyncio.get_running_loop().create_task(taking, name=f"engine-outputs-{index}")

    # -- requests ------------------------------------------------------------------------------------------------------

    def add_request(self, request: EngineCoreRequest, timeline: Timeline | None = None) -> None:
        """Hand a request over to a replica. Never blocks.

        Args:
            request: the request.
            timeline: what is written of its phases from here on.

        Raises:
            EngineDeadError: no engine is up, and `replay_on_crash` is off.
            EngineUnavailableError: no engine is up, and engines do not stay alive.
        """
        if self._disaggregation is not None:
            up = [index for index, replica in enumerate(self._replicas) if replica.is_alive]
            request = self._disaggregation.add(request, self.ready, up, timeline)
        index = self._route(request, self._candidates())
        try:
            self._replicas[index].add_request(request, timeline)
        except BaseException:
            self._forget(request.request_id)
            raise

    def abort_request(self, request_id: str) -> bool:
        """End a request wherever it is. Never blocks. Returns whether an engine core has it and will report its end."""
        index = self._forget(request_id)
        return index is not None and self._replicas[index].abort_request(request_id)

    def engine_index(self, request_id: str) -> int:
        """Which replica has a live request, or is to have it; 0 for one that is unknown."""
        return self._router.replica_of(request_id) or 0

    def is_held(self, request_id: str) -> bool:
        """Whether no engine has this live request, because none is up or another request has it to itself."""
        return self._replicas[self.engine_index(request_id)].is_held(request_id)

    def _forget(self, request_id: str) -> int | None:
        """Returns where it was."""
        if self._disaggregation is not None:
            self._disaggregation.remove(request_id)
        self._catch_up.remove(request_id)
        return self._router.remove(request_id)

    def _route(
        self, request: EngineCoreRequest, candidates: Sequence[int], output_token_ids: Sequence[int] = ()
    ) -> int:
        params = request.sampling_params
        if self._disaggregation is not None:
            candidates = self._disaggregation.candidates(request, candidates)
        return self._router.route(
            request.request_id,
            [*request.prompt_token_ids, *output_token_ids] if output_token_ids else request.prompt_token_ids,
            candidates,
            cache_salt=params.cache_salt,
            reads_cache=params.prompt_logprobs is None,
            prompt_parts=request.prompt_parts,
        )

    def _go_on(self, entries: Sequence[JournalEntry]) -> None:
        """Have decode replicas go on with requests whose prompts others have computed."""
        for entry in entries:
            index = self._route(entry.request, self._candidates(), entry.output_token_ids)
            self._replicas[index].take_over(entry)

    def _candidates(self) -> list[int]:
        """The replicas that may get a request: only the best kind that there is."""
        alive = [index for index, replica in enumerate(self._replicas) if replica.is_alive]
        serving = [index for index in alive if not self._replicas[index].is_isolating]
        moving = [index for index in serving if not self._router.is_stalled(index)]
        waiting = [index for index in self._present if not self._replicas[index].has_given_up]
        return moving or serving or alive or waiting or self._present

    # -- engines that die, and come back -------------------------------------------------------------------------------

    def _on_down(self, index: int) -> asyncio.Event | None:
        """Requests wait for a replica, or are about to end with it. Returns what the next engine waits for, if that is
        anything."""
        self._router.replica_died(index)
        self._catch_up.end()  # what others have not caught up with yet may be among what this one had
        if self._replicas[index].is_present:
            return self._hand_over(index, is_gone=True)
        num_moved = self._move(self._replicas[index].give_up_all())  # its host has taken it away
        self._note_change()
        self._count_moved(num_moved)
        return None

    def _on_up(self, index: int, stats: IterationStats, replayed_ids: Sequence[str]) -> None:
        """A replica is up again, or for the first time: it takes what waits for others."""
        self._note_change()
        stats.engine_index = index
        self._on_recovery(stats, replayed_ids)
        self._take_what_waits(index)

    def _take_what_waits(self, index: int) -> None:
        """A replica that is up goes on with what waits for others."""
        for source, replica in enumerate(self._replicas):
            if source != index and (not replica.is_alive or replica.is_isolating):
                self._hand_over(source)

    def _hand_over(self, source: int, is_gone: bool = False) -> asyncio.Event | None:
        """Have other replicas go on with what waits for this one, if there are any that can.

        Args:
            source: its index.
            is_gone: whether its engine has just died.

        Returns:
            Set when they have caught up with that; None if there is nothing, or nothing is known of when.
        """
        candidates = self._candidates()
        if source in candidates:
            return None
        moved: dict[int, list[str]] = {}
        entries, caught_up = self._replicas[source].give_up(), None
        if is_gone and not self._replicas[source].is_remote and self._replicas[candidates[0]].is_alive:
            caught_up = self._begin_to_catch_up(entries)
        for entry in entries:
            index = self._route(entry.request, candidates, entry.output_token_ids)
            self._replicas[index].take_over(entry)
            if self._replicas[index].is_alive:
                moved.setdefault(index, []).append(entry.request.request_id)
        for index, request_ids in moved.items():
            self._on_recovery(IterationStats(engine_index=index), request_ids)
        return caught_up

    def _begin_to_catch_up(self, entries: Sequence[JournalEntry]) -> asyncio.Event | None:
        """An engine of this host is gone: let those that are up use its cores while they compute what it had."""
        engines = [replica for replica in self._replicas if replica.is_alive and not replica.is_remote]
        if not entries or not engines:
            return None
        return self._catch_up.begin((entry.request.request_id for entry in entries), engines)

    def _note_change(self) -> None:
        """Perhaps others are present now."""
        if self._known != self._present:
            self._make_ready()
            self.on_change()

    # -- replicas that come, and leave ---------------------------------------------------------------------------------

    async def scale(self, num_replicas: int) -> None:
        """Have so many replicas on this host. Those that there are keep what they have, and go on meanwhile.

        It goes on to the end even if its caller no longer waits. Where it raises, nothing has changed.

        Raises:
            ScalingError: there cannot be so many, or not now; or a new one did not start.
        """
        if self._busy is not None:
            raise ScalingError(f"{self._busy}; try again when that is done")
        present = len(self._local)
        if num_replicas == present:
            return
        if any(replica.is_asleep for replica in self._replicas):
            raise ScalingError("the engine sleeps; wake it up first")
        self._busy = f"the replicas are being changed from {present} to {num_replicas}"
        change = self._add_replicas if num_replicas > present else self._remove_replicas
        self._scaling = asyncio.get_running_loop().create_task(change(num_replicas), name="scale")
        self._scaling.add_done_callback(self._on_scaled)
        await asyncio.shield(self._scaling)

    def _on_scaled(self, scaling: "asyncio.Task[None]") -> None:
        self._busy = None
        if not scaling.cancelled() and (error := scaling.exception()) is not None:
            logger.error("the replicas stay %d: %s", len(self._local), error)

    async def _add_replicas(self, num_replicas: int) -> None:
        local = [self._replicas[index] for index in self._local]
        num_blocks = min(replica.ready.num_blocks for replica in local)
        require_room(local, num_replicas - len(local))
        indices = [self._config.parallel.local_rank(number) for number in range(len(local), num_replicas)]
        try:
            makers = [
                partial(
                    self._make_replica,
                    self._config.for_replica(index, num_replicas), *self._listeners(index), num_blocks=num_blocks,
                )
                for index in indices
            ]  # fmt: skip
            new = await self._coming.start(makers)
            if any(replica.is_asleep for replica in self._replicas):
                raise ScalingError("the engine was put to sleep meanwhile; wake it up first")
            for replica in new:
                replica.start()
        except Exception as error:
            await self._coming.discard()
            if isinstance(error, ScalingError):
                raise
            raise ScalingError(f"there cannot be {num_replicas} replicas: {error}") from error
        replicas = list(self._replicas)
        for index, replica in zip(indices, new, strict=True):
            if index < len(replicas):
                replicas[index] = replica
            else:
                replicas.append(replica)
                self._router.add_replica()
        self._replicas = replicas
        self._coming.are_taken()  # not before: a `shutdown` in another thread has to find them
        for index in indices:
            self._take_outputs_of(index)
        self._share_anew()
        if self._config.for_replica(0, num_replicas).parallel.routes_by_prefix:
            self._asking = asyncio.get_running_loop().create_task(self._ask_for_prefixes(local))
        for index in indices:
            self._take_what_waits(index)

    async def _ask_for_prefixes(self, replicas: Sequence[SupervisedClient]) -> None:
        """Have those report what they have cached that were alone when they started."""
        calls = (replica.call_utility(ReportPrefixCache()) for replica in replicas)
        await asyncio.gather(*calls, return_exceptions=True)  # the next engine does it unasked

    async def _remove_replicas(self, num_replicas: int) -> None:
        indices = self._local[num_replicas:]
        leaving = [self._replicas[index] for index in indices]
        staying = [self._replicas[index] for index in self._present if index not in indices]
        if any(replica.is_isolating for replica in leaving):
            raise ScalingError(
                "a request that may have killed engines runs alone on a replica that is to leave; try again in seconds"
            )
        if any(replica.num_live for replica in leaving) and not any(replica.is_alive for replica in staying):
            raise ScalingError("none of the replicas that are to stay is up, and requests run; try again when one is")
        self._leaving = leaving
        for index in indices:
            self._tasks.pop(index).cancel()
        # Nothing is routed to any of them from here on.
        retired = [(index, self._replicas[index].retire()) for index in indices]
        given_up: list[JournalEntry] = []
        for index, (entries, ended) in retired:
            if ended:
                self._outputs.put_nowait(EngineCoreOutputs(ended, engine_index=index))
            given_up += entries
        self._begin_to_catch_up(given_up)
        num_moved = self._move(given_up)
        num_left = 1 + max(index for index, replica in enumerate(self._replicas) if not replica.is_retired)
        for index in indices:
            if index < num_left:
                self._router.replica_left(index)
        self._router.remove_replicas(num_left)
        self._replicas = self._replicas[:num_left]
        self._share_anew()
        self._count_moved(num_moved)
        logger.info("%d requests go on on the %d replicas that stay", num_moved.total(), len(staying))
        await asyncio.gather(*(replica.end() for replica in leaving))
        self._leaving = []

    def _move(self, entries: Sequence[JournalEntry]) -> Counter[int]:
        """Have others go on with what a replica has given up that leaves. Returns how much each of them has got."""
        num_moved = Counter[int]()
        for entry in entries:
            taker = self._route(entry.request, self._candidates(), entry.output_token_ids)
            self._replicas[taker].take_over(entry)
            num_moved[taker] += 1
        return num_moved

    def _count_moved(self, num_moved: Counter[int]) -> None:
        for index in self._known:
            self._on_recovery(IterationStats(engine_index=index, num_requests_moved=num_moved[index]), ())

    def _share_anew(self) -> None:
        """The replicas are others: an engine that is started again has its share of what there is for each of them."""
        self._make_ready()
        for index in self._local:
            self._replicas[index].restart_with(self._config.for_replica(index, len(self._local)))

    # -- calls and outputs ---------------------------------------------------------------------------------------------

    async def call_utility(self, call: UtilityCall) -> UtilityResult:
        """Have all engine cores do something; waits for those that are being started.

        A replica that is down has no prefix cache to reset. If one cannot fall asleep, all are woken up again.

        Raises:
            EngineError: a call failed.
            EngineUnavailableError: one does not stay alive.
        """
        replicas = [replica for replica in self._replicas if not replica.is_retired]
        if isinstance(call, ResetPrefixCache):
            replicas = [replica for replica in self._replicas if replica.is_alive] or replicas
        num_live = sum(replica.num_live for replica in replicas)
        if isinstance(call, Sleep):
            if num_live:
                raise EngineError(f"sleep: {num_live} requests are live; let them end or abort them")
            if self._busy is not None:
                raise EngineError(f"sleep: {self._busy}; try again when that is done")
            self._busy = "the engine is being put to sleep"
        try:
            calls = (replica.call_utility(call) for replica in replicas)
            results = await asyncio.gather(*calls, return_exceptions=True)
            errors = [result for result in results if isinstance(result, BaseException)]
            if errors:
                if isinstance(call, Sleep):
                    wakes = (replica.call_utility(WakeUp()) for replica in replicas)
                    await asyncio.gather(*wakes, return_exceptions=True)
                raise errors[0]
            return all(bool(result) for result in results)
        finally:
            if isinstance(call, Sleep):
                self._busy = None

    async def get_output(self) -> EngineCoreOutputs:
        """The next outputs of any replica; waits for them.

        Raises:
            EngineDeadError: it was shut down.
        """
        try:
            outputs = await self._outputs.get()
        except asyncio.CancelledError:  # the caller no longer waits
            for task in self._tasks.values():
                task.cancel()
            raise
        if isinstance(outputs, Exception):
            raise outputs
        return outputs

    async def _take_outputs(
        self, index: int, replica: SupervisedClient, first: "asyncio.Task[EngineCoreOutputs] | None"
    ) -> None:
        try:
            while True:
                outputs, first = await (first or replica.get_output()), None
                outputs.engine_index = index
                self._router.note_outputs(index, outputs)
                self._catch_up.note_outputs(outputs.outputs)
                if self._disaggregation is not None:
                    self._go_on(self._disaggregation.take_prefilled(outputs.outputs))
                self._outputs.put_nowait(outputs)
        except Exception as error:
            if not isinstance(error, EngineDeadError):
                logger.exception("the outputs of engine %d cannot be taken in any more", index)
            self._outputs.put_nowait(error)

    def shutdown(self) -> None:
        """End all engine cores, or the attempts to start them. Idempotent; may be called from any thread."""
        replicas = [*self._coming.close(), *self._replicas, *self._leaving]
        if replicas:
            with ThreadPoolExecutor(len(replicas), thread_name_prefix="end-of-replica") as pool:
                list(pool.map(lambda replica: replica.shutdown(), replicas))
