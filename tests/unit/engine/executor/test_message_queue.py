"""MessageQueue: every reader in its own process gets every message whole and in order, and nothing is left behind."""

import asyncio
import contextlib
import hashlib
import os
import signal
import threading
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_engine.ipc.message_queue import MessageQueueHandle, MessageReader, MessageWriter
from quire_engine.ipc.semaphore import Watch
from support.processes import ended, eventually, idles, is_gone, open_descriptors, start_python, state

CHUNK = 64
READER = """
    import hashlib, sys, msgspec
    from quire_engine.ipc.message_queue import MessageQueueHandle, MessageReader
    handle = msgspec.json.decode(sys.argv[1], type=MessageQueueHandle)
    reader = MessageReader(handle, int(sys.argv[2]))
    print("ready", flush=True)
    while (message := reader.read(timeout=60)) != b"end":
        print(len(message), hashlib.sha256(message).hexdigest(), flush=True)
"""


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    descriptors = open_descriptors()
    yield
    assert open_descriptors() <= descriptors


@contextlib.contextmanager
def queue(num_readers: int = 1, num_chunks: int = 4, chunk_bytes: int = CHUNK) -> Iterator[MessageQueueHandle]:
    handle = MessageQueueHandle.create(num_readers, num_chunks, chunk_bytes)
    try:
        yield handle
    finally:
        handle.close()


@contextlib.contextmanager
def ends(handle: MessageQueueHandle, watch: Watch | None = None) -> Iterator[tuple[MessageWriter, list[MessageReader]]]:
    writer = MessageWriter(handle, watch)
    readers = [MessageReader(handle, i, watch) for i in range(len(handle.filled))]
    try:
        yield writer, readers
    finally:
        writer.close()
        for reader in readers:
            reader.close()


def content(size: int) -> bytes:
    return bytes(i * 7 % 251 for i in range(size))


def line_of(message: bytes) -> bytes:
    return f"{len(message)} {hashlib.sha256(message).hexdigest()}\n".encode()


@pytest.mark.parametrize("num_readers", [1, 3])
def test_messages_of_every_size_reach_readers_in_other_processes(num_readers: int) -> None:
    sizes = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 10 * CHUNK, 10 * CHUNK + 1]
    with queue(num_readers) as handle:
        processes = [
            start_python(READER, msgspec.json.encode(handle), str(i), pass_fds=handle.descriptors(i))
            for i in range(num_readers)
        ]
        with ended(processes):
            writer = MessageWriter(handle)
            for size in sizes:
                writer.write(content(size), timeout=60)
            writer.write(b"end", timeout=60)
            for process in processes:
                out, _ = process.communicate(timeout=60)
                assert out == b"ready\n" + b"".join(line_of(content(size)) for size in sizes)
                assert process.returncode == 0
            writer.close()


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 5 * CHUNK), max_size=30),
    num_readers=st.integers(1, 3),
    num_chunks=st.integers(1, 5),
    chunk_bytes=st.integers(1, CHUNK),
)
def test_any_sequence_arrives_whole_and_in_order(
    sizes: list[int], num_readers: int, num_chunks: int, chunk_bytes: int
) -> None:
    got: list[list[bytes]] = [[] for _ in range(num_readers)]
    with queue(num_readers, num_chunks, chunk_bytes) as handle, ends(handle) as (writer, readers):

        def take(index: int) -> None:
            got[index].extend(readers[index].read(timeout=60) for _ in sizes)

        threads = [threading.Thread(target=take, args=(i,)) for i in range(num_readers)]
        for thread in threads:
            thread.start()
        for size in sizes:
            writer.write(content(size), timeout=60)
        for thread in threads:
            thread.join()
    assert got == [[content(size) for size in sizes]] * num_readers


def test_memory_has_no_name() -> None:
    with queue() as handle:
        assert os.readlink(f"/proc/self/fd/{handle.memory}") == "/memfd:quire-queue (deleted)"
        assert os.fstat(handle.memory).st_nlink == 0


