"""Introspection through a real tritonserver, over gRPC and HTTP, also while the engine is started again."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from quire_client import Client, ClientError
from support.clients import Answer, ask, ask_all, http, metric, run, scrape, with_client
from support.processes import is_gone
from support.serving import SMALL, Server, add_model, serve, wait_until
from tritonclient.grpc import aio as grpc_aio

pytestmark = pytest.mark.server

TOKEN = "a token for tests"
LONG = {"max_tokens": 900, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def open_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two models: one with a token of its own, and one that gets it from the environment."""
    repository = tmp_path_factory.mktemp("models")
    for name, settings in {"own": {"introspection_token": "a token of its own"}, "tinypy": {}}.items():
        add_model(repository, name, {**SMALL, **settings})
    environment = {"QUIRE_INTROSPECTION_TOKEN": TOKEN}
    with serve("--model-repository", str(repository), env=environment, step_seconds=0.005) as running:
        yield running


async def snapshot(client: grpc_aio.InferenceServerClient, **parameters: Any) -> dict[str, Any]:
    parameters = {"introspect": "snapshot", "introspection_token": TOKEN, **parameters}
    answer = await ask(client, parameters=parameters)
    assert answer.num_final_flags == 1
    content: dict[str, Any] = json.loads(answer.text)
    return content


async def until(client: grpc_aio.InferenceServerClient, condition: Any) -> dict[str, Any]:
    """Look until something is so; the caller's deadline ends the wait."""
    while not condition(seen := await snapshot(client)):
        await asyncio.sleep(0.01)
    return seen


def stream(client: grpc_aio.InferenceServerClient, label: str) -> "asyncio.Task[Answer]":
    request = {"text_input": f"def {label}(x):\n    ", "stream": True, "request_id": label, "parameters": LONG}
    return asyncio.create_task(ask(client, **request))


def test_off_by_default(server: Server) -> None:
    answer = run(server, parameters={"introspect": "snapshot", "introspection_token": "guess"})
    assert answer.error is not None
    assert "QUIRE_INTROSPECTION_TOKEN" in answer.message
    assert "guess" not in answer.message


@pytest.mark.parametrize(
    ("model", "token"), [("tinypy", "wrong"), ("tinypy", "a token of its own"), ("own", TOKEN), ("tinypy", None)]
)
def test_wrong_token(open_server: Server, model: str, token: str | None) -> None:
    parameters = {"introspect": "snapshot"} | ({} if token is None else {"introspection_token": token})
    rejected = metric(open_server, "quire_requests_total", model=model, outcome="rejected")
    answer = run(open_server, model=model, parameters=parameters)
    assert answer.error is not None
    assert "unauthorized" in answer.message
    assert metric(open_server, "quire_requests_total", model=model, outcome="rejected") == rejected


def test_snapshot_over_http(open_server: Server) -> None:
    body = {"introspect": "snapshot", "introspection_token": "a token of its own"}
    for path in ("generate", "generate_stream"):
        status, content = http(open_server, f"/v2/models/own/{path}", {"parameters": body})
        assert status == 200, content
        content = content if isinstance(content, dict) else json.loads(content.removeprefix("data: "))
        seen = json.loads(content["text_output"])
        assert (seen["model"], seen["version"]) == ("own", "1")
        assert seen["engine"]["up"]
        assert seen["requests"] == []
        assert "a token of its own" not in json.dumps(seen)
        assert len(seen["blocks"]["owner"]) == seen["blocks"]["num_blocks"] > 0
    status, content = http(open_server, "/v2/models/own/generate", {"parameters": body | {"introspection_token": "x"}})
    assert status == 400
    assert "unauthorized" in content["error"]


