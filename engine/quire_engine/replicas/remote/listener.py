"""Listener: where engines of other hosts join a front. One TCP port, which accepts only the keys that it knows."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq

from quire_engine.config import EngineConfig
from quire_engine.ipc.curve import Asked, bind, listen_for_questions, serve_securely
from quire_engine.ipc.keys import TrustedPeers, read_keys
from quire_engine.messages import EngineCoreReady
from quire_engine.replicas.remote.engine_digest import describe_engine, difference, difference_of_blocks
from quire_engine.replicas.remote.remote_replica import RemoteLink
from quire_engine.replicas.remote.sockets import LoopSocket, RareLog, monitor
from quire_engine.replicas.remote.wire import (
    BEAT_SECONDS,
    MAX_MISSED_BEATS,
    Accepted,
    Beat,
    Gone,
    Join,
    MessageType,
    Rejected,
)

logger = logging.getLogger(__name__)

CLOSING_SECONDS = 1.0
_FAILURES: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it went away, or said nothing for some seconds",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it has other keys for this front, or speaks another protocol",
}


@dataclass(slots=True)
class _Session:
    link: RemoteLink
    descriptor: int
    """The descriptor of its TCP connection."""
    num_missed: int = 0


class Listener:
    """Listens from the start, and accepts engines once `start` was called in the event loop that serves.

    Args:
        config: of the front.
        on_ready: called in that loop with each engine that can take requests.
        on_left: called with each engine that its host has taken away, whether or not it could take requests.

    Raises:
        ValueError: it cannot listen there, or the keys are not valid.
        OSError: the checkpoint cannot be read.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_ready: Callable[[RemoteLink], None],
        on_left: Callable[[RemoteLink], None],
    ) -> None:
        parallel = config.parallel
        assert parallel.data_parallel_key_file is not None
        path = Path(parallel.data_parallel_key_file)
        keys = read_keys(path)
        if not keys.peers:
            raise ValueError(f"data_parallel_key_file {path} trusts nobody, so that no engine can join; add the public "
                             f"key of its host with: quire keys host {path} --trust KEY")  # fmt: skip
        self._keys, self._peers = keys, TrustedPeers(path, keys)
        self._ranks = parallel.remote_ranks
        self._has_roles = parallel.disaggregation is not None
        self._description = describe_engine(config.core)
        self._like = EngineCoreReady()
        self._on_ready = on_ready
        self._on_left = on_left
        self._sessions: dict[bytes, _Session] = {}
        self._strangers = RareLog()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._beating: asyncio.Task[None] | None = None
        self._closing = threading.Lock()
        self._context = zmq.Context()
        try:
            self._open(parallel.data_parallel_address or "", parallel.data_parallel_rpc_port or 0)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def _open(self, host: str, port: int) -> None:
        router = self._context.socket(zmq.ROUTER)
        for option, value in ((zmq.ROUTER_MANDATORY, 1), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0)):
            router.setsockopt(option, value)
        serve_securely(router, self._keys)
        try:
            self.endpoint = bind(router, host, port)
        except ValueError as error:
            raise ValueError(f"data_parallel_address, data_parallel_rpc_port: {error}") from None
        authenticator = listen_for_questions(self._context)
        self._router = LoopSocket(router, self._on_message)
        self._authenticator = LoopSocket(authenticator, self._authenticate)
        self._monitor = monitor(router, zmq.EVENT_DISCONNECTED | sum(_FAILURES), self._on_event)

    def start(self, like: EngineCoreReady) -> None:
        """Accept engines, in the running event loop.

        Args:
            like: describes the engines of this host; the others have to be the same.
        """
        self._loop, self._like = asyncio.get_running_loop(), like
        for each in (self._authenticator, self._monitor, self._router):
            each.start()
        self._beating = self._loop.create_task(self._beat(), name="remote-engines")
        logger.info("engines of other hosts join at %s as data-parallel ranks %s", self.endpoint, _words(self._ranks))

    def close(self) -> None:
        """End all sessions. Idempotent; may be called from any thread."""
        with self._closing:
            if not self._context.closed:
                self._close_in_loop()

    def _close_in_loop(self) -> None:
        loop = self._loop
        if loop is not None and loop.is_running() and not _is_running_here(loop):
            closed = threading.Event()

            def close() -> None:
                self._close()
                closed.set()

            with contextlib.suppress(RuntimeError):  # it was closed at this moment
                loop.call_soon_threadsafe(close)
                if closed.wait(CLOSING_SECONDS):
                    return
        self._close()

    def _close(self) -> None:
        if self._context.closed:  # the loop was late
            return
        if self._beating is not None and self._loop is not None and not self._loop.is_closed():
            self._beating.cancel()
        for each in (self._router, self._monitor, self._authenticator):  # in this order: see `monitor`
            each.close()
        self._context.destroy(linger=0)

    # -- which engines may join ----------------------------------------------------------------------------------------

    def _authenticate(self, frames: list[zmq.Frame]) -> None:
        """Answer libzmq whether a connection may be made."""
        asked = Asked([frame.bytes for frame in frames], self._peers.now)
        if not asked.is_known:
            self._strangers.warn(
                "key",
                f"an engine at {asked.address} may not join: its public key {asked.key.hex()} is not among "
                "the peers in data_parallel_key_file; if it is yours, add it with: quire keys host FILE --trust KEY",
            )
        self._authenticator.send(asked.answer)

    def _on_event(self, event: int, value: int) -> None:
        if event in _FAILURES:
            self._strangers.warn("handshake", f"a connection to {self.endpoint} was refused: {_FAILURES[event]}")
            return
        ended = [identity for identity, session in self._sessions.items() if session.descriptor == value]
        if ended and self._loop is not None:
            self._loop.call_soon(self._on_disconnect, ended)

    def _on_disconnect(self, identities: Sequence[bytes]) -> None:
        self._router.take_in()  # the last message may say why
        for identity in identities:
            if session := self._sessions.get(identity):
                self._end(identity, f"the connection to the engine on {session.link.host} has ended")

    def _join(self, identity: bytes, frame: zmq.Frame) -> None:
        try:
            join = msgspec.msgpack.decode(frame.bytes, type=Join)
        except msgspec.MsgspecError:
            self._reject(identity, "the front does not understand this engine; install the same version on both", True)
            return
        host = f"{join.host} ({frame.get('Peer-Address')})"
        if join.rank not in self._ranks:
            self._reject(
                identity,
                f"data-parallel rank {join.rank} is none that engines of other hosts have: these are "
                f"{_words(self._ranks)} (data_parallel_size_local and data_parallel_size of the front, or its "
                "data_parallel_max_size)",
                True,
            )
        elif reason := difference(self._description, join.description, join.host):
            self._reject(identity, reason, True)
        elif taken := [one for one in self._sessions.values() if one.link.rank == join.rank]:
            self._reject(
                identity,
                f"data-parallel rank {join.rank} is taken by the engine on {taken[0].link.host}; give this one "
                "another --data-parallel-start-rank, or end that one",
                False,
            )
        else:
            link = RemoteLink(join.rank, host, lambda frames: self._send(identity, frames))
            self._sessions[identity] = _Session(link, frame.get(zmq.SRCFD))
            namespace = self._like.kv_namespace if self._has_roles else ""
            self._send(identity, _message(MessageType.ACCEPTED, Accepted(self._like.num_blocks, namespace)))

    def _reject(self, identity: bytes, reason: str, is_final: bool) -> None:
        self._strangers.warn(reason, f"an engine may not join: {reason}")
        self._send(identity, _message(MessageType.REJECTED, Rejected(reason, is_final)))

    # -- sessions ------------------------------------------------------------------------------------------------------

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        self._monitor.take_in()  # a connection that ended before this message may have had the same descriptor
        identity, kind = frames[0].bytes, frames[1].bytes if len(frames) > 1 else b""
        session = self._sessions.get(identity)
        if session is None:
            if kind == MessageType.JOIN.value and len(frames) == 3:
                self._join(identity, frames[2])
            return
        session.num_missed = 0
        try:
            self._take(identity, session.link, MessageType(kind), [frame.bytes for frame in frames[2:]])
        except (msgspec.MsgspecError, ValueError, IndexError) as error:
            self._end(identity, f"the engine on {session.link.host} says what its front does not understand: "
                      f"{error}")  # fmt: skip

    def _take(self, identity: bytes, link: RemoteLink, kind: MessageType, frames: list[bytes]) -> None:
        if kind is MessageType.OUTPUTS:
            link.note_output(frames[0])
        elif kind is MessageType.BEAT:
            link.note_beat(msgspec.msgpack.decode(frames[0], type=Beat))
        elif kind is MessageType.READY:
            ready, like = msgspec.msgpack.decode(frames[0], type=EngineCoreReady), self._like
            for name in ("num_blocks", "block_size", "max_model_len", "vocab_size", "num_kv_cache_tokens"):
                if getattr(ready, name) != getattr(like, name):
                    raise ValueError(f"its {name} is {getattr(ready, name)}, and {getattr(like, name)} here")
            if self._has_roles and (reason := difference_of_blocks(like.kv_namespace, ready.kv_namespace, link.host)):
                self._reject(identity, reason, True)
                self._end(identity, reason)
                return
            link.note_ready(ready, int(frames[1]))
            self._on_ready(link)
        elif kind is MessageType.LEAVING:
            self._end(identity, f"the engine on {link.host} was taken away", has_left=True)
            self._on_left(link)
        elif kind is MessageType.GONE:
            gone = msgspec.msgpack.decode(frames[0], type=Gone)
            self._end(identity, f"{gone.reason} (on {link.host})", frozenset(gone.begun))
        else:
            raise ValueError(f"an engine does not say {kind.value!r}")

    def _end(
        self, identity: bytes, reason: str, begun: frozenset[int] = frozenset(), *, has_left: bool = False
    ) -> None:
        """End a session; what still comes from it is ignored."""
        session = self._sessions.pop(identity, None)
        if session is not None:
            self._send(identity, _message(MessageType.REJECTED, Rejected(reason, False)))  # if it is still there
            session.link.note_end(reason, begun, has_left=has_left)

    def _send(self, identity: bytes, frames: Sequence[bytes]) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the monitor reports a connection that has ended
            self._router.send([identity, *frames])

    async def _beat(self) -> None:
        """Show the engines that this front is there, and end the sessions of engines that are not."""
        while True:
            for identity, session in list(self._sessions.items()):
                session.num_missed += 1
                if session.num_missed > MAX_MISSED_BEATS:
                    self._end(identity, f"the engine on {session.link.host} has said nothing for "
                              f"{BEAT_SECONDS * MAX_MISSED_BEATS:.0f} s")  # fmt: skip
                else:
                    self._send(identity, (MessageType.BEAT.value,))
            await asyncio.sleep(BEAT_SECONDS)


def _message(kind: MessageType, content: Any) -> tuple[bytes, bytes]:
    return kind.value, msgspec.msgpack.encode(content)


def _words(ranks: range) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"


def _is_running_here(loop: asyncio.AbstractEventLoop) -> bool:
    with contextlib.suppress(RuntimeError):
        return asyncio.get_running_loop() is loop
    return False
