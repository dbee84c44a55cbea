"""Every page by Streamlit's own test harness, against a stand-in for the server: what it says, not how it looks."""

import base64
import io
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import streamlit as st
from PIL import Image
from quire_client import Chunk, Client
from quire_dashboard import frame
from quire_dashboard import monitor as monitor_module
from quire_dashboard.findings import SLO_EXAMPLE
from quire_dashboard.frame import Line
from quire_dashboard.history import Point
from quire_dashboard.queries import Gauge
from quire_dashboard.settings import Settings, to_environment
from quire_dashboard.views import requests
from quire_dashboard.views.playground import Turn
from quire_dashboard.watchers import close_monitors, monitor
from streamlit.testing.v1 import AppTest
from support.fake_triton import FakeTriton, make_request
from support.pages import PAGE, TIMEOUT_S, open_page, press, text_of

pytestmark = pytest.mark.filterwarnings("default")  # those of Streamlit and pandas are not ours


def image_file(color: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (20, 10), color).save(file, "PNG")
    return file.getvalue()


def set_settings(monkeypatch: pytest.MonkeyPatch, **changed: str) -> None:
    """Have this process' dashboard run with other settings."""
    for name, value in to_environment([replace(Settings.from_environment(), **changed)]).items():
        monkeypatch.setenv(name, value)


def read_again() -> None:
    monitor().read()


def run_until(app: AppTest, condition: Callable[[str], bool]) -> str:
    """Run again, as a refresh does, until the page says it."""
    end = time.monotonic() + TIMEOUT_S
    while not condition(text := text_of(app.run())):
        assert time.monotonic() < end, text
    return text


def test_times_are_of_the_visitors_zone_on_all_pages(fake: FakeTriton) -> None:
    moment = datetime(2026, 1, 15, 23, 30, 5, tzinfo=timezone.utc)
    for zone, shown, name in (("Asia/Tokyo", "08:30:05", "JST"), ("America/New_York", "18:30:05", "EST"),
                              ("no/such", "23:30:05", "UTC"), (None, "23:30:05", "UTC")):  # fmt: skip
        app = open_page("overview")
        app.context = {"timezone": zone}
        fake.state.end(time_unix=moment.timestamp())
        fake.state.add("engine_restarts_total", 1)
        read_again()
        text = text_of(app.run())
        assert f"times are {name}" in text
        assert re.search(rf"Dashed lines, {name}: \d\d:\d\d:\d\d engine restarted", text)
        app = open_page("ended")
        app.context = {"timezone": zone}
        assert "the model was loaded at" in text_of(app.run())
        assert str(app.dataframe[0].value["ended"][0])[11:19] == shown
        assert json.loads(app.dataframe[0].proto.columns)["ended"]["label"] == f"ended, {name}"


def test_the_page_itself_says_of_which_model_and_server_it_is(fake: FakeTriton) -> None:
    """A phone does not show the sidebar."""
    for page in ("overview", "kv_cache", "requests", "ended", "engine", "playground", "load"):
        shown = open_page(page).main.caption[0].value.replace("\\", "")
        assert shown.startswith(f"**tinypy** at **{fake.url}**; times are ")


# -- Overview ----------------------------------------------------------------------------------------------------------


def test_overview_when_all_is_well(fake: FakeTriton) -> None:
    app = open_page("overview")
    fake.state.finish(20)
    read_again()
    text = text_of(app.run())
    assert "Users are served within their SLO." in text
    for figure in ("Goodput=100%", "KV cache=25.0%", "Running=2", "Waiting=0", "Restarts=0"):
        assert figure in text
    for figure in ("Failed=0.0%", "Queue p95=10 ms", "Prefill p95=48 ms", "Between tokens=48 ms"):
        assert figure in text
    assert "Dashed lines" not in text, "nothing has happened"
    assert len(app.get("vega_lite_chart")) == 9
    assert "Nothing in this time range." in text, "nothing is missed"


def test_a_model_that_gives_vectors_has_no_times_of_tokens(fake: FakeTriton) -> None:
    app = open_page("overview")
    fake.state.add("prompt_tokens_total", 500)
    fake.state.add("requests_total", 20, outcome="stop")
    fake.state.observe("e2e_request_latency_seconds", 0.04, slo="default")
    read_again()
    text = text_of(app.run())
    for figure in ("Prompt tokens=", "E2E p95="):
        assert figure in text
    for figure in ("TTFT p95=", "Between tokens="):
        assert figure not in text
    fake.state.snapshot["requests"][0] |= {"task": "embed", "max_tokens": 0, "num_output_tokens": 0}
    monitor().forget_snapshot("tinypy")
    assert list(open_page("requests").dataframe[0].value["tokens"]) == ["embed", "0 of 40"]
    times = {"time_to_first_token_seconds": None, "time_per_output_token_seconds": None, "num_output_tokens": 0}
    fake.state.end(task="embed", slo_cause="e2e", parameters={"dimensions": 64}, **times)
    app = open_page("ended")
    assert app.dataframe[0].value["output"].isna().all()
    app.session_state["ended_chosen"] = "aaaa0000:0"
    assert "; embed; it ended" in text_of(app.run())
    (command,) = app.get("code")
    body = json.loads(shlex.split(command.value)[4])
    assert json.loads(body["pooling_parameters"]) == {"dimensions": 64, "task": "embed"}


