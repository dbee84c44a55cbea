"""StoreServer: keeps KV blocks for engines of other hosts, in a folder of this one (`quire kv-store`).

::

    RemoteStore ══ ROUTER ── ROUTER ─┬─ REQ, a thread: FolderStore
    RemoteStore ══ ─┘                └─ REQ, a thread: FolderStore …

A request goes to an idle thread; while there is none, it waits in the socket. Only hosts with known keys can connect
(`ipc.curve`). `RemoteStore` describes the messages. `FolderStore` checks blocks and limits how much is kept.

libzmq limits the size of a frame and the number of messages of one connection, but not how many frames a message has,
nor the sum over all connections. So the process watches its memory, and closes all connections when it takes more than
its share. Engines connect again.
"""

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from quire_engine.ipc.curve import Asked, bind, listen_for_questions, serve_securely
from quire_engine.ipc.keys import HostKeys, TrustedPeers
from quire_engine.kv_connector.block_file import MOST_TOGETHER, BlockFileError
from quire_engine.kv_connector.folder_store import FolderStore, num_places, require_writable
from quire_engine.kv_connector.remote_store import MAX_FRAME_BYTES, Operation
from quire_engine.system.memory import available_memory_bytes, resident_memory_bytes, trim_heap

logger = logging.getLogger(__name__)

NUM_THREADS = 8
MAX_QUEUED = 4
"""Messages of a connection that wait here, in each direction. More requests wait at their sender; more answers are
dropped, as the sender reads none."""
MEMORY_SHARE = 0.5
"""The share of the memory that is free at the start that this process may take."""
WATCH_MS = 200
MAX_PLACES = 4096
"""Limit of ranks of all namespaces. Each has 256 folders, which `max_bytes` does not count."""
MAX_DESCRIPTION = 1 << 16
HEARTBEAT_MS = 10_000
"""The connections of a host that does not answer a heartbeat are closed."""
WARN_SECONDS = 30.0
MAX_RANK = 1 << 16
_INSIDE = "inproc://threads"
_FOLDER = re.compile(r"[0-9a-f]{2}")
_Work = Callable[..., None]


_Read = tuple[list[bytes], int]
_DECODERS: dict[bytes, msgspec.msgpack.Decoder[Any]] = {
    operation: msgspec.msgpack.Decoder(tuple[bytes, int, argument])  # type: ignore[valid-type]
    for operation, argument in (
        (Operation.READ, _Read), (Operation.WRITE, list[bytes]), (Operation.DESCRIBE, str), (Operation.FOLDERS, None),
        (Operation.HASHES, str),
    )
}  # fmt: skip
"""The types of a request's second frame: namespace, rank and argument."""


class _BadRequestError(Exception):
    """A message is no request of a `RemoteStore`."""