def test_message_is_decoded_where_it_stands() -> None:
    with queue() as handle, ends(handle) as (writer, (reader,)):
        decoder = msgspec.msgpack.Decoder(list[int])
        for length in (3, 100):  # within a chunk, and put together
            writer.write(msgspec.msgpack.encode(list(range(length))))
            assert reader.read_with(decoder.decode) == list(range(length))


def test_chunk_is_free_again_when_decoding_fails() -> None:
    with queue(num_chunks=1) as handle, ends(handle) as (writer, (reader,)):
        decoder = msgspec.msgpack.Decoder(int)
        for _ in range(3):
            writer.write(msgspec.msgpack.encode("no number"), timeout=1)
            with pytest.raises(msgspec.ValidationError):
                reader.read_with(decoder.decode)
        writer.write(msgspec.msgpack.encode(5), timeout=1)
        assert reader.read_with(decoder.decode) == 5


def test_writer_waits_for_the_slowest_reader() -> None:
    with queue(num_readers=2, num_chunks=2) as handle, ends(handle) as (writer, (fast, slow)):
        for i in range(2):
            writer.write(b"%d" % i, timeout=0)
        assert [fast.read(), fast.read()] == [b"0", b"1"]
        with pytest.raises(TimeoutError):
            writer.write(b"2", timeout=0.02)
        assert slow.read() == b"0"
        writer.write(b"2", timeout=0)
        assert (fast.read(), slow.read(), slow.read()) == (b"2", b"1", b"2")


def test_reader_that_waited_too_long_goes_on_later() -> None:
    with queue(num_chunks=2) as handle, ends(handle) as (writer, (reader,)):
        with pytest.raises(TimeoutError, match=r"0\.01 seconds"):
            reader.read(timeout=0.01)
        thread = threading.Thread(target=writer.write, args=(content(100 * CHUNK),))
        thread.start()
        message = None
        while message is None:
            with contextlib.suppress(TimeoutError):
                message = reader.read(timeout=0)
        assert message == content(100 * CHUNK)
        thread.join()


def test_message_that_was_cut_off_ends_the_queue() -> None:
    with queue(num_chunks=2) as handle, ends(handle) as (writer, _):
        with pytest.raises(TimeoutError):
            writer.write(content(3 * CHUNK), timeout=0.02)
        with pytest.raises(RuntimeError, match="cut off"):
            writer.write(b"x")


def test_death_of_the_other_side_ends_the_wait_at_once() -> None:
    def check() -> None:
        if process.poll() is not None:
            raise ConnectionError("gone")

    with queue(num_chunks=1) as handle:
        process = start_python(READER, msgspec.json.encode(handle), "0", pass_fds=handle.descriptors(0))
        assert process.stdout is not None
        with ended([process]):
            assert process.stdout.readline() == b"ready\n"
            pidfd = os.pidfd_open(process.pid)
            writer = MessageWriter(handle, Watch([pidfd], check))
            os.kill(process.pid, signal.SIGSTOP)
            assert eventually(lambda: state(process.pid) == "T")
            writer.write(b"first", timeout=60)
            timer = threading.Timer(0.05, process.kill)
            timer.start()
            with pytest.raises(ConnectionError, match="gone"):
                writer.write(b"second", timeout=60)
            timer.join()
            writer.close()
            os.close(pidfd)


def test_waiting_reader_uses_no_cpu_and_wakes_up() -> None:
    with queue() as handle:
        process = start_python(READER, msgspec.json.encode(handle), "0", pass_fds=handle.descriptors(0))
        assert process.stdout is not None
        with ended([process]):
            assert process.stdout.readline() == b"ready\n"
            assert eventually(lambda: state(process.pid) == "S")
            assert asyncio.run(idles(process.pid, most=0.02))
            assert not is_gone(process.pid)
            writer = MessageWriter(handle)
            writer.write(b"awake", timeout=60)
            assert process.stdout.readline() == line_of(b"awake")
            writer.close()
