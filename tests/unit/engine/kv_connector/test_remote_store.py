"""A store on another host: what is read is what was written; strangers, and a store that is away, disturb nothing."""

import errno
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from quire_engine.config import KVTransferConfig, StorageConfig
from quire_engine.ipc.curve import connect_securely
from quire_engine.ipc.keys import add_peers, make_keys, read_keys
from quire_engine.kv_connector import remote_store
from quire_engine.kv_connector.block_index import BlockIndex
from quire_engine.kv_connector.block_store import BlockStore
from quire_engine.kv_connector.remote_store import RemoteStore
from quire_engine.kv_connector.store_server import StoreServer
from quire_engine.kv_connector.tiered_store import open_store
from support.ports import unused_port
from support.processes import error_in_a_child
from support.remote import store_server, trusting_hosts

NAMESPACE = hashlib.sha256(b"a model").digest()
SIZE = 1000
HASHES = [hashlib.sha256(bytes([number])).digest() for number in range(20)]
BLOCKS = [(block_hash, memoryview(block_hash[:1] * SIZE)) for block_hash in HASHES]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_store, "ANSWER_SECONDS", 1.0)


@pytest.fixture
def transfer(tmp_path: Path) -> Iterator[KVTransferConfig]:
    with store_server(tmp_path) as (_, setting):
        yield KVTransferConfig.from_value(setting)


@pytest.fixture
def opened() -> Iterator[Callable[..., BlockStore]]:
    """Opens stores, and closes them in the end."""
    with ExitStack() as stack:

        def open_one(transfer: KVTransferConfig, namespace: bytes = NAMESPACE, rank: int = 0) -> BlockStore:
            store = open_store(transfer.tiers[0], None, namespace, rank)
            stack.callback(store.close)
            return store

        yield open_one


def read(store: BlockStore, hashes: list[bytes]) -> list[bytes]:
    rooms = [(block_hash, memoryview(bytearray(SIZE))) for block_hash in hashes]
    return [bytes(room) for _, room in rooms[: store.read(rooms)]]


def test_another_process_reads_what_one_has_written(
    transfer: KVTransferConfig, opened: Callable[..., BlockStore]
) -> None:
    store, other = opened(transfer), opened(transfer)
    assert store.write(BLOCKS) == len(BLOCKS)
    assert read(other, HASHES) == [bytes(payload) for _, payload in BLOCKS]
    assert read(other, [HASHES[1], bytes(32), HASHES[2]]) == [bytes(BLOCKS[1][1])]
    assert read(opened(transfer, rank=1), HASHES) == read(opened(transfer, bytes(32)), HASHES) == []
    assert {one for folder in other.folders() for one in other.hashes(folder)} == set(HASHES)
    assert BlockIndex(other).num_stored(HASHES) == len(HASHES)
    assert store.write([]) == store.read([]) == 0


