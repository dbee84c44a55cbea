"""Starts and stops, with processes killed at random under live streams: nothing is left, and nothing grows.

    make test ARGS="tests/integration/test_start_stop.py -s"                                  a few cycles
    QUIRE_START_STOP_CYCLES=200 make test ARGS="tests/integration/test_start_stop.py -s"      an hour of it

QUIRE_START_STOP_SEED repeats a run: when what is killed.
"""

import asyncio
import contextlib
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from quire_cli.ports import Endpoint, ReservedPorts
from quire_engine.system import process_state
from quire_engine.system.memory import resident_memory_bytes
from quire_engine.worker.fault_injection import FAULT_INJECTION_VARIABLE
from support.clients import Answer, ask, run, with_client
from support.faults import put_fault
from support.processes import command_line
from support.serving import SMALL, Server, add_model, wait_until
from support.sweeps import no_sweeps
from tritonclient.grpc import aio as grpc_aio

CYCLES = int(os.environ.get("QUIRE_START_STOP_CYCLES", "5"))
DEATHS = int(os.environ.get("QUIRE_START_STOP_CYCLES", "3"))
SEED = int(os.environ.get("QUIRE_START_STOP_SEED", "0"))
ENDS = ("serve", "server", "stub", "engine", "stop")
"""What is killed in a cycle; or nothing is, and the server is stopped."""
NUM_STREAMS = 4
NUM_TOKENS = 400
MOST_GROWTH_BYTES = 8 * 2**20
# `quire serve` gives up after five deaths in a row; a service of so long begins the count anew.
LONG_SERVICE_S = 31.0
DEATHS_IN_A_ROW = 3

Start = Callable[..., Server]

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(600 + 60 * CYCLES)]


@pytest.fixture
def repository(tmp_path: Path) -> str:
    """The demo model with little memory, which makes it start fast."""
    add_model(tmp_path / "repository", "tinypy", {**SMALL, "max_num_seqs": 8, "max_num_batched_tokens": 64})
    return str(tmp_path / "repository")


class Streams(threading.Thread):
    """Some live streams; they end with the server, or whole."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.answers: list[Answer] = []
        self._server = server
        self._num_responses = [0] * NUM_STREAMS

    def run(self) -> None:
        async def work(client: grpc_aio.InferenceServerClient) -> list[Answer]:
            return list(await asyncio.gather(*(self._ask(client, i) for i in range(NUM_STREAMS))))

        self.answers = asyncio.run(with_client(self._server, work))

    async def _ask(self, client: grpc_aio.InferenceServerClient, index: int) -> Answer:
        def count(response: dict[str, Any]) -> None:
            self._num_responses[index] += 1

        return await ask(client, text_input=f"def f{index}(", max_tokens=NUM_TOKENS, ignore_eos=True, stream=True,
                         return_token_ids=True, on_response=count)  # fmt: skip

    def wait_for(self, num_responses: int) -> None:
        """Wait until every stream has had so many."""
        wait_until(lambda: min(self._num_responses) >= num_responses, f"{num_responses} responses of each stream")


def find(server: Server, is_it: Callable[[int], bool]) -> int:
    return next(pid for pid in server.run_id.processes() if is_it(pid))


def is_named(name: str) -> Callable[[int], bool]:
    def is_it(pid: int) -> bool:
        stat = process_state.process_stat(pid)
        return stat is not None and stat.name == name[:15]

    return is_it


def victim(server: Server, name: str) -> int:
    """The process of a cycle that is killed."""
    if name == "serve":
        return server.process.pid
    if name == "engine":
        return find(server, lambda pid: "quire_engine.core.core_process" in command_line(pid))
    return find(server, is_named({"server": "tritonserver", "stub": "triton_python_backend_stub"}[name]))


def shared_memory(server: Server) -> set[Path]:
    """What the run's processes have mapped of /dev/shm, whatever its name."""
    found: set[Path] = set()
    for pid in server.run_id.processes():
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue  # gone meanwhile
        found |= {Path(path) for path in re.findall(r" (/dev/shm/\S+)$", maps, re.MULTILINE)}
    return found


def assert_nothing_left(server: Server, memory: set[Path]) -> None:
    server.assert_nothing_left()
    assert not [path for path in memory if path.exists()]
    numbers = [int(endpoint.rpartition(":")[2]) for endpoint in (server.grpc, server.http, server.metrics)]
    with ReservedPorts() as ports:
        ports.take({f"port-{number}": Endpoint("127.0.0.1", number) for number in numbers})


