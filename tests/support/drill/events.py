"""What happens to the server in the drill. Each event does one thing, and returns when the server should be mending it.

An event says itself whom it excuses, and of what it is certain. What has to hold after any of them, the drill checks:
all models are served again, every probe says so, nothing is left over.
"""

import asyncio
import json
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from random import Random
from typing import Any

from support import clients
from support.clients import ask, http, run, unread_streams
from support.drill.stage import CHANGING, RECOVERY_DEADLINE_S, STEADY, Stage, write_instances, write_settings
from support.processes import is_gone
from support.serving import wait_until
from tritonclient.grpc import aio as grpc_aio

__all__ = ["EVENTS"]

Event = Callable[[Stage, Random], None]
EVENTS: dict[str, Event] = {}

NOTICED_DEADLINE_S = 60.0
"""By then the server has noticed that a process of it is stopped, and killed it."""
_LONG: dict[str, Any] = {"max_tokens": 900, "ignore_eos": True, "stream": True}


def _event(function: Event) -> Event:
    EVENTS[function.__name__] = function
    return function


def _pause(seconds: float) -> None:
    """How long an event lasts is part of it."""
    threading.Event().wait(seconds)


def _signal(signal_number: int, pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal_number)


@contextmanager
def _stopped(pids: list[int]) -> Iterator[None]:
    _signal(signal.SIGSTOP, pids)
    try:
        yield
    finally:
        _signal(signal.SIGCONT, pids)


# -- the engine's processes: clients see a pause -----------------------------------------------------------------------


@_event
def kill_engine_process(stage: Stage, random: Random) -> None:
    """SIGKILL to the engine core, or a rank, of either model."""
    kind, model = random.choice([("core", STEADY), ("worker", STEADY), ("core", CHANGING)])
    _signal(signal.SIGKILL, stage.processes(kind, model)[:1])


@_event
def kill_several_engine_processes(stage: Stage, random: Random) -> None:
    """All of the engines' at once, or some."""
    pids = stage.processes("core") + stage.processes("worker")
    _signal(signal.SIGKILL, random.sample(pids, random.randint(2, len(pids))))


@_event
def stop_engine_process(stage: Stage, random: Random) -> None:
    """SIGSTOP for good: it is noticed, and counts as dead."""
    pid = random.choice(stage.processes(random.choice(["core", "worker"])))
    with _stopped([pid]):
        wait_until(lambda: is_gone(pid), "a stopped process of the engine is killed", NOTICED_DEADLINE_S)


@_event
def stop_and_continue(stage: Stage, random: Random) -> None:
    """For moments, any process at all; a server that was away for so short a time is not started again.

    tritonserver itself kills a stub that has not moved for a second when a request comes.
    """
    kind = random.choice(["core", "worker", "stub", "tritonserver", "compiler"])
    pids = stage.processes(kind)
    if pids:
        with _stopped([random.choice(pids)]):
            _pause(random.uniform(0.05, 0.5 if kind == "stub" else 2.0))


@_event
def stop_compiler(stage: Stage, random: Random) -> None:
    """The grammar compilers, whichever there are; requests with a grammar wait for the next ones."""
    pids = stage.processes("compiler")
    if random.random() < 0.5:
        _signal(signal.SIGKILL, pids)
        return
    body = {"text_input": "x", "max_tokens": 30, "structured_outputs": {"regex": f"[a-f]{{{random.randint(9, 20)}}}"}}
    with _stopped(pids):
        for model in +stage.instances:
            answer = run(stage.server, model=model, **body)
            assert answer.error is None, f"a new grammar while the compiler is stopped: {answer.message}"


# -- the server's processes: streams end with an error, and the server is started again --------------------------------


@_event
def kill_server_process(stage: Stage, random: Random) -> None:
    """SIGKILL to tritonserver, or to a stub."""
    with stage.streams.excused():
        pid = random.choice(stage.processes(random.choice(["tritonserver", "stub"])))
        _signal(signal.SIGKILL, [pid])
        _wait_for_restart(stage)


@_event
def stop_server_process(stage: Stage, random: Random) -> None:
    """SIGSTOP for good to one of them, which `quire serve` alone can notice."""
    with stage.streams.excused():
        pid = random.choice(stage.processes(random.choice(["tritonserver", "stub"])))
        with _stopped([pid]):
            stage.expect_down()
            wait_until(lambda: is_gone(pid), "a stopped process of the server is killed", NOTICED_DEADLINE_S)
        _wait_for_restart(stage)


def _wait_for_restart(stage: Stage) -> None:
    """The server comes back with the models that were loaded."""
    stage.server.wait_for_ready_line()
    stage.wait_until_served()


# -- what the engine needs to start: without it there is none, afterwards there is one again ---------------------------


@_event
def take_model_file_away(stage: Stage, random: Random) -> None:
    """An engine that dies meanwhile cannot be started again until it is back."""
    model = random.choice(list(+stage.instances))
    file = stage.repository / model / "1" / "checkpoint" / "model.safetensors"
    away = file.with_suffix(".away")
    with stage.streams.excused(model):
        file.rename(away)
        try:
            _signal(signal.SIGKILL, stage.processes("core", model))
            stage.expect_down()
            _pause(random.uniform(0, 12))
        finally:
            away.rename(file)
        stage.wait_until_served()


