"""Eleven incidents of the kinds that operators are called for, each with its real cause, and what ends it.

An incident is a context: its cause begins when it is entered, and is gone when it is left. What it has sent may still
wait then.

::

    alone    steps as slow as a larger model's, 16 places, a KV cache that is too small for 16 long answers
    pair     two ranks
    twins    two replicas
"""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire_engine.system import process_state
from support.background_load import Load
from support.clients import scrape, snapshot, unread_streams
from support.drill.relay import Relay
from support.faults import put_fault
from support.serving import Server, add_model, wait_until

__all__ = ["INCIDENTS", "MODELS", "SLOW_STEPS", "TOKEN", "Incident", "Scene", "ordinary_load", "write_repository"]

ALONE, PAIR, TWINS = "alone", "pair", "twins"
BLOCK_BYTES = 6 * 2 * 4 * 32 * 16 * 4
"""Layers, keys and values, heads, head size, tokens, bytes."""
NUM_BLOCKS = 144
"""They hold 16 requests of `overload`, two of `long_prompts`, and seven of `full_cache`."""
NUM_SEQS = 16
MODELS: dict[str, dict[str, Any]] = {
    ALONE: {
        "kv_cache_memory_bytes": NUM_BLOCKS * BLOCK_BYTES, "max_num_seqs": NUM_SEQS, "max_num_batched_tokens": 128,
        "max_queued_requests": 40, "slo": {"default": {"ttft_ms": 500, "e2e_ms": 20000}},
    },
    PAIR: {"kv_cache_memory_bytes": 32 << 20, "tensor_parallel_size": 2, "slo": {"default": {"e2e_ms": 20000}}},
    TWINS: {"kv_cache_memory_bytes": 16 << 20, "data_parallel_size": 2, "slo": {"default": {"e2e_ms": 20000}}},
}  # fmt: skip
SLOW_STEPS = {"action": "slow", "seconds": 0.04}
"""Of every rank: as of a model that is worth a queue."""
NUM_DEATHS = 2
"""Of a server that dies again and again, the least that is one."""
LIFE_SECONDS = 4.0
"""For so long it serves."""
NAMED_SECONDS = 10.0
NUM_UNREAD = 1
NUM_NEIGHBOURS = 12
"""Per CPU."""
INVALID_PER_SECOND = 5.0
LONG_PROMPT_LINES = 85
TOKEN = "a-token-for-the-drill"
"""For introspection."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What the incidents happen to."""

    server: Server
    loop: asyncio.AbstractEventLoop
    """Where clients run."""
    fault_file: Path
    relay: Relay
    """Between the dashboard and /metrics."""
    to_end: ExitStack
    """Waits for what was sent in an incident, and goes on after it."""


