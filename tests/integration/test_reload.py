"""An operator's load and unload, again and again under live streams: no request is lost, nor the server.

    QUIRE_RELOADS=20 make test ARGS="tests/integration/test_reload.py"     more of it

Every load makes a new engine before the old one ends, in one server that keeps the series of both.
"""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.clients import Answer, ask, ask_all, cancel_at_the_end, http
from support.serving import CHECKPOINT, Server, add_model, health, serve, wait_until
from tritonclient.grpc import aio as grpc_aio

RELOADS = int(os.environ.get("QUIRE_RELOADS", "3"))
NUM_STREAMS = 3
NUM_CANCELLED = 60
MOST_UNLOADS = 3
"""Until the server has kept a request: nearly always the first time."""
NUM_TOKENS = 30
STEP_SECONDS = 0.005
"""How much longer steps take than the demo model needs: streams are there to be hit, and leave time to what loads."""
FREED = "has no available versions|is not ready|is not found"
"""What a client hears between an unload and the next load."""
CUT_OFF = "Socket closed|failed to connect|Connection reset|recvmsg"
"""And when the server is started again."""

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(120 + 30 * RELOADS)]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    for name, count in (("one", 1), ("two", 2)):
        add_model(folder, name, {}, f"instance_group [ {{ count: {count} kind: KIND_MODEL }} ]\n")
        write_settings(folder / name, 256)
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Server]:
    explicit = ("--", "--model-control-mode=explicit", "--load-model=one")
    with serve("--model-repository", str(repository), *explicit, step_seconds=STEP_SECONDS) as running:
        yield running


def write_settings(model: Path, max_model_len: int) -> None:
    settings = {"model": str(CHECKPOINT), "max_model_len": max_model_len,
                "kv_cache_memory_bytes": 16 << 20, "max_num_seqs": 8, "max_num_batched_tokens": 64}  # fmt: skip
    (model / "1" / "model.json").write_text(json.dumps(settings))


def request(model: str) -> dict[str, Any]:
    return {"model": model, "text_input": "def f(", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True,
            "return_token_ids": True}  # fmt: skip


@contextlib.contextmanager
def streams(server: Server, model: str) -> Iterator[list[Answer]]:
    """Some requests at a time, one after the other, until the block is left; what each was answered."""
    answers: list[Answer] = []
    stopping = threading.Event()

    async def one(client: grpc_aio.InferenceServerClient) -> None:
        while not stopping.is_set():
            answers.append(await ask(client, **request(model)))
            await asyncio.sleep(0 if answers[-1].error is None else 0.1)

    async def work() -> None:
        async with grpc_aio.InferenceServerClient(server.grpc) as client:
            await asyncio.gather(*(one(client) for _ in range(NUM_STREAMS)))

    thread = threading.Thread(target=lambda: asyncio.run(work()), daemon=True)
    thread.start()
    try:
        yield answers
    finally:
        stopping.set()
        thread.join(60)
    assert not thread.is_alive(), "a stream did not end"


def scrape(server: Server) -> list[str]:
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=60) as response:
        return response.read().decode().splitlines()


def series(server: Server, model: str, name: str, **labels: str) -> dict[str, float]:
    """Engine → value, of the engines that have this series."""
    found = {}
    for match in filter(None, (re.fullmatch(rf"{name}\{{(.*)\}} (\S+)", line) for line in scrape(server))):
        own = dict(re.findall(r'(\w+)="(.*?)"', match[1]))
        if own.items() >= {"model": model, **labels}.items():
            assert own["engine"] not in found
            found[own["engine"]] = float(match[2])
    return found


def num_ended(server: Server, model: str) -> dict[str, float]:
    return series(server, model, "quire_requests_total", outcome="length")


def num_whole(answers: list[Answer], but: str = "nothing") -> int:
    """How many were answered in full; any other end than one of those words is a failure."""
    for answer in answers:
        assert answer.error is None or re.search(but, answer.message), answer.message
    whole = [answer for answer in answers if answer.error is None]
    assert {len(answer.token_ids) for answer in whole} == {NUM_TOKENS}
    return len(whole)


