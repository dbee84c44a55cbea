"""What `quire serve` knows is asked of it, and believed only about the right server."""

import json
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from quire_cli.ports import Endpoint
from quire_cli.server.health import Health, HealthServer
from quire_client.health_details import HealthDetails, Host, Problem
from quire_dashboard import evidence
from quire_dashboard.evidence import ask_serve
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
    report = ask_serve(address, METRICS)
    assert report is not None
    assert report.server_death() == "tritonserver was killed by SIGSEGV"
    assert report.engine_death("m") == "the engine process was killed by SIGKILL"
    assert report.engine_death("n") == "engine 1: the engine process was killed by SIGKILL"
    assert report.engine_death("other") == ""
    assert len(report.problems_of("m")) == 2
    assert report.problems_of("n") == ("tritonserver does not answer",)
    assert not report.is_draining
    health.write(["the server is draining: it takes no new requests"], host=Host(cpus=2, cpus_of_others=1.5))
    report = ask_serve(address, METRICS)
    assert report is not None
    assert report.is_draining
    assert report.host == Host(cpus=2, cpus_of_others=1.5)


def test_at_the_usual_port_only_the_right_one_is_believed(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Settings, "default", staticmethod(lambda name: address))
    assert ask_serve("", METRICS) is not None
    assert ask_serve("", "127.0.0.1:9002") is None, "that of another server"
    assert ask_serve("", "10.0.0.7:8002") is None, "another machine"


def test_without_one_nothing_is_known() -> None:
    assert ask_serve("127.0.0.1:1", METRICS) is None


def test_of_an_older_or_newer_report_what_is_known_counts() -> None:
    died = Problem(problem="a; the server is being started again", since=time.time() - 3600)
    said = {"history": [msgspec.to_builtins(died) | {"more": 1}], "host": {"memory_pressure": 0.5, "more": [7]}}
    report = msgspec.convert(said, HealthDetails)
    assert report == HealthDetails(history=(died,), host=Host(memory_pressure=0.5))
    assert report.server_death() == "", "that was long ago"


@pytest.mark.parametrize(
    "said",
    [
        None, [], {}, {"history": 7}, "x", {"history": ["x"]}, {"history": [{"problem": 7, "since": 1.0}]},
        {"history": [{"problem": "b"}]}, {"history": [], "host": 7}, {"history": [], "host": {"cpus": "many"}},
        {"history": [], "problems": None},
    ],
)  # fmt: skip
def test_what_is_no_report_is_rejected_as_a_whole(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "fetch", lambda *_: "no json" if said == "x" else json.dumps(said))
    assert ask_serve("127.0.0.1:1", METRICS) is None


def test_neither_is_what_is_nested_too_deeply(monkeypatch: pytest.MonkeyPatch) -> None:
    nested = f'{{"history": [], "more": {"[" * 100_000}{"]" * 100_000}}}'
    monkeypatch.setattr(evidence, "fetch", lambda *_: nested)
    assert ask_serve("127.0.0.1:1", METRICS) is None