@_event
def run_out_of_descriptors(stage: Stage, random: Random) -> None:
    """A stub may open nothing more for some seconds, and its engine dies in the middle of them."""
    (stub, *_) = stage.processes("stub", STEADY)
    limits = resource.prlimit(stub, resource.RLIMIT_NOFILE)
    with stage.streams.excused(STEADY):
        resource.prlimit(stub, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{stub}/fd")), limits[1]))
        try:
            _signal(signal.SIGKILL, stage.processes("core", STEADY))
            stage.expect_down()
            _pause(random.uniform(0, 10))
        finally:
            resource.prlimit(stub, resource.RLIMIT_NOFILE, limits)
        stage.wait_until_served()


# -- the model repository ----------------------------------------------------------------------------------------------


@_event
def reload(stage: Stage, random: Random) -> None:
    """Other settings, one to three times in a row."""
    for _ in range(random.randint(1, 3)):
        write_settings(stage.repository, CHANGING, max_model_len=random.randrange(900, 1024))
        stage.repository_call(CHANGING, "load")


@_event
def change_instances(stage: Stage, random: Random) -> None:
    """From one instance to two, or back; with other settings, or in place."""
    count = 3 - stage.instances[CHANGING]
    if random.random() < 0.5:
        write_settings(stage.repository, CHANGING, max_model_len=random.randrange(900, 1024))
    write_instances(stage.repository, CHANGING, count)
    stage.repository_call(CHANGING, "load")
    stage.instances[CHANGING] = count


@_event
def unload_and_load(stage: Stage, random: Random) -> None:
    """Clients of the model are refused meanwhile; nothing of it may be left."""
    count = stage.instances[CHANGING]
    with stage.streams.excused(CHANGING):
        stage.repository_call(CHANGING, "unload")
        stage.instances[CHANGING] = 0
        wait_until(stage.nothing_is_left_over, "an unloaded model has no process left", RECOVERY_DEADLINE_S)
        stage.repository_call(CHANGING, "load")
        stage.instances[CHANGING] = count
        stage.wait_until_served()


# -- clients -----------------------------------------------------------------------------------------------------------


@_event
def cancel_at_the_end(stage: Stage, random: Random) -> None:
    """Clients that break off with the last response, and cancel then."""
    clients.cancel_at_the_end(stage.server, random.randint(4, 40), random.choice(list(+stage.instances)))


@_event
def leave_early(stage: Stage, random: Random) -> None:
    """Clients that cancel in the middle, and ones whose connections just end."""

    async def work() -> None:
        async with grpc_aio.InferenceServerClient(stage.server.grpc) as client:
            models = list(+stage.instances)
            asking = [
                asyncio.create_task(ask(client, model=random.choice(models), text_input="x", **_LONG)) for _ in range(6)
            ]
            await asyncio.wait(asking, timeout=random.uniform(0.1, 1.5))
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    asyncio.run(work())
    with unread_streams(stage.server, STEADY, 3):
        _pause(random.uniform(0.1, 1.0))


@_event
def do_not_read(stage: Stage, random: Random) -> None:
    """Clients that ask for much and take nothing in."""
    with unread_streams(stage.server, STEADY, 12):
        _pause(random.uniform(1.0, 5.0))


_HOSTILE_BODIES: list[bytes] = [
    b"", b"{", b"[" * 100_000, b'{"text_input": 5}', b'{"text_input": "x", "max_tokens": 1e400}',
    json.dumps({"text_input": "x", "max_tokens": -1}).encode(), json.dumps({"text_input": "y" * 3_000_000}).encode(),
    json.dumps({"text_input": "x", "parameters": {"n" * 100_000: 1}}).encode(),
]  # fmt: skip
_HOSTILE_INPUTS: list[dict[str, Any]] = [
    {"text_input": "x", "sampling_parameters": '{"logit_bias": ' + "[" * 5_000},
    {"text_input": "x", "structured_outputs": {"regex": "(((((a+)+)+)+)+)+$" * 20 + "("}},
    {"text_input": "x", "structured_outputs": {"json": {"$ref": "#"}}},
    {"text_input": "x", "structured_outputs": {"grammar": "root ::= root"}},
    {"text_input": b"\xff\xfe", "max_tokens": 4},
    {"input_ids": [2**31 - 1] * 1000},
    {"text_input": "x", "parameters": {"introspect": "snapshot", "introspection_token": "x" * 100_000}},
]


@_event
def hostile_requests(stage: Stage, random: Random) -> None:
    """Each is answered with an error."""
    model = random.choice(list(+stage.instances))
    for body in random.sample(_HOSTILE_BODIES, 4):
        status, answer = http(stage.server, f"/v2/models/{model}/generate", body)
        assert status >= 400, f"{body[:100]!r} was answered {status}: {answer!r:.200}"
    region = {"key": "/anything", "offset": 0, "byte_size": 64}
    status, answer = http(stage.server, "/v2/systemsharedmemory/region/own/register", region)
    assert status >= 400, f"a region was registered: {answer}"
    for inputs in random.sample(_HOSTILE_INPUTS, 3):
        answer = run(stage.server, model=model, request_id="h" * 10_000, **inputs)
        assert answer.error is not None, f"{str(inputs)[:100]} was answered {answer.responses}"