def test_snapshot_shows_live_requests_and_cancel_ends_one(open_server: Server) -> None:
    async def work(client: grpc_aio.InferenceServerClient) -> None:
        streams = {label: stream(client, label) for label in ("alpha", "beta")}
        seen = await until(client, lambda seen: [one["phase"] for one in seen["requests"]] == ["decode"] * 2)
        assert {one["label"] for one in seen["requests"]} == set(streams)
        for one in seen["requests"]:
            assert [event["kind"] for event in one["events"]] == ["arrived", "scheduled", "first_token"]
            assert one["age_seconds"] == one["events"][0]["age_seconds"] > 0
            assert one["slo_class"] == "default"
            assert one["max_tokens"] == LONG["max_tokens"]
        owners = seen["blocks"]["owner"]
        assert [owners.count(index) for index in (0, 1)] == [one["num_blocks"] for one in seen["requests"]]
        victim = next(one for one in seen["requests"] if one["label"] == "beta")
        cancel = {"introspect": "cancel", "introspection_token": TOKEN, "cancel_request_id": victim["id"]}
        wrong = await ask(client, parameters=cancel | {"introspection_token": "wrong"})
        assert wrong.error is not None
        assert json.loads((await ask(client, parameters=cancel)).text) == {"cancelled": True}
        ended = await streams["beta"]
        assert ended.message == "the request was cancelled"
        assert json.loads((await ask(client, parameters=cancel)).text) == {"cancelled": False}
        seen = await snapshot(client)
        assert [one["label"] for one in seen["requests"]] == ["alpha"]
        known = await snapshot(client, introspect="ended")
        (kept,) = [one for one in known["requests"] if one["id"] == victim["id"]]
        assert (kept["label"], kept["finish_reason"], kept["aborted_by"]) == ("beta", "abort", "operator")
        assert kept["e2e_seconds"] > kept["time_to_first_token_seconds"] > 0
        assert "prompt" not in kept
        cancel["cancel_request_id"] = seen["requests"][0]["id"]
        await ask(client, parameters=cancel)
        await streams["alpha"]
        (new,) = (await snapshot(client, introspect="ended", cursor=known["cursor"]))["requests"]
        assert new["label"] == "alpha"

    asyncio.run(with_client(open_server, work))


def test_snapshot_during_a_restart_of_the_engine(open_server: Server) -> None:
    async def work(client: grpc_aio.InferenceServerClient) -> None:
        streams = [stream(client, f"f{i}") for i in range(3)]
        seen = await until(client, lambda seen: [one["phase"] for one in seen["requests"]] == ["decode"] * 3)
        os.kill(seen["engine"]["pid"], signal.SIGKILL)
        away = await until(client, lambda seen: not seen["engine"]["up"])
        assert [one["phase"] for one in away["requests"]] == ["held"] * 3
        assert {one["label"] for one in away["requests"]} == {"f0", "f1", "f2"}
        assert [rank["up"] for rank in away["engine"]["ranks"]] == [False]
        # One is cancelled while no engine has it.
        held = away["requests"][0]
        cancel = {"introspect": "cancel", "introspection_token": TOKEN, "cancel_request_id": held["id"]}
        assert json.loads((await ask(client, parameters=cancel)).text) == {"cancelled": True}
        back = await until(
            client, lambda seen: [one["phase"] for one in seen["requests"]] == ["decode"] * 2 and seen["engine"]["up"]
        )
        assert back["engine"]["restarts"] == 1
        assert "replayed" in [event["kind"] for event in back["requests"][0]["events"]]
        for one in back["requests"]:
            await ask(client, parameters=cancel | {"cancel_request_id": one["id"]})
        answers = await asyncio.gather(*streams)
        assert [answer.message for answer in answers] == ["the request was cancelled"] * 3

    asyncio.run(with_client(open_server, work))
    wait_until(lambda: metric(open_server, "quire_kv_blocks", state="used") == 0, "all blocks are free")