def cycle(server: Server, name: str, num_responses: int) -> None:
    """Kill under live streams; afterwards the run is over."""
    streams = Streams(server)
    streams.start()
    try:
        streams.wait_for(num_responses)
        if name == "stop":
            server.process.send_signal(signal.SIGTERM)
        else:
            os.kill(victim(server, name), signal.SIGKILL)
    finally:
        streams.join()
    if name in ("stop", "engine"):
        assert [len(answer.token_ids) for answer in streams.answers] == [NUM_TOKENS] * NUM_STREAMS
    if name in ("server", "stub"):
        server.wait_for_ready_line()
        assert run(server, text_input="x", max_tokens=1).text != ""
    if name == "serve":
        assert server.wait() == -signal.SIGKILL
        return
    code = server.wait() if name == "stop" else server.stop()
    assert code == 0, server.log()


@pytest.mark.parametrize("number", range(CYCLES))
def test_nothing_is_left_after_any_end(repository: str, start: Start, number: int, tmp_path: Path) -> None:
    name, num_responses = ENDS[number % len(ENDS)], random.Random(f"{SEED} {number}").randrange(1, 12)
    # Slow steps, or a client that hardly gets the CPU has its streams' tokens in fewer responses than it waits for.
    slow = tmp_path / "fault.json"
    put_fault(slow, action="slow", rank=0, seconds=0.01)
    began = time.monotonic()
    server = start("--model-repository", repository, env={FAULT_INJECTION_VARIABLE: str(slow)})
    ready, memory = time.monotonic(), shared_memory(server)
    with no_sweeps() if name == "serve" else contextlib.nullcontext():
        cycle(server, name, num_responses)
        over = time.monotonic()
        following = start("--model-repository", repository, ready=False) if name == "serve" else None
    if following is not None:  # what is left of one that was killed is removed by the next
        following.wait_for_ready_line()
        assert following.stop() == 0
    assert_nothing_left(server, memory)
    print(
        f"cycle {number + 1}: ready after {ready - began:.1f} s, {name} after {num_responses} responses, "
        f"over after {over - ready:.1f} s",
        flush=True,
    )


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    memory_bytes: int
    num_files: int
    num_threads: int

    @classmethod
    def by(cls, pid: int) -> "Held":
        tasks, files = Path(f"/proc/{pid}/task"), Path(f"/proc/{pid}/fd")
        return cls(resident_memory_bytes(pid), len(list(files.iterdir())), len(list(tasks.iterdir())))

    def __str__(self) -> str:
        return f"held: {self.memory_bytes / 2**20:.1f} MiB, {self.num_files} files, {self.num_threads} threads"


def kill_again_and_again(server: Server, name: str, holder: int, pause: Callable[[int], None]) -> list[Held]:
    """Kill a process under live streams so many times.

    Args:
        server: what serves.
        name: which process; see `victim`.
        holder: the process that must not grow.
        pause: called with the number of deaths so far before each.

    Returns:
        What the holder held after each death.
    """
    figures: list[Held] = []
    for number in range(DEATHS):
        pause(number)
        streams = Streams(server)
        streams.start()
        try:
            streams.wait_for(2)
            died = time.monotonic()
            os.kill(victim(server, name), signal.SIGKILL)
        finally:
            streams.join()
        if name == "engine":
            assert [len(answer.token_ids) for answer in streams.answers] == [NUM_TOKENS] * NUM_STREAMS
        else:
            assert all(answer.error is not None for answer in streams.answers)
            server.wait_for_ready_line()
            assert run(server, text_input="x", max_tokens=1).text != ""
        figures.append(Held.by(holder))
        print(
            f"death {number + 1} of the {name}: over after {time.monotonic() - died:.1f} s; {figures[-1]}; "
            f"{len(server.run_id.shared_memory())} files in /dev/shm",
            flush=True,
        )
    assert server.stop() == 0, server.log()
    server.assert_nothing_left()
    return figures


def test_a_server_that_is_started_again_and_again_does_not_grow(repository: str, start: Start) -> None:
    def pause(number: int) -> None:
        if number % DEATHS_IN_A_ROW == 0 and number:
            serve_for_long(server)

    server = start("--model-repository", repository)
    figures = kill_again_and_again(server, "stub", server.process.pid, pause)
    assert_not_grown(figures[0], figures[-1])


def test_a_stub_whose_engine_dies_again_and_again_does_not_grow(repository: str, start: Start) -> None:
    server = start("--model-repository", repository)
    stub = victim(server, "stub")
    figures = kill_again_and_again(server, "engine", stub, lambda number: None)
    assert_not_grown(figures[1], figures[-1])  # the first replay loads what later ones need


def serve_for_long(server: Server) -> None:
    """Serve until the deaths so far are forgiven."""
    end = time.monotonic() + LONG_SERVICE_S
    while time.monotonic() < end:
        streams = Streams(server)
        streams.start()
        streams.join()
        assert all(answer.error is None for answer in streams.answers)


def assert_not_grown(first: Held, last: Held) -> None:
    assert last.memory_bytes - first.memory_bytes < MOST_GROWTH_BYTES
    assert last.num_threads == first.num_threads
    # The connection of the probe is there or not; what grows with each death grows by more.
    assert last.num_files <= first.num_files + 1
