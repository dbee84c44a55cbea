"""HeadlessEngine: an engine core of this host that is a replica of a front on another one.

::

    FrontConnection ─► HeadlessEngine ─► LocalReplica ─► engine core, in processes of its own as ever

It joins, starts the engine with as many KV blocks as the front says, and passes on what both say to each other. When it
loses the front, it gives up its requests, which continue elsewhere, and keeps the engine, its weights and its prefix
cache for the next session. When the engine dies, it says so, gives up its requests as well, and joins again; the
replica starts the next engine meanwhile. When it is ended, it says that it leaves.
"""

import asyncio
import contextlib
import logging
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import zmq

from quire_engine.config import EngineConfig
from quire_engine.errors import EngineDeadError, EngineError
from quire_engine.ipc.keys import HostKeys, read_keys
from quire_engine.kv_connector.kv_memory import KVMemory
from quire_engine.messages import EngineCoreOutputs, EngineCoreRequest, RequestType, UtilityCall, UtilityOutput, WakeUp
from quire_engine.replicas.link import LocalLink
from quire_engine.replicas.local_replica import LocalReplica
from quire_engine.replicas.remote.engine_digest import describe_engine, difference_of_blocks
from quire_engine.replicas.remote.front_connection import FrontConnection, FrontLostError
from quire_engine.replicas.remote.wire import BEAT_SECONDS, Accepted, Beat, Gone, Join, MessageType, Rejected
from quire_engine.replicas.replica import Replica
from quire_engine.stats import IterationStats

logger = logging.getLogger(__name__)

LEAVE_SECONDS = 2.0
"""Timeout of the message that an engine leaves which has no session just then."""
RETRY_SECONDS = 1.0
"""Between two attempts to join."""
SAY_SECONDS = 60.0
"""Interval at which the log repeats what keeps an engine from joining."""


async def run_headless(config: EngineConfig, on_joined: Callable[[int], None] = lambda rank: None) -> None:
    """Serve the replicas of this host for a front on another one, until this is cancelled.

    Args:
        config: all settings, `for_headless`.
        on_joined: called with the rank of an engine each time when it has joined the front.

    Raises:
        EngineError: the front will never take one of them, or one cannot start; the message says why.
        ValueError: a setting or the keys are not as they have to be.
        OSError: the checkpoint cannot be read.
    """
    parallel = config.parallel
    assert parallel.data_parallel_key_file is not None
    keys = _read_keys(Path(parallel.data_parallel_key_file))
    description = describe_engine(config.core)
    first = parallel.data_parallel_start_rank
    ranks = range(first, first + parallel.num_local_replicas)
    memory = KVMemory(config)
    config = memory.config
    engines = [HeadlessEngine(config.for_replica(rank), keys, description, on_joined) for rank in ranks]
    running = [asyncio.ensure_future(engine.run()) for engine in engines]
    try:
        await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        memory.close()


def _read_keys(path: Path) -> HostKeys:
    """The keys of a host whose engines join a front, which is the only one that it may trust."""
    keys = read_keys(path)
    if len(keys.peers) != 1:
        raise ValueError(
            f"data_parallel_key_file {path} trusts {len(keys.peers)} hosts; that of a host whose engines join a front "
            f"has one peer, the front: its public key, by quire keys host {path} --trust KEY"
        )
    return keys


