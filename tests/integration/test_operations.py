"""Sleep, waking up, new weights and an empty prefix cache, over every face of a real server."""

import asyncio
import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from quire_client import Client, ClientError, InvalidArgument, Unavailable
from quire_engine.system.memory import resident_memory_bytes
from support.checkpoints import changed_copy
from support.clients import Answer, ask, ask_all, http, metric, run, scrape, with_client
from support.serving import CHECKPOINT, SMALL, Server, add_model, health, run_cli, serve, wait_until
from tritonclient.grpc import aio as grpc_aio

pytestmark = pytest.mark.server

TOKEN = "a token for tests"
GREEDY = {"max_tokens": 24, "ignore_eos": True, "temperature": 0}
NAMES = ("awake", "weights_offloaded", "discard_all")


@pytest.fixture(scope="module")
def new_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:

    def change(tensors: dict[str, Any]) -> None:
        tensors |= {name: tensor * 1.3 for name, tensor in tensors.items() if "norm" in name}

    return changed_copy(CHECKPOINT, tmp_path_factory.mktemp("weights") / "new", change)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two models: one whose requests are rejected while it sleeps, and one that they wake up."""
    repository = tmp_path_factory.mktemp("models")
    for name, settings in {"tinypy": {}, "eager": {"wake_on_request": True}}.items():
        add_model(repository, name, {**SMALL, **settings})
    arguments = ("--model-repository", str(repository), "--openai", "--openai-port", "0")
    with serve(*arguments, env={"QUIRE_INTROSPECTION_TOKEN": TOKEN}, step_seconds=0.005) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    """A client; afterwards the model is awake, whatever has failed."""
    with Client(server.grpc, TOKEN) as made:
        yield made
        made.wake_up("tinypy")


def gateway(
    server: Server, path: str, body: Any = None, token: str = TOKEN, method: str = "POST"
) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(
        f"http://{server.openai}{path}", method=method, data=None if body is None else json.dumps(body).encode(),
        headers={"content-type": "application/json", **({"authorization": f"Bearer {token}"} if token else {})},
    )  # fmt: skip
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def states(server: Server, model: str = "tinypy") -> list[float]:
    return [metric(server, "quire_engine_sleep_state", model=model, sleep_state=name) for name in NAMES]


def num_misses(server: Server) -> float:
    found = [one for one in scrape(server) if one.name == "quire_slo_requests_total"]
    return sum(one.value for one in found if one.labels["verdict"] == "miss")


def tokens(server: Server, model: str = "tinypy", prompt: str = "def fib(") -> list[int]:
    return run(server, model=model, text_input=prompt, return_token_ids=True, parameters=GREEDY).token_ids


@pytest.mark.parametrize("level", [1, 2])
def test_it_sleeps_and_wakes_up_over_every_face(server: Server, client: Client, level: int) -> None:
    expected = tokens(server)
    pid = client.snapshot("tinypy").engine.pid
    ask_all(server, [{"text_input": f"# {i}\n" * 300, "parameters": GREEDY} for i in range(16)])  # fills the KV cache
    awake = resident_memory_bytes(pid)
    misses = num_misses(server)
    status, answer = gateway(server, f"/sleep?level={level}&model=tinypy")
    assert (status, answer) == (200, {"is_sleeping": True})
    assert awake - resident_memory_bytes(pid) > 8 << 20, "the memory is free"
    wait_until(lambda: states(server) == [float(i == level) for i in range(3)], "the metric says so")
    alias = {"model": "tinypy", "model_name": "tinypy", "sleep_state": "awake"}
    assert metric(server, "vllm:engine_sleep_state", **alias) == 0
    assert gateway(server, "/is_sleeping?model=tinypy", method="GET", token="") == (200, {"is_sleeping": True})
    rejected = run(server, text_input="x", parameters=GREEDY)
    assert "the engine sleeps; wake it up first (quire model wake tinypy, or POST /wake_up" in rejected.message
    status, answer = gateway(server, "/v1/completions", {"model": "tinypy", "prompt": "x"})
    assert (status, answer["error"]["type"]) == (503, "server_error")
    _, said = http(server, "/v2/models/tinypy/generate", {"text_input": "x", "parameters": GREEDY})
    assert "the engine sleeps" in said["error"]
    # It is asleep, and not sick.
    assert client.health("tinypy")
    assert gateway(server, "/health", method="GET")[0] == 200
    assert health(server)[0] == 200
    assert metric(server, "quire_engine_up", model="tinypy") == 1
    assert num_misses(server) == misses
    environment = {"QUIRE_INTROSPECTION_TOKEN": TOKEN}
    listed = run_cli("model", "list", "--url", server.grpc, env=environment).stdout
    assert {tuple(line.split()) for line in listed.splitlines()} == {("eager", "healthy"), ("tinypy", "asleep")}
    with pytest.raises(Unavailable, match="the engine sleeps; wake it up first"):
        client.scale("tinypy", 2)
    woken = run_cli("model", "wake", "tinypy", "--url", server.grpc, env=environment).stdout
    assert woken == "quire: tinypy is awake\n"
    assert not client.is_sleeping("tinypy")
    assert tokens(server) == expected
    wait_until(lambda: states(server) == [1, 0, 0], "the metric says so")


def test_sleep_waits_for_streams_or_aborts_them(server: Server, client: Client) -> None:
    request = {"text_input": "def fib(", "stream": True, "parameters": {**GREEDY, "max_tokens": 300}}

    async def work(connection: grpc_aio.InferenceServerClient, mode: str) -> Answer:
        stream = asyncio.create_task(ask(connection, **request))
        await asyncio.to_thread(
            wait_until, lambda: client.snapshot("tinypy").requests[:1] and
            client.snapshot("tinypy").requests[0].phase == "decode", "it runs",
        )  # fmt: skip
        await asyncio.to_thread(client.sleep, "tinypy", 1, mode)
        return await stream

    undisturbed = run(server, **request)
    waited = asyncio.run(with_client(server, lambda connection: work(connection, "wait")))
    assert waited.text == undisturbed.text
    client.wake_up("tinypy")
    aborted = asyncio.run(with_client(server, lambda connection: work(connection, "abort")))
    assert aborted.message == "the request was cancelled"
    client.wake_up("tinypy")


def test_an_engine_that_is_killed_asleep_sleeps_on(server: Server, client: Client) -> None:
    expected = tokens(server)
    client.sleep("tinypy", 2)
    seen = client.snapshot("tinypy").engine
    os.kill(seen.pid, signal.SIGKILL)
    wait_until(lambda: client.snapshot("tinypy").engine.restarts > seen.restarts, "the next engine is up")
    assert client.is_sleeping("tinypy")
    wait_until(lambda: states(server) == [0, 0, 1], "the next one sleeps")
    client.wake_up("tinypy")
    assert tokens(server) == expected


def test_a_request_wakes_it_up(server: Server, client: Client) -> None:
    expected = tokens(server, "eager")
    client.sleep("eager", 2)
    assert tokens(server, "eager") == expected
    assert not client.is_sleeping("eager")
    client.sleep("eager", 1)  # so it does while the server ends, which leaves nothing behind


def test_weights_are_updated_while_streams_run(server: Server, client: Client, new_weights: Path) -> None:
    before = tokens(server)
    request = {"text_input": "def fib(", "stream": True, "parameters": {**GREEDY, "max_tokens": 200}}
    undisturbed = run(server, **request)
    long = {**request, "return_token_ids": True}

    async def work(connection: grpc_aio.InferenceServerClient) -> tuple[list[Answer], Answer]:
        streams = [asyncio.create_task(ask(connection, **long)) for _ in range(4)]
        await asyncio.to_thread(
            wait_until, lambda: [one.phase for one in client.snapshot("tinypy").requests] == ["decode"] * 4, "they run"
        )
        updating = asyncio.create_task(asyncio.to_thread(client.update_weights, "tinypy", str(new_weights)))
        await asyncio.to_thread(
            wait_until, lambda: "the weights are being updated" in rejection_of(client), "it has begun"
        )
        held = asyncio.create_task(ask(connection, text_input="def fib(", return_token_ids=True, parameters=GREEDY))
        await updating
        return list(await asyncio.gather(*streams)), await held

    answers, held = asyncio.run(with_client(server, work))
    assert {answer.text for answer in answers} == {undisturbed.text}, "they ended with the old weights"
    after = held.token_ids
    assert after != before
    assert tokens(server) == after
    seen = client.snapshot("tinypy")
    assert seen.settings["model"] == str(new_weights)
    os.kill(seen.engine.pid, signal.SIGKILL)
    wait_until(lambda: client.snapshot("tinypy").engine.restarts > seen.engine.restarts, "the next engine is up")
    assert tokens(server) == after, "it has the new weights"
    status, answer = gateway(server, "/update_weights", {"model": "tinypy", "weights_path": str(CHECKPOINT)})
    assert (status, answer) == (200, {"weights_path": str(CHECKPOINT)})
    assert tokens(server) == before, "no block of the other weights is used"
    environment = {"QUIRE_INTROSPECTION_TOKEN": TOKEN}
    said = run_cli("model", "update-weights", "tinypy", str(new_weights), "--url", server.grpc, env=environment).stdout
    assert said == f"quire: tinypy has the weights of {new_weights}\n"
    assert tokens(server) == after
    client.update_weights("tinypy", str(CHECKPOINT))


def rejection_of(client: Client) -> str:
    """Why another change is rejected now; this one would change nothing."""
    try:
        client.scale("tinypy", 1)
    except ClientError as error:
        return str(error)
    return ""


def test_the_prefix_cache_is_reset(server: Server, client: Client) -> None:
    prompt = "# a long beginning\n" * 20
    tokens(server, prompt=prompt)
    wait_until(lambda: metric(server, "quire_kv_blocks", model="tinypy", state="cached") > 0, "blocks are cached")
    assert gateway(server, "/reset_prefix_cache?model=tinypy") == (200, {"reset": True})
    wait_until(lambda: metric(server, "quire_kv_blocks", model="tinypy", state="cached") == 0, "none is")
    tokens(server, prompt=prompt)
    said = run_cli("model", "reset-cache", "tinypy", "--url", server.grpc, env={"QUIRE_INTROSPECTION_TOKEN": TOKEN})
    assert said.stdout == "quire: tinypy has an empty prefix cache\n"


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"introspect": "sleep", "level": 0}, "level is 0; it must be 1"),
        ({"introspect": "sleep", "level": 3}, "level is 3; it must be 1"),
        ({"introspect": "sleep", "level": "1"}, "level is '1'; it must be 1"),
        ({"introspect": "sleep", "level": True}, "level is true; it must be 1"),
        ({"introspect": "sleep", "mode": "keep"}, "mode is 'keep'; it must be 'wait'"),
        ({"introspect": "sleep", "mode": 3}, "mode is 3; it must be 'wait'"),
        ({"introspect": "sleep", "tags": "weights"}, "tags has no meaning"),
        ({"introspect": "wake_up", "level": 1}, "level has no meaning"),
        ({"introspect": "wake_up", "cancel_request_id": "x"}, "cancel_request_id must be"),
        ({"introspect": "reset_prefix_cache", "max_tokens": 1}, "max_tokens has no meaning"),
        ({"introspect": "update_weights"}, "weights_path is ''; it must be the absolute path"),
        ({"introspect": "update_weights", "weights_path": 3}, "weights_path is 3; it must be the absolute path"),
        ({"introspect": "update_weights", "weights_path": "new"}, "weights_path is 'new'; it must be the absolute"),
        ({"introspect": "update_weights", "weights_path": "/nowhere"}, "there is no folder /nowhere"),
        ({"introspect": "update_weights", "weights_path": "/etc/passwd"}, "weights_path is '/etc/passwd'"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_has_changed(server: Server, parameters: dict[str, Any], words: str) -> None:
    answer = run(server, parameters={**parameters, "introspection_token": TOKEN})
    assert words in answer.message
    assert states(server) == [1, 0, 0]


@pytest.mark.parametrize("operation", ["sleep", "wake_up", "update_weights", "reset_prefix_cache"])
def test_without_the_token_nothing_is_switched(server: Server, operation: str) -> None:
    for token, words in (
        ("", "introspection_token is missing"),
        ("a guess of a token", "introspection_token is wrong"),
    ):
        body = {"model": "tinypy", "weights_path": str(CHECKPOINT)} if operation == "update_weights" else None
        path = f"/{operation}" if body is not None else f"/{operation}?model=tinypy"
        status, answer = gateway(server, path, body, token)
        assert status == 401
        assert words in answer["error"]["message"]
        with Client(server.grpc, token) as stranger, pytest.raises(InvalidArgument, match=words):
            stranger._wait(stranger._client._operate("tinypy", operation))
    assert states(server) == [1, 0, 0]