def test_the_verdict_and_its_figures_wait_for_no_model_and_no_chart(
    fake: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor().snapshot("tinypy")  # at the start of the dashboard

    def is_asked(*_: object) -> None:
        raise AssertionError("of a server that is saturated, an answer may take seconds")

    for call in ("snapshot", "ended", "models", "has_chat_template"):
        monkeypatch.setattr(Client, call, is_asked)
    monkeypatch.setattr(frame, "_spark", lambda query: [1.0, 2.0])
    drawn: list[str] = []
    for name in ("success", "metric", "vega_lite_chart"):
        original = getattr(st, name)
        monkeypatch.setattr(st, name, partial(note_and_call, drawn, name, original))
    app = open_page("overview")
    assert "The server is up" in text_of(app) or "SLO" in text_of(app)
    order = list(dict.fromkeys(drawn))
    assert order[-2:] == ["metric", "vega_lite_chart"], "charts come after"
    assert all(not metric.proto.chart_data for metric in app.metric), "and so do the small lines"
    app.run()
    assert any(metric.proto.chart_data for metric in app.metric)


def note_and_call(drawn: list[str], name: str, original: Callable[..., Any], *given: Any, **how: Any) -> Any:
    drawn.append(name)
    return original(*given, **how)


FIRST_VISIT = """
import asyncio, sys
from quire_dashboard.server import app, watching
from streamlit.testing.v1 import AppTest

async def main():
    async with watching(app):
        known = set(sys.modules)
        for page in ("overview", "kv_cache", "requests", "ended", "engine", "playground", "load"):
            shown = AppTest.from_string(PAGE.format(page=page), default_timeout=60).run()
            assert not shown.exception
        large = {"altair", "grpc", "numpy", "pandas", "quire_dashboard", "quire_load"}
        print(sorted(large & {name.partition(".")[0] for name in set(sys.modules) - known}))

asyncio.run(main())
"""


def test_the_first_visitor_waits_for_no_import(fake: FakeTriton) -> None:
    program = f"PAGE = {PAGE!r}\n{FIRST_VISIT}"
    said = subprocess.check_output([sys.executable, "-c", program], text=True, timeout=TIMEOUT_S)
    assert said.strip() == "[]", said


def test_all_visitors_see_one_verdict(fake: FakeTriton) -> None:
    open_page("overview")
    _, first = monitor().judge("tinypy")
    assert monitor().judge("tinypy")[1] is first
    read_again()
    assert monitor().judge("tinypy")[1] is not first


def test_overview_says_that_no_slo_is_set_and_which_setting_sets_one(fake: FakeTriton) -> None:
    del fake.state.samples["slo_target_seconds"]
    app = open_page("overview")
    fake.state.finish(20)
    read_again()
    text = text_of(app.run())
    assert "No SLO is set" in text
    assert "within their SLO" not in text
    assert "Goodput=no SLO" in text
    assert [code.value for code in app.get("code")] == [SLO_EXAMPLE]


def test_overview_names_the_likely_cause(fake: FakeTriton) -> None:
    app = open_page("overview")
    fake.state.finish(10)
    fake.state.finish(30, cause="ttft", ttft=3.0)
    fake.state.add("preemptions_total", 9)
    fake.state.set("kv_cache_usage_ratio", 1.0)
    read_again()
    assert "only 25% of the requests of class default meet their SLO. Likely cause: the KV cache is full" in (
        text_of(app.run())
    )


def test_overview_filters_by_slo_class(fake: FakeTriton) -> None:
    app = open_page("overview")
    fake.state.finish(10)
    fake.state.finish(30, slo="batch", cause="e2e", ttft=3.0)
    read_again()
    app.run()
    for slo_class, figure, ttft in (
        ("default", "Goodput=100%", "48 ms"), ("batch", "Goodput=0.0%", "4.9 s"),
        ("All classes", "Goodput=25.0%", "4.8 s"),
    ):  # fmt: skip
        app.segmented_control(key="slo_class").set_value(slo_class)
        text = text_of(app.run())
        assert figure in text
        assert f"TTFT p95={ttft}" in text
        assert re.search(rf"\*\*Time to first token\*\*.* p95 {ttft} ", text), "the charts follow the class as well"
        assert ("Goodput batch=0.0%" in text) is (slo_class == "All classes")


def units_of(table: Any) -> dict[str, str]:
    """What stands behind the numbers of each column."""
    columns = json.loads(table.proto.columns)
    return {
        name: re.sub(r"^%[\d.]*[a-z]", "", str(column.get("type_config", {}).get("format", "")))
        for name, column in columns.items()
    }


def add_model(fake: FakeTriton) -> None:
    """One with a class of its own."""
    fake.state.set("engine_up", 1, model="other")
    fake.state.set("slo_requests_total", 0, model="other", slo="gold", verdict="good", cause="none")


def test_classes_are_those_of_the_chosen_model(fake: FakeTriton) -> None:
    add_model(fake)
    app = open_page("overview")
    app.selectbox(key="model").set_value("tinypy").run()
    assert app.segmented_control(key="slo_class").options == ["All classes", "batch", "default"]
    app.segmented_control(key="slo_class").set_value("batch").run()
    assert "**Its parts, p95, all classes**" in text_of(app), "the server does not tell these apart"
    app.selectbox(key="model").set_value("other").run()
    assert not app.exception
    assert app.segmented_control(key="slo_class").options == ["All classes", "gold"]
    assert app.segmented_control(key="slo_class").value == "All classes"


def test_several_models_are_in_a_strip_and_one_is_chosen_by_a_press(fake: FakeTriton) -> None:
    assert not open_page("overview").button, "of one model the page is"
    add_model(fake)
    fake.state.set("engine_up", 0, model="other")
    read_again()
    app = open_page("overview")
    assert [button.label for button in app.button] == [
        ":red[●] other: in trouble, 0 running", ":green[●] tinypy: well, 2 running",
    ]  # fmt: skip
    press(app, ":red[●] other: in trouble, 0 running")
    assert "Nobody is being served: the engine is down." in text_of(app.run())
    press(app, ":green[●] tinypy: well, 2 running")
    assert "Running=2" in text_of(app.run())


def test_a_restart_is_marked_in_every_chart(fake: FakeTriton) -> None:
    app = open_page("overview")
    fake.state.finish(20)
    fake.state.add("engine_restarts_total", 1)
    read_again()
    assert re.search(r"Dashed lines, UTC: \d\d:\d\d:\d\d engine restarted", text_of(app.run()))
    for alt in [one.proto.alt for one in app.get("vega_lite_chart")]:
        assert drawn_of(app, alt).column("event").to_pylist().count("engine restarted") == 1


def test_other_settings_are_marked_in_the_charts_of_every_page(fake: FakeTriton) -> None:
    app = open_page("overview")
    fake.state.finish(20)
    with fake.state.lock:
        fake.state.samples["model_load_timestamp_seconds"].clear()
    fake.state.set("model_load_timestamp_seconds", time.time(), settings="bbbb1111")
    read_again()
    text_of(app.run())
    for page in ("kv_cache", "engine"):
        app = open_page(page)
        assert re.search(r"Dashed lines, UTC: \d\d:\d\d:\d\d loaded with other settings$", text_of(app), re.MULTILINE)
        for alt in [one.proto.alt for one in app.get("vega_lite_chart")]:
            assert drawn_of(app, alt).column("event").to_pylist().count("loaded with other settings") == 1


def test_a_target_that_is_far_away_is_said_and_not_drawn(fake: FakeTriton) -> None:
    app = open_page("overview")
    fake.state.finish(20, ttft=0.4)
    read_again()
    text = text_of(app.run())
    specs = {chart.proto.alt: chart.proto.spec for chart in app.get("vega_lite_chart")}
    assert "SLO 500 ms" in specs["Time to first token"]
    assert "SLO 10" not in specs["End-to-end latency"]
    assert re.search(r"End-to-end latency.*p99 .* · SLO 10.*s\]", text)
    assert "99%" in specs["Goodput"]


def test_overview_says_that_the_server_is_away_and_how_old_its_figures_are(fake: FakeTriton) -> None:
    app = open_page("overview")
    fake.stop()
    read_again()
    text = text_of(app.run())
    assert "The server does not answer." in text
    assert "nothing listens there (connection refused)" in text
    assert "What is shown is" in text
    assert "Running=2" in text


def test_metrics_that_cannot_be_read_are_not_said_to_be_a_server_that_is_away(fake: FakeTriton) -> None:
    app = open_page("overview")
    fake.close_metrics()
    for _ in range(2):
        read_again()
    text = text_of(app.run())
    assert "The server answers, but its metrics cannot be read." in text
    assert "nothing listens there (connection refused)" in text
    assert "does not answer" not in text


@pytest.mark.parametrize("page", ["overview", "kv_cache", "requests", "ended", "engine", "playground", "load"])
def test_a_server_that_never_was_there(fake: FakeTriton, page: str) -> None:
    fake.stop()
    text = text_of(open_page(page))
    assert "The server does not answer." in text or "No model of Quire is loaded." in text


def test_a_limit_that_lines_swing_about_does_not_come_and_go() -> None:
    what = ((Line(query=Gauge(name="anything"), name="p99"),), "swinging", 300.0)

    def drawn(highest: float) -> list[str]:
        found = frame._drawn_of(what, [[Point(time.time(), "", highest)]])
        return list(frame._near({"target": 1.0, "lower": 0.1}, found))

    assert drawn(0.24) == ["lower"]
    assert drawn(0.26) == ["target", "lower"]
    assert drawn(0.24) == ["target", "lower"]
    assert drawn(0.16) == ["lower"]
    assert drawn(0.24) == ["lower"]


def drawn_of(chart: AppTest, alt: str) -> pa.Table:
    """The data of a chart."""
    proto = next(one.proto for one in chart.get("vega_lite_chart") if one.proto.alt == alt)
    (data,) = [one.data.data for one in proto.datasets] or [proto.data.data]
    return pa.ipc.open_stream(data).read_all()


def test_all_charts_show_the_same_time_and_it_ends_now(fake: FakeTriton) -> None:
    app = open_page("overview")
    fake.state.finish(20)
    read_again()
    app.run()
    now = time.time()
    charts = [one.proto.alt for one in app.get("vega_lite_chart")]
    assert len(charts) == 9, "of misses there are none"
    for alt in charts:
        times = [moment.timestamp() for moment in drawn_of(app, alt).column("time").to_pylist()]
        assert now - 15 < max(times) <= now
        assert max(times) - min(times) == pytest.approx(300, abs=0.01)


def test_what_is_old_is_not_said_to_be_now_and_is_drawn_where_it_was() -> None:
    what = ((Line(query=Gauge(name="anything"), name="running"),), "aged", 300.0)
    now = time.time()
    drawn = frame._drawn_of(what, [[Point(now - 400, "", 5.0), Point(now - 120, "", 7.0)]])
    assert drawn.table.column("value").to_pylist() == [7.0, None, None]
    assert frame._now(drawn, str, now) == ""
    assert frame._now(drawn, str, now - 100) == "running 7.0"


def test_lines_that_are_always_zero_are_left_out() -> None:
    line = Line(query=Gauge(name="anything"), by="cause", hides_zero=True)
    now = time.time()
    points = [Point(now, "ttft", 0.0), Point(now, "e2e", 0.5)]
    assert frame._drawn_of(((line,), "zeros", 300.0), [points]).names == ["e2e"]
    assert frame._drawn_of(((line,), "zeros", 300.0), [points[:1]]).names == []


# -- the other pages ---------------------------------------------------------------------------------------------------


def test_kv_cache_shows_blocks_and_their_owners(fake: FakeTriton) -> None:
    app = open_page("kv_cache")
    fake.state.finish(5)
    fake.state.add("kv_block_evictions_total", 12)
    read_again()
    text = text_of(app.run())
    assert "Evictions=—" not in text
    assert "Evictions=0" not in text
    for figure in ("Used=8", "Available=56", "Cached=16", "Shared=2", "Prefix hits=40.0%"):
        assert figure in text
    assert "Free=" not in text, "that a cache in use has few empty blocks is no shortage"
    assert "24 blocks can be found by their prefix: 3 different beginnings, the longest 7 blocks (112 tokens)" in text
    picture = next(html.proto.body for html in app.get("html") if "quire-block-map" in html.proto.body)
    assert "64 blocks: 8 used, 16 cached, 40 free" in picture
    assert "report (aaaa11): 4" in picture
    assert list(app.dataframe[0].value["request"]) == ["report (aaaa11)", "chat (cccc33)"]


def test_requests_are_listed_and_one_is_cancelled(fake: FakeTriton, monkeypatch: pytest.MonkeyPatch) -> None:
    app = open_page("requests")
    table = app.dataframe[0].value
    assert list(table["request"]) == ["report (aaaa11)", "chat (cccc33)"]
    assert list(table["phase"]) == ["decode", "prefill"]
    assert list(table["tokens"]) == ["10 of 40", "0 of 40"]
    units = {"age": " s", "queue": " s", "slack": " s", "prompt": " tok", "computed": " tok", "preempted": " times"}
    assert units.items() <= units_of(app.dataframe[0]).items()
    for duration in ("age", "queue", "slack"):
        assert table[duration].dtype.kind == "f", "text would sort 10 s before 9 s"
    assert not app.button, "nothing is chosen"
    app.session_state["chosen"] = requests._Chosen("tinypy", "cccc3333dddd4444", "chat (cccc33)", fake.url)
    assert "prefill chunk, 64 tokens" in text_of(app.run())
    press(app, "Cancel `chat (cccc33)`…")
    assert "it cannot be taken back" in text_of(app.run())
    assert fake.state.cancelled == []
    press(app, "Let it run")
    assert "it cannot be taken back" not in text_of(app.run())
    press(app, "Cancel `chat (cccc33)`…")
    app.run()
    press(app, "Cancel `chat (cccc33)` now")
    text = text_of(app.run())
    assert fake.state.cancelled == ["cccc3333dddd4444"]
    assert "Request `chat (cccc33)` was cancelled." in text
    assert "Request `chat (cccc33)` has ended." in text
    assert "**1 requests**" in text
    monkeypatch.setattr(requests, "_TOLD_S", 0.0)
    assert "was cancelled" not in text_of(app.run())
    monkeypatch.undo()
    assert "was cancelled" not in text_of(app.run())


def test_a_chosen_request_stays_chosen_while_others_come_and_go(fake: FakeTriton) -> None:
    app = open_page("requests")
    app.session_state["chosen"] = requests._Chosen("tinypy", "cccc3333dddd4444", "chat (cccc33)", fake.url)

    def buttons_after(change: Callable[[list[dict[str, object]]], None]) -> list[str]:
        with fake.state.lock:
            change(fake.state.snapshot["requests"])
        monitor().forget_snapshot("tinypy")
        app.run()
        return [button.label for button in app.button]

    assert buttons_after(lambda live: None) == ["Cancel `chat (cccc33)`…"]
    older = make_request("eeee5555ffff6666", label="older", age_seconds=83.0)
    assert buttons_after(lambda live: live.append(older)) == ["Cancel `chat (cccc33)`…"]
    assert buttons_after(lambda live: live.remove(live[1])) == []
    assert "Request `chat (cccc33)` has ended." in text_of(app)
    assert buttons_after(lambda live: live.clear()) == []
    assert "Request `chat (cccc33)` has ended." in text_of(app)


class Table:
    """A table in a browser, which may be late: `says` has the drawing that it knows, by its number from 1."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state: dict[str, Any] = {}
        self.shown: dict[str, Any] = {}
        self.chosen: list[str | None] = [None]
        patched = SimpleNamespace(
            session_state=self.state, dataframe=lambda *_, **how: self.shown.update(how),
            text_input=lambda *_, **__: None, container=lambda **_: nullcontext(),
        )  # fmt: skip
        monkeypatch.setattr(frame, "st", patched)

    def draw(self, *ids: str) -> list[int]:
        rows = [{"id": id_} for id_ in ids]
        frame.choice_table(rows, ids, self.chosen[-1], key="t", columns={}, on_choice=self.chosen.append)
        told: list[int] = self.state["t"]["selection"]["rows"]
        return told

    def says(self, *rows: int, drawing: int) -> None:
        self.state["t"] = SimpleNamespace(selection=SimpleNamespace(rows=list(rows)))
        self.state["t-drawing"] = str(drawing)
        self.shown["on_select"]()


def test_a_late_repetition_of_the_browser_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(monkeypatch)
    table.draw("a", "b", "c", "d")
    table.says(1, drawing=1)
    assert table.draw("b", "c", "d") == [0], "the browser gets the place of the chosen one"
    table.says(1, drawing=1)
    assert table.chosen[-1] == "b", "it still shows the rows as they were"
    table.draw("c", "d")
    table.says(0, drawing=2)
    table.says(0, drawing=1)  # half of a new drawing has arrived
    assert set(table.chosen) == {None, "b"}, "neither what has moved nor what has gone hands its place on"
    table.says(1, drawing=3)
    table.draw("c", "d")
    table.says(0, drawing=4)
    assert table.chosen[-2:] == ["d", "c"]


def test_the_ticked_row_is_the_chosen_one_though_rows_have_moved_since(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(monkeypatch)
    table.draw("a", "b", "c", "d")
    table.draw("b", "c", "d")
    table.draw("c", "d", "e")
    table.says(1, drawing=1)
    assert table.chosen[-1] == "b", "the visitor has seen it in that row"
    assert table.draw("c", "d", "e") == []
    table.says(2, drawing=2)
    assert table.chosen[-1] == "d"
    assert table.draw("d", "e") == [0]
    table.says(drawing=5)
    assert table.chosen[-1] is None, "the tick was taken away"
    for nonsense in ("", "99", "x"):
        table.state["t-drawing"] = nonsense
        table.state["t"] = SimpleNamespace(selection=SimpleNamespace(rows=[7]))
        table.shown["on_select"]()
    assert table.chosen[-1] is None


def test_ended_requests_say_why_and_are_filtered_searched_and_sent_again(fake: FakeTriton) -> None:
    fake.state.end()
    fake.state.end(label="good", slo_verdict="good")
    fake.state.end(label="gone", finish_reason="abort", aborted_by="client", slo_verdict="", slo_class="batch",
                   traceparent=f"00-{'ab' * 16}-{'cd' * 8}-01")  # fmt: skip
    app = open_page("ended")
    assert list(app.dataframe[0].value["request"]) == ["gone", "request-0"]
    assert list(app.dataframe[0].value["why"]) == [
        "Client left after 5.4 s, with 51 tokens", "4.1 s of 4.4 s in the queue, behind 16 running and 3 waiting",
    ]  # fmt: skip
    assert "1 client left · 1 queue" in text_of(app)
    assert not app.get("code"), "nothing is chosen"
    for key, value, names in (
        ("ended_show", "All that ended", ["gone", "good", "request-0"]),
        ("ended_why", "queue", ["good", "request-0"]),
        ("ended_class", "default", ["good", "request-0"]),
    ):
        app.selectbox(key=key).set_value(value).run()
        assert list(app.dataframe[0].value["request"]) == names
    app.text_input(key="ended_search").set_value("QUEST-0").run()
    assert list(app.dataframe[0].value["request"]) == ["request-0"]
    app.session_state["ended_chosen"] = "aaaa0000:0"
    text_of(app.run())
    (command,) = app.get("code")
    assert shlex.split(command.value)[:3] == ["curl", "-s", "http://127.0.0.1:8000/v2/models/tinypy/generate"]
    body = json.loads(shlex.split(command.value)[4])
    assert json.loads(body["sampling_parameters"]) == {"max_tokens": 51, "temperature": 0.5}
    app.text_input(key="ended_search").set_value("").run()
    app.selectbox(key="ended_why").set_value("Any").run()
    app.selectbox(key="ended_class").set_value("Any").run()
    app.session_state["ended_chosen"] = "aaaa0000:2"
    assert f"trace `{'ab' * 16}`" in text_of(app.run())


def test_commands_have_this_servers_ports_and_the_requests_class(
    fake: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_settings(monkeypatch, http="127.0.0.1:18000")
    fake.state.end(slo_class="default")
    fake.state.end(slo_class="batch")
    app = open_page("ended")
    for number, slo_class in enumerate(("default", "batch")):
        app.session_state["ended_chosen"] = f"aaaa0000:{number}"
        text_of(app.run())
        command = shlex.split(app.get("code")[0].value)
        assert command[2] == "http://127.0.0.1:18000/v2/models/tinypy/generate"
        assert json.loads(command[4])["parameters"] == {"slo_class": slo_class}
    app = open_page("playground")
    press(app, "Generate")
    text_of(app.run())
    text_of(app.run())
    command, program = (code.value for code in app.get("code"))
    assert "http://127.0.0.1:18000/" in command
    assert fake.url in program


def test_ended_requests_say_what_is_not_known(fake: FakeTriton, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_module, "SNAPSHOT_AGE_S", 0.0)
    app = open_page("ended")
    assert "No request has ended since the model was loaded" in text_of(app)
    fake.state.end()
    fake.state.ended.update(num_ended=2002, slo={"default": {}})
    text = text_of(app.run())
    assert "The last 2,000 of 2,002 requests that have ended since" in text
    assert "No SLO is set" in text
    fake.stop()
    text = text_of(app.run())
    assert "does not say which requests have ended" in text
    assert "What is shown is" in text
    assert list(app.dataframe[0].value["request"]) == ["request-0"]


def test_incidents_say_who_was_hurt_also_after_the_server_and_the_page_are_gone(
    fake: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor_module, "SNAPSHOT_AGE_S", 0.0)
    app = open_page("incidents")
    assert "There has been no incident yet." in text_of(app)
    fake.state.end(id="abc", label="mine", traceparent=f"00-{'ab' * 16}-{'cd' * 8}-01", time_unix=time.time())
    fake.state.finish(10, cause="ttft", ttft=3.0)
    fake.state.add("preemptions_total", 9)
    fake.state.set("kv_cache_usage_ratio", 1.0)
    read_again()
    text = text_of(app.run())
    assert "**1 incident**, 1 of them now" in text
    (row,) = app.dataframe[0].value.to_dict("records")
    assert row["cause"] == "The KV cache is full and requests are preempted"
    assert (row["requests hurt"], row["alert"], row["model"]) == (10, "QuireKVCacheSaturated", "tinypy")
    fake.stop()
    close_monitors()
    app = open_page("incidents")
    app.session_state["incidents_chosen"] = monitor().incidents.rows()[0].id
    text = text_of(app.run())
    assert "it goes on" in text
    assert "Runbook: QuireKVCacheSaturated." in text
    (hurt,) = app.dataframe[1].value.to_dict("records")
    assert (hurt["request"], hurt["trace"]) == ("mine", "ab" * 16)
    assert hurt["more"] == "ended?ended_search=abc&ended_show=All+that+ended"
    assert hurt["why"] == "4.1 s of 4.4 s in the queue, behind 16 running and 3 waiting"


def test_ended_requests_need_the_token(fake: FakeTriton, monkeypatch: pytest.MonkeyPatch) -> None:
    set_settings(monkeypatch, introspection_token="another")
    text = text_of(open_page("ended"))
    assert "does not say which requests have ended.** introspection_token is wrong or missing" in text
    assert "Start the dashboard with `QUIRE_INTROSPECTION_TOKEN`" in text


def test_requests_cannot_be_seen_without_the_token(fake: FakeTriton, monkeypatch: pytest.MonkeyPatch) -> None:
    set_settings(monkeypatch, introspection_token="another")
    text = text_of(open_page("requests"))
    assert "cannot be seen.** introspection_token is wrong or missing" in text
    assert "Start the dashboard with `QUIRE_INTROSPECTION_TOKEN`" in text


def test_engine_shows_ranks_phases_and_queues(fake: FakeTriton) -> None:
    app = open_page("engine")
    fake.state.finish(5)
    read_again()
    monitor().forget_snapshot("tinypy")
    text = text_of(app.run())
    for said in ("Engine=up", "Steps=1,234", "Batch=2 of 16", "Batch tokens=65 of 512", "In flight=1",
                 "**3** to the engine, **5** responses"):  # fmt: skip
        assert said in text
    assert list(app.dataframe[0].value["step (median)"]) == [21.0]
    assert list(app.dataframe[1].value["median"]) == [1.0, 20.0, 1.0]


def test_engine_shows_each_replicas_role_and_what_goes_from_one_to_another(fake: FakeTriton) -> None:
    app = open_page("engine")
    assert "Replicas" not in text_of(app)
    assert "KV transfer" not in text_of(app)
    with fake.state.lock:
        snapshot = fake.state.snapshot
        snapshot["settings"]["disaggregation"] = {"prefill": 1, "decode": 2}
        snapshot["engine"]["engines"] = [
            {"up": True, "pid": 11, "step": 5, "index": 0}, {"up": False, "pid": 12, "index": 1},
            {"up": True, "pid": 13, "index": 3, "host": "10.0.0.7"},
        ]  # fmt: skip
        snapshot["requests"][0]["engine"] = 3
    for outcome, blocks in (("saved", 4), ("loaded", 3), ("save_failed", 0), ("load_failed", 0)):
        fake.state.set("kv_connector_blocks_total", blocks, outcome=outcome)
    for direction in ("save", "load"):
        fake.state.set("kv_connector_bytes_total", 4096, direction=direction)
    read_again()
    monitor().forget_snapshot("tinypy")
    text = text_of(app.run())
    assert "Engine=2 of 3 up" in text
    replicas = app.dataframe[0].value
    assert list(replicas["role"]) == ["prefill", "decode", "decode"]
    assert list(replicas["state"]) == ["up", "down", "up"]
    assert list(replicas["host"]) == ["this one", "this one", "10.0.0.7"]
    assert list(replicas["running"]) == [1, 0, 1]
    assert "**KV transfer**" in text
    assert "**KV transfer in bytes**" in text


def test_a_step_is_counted_once_in_the_composition_of_batches(fake: FakeTriton) -> None:
    open_page("engine")
    for number in (1234, 1240, 1240, 1241):
        fake.state.snapshot["engine"]["step"] = number
        monitor().forget_snapshot("tinypy")
        monitor().snapshot("tinypy")
    assert [(step.num_decode_tokens, step.num_prefill_tokens) for step in monitor().steps("tinypy")[-4:]] == [
        (0, 0), (1, 64), (0, 0), (1, 64),
    ]  # fmt: skip


def test_engine_shows_adapters_where_there_are_any(fake: FakeTriton) -> None:
    app = open_page("engine")
    assert "dapter" not in text_of(app)
    with fake.state.lock:
        fake.state.snapshot["adapters"] = [
            {"name": "sql", "folder": "/adapters/sql", "rank": 8, "num_bytes": 2_500_000, "state": "in use",
             "is_pinned": True, "num_running": 3, "num_waiting": 1, "num_loads": 2},
            {"name": "law", "folder": "/adapters/law", "rank": 16, "num_bytes": 5_000_000, "state": "disk"},
        ]  # fmt: skip
        fake.state.snapshot["requests"][0]["adapter"] = "sql"
    for state, number in (("ready", 1), ("in_use", 1)):
        fake.state.set("lora_adapters", number, state=state)
    fake.state.set("lora_generation_tokens_total", 0, adapter="sql")
    read_again()
    fake.state.add("lora_generation_tokens_total", 4000, adapter="sql")
    read_again()
    monitor().forget_snapshot("tinypy")
    text = text_of(app.run())
    assert "LoRA adapters" in text
    for chart in ("Tokens by adapter", "Adapters in memory"):
        assert f"**{chart}** " in text
    adapters = app.dataframe[2].value
    assert list(adapters["adapter"]) == ["sql", "law"]
    assert list(adapters["state"]) == ["in use, pinned", "on disk"]
    assert list(adapters["running"]) == [3, 0]
    assert list(adapters["MB"]) == [2.5, 5.0]
    assert adapters["tokens/s"][0] > 0
    assert adapters["tokens/s"][1] == 0


def test_engine_shows_what_becomes_of_drafts(fake: FakeTriton) -> None:
    app = open_page("engine")
    assert "Acceptance length" not in text_of(app), "the model has no speculative decoding"
    names = ("drafts_total", "draft_tokens_total", "accepted_tokens_total")
    for name in names:
        fake.state.set(f"spec_decode_{name}", 0)
    fake.state.set("spec_decode_accepted_tokens_per_pos_total", 0, position="0")
    read_again()
    text = text_of(app.run())
    assert "Acceptance length: **—** tokens of a step" in text, "nothing was drafted in the last minute"
    for name, value in zip(names, (10, 40, 25), strict=True):
        fake.state.add(f"spec_decode_{name}", value)
    read_again()
    text = text_of(app.run())
    assert "Acceptance length: **3.50** tokens of a step" in text
    for chart in ("Drafts", "Acceptance length"):
        assert f"**{chart}** " in text
    assert "per step with drafts 3.50" in text


def test_playground_streams_and_shows_the_requests_timings(fake: FakeTriton) -> None:
    app = open_page("playground")
    app.text_area(key="prompt").set_value("def fib(")
    next(button for button in app.button if button.label == "Generate").click()
    text = text_of(app.run())
    assert "def fib(n):\n    return n" in text
    for timing in ("Queue=1.0 ms", "TTFT=12 ms", "Decode=50 ms", "finished by length"):
        assert timing in text
    assert fake.state.prompts == [("def fib(", {"max_tokens": 128, "temperature": 0.0})]


def test_playground_asks_for_what_was_set_and_says_how_others_ask_for_it(
    fake: FakeTriton, capsys: pytest.CaptureFixture[str]
) -> None:
    app = open_page("playground")
    app.text_area(key="stop").set_value("return\n\\n\\n")
    app.selectbox(key="structured").set_value("One of several, a line each")
    app.selectbox(key="playground_slo").set_value("batch")
    app.run()
    app.text_area(key="structured_choice").set_value("it's\nno")
    app.text_area(key="prompt").set_value("def {fib}('é")
    press(app, "Generate")
    text_of(app.run())
    (asked,) = fake.state.prompts
    assert asked == ("def {fib}('é", {
        "max_tokens": 128, "temperature": 0.0, "stop": ["return", "\n\n"],
        "structured_outputs": {"choice": ["it's", "no"]}, "slo_class": "batch",
    })  # fmt: skip
    text_of(app.run())
    command, program = (code.value for code in app.get("code"))
    body = json.loads(shlex.split(command)[-1])
    assert body.pop("parameters") == {"slo_class": "batch"}
    assert json.loads(body.pop("sampling_parameters")) | {"slo_class": "batch"} == asked[1]
    assert body == {"text_input": asked[0]}
    capsys.readouterr()
    exec(program, {})
    assert capsys.readouterr().out == "def fib(n):\n    return n"
    prompt, parameters = fake.state.prompts[1]
    assert (prompt, {**parameters, **asked[1]}) == (asked[0], parameters), "and what the client adds"


def test_playground_chats_by_the_models_own_template(fake: FakeTriton) -> None:
    app = open_page("playground")
    app.chat_input(key="said").set_value("hello")
    text_of(app.run())
    assert json.loads(fake.state.prompts[0][0]) == [{"role": "user", "content": "hello"}]
    assert app.session_state["turns"] == [Turn("user", "hello"), Turn("assistant", "def fib(n):\n    return n")]
    app.chat_input(key="said").set_value("go on")
    text_of(app.run())
    said = [(turn["role"], turn["content"]) for turn in json.loads(fake.state.prompts[1][0])]
    assert said == [("user", "hello"), ("assistant", "def fib(n):\n    return n"), ("user", "go on")]


def test_playground_sends_and_shows_images_of_a_chat(
    fake: FakeTriton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not open_page("playground").file_uploader, "the model takes none"
    fake.state.chat_format["takes_images"] = True
    app = open_page("playground")
    files = [("a cat's.png", image_file("red"), "image/png"), ("b.png", image_file("blue"), "image/png")]
    app.file_uploader[0].set_value(files)
    app.chat_input(key="said").set_value("what is this?")
    text_of(app.run())
    (message,) = json.loads(fake.state.prompts[0][0])
    assert message["content"] == [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "what is this?"}]
    contents = [content for _, content, _ in files]
    assert fake.state.images == [contents]
    assert len(app.image) == 2
    assert not app.file_uploader[0].value
    for name, content, _ in files:
        (tmp_path / name).write_bytes(content)
    command, program = (code.value for code in app.get("code"))
    shell = ["bash", "-c", f"curl() {{ tr -d '\\n'; }}; {command}"]
    body = json.loads(subprocess.run(shell, cwd=tmp_path, stdout=subprocess.PIPE, check=True).stdout)
    assert json.loads(body["messages"]) == [message]
    assert [base64.b64decode(image) for image in body["image"]] == contents
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    assert fake.state.prompts[1][0] == fake.state.prompts[0][0]
    assert fake.state.images == [contents] * 2

    app.chat_input(key="said").set_value("go on")
    text_of(app.run())
    assert [turn["content"] for turn in json.loads(fake.state.prompts[2][0])][::2] == [message["content"], "go on"]
    assert fake.state.images[2] == contents, "a chat is sent as a whole"
    assert len(app.image) == 2


def test_playground_keeps_the_images_of_a_question_that_is_rejected(fake: FakeTriton) -> None:
    fake.state.set("slo_requests_total", 0, slo="unknown", verdict="good", cause="none")
    fake.state.chat_format["takes_images"] = True
    app = open_page("playground")
    app.selectbox(key="playground_slo").set_value("unknown")
    app.file_uploader[0].set_value([("no_image.png", b"nothing", "image/png")])
    app.chat_input(key="said").set_value("what is this?")
    text = text_of(app.run())
    assert "no_image.png cannot be shown." in text
    assert "slo_class is 'unknown'" in text
    assert fake.state.images == [[b"nothing"]]
    assert [file.name for file in app.run().file_uploader[0].value] == ["no_image.png"]


@pytest.mark.parametrize("has_chat_template", [False, True])
def test_playground_opens_with_a_chat_for_a_chat_model(fake: FakeTriton, has_chat_template: bool) -> None:
    fake.state.chat_format["has_chat_template"] = has_chat_template
    app = open_page("playground")
    assert [tab.label for tab in app.tabs] == ["Completion", "Chat"]
    (tabs,) = app.get("tab_container")
    assert tabs.proto.tab_container.default_tab_index == has_chat_template


def test_playground_opens_with_a_completion_where_the_server_does_not_say(fake: FakeTriton) -> None:
    fake.state.chat_format.clear()
    app = open_page("playground")
    press(app, "Generate")
    assert "return n" in text_of(app.run())


def test_playground_keeps_what_came_before_a_stop(fake: FakeTriton, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamlit ends a run where it draws: by the same kind of exception as `st.stop`."""
    app = open_page("playground")
    stream = Client.stream

    def stopped(*arguments: Any, **options: Any) -> Generator[Chunk, None, None]:
        yield next(stream(*arguments, **options))
        st.stop()

    with monkeypatch.context() as patch:
        patch.setattr(Client, "stream", stopped)
        app.chat_input(key="said").set_value("hello")
        text_of(app.run())
        press(app, "Generate")
        text_of(app.run())
    text = text_of(app.run())
    assert app.session_state["turns"] == [Turn("user", "hello"), Turn("assistant", "def ")]
    assert text.count("def") == 2, "in the chat and as a completion"
    assert "Stopped." in text
    app.chat_input(key="said").set_value("go on")
    text_of(app.run())
    assert [turn["content"] for turn in json.loads(fake.state.prompts[-1][0])] == ["hello", "def ", "go on"]


def test_playground_keeps_a_question_that_was_stopped_before_the_first_token(
    fake: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = open_page("playground")

    def stopped(*_: Any, **options: Any) -> Generator[Chunk, None, None]:
        yield Chunk()
        st.stop()

    with monkeypatch.context() as patch:
        patch.setattr(Client, "stream", stopped)
        app.chat_input(key="said").set_value("hello")
        text_of(app.run())
    text = text_of(app.run())
    assert "hello" in text
    assert "No text." in text
    app.chat_input(key="said").set_value("go on")
    text_of(app.run())
    assert [turn["content"] for turn in json.loads(fake.state.prompts[-1][0])] == ["hello", "", "go on"]


def test_playground_says_why_a_request_is_refused(fake: FakeTriton) -> None:
    fake.state.set("slo_requests_total", 0, slo="unknown", verdict="good", cause="none")
    app = open_page("playground")
    app.selectbox(key="playground_slo").set_value("unknown")
    press(app, "Generate")
    assert "slo_class is 'unknown'" in text_of(app.run())
    app.chat_input(key="said").set_value("hello")
    assert "slo_class is 'unknown'" in text_of(app.run())
    assert app.session_state["turns"] == [], "it is no part of the chat"


def test_playground_refuses_a_schema_that_is_none(fake: FakeTriton) -> None:
    app = open_page("playground")
    app.selectbox(key="structured").set_value("JSON of a schema")
    app.run()
    app.text_area(key="structured_json").set_value("{")
    assert "The schema is not JSON" in text_of(app.run())


@pytest.mark.parametrize("seed", ["x", "-1", str(2**63), "9" * 5000])
def test_playground_refuses_a_seed_that_no_request_can_carry(fake: FakeTriton, seed: str) -> None:
    app = open_page("playground")
    app.text_input(key="seed").set_value(seed)
    assert f"it must be a whole number from 0 to {2**63 - 1}" in text_of(app.run())


def test_playground_sends_the_largest_seed(fake: FakeTriton) -> None:
    app = open_page("playground")
    app.text_input(key="seed").set_value(str(2**63 - 1))
    next(button for button in app.button if button.label == "Generate").click()
    text_of(app.run())
    assert fake.state.prompts[0][1]["seed"] == 2**63 - 1


def test_load_runs_and_is_watched(fake: FakeTriton) -> None:
    app = open_page("load")
    app.number_input(key="num_requests").set_value(12)
    next(button for button in app.button if button.label == "Start").click()
    text = run_until(app, lambda text: "Errors=0" in text and len(fake.state.prompts) == 12)
    assert "TTFT p50=" in text
    assert len(fake.state.prompts) == 12


# -- the door ----------------------------------------------------------------------------------------------------------


def test_nothing_is_shown_without_the_token(fake: FakeTriton, monkeypatch: pytest.MonkeyPatch) -> None:
    set_settings(monkeypatch, token="open sesame, please")
    app = open_page("requests")
    assert len(app.text_input) == 1
    assert not app.dataframe
    app.text_input[0].set_value("guess")
    assert "This is not the token." in text_of(app.run())
    assert not app.dataframe
    app.text_input[0].set_value("open sesame, please")
    assert "**2 requests**" in text_of(app.run())


def test_the_token_may_come_by_address_and_leaves_it(fake: FakeTriton, monkeypatch: pytest.MonkeyPatch) -> None:
    set_settings(monkeypatch, token="open sesame, please")
    app = AppTest.from_string(PAGE.format(page="requests"), default_timeout=TIMEOUT_S)
    app.query_params["token"] = "open sesame, please"
    assert "**2 requests**" in text_of(app.run())
    assert "token" not in app.query_params