class HeadlessEngine:
    """One engine, which joins again and again until it is ended. Belongs to one event loop.

    Args:
        config: all settings, which know the rank.
        keys: of this host.
        description: `describe_engine` of the settings.
        on_joined: called when the engine can take the front's requests.
        make_link: starts an engine core; unset: `LocalLink`.
    """

    def __init__(
        self,
        config: EngineConfig,
        keys: HostKeys,
        description: dict[str, str],
        on_joined: Callable[[int], None] = lambda rank: None,
        make_link: Callable[[EngineConfig, int | None], LocalLink] | None = None,
    ) -> None:
        # The front decides what becomes of the requests of an engine that has died.
        self._config = replace(config, frontend=replace(config.frontend, replay_on_crash=True))
        self._rank = config.parallel.data_parallel_rank
        self._keys, self._description, self._on_joined, self._make_link = keys, description, on_joined, make_link
        self._context: zmq.Context[Any] = zmq.Context()
        self._replica: LocalReplica | None = None
        self._front: FrontConnection | None = None
        """The front of the present session, once the engine takes its requests."""
        self._numbers: dict[str, int] = {}
        """Live request of the session → the number of its message."""
        self._num_received = 0
        self._calls: set[asyncio.Task[None]] = set()
        self._said: tuple[str, float] = ("", 0.0)
        self._is_missed = False
        """Whether the front has had this engine, and has had no message that it leaves."""

    async def run(self) -> None:
        """Join, serve, and join again; until this is cancelled.

        Raises:
            EngineError: the front will never take this engine, or the engine cannot start; the message says why.
        """
        try:
            while True:
                try:
                    async with self._connect() as front:
                        await self._serve(front)
                except FrontLostError as loss:
                    self._say(str(loss))
                await asyncio.sleep(RETRY_SECONDS)
        except asyncio.CancelledError:
            if self._is_missed:  # it was ended between two sessions
                await self._take_leave()
            raise
        finally:
            await self._end_replica()
            self._context.destroy(linger=0)

    def _connect(self) -> FrontConnection:
        parallel = self._config.parallel
        assert parallel.data_parallel_address is not None
        assert parallel.data_parallel_rpc_port is not None
        return FrontConnection(
            self._context, parallel.data_parallel_address, parallel.data_parallel_rpc_port, self._keys
        )

    async def _take_leave(self) -> None:
        """Send the front a message that this engine does not come back, if that is possible soon."""

        async def leave() -> None:
            async with self._connect() as front:
                await self._join(front)
                front.send(MessageType.LEAVING)

        with contextlib.suppress(FrontLostError, EngineError, asyncio.TimeoutError):
            await asyncio.wait_for(leave(), LEAVE_SECONDS)

    def _say(self, what: str) -> None:
        now = time.monotonic()
        if what != self._said[0] or now - self._said[1] > SAY_SECONDS:
            self._said = (what, now)
            logger.warning("engine %d is not with its front: %s; it tries again until it is", self._rank, what)

    # -- a session -----------------------------------------------------------------------------------------------------

    async def _serve(self, front: FrontConnection) -> None:
        """One session, from its beginning to its end. Raises FrontLostError if the front is gone, or does not take this
        engine now; EngineError if it will never take it, or the engine cannot start."""
        accepted = await self._join(front)
        beating = asyncio.ensure_future(self._beat(front))
        try:
            replica = await self._ready_replica(accepted.num_blocks)
            if accepted.kv_namespace:
                reason = difference_of_blocks(accepted.kv_namespace, replica.ready.kv_namespace, platform.node())
                if reason is not None:
                    raise EngineError(f"the front does not take this engine: {reason}")
            front.send(MessageType.READY, msgspec.msgpack.encode(replica.link.ready), str(replica.pid).encode())
            self._front, self._num_received, self._said = front, 0, ("", 0.0)
            logger.info("engine %d has joined the front at %s", self._rank, front.address)
            self._is_missed = True
            self._on_joined(self._rank)
            while True:
                self._take(await front.receive(), front, replica)
        except asyncio.CancelledError:
            front.send(MessageType.LEAVING)  # the front neither waits for it nor logs a fault
            self._is_missed = False
            raise
        finally:
            beating.cancel()
            self._front = None
            if self._replica is not None and self._replica.is_alive:
                for request_id in self._numbers:  # the journal keeps them: a hang is still found
                    self._replica.link.abort_request(request_id)
            self._numbers.clear()

    async def _join(self, front: FrontConnection) -> Accepted:
        """Ask to be a replica. Raises FrontLostError if the front is gone, or does not take this engine now;
        EngineError if it will never take it."""
        join = Join(self._rank, platform.node(), self._description)
        front.send(MessageType.JOIN, msgspec.msgpack.encode(join))
        kind, payload = await front.receive()
        if kind == MessageType.REJECTED.value:
            _raise_rejection(payload)
        return msgspec.msgpack.decode(payload, type=Accepted)

    async def _ready_replica(self, num_blocks: int) -> LocalReplica:
        """The engine, with nothing to do and awake; started if there is none, or none of this size. Raises
        FrontLostError if the engine has died again, and EngineDeadError if the first one cannot start."""
        replica = self._replica
        if replica is None or replica.ready.num_blocks != num_blocks:
            await self._end_replica()
            is_first, self._replica = replica is None, LocalReplica(self._config, self, num_blocks, self._make_link)
            replica = self._replica
            try:
                await asyncio.to_thread(replica.wait_until_ready)
                replica.start()
            except (EngineDeadError, OSError) as error:
                if is_first:
                    raise EngineDeadError(str(error)) from None
                await self._end_replica()
                raise FrontLostError(f"the engine cannot be started again: {error}") from None
        try:
            await replica.call_utility(WakeUp())  # answered after the requests of an earlier session have ended
        except EngineError as error:
            raise FrontLostError(str(error)) from None
        replica.journal.give_up_all()
        return replica

    def _take(self, frames: list[bytes], front: FrontConnection, replica: LocalReplica) -> None:
        """Pass on what the front says."""
        if frames[0] == MessageType.REJECTED.value:
            _raise_rejection(frames[1])
        kind, message_id, payload = RequestType(frames[0]), frames[1].decode(), frames[2]
        self._num_received += 1
        if kind is RequestType.ADD:
            self._numbers[message_id] = self._num_received
            replica.add_request(msgspec.msgpack.decode(payload, type=EngineCoreRequest))
        elif kind is RequestType.ABORT:
            self._numbers.pop(message_id, None)
            replica.abort_request(message_id)
        elif kind is RequestType.UTILITY:
            call: UtilityCall = msgspec.msgpack.decode(payload, type=UtilityCall)
            calling = asyncio.ensure_future(self._call(int(message_id), call, front, replica))
            self._calls.add(calling)
            calling.add_done_callback(self._calls.discard)

    async def _call(self, call_id: int, call: UtilityCall, front: FrontConnection, replica: LocalReplica) -> None:
        try:
            answer = UtilityOutput(call_id, await replica.link.call_utility(call))
        except EngineDeadError:
            return  # the front is notified of the death
        except EngineError as error:
            answer = UtilityOutput(call_id, False, str(error))
        if front is self._front:
            front.send(MessageType.OUTPUTS, msgspec.msgpack.encode(EngineCoreOutputs(utility_outputs=[answer])))

    async def _beat(self, front: FrontConnection) -> None:
        while True:
            waiting = 0 if self._replica is None else self._replica.link.num_messages_waiting
            front.send(MessageType.BEAT, msgspec.msgpack.encode(Beat(time.monotonic(), waiting)))
            await asyncio.sleep(BEAT_SECONDS)

    # -- what the replica reports --------------------------------------------------------------------------------------

    def on_outputs(self, replica: Replica, outputs: EngineCoreOutputs) -> None:
        """Pass on what the engine says."""
        for output in outputs.outputs:
            if output.finish_reason is not None:
                self._numbers.pop(output.request_id, None)
        if self._front is not None:
            outputs.utility_outputs = []  # `_call` passes on the answers to calls of the front
            self._front.send(MessageType.OUTPUTS, msgspec.msgpack.encode(outputs))

    def on_down(self, replica: Replica) -> None:
        """The engine has died: its requests continue elsewhere, and the session ends."""
        begun = [
            self._numbers[entry.request.request_id]
            for entry in replica.journal.give_up_all()
            if entry.num_crashes and entry.request.request_id in self._numbers
        ]
        front, self._front = self._front, None
        if front is not None:
            reason = replica.link.death or "the engine has ended"
            front.send(MessageType.GONE, msgspec.msgpack.encode(Gone(reason, begun)))
            front.end(f"{reason}; it is started again")

    def on_up(self, replica: Replica, stats: IterationStats, replayed_ids: Sequence[str]) -> None:
        """The next session waits for this."""

    def on_failure(self, replica: Replica, error: BaseException) -> None:
        """No outputs come any more: the session ends."""
        logger.error("the outputs of engine %d cannot be taken in any more: %s", self._rank, error)
        if self._front is not None:
            self._front.end(str(error))

    async def _end_replica(self) -> None:
        replica, self._replica = self._replica, None
        if replica is not None:
            replica.retire()
            await replica.end()


def _raise_rejection(payload: bytes) -> None:
    rejected = msgspec.msgpack.decode(payload, type=Rejected)
    if rejected.is_final:
        raise EngineError(f"the front does not take this engine: {rejected.reason}")
    raise FrontLostError(rejected.reason)
