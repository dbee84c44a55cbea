"""One run of everything an operator has: a server whose KV cache is too small for its load, Prometheus, the dashboard.

::

    early: cancelled, too late, wrong │ 24 streams ───────────────────────► │ the dashboard's own Playground and Load
  began                             start     pages are opened, a burst    end

What is measured lies between `start` and `end`, when all is idle; whatever is asked of it afterwards gives the same.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from quire_dashboard import watchers
from quire_dashboard.monitor import Monitor
from quire_dashboard.settings import Settings, to_environment
from quire_dashboard.views.load import stop_all
from streamlit.testing.v1 import AppTest
from support.clients import ask, with_client
from support.measured_load import Measured, in_background, send, send_all
from support.prometheus import Prometheus, prometheus
from support.serving import ROOT, Server, add_model, serve, wait_until
from tritonclient.grpc import aio as grpc_aio

__all__ = ["MODEL", "NUM_SEQS", "SCRAPE_SECONDS", "SLO", "OperatorsRun", "PageSeen", "operators_run"]

MODEL = "small"
TOKEN = "the token of the operator"
NUM_SEQS = 16
NUM_STREAMS = 24
NUM_IN_BURST = 60
SCRAPE_SECONDS = 1
STEP_SECONDS = 0.03
"""As a model takes that is worth watching: the run is long enough for Prometheus to see it."""
SLO: dict[str, dict[str, float]] = {
    "default": {"ttft_ms": 15_000, "tpot_ms": 500, "e2e_ms": 60_000}, "batch": {"e2e_ms": 120_000},
}  # fmt: skip
SETTINGS = {
    "model": str(ROOT / "model_repository" / "tinypy" / "1" / "model"), "dtype": "float32", "max_model_len": 512,
    "kv_cache_memory_bytes": 6 << 20,  # 64 blocks, less than half of what the running requests want
    "max_num_seqs": NUM_SEQS, "max_queued_requests": 2 * NUM_SEQS, "stream_interval_ms": 50, "slo": SLO,
    "introspection_token": TOKEN, "speculative_config": {"method": "suffix", "num_speculative_tokens": 2},
}  # fmt: skip
_OWN_TARGETS = ({}, {}, {"slo_ttft_ms": "0.001"}, {"slo_tpot_ms": "0.000001"}, {"slo_e2e_ms": "0.001"})
_PAGES_WITH_LIVE_REQUESTS = ("overview", "kv_cache", "requests", "engine")
_PAGE = """
from quire_dashboard.choice import pickers
from quire_dashboard.views import {page}

pickers()
{page}.show()
"""


@dataclass(frozen=True, slots=True)
class PageSeen:
    """What a page of the dashboard showed."""

    text: str
    figures: dict[str, str]
    charts: dict[str, dict[str, list[float]]]
    """Title → line → values. A line that has none is there, too."""
    num_rows: list[int]
    """Of its tables."""


@dataclass(kw_only=True)
class OperatorsRun:
    """All that came of it."""

    server: Server
    prometheus: Prometheus
    monitors: dict[str, Monitor]
    """The dashboard's watchers: `own` has its own history, `prometheus` asks Prometheus."""
    early: list[Measured] = field(default_factory=list)
    """Before `start`; the cancelled one is not among them."""
    load: list[Measured] = field(default_factory=list)
    """Between `start` and `end`, with the burst."""
    began: float = 0.0
    start: float = 0.0
    end: float = 0.0
    pages: dict[tuple[str, str], PageSeen] = field(default_factory=dict)
    """(watcher, page) → what was seen of it."""

    @property
    def answered(self) -> list[Measured]:
        """Of the load, what was not refused."""
        return [one for one in self.load if not one.error]


def make_request(number: int) -> dict[str, Any]:
    """The n-th request of the load: every class, targets that cannot be met, short and long, some that stop early."""
    parameters = {"slo_class": ("default", "batch")[number % 2], **_OWN_TARGETS[number % 5]}
    shared = "def first(values):\n    return values[0]\n\n" * (1 + number % 4)
    stops = {"stop_words": ["\n\n"]} if number % 3 == 0 else {"ignore_eos": True}
    return {
        "model": MODEL, "text_input": f"{shared}class Number{number}:\n    ", "max_tokens": 30 + 37 * number % 70,
        "parameters": parameters, **stops,
    }  # fmt: skip


