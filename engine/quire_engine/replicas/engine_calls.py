"""EngineCalls: calls to all engines of a model, and changes of all of them: their sleep, and their weights."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from quire_engine.errors import EngineError, EngineSleepingError, EngineUnavailableError, OperationError
from quire_engine.messages import LoadWeights, ResetPrefixCache, Sleep, UseWeights, UtilityCall, UtilityResult, WakeUp
from quire_engine.replicas.replica import Replica

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
DRAIN_POLL_S = 0.01


class EngineCalls:
    """One change at a time, which is completed even if the caller is cancelled. Belongs to one event loop.

    Args:
        replicas: all of the model; others may come and leave.
        wakes_on_request: the setting `wake_on_request`.
    """

    def __init__(self, replicas: Sequence[Replica], wakes_on_request: bool) -> None:
        self._replicas = replicas
        self._wakes_on_request = wakes_on_request
        self.busy: str | None = None
        """The change that is under way, for errors: of the engines' sleep, their weights or their number."""
        self.sleep_level = 0
        """0 while the engines are awake."""
        self._changing = asyncio.Lock()
        """Held by a change of all engines."""
        self._takes_none = False
        """Whether new requests are rejected or wake the engines up, as they sleep or are about to."""
        self._cancels_drain = asyncio.Event()
        self._waking: asyncio.Task[None] | None = None
        self._changes: set[asyncio.Task[Any]] = set()

    def check_awake(self) -> None:
        """Start to wake the engines up for a new request if they sleep.

        Raises:
            EngineSleepingError: they sleep, and `wake_on_request` is off.
        """
        if not self._takes_none:
            return
        if not self._wakes_on_request:
            raise EngineSleepingError("the engine sleeps; wake it up first")
        if self._waking is None or self._waking.done():
            self._waking = asyncio.get_running_loop().create_task(self._wake_for_requests(), name="wake-up")

    def stop(self) -> None:
        """Wait no longer for the ends of requests."""
        self._cancels_drain.set()

    async def call(self, call: UtilityCall) -> UtilityResult:
        """Make a call to all engine cores; waits for those that are being started.

        A replica that is down has no prefix cache to reset.

        Raises:
            EngineError: a call failed.
            EngineUnavailableError: one does not stay alive.
        """
        match call:
            case Sleep(level=level):
                return await self.sleep(level)
            case WakeUp():
                return await self._complete(self._wake_up())
        return await self._call_all(call)

    async def sleep(self, level: int, abort_all: Callable[[], None] | None = None) -> bool:
        """Let all live requests end, reject new ones, and put all engines to sleep. If one cannot, all are woken up.

        Args:
            level: as in `Sleep`.
            abort_all: aborts the live requests; None: they are waited for.

        Raises:
            OperationError: not now, or `WakeUp` came before the requests had ended.
            EngineError: an engine cannot sleep. All are awake, or, if another one cannot be woken up again, count as
                asleep.
        """
        return await self._complete(self._sleep(Sleep(level), abort_all))

    async def update_weights(self, folder: str, accept: Callable[[], None]) -> None:
        """Have all engines compute with the weights of another folder, or none.

        1. New requests are held, and those that engines have had end, with the present weights.
        2. Each engine loads the weights. If one cannot, all drop them.
        3. Each computes with them. An engine that dies is started with them.

        Args:
            folder: of the weights.
            accept: called when all have loaded them: engines that are started from now on have them.

        Raises:
            OperationError: not now.
            EngineError: an engine cannot load them. The present ones are used.
        """
        await self._complete(self._update_weights(folder, accept))

    async def _complete(self, change: Coroutine[Any, Any, _T]) -> _T:
        task = asyncio.get_running_loop().create_task(change, name="change")
        self._changes.add(task)  # the loop keeps only weak references to tasks
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    async def _call_all(self, call: UtilityCall) -> bool:
        replicas = [replica for replica in self._replicas if replica.is_present or replica.is_remote]
        if isinstance(call, ResetPrefixCache):
            replicas = [replica for replica in replicas if replica.is_alive] or replicas
        calls = (replica.call_utility(call) for replica in replicas)
        results = await asyncio.gather(*calls, return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        answers = [result for result in results if not isinstance(result, BaseException)]
        if answers and isinstance(call, Sleep | WakeUp):  # the others need not wait for one that does not stay up
            errors = [error for error in errors if not isinstance(error, EngineUnavailableError)]
        if errors:
            raise errors[0]
        return all(map(bool, answers))

    async def _sleep(self, call: Sleep, abort_all: Callable[[], None] | None) -> bool:
        async with self._alone("sleep", "the engine is being put to sleep"):
            was_asleep = self.sleep_level
            self._takes_none = True
            try:
                if abort_all is not None:
                    abort_all()
                await self._drain("sleep", lambda replica: replica.num_live)
                self._hold_new(True)  # what comes wakes the engines up first
                try:
                    await self._call_all(call)
                except EngineError:
                    if not was_asleep:
                        with contextlib.suppress(EngineError):
                            await self._call_all(WakeUp())
                        if any(replica.is_asleep for replica in self._replicas):
                            self.sleep_level = call.level  # so that another `WakeUp` reaches it
                    raise
                self.sleep_level = max(was_asleep, call.level)
            finally:
                self._takes_none = self.sleep_level > 0
                self._hold_new(self._takes_none)
        return True

    async def _wake_up(self) -> bool:
        """Wake all engines up, or none. Ends a `Sleep` that waits for requests. Raises EngineError if one cannot be
        woken up; all sleep on."""
        if self._takes_none:
            self._cancels_drain.set()
        async with self._alone("wake_up", "the engine is being woken up", waits=True):
            if not self.sleep_level:
                return True
            try:
                await self._call_all(WakeUp())
            except EngineError:
                with contextlib.suppress(EngineError):
                    await self._call_all(Sleep(self.sleep_level))
                raise
            self.sleep_level, self._takes_none = 0, False
            self._hold_new(False)
        return True

    def _hold_new(self, holds: bool) -> None:
        for replica in self._replicas:
            replica.hold_new(holds)

    async def _wake_for_requests(self) -> None:
        try:
            await self._wake_up()
        except EngineError as error:
            logger.error("the engine cannot be woken up for a request: %s", error)
            unavailable = EngineUnavailableError(f"the engine sleeps, and cannot be woken up: {error}")
            for replica in self._replicas:
                replica.end_all(unavailable)

    async def _update_weights(self, folder: str, accept: Callable[[], None]) -> None:
        async with self._alone("update_weights", "the weights are being updated"):
            if self.sleep_level:
                raise OperationError("update_weights: the engine sleeps; wake it up first")
            try:
                self._hold_new(True)
                await self._drain("update_weights", lambda replica: replica.journal.num_begun)
                try:
                    await self._call_all(LoadWeights(folder))
                except BaseException:
                    with contextlib.suppress(EngineError):
                        await self._call_all(UseWeights(False))
                    raise
                accept()
                try:
                    await self._call_all(UseWeights(True))
                except EngineError as error:
                    logger.error("%s; the next one has the new weights", error)
            finally:
                self._hold_new(False)

    @contextlib.asynccontextmanager
    async def _alone(self, what: str, busy: str, *, waits: bool = False) -> AsyncIterator[None]:
        """Change all engines while nothing else does. Raises OperationError if something else does, and is not waited
        for."""
        if self.busy is not None and not waits:
            raise OperationError(f"{what}: {self.busy}; try again when that is done")
        async with self._changing:
            before, self.busy = self.busy, busy  # of `scale`, which is no change of an engine that sleeps
            try:
                yield
            finally:
                self.busy = before

    async def _drain(self, what: str, num_left: Callable[[Replica], int]) -> None:
        """Wait until no requests are left. Raises OperationError if `WakeUp` or the end comes meanwhile."""
        self._cancels_drain.clear()
        while any(map(num_left, self._replicas)):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._cancels_drain.wait(), DRAIN_POLL_S)
                raise OperationError(f"{what}: the engine was woken up or shut down before its requests had ended")
