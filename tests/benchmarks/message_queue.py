"""How fast a message goes to other processes and back: the shared-memory queue, ZMQ over ipc, multiprocessing.Queue.

    python tests/benchmarks/message_queue.py [--messages 2000]

A round trip is one message to all readers, and one empty answer from each of them: what a step costs besides computing.
Median and 99th percentile in µs, for 1, 2 and 4 readers. Then the CPU use of a reader that waits for something to come,
and an all_reduce of [64, 1024] float32 between two ranks next to gloo's.
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import msgspec  # noqa: E402
import zmq  # noqa: E402
from quire_engine.ipc.message_queue import MessageQueueHandle, MessageReader, MessageWriter  # noqa: E402
from support.processes import cpu_seconds  # noqa: E402

SIZES = {"1 KB": 1024, "1 MB": 1024 * 1024}
END = b"end"
IDLE_SECONDS = 3.0


def start(role: str, *arguments: Any, pass_fds: tuple[int, ...] = ()) -> "subprocess.Popen[bytes]":
    """This file again, as a reader or a rank."""
    command = [sys.executable, __file__, "--role", role, *map(str, arguments)]
    return subprocess.Popen(command, pass_fds=pass_fds, stdout=subprocess.PIPE)


def measure(messages: int, payload: bytes, trip: Callable[[bytes], None]) -> tuple[float, float]:
    """Median and 99th percentile of a round trip, in µs."""
    times = []
    for i in range(messages + messages // 10):
        begin = time.perf_counter()
        trip(payload)
        if i >= messages // 10:
            times.append(time.perf_counter() - begin)
    times.sort()
    return 1e6 * times[len(times) // 2], 1e6 * times[int(len(times) * 0.99)]


# -- the shared-memory queue -------------------------------------------------------------------------------------------


def shared_memory(num_readers: int, messages: int, payloads: list[bytes]) -> list[tuple[float, float]]:
    """Figures by payload."""
    calls = MessageQueueHandle.create(num_readers)
    answers = [MessageQueueHandle.create(1) for _ in range(num_readers)]
    processes = []
    for i, answer in enumerate(answers):
        descriptors = (*calls.descriptors(i), *answer.descriptors(0))
        handles = (msgspec.json.encode(handle).decode() for handle in (calls, answer))
        processes.append(start("queue", *handles, i, pass_fds=descriptors))
    writer, readers = MessageWriter(calls), [MessageReader(handle, 0) for handle in answers]

    def trip(payload: bytes) -> None:
        writer.write(payload)
        for reader in readers:
            reader.read()

    figures = [measure(messages, payload, trip) for payload in payloads]
    before, begin = cpu_seconds(processes[0].pid), time.perf_counter()
    time.sleep(IDLE_SECONDS)
    if num_readers == 1:
        share = (cpu_seconds(processes[0].pid) - before) / (time.perf_counter() - begin)
        print(f"CPU use of an idle reader: {share:.2%}")
    writer.write(END)
    for process in processes:
        process.communicate()
    return figures


def queue_reader(calls: str, answers: str, index: str) -> None:
    """One reader's process."""
    reader = MessageReader(msgspec.json.decode(calls, type=MessageQueueHandle), int(index))
    writer = MessageWriter(msgspec.json.decode(answers, type=MessageQueueHandle))
    while reader.read_with(lambda view: view[: len(END)] == END and len(view) == len(END)) is False:
        writer.write(b"")


# -- the others --------------------------------------------------------------------------------------------------------


def over_zmq(num_readers: int, messages: int, payloads: list[bytes]) -> list[tuple[float, float]]:
    """One PAIR socket per reader."""
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context:
        sockets = []
        for i in range(num_readers):
            socket = context.socket(zmq.PAIR)
            socket.bind(f"ipc://{folder}/{i}")
            sockets.append(socket)
        processes = [start("zmq", f"ipc://{folder}/{i}") for i in range(num_readers)]

        def trip(payload: bytes) -> None:
            for socket in sockets:
                socket.send(payload, copy=False)
            for socket in sockets:
                socket.recv()

        figures = [measure(messages, payload, trip) for payload in payloads]
        trip_end = [socket.send(END) for socket in sockets]
        assert len(trip_end) == len([process.communicate() for process in processes])
        for socket in sockets:
            socket.close()
    return figures


