"""Processes of the engine are killed and stopped under 32 live streams of a real tritonserver; no client notices more
than a pause."""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.clients import Answer, ask, ask_all, metric, run, with_client
from support.faults import put_fault
from support.full import FULL
from support.processes import command_line, is_gone, parent
from support.serving import SMALL, Server, add_model, serve, wait_until
from tritonclient.grpc import aio as grpc_aio

pytestmark = [pytest.mark.server, pytest.mark.slow]

MODELS: dict[str, dict[str, Any]] = {
    "alone": {}, "pair": {"tensor_parallel_size": 2}, "replicas": {"data_parallel_size": 2},
}  # fmt: skip
"""The engine core with the worker in it, and with two worker processes; and two engine cores."""
NUM_STREAMS = 32
FIRST_KILL_TOKENS = 600
NUM_OUTPUTS = ["text_output", "token_ids", "finish_reason"]


@pytest.fixture(scope="module")
def fault_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the workers look at before each step; see `quire_engine.worker.fault_injection`."""
    return tmp_path_factory.mktemp("fault") / "fault.json"


@pytest.fixture(scope="module")
def crash_server(tmp_path_factory: pytest.TempPathFactory, fault_file: Path) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("models")
    for name, settings in MODELS.items():
        add_model(repository, name, {**SMALL, **settings})
    with serve("--model-repository", str(repository), env={"QUIRE_FAULT_INJECTION": str(fault_file)}) as server:
        yield server


def requests(model: str, **changes: Any) -> list[dict[str, Any]]:
    """Greedy and sampled ones, of different lengths."""
    return [
        {
            "model": model, "outputs": NUM_OUTPUTS, "text_input": f"def f{i}(x):\n    ", "stream": True,
            "exclude_input_in_output": True, "return_token_ids": True, "return_finish_reason": True,
            "parameters": {
                "max_tokens": 100 + i, "ignore_eos": True, "seed": i, "temperature": 0.8 if i % 2 else 0.0, **changes,
            },
        }
        for i in range(NUM_STREAMS)
    ]  # fmt: skip


def processes(server: Server, model: str, module: str) -> list[int]:
    """Processes of one model's engine that run a module: each is told its settings, but not by its command line."""
    running = [pid for pid in server.run_id.processes() if not is_gone(pid)]
    workers = {pid for pid in running if "quire_engine.worker.worker_process" in command_line(pid)}
    cores = {pid for pid in running if "quire_engine.core.core_process" in command_line(pid)}
    with_workers = {parent(pid) for pid in workers}
    if module == "worker":
        return sorted(workers)
    stubs = Counter(parent(pid) for pid in cores)
    replicas = {pid for pid in cores if stubs[parent(pid)] > 1}
    of_model = {"pair": with_workers, "replicas": replicas, "alone": cores - with_workers - replicas}
    return sorted(cores & of_model[model])


Strike = Callable[[Server, str], None]


def kill_core(server: Server, model: str) -> None:
    (pid,) = processes(server, model, "core")
    os.kill(pid, signal.SIGKILL)


def stop_core(server: Server, model: str) -> None:
    (pid,) = processes(server, model, "core")
    os.kill(pid, signal.SIGSTOP)


def kill_worker(server: Server, model: str) -> None:
    os.kill(processes(server, model, "worker")[-1], signal.SIGKILL)


def stop_worker(server: Server, model: str) -> None:
    os.kill(processes(server, model, "worker")[0], signal.SIGSTOP)


def kill_core_and_worker(server: Server, model: str) -> None:
    (core,) = processes(server, model, "core")  # which may end at once when its worker does
    kill_worker(server, model)
    with suppress(ProcessLookupError):
        os.kill(core, signal.SIGKILL)


class Load:
    """32 streams, and strikes among them once so many tokens have come."""

    def __init__(self, server: Server, model: str, strikes: list[Strike]) -> None:
        self.server, self.model = server, model
        self.num_tokens = 0
        self._strikes = list(strikes)
        self._next_strike = FIRST_KILL_TOKENS
        self._struck_at = 0.0
        self.pauses: list[float] = []
        """Seconds from each strike to the next token that anybody got; what was under way does not count."""

    def on_response(self, response: dict[str, list[Any]]) -> None:
        now = time.monotonic()
        self.num_tokens += len(response["token_ids"])
        if self._struck_at and now - self._struck_at > 0.4 and len(self.pauses) < 2:
            self.pauses.append(now - self._struck_at)
            self._struck_at = 0.0
        if self._strikes and self.num_tokens >= self._next_strike and not self._struck_at:
            self._strikes.pop(0)(self.server, self.model)
            self._struck_at = now
            self._next_strike = self.num_tokens + 300

    async def run(self, client: grpc_aio.InferenceServerClient) -> list[Answer]:
        return list(
            await asyncio.gather(*(ask(client, on_response=self.on_response, **one) for one in requests(self.model)))
        )


@pytest.fixture(scope="module")
def undisturbed(crash_server: Server) -> dict[str, list[Answer]]:
    return {model: ask_all(crash_server, requests(model)) for model in ("alone", "pair")}


