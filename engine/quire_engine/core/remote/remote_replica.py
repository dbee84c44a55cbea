"""RemoteReplica: a replica whose engines run on another host. RemoteReplicas: those of a front, and their listener.

It is supervised as those of this host are, with two differences: its next engine is not started here, but joins when
its host has one; and the front does not wait for the first, as it has to serve when another host is down.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from quire_engine.config import EngineConfig
from quire_engine.core.journal import Journal
from quire_engine.core.remote.listener import Listener
from quire_engine.core.remote.remote_connection import RemoteConnection
from quire_engine.core.restart_policy import Outage
from quire_engine.core.supervised_client import OnRecovery, SupervisedClient
from quire_engine.errors import EngineError
from quire_engine.messages import (
    EngineCoreReady,
    IsSleeping,
    ReportPrefixCache,
    Sleep,
    UtilityCall,
    UtilityResult,
    WakeUp,
)
from quire_engine.stats import IterationStats

logger = logging.getLogger(__name__)

HOLD_SECONDS = 30.0
"""How long requests that only this replica may get, since they may have killed engines, wait for its next engine."""
MISS_SECONDS = 600.0
"""How long an engine is missed that was lost, where the front does without (`data_parallel_max_size`)."""


class RemoteReplicas:
    """Makes the replicas of a front: the first are on this host, and the others join at a listener.

    Args:
        config: all settings.

    Raises:
        ValueError: it cannot listen as the settings say.
        OSError: the checkpoint cannot be read.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._ranks = config.parallel.remote_ranks
        self._listener = Listener(
            config,
            lambda connection: self._remote[connection.rank].has_joined(connection),
            lambda connection: self._remote[connection.rank].has_left(connection),
        )
        self._local: SupervisedClient | None = None
        self._remote: dict[int, RemoteReplica] = {}

    def make(
        self, config: EngineConfig, on_recovery: OnRecovery, on_down: Callable[[], None], num_blocks: int | None = None
    ) -> SupervisedClient:
        """One of them, by its settings; the first of this host comes first."""
        try:
            rank = config.parallel.data_parallel_rank
            if rank not in self._ranks:
                replica = SupervisedClient(config, on_recovery, on_down, num_blocks)
                self._local = self._local or replica
                return replica
            assert self._local is not None
            self._remote[rank] = RemoteReplica(config, on_recovery, on_down, self._listener, self._local)
            return self._remote[rank]
        except BaseException:
            if not self._remote:  # else these close it when they end, and go on without the one that fails
                self._listener.close()
            raise


