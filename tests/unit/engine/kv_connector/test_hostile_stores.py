"""A store, or an engine, that says anything: no thread ends, and the other side goes on."""

import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from socket import AF_INET6, create_connection, create_server
from typing import Any

import msgspec
import pytest
import zmq
from quire_engine.config import KVTransferConfig
from quire_engine.ipc.curve import Asked, bind, connect_securely, listen_for_questions, serve_securely
from quire_engine.ipc.keys import read_keys
from quire_engine.kv_connector import block_index, remote_store, store_server
from quire_engine.kv_connector.block_index import BlockIndex
from quire_engine.kv_connector.block_store import BlockStore
from quire_engine.kv_connector.remote_store import MAX_FRAME_BYTES, RemoteStore
from quire_engine.kv_connector.tiered_store import open_store
from support import remote
from support.remote import trusting_hosts
from support.serving import wait_until

NAMESPACE, SIZE = bytes(range(32)), 64
HASH = bytes([7] * 32)
Answer = Callable[[list[bytes]], list[bytes] | None]
encode = msgspec.msgpack.encode


class HostileStore:
    """Lets in whom its file of keys trusts, and answers what a test says."""

    def __init__(self, folder: Path) -> None:
        front, self._engine_keys = trusting_hosts(folder)
        keys = read_keys(front)
        self.answer: Answer = lambda question: None
        self._context = zmq.Context()
        asked, router = listen_for_questions(self._context), self._context.socket(zmq.ROUTER)
        serve_securely(router, keys)
        self._endpoint = bind(router, "127.0.0.1", 0)
        threading.Thread(target=self._run, args=(asked, router, keys.peers), daemon=True).start()

    def connect(self) -> RemoteStore:
        host, _, port = self._endpoint.removeprefix("tcp://").rpartition(":")
        return RemoteStore(host, int(port), read_keys(self._engine_keys), NAMESPACE, 0)

    def close(self) -> None:
        self._context.term()

    def _run(self, asked: "zmq.Socket[bytes]", router: "zmq.Socket[bytes]", peers: tuple[bytes, ...]) -> None:
        poller = zmq.Poller()
        for socket in (asked, router):
            poller.register(socket, zmq.POLLIN)
        try:
            while True:
                for socket, _ in poller.poll():
                    frames = socket.recv_multipart()
                    if socket is asked:
                        asked.send_multipart(Asked(frames, peers).answer)
                    elif (answer := self.answer(frames[2:])) is not None:
                        router.send_multipart([*frames[:2], *answer])
        except zmq.ContextTerminated:
            for socket in (asked, router):
                socket.close(0)


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostileStore]:
    monkeypatch.setattr(remote_store, "ANSWER_SECONDS", 5.0)
    monkeypatch.setattr(remote_store, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(block_index, "LOOK_SECONDS", 0.0)
    with closing(HostileStore(tmp_path)) as store:
        yield store


def honest(question: list[bytes]) -> list[bytes]:
    """A store that has one block, and keeps no other."""
    operation, asked = question[0], msgspec.msgpack.decode(question[1])[2]
    if operation == b"read":
        found = int(asked[0][0] == HASH)
        return [b"", encode(found), *[bytes(SIZE)] * found]
    results = {b"write": 0, b"describe": None, b"folders": {"07": 1}, b"hashes": [HASH]}
    return [b"", encode(results[operation])]


NESTED = b"\x91" * 100_000 + b"\x90"
RESULTS: list[Any] = [
    None, True, -1, 0, 1, 2, 9, 1 << 63, 1.5, "text", b"bytes", [], [1], [None], [b"short"], [b"\x07" * 31], [HASH] * 2,
    ["07"], [[HASH]], [bytes(32)], {}, {"07": "now"}, {"07": -1}, {"07": 1 << 62}, {"..": 1}, {"": 1}, {"0707": 1},
    {"zz": 1}, {7: 7}, {HASH: 1}, {f"{number:02x}": number for number in range(256)}, {"A0": 1}, [HASH, None],
]  # fmt: skip
ANSWERS: list[list[bytes]] = [
    [b""], [b"\xff\x1b[2J"], [b"", b""], [b"", b"\xc1"], [b"", NESTED], [b"", b"\xdd\xff\xff\xff\xff"],
    [b"", b"\xdf\xff\xff\xff\xff"], [b"", b"\xc6\xff\xff\xff\xff"], [b"", b"\xa3\xff\xfe\xfd"],
    [b"", b"\x81\xa2\xff\xfe\x01"], [b"", b"\xd4\xff\x00"], [b"", encode(1), b""], [b"", encode(1), bytes(SIZE), b"x"],
    [b"", encode(0), bytes(SIZE)], [b"", encode(-1)], [b"", encode(2), bytes(SIZE), bytes(SIZE)],
    [b"", encode(1), bytes(SIZE - 1)], [b"", encode(1), bytes(SIZE + 1)], [b"", encode(3), *[b""] * 3],
    [b"", encode(1), *[bytes(SIZE)] * 500], [b"words" * 100_000, b""], [b"\x1b]0;title\x07\x9b31m\r\n", b"x"],
    *([b"", encode(result)] for result in RESULTS),
]  # fmt: skip


def ask_everything(store: RemoteStore) -> list[str]:
    """The messages of what it cannot do; anything else than an OSError ends the test."""
    room = memoryview(bytearray(SIZE))
    messages = []
    for ask in (
        lambda: store.read([(HASH, room), (bytes(32), memoryview(bytearray(SIZE)))]),
        lambda: store.write([(HASH, room)]), store.folders, lambda: store.hashes("07"), lambda: store.describe("{}"),
    ):  # fmt: skip
        try:
            result: Any = ask()
        except OSError as error:
            messages.append(str(error))
            continue
        if isinstance(result, int):
            assert 0 <= result <= 2
        elif isinstance(result, set):
            assert all(len(one) == 32 and one[0] == 7 for one in result)
        elif result is not None:
            assert all(isinstance(changed_at, int) and len(name) == 2 for name, changed_at in result.items())
    return messages


def test_an_engine_bears_any_answer_and_finds_blocks_again(
    hostile: HostileStore, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread that lists blocks is the index's alone: what ends it ends prefix hits, without a word."""
    chance = random.Random(7)
    with closing(hostile.connect()) as store:
        hostile.answer = honest
        index = BlockIndex(store, description="{}")
        assert index.num_stored([HASH]) == 1
        answers = [*ANSWERS]
        for _ in range(200):
            frames = [bytes(frame) for frame in chance.choice(ANSWERS)]
            place = chance.randrange(len(frames))
            content = bytearray(frames[place][:1000] or b"\0")
            content[chance.randrange(len(content))] = chance.randrange(256)
            answers.append([*frames[:place], bytes(content), *frames[place + 1 :]])
        for answer in answers:
            hostile.answer = lambda question, answer=answer: answer  # type: ignore[misc]
            assert all(message.isprintable() and len(message) < 1000 for message in ask_everything(store))
            looking = index._start_looking()
            looking.join(30)
            assert not looking.is_alive()
            assert index.num_stored([bytes(32)]) in (0, 1)
        hostile.answer = honest
        index._start_looking().join(30)
        assert index.num_stored([HASH]) == 1
        assert store.read([(HASH, memoryview(bytearray(SIZE)))]) == 1
        index._looking.join(30)


@pytest.mark.parametrize("answer", [[b"", encode(-1)], [b"", encode(2)], [b"", encode("one")], [b"", NESTED], [b""]])
def test_a_store_that_answers_nonsense_is_not_asked_for_a_while(
    hostile: HostileStore, monkeypatch: pytest.MonkeyPatch, answer: list[bytes]
) -> None:
    monkeypatch.setattr(remote_store, "PAUSE_SECONDS", 1000.0)
    hostile.answer = lambda question: answer
    with closing(hostile.connect()) as store:
        for match in ("is it (of this version|there)", "did not answer a moment ago"):
            with pytest.raises(OSError, match=match):
                store.write([(HASH, memoryview(bytes(SIZE)))])


def test_one_that_never_answers_or_sends_too_much_costs_one_timeout(
    hostile: HostileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_store, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(remote_store, "PAUSE_SECONDS", 1000.0)
    monkeypatch.setattr(remote_store, "MAX_FRAME_BYTES", 1000)
    answers: list[Answer] = [lambda question: None, lambda question: [b"", bytes(2000)]]
    for hostile.answer in answers:
        with closing(hostile.connect()) as store:
            with pytest.raises(OSError, match="does not answer"):
                store.folders()
            assert BlockIndex(store).num_stored([HASH]) == 0


def test_a_store_that_lists_without_end_is_not_known_by_heart(
    hostile: HostileStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(block_index, "MAX_LISTED", 1000)

    def many(question: list[bytes]) -> list[bytes]:
        if question[0] == b"folders":
            return [b"", encode({f"{number:02x}": number for number in range(256)})]
        if question[0] == b"hashes":
            start = bytes.fromhex(msgspec.msgpack.decode(question[1])[2])
            return [b"", encode([start + number.to_bytes(31) for number in range(100)])]
        return honest(question)

    hostile.answer = many
    with closing(hostile.connect()) as store:
        index = BlockIndex(store)
        index._looking.join(30)
        index._start_looking().join(30)
        assert sum(map(len, index._by_folder.values())) == 1000
        assert index.num_stored([bytes(32)]) == 1
    assert caplog.text.count("lists more than 1000") == 1


@contextmanager
def connected(setting: dict[str, Any], kind: int) -> Iterator["zmq.Socket[bytes]"]:
    """A socket of an engine that is trusted."""
    config = KVTransferConfig.from_value(setting).kv_connector_extra_config
    context = zmq.Context()
    socket = context.socket(kind)
    connect_securely(socket, read_keys(Path(config.key_file)))
    socket.connect(f"tcp://{config.address}")
    try:
        yield socket
    finally:
        context.destroy(linger=0)


def test_a_store_bears_any_question(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chance = random.Random(7)
    arguments = [
        *RESULTS,
        [[HASH], SIZE],
        [[HASH], MAX_FRAME_BYTES + 1],
        [[HASH], -1],
        [HASH],
        ["a"],
        "07",
        "\ud800"[:0],
        "x" * 70_000,
    ]
    with (
        ExitStack() as stack,
        remote.store_server(tmp_path) as (server, setting),
        connected(setting, zmq.DEALER) as socket,
    ):
        for operation in (b"read", b"write", b"describe", b"folders", b"hashes", b"", b"\xff\x1b"):
            for argument in arguments:
                for start in ([NAMESPACE, 0], [NAMESPACE, 1 << 70], [NAMESPACE], ["text", "0"], [bytes(31), 0]):
                    question = b"\xc1" if start[-1] == 1 << 70 else encode([*start, argument])
                    if chance.random() < 0.2:
                        place = chance.randrange(len(question))
                        question = question[:place] + bytes([chance.randrange(256)]) + question[place + 1 :]
                    payloads = [bytes(SIZE)] * chance.choice([0, 0, 1, 2, 30])
                    socket.send_multipart([b"", operation, question, *payloads])
                    assert socket.poll(30_000)
                    empty, words, *_ = socket.recv_multipart()
                    assert empty == b""
                    words.decode()
        for frames in ([b""], [b"x"], [b"", b""], [b"", b"read", NESTED], [b"", *[b"read"] * 5000]):
            socket.send_multipart(frames)
        host, _, port = server.endpoint.removeprefix("tcp://").rpartition(":")
        for length in range(64):  # of those that stop in the middle of a greeting
            half = stack.enter_context(create_connection((host, int(port)), timeout=60))
            half.sendall((b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(48))[:length])
        with closing(open_store(KVTransferConfig.from_value(setting).tiers[0], None, NAMESPACE, 0)) as store:
            assert store.write([(HASH, memoryview(bytes(SIZE)))]) == 1
            assert store.read([(HASH, memoryview(bytearray(SIZE)))]) == 1
        assert all(thread.is_alive() for thread in server._threads)
    assert len(caplog.records) < 20, "one client does not fill the log"


def test_namespaces_have_a_limit_and_looking_for_blocks_makes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_server, "MAX_PLACES", 3)
    monkeypatch.setattr(remote_store, "PAUSE_SECONDS", 0.0)
    with remote.store_server(tmp_path) as (_, setting):
        tier = KVTransferConfig.from_value(setting).tiers[0]
        for number in range(10):
            with closing(open_store(tier, None, bytes([number]) * 32, number)) as store:
                assert store.read([(HASH, memoryview(bytearray(SIZE)))]) == 0
                assert (store.folders(), store.hashes("07")) == ({}, set())
        assert list((tmp_path / "blocks").glob("*/*")) == []
        for number in (0, 1, 2, 3, 0):
            with closing(open_store(tier, None, bytes([number]) * 32, 0)) as store:
                if number < 3:
                    assert store.write([(HASH, memoryview(bytes(SIZE)))]) == 1
                    continue
                with pytest.raises(OSError, match="delete namespaces"):
                    store.write([(HASH, memoryview(bytes(SIZE)))])


def keeps(store: BlockStore) -> bool:
    with suppress(OSError):
        return store.write([(HASH, memoryview(bytes(SIZE)))]) == 1
    return False


SERVER = """
import sys
from pathlib import Path
from quire_engine.ipc.keys import read_keys
from quire_engine.kv_connector import store_server
from quire_engine.system.log_lines import log_to_stderr

log_to_stderr("%(message)s")
store_server.available_memory_bytes = lambda: 128 << 20
folder = Path(sys.argv[1])
server = store_server.StoreServer(folder / "blocks", 1 << 30, read_keys(folder / "front.json"), sys.argv[2], 0)
print(server.endpoint, flush=True)
sys.stdin.read()
server.close()
"""


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_what_waits_in_memory_is_limited_over_all_connections(tmp_path: Path, host: str) -> None:
    """Neither frames nor messages nor connections are few enough to limit it."""
    if host == "::1":
        try:
            create_server((host, 0), family=AF_INET6).close()
        except OSError:
            pytest.skip("this machine has no IPv6")
    trusting_hosts(tmp_path)
    command = [sys.executable, "-c", SERVER, str(tmp_path), host]
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdout is not None
        assert process.stdin is not None
        address = process.stdout.readline().strip().removeprefix("tcp://")
        extra = {"address": address, "key_file": str(tmp_path / "engine.json")}
        setting = {"kv_connector": "RemoteStorageConnector", "kv_connector_extra_config": extra}
        frame = bytes(1 << 20)
        with connected(setting, zmq.DEALER) as one, connected(setting, zmq.DEALER) as other:
            events = one.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            for socket in (one, other):
                socket.send_multipart([frame] * 400, copy=False)
            assert events.poll(60_000), "the connection is closed"
            one.disable_monitor()
        tier = KVTransferConfig.from_value(setting).tiers[0]
        with closing(open_store(tier, None, NAMESPACE, 0)) as store:
            wait_until(lambda: keeps(store), "the store takes blocks again")
        process.stdin.close()
        assert process.wait(60) == 0
    assert "all connections are closed" in (tmp_path / "log").read_text()
