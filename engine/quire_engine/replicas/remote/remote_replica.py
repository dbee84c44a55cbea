"""RemoteReplica: a replica whose engines run on another host. RemoteLink: one session of such an engine.

It differs from a replica of this host in two ways: its next engine is not started here, but joins when its host has
one; and the front does not wait for the first, as it has to serve when another host is down.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

import msgspec

from quire_engine.config import EngineConfig
from quire_engine.core.journal import Journal
from quire_engine.errors import EngineDeadError, EngineError
from quire_engine.messages import (
    EngineCoreOutputs,
    EngineCoreReady,
    EngineCoreRequest,
    ReportPrefixCache,
    RequestType,
    UtilityCall,
    UtilityResult,
)
from quire_engine.replicas.link import Link
from quire_engine.replicas.remote.wire import Beat
from quire_engine.replicas.replica import Replica, ReplicaOwner
from quire_engine.replicas.restart_policy import Outage

HOLD_SECONDS = 30.0
"""How long requests that only this replica may get, since they may have killed engines, wait for its next engine."""
MISS_SECONDS = 600.0
"""How long a lost engine is expected back where the front does without it (`data_parallel_max_size`)."""


class RemoteLink(Link):
    """From the engine's joining to the end of its session; the listener notes what comes.

    Args:
        rank: which replica the engine is.
        host: where it runs, for operators.
        send: sends frames to it, or drops them if it is gone.
    """

    def __init__(self, rank: int, host: str, send: Callable[[Sequence[bytes]], None]) -> None:
        super().__init__()
        self.rank, self.host = rank, host
        self._send_frames = send
        self._inbox: deque[bytes] = deque()
        self._begun: Collection[int] = ()
        self._clock_offset: float | None = None
        self._num_messages_waiting = 0

    # -- what the listener notes ---------------------------------------------------------------------------------------

    def note_ready(self, ready: EngineCoreReady, pid: int) -> None:
        """The engine can take requests. Its processes are on another host, and are not supervised here."""
        self.pid = pid
        self.ready = msgspec.structs.replace(ready, worker_pids=[])

    def note_beat(self, beat: Beat) -> None:
        """The host is alive. The beat that took the least time gives the best estimate of its clock."""
        offset = beat.clock - time.monotonic()
        self._clock_offset = offset if self._clock_offset is None else max(self._clock_offset, offset)
        self._num_messages_waiting = beat.num_messages_waiting

    def note_output(self, payload: bytes) -> None:
        """Outputs have come."""
        if self._pending is not None and not self._pending.done():
            self._pending.set_result(payload)
        else:
            self._inbox.append(payload)

    def note_end(self, reason: str, begun: Collection[int] = (), *, has_left: bool = False) -> None:
        """The session has ended.

        Args:
            reason: why.
            begun: if the engine has died, the messages whose requests it had begun to compute. The end of a connection
                says nothing of any request.
            has_left: whether its host has taken it away.
        """
        self._begun, self.has_left = begun, has_left
        self.abandon(reason)

    # -- what it is to the replica -------------------------------------------------------------------------------------

    @property
    def num_messages_waiting(self) -> int:
        """As it was a second ago, at most."""
        return self._num_messages_waiting if self.is_alive else 0

    def add_request(self, request: EngineCoreRequest) -> int:
        arrived_at = request.arrived_at + (self._clock_offset or 0.0)
        request = msgspec.structs.replace(request, arrived_at=arrived_at)
        return super().add_request(request)

    def has_begun(self, message_number: int) -> bool:
        return message_number in self._begun

    async def get_output(self) -> EngineCoreOutputs:
        """Wait for the next message of the engine core.

        Raises:
            EngineDeadError: its session has ended, for example because its messages do not decode.
        """
        try:
            return await super().get_output()
        except msgspec.MsgspecError as error:
            reason = f"the engine on {self.host} says what its front does not understand: {error}"
            self.abandon(reason)
            raise EngineDeadError(reason) from None

    def _receive(self) -> "asyncio.Future[bytes]":
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        if self._inbox:
            future.set_result(self._inbox.popleft())
        return future

    def _send(self, request_type: RequestType, message_id: str, payload: bytes = b"") -> None:
        self._num_sent += 1
        if self.is_alive:
            self._send_frames((request_type.value, message_id.encode(), payload))


class RemoteReplica(Replica):
    """The engines that join as one rank, one after the other.

    It is present while an engine is there or expected: one that the front's `data_parallel_size` counts, and one that
    was lost. An engine that its host has taken away is not expected back, whatever its rank, nor is one that has never
    joined among those that the front does without.

    Args:
        config: all settings, which know the rank.
        owner: hears of outputs, deaths and recoveries; an engine that joins as the first is no restart.
    """

    is_remote = True

    def __init__(self, config: EngineConfig, owner: ReplicaOwner) -> None:
        rank = config.parallel.data_parallel_rank
        reason = f"no engine has joined as data-parallel rank {rank} yet"
        super().__init__(config, owner, Link(reason))
        self.what_follows = f"the next one that joins as data-parallel rank {rank} takes its place"
        self._joined: RemoteLink | None = None
        self._arrival = asyncio.Event()
        self._asking: asyncio.Task[None] | None = None
        self._is_counted = rank < config.parallel.data_parallel_size
        self.is_present = self._is_counted
        self._outage = Outage(reason, "it is not waited for")
        self.has_given_up = True

    def be_like(self, ready: EngineCoreReady) -> None:
        """Expect engines like those of this host."""
        self.ready = msgspec.structs.replace(ready, worker_pids=[], cpu_cache_bytes=0)
        self.journal = Journal(ready.max_model_len)

    def has_joined(self, link: RemoteLink) -> None:
        """An engine can take requests."""
        self._joined = link
        self._arrival.set()

    def has_left(self, link: RemoteLink) -> None:
        """An engine was taken away by its host. If it had requests, the wait for its outputs ends with an error."""
        if link is not self.link:
            self._do_without()

    def _do_without(self) -> None:
        """Expect no engine of this rank any more."""
        waits = self.journal.is_isolating and self.num_live > 0  # and no other replica may take these requests
        if self.is_present and not self.is_alive and not waits:
            self.is_present = False
            self._owner.on_down(self)

    async def call_utility(self, call: UtilityCall) -> UtilityResult:
        """As of `Replica`; but an absent engine has nothing to do. The next one sleeps if the others do.

        Raises:
            EngineError: the call failed.
            EngineDeadError: it died before it could answer.
        """
        if self._outage is None:
            return await super().call_utility(call)
        self._note_sleep(call)
        return True

    async def _next_engine(self, outage: Outage) -> None:
        loop = asyncio.get_running_loop()
        turns = [loop.call_later(HOLD_SECONDS, self._end_wait, outage)]
        if not self._is_counted:
            turns.append(loop.call_later(MISS_SECONDS, self._do_without))
        try:
            while self._joined is None or not self._joined.is_alive:
                self._arrival.clear()
                await self._arrival.wait()
        finally:
            for turn in turns:
                turn.cancel()
        self.link, self.is_present = self._joined, True
        if self._config.parallel.routes_by_prefix:
            self._asking = loop.create_task(self._ask_for_prefixes())
            await asyncio.sleep(0)  # the call is sent before its first request

    def _end_wait(self, outage: Outage) -> None:
        if not self.has_given_up:
            self._stop_waiting(outage)
        if self.link.has_left:  # it was expected for the sake of a request that had to run alone
            self._do_without()

    async def _ask_for_prefixes(self) -> None:
        """An engine that has served another front has more cached than it reports unasked."""
        with contextlib.suppress(EngineError):  # it is gone again
            await self.link.call_utility(ReportPrefixCache())
