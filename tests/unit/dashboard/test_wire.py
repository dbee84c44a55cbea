"""What goes over gRPC, the load, the watcher, and how the process is started."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
from quire_dashboard.launch import streamlit_command
from quire_dashboard.load import LoadJob, LoadPlan
from quire_dashboard.monitor import Monitor
from quire_dashboard.prometheus import Prometheus
from quire_dashboard.queries import Gauge
from quire_dashboard.settings import Settings, settings_of_servers, to_environment
from quire_load.grpc_endpoint import GrpcEndpoint
from quire_load.load import Load
from quire_load.scrape import parse
from support.fake_triton import MODEL, TOKEN, FakeTriton, fake_triton


def settings_of(fake: FakeTriton) -> Settings:
    return Settings(url=fake.url, metrics=fake.metrics, introspection_token=TOKEN)


def test_a_load_sends_what_was_planned() -> None:
    with fake_triton() as fake:
        job = LoadJob(fake.url, LoadPlan(model=MODEL, num_streams=3, num_requests=10, max_tokens=5, slo_class="batch"))
        job.start()
        job.join(30)
        assert not job.is_running
        records = job.records()
        assert [record.error for record in records] == [""] * 10
        assert {record.num_output_tokens for record in records} == {4}
        assert [parameters for _, parameters in fake.state.prompts] == [
            {"ignore_eos": True, "max_tokens": 5, "slo_class": "batch"}
        ] * 10


def test_a_load_comes_in_a_closed_loop_or_at_a_rate() -> None:
    async def load(**values: Any) -> Load:
        endpoint = GrpcEndpoint("127.0.0.1:1", MODEL, {})
        try:
            return LoadPlan(model=MODEL, **values).load(endpoint)
        finally:
            await endpoint.close()

    closed = asyncio.run(load(num_requests=5, prompt_tokens=8, shared_tokens=6))
    assert closed._arrivals.is_closed_loop
    prompts = [request.prompt for request in closed._requests]
    assert [len(prompt) for prompt in prompts] == [8] * 5
    assert len({tuple(prompt[:6]) for prompt in prompts}) == 1
    at_a_rate = asyncio.run(load(request_rate=2.5))
    assert not at_a_rate._arrivals.is_closed_loop
    assert at_a_rate._arrivals.request_rate == 2.5


def test_a_load_can_be_stopped_and_says_what_failed() -> None:
    with fake_triton() as fake:
        job = LoadJob(fake.url, LoadPlan(model=MODEL, num_streams=2, num_requests=10_000, slo_class="unknown"))
        job.start()
        while not job.records():
            time.sleep(0.01)
        job.stop()
        job.join(30)
        assert not job.is_running
        assert "slo_class is 'unknown'" in job.records()[0].error


def test_a_load_that_is_stopped_before_it_begins_sends_nothing() -> None:
    with fake_triton() as fake:
        job = LoadJob(fake.url, LoadPlan(model=MODEL))
        job.stop()
        job.start()
        job.join(30)
        assert not job.is_running
        assert job.records() == []


def test_a_plan_has_limits() -> None:
    with pytest.raises(ValueError, match="num_streams is 65"):
        LoadPlan(model=MODEL, num_streams=65)


# -- the watcher ------------------------------------------------------------------------------------------------------


def test_the_watcher_survives_a_server_that_goes_away() -> None:
    with fake_triton() as fake:
        monitor = Monitor(settings_of(fake))
        monitor.read()
        assert monitor.error == ""
        assert monitor.models() == [MODEL]
        assert monitor.snapshot(MODEL).snapshot is not None
    monitor.read()
    assert "connection refused" in monitor.error
    assert monitor.models() == [MODEL]
    monitor.forget_snapshot(MODEL)
    assert "does not answer" in monitor.snapshot(MODEL).error
    assert len(monitor.points(Gauge(name="quire_requests_running"), "", {"model": MODEL}, 60)) == 1
    monitor.stop()


def test_requests_that_a_server_takes_along_are_found_however_late_its_absence_is_noticed() -> None:
    with fake_triton() as fake:
        monitor = Monitor(settings_of(fake))
        before = time.time()
        monitor.read()
        fake.state.end(id="before", time_unix=before - 60, finish_reason="error", error_code="lost", error="killed")
        fake.state.end(id="victim", time_unix=time.time(), finish_reason="error", error_code="lost", error="killed")
        _, hurt = monitor._hurt(MODEL, since=time.time() + 30)
        assert [one.id for one in hurt] == ["victim"]
        monitor.stop()


def test_the_watcher_knows_whether_only_the_metrics_are_away() -> None:
    with fake_triton() as fake:
        monitor = Monitor(settings_of(fake))
        assert not monitor.only_metrics_away, "nothing was asked yet"
        monitor.read()
        fake.close_metrics()
        found = []
        for _ in range(2):
            monitor.read()
            found.append(monitor.only_metrics_away)
        assert found == [False, True]
        assert "cannot be read" in monitor.judge(MODEL)[1].headline
    monitor.read()
    assert not monitor.only_metrics_away
    assert monitor.judge(MODEL)[1].headline == "The server does not answer."
    monitor.stop()


def test_a_snapshot_is_fetched_once_for_all_visitors() -> None:
    with fake_triton() as fake:
        monitor = Monitor(settings_of(fake))
        first = monitor.snapshot(MODEL)
        assert monitor.snapshot(MODEL) is first
        assert monitor.snapshot(MODEL, refresh_s=30.0) is first
        assert monitor.snapshot(MODEL, refresh_s=1e-9) is not first, "who looks more often sees more"
        first = monitor.snapshot(MODEL)
        monitor.forget_snapshot(MODEL)
        assert monitor.snapshot(MODEL) is not first
        assert len(monitor.steps(MODEL)) == 3
        monitor.stop()


# -- how it is started ------------------------------------------------------------------------------------------------


def test_points_are_computed_once_for_all_visitors() -> None:
    with fake_triton() as fake:
        monitor = Monitor(Settings(url=fake.url, metrics=fake.metrics))
        query = Gauge(name="quire_requests_running")
        monitor.read()
        points = monitor.points(query, "", {"model": MODEL}, 300.0)
        assert monitor.points(query, "", {"model": MODEL}, 300.0) is points
        monitor.read()
        assert len(monitor.points(query, "", {"model": MODEL}, 300.0)) == 2
        monitor.client.close()


def test_settings_go_through_the_environment() -> None:
    settings = Settings(url="a:1", metrics="b:2", prometheus="http://c:3", token="d" * 16, introspection_token="e")
    assert Settings.from_environment(to_environment([settings])) == settings
    assert Settings.from_environment({}) == Settings()


def test_settings_of_several_servers_go_through_the_environment() -> None:
    tokens = '{"b:1": "theirs, with a comma"}'
    servers = settings_of_servers(["a:1", "b:1"], [], introspection_token="ours", introspection_tokens=tokens)
    assert [one.metrics for one in servers] == ["a:8002", "b:8002"]
    assert [one.instance for one in servers] == ["a:8002", "b:8002"]
    assert [one.introspection_token for one in servers] == ["ours", "theirs, with a comma"]
    assert Settings.all_from_environment(to_environment(servers)) == servers
    assert settings_of_servers([], [], token="d" * 16) == (Settings(token="d" * 16),)
    assert settings_of_servers(["[::1]:9001"], [])[0].metrics == "[::1]:8002"


@pytest.mark.parametrize(
    ("urls", "metrics", "tokens", "said"),
    [
        (["a:1", "b:1"], ["a:2"], "", "metrics is given 1 times and url 2"),
        (["a:1", "a:1"], ["a:2", "b:2"], "", "url is 'a:1' for more than one server"),
        (["a:1", "a:3"], [], "", "metrics is 'a:8002' for more than one server"),
        (["a:1,b:1"], [], "", "url is 'a:1,b:1'; it must be HOST:PORT"),
        (["a:1"], [], "secret", "must be a JSON object of tokens by url"),
        (["a:1"], [], '["secret"]', "must be a JSON object of tokens by url"),
        (["a:1"], [], '{"a:1": 1}', "must be a JSON object of tokens by url"),
        (["a:1"], [], '{"b:1": "secret"}', "names 'b:1'; the servers are a:1"),
    ],
)
def test_servers_that_cannot_be_told_apart_are_refused(
    urls: list[str], metrics: list[str], tokens: str, said: str
) -> None:
    with pytest.raises(ValueError, match=said) as error:
        settings_of_servers(urls, metrics, introspection_tokens=tokens)
    assert "secret" not in str(error.value)


def test_of_several_servers_prometheus_is_asked_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, str]] = []
    monkeypatch.setattr(Prometheus, "range", lambda self, query, by, labels, *_: asked.append(dict(labels)) or [])
    for server in settings_of_servers(["a:1", "b:1"], [], prometheus="http://c:3")[:1] + settings_of_servers(
        ["a:1"], [], prometheus="http://c:3"
    ):
        Monitor(server).points(Gauge(name="quire_engine_up"), "", {"model": "m"}, 60.0)
    assert asked == [{"model": "m", "instance": "a:8002"}, {"model": "m"}]


@pytest.mark.parametrize(
    "wrong", [{"url": "localhost"}, {"metrics": "http://localhost:8002"}, {"prometheus": "localhost:9090"}]
)
def test_wrong_endpoints_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        replace(Settings(), **wrong)


def test_streamlit_is_told_to_be_careful() -> None:
    flags = streamlit_command("127.0.0.1", 8501)
    assert "--runner.postScriptGC=false" in flags, "this alone is two thirds of what an open page costs"
    for flag in ("--server.address=127.0.0.1", "--server.enableStaticServing=false", "--browser.gatherUsageStats=false",
                 "--client.showErrorDetails=none", "--server.allowedHosts=127.0.0.1"):  # fmt: skip
        assert flag in flags
    assert "--server.allowedHosts=127.0.0.2" in streamlit_command("127.0.0.2", 8501)
    assert not [flag for flag in streamlit_command("0.0.0.0", 8501) if "allowedHosts" in flag]


@pytest.mark.parametrize("servers", [1, 2])
def test_health_knows_from_prometheus_what_was_before_the_dashboard(
    monkeypatch: pytest.MonkeyPatch, servers: int
) -> None:
    with fake_triton() as fake:
        rows = []
        for ago in (60.0, 45.0, 30.0, 15.0):
            if ago == 30.0:
                fake.state.set("server_start_time_seconds", time.time() - 31)
            fake.state.finish(5, cause="ttft", ttft=3.0)
            rows.append(parse(fake.state.metrics_text(), time.time() - ago))
        added = [{"job": "quire", "instance": f"10.0.0.{number}:8002"} for number in range(servers)]
        result = [
            {
                "metric": {"__name__": name, **dict(labels), **theirs},
                "values": [[row.time, str(row.values[name, labels])] for row in rows],
            }
            for name, labels in rows[0].values
            for theirs in added
        ]
        monkeypatch.setattr(Prometheus, "_get", lambda *_, **__: {"result": result})
        watcher = Monitor(Settings(url=fake.url, metrics=fake.metrics, prometheus="http://127.0.0.1:1"))
        watcher.read()
        evidence, health = watcher.judge(MODEL)
        watcher.client.close()
    if servers == 2:
        assert not evidence.server_restarts, "whose they are cannot be told"
        assert not evidence.goodput
    else:
        assert evidence.goodput == {"default": 0.0}
        assert len(evidence.server_restarts) == 1
        assert "only 0% of the requests of class default meet their SLO" in health.headline
