"""SupervisedClient: an engine core that, when it dies, is started again in place, and nobody's request is lost.

::

    AsyncLLM ─► SupervisedClient ─┬─ Journal: every live request, with its tokens so far
                                  ├─ RestartPolicy: when to start again, and when to give up
                                  └─ AsyncMPClient ─► engine core;  dead or hung? ─► the next AsyncMPClient

1. The engine core dies, hangs, or loses a worker: the client's `get_output` raises, all its processes are dead.
2. The journal holds what was live. What was certainly at fault ends with an error (with `replay_on_crash` off: all do).
3. A new engine core is started in a thread; requests that come meanwhile are held.
4. The journal's requests are sent to it with their tokens so far as output, and go on with the next token. Nothing is
   sent twice: a token counts as sent when `get_output` has given it out, and what the dead engine had sampled beyond
   that is sampled again, the same (sampling depends on seed and position alone).
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable

import zmq

from quire_engine.config import EngineConfig
from quire_engine.core.client import AsyncMPClient
from quire_engine.core.journal import Journal
from quire_engine.errors import EngineDeadError, EngineError
from quire_engine.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreReady, EngineCoreRequest
from quire_engine.request import FinishReason

__all__ = ["RestartPolicy", "SupervisedClient"]

logger = logging.getLogger(__name__)

MAX_FRUITLESS_DEATHS = 5
FRUITFUL_SECONDS = 30.0
"""An engine that was ready for so long counts as one that works, whether or not anybody asked anything of it."""


class RestartPolicy:
    """Decides what follows the death of an engine: the crash-loop breaker.

    An engine is fruitful when it gave out a token, convicted a request, or was ready for a while. After a fruitful one
    the next starts at once. Fruitless ones are followed after 0, 1, 2, 4 … seconds, and `MAX_FRUITLESS_DEATHS` of them
    in a row are the end.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ready_at: float | None = None
        self._is_fruitful = False
        self.num_fruitless_deaths = 0

    def engine_started(self) -> None:
        """An engine is about to be started."""
        self._ready_at = None
        self._is_fruitful = False

    def engine_is_ready(self) -> None:
        """It has started. From now on its life counts: a large model may take minutes to load, and die then."""
        self._ready_at = self._clock()

    def engine_was_fruitful(self) -> None:
        """It did something that nobody else has to do again."""
        self._is_fruitful = True

    def delay_after_death(self) -> float | None:
        """Seconds to wait before the next start; None when there should be none."""
        lived_long = self._ready_at is not None and self._clock() - self._ready_at > FRUITFUL_SECONDS
        if self._is_fruitful or lived_long:
            self.num_fruitless_deaths = 0
            return 0.0
        self.num_fruitless_deaths += 1
        if self.num_fruitless_deaths >= MAX_FRUITLESS_DEATHS:
            return None
        if self.num_fruitless_deaths == 1:
            return 0.0
        return 2.0 ** (self.num_fruitless_deaths - 2)


