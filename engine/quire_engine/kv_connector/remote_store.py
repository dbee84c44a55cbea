"""RemoteStore: KV blocks of a store on another host (`StoreServer`), over TCP.

::

    a thread ─ REQ ══ CurveZMQ ══ ROUTER ─ StoreServer ─ FolderStore

    request   operation │ [namespace, rank, argument] │ payloads …
    answer    b"" │ result │ payloads …        or what went wrong, in words │ b""

Each thread that waits for an answer has a connection of its own. When a store does not answer in time, or its answer is
malformed, the connection is closed and the store is not asked for `PAUSE_SECONDS`: engines go on as if there were no
blocks.
"""

import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from quire_engine.config import StorageConfig
from quire_engine.ipc.curve import connect_securely, tcp_address
from quire_engine.ipc.keys import HostKeys, read_keys
from quire_engine.kv_connector.block_file import MOST_TOGETHER
from quire_engine.system.crash_loop import CircuitBreaker
from quire_engine.system.log_lines import printable

ANSWER_SECONDS = 3.0
"""Timeout of connecting, and of an answer."""
PAUSE_SECONDS = 5.0
MAX_FRAME_BYTES = (1 << 30) // MOST_TOGETHER
"""Limit of a block, or of a list of hashes."""
MAX_WORDS = 300
"""Characters of a store's error message."""
_FOLDER = re.compile(r"[0-9a-f]{2}")


class Operation:
    """The first frame of a request."""

    READ = b"read"
    WRITE = b"write"
    DESCRIBE = b"describe"
    FOLDERS = b"folders"
    HASHES = b"hashes"


class RemoteStore:
    """The blocks of one rank of one namespace: a `ListedStore`. It connects with the first request.

    Args:
        host: of the store.
        port: where it listens.
        keys: of this host; the first peer is the store's host.
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
        self._breaker = CircuitBreaker()
        self._is_closed = False

    @classmethod
    def connect(cls, config: StorageConfig, namespace: bytes, rank: int) -> "RemoteStore":
        """From the settings.

        Raises:
            ValueError: the file of keys is wrong.
        """
        keys = read_keys(Path(config.key_file), "kv_transfer_config: key_file")
        if not keys.peers:
            raise ValueError(f"kv_transfer_config: key_file {config.key_file} trusts nobody; add the public key of the "
                             f"store's host with: quire keys host {config.key_file} --trust KEY")  # fmt: skip
        return cls(config.host, config.port, keys, namespace, rank)

    def read(self, blocks: Sequence[tuple[bytes, memoryview]]) -> int:
        """The store has checked the blocks, and the connection checks all that it carries."""
        for first in range(0, len(blocks), MOST_TOGETHER):
            some = blocks[first : first + MOST_TOGETHER]
            size = len(some[0][1])
            found, payloads = self._request(int, Operation.READ, [[block_hash for block_hash, _ in some], size])
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
            kept, _ = self._request(int, Operation.WRITE, hashes, payloads)
            if not 0 <= kept <= len(some):
                raise self._bad_answer(f"that it keeps {kept} blocks of {len(some)}")
            if kept < len(some):
                return first + int(kept)
        return len(blocks)

    def describe(self, text: str) -> None:
        self._request(type(None), Operation.DESCRIBE, text)

    def folders(self) -> dict[str, int]:
        folders, _ = self._request(dict[str, int], Operation.FOLDERS)
        if not all(map(_FOLDER.fullmatch, folders)):
            raise self._bad_answer("folders that are none of blocks")
        return dict(folders)

    def hashes(self, folder: str) -> set[bytes]:
        hashes, _ = self._request(list[bytes], Operation.HASHES, folder)
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

    def _request(
        self, result_type: Any, operation: bytes, argument: Any = None, payloads: Sequence[memoryview] = ()
    ) -> tuple[Any, list[memoryview]]:
        if self._breaker.is_open:
            raise OSError(f"the KV store at {self.place} did not answer a moment ago")
        asked = msgspec.msgpack.encode([self._namespace, self._rank, argument])
        socket: zmq.Socket[bytes] | None = None
        try:
            socket = self._take_socket()
            socket.send_multipart([operation, asked, *payloads], copy=False)
            error, result, *found = socket.recv_multipart(copy=False)
            words = printable(error.bytes[:MAX_WORDS].decode(errors="replace"))
            answer: Any = None if words else msgspec.msgpack.decode(result.buffer, type=result_type)
        except (zmq.ZMQError, msgspec.MsgspecError, ValueError) as failure:
            if socket is not None:
                socket.close()  # a late answer would be taken for the next request's
            if self._is_closed:
                raise OSError("the engine ends") from None
            self._breaker.trip(PAUSE_SECONDS)
            what = "does not answer" if isinstance(failure, zmq.Again) else f"cannot be asked ({failure})"
            raise OSError(f"the KV store at {self.place} {what}; is it there, behind no firewall, and does each of the "
                          "two trust the other's key?") from None  # fmt: skip
        self._give_socket(socket)
        if words:
            raise OSError(f"the KV store at {self.place}: {words}")
        return answer, [frame.buffer for frame in found]

    def _bad_answer(self, what: str) -> OSError:
        self._breaker.trip(PAUSE_SECONDS)
        return OSError(f"the KV store at {self.place} says {what}; is it of this version?")

    def _take_socket(self) -> "zmq.Socket[bytes]":
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