def wait_for_engines(server: Server, model: str, count: int) -> list[str]:
    """Wait until no other engines have series than so many that are up."""

    def are_up() -> bool:
        up = series(server, model, "quire_engine_up")
        return list(up.values()) == [1.0] * count

    wait_until(are_up, f"{count} engines of {model} are up, and no others")
    return sorted(series(server, model, "quire_engine_up"))


def test_a_changed_model_is_loaded_again_and_again(server: Server, repository: Path) -> None:
    seen: set[str] = set()
    with streams(server, "one") as answers:
        for number in range(RELOADS):
            num_before = len(answers)
            write_settings(repository / "one", 300 + number)
            assert http(server, "/v2/repository/models/one/load", {})[0] == 200
            # The old one may still have requests.
            wait_until(lambda: set(series(server, "one", "quire_engine_up").values()) == {1.0}, "all engines are up")
            seen |= set(series(server, "one", "quire_engine_up"))
            wait_until(lambda before=num_before: len(answers) >= before + 2 * NUM_STREAMS, "requests end")
    assert num_whole(answers) == len(answers)
    assert seen <= {"0", "1", "2"}, "every load has new labels"
    (engine,) = wait_for_engines(server, "one", 1)
    counted = num_ended(server, "one")
    refused = ask_all(server, [request("one") | dict.fromkeys(("max_tokens", "min_tokens"), 320 + RELOADS)])[0]
    assert f"{299 + RELOADS}" in refused.message  # the last settings are those in force
    ask_all(server, [request("one")] * 5)
    wait_until(lambda: num_ended(server, "one") == {engine: counted[engine] + 5}, "the five are counted")


