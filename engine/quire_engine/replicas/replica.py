"""Replica: one place for an engine, which loses no request when the engine in it dies.

::

    ReplicaSet ─► Replica ─┬─ Journal: every live request, with its tokens so far
                           ├─ RestartPolicy: when the next engine is started, and how long requests are held
                           └─ Link ─► engine core;  dead or hung? ─► the next Link

1. The engine core dies, hangs, or loses a worker: `get_output` of the link raises, and all its processes are dead.
2. The journal has the live requests. The faulty one, if any, ends with an error (all, without `replay_on_crash`).
3. The next engine is started in a thread, or joins; requests that come meanwhile are held.
4. The journal's requests are sent to it with their tokens so far as output, and continue with the next token. Nothing
   is sent twice: a token counts as sent when it was passed to the owner, and what the dead engine had sampled beyond
   that is sampled again, the same (sampling depends on seed and position alone).
5. While engines die one after the other without doing any work, no request waits for ever: live ones end with the error
   that new ones are rejected with. The next engine is started all the same, until one stays up: the cause (a file that
   was moved, no descriptors, no memory) is often removed from outside.

What waits for one replica may continue on another instead: the owner is notified (`on_down`), and moves it from one
(`give_up`) to the other (`take_over`). A replica that is removed gives up all its requests (`retire`), and ends
(`end`).
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Protocol

from quire_engine.config import EngineConfig
from quire_engine.core.journal import Journal, JournalEntry
from quire_engine.errors import EngineDeadError, EngineError, EngineUnavailableError
from quire_engine.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReady,
    EngineCoreRequest,
    ErrorCode,
    FinishReason,
    Sleep,
    TakeSnapshot,
    UtilityCall,
    UtilityResult,
    WakeUp,
)
from quire_engine.replicas.link import Link
from quire_engine.replicas.restart_policy import Outage, RestartPolicy
from quire_engine.snapshot import EngineCoreSnapshot
from quire_engine.stats import IterationStats
from quire_engine.timeline import Timeline

logger = logging.getLogger(__name__)

SNAPSHOT_SECONDS = 2.0
REMOVED = "the engine was removed"


class ReplicaOwner(Protocol):
    """What a replica reports to, in its event loop."""

    def on_outputs(self, replica: "Replica", outputs: EngineCoreOutputs) -> None:
        """Outputs have come, or requests have ended whose end no engine reports."""

    def on_down(self, replica: "Replica") -> None:
        """Requests begin to wait for the next engine, or are about to end because there may be none."""

    def on_up(self, replica: "Replica", stats: IterationStats, replayed_ids: Sequence[str]) -> None:
        """The next engine takes requests; with what is to be counted, and the requests that are replayed."""

    def on_failure(self, replica: "Replica", error: BaseException) -> None:
        """No outputs will come any more."""


class Replica(ABC):
    """Any number of engines, one after the other. Belongs to one event loop.

    Args:
        config: all settings, which know the rank.
        owner: hears of outputs, deaths and recoveries.
        link: to what is there at first.
    """

    is_remote = False
    """Whether its engines run on another host."""
    what_follows: str
    """What follows a death, for messages."""

    def __init__(self, config: EngineConfig, owner: ReplicaOwner, link: Link) -> None:
        self.rank = config.parallel.data_parallel_rank
        self.link = link
        """To the present engine, or the last one."""
        self.ready = EngineCoreReady()
        self.num_restarts = 0
        self.is_present = True
        """Whether it counts: its engine is there, or is expected back."""
        self.has_given_up = False
        """Whether no request waits for the next engine, as engines die one after the other or none is expected."""
        self._config, self._owner = config, owner
        self.journal = Journal(0)
        """Its live requests."""
        self._policy = RestartPolicy()
        self._outage: Outage | None = None
        """Why no engine takes requests; None while one does."""
        self._settled = asyncio.Event()
        """Set unless calls wait for the next engine."""
        self._has_served = False
        self._holds_new = False
        self._sleep_level = 0
        self._falling_asleep: asyncio.Task[None] | None = None
        self._running: asyncio.Task[None] | None = None
        self._end_reason: str | None = None
        """Why it has stopped for good."""

    # -- what it is ----------------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """Process id of the present engine core."""
        return self.link.pid

    @property
    def host(self) -> str:
        """Where its engine runs, or the last one did; empty: here."""
        return self.link.host

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of its workers; empty if the engine core itself is the only one."""
        return self.link.ready.worker_pids

    @property
    def is_alive(self) -> bool:
        """Whether an engine core takes requests."""
        return self._outage is None and self.link.is_alive

    @property
    def outage(self) -> str | None:
        """Why no engine core takes requests, and when the next one starts; None while one does."""
        if self._outage is not None:
            return str(self._outage)
        return None if self.is_alive else "the engine process has ended"

    @property
    def unavailable(self) -> EngineUnavailableError | None:
        """The error of requests that are rejected because engines die one after the other; None while they do not."""
        return self._outage.error() if self._outage is not None and self.has_given_up else None

    @property
    def is_isolating(self) -> bool:
        """Whether requests are held until others, which may have killed an engine, have run alone."""
        return self.journal.is_isolating

    @property
    def is_asleep(self) -> bool:
        """Whether it was put to sleep, and not woken up since."""
        return self._sleep_level > 0

    @property
    def num_live(self) -> int:
        """Requests that have not ended, wherever they are."""
        return len(self.journal.request_ids)

    # -- requests and calls --------------------------------------------------------------------------------------------

    def add_request(self, request: EngineCoreRequest, timeline: Timeline | None = None) -> None:
        """Send a request, or hold it until an engine can take it. Never blocks.

        Args:
            request: the request.
            timeline: its phases are written there from here on.

        Raises:
            EngineDeadError: no engine is up, and `replay_on_crash` is off.
            EngineUnavailableError: no engine is up, and engines do not stay alive.
        """
        if (error := self.unavailable) is not None:
            raise error
        if self._outage is not None and not self._config.frontend.replay_on_crash:
            raise EngineDeadError("the engine is being started again; send the request again in some seconds")
        self.journal.add(request, timeline)
        self._send_unsent()
        self.journal.note_held(request.request_id)

    def abort_request(self, request_id: str) -> bool:
        """End a request wherever it is. Never blocks. Returns whether an engine core has it and will report its end."""
        was_sent = self.journal.remove(request_id)
        if was_sent:
            self.link.abort_request(request_id)
        self._send_unsent()
        return was_sent

    def end_all(self, error: EngineUnavailableError) -> None:
        """End all requests, also those that the engine has."""
        request_ids = self.journal.request_ids
        for request_id in self.journal.sent_ids:
            self.link.abort_request(request_id)
        self._end(request_ids, str(error), error)

    def hold_new(self, holds: bool) -> None:
        """Hold requests that no engine has had from now on; or send them again, the held ones first."""
        self._holds_new = holds
        self._send_unsent()

    def take_over(self, entry: JournalEntry) -> None:
        """Continue a request that another replica gave up. Never blocks."""
        self.journal.take_over(entry)
        self._send_unsent()
        self.journal.note_held(entry.request.request_id)

    def _send_unsent(self) -> None:
        if self._outage is None:
            for request in self.journal.take_unsent(holds_new=self._holds_new):
                self.journal.note_sent(request.request_id, self.link.add_request(request))

    async def call_utility(self, call: UtilityCall) -> UtilityResult:
        """Like `Link.call_utility`, but waits for an engine that is being started. Where engines do not stay alive, the
        next one sleeps or is awake as the last call said.

        Raises:
            EngineError: the call failed.
            EngineDeadError: the engine core died before it could answer, or the replica has ended.
            EngineUnavailableError: engines do not stay alive.
        """
        while self._outage is not None and not self.has_given_up and self._end_reason is None:
            await self._settled.wait()
        if self._end_reason is not None:
            raise EngineDeadError(self._end_reason)
        if (error := self.unavailable) is not None:
            self._note_sleep(call)
            raise error
        result = await self.link.call_utility(call)
        self._note_sleep(call)
        return result

    def _note_sleep(self, call: UtilityCall) -> None:
        if isinstance(call, Sleep):
            self._sleep_level = max(self._sleep_level, call.level)
        elif isinstance(call, WakeUp):
            self._sleep_level = 0

    async def snapshot(self) -> EngineCoreSnapshot | None:
        """A snapshot of the engine core; None while there is none. Does not wait for one.

        Raises:
            TimeoutError: it is up and did not answer within `SNAPSHOT_SECONDS`: its step takes longer, or it hangs.
        """
        if not self.is_alive:
            return None
        try:
            snapshot = await asyncio.wait_for(self.link.call_utility(TakeSnapshot()), SNAPSHOT_SECONDS)
        except EngineDeadError:
            return None
        assert isinstance(snapshot, EngineCoreSnapshot)
        return snapshot

    # -- its life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to take outputs, in the running event loop."""
        running = self._running = asyncio.get_running_loop().create_task(self._run(), name=f"engine-{self.rank}")
        running.add_done_callback(self._on_done)

    def restart_with(self, config: EngineConfig) -> None:
        """Use these settings for the next engine, if this one dies: the number of replicas of the host has changed."""
        self._config = config

    def stop(self, reason: str) -> None:
        """Take nothing more from the engine: all that wait for it raise an EngineDeadError."""
        self._end_reason = self._end_reason or reason
        if self._running is not None:
            self._running.cancel()
        self.link.abandon(reason)
        self._settled.set()

    async def _run(self) -> None:
        """Take in what the engines send, one engine after the other. Raises EngineDeadError when it was shut down."""
        replayed_ids: list[str] = []
        while True:
            if self._outage is not None:
                await self._recover(self._outage, replayed_ids)
            try:
                outputs = await self.link.get_output()
            except EngineDeadError as death:
                replayed_ids = self._handle_death(str(death))
                continue
            if outputs.phase_changes:
                self.journal.note_changes(outputs.phase_changes)
            if outputs.outputs:
                self.journal.note_outputs(outputs.outputs)
                self._policy.note_progress()
                self._send_unsent()
            self._owner.on_outputs(self, outputs)

    def _on_done(self, running: "asyncio.Task[None]") -> None:
        error = None if running.cancelled() else running.exception()
        self._end_reason = self._end_reason or str(error or REMOVED)
        self._settled.set()
        if error is not None:
            self._owner.on_failure(self, error)

    def _handle_death(self, reason: str) -> list[str]:
        """Hold, hand over or end the requests that the engine had. Returns those that wait for the next one."""
        self.link.stop_listening()
        self._outage = Outage(reason, self.what_follows)
        if self.link.has_left and not self.journal.is_isolating:
            logger.info("%s; %d requests go on elsewhere", reason, self.num_live)
            self.is_present = self._has_served = False
            self.has_given_up = True
            self._owner.on_down(self)
            return []
        self._settled.clear()
        interrupted_ids = self.journal.sent_ids
        faulty_ids = self.journal.engine_died(self.link.has_begun)
        if faulty_ids:
            self._policy.note_progress()
        if self._config.frontend.replay_on_crash:
            self._end(faulty_ids, f"the engine died of this request again and again; the last time: {reason}")
        else:
            self._end(self.journal.request_ids, reason)
        num_held = self.num_live
        self._owner.on_down(self)
        num_moved = num_held - self.num_live
        replayed_ids = [request_id for request_id in interrupted_ids if request_id in self.journal]
        logger.error(
            "%s; %s, %d requests wait for it%s",
            reason, self.what_follows, len(replayed_ids), f", {num_moved} go on elsewhere" if num_moved else "",
        )  # fmt: skip
        return replayed_ids

    async def _recover(self, outage: Outage, replayed_ids: Sequence[str]) -> None:
        """Wait for the next engine, and send it what is held."""
        began_at = time.monotonic()
        await self._next_engine(outage)
        if self._sleep_level:
            self._falling_asleep = asyncio.get_running_loop().create_task(self._fall_asleep(self._sleep_level))
            await asyncio.sleep(0)  # the call is sent before the requests that were held: they are rejected
        replayed_ids = [request_id for request_id in replayed_ids if request_id in self.journal]
        self._outage, self.has_given_up = None, False
        self._settled.set()
        self._send_unsent()
        seconds = time.monotonic() - began_at
        logger.warning("engine %d is up after %.1f s; %d requests go on", self.rank, seconds, len(replayed_ids))
        self.num_restarts += self._has_served
        stats = IterationStats(num_engine_restarts=int(self._has_served))
        self._has_served = True
        self._owner.on_up(self, stats, replayed_ids)

    @abstractmethod
    async def _next_engine(self, outage: Outage) -> None:
        """Wait until another engine takes requests, and set `link` to it. Raises EngineDeadError when the replica was
        shut down."""

    def _stop_waiting(self, outage: Outage) -> None:
        """End the requests that wait, and reject new ones until an engine is up."""
        outage.num_deaths = self._policy.num_deaths
        self.has_given_up = True
        self._settled.set()
        self._owner.on_down(self)
        live = self.journal.request_ids
        logger.error("%s; %d requests fail, and new ones are rejected until then", outage, len(live))
        error = outage.error()
        self._end(live, str(error), error)

    def _end(self, request_ids: Iterable[str], message: str, unavailable: EngineUnavailableError | None = None) -> None:
        ended = []
        for request_id in request_ids:
            self.journal.remove(request_id)
            output = EngineCoreOutput(request_id, finish_reason=FinishReason.ERROR, error=message)
            if unavailable is not None:
                output.error_code = ErrorCode.UNAVAILABLE
                output.retry_after_seconds = unavailable.retry_after_seconds
            ended.append(output)
        if ended:
            self._owner.on_outputs(self, EngineCoreOutputs(ended))

    async def _fall_asleep(self, level: int) -> None:
        """Put the new engine to sleep, as the one before it was asleep."""
        try:
            await self.link.call_utility(Sleep(level))
        except EngineError as error:
            logger.warning("the engine that was started again does not sleep: %s", error)
