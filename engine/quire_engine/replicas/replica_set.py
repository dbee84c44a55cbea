"""ReplicaSet: the engines behind one frontend, one as well as many. The death of one loses no request.

::

    AsyncLLM ─► ReplicaSet ─┬─ Router: what each replica has to do and has cached
                            ├─ LocalReplica 0 ─► engine core 0
                            ├─ LocalReplica 1 ─► engine core 1 …
                            └─ RemoteReplica 2 ─► engine core 2 of another host …

1. A new request goes to the replica that the router chooses among those that are up. A replica that has sent nothing
   for a while, or runs a suspect alone, gets none unless all are like that.
2. When an engine dies, its replica starts the next one. Its live requests do not wait for that: the other replicas
   continue them from the journal, with the next token, and the same tokens.
3. Suspects (`Journal`) do wait, and run alone where they are: a request that kills engines has killed two by then, and
   kills no third.
4. While no replica is up, requests wait, and the first that is up again takes them all. Where one does not stay up,
   they wait for another; where none does, they end.
5. Replicas come and go: those of this host by `scale`, the last of them first, and those of other hosts by themselves.
   New ones get requests once they are ready. The requests of a replica that leaves continue on the others as after a
   death, but none is a suspect. Each replica has a place in the list, its rank, which is kept while it is away.
6. Engines that share the experts of a model (`lockstep`) depend on each other: requests wait until all are up, and
   where one does not stay up, all requests end.

A single replica costs no routing. With `disaggregation` the replicas have roles, and most requests go from one to
another once.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from quire_engine.config import EngineConfig
from quire_engine.core.journal import JournalEntry
from quire_engine.errors import EngineDeadError, OperationError, ScalingError
from quire_engine.messages import EngineCoreOutputs, EngineCoreReady, EngineCoreRequest, ReportPrefixCache
from quire_engine.replicas.disaggregation import Disaggregation
from quire_engine.replicas.engine_calls import EngineCalls
from quire_engine.replicas.link import LocalLink
from quire_engine.replicas.local_replica import LocalReplica
from quire_engine.replicas.lockstep import LockstepOwner
from quire_engine.replicas.replica import Replica
from quire_engine.replicas.router import Router
from quire_engine.stats import IterationStats
from quire_engine.system.memory import available_memory_bytes
from quire_engine.timeline import Timeline

if TYPE_CHECKING:
    from quire_engine.replicas.remote.listener import Listener
    from quire_engine.replicas.remote.remote_replica import RemoteReplica

logger = logging.getLogger(__name__)

OnRecovery = Callable[[IterationStats, Sequence[str]], None]


class ReplicaSet:
    """All replicas of a model.

    The constructor starts the engine cores of this host and returns at once; `wait_until_ready` blocks. All else but
    `shutdown` belongs to one event loop.

    Args:
        config: all settings.
        on_outputs: called with the outputs of an engine, and with ends of requests that no engine reports.
        on_recovery: called when an engine was started again or requests continue elsewhere, with what is to be counted
            and the ids of these requests; requests of an engine that left are counted alone.
        on_failure: called when no more outputs will come from one of them.

    Raises:
        ValueError: it cannot listen for engines of other hosts as the settings say.
        OSError: the checkpoint cannot be read, or no process can be started.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_outputs: Callable[[EngineCoreOutputs], None],
        on_recovery: OnRecovery,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.config = config
        """All settings, with the present weights."""
        self._on_outputs, self._on_recovery, self._on_failure = on_outputs, on_recovery, on_failure
        self.on_change: Callable[[], None] = lambda: None
        """Called when others of the replicas are present than before, other than by `scale`."""
        self.ready = EngineCoreReady()
        """What each of them can serve."""
        self.replicas: list[Replica] = []
        """By rank; not all of them are present."""
        self._own: list[LocalReplica] = []
        """Those of this host, by number."""
        self._remote: dict[int, RemoteReplica] = {}
        self._coming: list[LocalReplica] = []
        self._leaving: list[LocalReplica] = []
        self._is_closed = False
        self.calls = EngineCalls(self.replicas, config.frontend.wake_on_request)
        self._scaling: asyncio.Task[None] | None = None
        self._asking: asyncio.Future[Any] | None = None
        self._known: list[int] = []
        parallel = config.parallel
        self._disaggregation = None if parallel.disaggregation is None else Disaggregation(parallel.disaggregation)
        self._lockstep = LockstepOwner(parallel) if parallel.is_lockstep else None
        self._listener: Listener | None = None
        try:
            self._make_replicas()
        except BaseException:
            self.shutdown()
            raise

    def _make_replicas(self) -> None:
        parallel = self.config.parallel
        if parallel.has_remote_replicas:
            from quire_engine.replicas.remote.listener import Listener
            from quire_engine.replicas.remote.remote_replica import RemoteReplica

            self._listener = Listener(
                self.config,
                lambda link: self._remote[link.rank].has_joined(link),
                lambda link: self._remote[link.rank].has_left(link),
            )
            self._remote = {rank: RemoteReplica(self.config.for_replica(rank), self) for rank in parallel.remote_ranks}
        make_link = None if self._lockstep is None else partial(LocalLink, lockstep=self._lockstep)
        for rank in range(parallel.num_ranks):
            if rank in self._remote:
                self.replicas.append(self._remote[rank])
                continue
            own = LocalReplica(self.config.for_replica(rank), self, make_link=make_link)
            self._own.append(own)
            self.replicas.append(own)
            own.launch()

    def wait_until_ready(self) -> EngineCoreReady:
        """Block until all engine cores of this host can take requests.

        Raises:
            EngineDeadError: one could not start; the message is its own.
        """
        for own in self._own:
            own.wait_until_ready()
        for remote in self._remote.values():
            remote.be_like(self._own[0].ready)
        self._note_present()
        self._router = self._make_router()
        return self.ready

    def start(self) -> None:
        """Begin to watch the engine cores and to take their outputs, in the running event loop."""
        if self._listener is not None:
            self._listener.start(self._own[0].ready)
        for replica in self.replicas:
            replica.start()

    def stop(self, reason: str) -> None:
        """Take no more outputs, in the event loop: all that wait for an engine raise an EngineDeadError."""
        self.calls.stop()
        for replica in self.replicas:
            replica.stop(reason)

    def shutdown(self) -> None:
        """End all engine cores, or the attempts to start them. Idempotent; may be called from any thread."""
        self._is_closed = True
        if self._lockstep is not None:
            self._lockstep.end_generation()  # engines that wait for another one in a step end, too
        replicas = [*self._coming, *self._own, *self._leaving]
        if replicas:
            with ThreadPoolExecutor(len(replicas), thread_name_prefix="end-of-replica") as pool:
                list(pool.map(LocalReplica.shutdown, replicas))
        if self._listener is not None:
            self._listener.close()
        if self._lockstep is not None:
            self._lockstep.close()

    # -- what they are -------------------------------------------------------------------------------------------------

    @property
    def _present(self) -> list[int]:
        return [rank for rank, replica in enumerate(self.replicas) if replica.is_present]

    @property
    def is_alive(self) -> bool:
        """Whether requests are served: by any replica, or by all where each has experts that the others need."""
        return (any if self._lockstep is None else all)(replica.is_alive for replica in self.replicas)

    @property
    def outage(self) -> str | None:
        """Why no requests are served; None while they are."""
        if self.is_alive:
            return None
        if len(self.replicas) == 1:
            return self.replicas[0].outage
        down = [rank for rank in self._present if not self.replicas[rank].is_alive]
        return "; ".join(f"engine {rank}: {self.replicas[rank].outage}" for rank in down)

    def _note_present(self) -> None:
        self._known = self._present
        ready = [self.replicas[rank].ready for rank in self._known]
        self.ready = msgspec.structs.replace(
            ready[0],
            num_blocks=sum(one.num_blocks for one in ready),
            num_kv_cache_tokens=min(one.num_kv_cache_tokens for one in ready),
            worker_pids=[pid for one in ready for pid in one.worker_pids],
        )

    def _make_router(self) -> Router:
        block_size = self.ready.block_size if self.config.cache.enable_prefix_caching else 0
        return Router(self.config.parallel.data_parallel_routing, len(self.replicas), block_size)

    # -- requests ------------------------------------------------------------------------------------------------------

    def add_request(self, request: EngineCoreRequest, timeline: Timeline | None = None) -> None:
        """Send a request to a replica. Never blocks.

        Args:
            request: the request.
            timeline: its phases are written there from here on.

        Raises:
            EngineDeadError: no engine is up, and `replay_on_crash` is off.
            EngineUnavailableError: no engine is up, and engines do not stay alive.
            EngineSleepingError: the engines sleep, and `wake_on_request` is off.
        """
        self.calls.check_awake()
        if self._disaggregation is not None:
            up = [rank for rank, replica in enumerate(self.replicas) if replica.is_alive]
            request = self._disaggregation.add(request, self.ready, up, timeline)
        rank = self._route(request, self._candidates()) if len(self.replicas) > 1 else 0
        try:
            self.replicas[rank].add_request(request, timeline)
        except BaseException:
            self._forget(request.request_id)
            raise

    def abort_request(self, request_id: str) -> bool:
        """End a request wherever it is. Never blocks. Returns whether an engine core has it and will report its end."""
        replica = self.replicas[self.engine_index(request_id)]
        self._forget(request_id)
        return replica.abort_request(request_id)

    def engine_index(self, request_id: str) -> int:
        """Which replica has a live request, or is to have it; 0 for one that is unknown."""
        return self._router.replica_of(request_id) or 0

    def is_held(self, request_id: str) -> bool:
        """Whether no engine has this live request, because none is up or another request has it to itself."""
        return self.replicas[self.engine_index(request_id)].journal.is_held(request_id)

    def _forget(self, request_id: str) -> None:
        if self._disaggregation is not None:
            self._disaggregation.remove(request_id)
        self._router.remove(request_id)

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
            adapter=None if request.options.adapter is None else request.options.adapter.digest,
        )

    def _candidates(self) -> list[int]:
        """The replicas that may get a request: only the best kind that there is."""
        if self._lockstep is not None:  # one that does not stay up holds up all: it rejects the request
            failing = [rank for rank, replica in enumerate(self.replicas) if replica.has_given_up]
            if failing:
                return failing
        alive = [rank for rank, replica in enumerate(self.replicas) if replica.is_alive]
        serving = [rank for rank in alive if not self.replicas[rank].is_isolating]
        moving = [rank for rank in serving if not self._router.is_stalled(rank)]
        waiting = [rank for rank in self._present if not self.replicas[rank].has_given_up]
        return moving or serving or alive or waiting or self._present

    def _move(self, entries: Sequence[JournalEntry], candidates: Sequence[int] | None = None) -> dict[int, list[str]]:
        """Move requests to other replicas. Returns the ids of the moved requests by rank."""
        moved: dict[int, list[str]] = {}
        for entry in entries:
            rank = self._route(entry.request, candidates or self._candidates(), entry.output_token_ids)
            self.replicas[rank].take_over(entry)
            moved.setdefault(rank, []).append(entry.request.request_id)
        return moved

    # -- what replicas report ------------------------------------------------------------------------------------------

    def on_outputs(self, replica: Replica, outputs: EngineCoreOutputs) -> None:
        """Pass on what an engine sends, but for the ends of requests that another one continues."""
        outputs.engine_index = replica.rank
        if len(self.replicas) > 1:
            self._router.note_outputs(replica.rank, outputs)
            if self._disaggregation is not None:
                self._move(self._disaggregation.take_prefilled(outputs.outputs))
        self._on_outputs(outputs)

    def on_failure(self, replica: Replica, error: BaseException) -> None:
        """No outputs come any more from a replica."""
        if not isinstance(error, EngineDeadError):
            logger.error("the outputs of engine %d cannot be taken in any more", replica.rank, exc_info=error)
        self._on_failure(error)

    def on_down(self, replica: Replica) -> None:
        """Requests wait for a replica, or are about to end with it."""
        if self._lockstep is not None and (error := replica.unavailable) is not None:
            for other in self.replicas:
                if not other.has_given_up:
                    other.end_all(error)
        self._router.replica_died(replica.rank)
        if replica.is_present:
            self._hand_over(replica)
            return
        moved = self._move(replica.journal.give_up_all())  # its host has taken it away
        self._note_change()
        self._count_moved(moved)

    def on_up(self, replica: Replica, stats: IterationStats, replayed_ids: Sequence[str]) -> None:
        """A replica is up again, or for the first time: it takes what waits for others."""
        self._note_change()
        stats.engine_index = replica.rank
        self._on_recovery(stats, replayed_ids)
        self._take_what_waits(replica)

    def _take_what_waits(self, replica: Replica) -> None:
        for source in self.replicas:
            if source is not replica and (not source.is_alive or source.is_isolating):
                self._hand_over(source)

    def _hand_over(self, source: Replica) -> None:
        """Move the requests that wait for this replica to others that can serve them."""
        candidates = self._candidates()
        if source.rank in candidates:
            return
        for rank, request_ids in self._move(source.journal.give_up(), candidates).items():
            if self.replicas[rank].is_alive:
                self._on_recovery(IterationStats(engine_index=rank), request_ids)

    def _count_moved(self, moved: dict[int, list[str]]) -> None:
        for rank in self._known:
            self._on_recovery(IterationStats(engine_index=rank, num_requests_moved=len(moved.get(rank, ()))), ())

    def _note_change(self) -> None:
        if self._known != self._present:
            self._note_present()
            self.on_change()

    # -- replicas that come, and leave ---------------------------------------------------------------------------------

    async def scale(self, num_replicas: int) -> None:
        """Change the number of replicas on this host. Present replicas keep their cache and serve meanwhile.

        The change is completed even if its caller is cancelled. If it raises, nothing has changed.

        Raises:
            ScalingError: there cannot be so many, or not now; or a new one did not start.
        """
        if self.calls.busy is not None:
            raise ScalingError(f"{self.calls.busy}; try again when that is done")
        present = len(self._own)
        if num_replicas == present:
            return
        self._require_awake("the engine sleeps; wake it up first")
        self.calls.busy = f"the replicas are being changed from {present} to {num_replicas}"
        change = self._add_replicas if num_replicas > present else self._remove_replicas
        self._scaling = asyncio.get_running_loop().create_task(change(num_replicas), name="scale")
        self._scaling.add_done_callback(self._on_scaled)
        await asyncio.shield(self._scaling)

    def _require_awake(self, message: str) -> None:
        if any(replica.is_asleep for replica in self.replicas):
            raise ScalingError(message)

    def _on_scaled(self, scaling: "asyncio.Task[None]") -> None:
        self.calls.busy = None
        if not scaling.cancelled() and (error := scaling.exception()) is not None:
            logger.error("the replicas stay %d: %s", len(self._own), error)

    async def _add_replicas(self, num_replicas: int) -> None:
        num_blocks = min(own.ready.num_blocks for own in self._own)
        ranks = [self.config.parallel.local_rank(number) for number in range(len(self._own), num_replicas)]
        _require_room(self._own, len(ranks))
        try:
            self._coming = new = [
                LocalReplica(self.config.for_replica(rank, num_replicas), self, num_blocks) for rank in ranks
            ]
            if self._is_closed:  # a `shutdown` in another thread has not found them
                raise ScalingError("the engine was shut down")
            results = await asyncio.gather(
                *(asyncio.to_thread(one.wait_until_ready) for one in new), return_exceptions=True
            )
            if errors := [result for result in results if isinstance(result, BaseException)]:
                raise errors[0]
            self._require_awake("the engine was put to sleep meanwhile; wake it up first")
            for one in new:
                one.start()
        except Exception as error:
            for one in self._coming:
                one.retire()
            await asyncio.gather(*(asyncio.to_thread(one.shutdown) for one in self._coming))
            self._coming = []
            if isinstance(error, ScalingError):
                raise
            raise ScalingError(f"there cannot be {num_replicas} replicas: {error}") from error
        before, was_alone = self._own, len(self.replicas) == 1
        for one in new:
            self.replicas[one.rank : one.rank + 1] = [one]
        self._own = [*before, *new]
        self._coming = []  # not before: a `shutdown` in another thread has to find them
        self._share_anew()
        self._router.resize(len(self.replicas))
        if was_alone:  # nothing was routed
            for entry in before[0].journal.entries:
                self._route(entry.request, [0], entry.output_token_ids)
        if self.config.for_replica(0, num_replicas).parallel.routes_by_prefix:
            # An engine that was alone at its start does not report what it has cached; the next one does.
            calls = (own.call_utility(ReportPrefixCache()) for own in before)
            self._asking = asyncio.gather(*calls, return_exceptions=True)
        for one in new:
            self._take_what_waits(one)

    async def _remove_replicas(self, num_replicas: int) -> None:
        leaving = self._own[num_replicas:]
        staying = [replica for replica in self.replicas if replica.is_present and replica not in leaving]
        if any(replica.is_isolating for replica in leaving):
            raise ScalingError(
                "a request that may have killed engines runs alone on a replica that is to leave; try again in seconds"
            )
        if any(replica.num_live for replica in leaving) and not any(replica.is_alive for replica in staying):
            raise ScalingError("none of the replicas that are to stay is up, and requests run; try again when one is")
        self._leaving, self._own = leaving, self._own[:num_replicas]
        given_up = [entry for replica in leaving for entry in replica.retire()]  # nothing is routed to them any more
        moved = self._move(given_up)
        for replica in leaving:
            self._router.replica_left(replica.rank)
        while not (self.replicas[-1].is_present or self.replicas[-1].is_remote):
            self.replicas.pop()
        self._share_anew()
        self._router.resize(len(self.replicas))
        if len(self.replicas) == 1:  # nothing is routed from here on
            self._router = self._make_router()
        self._count_moved(moved)
        logger.info("%d requests go on on the %d replicas that stay", len(given_up), len(staying))
        await asyncio.gather(*(replica.end() for replica in leaving))
        self._leaving = []

    def _share_anew(self) -> None:
        """Divide the machine among the present replicas. An engine takes its new share at its next start."""
        self._note_present()
        for own in self._own:
            own.restart_with(self.config.for_replica(own.rank, len(self._own)))

    async def update_weights(self, config: EngineConfig) -> None:
        """Have all engines compute with the weights of another folder, or none; see `EngineCalls.update_weights`.

        Args:
            config: the present settings, but for the folder.

        Raises:
            OperationError: not for these settings, or not now.
            EngineError: an engine cannot load them. The present ones are used.
        """
        if self.config.parallel.has_remote_replicas or self._lockstep is not None:
            which = "of other hosts" if self._lockstep is None else "that share experts (enable_expert_parallel)"
            raise OperationError(
                f"update_weights: this model has replicas {which}, whose weights are loaded at their start alone; "
                "change model in model.json, and load the model again"
            )

        def accept() -> None:
            self.config = config
            self._share_anew()

        await self.calls.update_weights(config.model.model, accept)


def _require_room(replicas: Sequence[LocalReplica], num_new: int) -> None:
    """Make sure that the machine's memory holds more replicas like these.

    What theirs may still take is not free: a KV cache on the CPU takes its pages only as it uses them. Raises
    ScalingError if it does not."""
    cache_bytes = min(replica.ready.cpu_cache_bytes for replica in replicas)
    one = cache_bytes + max(replica.bytes_at_start for replica in replicas)
    left = available_memory_bytes() - sum(replica.unused_cache_bytes for replica in replicas)
    if num_new * one > left:
        raise ScalingError(
            f"there is no memory for {len(replicas) + num_new} replicas: another one takes about {one >> 20} MiB, "
            f"{cache_bytes >> 20} of them for a KV cache as large as that of the others, and {max(left, 0) >> 20} MiB "
            "are free beside what the caches of those may still take; end what else runs here, or lower "
            "kv_cache_memory_bytes in model.json and load the model again"
        )