class RemoteReplica(SupervisedClient):
    """The same interface, over the engines that join as one rank, one after the other.

    It is present while an engine is there, or is missed: one that the front's `data_parallel_size` counts, and one that
    was lost. One that its host has taken away is not missed, whatever its rank, nor is one that never came of those
    that the front does without.

    Args:
        config: all settings, which know the rank.
        on_recovery: as of `SupervisedClient`; an engine that joins as the first is no restart.
        on_down: as there.
        listener: where they join.
        local: a replica of this host, which they have to be like.
    """

    is_remote = True

    def __init__(
        self,
        config: EngineConfig,
        on_recovery: OnRecovery,
        on_down: Callable[[], None],
        listener: Listener,
        local: SupervisedClient,
    ) -> None:
        self._rank = config.parallel.data_parallel_rank
        self._what_follows = f"the next one that joins as data-parallel rank {self._rank} takes its place"
        self._is_up = f"an engine has joined as data-parallel rank {self._rank}"
        reason = f"no engine has joined as data-parallel rank {self._rank} yet"
        self._connection = RemoteConnection.absent(self._rank, reason)
        super().__init__(config, on_recovery, on_down, client=self._connection)
        self._listener = listener
        self._local = local
        self._arrival = asyncio.Event()
        self._has_served = False
        self._is_expected = self._rank < config.parallel.data_parallel_size
        self._is_missed = self._is_expected
        self._outage = Outage(reason, "it is not waited for")
        self._gave_up_waiting.set()

    @property
    def is_present(self) -> bool:
        return self._is_missed

    @property
    def host(self) -> str:
        """Where its engine runs, or the last one did."""
        return self._connection.host

    def wait_until_ready(self) -> EngineCoreReady:
        """What an engine that joins has to be. Waits for none."""
        self.ready = msgspec.structs.replace(self._local.ready, worker_pids=[], cpu_cache_bytes=0)
        self._journal = Journal(self.ready.max_model_len)
        return self.ready

    def start(self) -> None:
        """Let engines join, in the running event loop."""
        assert self._outage is not None
        self._listener.start(self.ready)
        self._wait_for_engine(self._outage)

    def has_joined(self, connection: RemoteConnection) -> None:
        """An engine can take requests."""
        self._connection = connection
        self._arrival.set()

    def has_left(self, connection: RemoteConnection) -> None:
        """An engine was taken away by its host. If it had requests, the wait for its outputs ends with an error."""
        if connection is not self._client:
            self._do_without()

    def _do_without(self) -> None:
        """Stop waiting for an engine of this rank."""
        waits = self._journal.is_isolating and self.num_live > 0  # and no other replica may take what does
        if self._is_missed and not self.is_alive and not waits:
            self._is_missed = False
            self._on_down()

    @property
    def _was_taken_away(self) -> bool:
        """Whether the last one was."""
        return isinstance(self._client, RemoteConnection) and self._client.has_left

    def _handle_death(self, reason: str) -> None:
        if not self._was_taken_away or self._journal.is_isolating:
            super()._handle_death(reason)
            return
        logger.info("%s; %d requests go on elsewhere", reason, self.num_live)
        self._is_missed = self._has_served = False
        self._outage = Outage(reason, self._what_follows)
        self._gave_up_waiting.set()
        self._on_down()
        self._wait_for_engine(self._outage)

    def _wait_for_engine(self, outage: Outage) -> None:
        self._restart = asyncio.get_running_loop().create_task(
            self._start_again(outage, ()), name=f"remote-engine-{self._rank}"
        )

    async def call_utility(self, call: UtilityCall) -> UtilityResult:
        """As of `SupervisedClient`; but an engine that is not there has nothing to do. If there is one again, it sleeps
        if the others do.

        Raises:
            EngineError: the call failed.
            EngineDeadError: it died before it could answer.
        """
        if self._restart is None:
            return await super().call_utility(call)
        match call:
            case Sleep(level=level):
                self._sleep_level = max(self._sleep_level, level)
            case WakeUp():
                self._sleep_level = 0
            case IsSleeping():
                return self.is_asleep
        return True

    def shutdown(self) -> None:
        """Let no engine join any more; those that have find that their front is gone."""
        super().shutdown()
        if self._restart is not None:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                self._restart.get_loop().call_soon_threadsafe(self._restart.cancel)
        self._listener.close()

    async def _start_again(self, outage: Outage, replayed_ids: Sequence[str]) -> None:
        """Wait for an engine."""
        began_at, loop = time.monotonic(), asyncio.get_running_loop()
        turns = [loop.call_later(HOLD_SECONDS, self._give_up, outage)]
        if not self._is_expected:
            turns.append(loop.call_later(MISS_SECONDS, self._do_without))
        try:
            while not self._connection.is_alive:
                self._arrival.clear()
                await self._arrival.wait()
        finally:
            for turn in turns:
                turn.cancel()
        self._client, self._is_missed = self._connection, True
        self._policy.engine_is_ready()
        if self._config.parallel.routes_by_prefix:
            self._asking = loop.create_task(self._ask_for_prefixes())
            await asyncio.sleep(0)  # the call is sent before its first request
        stats = IterationStats(num_engine_restarts=int(self._has_served))
        self._has_served = True
        await self._go_on(replayed_ids, began_at, stats)

    def _give_up(self, outage: Outage) -> None:
        if not self._gave_up_waiting.is_set():
            self._stop_waiting(outage)
        if self._was_taken_away:  # and was missed for the sake of a request that had to run alone
            self._do_without()

    async def _ask_for_prefixes(self) -> None:
        """An engine that has served another front has more cached than it will tell unasked."""
        try:
            await self._client.call_utility(ReportPrefixCache())
        except EngineError:
            return  # it is gone again