Begins = Generator[float | None, None, None]
"""When it became what it is, if that is not now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """One of them."""

    begin: Callable[[Scene], AbstractContextManager[float | None]]
    model: str
    """That it happens to."""
    words: tuple[str, ...]
    """A first line with one of these has named it."""
    named_seconds: float = NAMED_SECONDS
    """How soon."""


INCIDENTS: dict[str, Incident] = {}


def _incident(
    model: str, *words: str, named_seconds: float = NAMED_SECONDS
) -> Callable[[Callable[[Scene], Begins]], None]:
    def note(function: Callable[[Scene], Begins]) -> None:
        INCIDENTS[function.__name__] = Incident(
            begin=contextmanager(function), model=model, words=words, named_seconds=named_seconds
        )

    return note


def write_repository(folder: Path) -> None:
    """Both models."""
    for name, settings in MODELS.items():
        add_model(folder, name, {"dtype": "float32", **settings})


@contextmanager
def ordinary_load(scene: Scene) -> Iterator[list[Load]]:
    """What all models are used for all the time: far from any bound."""
    with (
        Load(scene, ALONE, per_second=1.5, max_tokens=40) as alone,
        Load(scene, PAIR, max_tokens=40) as pair,
        Load(scene, TWINS, max_tokens=40) as twins,
    ):
        yield [alone, pair, twins]


@contextmanager
def _sent_until_left(scene: Scene, load: Load) -> Iterator[None]:
    """No longer; whether it has ended well is seen later."""
    with ExitStack() as stack:
        load.__enter__()
        stack.callback(scene.to_end.callback, load.join)
        stack.callback(load.stop)
        yield


@_incident(ALONE, "likely cause: requests wait in the queue", named_seconds=3.0)
def overload(scene: Scene) -> Begins:
    """More short requests than the model can answer; it begins with the first that misses its objective."""
    before = _num_misses(scene)
    with Load(scene, ALONE, per_second=25, max_tokens=60):  # it is over once what waited has been served
        wait_until(lambda: _num_misses(scene) > before, "a request misses its objective")
        yield time.monotonic()


def _num_misses(scene: Scene) -> float:
    return sum(
        sample.value
        for sample in scrape(scene.server)
        if sample.name == "quire_slo_requests_total" and sample.labels["model"] == ALONE
        and sample.labels["verdict"] == "miss"
    )  # fmt: skip


@_incident(ALONE, "the KV cache is", "requests are preempted")
def full_cache(scene: Scene) -> Begins:
    """As many long answers at once as there are places, which is more than the cache can hold."""
    long_answers = Load(scene, ALONE, num_streams=NUM_SEQS, make_prompt=_page, max_tokens=250)
    with _sent_until_left(scene, long_answers):
        yield None


def _page(number: int) -> str:
    return f"# {number}\n" + "value = value + 1\n" * 8


@_incident(ALONE, "the engine is down", "the engine was restarted")
def killed_engine(scene: Scene) -> Begins:
    """SIGKILL to the engine core."""
    os.kill(snapshot(scene.server, ALONE, TOKEN)["engine"]["pid"], signal.SIGKILL)
    yield None
    wait_until(lambda: snapshot(scene.server, ALONE, TOKEN)["engine"]["up"], "another engine is up")


@_incident(TWINS, "engine 1 is down", "engine 1 was restarted")
def killed_replica(scene: Scene) -> Begins:
    """SIGKILL to one of two engine cores."""

    def second() -> dict[str, Any]:
        found: dict[str, Any] = snapshot(scene.server, TWINS, TOKEN)["engine"]["engines"][1]
        return found

    os.kill(second()["pid"], signal.SIGKILL)
    yield None
    wait_until(lambda: second()["up"], "another engine is up")


@_incident(ALONE, "the server does not answer", "the server was started again")
def killed_server(scene: Scene) -> Begins:
    """tritonserver is killed once."""
    yield _kill_server(scene)
    scene.server.wait_for_ready_line()


@_incident(ALONE, "other processes take the host's cpus")
def saturated_host(scene: Scene) -> Begins:
    """Many other processes compute without a pause."""
    num_processes = NUM_NEIGHBOURS * (os.cpu_count() or 1)
    # In sessions of their own: where the kernel groups processes by session, each group gets an equal share.
    neighbours = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
        for _ in range(num_processes)
    ]
    try:
        yield None
    finally:
        for one in neighbours:
            one.kill()
        for one in neighbours:
            one.wait()


@_incident(ALONE, "the server dies again and again")
def crash_looping_server(scene: Scene) -> Begins:
    """tritonserver is killed soon after it serves. It is a loop from the second time on."""
    killed_at = _kill_server(scene)
    for _ in range(NUM_DEATHS - 1):
        scene.server.wait_for_ready_line()
        threading.Event().wait(LIFE_SECONDS)
        killed_at = _kill_server(scene)
    yield killed_at
    scene.server.wait_for_ready_line()


def _kill_server(scene: Scene) -> float:
    stats = ((pid, process_state.process_stat(pid)) for pid in scene.server.run_id.processes())
    (pid,) = [pid for pid, stat in stats if stat and stat.name == "tritonserver"]
    os.kill(pid, signal.SIGKILL)
    return time.monotonic()


@_incident(PAIR, "rank 1 is slow")
def slow_rank(scene: Scene) -> Begins:
    """One of two takes much longer than the other."""
    put_fault(scene.fault_file, action="slow", rank=1, seconds=0.1)
    try:
        yield None
    finally:
        put_fault(scene.fault_file, **SLOW_STEPS)


@_incident(ALONE, "long prompts")
def long_prompts(scene: Scene) -> Begins:
    """A client that puts whole files before its question, no two of them alike."""
    with _sent_until_left(scene, Load(scene, ALONE, num_streams=2, make_prompt=_long_prompt, max_tokens=5)):
        yield None


def _long_prompt(number: int) -> str:
    return f"# {number}\n" + "".join(f"value_{number}_{line} = {line}\n" for line in range(LONG_PROMPT_LINES))


@_incident(ALONE, "invalid requests")
def bad_client(scene: Scene) -> Begins:
    """One that repeats what is refused, and leaves the answers to others of its requests unread."""
    with (
        unread_streams(scene.server, ALONE, NUM_UNREAD),
        _sent_until_left(scene, Load(scene, ALONE, per_second=INVALID_PER_SECOND, max_tokens=-1)),
    ):
        yield None


@_incident(ALONE, "metrics cannot be read")
def exporter_down(scene: Scene) -> Begins:
    """Nothing listens any more where the dashboard reads /metrics; all else goes on."""
    with scene.relay.closed():
        yield None
