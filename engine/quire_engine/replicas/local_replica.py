"""LocalReplica: a replica whose engines are processes of this host."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable

from quire_engine.config import EngineConfig
from quire_engine.core.journal import Journal, JournalEntry
from quire_engine.errors import EngineDeadError
from quire_engine.messages import EngineCoreReady
from quire_engine.replicas.link import Link, LocalLink
from quire_engine.replicas.replica import REMOVED, Replica, ReplicaOwner
from quire_engine.replicas.restart_policy import Outage
from quire_engine.system.memory import own_memory_bytes

logger = logging.getLogger(__name__)


class LocalReplica(Replica):
    """A replica whose engines are started on this host. `shutdown` may be called from any thread.

    Args:
        config: all settings, which know the rank.
        owner: hears of outputs, deaths and recoveries.
        num_blocks: size of the KV cache; unset: what the settings and the memory say.
        make_link: starts an engine core; unset: `LocalLink`.
    """

    what_follows = "it is being started again"

    def __init__(
        self,
        config: EngineConfig,
        owner: ReplicaOwner,
        num_blocks: int | None = None,
        make_link: Callable[[EngineConfig, int | None], LocalLink] | None = None,
    ) -> None:
        super().__init__(config, owner, Link("the engine has not been started yet"))
        self._num_blocks = num_blocks
        self._make_link = make_link or LocalLink
        self._process: LocalLink | None = None
        """The same as `link`, once there is one."""
        self._closing = threading.Event()
        self._starting = threading.Lock()
        """Held while a thread starts an engine: `shutdown` waits for it."""
        self.bytes_at_start = 0
        """The memory that its processes held when it was ready, most of it the weights on a CPU."""

    def launch(self) -> None:
        """Start the first engine core, and return at once.

        Raises:
            EngineDeadError: `shutdown` was called.
            OSError, ValueError: as of `LocalLink`.
        """
        with self._starting:
            self._start_process(self._num_blocks)

    def wait_until_ready(self) -> EngineCoreReady:
        """Block until the first engine core can take requests; start it if `launch` has not.

        Raises:
            EngineDeadError: it could not start, or `shutdown` was called; the message is its own. It is not started
                again.
            OSError, ValueError: as of `LocalLink`.
        """
        with self._starting:
            process = self._process or self._start_process(self._num_blocks)
            self.ready = process.wait_until_ready(self._closing)
        self.bytes_at_start = self._own_bytes()
        self._policy.engine_is_ready()
        self.journal = Journal(self.ready.max_model_len)
        return self.ready

    def start(self) -> None:
        self._has_served = True
        self._watch()
        super().start()

    def retire(self) -> list[JournalEntry]:
        """Give up all requests, of which none may run alone, for others to `take_over`; only `end` or `shutdown` may
        follow. All that wait for an answer of the engine raise an EngineDeadError."""
        self._closing.set()
        self.is_present = False
        self.stop(REMOVED)
        return self.journal.give_up_all()

    async def end(self) -> None:
        """After `retire`: end the processes, while the event loop goes on."""
        await asyncio.to_thread(self._end_processes)
        self.link.stop_listening()
        await asyncio.to_thread(self.shutdown)

    def _end_processes(self) -> None:
        with self._starting:
            if self._process is not None:
                self._process.end_processes()

    def shutdown(self) -> None:
        """End the engine core, or the attempt to start one. Idempotent; may be called from any thread."""
        self._closing.set()
        with self._starting:
            if self._process is not None:
                self._process.shutdown()

    @property
    def unused_cache_bytes(self) -> int:
        """About how much more of the machine's memory its KV cache will take when all of it is used."""
        growth = max(self._own_bytes() - self.bytes_at_start, 0)
        return max(self.ready.cpu_cache_bytes - growth, 0)

    def _own_bytes(self) -> int:
        total = 0
        for pid in (self.pid, *self.worker_pids):
            with contextlib.suppress(OSError):  # it is gone, or about to be
                total += own_memory_bytes(pid)
        return total

    async def _next_engine(self, outage: Outage) -> None:
        while True:
            delay = self._policy.delay_after_death()
            outage.next_try_at = time.monotonic() + delay
            if self._policy.is_tripped:
                self._stop_waiting(outage)
            await asyncio.sleep(delay)
            self._policy.engine_started()
            try:
                await asyncio.to_thread(self._start_next)
                self._policy.engine_is_ready()
                self._watch()
                return
            except Exception as error:  # of any kind: the next attempt may succeed
                if self._closing.is_set():
                    raise EngineDeadError("the engine was shut down") from None
                outage.reason = str(error) or type(error).__name__
                logger.error("the engine could not be started again: %s", outage.reason)

    def _start_next(self) -> None:
        """Runs in a thread: to end one engine and to start another takes a while."""
        with self._starting:
            if self._process is not None:
                self._process.shutdown()
            self._start_process(self.ready.num_blocks).wait_until_ready(self._closing)

    def _start_process(self, num_blocks: int | None) -> LocalLink:
        if self._closing.is_set():
            raise EngineDeadError("the engine was shut down")
        self._process = self.link = self._make_link(self._config, num_blocks)
        return self._process

    def _watch(self) -> None:
        """Watch the engine. Raises EngineDeadError if `shutdown` was called, and OSError if there are no descriptors
        for it."""
        with self._starting:  # a `shutdown` that comes now stops the watch, or has ended the engine already
            if self._closing.is_set() or self._process is None:
                raise EngineDeadError("the engine was shut down")
            self._process.watch(lambda: self.journal.num_sent > 0)