class SupervisedClient:
    """The same face as `AsyncMPClient`, over any number of them, one after the other.

    The constructor starts the first engine core and returns at once; `wait_until_ready` blocks. All else but `shutdown`
    belongs to one event loop.

    Args:
        config: all settings.
        on_restart: called when an engine was started again, with the number of requests that were replayed.
    """

    def __init__(self, config: EngineConfig, on_restart: Callable[[int], None] = lambda num_replayed: None) -> None:
        self._config = config
        self._on_restart = on_restart
        self._client = AsyncMPClient(config)
        self._journal = Journal(0)
        self._policy = RestartPolicy()
        self._restart: asyncio.Task[None] | None = None
        self._outputs: list[EngineCoreOutput] = []
        """Ends of requests that no engine will tell of."""
        self._sleep_level = 0
        self._falling_asleep: asyncio.Task[None] | None = None
        self._closing = threading.Event()
        self._starting = threading.Lock()
        """Held while a thread starts an engine: `shutdown` waits for it."""
        self.ready = EngineCoreReady()

    @property
    def pid(self) -> int:
        """Process id of the present engine core."""
        return self._client.pid

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of its workers, where they are not the engine core's own."""
        return self._client.ready.worker_pids

    @property
    def is_alive(self) -> bool:
        """Whether an engine core takes requests, and none is being started."""
        return self._restart is None and self._client.is_alive

    def wait_until_ready(self) -> EngineCoreReady:
        """Block until the first engine core can take requests.

        Raises:
            EngineDeadError: it could not start; the message is its own. That is not tried again.
        """
        self.ready = self._client.wait_until_ready()
        self._policy.engine_is_ready()
        self._journal = Journal(self.ready.max_model_len)
        return self.ready

    def start(self) -> None:
        """Begin to watch the engine core, in the running event loop."""
        self._client.watch(lambda: self._journal.num_sent > 0)

    def add_request(self, request: EngineCoreRequest) -> None:
        """Hand a request over, or hold it until an engine can take it. Never blocks.

        Raises:
            EngineDeadError: none can now, and `replay_on_crash` is off.
        """
        if self._restart is not None and not self._config.frontend.replay_on_crash:
            raise EngineDeadError("the engine is being started again; send the request again in some seconds")
        self._journal.add(request)
        self._send_unsent()

    def abort_request(self, request_id: str) -> bool:
        """End a request wherever it is. Never blocks. True when an engine core has it, and will tell of its end."""
        was_sent = self._journal.remove(request_id)
        if was_sent:
            self._client.abort_request(request_id)
        self._send_unsent()
        return was_sent

    async def call_utility(self, method: str, *arguments: int) -> bool:
        """See `AsyncMPClient.call_utility`; waits for an engine that is being started.

        Raises:
            EngineError: it could not do what it was asked for.
            EngineDeadError: the engine core died before it could answer.
        """
        if self._restart is not None:
            await asyncio.shield(self._restart)
        result = await self._client.call_utility(method, *arguments)
        if method in ("sleep", "wake_up"):
            self._sleep_level = max(self._sleep_level, *arguments) if method == "sleep" else 0
        return result

    async def get_output(self) -> EngineCoreOutputs:
        """The next outputs; waits for them, over deaths of engine cores too.

        Raises:
            EngineDeadError: it does not stay alive, and is not started again.
        """
        while True:
            if self._outputs:
                taken, self._outputs = self._outputs, []
                return EngineCoreOutputs(taken)
            try:
                if self._restart is not None:
                    await self._restart
                outputs = await self._client.get_output()
            except EngineDeadError as death:
                if self._restart is not None:
                    raise
                self._take_note_of_death(str(death))
                continue
            if outputs.outputs:
                self._journal.take_note(outputs.outputs)
                self._policy.engine_was_fruitful()
                self._send_unsent()
            return outputs

    def shutdown(self) -> None:
        """End the engine core, or the attempt to start one. Idempotent; may be called from any thread."""
        self._closing.set()
        with self._starting:
            self._client.shutdown()

    def _send_unsent(self) -> None:
        if self._restart is None:
            for request in self._journal.take_unsent():
                self._client.add_request(request)

    def _take_note_of_death(self, reason: str) -> None:
        """End those who end with the engine, and begin to start the next one."""
        self._client.stop_listening()
        num_live = self._journal.num_sent
        culprits = self._journal.engine_died()
        if culprits:
            self._policy.engine_was_fruitful()
        if self._config.frontend.replay_on_crash:
            self._end(culprits, f"the engine died of this request again and again; the last time: {reason}")
        else:
            self._end(self._journal.request_ids, reason)
        num_replayed = max(num_live - len(self._outputs), 0)
        logger.error("%s; it is started again, %d requests wait for it", reason, num_replayed)
        self._restart = asyncio.get_running_loop().create_task(
            self._start_again(reason, num_replayed), name="engine-restart"
        )

    def _end(self, request_ids: Iterable[str], error: str) -> None:
        for request_id in request_ids:
            self._journal.remove(request_id)
            self._outputs.append(EngineCoreOutput(request_id, finish_reason=FinishReason.ERROR, error=error))

    async def _start_again(self, reason: str, num_replayed: int) -> None:
        """Start engine cores until one is ready.

        Raises:
            EngineDeadError: none will be.
        """
        began_at = time.monotonic()
        while True:
            delay = self._policy.delay_after_death()
            if delay is None:
                raise EngineDeadError(
                    f"the engine died {self._policy.num_fruitless_deaths} times in a row without an output, and is not "
                    f"started again; the last time: {reason}"
                )
            await asyncio.sleep(delay)
            self._policy.engine_started()
            try:
                await asyncio.to_thread(self._replace_client)
                self._policy.engine_is_ready()
                break
            except (EngineDeadError, OSError, ValueError, zmq.ZMQError) as error:
                if self._closing.is_set():
                    raise EngineDeadError("the engine was shut down") from None
                reason = str(error)
                logger.error("the engine could not be started again: %s", reason)
        with self._starting:  # a `shutdown` that comes now finds the watch, or else has closed what it would watch
            if self._closing.is_set():
                raise EngineDeadError("the engine was shut down")
            self.start()
        if self._sleep_level:
            self._falling_asleep = asyncio.get_running_loop().create_task(self._fall_asleep(self._sleep_level))
            await asyncio.sleep(0)  # the call is on its way before the requests that were held: they are refused
        self._restart = None
        self._send_unsent()
        seconds = time.monotonic() - began_at
        logger.warning("the engine is up again after %.1f s; %d requests go on", seconds, num_replayed)
        self._on_restart(num_replayed)

    async def _fall_asleep(self, level: int) -> None:
        """The new engine is to sleep as the one before it did."""
        try:
            await self._client.call_utility("sleep", level)
        except EngineError as error:
            logger.warning("the engine that was started again does not sleep: %s", error)

    def _replace_client(self) -> None:
        """Runs in a thread: both an end and a start take their time.

        Raises:
            EngineDeadError: the new one could not start, or `shutdown` was called.
        """
        with self._starting:
            self._client.shutdown()
            if self._closing.is_set():
                raise EngineDeadError("the engine was shut down")
            self._client = AsyncMPClient(self._config, self.ready.num_blocks)
            self._client.wait_until_ready(self._closing)
