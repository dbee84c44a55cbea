"""`quire top`: the overview in the terminal."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from quire_cli.main import run
from quire_cli.ports import Endpoint
from quire_cli.server.health import Health, HealthServer
from quire_client.symptoms import Level
from quire_dashboard import top as top_module
from quire_dashboard.findings import Finding
from quire_dashboard.health import Health as Verdict
from quire_dashboard.incidents import IncidentLog, incidents_file
from quire_dashboard.top import Top, show
from quire_load.scrape import ScrapeError
from support.fake_triton import FakeTriton, State, fake_triton


@contextmanager
def zone(name: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", name)
        time.tzset()
        yield
    time.tzset()


@pytest.fixture(autouse=True)
def utc() -> Iterator[None]:
    with zone("UTC"):
        yield


def top_of(state: State) -> Top:
    return Top("h:8002", 2.0, read=lambda _: state.metrics_text())


def test_it_says_what_the_overview_says() -> None:
    state = State()
    top = top_of(state)
    top.read(1000.0)
    state.finish(20)
    state.finish(20, slo="batch", cause="ttft", ttft=3.0)
    state.set("kv_cache_usage_ratio", 1.0)
    state.add("preemptions_total", 9)
    top.read(1010.0)
    said = top.render(1010.0).plain
    for part in (
        "quire top   h:8002   1970-01-01 00:16:50 UTC",
        "tinypy  Users are affected: only 0% of the requests of class batch meet their SLO. Likely cause: the KV cache",
        "goodput 50.0%   requests 4/s   failed 0.0%   tokens 128/s",
        "running 2   waiting 0   KV cache 100%   preemptions/min 9   restarts 0",
        "goodput by class: batch 0.0%, default 100%",
    ):
        assert part in said
    assert re.search(r"TTFT p95 \S+ s   queue p95 \S+ ms", said)


def test_adapters_have_a_line_where_there_are_any() -> None:
    state = State()
    top = top_of(state)
    top.read(1000.0)
    assert "adapters" not in top.render(1000.0).plain
    for adapters, number in (("ready", 4), ("in_use", 2)):
        state.set("lora_adapters", number, state=adapters)
    for outcome in ("loaded", "failed"):
        state.set("lora_loads_total", 0, outcome=outcome)
    top.read(1010.0)
    state.add("lora_loads_total", 40, outcome="loaded")
    top.read(1020.0)
    assert "  adapters: 4 ready, 2 in use, 2/s loaded, 0/s failed\n" in top.render(1020.0).plain


def test_a_server_that_is_away_is_said_to_be_and_asked_again() -> None:
    state, is_away = State(), True

    def read(_: str) -> str:
        if is_away:
            raise ScrapeError("nothing listens there")
        return state.metrics_text()

    top = Top("h:8002", 2.0, read=read)
    top.read(1000.0)
    assert top.render(1000.0).plain.endswith("The server does not answer. nothing listens there\nTrying again.\n")
    is_away = False
    top.read(1002.0)
    assert "Running" not in top.render(1002.0).plain
    assert "running 2" in top.render(1002.0).plain
    is_away = True
    top.read(1064.0)
    said = top.render(1064.0).plain
    assert "Trying again; what follows is 1 min 2 s old." in said
    assert "running 2" in said


def test_nothing_that_a_server_says_controls_the_terminal() -> None:
    state, control = State(), "\x1b[2J\x9b\u202e"
    state.finish(20, slo="batch", cause="ttft", ttft=3.0)
    failing = False

    def read(_: str) -> str:
        if failing:
            raise ScrapeError(f"answers 503 {control}")
        return state.metrics_text().replace('"tinypy"', f'"tinypy{control}"').replace('"batch"', f'"batch{control}"')

    top = Top("h:8002", 2.0, read=read)
    for now in (1000.0, 1010.0, 1020.0):
        top.read(now)
        state.finish(20, slo="batch", cause="ttft", ttft=3.0)
        state.finish(20)
        failing = now > 1005
        shown = top.render(now)
        assert all(line.isprintable() for line in shown.plain.split("\n"))
        assert "tinypy" in shown.plain
    assert "goodput by class: batch" in shown.plain
    assert "answers 503" in shown.plain
    assert any("bold" in str(span.style) for span in shown.spans)


def test_a_server_without_models() -> None:
    top = Top("h:8002", 2.0, read=lambda _: "nv_inference_count 1\n")
    top.read(1000.0)
    assert "serves no model of Quire" in top.render(1000.0).plain


@pytest.fixture
def fake() -> FakeTriton:
    with fake_triton() as running:
        yield running


def test_once_prints_plain_text_and_ends(fake: FakeTriton, capsys: pytest.CaptureFixture[str]) -> None:
    slept: list[float] = []
    assert show(Top(fake.metrics, 7.0, is_once=True), slept.append) == 0
    assert slept == [7.0]
    said = capsys.readouterr().out
    assert "tinypy  The server is up; no request has ended in the last 0 s." in said
    assert "\x1b" not in said
    fake.stop()
    assert show(Top(fake.metrics, 2.0, is_once=True), slept.append) == 1
    said = capsys.readouterr().out
    assert "connection refused" in said
    assert "rying again" not in said, "it ends"


def test_once_it_says_what_the_server_says_of_the_last_minute() -> None:
    state = State()
    state.set("goodput_ratio", 0.25, slo="default", window="1m")
    top = Top("h:8002", 2.0, read=lambda _: state.metrics_text(), is_once=True)
    for now in (1000.0, 1002.0):
        top.read(now)
    said = top.render(1002.0).plain
    assert "figures of the last 2 s" in said
    assert "only 25% of the requests of class default meet their SLO" in said
    assert "goodput 25.0%" in said


def test_the_time_is_that_of_the_terminal() -> None:
    with zone("Asia/Tokyo"):
        assert "1970-01-01 09:16:50 JST" in top_of(State()).render(1010.0).plain


def test_it_follows_until_it_is_interrupted(
    fake: FakeTriton, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_terminal in (False, True):
        monkeypatch.setattr(top_module.Console, "is_terminal", is_terminal)
        num_slept = 0

        def sleep(_: float) -> None:
            nonlocal num_slept
            num_slept += 1
            if num_slept == 3:
                raise KeyboardInterrupt

        assert show(Top(fake.metrics, 2.0), sleep) == 0
        said = capsys.readouterr().out
        assert said.count("quire top") >= (1 if is_terminal else 3)
        assert ("\x1b[?1049h" in said, "\x1b[?1049l" in said) == (is_terminal, is_terminal), "the screen is given back"


def test_a_wrong_address_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", "--metrics", "nowhere"]) == 2
    assert "metrics is 'nowhere'" in capsys.readouterr().err


def test_it_says_what_quire_serve_knows_and_the_last_incidents(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    health = Health()
    died = "tritonserver was killed by SIGKILL; the server is being started again"
    health.write([died])
    log = IncidentLog(incidents_file("h:8002"), clock=lambda: 1000.0)
    finding = Finding(level=Level.WARNING, cause="queue", title="Requests wait \x1b[2J", detail="")
    log.look({"tinypy": Verdict(level=Level.WARNING, headline="", findings=(finding,))}, lambda model, since: (3, ()))

    def read(_: str) -> str:
        raise ScrapeError("nothing listens there")

    with HealthServer(Endpoint("127.0.0.1", 0), health) as server:
        top = Top("h:8002", 2.0, read=read, health=str(server.endpoint))
        top.read(1000.0)
    said = top.render(1000.0)
    assert "  - tritonserver was killed by SIGKILL.\n" in said.plain
    assert "  01-01 00:16:40 (goes on)  tinypy: Requests wait \ufffd[2J; 3 requests hurt\n" in said.plain
    log.close()  # as a dashboard that is killed
    assert "  01-01 00:16:40 (no dashboard has noted its end)  tinypy: " in top.render(1000.0).plain


def test_a_model_that_gives_vectors_has_no_times_of_tokens() -> None:
    state = State()
    top = top_of(state)
    top.read(1000.0)
    state.add("prompt_tokens_total", 500)
    state.add("requests_total", 20, outcome="stop")
    state.observe("e2e_request_latency_seconds", 0.04, slo="default")
    top.read(1010.0)
    said = top.render(1010.0).plain
    assert "prompt tokens 50/s" in said
    assert "e2e p95" in said
    assert "TTFT" not in said
    assert "between tokens" not in said