def numbered_streams() -> list[dict[str, Any]]:
    """Greedy and sampled ones."""
    return [
        {
            "text_input": f"def f{number}(x):\n    ", "stream": True, "return_token_ids": True,
            "parameters": {"max_tokens": 400, "ignore_eos": True, "seed": number, "temperature": 0.8 * (number % 2)},
        }
        for number in range(6)
    ]  # fmt: skip


def engines_up(server: Server) -> dict[str, float]:
    """By number, of all that are shown."""
    return {
        sample.labels["engine"]: sample.value
        for sample in scrape(server)
        if sample.name == "quire_engine_up" and sample.labels["model"] == "tinypy"
    }


def test_replicas_come_and_leave_under_live_streams(open_server: Server) -> None:
    """Those of one that leaves go on on the other: none is lost, and each has the tokens of an undisturbed one."""
    undisturbed = ask_all(open_server, numbered_streams())
    counters = ("quire_engine_restarts_total", "quire_requests_replayed_total", "quire_requests_moved_total")
    before = [metric(open_server, name) for name in counters]

    async def work(client: grpc_aio.InferenceServerClient) -> tuple[list[Answer], list[int]]:
        def begin(request: dict[str, Any]) -> "asyncio.Task[Answer]":
            return asyncio.create_task(ask(client, **request))

        first, *others = numbered_streams()
        streams = [begin(first)]
        await until(client, lambda seen: [one["phase"] for one in seen["requests"]] == ["decode"])
        command = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "quire_cli", "model", "scale", "tinypy", "2", "--url", open_server.grpc,
            env={**os.environ, "QUIRE_INTROSPECTION_TOKEN": TOKEN}, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        said, _ = await command.communicate()
        assert said == b"quire: tinypy has 2 replicas, and had 1\n"
        await asyncio.to_thread(wait_until, lambda: engines_up(open_server) == {"0": 1, "1": 1}, "both are shown")
        streams += [begin(request) for request in others]
        seen = await until(
            client,
            lambda seen: sum(one["phase"] == "decode" and one["engine"] == 1 for one in seen["requests"]) >= 2,
        )
        pids = [one["pid"] for one in seen["engine"]["engines"]]
        scale = {"introspect": "scale", "replicas": 1, "introspection_token": TOKEN}
        assert json.loads((await ask(client, parameters=scale)).text) == {"replicas": 1, "before": 2}
        assert {one["engine"] for one in (await snapshot(client))["requests"]} <= {0}
        return list(await asyncio.gather(*streams)), pids

    answers, (stays, leaves) = asyncio.run(with_client(open_server, work))
    for answer, expected in zip(answers, undisturbed, strict=True):
        assert answer.token_ids == expected.token_ids
        assert answer.text == expected.text
    assert is_gone(leaves)
    assert not is_gone(stays)
    again = {"introspect": "scale", "replicas": 1, "introspection_token": TOKEN}
    status, content = http(open_server, "/v2/models/tinypy/generate", {"parameters": again})
    assert (status, json.loads(content["text_output"])) == (200, {"replicas": 1, "before": 1})
    assert 0 not in engines_up(open_server).values(), "one that has left is not one that is down"
    wait_until(lambda: engines_up(open_server) == {"0": 1}, "it is shown no more")
    restarts, replayed, moved = (metric(open_server, name) - was for name, was in zip(counters, before, strict=True))
    assert (restarts, replayed) == (0, 0)
    assert moved >= 2
    wait_until(lambda: metric(open_server, "quire_kv_blocks", state="used") == 0, "all blocks are free")


def test_the_dashboards_client_leaves_no_stream_open(open_server: Server) -> None:
    """One that is cancelled just as it ends is never over for tritonserver: the fixture's server would not stop."""
    client = Client(open_server.grpc, TOKEN)
    for _ in range(100):
        assert client.snapshot("tinypy").engine.up
        with pytest.raises(ClientError, match="slo_class is 'unknown'"):
            list(client.stream("tinypy", "x", parameters={"slo_class": "unknown"}))
    client.close()
