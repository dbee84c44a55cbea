"""SupervisedClient: an engine core that is started again in place when it dies, without losing a request.

::

    AsyncLLM ─► SupervisedClient ─┬─ Journal: every live request, with its tokens so far
                                  ├─ RestartPolicy: when to start again, and for how long requests are held
                                  └─ AsyncMPClient ─► engine core;  dead or hung? ─► the next AsyncMPClient

1. The engine core dies, hangs, or loses a worker: the client's `get_output` raises, and all its processes are dead.
2. The journal has the live requests. The faulty one, if any, ends with an error (all, without `replay_on_crash`).
3. A new engine core is started in a thread; requests that come meanwhile are held.
4. The journal's requests are sent to it with their tokens so far as output, and go on with the next token. Nothing is
   sent twice: a token counts as sent when `get_output` has given it out, and what the dead engine had sampled beyond
   that is sampled again, the same (sampling depends on seed and position alone).
5. While engines die one after the other without doing any work, no request waits for ever: live ones end with the error
   that new ones are rejected with. The next engine is started all the same, until one stays up: the cause (a file that
   was moved, no descriptors, no memory) is often fixed from outside.

Of several replicas each is one of these. What then waits for a replica may go on with another instead:
`DataParallelClient` hears of it (`on_down`), and takes it from one (`give_up`) to the other (`take_over`). One that is
not needed any more gives up all that it has (`retire`), and then ends (`end`).
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from quire_engine.config import EngineConfig
from quire_engine.core.client import AsyncMPClient
from quire_engine.core.connection import EngineConnection
from quire_engine.core.journal import Journal, JournalEntry
from quire_engine.core.lockstep.owner import LockstepOwner
from quire_engine.core.restart_policy import Outage, RestartPolicy
from quire_engine.errors import EngineDeadError, EngineError, EngineUnavailableError
from quire_engine.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReady,
    EngineCoreRequest,
    ErrorCode,
    FinishReason,
    Sleep,
    UseCores,
    UtilityCall,
    UtilityResult,
    WakeUp,
)
from quire_engine.snapshot import EngineCoreSnapshot
from quire_engine.stats import IterationStats
from quire_engine.system.memory import own_memory_bytes
from quire_engine.timeline import Timeline

logger = logging.getLogger(__name__)

SNAPSHOT_SECONDS = 2.0
REMOVED = "the engine was removed"
OnRecovery = Callable[[IterationStats, Sequence[str]], None]
OnDown = Callable[[], asyncio.Event | None]


class SupervisedClient:
    """The same interface as `AsyncMPClient`, over any number of them, one after the other.

    The constructor starts the first engine core and returns at once; `wait_until_ready` blocks. All else but `shutdown`
    belongs to one event loop.

    Args:
        config: all settings.
        on_recovery: called when an engine was started again, with what there is to count and the ids of the requests
            that are replayed.
        on_down: called when requests begin to wait for the next engine, and when they are about to end because there
            may be none. If it returns an event, the next engine is not started before that, unless requests wait for
            it.
        num_blocks: size of the KV cache; unset: what the settings and the memory say.
        client: of the first engine core; unset: a new one is started.
        lockstep: what engines that share the experts meet by.
    """

    _what_follows = "it is being started again"
    _is_up = "the engine is up again"
    is_remote = False
    """Whether its engines are another host's."""

    def __init__(
        self,
        config: EngineConfig,
        on_recovery: OnRecovery = lambda stats, replayed_ids: None,
        on_down: OnDown = lambda: None,
        num_blocks: int | None = None,
        client: EngineConnection | None = None,
        lockstep: LockstepOwner | None = None,
    ) -> None:
        self._config, self._lockstep = config, lockstep
        self._on_recovery = on_recovery
        self._on_down = on_down
        self._client: EngineConnection = self._make_client(num_blocks) if client is None else client
        self._journal = Journal(0)
        self._policy = RestartPolicy()
        self._restart: asyncio.Task[None] | None = None
        self._start_after: asyncio.Event | None = None
        self._outage: Outage | None = None
        self._gave_up_waiting = asyncio.Event()
        """Set while the breaker is tripped."""
        self._outputs: list[EngineCoreOutput] = []
        """Ends of requests that no engine will report."""
        self._has_outputs = asyncio.Event()
        self.num_restarts = 0
        self._is_retired = False
        self._sleep_level = 0
        self._falling_asleep: asyncio.Task[None] | None = None
        self._closing = threading.Event()
        self._starting = threading.Lock()
        """Held while a thread starts an engine: `shutdown` waits for it."""
        self.ready = EngineCoreReady()
        self._bytes_at_start = 0

    @property
    def replicas(self) -> "Sequence[SupervisedClient]":
        """The clients of the engines: this one alone."""
        return (self,)

    def engine_index(self, request_id: str) -> int:
        """Which of these has a request."""
        return 0

    @property
    def pid(self) -> int:
        """Process id of the present engine core."""
        return self._client.pid

    @property
    def host(self) -> str:
        """Where it runs; empty: here."""
        return ""

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of its workers; empty if the engine core itself is the only one."""
        return self._client.ready.worker_pids

    @property
    def is_alive(self) -> bool:
        """Whether an engine core takes requests, and none is being started."""
        return self._restart is None and self._client.is_alive

    @property
    def is_retired(self) -> bool:
        """Whether it was removed: it takes no more calls."""
        return self._is_retired

    @property
    def is_present(self) -> bool:
        """Whether it counts: its engine is there, or is missed."""
        return not self._is_retired

    @property
    def is_isolating(self) -> bool:
        """Whether requests are held until others, which may have killed an engine, have run alone."""
        return self._journal.is_isolating

    @property
    def has_given_up(self) -> bool:
        """Whether engines die one after the other, so that no request waits for the next."""
        return self._gave_up_waiting.is_set()

    @property
    def unavailable(self) -> EngineUnavailableError | None:
        """The error of rejected requests while engines die one after the other; None while they do not."""
        return None if self._outage is None or not self.has_given_up else self._outage.error()

    @property
    def num_live(self) -> int:
        """Requests that have not ended, wherever they are."""
        return len(self._journal.request_ids)

    @property
    def is_asleep(self) -> bool:
        """Whether it was put to sleep, and not woken up since."""
        return self._sleep_level > 0

    @property
    def entries(self) -> list[JournalEntry]:
        """What is known of its live requests."""
        return self._journal.entries

    @property
    def bytes_at_start(self) -> int:
        """The memory that its processes held when it was ready, most of it the weights on a CPU."""
        return self._bytes_at_start

    @property
    def unused_cache_bytes(self) -> int:
        """About how much more of the machine's memory its KV cache will take when all of it is used."""
        growth = max(self._own_bytes() - self._bytes_at_start, 0)
        return max(self.ready.cpu_cache_bytes - growth, 0)

    def _own_bytes(self) -> int:
        total = 0
        for pid in (self.pid, *self.worker_pids):
            with contextlib.suppress(OSError):  # it is gone, or about to be
                total += own_memory_bytes(pid)
        return total

    @property
    def outage(self) -> str | None:
        """Why no engine core takes requests, and when the next one starts; None while one does."""
        if self._outage is not None:
            return str(self._outage)
        return None if self.is_alive else "the engine process has ended"

    def wait_until_ready(self) -> EngineCoreReady:
        """Block until the first engine core can take requests.

        Raises:
            EngineDeadError: it could not start, or `shutdown` was called; the message is its own. It is not started
                again.
        """
        with self._starting:
            self.ready = self._client.wait_until_ready(self._closing)
        self._bytes_at_start = self._own_bytes()
        self._policy.engine_is_ready()
        self._journal = Journal(self.ready.max_model_len)
        return self.ready

    def start(self) -> None:
        """Begin to watch the engine core, in the running event loop."""
        self._client.watch(self._is_due)

    def _is_due(self) -> bool:
        """Whether the engine core has to move: it has requests, or others wait for it that have some."""
        has_requests, place = self._journal.num_sent > 0, self._config.parallel.data_parallel_rank
        if self._lockstep is None:
            return has_requests
        return self._lockstep.is_waited_for(place) or (has_requests and not self._lockstep.waits(place))

    def report_to(self, on_recovery: OnRecovery, on_down: OnDown) -> None:
        """From now on others are to hear of deaths and recoveries."""
        self._on_recovery, self._on_down = on_recovery, on_down

    def restart_with(self, config: EngineConfig) -> None:
        """The settings of the next engine, if this one dies: a share of the machine among more or fewer replicas."""
        self._config = config

    def add_request(self, request: EngineCoreRequest, timeline: Timeline | None = None) -> None:
        """Hand a request over, or hold it until an engine can take it. Never blocks.

        Args:
            request: the request.
            timeline: what is written of its phases from here on.

        Raises:
            EngineDeadError: no engine is up, and `replay_on_crash` is off.
            EngineUnavailableError: no engine is up, and engines do not stay alive.
        """
        if self._outage is not None and self._gave_up_waiting.is_set():
            raise self._outage.error()
        if self._restart is not None and not self._config.frontend.replay_on_crash:
            raise EngineDeadError("the engine is being started again; send the request again in some seconds")
        self._journal.add(request, timeline)
        self._send_unsent()
        self._journal.note_held(request.request_id)

    def abort_request(self, request_id: str) -> bool:
        """End a request wherever it is. Never blocks. Returns whether an engine core has it and will report its end."""
        was_sent = self._journal.remove(request_id)
        if was_sent:
            self._client.abort_request(request_id)
        self._send_unsent()
        return was_sent

    def end_all(self, error: EngineUnavailableError) -> None:
        """End all requests, also those that the engine has: it cannot go on."""
        for request_id in self._journal.request_ids:
            if self._journal.remove(request_id):
                self._client.abort_request(request_id)
            self._end([request_id], str(error), ErrorCode.UNAVAILABLE, error.retry_after_seconds)

    def give_up(self) -> list[JournalEntry]:
        """Forget the requests that wait here, but for those that may have killed an engine, so that another one can
        `take_over`."""
        return self._journal.give_up()

    def give_up_all(self) -> list[JournalEntry]:
        """Forget all requests, of which none may run alone: the engine leaves, and others `take_over`."""
        return self._journal.give_up_all()

    def take_over(self, entry: JournalEntry) -> None:
        """Go on with a request that another one gave up. Never blocks."""
        self._journal.take_over(entry)
        self._send_unsent()
        self._journal.note_held(entry.request.request_id)

    def tell(self, call: UseCores) -> None:
        """Have the engine core do something before it takes what is sent after this; nothing while none is up."""
        if self.is_alive:
            self._client.tell(call)

    async def call_utility(self, call: UtilityCall) -> UtilityResult:
        """Like `AsyncMPClient.call_utility`, but waits for an engine that is being started.

        Raises:
            EngineError: the call failed.
            EngineDeadError: the engine core died before it could answer.
            EngineUnavailableError: engines do not stay alive.
        """
        if self._restart is not None:
            await _first_of(self._restart, self._gave_up_waiting)
        if self._outage is not None:
            raise self._outage.error()
        result = await self._client.call_utility(call)
        match call:
            case Sleep(level=level):
                self._sleep_level = max(self._sleep_level, level)
            case WakeUp():
                self._sleep_level = 0
        return result

    async def snapshot(self) -> EngineCoreSnapshot | None:
        """A snapshot of the engine core; None while there is none. Does not wait for one.

        Raises:
            TimeoutError: it is up and did not answer within `SNAPSHOT_SECONDS`: its step takes longer, or it hangs.
        """
        if not self.is_alive:
            return None
        try:
            return await asyncio.wait_for(self._client.snapshot(), SNAPSHOT_SECONDS)
        except EngineDeadError:
            return None

    def is_held(self, request_id: str) -> bool:
        """Whether no engine has this live request, because none is up or another request has it to itself."""
        return self._journal.is_held(request_id)

    @property
    def num_messages_waiting(self) -> int:
        return self._client.num_messages_waiting

    async def get_output(self) -> EngineCoreOutputs:
        """The next outputs; waits for them, even if engine cores die meanwhile.

        Raises:
            EngineDeadError: it was shut down.
        """
        while True:
            if self._outputs:
                taken, self._outputs = self._outputs, []
                self._has_outputs.clear()
                return EngineCoreOutputs(taken)
            try:
                if self._restart is not None:
                    await _first_of(self._restart, self._has_outputs)
                    continue
                outputs = await self._client.get_output()
            except EngineDeadError as death:
                if self._restart is not None:
                    raise
                self._handle_death(str(death))
                continue
            if outputs.phase_changes:
                self._journal.note_changes(outputs.phase_changes)
            if outputs.outputs:
                self._journal.note_outputs(outputs.outputs)
                self._policy.note_progress()
                self._send_unsent()
            return outputs

    def retire(self) -> tuple[list[JournalEntry], list[EngineCoreOutput]]:
        """Give up all requests, of which none may run alone; `end` or `shutdown` is all that follows.

        All that wait for an answer of the engine raise an EngineDeadError.

        Returns:
            What is known of the requests, for others to `take_over`; and ends of requests that were not taken yet.
        """
        self._closing.set()
        self._is_retired = True
        if self._restart is not None:
            self._restart.cancel()
        self._client.abandon(REMOVED)
        ended, self._outputs = self._outputs, []
        return self._journal.give_up_all(), ended

    async def end(self) -> None:
        """After `retire`: end the processes, while the event loop goes on."""
        await asyncio.to_thread(self._end_processes)
        self._client.stop_listening()
        await asyncio.to_thread(self.shutdown)

    def _end_processes(self) -> None:
        with self._starting:
            self._client.end_processes()

    def shutdown(self) -> None:
        """End the engine core, or the attempt to start one. Idempotent; may be called from any thread."""
        self._closing.set()
        with self._starting:
            self._client.shutdown()

    def _send_unsent(self) -> None:
        if self._restart is None:
            for request in self._journal.take_unsent():
                self._journal.note_sent(request.request_id, self._client.add_request(request))

    def _handle_death(self, reason: str) -> None:
        """End the requests that end with the engine, and begin to start the next one."""
        self._client.stop_listening()
        interrupted_ids = self._journal.sent_ids
        faulty_ids = self._journal.engine_died(self._client.has_begun)
        if faulty_ids:
            self._policy.note_progress()
        if self._config.frontend.replay_on_crash:
            self._end(faulty_ids, f"the engine died of this request again and again; the last time: {reason}")
        else:
            self._end(self._journal.request_ids, reason)
        self._outage = Outage(reason, self._what_follows)
        num_held = self.num_live
        self._start_after = self._on_down()
        num_moved = num_held - self.num_live
        replayed_ids = [request_id for request_id in interrupted_ids if request_id in self._journal]
        logger.error(
            "%s; %s, %d requests wait for it%s",
            reason, self._what_follows, len(replayed_ids), f", {num_moved} go on elsewhere" if num_moved else "",
        )  # fmt: skip
        self._restart = asyncio.get_running_loop().create_task(
            self._start_again(self._outage, replayed_ids), name="engine-restart"
        )

    def _end(
        self,
        request_ids: Iterable[str],
        error: str,
        error_code: ErrorCode | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        for request_id in request_ids:
            self._journal.remove(request_id)
            self._outputs.append(
                EngineCoreOutput(
                    request_id,
                    finish_reason=FinishReason.ERROR,
                    error=error,
                    error_code=error_code,
                    retry_after_seconds=retry_after_seconds,
                )
            )
            self._has_outputs.set()

    async def _start_again(self, outage: Outage, replayed_ids: Sequence[str]) -> None:
        """Start engine cores until one is ready.

        Raises:
            EngineDeadError: it was shut down.
        """
        began_at = time.monotonic()
        if self._start_after is not None and not self.num_live:
            await self._start_after.wait()
        while True:
            delay = self._policy.delay_after_death()
            outage.next_try_at = time.monotonic() + delay
            if self._policy.is_tripped:
                replayed_ids = ()
                self._stop_waiting(outage)
            await asyncio.sleep(delay)
            self._policy.engine_started()
            try:
                await asyncio.to_thread(self._replace_client)
                self._policy.engine_is_ready()
                self._watch_new_client()
                break
            except Exception as error:  # of any kind: the next attempt may succeed
                if self._closing.is_set():
                    raise EngineDeadError("the engine was shut down") from None
                outage.reason = str(error) or type(error).__name__
                logger.error("the engine could not be started again: %s", outage.reason)
        await self._go_on(replayed_ids, began_at, IterationStats(num_engine_restarts=1))

    async def _go_on(self, replayed_ids: Sequence[str], began_at: float, stats: IterationStats) -> None:
        """The next engine is ready: it gets what was held."""
        if self._sleep_level:
            self._falling_asleep = asyncio.get_running_loop().create_task(self._fall_asleep(self._sleep_level))
            await asyncio.sleep(0)  # the call is sent before the requests that were held: they are rejected
        replayed_ids = [request_id for request_id in replayed_ids if request_id in self._journal]
        self._restart = self._outage = None
        self._gave_up_waiting.clear()
        self._send_unsent()
        seconds = time.monotonic() - began_at
        logger.warning("%s after %.1f s; %d requests go on", self._is_up, seconds, len(replayed_ids))
        self.num_restarts += stats.num_engine_restarts
        self._on_recovery(stats, replayed_ids)

    def _stop_waiting(self, outage: Outage) -> None:
        """Engines die one after the other: end the requests that wait, and reject new ones."""
        outage.num_deaths = self._policy.num_deaths
        self._gave_up_waiting.set()
        self._on_down()
        live = self._journal.request_ids
        logger.error("%s; %d requests fail, and new ones are rejected until then", outage, len(live))
        error = outage.error()
        self._end(live, str(error), ErrorCode.UNAVAILABLE, error.retry_after_seconds)

    def _watch_new_client(self) -> None:
        """Raises EngineDeadError when `shutdown` was called, OSError when it cannot be watched."""
        with self._starting:  # a `shutdown` that comes now stops the watch, or has closed the client already
            if self._closing.is_set():
                raise EngineDeadError("the engine was shut down")
            self.start()

    async def _fall_asleep(self, level: int) -> None:
        """Put the new engine to sleep, as the one before it was asleep."""
        try:
            await self._client.call_utility(Sleep(level))
        except EngineError as error:
            logger.warning("the engine that was started again does not sleep: %s", error)

    def _make_client(self, num_blocks: int | None) -> AsyncMPClient:
        if self._lockstep is None:
            return AsyncMPClient(self._config, num_blocks)
        return AsyncMPClient(self._config, num_blocks, self._lockstep)

    def _replace_client(self) -> None:
        """Runs in a thread, as ending one engine and starting another takes a while.

        Raises:
            EngineDeadError: the new one could not start, or `shutdown` was called.
        """
        with self._starting:
            self._client.shutdown()
            if self._closing.is_set():
                raise EngineDeadError("the engine was shut down")
            self._client = self._make_client(self.ready.num_blocks)
            self._client.wait_until_ready(self._closing)


async def _first_of(task: "asyncio.Task[None]", event: asyncio.Event) -> None:
    """Wait until a task is done or an event is set; raises what the task raised."""
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    if task.cancelled():
        raise EngineDeadError(REMOVED)
    if task.done():
        task.result()
