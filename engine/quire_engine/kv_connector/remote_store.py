"""RemoteStore: KV blocks of a store on another host (`StoreServer`), over TCP.

::

    a thread ─ REQ ══ CurveZMQ ══ ROUTER ─ StoreServer ─ FolderStore

    request   operation │ [namespace, rank, argument] │ payloads …
    answer    b"" │ result │ payloads …        or what went wrong, in words │ b""

Threads that ask at once have a connection each. A store that does not answer in time, or answers what is no answer,
loses it, and is not asked again for `PAUSE_SECONDS`: engines go on without, as they do when blocks are not there.
"""

import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from quire_engine.config import StorageConfig
from quire_engine.ipc.curve import connect_securely, tcp_address
from quire_engine.ipc.keys import HostKeys, read_keys
from quire_engine.kv_connector.block_file import MOST_TOGETHER
from quire_engine.system.log_lines import printable

ANSWER_SECONDS = 3.0
"""A store that takes longer to be reached, or to answer, is as good as away."""
PAUSE_SECONDS = 5.0
MAX_FRAME_BYTES = (1 << 30) // MOST_TOGETHER
"""Of a block, or of a list of hashes."""
MAX_WORDS = 300
"""Characters of what a store says that went wrong."""
_FOLDER = re.compile(r"[0-9a-f]{2}")


class Operation:
    """What a store can be asked for: the first frame."""

    READ = b"read"
    WRITE = b"write"
    DESCRIBE = b"describe"
    FOLDERS = b"folders"
    HASHES = b"hashes"