def test_damage_is_found_where_the_files_are(
    transfer: KVTransferConfig, tmp_path: Path, opened: Callable[..., BlockStore]
) -> None:
    store = opened(transfer)
    store.describe("{}")
    store.write(BLOCKS[:3])
    path = next(tmp_path.glob(f"blocks/*/0/*/{HASHES[1].hex()}"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert len(read(store, HASHES[:3])) == 1
    assert read(store, HASHES[1:3]) == []
    assert not path.exists()
    assert store.write(BLOCKS[:3]) == 3
    assert len(read(store, HASHES[:3])) == 3


def test_one_that_is_away_is_asked_again_after_a_while(tmp_path: Path, opened: Callable[..., BlockStore]) -> None:
    with store_server(tmp_path) as (server, setting):
        store = opened(KVTransferConfig.from_value(setting))
        store.write(BLOCKS[:2])
        port = int(server.endpoint.rpartition(":")[2])
    with pytest.raises(OSError, match="does not answer; is it there"):
        read(store, HASHES)
    with pytest.raises(OSError, match="did not answer a moment ago"):
        store.write(BLOCKS)
    assert BlockIndex(store).num_stored(HASHES) == 0
    assert isinstance(store, RemoteStore)
    store._breaker.trip(0)  # the pause is over
    with store_server(tmp_path, port):
        assert len(read(store, HASHES[:2])) == 2


def test_whoever_is_not_trusted_gets_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, opened: Callable[..., BlockStore]
) -> None:
    with store_server(tmp_path) as (server, setting):
        host, _, port = server.endpoint.removeprefix("tcp://").rpartition(":")
        known = read_keys(tmp_path / "keys" / "engine.json")
        stranger, wrong = make_keys(), make_keys()
        for keys in (replace(stranger, peers=known.peers), replace(known, peers=(wrong.public_key,))):
            store = RemoteStore(host, int(port), keys, NAMESPACE, 0)
            with closing(store), pytest.raises(OSError, match="does each of the two trust the other's key"):
                store.write(BLOCKS)
        context = zmq.Context()
        plain = context.socket(zmq.REQ)
        plain.connect(server.endpoint)
        plain.send_multipart([b"write", b"x"], zmq.NOBLOCK)
        assert not plain.poll(200)
        context.destroy(linger=0)
        assert opened(KVTransferConfig.from_value(setting)).write(BLOCKS) == len(BLOCKS)
        add_peers(tmp_path / "keys" / "front.json", [stranger.public_key.hex()])
        store = RemoteStore(host, int(port), replace(stranger, peers=known.peers), NAMESPACE, 0)
        with closing(store):
            assert store.write(BLOCKS) == len(BLOCKS), "it is trusted from now on"
    assert stranger.public_key.hex() in caplog.text
    assert not list(tmp_path.glob("blocks/*/0/*/.*"))


@pytest.mark.parametrize(
    ("frames", "answer"),
    [
        ([b"write"], b"no question"),
        ([b"read", b"\xc1"], b"of this version"),
        ([b"read", [NAMESPACE, 0, [[b"short"], 8]]], b"no hashes"),
        ([b"read", [NAMESPACE, 0, [HASHES[:1], 1 << 40]]], b"too large"),
        ([b"read", [NAMESPACE, 0, [HASHES[:1] * 9, 8]]], b"too many"),
        ([b"read", [b"../../etc", 0, [HASHES[:1], 8]]], b"no such namespace"),
        ([b"read", [NAMESPACE, -1, [HASHES[:1], 8]]], b"no such namespace or rank"),
        ([b"write", [NAMESPACE, 0, HASHES[:2]], b"one"], b"not as many blocks"),
        ([b"hashes", [NAMESPACE, 0, "../.."]], b"no such folder"),
        ([b"erase", [NAMESPACE, 0, None]], b"there is no such operation"),
    ],
)
def test_a_bad_question_is_answered_in_words(
    transfer: KVTransferConfig, frames: list[Any], answer: bytes, opened: Callable[..., BlockStore]
) -> None:
    config: StorageConfig = transfer.kv_connector_extra_config
    context = zmq.Context()
    socket = context.socket(zmq.REQ)
    connect_securely(socket, read_keys(Path(config.key_file)))
    socket.connect(f"tcp://{config.address}")
    encode: Callable[[Any], bytes] = msgspec.msgpack.encode
    socket.send_multipart([encode(frame) if isinstance(frame, list) else frame for frame in frames])
    assert socket.poll(10_000)
    assert answer in socket.recv_multipart()[0]
    context.destroy(linger=0)
    assert opened(transfer).write(BLOCKS[:1]) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"address": "nowhere"}, "address is 'nowhere'; .*'host:port' of a store"),
        ({"address": "host:70000"}, "address is 'host:70000'"),
        ({"address": ""}, "address is ''"),
        ({"key_file": 7}, "key_file is 7; .*the path of this host's file of keys"),
        ({"shared_storage_path": "/x"}, "must be of address, key_file"),
        ({"max_bytes": 1}, "must be of address, key_file"),
    ],
)
def test_a_wrong_setting_is_named(changes: dict[str, Any], message: str) -> None:
    extra = {"address": "host:1", "key_file": "keys.json", **changes}
    with pytest.raises(ValueError, match=message):
        KVTransferConfig.from_value({"kv_connector": "RemoteStorageConnector", "kv_connector_extra_config": extra})


def test_keys_that_trust_nobody_are_refused_at_the_start(tmp_path: Path) -> None:
    add_peers(tmp_path / "alone.json", [])
    extra = {"address": f"127.0.0.1:{unused_port()}", "key_file": str(tmp_path / "alone.json")}
    transfer = KVTransferConfig.from_value(
        {"kv_connector": "RemoteStorageConnector", "kv_connector_extra_config": extra}
    )
    with pytest.raises(ValueError, match="trusts nobody"):
        open_store(transfer.tiers[0], None, NAMESPACE, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_store_whose_folder_cannot_be_written_does_not_start(tmp_path: Path) -> None:
    trusting_hosts(tmp_path)
    keys = read_keys(tmp_path / "front.json")
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)

        def start() -> None:
            os.setuid(65534)
            StoreServer(Path(name), 1 << 20, keys, "127.0.0.1", 0)

        assert error_in_a_child(start) == errno.EACCES