def zmq_reader(address: str) -> None:
    """One reader's process."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.connect(address)
        while len(message := socket.recv(copy=False)) != len(END) or message.bytes != END:
            socket.send(b"")


def over_multiprocessing(num_readers: int, messages: int, payloads: list[bytes]) -> list[tuple[float, float]]:
    """Two queues per reader."""
    context = multiprocessing.get_context("spawn")
    pairs = [(context.Queue(), context.Queue()) for _ in range(num_readers)]
    processes = [context.Process(target=multiprocessing_reader, args=pair) for pair in pairs]
    for process in processes:
        process.start()

    def trip(payload: bytes) -> None:
        for calls, _ in pairs:
            calls.put(payload)
        for _, answers in pairs:
            answers.get()

    figures = [measure(messages, payload, trip) for payload in payloads]
    for calls, _ in pairs:
        calls.put(END)
    for process in processes:
        process.join()
    return figures


def multiprocessing_reader(calls: Any, answers: Any) -> None:
    """One reader's process."""
    while calls.get() != END:
        answers.put(b"")


# -- all_reduce --------------------------------------------------------------------------------------------------------


def all_reduce(repetitions: int) -> None:
    """Prints both."""
    from quire_engine.distributed.shared_memory import AbortFlagHandle, SharedMemoryGroup

    group, flag = SharedMemoryGroup.create(2), AbortFlagHandle.create()
    handles = [msgspec.json.encode(group).decode(), msgspec.json.encode(flag).decode()]
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            start("all-reduce", *handles, folder, rank, repetitions,
                  pass_fds=(*group.descriptors(rank), *flag.descriptors()))
            for rank in range(2)
        ]  # fmt: skip
        out = [process.communicate()[0] for process in processes]
    for name, (median, worst) in json.loads(out[0]).items():
        print(f"all_reduce of [64, 1024] float32, 2 ranks, {name:13} {median:7.0f} µs   p99 {worst:7.0f} µs")


def all_reduce_rank(group: str, flag: str, folder: str, rank: str, repetitions: str) -> None:
    """One rank's process."""
    import torch
    from quire_engine.distributed.shared_memory import (
        AbortFlag,
        AbortFlagHandle,
        SharedMemoryCommunicator,
        SharedMemoryGroup,
    )

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=2)
    communicator = SharedMemoryCommunicator(
        msgspec.json.decode(group, type=SharedMemoryGroup),
        int(rank),
        AbortFlag(msgspec.json.decode(flag, type=AbortFlagHandle)),
    )
    tensor = torch.ones(64, 1024)
    ways: dict[str, Callable[[], Any]] = {
        "shared memory": lambda: communicator.all_reduce(tensor),
        "gloo": lambda: torch.distributed.all_reduce(tensor),
    }
    print(json.dumps({name: measure(int(repetitions), b"", lambda _, way=way: way()) for name, way in ways.items()}))
    torch.distributed.destroy_process_group()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=2000)
    arguments = parser.parse_args()
    payloads = [os.urandom(size) for size in SIZES.values()]
    ways = {"shared memory": shared_memory, "ZMQ ipc": over_zmq, "multiprocessing.Queue": over_multiprocessing}
    for num_readers in (1, 2, 4):
        for way, function in ways.items():
            for size, (median, worst) in zip(SIZES, function(num_readers, arguments.messages, payloads), strict=True):
                row = f"readers {num_readers}  {way:22} {size}"
                print(f"{row}  median {median:7.0f} µs   p99 {worst:7.0f} µs", flush=True)
    all_reduce(arguments.messages)


if __name__ == "__main__":
    roles = {"queue": queue_reader, "zmq": zmq_reader, "all-reduce": all_reduce_rank}
    if sys.argv[1:2] == ["--role"]:
        roles[sys.argv[2]](*sys.argv[3:])
    else:
        main()
