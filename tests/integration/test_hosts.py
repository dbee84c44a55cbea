"""A host that joins a model of a real tritonserver and leaves it: what operators see before, meanwhile and after."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from quire_client import Client
from support.clients import Answer, ask, ask_all, scrape, with_client
from support.host_processes import Site, started
from support.serving import ROOT, Server, run_cli, serve, wait_until
from tritonclient.grpc import aio as grpc_aio

pytestmark = pytest.mark.server

TOKEN = "a token for tests"
RANK = 2


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A front that has one engine, and lets others have ranks 1 and 2."""
    checkpoint = ROOT / "model_repository" / "tinypy" / "1" / "model"
    return Site(tmp_path, checkpoint, data_parallel_max_size=3, data_parallel_routing="round_robin")


@pytest.fixture
def server(site: Site) -> Iterator[Server]:
    environment = {"QUIRE_INTROSPECTION_TOKEN": TOKEN}
    with serve("--model-repository", str(site.repository), env=environment, step_seconds=0.005) as running:
        yield running


def engines_up(server: Server) -> dict[str, float]:
    """By number, of all that are shown."""
    return {sample.labels["engine"]: sample.value for sample in scrape(server) if sample.name == "quire_engine_up"}


def total(server: Server, name: str) -> float:
    """Of all engines that are there."""
    return sum(sample.value for sample in scrape(server) if sample.name == name)


def streams() -> list[dict[str, Any]]:
    return [
        {
            "text_input": f"def f{number}(x):\n    ", "stream": True, "return_token_ids": True,
            "parameters": {"max_tokens": 300, "ignore_eos": True, "temperature": 0.9, "seed": number},
        }
        for number in range(6)
    ]  # fmt: skip


def test_operators_see_who_is_there(site: Site, server: Server) -> None:
    undisturbed = ask_all(server, streams())
    dashboard = Client(server.grpc, TOKEN)

    def shown() -> list[tuple[int, bool]]:
        """The engines on the dashboard, and whether they are on another host; of one alone, none."""
        return [(one.index, bool(one.host)) for one in dashboard.snapshot("tinypy").engine.engines]

    def scale(number: int) -> str:
        environment = {"QUIRE_INTROSPECTION_TOKEN": TOKEN}
        return run_cli("scale", "tinypy", str(number), "--url", server.grpc, env=environment).stdout

    async def work(client: grpc_aio.InferenceServerClient) -> list[Answer]:
        running = [asyncio.create_task(ask(client, **request)) for request in streams()]
        snapshot = {"introspect": "snapshot", "introspection_token": TOKEN}
        while True:
            seen = json.loads((await ask(client, parameters=snapshot)).text)
            if sum(one["phase"] == "decode" and one["engine"] == RANK for one in seen["requests"]) >= 2:
                break
        processes["host"].terminate()
        return list(await asyncio.gather(*running))

    assert (engines_up(server), shown()) == ({"0": 1}, []), "nobody is missed"
    with started() as processes:
        processes["host"] = site.headless(RANK)
        wait_until(lambda: engines_up(server) == {"0": 1, str(RANK): 1}, "it has joined")
        assert shown() == [(0, False), (RANK, True)]
        assert scale(2) == "quire: tinypy has 2 replicas on its own host, and had 1; 1 of other hosts is up\n"
        wait_until(lambda: engines_up(server) == {"0": 1, str(RANK): 1, "3": 1}, "all are shown")
        assert shown() == [(0, False), (RANK, True), (3, False)]
        answers = asyncio.run(with_client(server, work))
        assert processes["host"].wait(60) == 0
    for answer, expected in zip(answers, undisturbed, strict=True):
        assert answer.token_ids == expected.token_ids
    wait_until(lambda: engines_up(server) == {"0": 1, "3": 1}, "it is not down, but gone")
    assert shown() == [(0, False), (3, False)]
    assert total(server, "quire_requests_moved_total") >= 2
    assert total(server, "quire_requests_replayed_total") == total(server, "quire_engine_restarts_total") == 0
    assert scale(1) == "quire: tinypy has 1 replica on its own host, and had 2; none of other hosts is up\n"
    wait_until(lambda: (engines_up(server), shown()) == ({"0": 1}, []), "it is alone")
    dashboard.close()
