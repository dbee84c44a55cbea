"""DataParallelClient: several engine cores behind one frontend. One that dies loses nothing, and holds nobody up.

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

With `disaggregation` the replicas have roles, and most requests go from one to another once: see there.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

import msgspec

from quire_engine.config import EngineConfig
from quire_engine.core.disaggregation import Disaggregation
from quire_engine.core.journal import JournalEntry
from quire_engine.core.router import Router
from quire_engine.core.supervised_client import OnRecovery, SupervisedClient
from quire_engine.errors import EngineDeadError, EngineError
from quire_engine.messages import (
    EngineCoreOutputs,
    EngineCoreReady,
    EngineCoreRequest,
    ResetPrefixCache,
    Sleep,
    UtilityCall,
    UtilityResult,
    WakeUp,
)
from quire_engine.stats import IterationStats

__all__ = ["DataParallelClient", "EngineClient", "make_engine_client"]

logger = logging.getLogger(__name__)


class EngineClient(Protocol):
    """One engine or several, as the frontend sees them; `SupervisedClient` has the meaning of each."""

    ready: EngineCoreReady

    @property
    def replicas(self) -> Sequence[SupervisedClient]: ...
    @property
    def is_alive(self) -> bool: ...
    @property
    def outage(self) -> str | None: ...
    def wait_until_ready(self) -> EngineCoreReady: ...
    def start(self) -> None: ...
    def add_request(self, request: EngineCoreRequest) -> None: ...
    def abort_request(self, request_id: str) -> bool: ...
    def engine_index(self, request_id: str) -> int: ...
    def is_held(self, request_id: str) -> bool: ...
    async def call_utility(self, call: UtilityCall) -> UtilityResult: ...
    async def get_output(self) -> EngineCoreOutputs: ...
    def shutdown(self) -> None: ...


def make_engine_client(config: EngineConfig, on_recovery: OnRecovery) -> EngineClient:
    """The client for `data_parallel_size` engines; one has nothing between it and the frontend."""
    if config.parallel.data_parallel_size == 1:
        return SupervisedClient(config, on_recovery)
    return DataParallelClient(config, on_recovery)


class DataParallelClient:
    """The same interface as `SupervisedClient`, over several of them.

    The constructor starts all engine cores and returns at once; `wait_until_ready` blocks. All else but `shutdown`
    belongs to one event loop.

    Args:
        config: all settings.
        on_recovery: called when an engine was started again or requests go on elsewhere, with what there is to count
            and the ids of these requests.
        make_replica: makes the client of one.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_recovery: OnRecovery = lambda stats, replayed_ids: None,
        make_replica: Callable[..., SupervisedClient] = SupervisedClient,
    ) -> None:
        self._config = config
        self._on_recovery = on_recovery
        self._replicas: list[SupervisedClient] = []
        self._outputs: asyncio.Queue[EngineCoreOutputs | Exception] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self.ready = EngineCoreReady()
        roles = config.parallel.disaggregation
        self._disaggregation = None if roles is None else Disaggregation(roles)
        self._router = Router(config.parallel.data_parallel_routing, config.parallel.data_parallel_size, 0)
        try:
            for index in range(config.parallel.data_parallel_size):
                on_up, on_down = partial(self._on_up, index), partial(self._on_down, index)
                self._replicas.append(make_replica(config.for_replica(index), on_up, on_down))
        except BaseException:
            self.shutdown()
            raise

    @property
    def replicas(self) -> Sequence[SupervisedClient]:
        """The clients of the engines, by their index."""
        return self._replicas

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
            else "; ".join(f"engine {index}: {replica.outage}" for index, replica in enumerate(self._replicas))
        )

    def wait_until_ready(self) -> EngineCoreReady:
        """Block until all engine cores can take requests.

        Raises:
            EngineDeadError: one could not start; the message is its own.
        """
        ready = [replica.wait_until_ready() for replica in self._replicas]
        self.ready = msgspec.structs.replace(
            ready[0],
            num_blocks=sum(one.num_blocks for one in ready),
            num_kv_cache_tokens=min(one.num_kv_cache_tokens for one in ready),
            worker_pids=[pid for one in ready for pid in one.worker_pids],
        )
        parallel, cache = self._config.parallel, self._config.cache
        block_size = self.ready.block_size if cache.enable_prefix_caching else 0
        self._router = Router(parallel.data_parallel_routing, parallel.data_parallel_size, block_size)
        return self.ready

    def start(self) -> None:
        """Begin to watch the engine cores and to take their outputs, in the running event loop."""
        loop = asyncio.get_running_loop()
        for index, replica in enumerate(self._replicas):
            replica.start()
            self._tasks.append(loop.create_task(self._take_outputs(index, replica), name=f"engine-outputs-{index}"))

    # -- requests ------------------------------------------------------------------------------------------------------

    def add_request(self, request: EngineCoreRequest) -> None:
        """Hand a request over to a replica. Never blocks.

        Raises:
            EngineDeadError: no engine is up, and `replay_on_crash` is off.
            EngineUnavailableError: no engine is up, and engines do not stay alive.
        """
        if self._disaggregation is not None:
            request = self._disaggregation.add(request, self.ready)
        index = self._route(request, self._candidates())
        try:
            self._replicas[index].add_request(request)
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
        waiting = [index for index, replica in enumerate(self._replicas) if not replica.has_given_up]
        return moving or serving or alive or waiting or list(range(len(self._replicas)))

    # -- engines that die, and come back -------------------------------------------------------------------------------

    def _on_down(self, index: int) -> None:
        """Requests wait for a replica, or are about to end with it."""
        self._router.replica_died(index)
        self._hand_over(index)

    def _on_up(self, index: int, stats: IterationStats, replayed_ids: Sequence[str]) -> None:
        """A replica is up again: it takes what waits for others."""
        stats.engine_index = index
        self._on_recovery(stats, replayed_ids)
        for source, replica in enumerate(self._replicas):
            if source != index and (not replica.is_alive or replica.is_isolating):
                self._hand_over(source)

    def _hand_over(self, source: int) -> None:
        """Have other replicas go on with what waits for this one, if there are any that can."""
        candidates = self._candidates()
        if source in candidates:
            return
        moved: dict[int, list[str]] = {}
        for entry in self._replicas[source].give_up():
            index = self._route(entry.request, candidates, entry.output_token_ids)
            self._replicas[index].take_over(entry)
            if self._replicas[index].is_alive:
                moved.setdefault(index, []).append(entry.request.request_id)
        for index, request_ids in moved.items():
            self._on_recovery(IterationStats(engine_index=index), request_ids)

    # -- calls and outputs ---------------------------------------------------------------------------------------------

    async def call_utility(self, call: UtilityCall) -> UtilityResult:
        """Have all engine cores do something; waits for those that are being started.

        A replica that is down has no prefix cache to reset. If one cannot fall asleep, all are woken up again.

        Raises:
            EngineError: one could not do what it was told to.
            EngineUnavailableError: one does not stay alive.
        """
        replicas = self._replicas
        if isinstance(call, ResetPrefixCache):
            replicas = [replica for replica in self._replicas if replica.is_alive] or replicas
        num_live = sum(replica.num_live for replica in replicas)
        if isinstance(call, Sleep) and num_live:
            raise EngineError(f"sleep: {num_live} requests are live; let them end or abort them")
        results = await asyncio.gather(*(replica.call_utility(call) for replica in replicas), return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            if isinstance(call, Sleep):
                await asyncio.gather(*(replica.call_utility(WakeUp()) for replica in replicas), return_exceptions=True)
            raise errors[0]
        return all(bool(result) for result in results)

    async def get_output(self) -> EngineCoreOutputs:
        """The next outputs of any replica; waits for them.

        Raises:
            EngineDeadError: it was shut down.
        """
        try:
            outputs = await self._outputs.get()
        except asyncio.CancelledError:  # nobody listens any more
            for task in self._tasks:
                task.cancel()
            raise
        if isinstance(outputs, Exception):
            raise outputs
        return outputs

    async def _take_outputs(self, index: int, replica: SupervisedClient) -> None:
        try:
            while True:
                outputs = await replica.get_output()
                outputs.engine_index = index
                self._router.note_outputs(index, outputs)
                if self._disaggregation is not None:
                    self._go_on(self._disaggregation.take_prefilled(outputs.outputs))
                self._outputs.put_nowait(outputs)
        except Exception as error:
            if not isinstance(error, EngineDeadError):
                logger.exception("the outputs of engine %d cannot be taken in any more", index)
            self._outputs.put_nowait(error)

    def shutdown(self) -> None:
        """End all engine cores, or the attempts to start them. Idempotent; may be called from any thread."""
        if self._replicas:
            with ThreadPoolExecutor(len(self._replicas), thread_name_prefix="end-of-replica") as pool:
                list(pool.map(lambda replica: replica.shutdown(), self._replicas))
