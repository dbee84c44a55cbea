"""HeadlessEngine: an engine core of this host that is a replica of a front on another one.

::

    FrontConnection ─► HeadlessEngine ─► AsyncMPClient ─► engine core, in processes of its own as ever

It joins, starts the engine with as many KV blocks as the front says, and passes on what both say to each other. When it
loses the front, it gives up its requests, which go on elsewhere, and keeps the engine, its weights and its prefix cache
for the next session. When the engine dies, it says so, and joins again with the next one. When it is to end, it says
that it leaves.
"""

import asyncio
import contextlib
import logging
import platform
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from quire_engine.config import EngineConfig
from quire_engine.core.client import AsyncMPClient
from quire_engine.core.remote.engine_digest import describe_engine, difference_of_blocks
from quire_engine.core.remote.front_connection import FrontConnection, FrontLostError
from quire_engine.core.remote.wire import BEAT_SECONDS, Accepted, Beat, Gone, Join, MessageType, Rejected
from quire_engine.core.restart_policy import RestartPolicy
from quire_engine.errors import EngineDeadError, EngineError
from quire_engine.ipc.keys import HostKeys, read_keys
from quire_engine.kv_connector.kv_memory import KVMemory
from quire_engine.messages import EngineCoreOutputs, EngineCoreRequest, RequestType, UtilityCall, UtilityOutput, WakeUp

logger = logging.getLogger(__name__)

LEAVE_SECONDS = 2.0
"""How long the front may take to hear that an engine leaves that is not with it just then."""
RETRY_SECONDS = 1.0
"""Between two attempts to join."""
SAY_SECONDS = 60.0
"""How often the log says what keeps an engine from joining, while that stays the same."""


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
            f"has one peer, the front: its public key, by quire key {path} --trust KEY"
        )
    return keys