class RemoteStore:
    """The blocks of one rank of one namespace; see `BlockStore`. Nothing is connected before the first question.

    Args:
        host: of the store.
        port: where it listens.
        keys: of this host, which trust the store's first.
        namespace: 32 bytes.
        rank: whose blocks.
    """

    def __init__(self, host: str, port: int, keys: HostKeys, namespace: bytes, rank: int) -> None:
        self.place = f"{host}:{port}"
        self._address = tcp_address(host, port)
        self._keys = keys
        self._namespace = namespace
        self._rank = rank
        self._context = zmq.Context()
        self._lock = threading.Lock()
        self._idle: list[zmq.Socket[bytes]] = []
        self._silent_until = 0.0
        self._is_closed = False

    @classmethod
    def connect(cls, config: StorageConfig, namespace: bytes, rank: int) -> "RemoteStore":
        """As the settings say.

        Raises:
            ValueError: the file of keys is not as it has to be.
        """
        keys = read_keys(Path(config.key_file), "kv_transfer_config: key_file")
        if not keys.peers:
            raise ValueError(f"kv_transfer_config: key_file {config.key_file} trusts nobody; add the public key of the "
                             f"store's host with: quire key {config.key_file} --trust KEY")  # fmt: skip
        return cls(config.host, config.port, keys, namespace, rank)

    def read(self, blocks: Sequence[tuple[bytes, memoryview]]) -> int:
        """See `BlockStore`. The store has checked them, and the connection checks all that it carries."""
        for first in range(0, len(blocks), MOST_TOGETHER):
            some = blocks[first : first + MOST_TOGETHER]
            size = len(some[0][1])
            found, payloads = self._ask(int, Operation.READ, [[block_hash for block_hash, _ in some], size])
            if not len(payloads) == found <= len(some) or any(len(payload) != size for payload in payloads):
                raise self._bad_answer("blocks of another size, or not as many as it says")
            for (_, place), payload in zip(some, payloads, strict=False):
                place[:] = payload
            if found < len(some):
                return first + int(found)
        return len(blocks)

    def write(self, blocks: Sequence[tuple[bytes, memoryview]]) -> int:
        for first in range(0, len(blocks), MOST_TOGETHER):
            some = blocks[first : first + MOST_TOGETHER]
            hashes, payloads = [block_hash for block_hash, _ in some], [payload for _, payload in some]
            kept, _ = self._ask(int, Operation.WRITE, hashes, payloads)
            if not 0 <= kept <= len(some):
                raise self._bad_answer(f"that it keeps {kept} blocks of {len(some)}")
            if kept < len(some):
                return first + int(kept)
        return len(blocks)

    def prepare(self, block_bytes: int) -> None:
        """See `BlockStore`: they may be of any size."""

    def describe(self, text: str) -> None:
        self._ask(type(None), Operation.DESCRIBE, text)

    def folders(self) -> dict[str, int]:
        folders, _ = self._ask(dict[str, int], Operation.FOLDERS)
        if not all(map(_FOLDER.fullmatch, folders)):
            raise self._bad_answer("folders that are none of blocks")
        return dict(folders)

    def hashes(self, folder: str) -> set[bytes]:
        hashes, _ = self._ask(list[bytes], Operation.HASHES, folder)
        start = bytes.fromhex(folder)
        if not all(len(one) == 32 and one.startswith(start) for one in hashes):
            raise self._bad_answer("hashes that are not of the folder")
        return set(hashes)

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
            self._is_closed = True
        for socket in idle:
            socket.close()
        self._context.term()  # threads that wait for an answer stop, and close their sockets

    def _ask(
        self, result_type: Any, operation: bytes, argument: Any = None, payloads: Sequence[memoryview] = ()
    ) -> tuple[Any, list[memoryview]]:
        """Returns the result, which is of the type, and the payloads that came with it."""
        if time.monotonic() < self._silent_until:
            raise OSError(f"the KV store at {self.place} did not answer a moment ago")
        question = msgspec.msgpack.encode([self._namespace, self._rank, argument])
        socket: zmq.Socket[bytes] | None = None
        try:
            socket = self._take_socket()
            socket.send_multipart([operation, question, *payloads], copy=False)
            error, result, *found = socket.recv_multipart(copy=False)
            words = printable(error.bytes[:MAX_WORDS].decode(errors="replace"))
            answer: Any = None if words else msgspec.msgpack.decode(result.buffer, type=result_type)
        except (zmq.ZMQError, msgspec.MsgspecError, ValueError) as failure:
            if socket is not None:
                socket.close()  # what comes later would answer the next question
            if self._is_closed:
                raise OSError("the engine ends") from None
            self._silent_until = time.monotonic() + PAUSE_SECONDS
            what = "does not answer" if isinstance(failure, zmq.Again) else f"cannot be asked ({failure})"
            raise OSError(f"the KV store at {self.place} {what}; is it there, behind no firewall, and does each of the "
                          "two trust the other's key?") from None  # fmt: skip
        self._give_socket(socket)
        if words:
            raise OSError(f"the KV store at {self.place}: {words}")
        return answer, [frame.buffer for frame in found]

    def _bad_answer(self, what: str) -> OSError:
        """It is not asked for a while, as one that does not answer."""
        self._silent_until = time.monotonic() + PAUSE_SECONDS
        return OSError(f"the KV store at {self.place} says {what}; is it of this version?")

    def _take_socket(self) -> "zmq.Socket[bytes]":
        """For one question; no other thread has it meanwhile."""
        with self._lock:
            if self._is_closed:
                raise OSError("the engine ends")
            if self._idle:
                return self._idle.pop()
            socket: zmq.Socket[bytes] = self._context.socket(zmq.REQ)
        try:
            for option, value in (
                (zmq.SNDTIMEO, int(1000 * ANSWER_SECONDS)), (zmq.RCVTIMEO, int(1000 * ANSWER_SECONDS)),
                (zmq.LINGER, 0), (zmq.IMMEDIATE, 1), (zmq.MAXMSGSIZE, MAX_FRAME_BYTES),
            ):  # fmt: skip
                socket.setsockopt(option, value)
            connect_securely(socket, self._keys)
            socket.connect(self._address)
        except BaseException:
            socket.close()
            raise
        return socket

    def _give_socket(self, socket: "zmq.Socket[bytes]") -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(socket)
                return
        socket.close()