@contextmanager
def operators_run(folder: Path) -> Iterator[OperatorsRun]:
    """Make it; server, Prometheus and the dashboard's watchers live until the body is left."""
    files = {"shared_storage_path": str(folder / "kv"), "max_bytes": 1 << 30}
    tiers = [
        {"kv_connector": "SharedMemoryConnector", "kv_connector_extra_config": {"max_bytes": 32 << 20}},
        {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": files},
    ]
    connector = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": tiers}}
    add_model(folder / "models", MODEL, {**SETTINGS, "kv_transfer_config": connector})
    with ExitStack() as stack:
        server = stack.enter_context(serve("--model-repository", str(folder / "models"), step_seconds=STEP_SECONDS))
        scraping = stack.enter_context(prometheus(server.metrics, scrape_interval=f"{SCRAPE_SECONDS}s"))
        stack.callback(watchers.close_monitors)
        stack.callback(stop_all)
        result = OperatorsRun(server=server, prometheus=scraping, monitors={})
        for name, url in (("own", ""), ("prometheus", scraping.url)):
            with _dashboard_of(result, url):
                result.monitors[name] = watchers.monitor()
        wait_until(lambda: scraping.query("quire_engine_up == 1"), "the first scrape")
        result.began = time.time()
        asyncio.run(with_client(server, lambda client: _early(client, result.early)))
        result.start = _when_idle(result, num_requests=len(result.early) + 1)
        with in_background(server, make_request, NUM_STREAMS) as load:
            wait_until(lambda: _is_saturated(scraping), "the cache is full, drafts are accepted, requests end", 120)
            _open_pages(result, _PAGES_WITH_LIVE_REQUESTS)
            burst = asyncio.run(with_client(server, lambda client: send_all(client, _burst(), NUM_IN_BURST)))
        result.load = [*load, *burst]
        result.end = _when_idle(result, num_requests=len(result.early) + 1 + len(result.load))
        _open_pages(result, ("playground", "load"))
        yield result


async def _early(client: grpc_aio.InferenceServerClient, measured: list[Measured]) -> None:
    """What ends otherwise than well. Of these the client does not know all that the server counts."""
    first = asyncio.Event()
    cancelled = ask(client, model=MODEL, text_input="def f(", max_tokens=400, ignore_eos=True, stream=True,
                    on_response=lambda response: first.set())  # fmt: skip
    task = asyncio.create_task(cancelled)
    await first.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    late = {"model": MODEL, "text_input": "x", "max_tokens": 400, "ignore_eos": True, "timeout": 1000}
    wrong = {"model": MODEL, "text_input": "x", "parameters": {"slo_class": "unknown"}}
    measured.extend([await send(client, request) for request in (late, late, wrong)])


def _burst() -> list[dict[str, Any]]:
    """More at once than may wait."""
    return [
        {"model": MODEL, "text_input": f"number = {number}", "max_tokens": 5, "ignore_eos": True,
         "parameters": {"slo_class": "batch"}}
        for number in range(NUM_IN_BURST)
    ]  # fmt: skip


def _is_saturated(scraping: Prometheus) -> bool:
    def total(selector: str) -> float:
        return sum(sample.values[0] for sample in scraping.query(selector))

    at_least = {
        "quire_preemptions_total": 1,
        "quire_spec_decode_accepted_tokens_total": 1,
        'quire_requests_total{outcome="length"}': 13,
    }
    return all(total(selector) >= number for selector, number in at_least.items())


def _when_idle(result: OperatorsRun, num_requests: int) -> float:
    """Wait until Prometheus has seen the end of so many requests, and have the dashboard look, too; returns the time.

    The server writes gauges last: who sees an idle engine finds all that it did in the counters.
    """
    idle = f"sum(quire_requests_total) == {num_requests} and sum(quire_requests_running) == 0"

    def sees_all() -> bool:
        return bool(result.prometheus.query(f"{idle} and sum(quire_requests_waiting) == 0"))

    try:
        wait_until(sees_all, f"{num_requests} requests have ended")
    except AssertionError as error:
        raise AssertionError(f"{error}: {result.prometheus.query('quire_requests_total')}") from None
    for monitor in result.monitors.values():
        monitor.read()
    return time.time()


# -- the dashboard -----------------------------------------------------------------------------------------------------


@contextmanager
def _dashboard_of(result: OperatorsRun, prometheus_url: str) -> Iterator[None]:
    """This process's dashboard is the one with these settings."""
    settings = Settings(url=result.server.grpc, metrics=result.server.metrics, prometheus=prometheus_url,
                        introspection_token=TOKEN)  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, value in to_environment([settings]).items():
            patch.setenv(name, value)
        yield


def _open_pages(result: OperatorsRun, pages: tuple[str, ...]) -> None:
    for name, url in (("own", ""), ("prometheus", result.prometheus.url)):
        with _dashboard_of(result, url):
            result.monitors[name].read()
            for page in pages:
                app = AppTest.from_string(_PAGE.format(page=page), default_timeout=60).run()
                _USE.get(page, AppTest.run)(app)
                result.pages[name, page] = _seen(app)


def _generate(app: AppTest) -> None:
    app.number_input(key="max_tokens").set_value(8)
    next(button for button in app.button if button.label == "Generate").click().run()


def _send_load(app: AppTest) -> None:
    app.number_input(key="num_requests").set_value(4)
    app.number_input(key="load_max_tokens").set_value(4)
    next(button for button in app.button if button.label == "Start").click().run()
    wait_until(lambda: "4 of 4 requests, done" in _seen(app.run()).text, "the load is through")


def _look_twice(app: AppTest) -> None:
    seen = [_seen(app)]

    def is_there() -> bool:
        seen.append(_seen(app.run()))
        return "Batch composition" in seen[-1].charts

    try:
        wait_until(is_there, "there are two snapshots of a step")
    except AssertionError as error:
        raise AssertionError(f"{error}: {seen[-1]} {watchers.monitor().steps(MODEL)}, {len(seen)}") from None


_USE: dict[str, Callable[[AppTest], Any]] = {"playground": _generate, "load": _send_load, "engine": _look_twice}
"""What is done on a page; the others are refreshed once."""


def _seen(app: AppTest) -> PageSeen:
    assert not app.exception, app.exception
    kinds = ("title", "subheader", "markdown", "caption", "text", "info", "success", "warning", "error")
    text = [element.value for kind in kinds for element in app.get(kind)]
    text += [element.proto.text for element in app.get("progress")]
    charts: dict[str, dict[str, list[float]]] = {}
    for element in app.get("vega_lite_chart"):
        charts[element.proto.alt] = _lines(element.proto)
    pictures = [element.proto.body for element in app.get("html")]
    num_rows = [len(table.value) for table in app.dataframe]
    return PageSeen("\n".join([*text, *pictures]), {one.label: one.value for one in app.metric}, charts, num_rows)


def _lines(proto: Any) -> dict[str, list[float]]:
    columns = pyarrow.ipc.open_stream(proto.data.data).read_all().to_pydict()
    if "series" not in columns:  # the timeline
        return {"": columns["duration"]}
    spec = json.loads(proto.spec)
    encoding = spec["layer"][0]["encoding"] if "layer" in spec else spec["encoding"]
    colours = [layer["encoding"].get("color", {}) for layer in spec.get("layer", ())]
    rules = {colour["datum"] for colour in colours if "datum" in colour}
    lines: dict[str, list[float]] = {
        name: [] for name in encoding["color"]["scale"].get("domain", ()) if name not in rules
    }
    for series, value in zip(columns["series"], columns["value"], strict=True):
        if series is not None and value is not None:  # else it is the span of the axis, or the end of a line
            lines.setdefault(series, []).append(value)
    return lines