class StoreServer:
    """Serves from its construction until it is closed, in threads of its own.

    Args:
        folder: of the blocks; it is made if there is none.
        max_bytes: limit of all of them.
        keys: of this host; their peers may connect.
        host: where to listen.
        port: likewise; 0: any.
        key_file: the file of the keys, to which peers may be added while it serves; unset: the peers stay the same.

    Raises:
        ValueError: it cannot listen there.
        OSError: the folder cannot be made, or cannot be written.
    """

    def __init__(
        self, folder: Path, max_bytes: int, keys: HostKeys, host: str, port: int, key_file: Path | None = None
    ) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_writable(folder)
        self._folder = folder
        self._max_bytes = max_bytes
        self._keys = keys
        self._peers = None if key_file is None else TrustedPeers(key_file, keys, "--key-file")
        self._stores: dict[tuple[bytes, int], FolderStore] = {}
        self._context = zmq.Context()
        self._context.set(zmq.BLOCKY, 0)
        self._warn_at = 0.0
        self._max_memory = resident_memory_bytes() + int(available_memory_bytes() * MEMORY_SHARE)
        inside = self._context.socket(zmq.ROUTER)
        asked = listen_for_questions(self._context)
        inside.bind(_INSIDE)
        try:
            router = self._make_router()
            self.endpoint = bind(router, host, port)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        workers = [self._context.socket(zmq.REQ) for _ in range(NUM_THREADS)]
        for worker in workers:
            worker.connect(_INSIDE)
        self._threads = [
            self._start("keys", self._authenticate, asked),
            self._start("dispatch", self._dispatch, router, inside),
            *(self._start("files", self._serve, worker) for worker in workers),
        ]

    def close(self) -> None:
        """End it. No request is answered afterwards."""
        self._context.term()  # the threads see that, and close their sockets
        for thread in self._threads:
            thread.join()

    def _start(self, name: str, work: _Work, *sockets: "zmq.Socket[Any]") -> threading.Thread:
        def run() -> None:
            try:
                work(*sockets)
            except zmq.ContextTerminated:
                pass
            finally:
                for one in sockets:
                    one.close(0)

        thread = threading.Thread(target=run, name=f"quire-kv-{name}", daemon=True)
        thread.start()
        return thread

    def _authenticate(self, asked: "zmq.Socket[Any]") -> None:
        unknown: set[bytes] = set()
        while True:
            frames = asked.recv_multipart()
            connection = Asked(frames, self._keys.peers if self._peers is None else self._peers.now)
            if not connection.is_known and connection.key not in unknown and len(unknown) < 100:
                unknown.add(connection.key)
                logger.warning(
                    "an engine at %s is not let in: its public key %s is not among the peers in the file of keys; if "
                    "it is yours, add it with: quire keys host FILE --trust KEY, and start this store again",
                    connection.address, connection.key.hex(),
                )  # fmt: skip
            asked.send_multipart(connection.answer)

    def _make_router(self) -> "zmq.Socket[Any]":
        router: zmq.Socket[Any] = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.MAXMSGSIZE, MAX_FRAME_BYTES), (zmq.RCVHWM, MAX_QUEUED), (zmq.SNDHWM, MAX_QUEUED),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
        ):  # fmt: skip
            router.setsockopt(option, value)
        serve_securely(router, self._keys)
        return router

    def _dispatch(self, router: "zmq.Socket[Any]", inside: "zmq.Socket[Any]") -> None:
        idle: deque[bytes] = deque()
        poller = zmq.Poller()
        poller.register(inside, zmq.POLLIN)
        look_at = 0.0
        try:
            while True:
                if time.monotonic() >= look_at:
                    look_at = time.monotonic() + WATCH_MS / 1000
                    if resident_memory_bytes() > self._max_memory:
                        poller.register(router, 0)
                        router = self._listen_again(router)
                poller.register(router, zmq.POLLIN if idle else 0)
                ready = dict(poller.poll(WATCH_MS))
                if inside in ready:
                    worker, _, *answer = inside.recv_multipart(copy=False)
                    idle.append(worker.bytes)
                    if len(answer) > 1:
                        router.send_multipart(answer, copy=False)
                elif router in ready:
                    inside.send_multipart([idle.popleft(), b"", *router.recv_multipart(copy=False)], copy=False)
        finally:
            router.close(0)

    def _listen_again(self, router: "zmq.Socket[Any]") -> "zmq.Socket[Any]":
        """Close all connections, with all that waits in them, and listen again."""
        logger.warning(
            "all connections are closed: what came over them takes more than %d MiB, half of the memory that was free "
            "at the start", self._max_memory >> 20
        )  # fmt: skip
        router.close(0)
        while True:
            new = self._make_router()
            try:
                new.setsockopt(zmq.IPV6, "[" in self.endpoint)
                new.bind(self.endpoint)
            except zmq.ContextTerminated:
                new.close(0)
                raise
            except zmq.ZMQError:  # the old one is not closed yet
                new.close(0)
                time.sleep(0.05)
            else:
                trim_heap()
                return new

    def _serve(self, worker: "zmq.Socket[Any]") -> None:
        worker.send(b"")  # it is idle
        while True:
            client, empty, *frames = worker.recv_multipart(copy=False)
            try:
                answer = self._answer(frames)
            except _BadRequestError as error:
                answer = [str(error).encode(errors="replace"), b""]
            except OSError as error:
                self._warn("blocks cannot be read or written", error)
                answer = [str(error).encode(errors="replace"), b""]
            except Exception as error:
                self._warn("a request cannot be answered", error)
                answer = [b"it has failed; its log says why", b""]
            worker.send_multipart([client, empty, *answer], copy=False)
            del frames, answer  # not held until the next request

    def _warn(self, what: str, error: Exception) -> None:
        if time.monotonic() >= self._warn_at:
            self._warn_at = time.monotonic() + WARN_SECONDS
            logger.warning("%s: %s", what, error, exc_info=not isinstance(error, OSError | BlockFileError))

    def _answer(self, frames: Sequence[zmq.Frame]) -> list[Any]:
        try:
            if not 2 <= len(frames) <= 2 + MOST_TOGETHER:
                raise _BadRequestError("this is no question")
            operation, payloads = frames[0].bytes, [frame.buffer for frame in frames[2:]]
            if operation not in _DECODERS:
                raise _BadRequestError("there is no such operation")
            namespace, rank, argument = _DECODERS[operation].decode(frames[1].buffer)
            result, found = self._do(operation, namespace, rank, argument, payloads)
        except (msgspec.MsgspecError, _BadRequestError, UnicodeError) as error:
            raise _BadRequestError(f"{error}; is the engine of this version?") from None
        return [b"", msgspec.msgpack.encode(result), *found]

    def _store(self, namespace: bytes, rank: int, makes: bool) -> FolderStore | None:
        """None if nothing was ever written there, and it is not to be made."""
        if len(namespace) != 32 or not 0 <= rank < MAX_RANK:
            raise _BadRequestError("there is no such namespace or rank")
        key = namespace, rank
        if key not in self._stores:
            if not (self._folder / namespace.hex() / str(rank)).is_dir():
                if not makes:
                    return None
                if num_places(self._folder) >= MAX_PLACES:
                    raise OSError(
                        f"{self._folder} has blocks of {MAX_PLACES} ranks; delete namespaces that no engine uses"
                    )
            self._stores[key] = FolderStore(self._folder, *key, self._max_bytes)
        return self._stores[key]

    def _do(
        self, operation: bytes, namespace: bytes, rank: int, argument: Any, payloads: Sequence[memoryview]
    ) -> tuple[Any, Sequence[Any]]:
        store = self._store(namespace, rank, makes=operation in (Operation.WRITE, Operation.DESCRIBE))
        if operation == Operation.READ:
            hashes, size = argument
            _check(hashes, size)
            if store is None:
                return 0, ()
            found: list[memoryview] = []
            try:
                for block_hash in hashes:
                    payload = memoryview(bytearray(size))
                    if not store.read([(block_hash, payload)]):
                        break
                    found.append(payload)
            except BlockFileError as error:
                self._warn("a KV block was damaged, and is deleted", error)
            return len(found), found
        if operation == Operation.WRITE:
            assert store is not None
            hashes = argument
            if len(hashes) != len(payloads) or len({len(payload) for payload in payloads}) > 1:
                raise _BadRequestError("these are not as many blocks as hashes, or of several sizes")
            _check(hashes, max(map(len, payloads), default=0))
            return store.write(list(zip(hashes, payloads, strict=True))), ()
        if operation == Operation.DESCRIBE:
            assert store is not None
            if len(argument) > MAX_DESCRIPTION:
                raise _BadRequestError(f"a description of {len(argument)} characters is too long")
            store.describe(argument)
            return None, ()
        if operation == Operation.FOLDERS:
            return {} if store is None else store.folders(), ()
        if not _FOLDER.fullmatch(argument):
            raise _BadRequestError("there is no such folder")
        return [] if store is None else list(store.hashes(argument)), ()


def _check(hashes: Sequence[bytes], size: int) -> None:
    if len(hashes) > MOST_TOGETHER or any(len(block_hash) != 32 for block_hash in hashes):
        raise _BadRequestError("these are no hashes of blocks, or too many")
    if not 0 <= size <= MAX_FRAME_BYTES:
        raise _BadRequestError(f"blocks of {size} bytes are too large")
