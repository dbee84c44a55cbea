"""StoreServer: keeps KV blocks for engines of other hosts, in a folder of this one (`quire kv-store`).

::

    RemoteStore ══ ROUTER ── ROUTER ─┬─ REQ, a thread: FolderStore
    RemoteStore ══ ─┘                └─ REQ, a thread: FolderStore …

A question goes to a thread that is idle, and waits outside while none is. Only hosts whose keys are known get in
(`ipc.curve`). A question is a message, and so is its answer; see `RemoteStore`. What a block is checked for, and how
much is kept, is the folder's matter.
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
from quire_engine.kv_connector.folder_store import FolderStore, require_writable
from quire_engine.kv_connector.remote_store import Operation

__all__ = ["StoreServer"]

logger = logging.getLogger(__name__)

NUM_THREADS = 8
MAX_MESSAGE_BYTES = 1 << 30
MAX_BLOCK_BYTES = MAX_MESSAGE_BYTES // MOST_TOGETHER
MAX_QUEUED = 4
"""Messages of a connection that wait here; more wait with their sender."""
HEARTBEAT_MS = 10_000
"""A host that says nothing to a heartbeat is gone, and its connections are closed."""
SAY_SECONDS = 30.0
MAX_RANK = 1 << 16
_INSIDE = "inproc://threads"
_FOLDER = re.compile(r"[0-9a-f]{2}")
_Work = Callable[..., None]


class _Question(msgspec.Struct, array_like=True):
    namespace: bytes
    rank: int
    argument: Any


class _BadQuestionError(Exception):
    """What came is no question of a RemoteStore."""


class StoreServer:
    """Serves from its construction until it is closed, in threads of its own.

    Args:
        folder: of the blocks; it is made if it is not there.
        max_bytes: of all of them.
        keys: of this host, which trust those that may come.
        host: where to listen.
        port: likewise; 0: any.
        key_file: from where the keys are, and where more peers may be added; unset: there never will be others.

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
        self._say_at = 0.0
        router, inside = self._context.socket(zmq.ROUTER), self._context.socket(zmq.ROUTER)
        asked = listen_for_questions(self._context)
        router.setsockopt(zmq.MAXMSGSIZE, MAX_BLOCK_BYTES)
        router.setsockopt(zmq.RCVHWM, MAX_QUEUED)
        router.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        serve_securely(router, keys)
        inside.bind(_INSIDE)
        try:
            self.endpoint = bind(router, host, port)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        workers = [self._context.socket(zmq.REQ) for _ in range(NUM_THREADS)]
        for worker in workers:
            worker.connect(_INSIDE)
        self._threads = [
            self._start("keys", self._let_in, asked),
            self._start("deal", _deal, router, inside),
            *(self._start("files", self._serve, worker) for worker in workers),
        ]

    def close(self) -> None:
        """End it; nobody gets another answer."""
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

    def _let_in(self, asked: "zmq.Socket[Any]") -> None:
        strangers: set[bytes] = set()
        while True:
            frames = asked.recv_multipart()
            question = Asked(frames, self._keys.peers if self._peers is None else self._peers.now)
            if not question.is_known and question.key not in strangers and len(strangers) < 100:
                strangers.add(question.key)
                logger.warning(
                    "an engine at %s is not let in: its public key %s is not among the peers in the file of keys; if "
                    "it is yours, add it with: quire key FILE --trust KEY, and start this store again",
                    question.address, question.key.hex(),
                )  # fmt: skip
            asked.send_multipart(question.answer)

    def _serve(self, worker: "zmq.Socket[Any]") -> None:
        worker.send(b"")  # it is idle
        while True:
            client, empty, *frames = worker.recv_multipart(copy=False)
            try:
                answer = self._answer(frames)
            except _BadQuestionError as error:
                answer = [str(error).encode(), b""]
            except OSError as error:
                self._say(error)
                answer = [str(error).encode(), b""]
            except Exception:
                logger.exception("a question cannot be answered")
                answer = [b"it has failed; its log says why", b""]
            worker.send_multipart([client, empty, *answer], copy=False)

    def _say(self, error: OSError) -> None:
        if time.monotonic() >= self._say_at:
            self._say_at = time.monotonic() + SAY_SECONDS
            logger.warning("blocks cannot be read or written: %s", error)

    def _answer(self, frames: Sequence[zmq.Frame]) -> list[Any]:
        if len(frames) < 2:
            raise _BadQuestionError("this is no question; is the engine of this version?")
        operation, payloads = frames[0].bytes, [frame.buffer for frame in frames[2:]]
        try:
            question = msgspec.msgpack.decode(frames[1].buffer, type=_Question)
            store = self._store(question)
            result, found = self._do(operation, store, question.argument, payloads)
        except (msgspec.MsgspecError, _BadQuestionError) as error:
            raise _BadQuestionError(f"{error}; is the engine of this version?") from None
        return [b"", msgspec.msgpack.encode(result), *found]

    def _store(self, question: _Question) -> FolderStore:
        if len(question.namespace) != 32 or not 0 <= question.rank < MAX_RANK:
            raise _BadQuestionError("there is no such namespace or rank")
        key = question.namespace, question.rank
        if key not in self._stores:
            self._stores[key] = FolderStore(self._folder, *key, self._max_bytes)
        return self._stores[key]

    def _do(
        self, operation: bytes, store: FolderStore, argument: Any, payloads: Sequence[memoryview]
    ) -> tuple[Any, Sequence[Any]]:
        """Returns the result, and payloads."""
        if operation == Operation.READ:
            hashes, size = msgspec.convert(argument, tuple[list[bytes], int])
            _check(hashes, size)
            found: list[memoryview] = []
            try:
                for block_hash in hashes:
                    payload = memoryview(bytearray(size))
                    if not store.read([(block_hash, payload)]):
                        break
                    found.append(payload)
            except BlockFileError as error:
                logger.warning("a KV block was damaged, and is deleted: %s", error)
            return len(found), found
        if operation == Operation.WRITE:
            hashes = msgspec.convert(argument, list[bytes])
            if len(hashes) != len(payloads) or len({len(payload) for payload in payloads}) > 1:
                raise _BadQuestionError("these are not as many blocks as hashes, or of several sizes")
            _check(hashes, max(map(len, payloads), default=0))
            return store.write(list(zip(hashes, payloads, strict=True))), ()
        if operation == Operation.DESCRIBE:
            store.describe(msgspec.convert(argument, str)[: 1 << 20])
            return None, ()
        if operation == Operation.FOLDERS:
            return store.folders(), ()
        if operation == Operation.HASHES:
            folder = msgspec.convert(argument, str)
            if not _FOLDER.fullmatch(folder):
                raise _BadQuestionError("there is no such folder")
            return list(store.hashes(folder)), ()
        raise _BadQuestionError("nobody can ask that")


def _deal(router: "zmq.Socket[Any]", inside: "zmq.Socket[Any]") -> None:
    """Hand questions to threads that are idle, and their answers back."""
    idle: deque[bytes] = deque()
    poller = zmq.Poller()
    poller.register(inside, zmq.POLLIN)
    while True:
        poller.register(router, zmq.POLLIN if idle else 0)
        ready = dict(poller.poll())
        if inside in ready:
            worker, _, *answer = inside.recv_multipart(copy=False)
            idle.append(worker.bytes)
            if len(answer) > 1:
                router.send_multipart(answer, copy=False)
        elif router in ready:
            inside.send_multipart([idle.popleft(), b"", *router.recv_multipart(copy=False)], copy=False)


def _check(hashes: Sequence[bytes], size: int) -> None:
    if len(hashes) > MOST_TOGETHER or any(len(block_hash) != 32 for block_hash in hashes):
        raise _BadQuestionError("these are no hashes of blocks, or too many")
    if not 0 <= size <= MAX_BLOCK_BYTES:
        raise _BadQuestionError(f"blocks of {size} bytes are too large")