def test_two_instances_are_loaded_again_unloaded_and_loaded(server: Server, repository: Path) -> None:
    load, unload = (f"/v2/repository/models/two/{verb}" for verb in ("load", "unload"))
    assert http(server, load, {})[0] == 200
    with streams(server, "two") as answers:
        for number in range(max(RELOADS // 3, 1)):  # four engines live at a time
            num_before = len(answers)
            write_settings(repository / "two", 300 + number)
            assert http(server, load, {})[0] == 200
            wait_until(lambda before=num_before: len(answers) >= before + 2 * NUM_STREAMS, "requests end")
    assert num_whole(answers) == len(answers)
    assert len(wait_for_engines(server, "two", 2)) == 2
    with streams(server, "two") as answers:
        for _ in range(max(RELOADS // 3, 1)):
            assert http(server, unload, {})[0] == 200
            wait_until(lambda: not num_ended(server, "two"), "no series of an unloaded model is left")
            assert http(server, load, {})[0] == 200
            assert wait_for_engines(server, "two", 2) == ["0", "1"]
            wait_until(lambda: min(num_ended(server, "two").values()) >= 1, "both engines have work")
    assert num_whole(answers, but=FREED) >= 2
    wait_for_engines(server, "two", 2)
    before = sum(num_ended(server, "two").values())
    ask_all(server, [request("two")] * 6)
    wait_until(lambda: sum(num_ended(server, "two").values()) == before + 6, "the six are counted, each once")
    assert http(server, unload, {})[0] == 200
    ours = re.compile(r'(quire_|vllm:).*model="two"')
    wait_until(lambda: not any(map(ours.match, scrape(server))), "all its series go with it")
    assert num_ended(server, "one"), "and another model keeps its own"


def test_what_was_loaded_is_loaded_again_when_a_stub_dies(server: Server, repository: Path) -> None:
    assert http(server, "/v2/repository/models/two/load", {})[0] == 200
    settings, away = repository / "one" / "1" / "model.json", repository / "away"
    settings.rename(away)
    stub = next(model["pid"] for model in health(server)[1]["models"] if model["name"] == "two")
    os.kill(stub, signal.SIGKILL)
    server.wait_for_ready_line()
    assert num_whole(ask_all(server, [request("two")] * 4)) == 4
    status, body = health(server)
    assert (status, [model["name"] for model in body["models"]]) == (503, ["two", "two"])
    wait_until(lambda: "model.json" in " ".join(health(server)[1]["problems"]), "the reason is told")
    assert [problem.partition(":")[0] for problem in health(server)[1]["problems"]] == ["model 'one' is not loaded"]
    away.rename(settings)
    assert http(server, "/v2/repository/models/one/load", {})[0] == 200
    wait_until(lambda: health(server)[0] == 200, "all is well again")
    assert num_whole(ask_all(server, [request("one")])) == 1


def test_a_model_of_which_the_server_keeps_a_request_leaves_nothing_when_it_is_unloaded(server: Server) -> None:
    """The server goes on waiting for that request's end, and would never end the model's engine."""
    for _ in range(MOST_UNLOADS):
        assert http(server, "/v2/repository/models/two/load", {})[0] == 200
        cancel_at_the_end(server, NUM_CANCELLED, "two")
        wait_for_engines(server, "two", 2)
        assert http(server, "/v2/repository/models/two/unload", {})[0] == 200
        wait_until(lambda: not series(server, "two", "quire_engine_up"), "its series are gone")
        wait_until(lambda: [model["name"] for model in health(server)[1]["models"]] == ["one"], "its stubs are gone")
        index = {model["name"]: model["state"] for model in http(server, "/v2/repository/index")[1]}
        if index["two"] == "UNLOADING":
            break
    assert health(server)[0] == 200


def test_a_stub_that_is_killed_while_its_model_is_unloaded_keeps_no_client_waiting(server: Server) -> None:
    """tritonserver would wait for its requests for ever. Nobody misses one that has none."""
    assert http(server, "/v2/repository/models/two/load", {})[0] == 200
    with streams(server, "two") as answers:
        wait_until(lambda: len(answers) >= NUM_STREAMS, "requests end")
        stub = next(model["pid"] for model in health(server)[1]["models"] if model["name"] == "two")
        assert http(server, "/v2/repository/models/two/unload", {})[0] == 200
        with contextlib.suppress(ProcessLookupError):  # it was faster
            os.kill(stub, signal.SIGKILL)
        wait_until(lambda: [model["name"] for model in health(server)[1]["models"]] == ["one"], "both are gone")
        wait_until(lambda: health(server)[0] == 200, "nobody misses it")
    num_whole(answers, but=f"{FREED}|{CUT_OFF}")
    assert http(server, "/v2/repository/models/two/load", {})[0] == 200
    assert num_whole(ask_all(server, [request("two")] * 2)) == 2


def test_a_server_that_polls_its_repository_loads_what_has_changed(repository: Path, tmp_path: Path) -> None:
    shutil.copytree(repository / "one", tmp_path / "one")
    polling = ("--", "--model-control-mode=poll", "--repository-poll-secs=1")
    with (
        serve("--model-repository", str(tmp_path), *polling, step_seconds=STEP_SECONDS) as server,
        streams(server, "one") as answers,
    ):

        def refusal() -> str:
            """It names the limit that is in force."""
            too_many = dict.fromkeys(("max_tokens", "min_tokens"), 410 + RELOADS)
            return ask_all(server, [request("one") | too_many])[0].message

        for number in range(max(RELOADS // 3, 1)):
            num_before = len(answers)
            write_settings(tmp_path / "one", 400 + number)
            says = rf"\b{400 + number}\b"
            wait_until(lambda says=says: re.search(says, refusal()), "it has been loaded")
            wait_until(lambda before=num_before: len(answers) >= before + 2 * NUM_STREAMS, "requests end")
        assert len(wait_for_engines(server, "one", 1)) == 1
    assert num_whole(answers) == len(answers)