SCENARIOS: list[tuple[str, list[Strike]]] = [
    ("alone", [kill_core, kill_core]),
    ("alone", [stop_core]),
    ("pair", [kill_worker]),
    ("pair", [kill_core_and_worker]),
    ("pair", [stop_worker]),
    *([("pair", [kill_core, kill_core]), ("pair", [stop_core])] if FULL else []),
]
"""A core that is killed twice, and one that is stopped, are those of `alone`."""


def _name(scenario: tuple[str, list[Strike]]) -> str:
    return f"{scenario[0]}-{'-'.join(strike.__name__ for strike in scenario[1])}"


@pytest.mark.parametrize("scenario", SCENARIOS, ids=_name)
def test_every_stream_ends_as_if_nothing_had_happened(
    crash_server: Server,
    undisturbed: dict[str, list[Answer]],
    scenario: tuple[str, list[Strike]],
    record_property: Callable[[str, object], None],
) -> None:
    model, strikes = scenario
    restarts = metric(crash_server, "quire_engine_restarts_total", model=model)
    load = Load(crash_server, model, strikes)
    answers = asyncio.run(with_client(crash_server, load.run))
    for answer, expected in zip(answers, undisturbed[model], strict=True):
        assert answer.error is None
        assert answer.token_ids == expected.token_ids
        assert answer.text == expected.text
        assert answer.responses[-1]["finish_reason"] == ["length"]
    wait_until(
        lambda: metric(crash_server, "quire_engine_restarts_total", model=model) == restarts + len(strikes),
        "every death was one restart",
    )
    wait_until(lambda: metric(crash_server, "quire_engine_up", model=model) == 1, "the engine is up")
    assert metric(crash_server, "quire_requests_replayed_total", model=model) > 0
    wait_until(lambda: metric(crash_server, "quire_kv_blocks", model=model, state="used") == 0, "all blocks are free")
    assert len(processes(crash_server, "pair", "worker")) == 2, "no worker outlives its engine"
    print(f"{_name(scenario)}: paused for {', '.join(f'{seconds:.1f}' for seconds in load.pauses)} s")
    record_property("pause_seconds", load.pauses)


def test_the_streams_of_a_replica_go_on_on_the_other(
    crash_server: Server, undisturbed: dict[str, list[Answer]], record_property: Callable[[str, object], None]
) -> None:
    """Each kill is of one that has requests; meanwhile the model is ready, and nobody waits for a start."""

    def kill_one(server: Server, model: str) -> None:
        os.kill(processes(server, model, "core")[0], signal.SIGKILL)

    def up(engine: str) -> float:
        return metric(crash_server, "quire_engine_up", model="replicas", engine=engine)

    assert (up("0"), up("1")) == (1, 1)
    load = Load(crash_server, "replicas", [kill_one])
    answers = asyncio.run(with_client(crash_server, load.run))
    for answer, expected in zip(answers, undisturbed["alone"], strict=True):
        assert answer.error is None
        assert answer.token_ids == expected.token_ids
        assert answer.text == expected.text
    wait_until(lambda: (up("0"), up("1")) == (1, 1), "both are up again")
    replayed = [metric(crash_server, "quire_requests_replayed_total", model="replicas", engine=one) for one in "01"]
    assert sorted(map(bool, replayed)) == [False, True], "those of one went on on the other"
    record_property("pause_seconds", load.pauses)


def test_whether_an_engine_is_up_is_told_at_once(crash_server: Server) -> None:
    """Nobody asks anything of it: what is seen is not a side effect of requests."""

    def up() -> tuple[float, float]:
        engine, worker = ("quire_engine_up", {}), ("quire_worker_up", {"rank": "0"})
        return tuple(metric(crash_server, name, model="alone", **labels) for name, labels in (engine, worker))

    assert up() == (1, 1)
    kill_core(crash_server, "alone")
    wait_until(lambda: up() == (0, 0), "the death is seen")
    assert run(crash_server, model="alone", text_input="def f(x):", max_tokens=1).text
    assert up() == (1, 1)


def test_a_poison_request_ends_alone(
    crash_server: Server, undisturbed: dict[str, list[Answer]], fault_file: Path
) -> None:
    sampled = {token_id for answer in undisturbed["alone"] for token_id in answer.token_ids}
    poison = next(token_id for token_id in range(100, 4000) if token_id not in sampled)
    put_fault(fault_file, action="kill", token_id=poison)
    params = {"allowed_token_ids": [poison], "max_tokens": 5}
    faulty = {"model": "alone", "text_input": "x", "sampling_parameters": params}
    try:
        *answers, ended = ask_all(crash_server, [*requests("alone")[1:], faulty])
    finally:
        fault_file.unlink()
    assert ended.error is not None
    assert "died of this request again and again" in ended.message
    for answer, expected in zip(answers, undisturbed["alone"][1:], strict=True):
        assert answer.token_ids == expected.token_ids


def test_after_all_that_a_request_is_served(crash_server: Server) -> None:
    for model in MODELS:
        assert run(crash_server, model=model, text_input="def f(x):", max_tokens=4).text