class HeadlessEngine:
    """One engine, which joins again and again until it is ended. Belongs to one event loop.

    Args:
        config: all settings, which know the rank.
        keys: of this host.
        description: `describe_engine` of the settings.
        on_joined: called when the engine can take the front's requests.
        make_client: starts an engine core.
    """

    def __init__(
        self,
        config: EngineConfig,
        keys: HostKeys,
        description: dict[str, str],
        on_joined: Callable[[int], None] = lambda rank: None,
        make_client: Callable[[EngineConfig, int], AsyncMPClient] = AsyncMPClient,
    ) -> None:
        self._config = config
        self._rank = config.parallel.data_parallel_rank
        self._keys = keys
        self._description = description
        self._on_joined = on_joined
        self._make_client = make_client
        self._context: zmq.Context[Any] = zmq.Context()
        self._client: AsyncMPClient | None = None
        self._num_blocks = 0
        self._policy = RestartPolicy()
        self._delay = 0.0
        self._front: FrontConnection | None = None
        """Of the present session, once the engine takes its requests."""
        self._numbers: dict[str, tuple[int, int]] = {}
        """Of each live request, its message's number in the session and that to the engine core."""
        self._num_received = 0
        self._leaving: set[str] = set()
        """Requests of an earlier session that the engine core has not let go yet."""
        self._has_left = asyncio.Event()
        self._death = asyncio.Event()
        self._relaying: asyncio.Task[None] | None = None
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
                await asyncio.sleep(max(RETRY_SECONDS, self._delay))
                self._delay = 0.0
        except asyncio.CancelledError:
            if self._is_missed:  # it was ended between two sessions
                await self._take_leave()
            raise
        finally:
            await self._end_engine()
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
        with contextlib.suppress(FrontLostError, EngineError, TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS), self._connect() as front:
                await self._join(front)
                front.send(MessageType.LEAVING)

    def _say(self, what: str) -> None:
        now = time.monotonic()
        if what != self._said[0] or now - self._said[1] > SAY_SECONDS:
            self._said = (what, now)
            logger.warning("engine %d is not with its front: %s; it tries again until it is", self._rank, what)

    # -- a session -----------------------------------------------------------------------------------------------------

    async def _serve(self, front: FrontConnection) -> None:
        """One session, from its beginning to its end.

        Raises:
            FrontLostError: the front is gone, or does not take this engine now.
            EngineError: it will never take it, or the engine cannot start.
        """
        accepted = await self._join(front)
        beating = asyncio.ensure_future(self._beat(front))
        try:
            client = await self._ready_engine(accepted.num_blocks)
            if accepted.kv_namespace:
                reason = difference_of_blocks(accepted.kv_namespace, client.ready.kv_namespace, platform.node())
                if reason is not None:
                    raise EngineError(f"the front does not take this engine: {reason}")
            front.send(MessageType.READY, msgspec.msgpack.encode(client.ready), str(client.pid).encode())
            self._front, self._num_received, self._said = front, 0, ("", 0.0)
            logger.info("engine %d has joined the front at %s", self._rank, front.address)
            self._is_missed = True
            self._on_joined(self._rank)
            await self._take_requests(front, client)
        except asyncio.CancelledError:
            front.send(MessageType.LEAVING)  # the front neither waits for it nor logs a fault
            self._is_missed = False
            raise
        finally:
            beating.cancel()
            self._give_up()

    async def _join(self, front: FrontConnection) -> Accepted:
        """Ask to be a replica.

        Raises:
            FrontLostError: the front is gone, or does not take this engine now.
            EngineError: it will never take it.
        """
        join = Join(self._rank, platform.node(), self._description)
        front.send(MessageType.JOIN, msgspec.msgpack.encode(join))
        kind, payload = await front.receive()
        if kind == MessageType.REJECTED.value:
            _raise_rejection(payload)
        return msgspec.msgpack.decode(payload, type=Accepted)

    async def _take_requests(self, front: FrontConnection, client: AsyncMPClient) -> None:
        """Pass on what the front says, until it or the engine is gone."""
        death = asyncio.ensure_future(self._death.wait())
        receiving: asyncio.Task[list[bytes]] | None = None
        try:
            while True:
                receiving = asyncio.ensure_future(front.receive())
                await asyncio.wait((death, receiving), return_when=asyncio.FIRST_COMPLETED)
                if self._death.is_set():
                    begun = [mine for mine, number in self._numbers.values() if client.has_begun(number)]
                    reason = client.death or "the engine has ended"
                    front.send(MessageType.GONE, msgspec.msgpack.encode(Gone(reason, begun)))
                    self._delay = self._policy.delay_after_death()
                    raise FrontLostError(f"{reason}; it is started again")
                self._take(receiving.result(), front, client)
        finally:
            death.cancel()
            if receiving is not None:
                receiving.cancel()

    def _take(self, frames: list[bytes], front: FrontConnection, client: AsyncMPClient) -> None:
        if frames[0] == MessageType.REJECTED.value:
            _raise_rejection(frames[1])
        kind, message_id, payload = RequestType(frames[0]), frames[1].decode(), frames[2]
        self._num_received += 1
        if kind is RequestType.ADD:
            number = client.add_request(msgspec.msgpack.decode(payload, type=EngineCoreRequest))
            self._numbers[message_id] = (self._num_received, number)
        elif kind is RequestType.ABORT:
            self._numbers.pop(message_id, None)
            client.abort_request(message_id)
        elif kind is RequestType.UTILITY:
            call: UtilityCall = msgspec.msgpack.decode(payload, type=UtilityCall)
            calling = asyncio.ensure_future(self._call(int(message_id), call, front, client))
            self._calls.add(calling)
            calling.add_done_callback(self._calls.discard)

    async def _call(self, call_id: int, call: UtilityCall, front: FrontConnection, client: AsyncMPClient) -> None:
        try:
            answer = UtilityOutput(call_id, await client.call_utility(call))
        except EngineDeadError:
            return  # the front hears of it
        except EngineError as error:
            answer = UtilityOutput(call_id, False, str(error))
        if front is self._front:
            front.send(MessageType.OUTPUTS, msgspec.msgpack.encode(EngineCoreOutputs(utility_outputs=[answer])))

    async def _beat(self, front: FrontConnection) -> None:
        while True:
            waiting = 0 if self._client is None else self._client.num_messages_waiting
            front.send(MessageType.BEAT, msgspec.msgpack.encode(Beat(time.monotonic(), waiting)))
            await asyncio.sleep(BEAT_SECONDS)

    def _give_up(self) -> None:
        """The session is over: its requests go on elsewhere."""
        self._front = None
        if self._client is not None and not self._death.is_set():
            for request_id in self._numbers:
                self._leaving.add(request_id)
                self._has_left.clear()
                self._client.abort_request(request_id)
        self._numbers.clear()

    # -- the engine ----------------------------------------------------------------------------------------------------

    async def _ready_engine(self, num_blocks: int) -> AsyncMPClient:
        """The engine, with nothing to do and awake; started if there is none, or none of this size.

        Raises:
            EngineDeadError: it cannot start.
        """
        if self._client is not None and not self._death.is_set() and self._num_blocks == num_blocks:
            await _first_of(self._has_left, self._death)
            with contextlib.suppress(EngineDeadError):  # then there is another one
                if not self._death.is_set():
                    await self._client.call_utility(WakeUp())
                    return self._client
        await self._end_engine()
        self._policy.engine_started()
        is_first = not self._num_blocks
        self._num_blocks = num_blocks
        try:
            client = await self._start_engine(num_blocks)
            client.watch(lambda: bool(self._numbers or self._leaving))
        except (EngineDeadError, OSError) as error:
            if is_first:
                raise EngineDeadError(str(error)) from None
            self._delay = self._policy.delay_after_death()
            raise FrontLostError(f"the engine cannot be started again: {error}") from None
        self._policy.engine_is_ready()
        self._death.clear()
        self._leaving.clear()
        self._has_left.set()
        self._relaying = asyncio.ensure_future(self._relay(client))
        return client

    async def _start_engine(self, num_blocks: int) -> AsyncMPClient:
        """Start it in a thread, to the end even if this is cancelled: what has begun to start can be ended then."""
        cancelled = threading.Event()

        def start() -> AsyncMPClient:
            client = self._client = self._make_client(self._config, num_blocks)
            client.wait_until_ready(cancelled)
            return client

        starting = asyncio.ensure_future(asyncio.to_thread(start))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            cancelled.set()
            await asyncio.wait([starting])
            raise

    async def _relay(self, client: AsyncMPClient) -> None:
        """Pass on what the engine says, for as long as it lives."""
        try:
            while True:
                outputs = await client.get_output()
                for output in outputs.outputs:
                    if output.finish_reason is not None:
                        self._numbers.pop(output.request_id, None)
                if outputs.outputs:
                    self._policy.note_progress()
                if self._leaving:
                    self._leaving.difference_update(outputs.freed_request_ids)
                    if not self._leaving:
                        self._has_left.set()
                if self._front is not None:
                    outputs.utility_outputs = []  # `_call` passes on the answers to calls of the front
                    self._front.send(MessageType.OUTPUTS, msgspec.msgpack.encode(outputs))
        except EngineDeadError:
            self._death.set()

    async def _end_engine(self) -> None:
        client, self._client = self._client, None
        if self._relaying is not None:
            self._relaying.cancel()
            self._relaying = None
        if client is not None:
            client.stop_listening()
            await asyncio.to_thread(client.shutdown)


def _raise_rejection(payload: bytes) -> None:
    rejected = msgspec.msgpack.decode(payload, type=Rejected)
    if rejected.is_final:
        raise EngineError(f"the front does not take this engine: {rejected.reason}")
    raise FrontLostError(rejected.reason)


async def _first_of(*events: asyncio.Event) -> None:
    """Wait until one of them is set."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in waiting:
            one.cancel()
