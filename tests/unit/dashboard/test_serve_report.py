"""What `quire serve` knows is asked of it, and believed only about the right server."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from quire_cli.health import Health, HealthServer
from quire_cli.ports import Endpoint
from quire_dashboard.serve_report import Host, ServeReport, ask
from quire_dashboard.settings import Settings

METRICS = "127.0.0.1:8002"
KILLED = "the engine process was killed by SIGKILL; it is being started again"


@pytest.fixture
def health() -> Health:
    return Health(metrics=METRICS)


@pytest.fixture
def address(health: Health) -> Iterator[str]:
    with HealthServer(Endpoint("127.0.0.1", 0), health) as server:
        yield str(server.endpoint)


def test_it_names_what_ended_the_server_and_each_engine(health: Health, address: str) -> None:
    for problem in (
        f"model 'm' version 1: {KILLED}", f"model 'n' version 1: engine 1: {KILLED}",
        "tritonserver was killed by SIGSEGV; the server is being started again", "the server is being started",
    ):  # fmt: skip
        health.write([problem])
    health.write(["the stub process 7 of model 'm' has been stopped (SIGSTOP)", "tritonserver does not answer"])
    report = ask(address, METRICS)
    assert report is not None
    assert report.server_death() == "tritonserver was killed by SIGSEGV"
    assert report.engine_death("m") == "the engine process was killed by SIGKILL"
    assert report.engine_death("n") == "engine 1: the engine process was killed by SIGKILL"
    assert report.engine_death("other") == ""
    assert len(report.problems_of("m")) == 2
    assert report.problems_of("n") == ("tritonserver does not answer",)
    assert not report.is_draining
    health.write(["the server is draining: it takes no new requests"], host={"cpus": 2, "cpus_of_others": 1.5})
    report = ask(address, METRICS)
    assert report is not None
    assert report.is_draining
    assert report.host == Host(cpus=2, cpus_of_others=1.5)


def test_at_the_usual_port_only_the_right_one_is_believed(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Settings, "default", staticmethod(lambda name: address))
    assert ask("", METRICS) is not None
    assert ask("", "127.0.0.1:9002") is None, "that of another server"
    assert ask("", "10.0.0.7:8002") is None, "another machine"


def test_without_one_nothing_is_known() -> None:
    assert ask("127.0.0.1:1", METRICS) is None


@pytest.mark.parametrize("said", [None, [], {}, {"history": 7}, "x"])
def test_what_is_no_report_is_refused(said: Any) -> None:
    with pytest.raises(ValueError, match=r"answer|Expecting"):
        ServeReport.from_json("no json" if said == "x" else json.dumps(said))


def test_of_a_strange_report_the_rest_counts() -> None:
    now = time.time()
    history: list[Any] = [
        {"problem": "a; the server is being started again", "since": now, "until": None}, {"problem": 7, "since": 1.0},
        {"problem": "b; the server is being started again", "since": None}, "x", None,
        {"problem": "c; the server is being started again", "since": now - 3600},
    ]  # fmt: skip
    host = {"cpus": "many", "cpu_pressure": [1], "busiest": 7, "memory_pressure": 0.5, "more": 1}
    report = ServeReport.from_json(json.dumps({"history": history, "host": host, "problems": None}))
    assert report.server_death() == "a"
    assert report.host == Host(memory_pressure=0.5)
    assert ServeReport.from_json('{"history": [], "host": 7}').host == Host()
