"""The dashboard of a real server under a real load, in a real browser: what is seen is what clients get."""

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect
from quire_dashboard.settings import Settings
from support.browser import choose_request, chromium, dashboard, is_dark, pages_of, sidebar_link
from support.clients import Answer, ask
from support.faults import put_fault
from support.serving import Server, add_model, serve
from tritonclient.grpc import aio as grpc_aio

pytestmark = [pytest.mark.server, pytest.mark.browser]

SLO = {"default": {"e2e_ms": 600_000}, "batch": {"e2e_ms": 1}}
"""One that every request meets, and one that none does."""
SETTINGS = {"dtype": "float32", "slo": SLO, "max_num_seqs": 8, "max_model_len": 1024,
            "kv_cache_memory_bytes": 16 << 20}  # fmt: skip
DRAWN = "svg.marks:not([data-testid='stMetric'] *)"
"""The charts, without the small lines in figures."""
CHARTS = {"Overview": 10, "KV cache": 4, "Requests": 1, "Engine": 5}
NARROW = 390
NUM_LONG = 64
"""Requests of a crowd that take long; they come first."""
TOKEN = "a token for the dashboard"
STEP_SECONDS = 0.03
"""How much longer every step takes than so small a model needs: the browser wants the processor, too."""


class Streams:
    """Clients in a thread, each request on a gRPC stream of its own; all share a connection."""

    def __init__(self, server: Server) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._tasks: list[Any] = []
        self._client = asyncio.run_coroutine_threadsafe(self._connect(server), self._loop).result(30)

    def keep_asking(self, model: str, slo_class: str = "default") -> None:
        """Send requests of a class until the end."""
        self._tasks.append(asyncio.run_coroutine_threadsafe(self._ask_on(model, slo_class), self._loop))

    def ask(self, model: str, label: str, max_tokens: int) -> "Future[Answer]":
        """Send one request; the result is of a concurrent future."""
        found = asyncio.run_coroutine_threadsafe(self._ask(model, label, max_tokens, {}), self._loop)
        self._tasks.append(found)
        return found

    def stop(self) -> None:
        """End all of them, and raise what went wrong in any of them until then."""
        failures = [task.exception() for task in self._tasks if task.done() and not task.cancelled()]
        for task in self._tasks:
            task.cancel()
        asyncio.run_coroutine_threadsafe(self._settle(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()
        for failure in filter(None, failures):
            raise failure

    async def _ask_on(self, model: str, slo_class: str) -> None:
        for number in range(1_000_000):
            answer = await self._ask(model, f"{slo_class}-{number}", 48, {"slo_class": slo_class})
            assert answer.text, answer.message

    async def _ask(self, model: str, label: str, max_tokens: int, parameters: dict[str, Any]) -> Answer:
        return await ask(
            self._client, model=model, request_id=label, text_input=f"# {label}\ndef function(a, b):\n", stream=True,
            outputs=["text_output"], parameters={"max_tokens": max_tokens, "ignore_eos": True, **parameters},
        )  # fmt: skip

    async def _connect(self, server: Server) -> grpc_aio.InferenceServerClient:
        return grpc_aio.InferenceServerClient(server.grpc)

    async def _settle(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.close()


@pytest.fixture(scope="module")
def fault_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the workers look for how slow they are to be."""
    file = tmp_path_factory.mktemp("fault") / "fault.json"
    put_fault(file, action="slow", rank=0, seconds=STEP_SECONDS)
    return file


@contextmanager
def slow_steps(fault_file: Path, seconds: float) -> Iterator[None]:
    """Every step of every model takes so much longer."""
    put_fault(fault_file, action="slow", rank=0, seconds=seconds)
    try:
        yield
    finally:
        put_fault(fault_file, action="slow", rank=0, seconds=STEP_SECONDS)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, fault_file: Path) -> Iterator[Server]:
    """Two models, one of them on two ranks."""
    repository = tmp_path_factory.mktemp("models")
    for name, more in {"one": {}, "two": {"tensor_parallel_size": 2}}.items():
        add_model(repository, name, {**SETTINGS, **more})
    environment = {"QUIRE_FAULT_INJECTION": str(fault_file), "QUIRE_INTROSPECTION_TOKEN": TOKEN}
    with serve("--model-repository", str(repository), "--drain-timeout", "55", env=environment) as running:
        yield running


@pytest.fixture(scope="module")
def address(server: Server) -> Iterator[str]:
    """Of the dashboard. `quire serve` would start one that leaves the processor to everybody else."""
    settings = Settings(url=server.grpc, metrics=server.metrics, introspection_token=TOKEN)
    with dashboard(settings) as found:
        yield found


@pytest.fixture(scope="module")
def streams(server: Server) -> Iterator[Streams]:
    """Two streams on each model, one per class."""
    running = Streams(server)
    for model in ("one", "two"):
        for slo_class in SLO:
            running.keep_asking(model, slo_class)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def browser(streams: Streams) -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture
def open_page(browser: Browser, address: str) -> Iterator[Callable[..., Page]]:
    with pages_of(browser, address) as at:
        yield at


def pick_model(page: Page, model: str) -> None:
    """By the picker in the sidebar."""
    picker = page.get_by_role("combobox", name="Model", exact=True)
    picker.click()
    page.get_by_role("option", name=model, exact=True).click()
    expect(picker).to_have_value(model)


def metric(page: Page, name: str) -> Locator:
    """The value of one of the page's figures."""
    box = page.get_by_test_id("stMetric").filter(has=page.get_by_text(name, exact=True))
    return box.get_by_test_id("stMetricValue")


def cancel_buttons(page: Page) -> Locator:
    """Those of the page's body."""
    return page.get_by_test_id("stMain").get_by_role("button", name=re.compile("^Cancel"))


def expect_data(page: Page, title: str) -> None:
    """Every chart of the page is drawn, nothing is missing, and nothing has failed."""
    expect(page.get_by_role("heading", name=title, exact=True)).to_be_visible()
    expect(page.locator(DRAWN)).to_have_count(CHARTS[title])
    expect(page.get_by_text("Nothing yet in this time range.")).to_have_count(0)
    expect(page.get_by_test_id("stException")).to_have_count(0)
    if title != "Overview":  # there the verdict stands in such a box
        expect(page.get_by_test_id("stAlert")).to_have_count(0)
    for mark in page.locator(DRAWN).all():
        assert mark.locator("path[d*='L'], path[d*='h']").count() > 0, f"{title}: a chart without lines"


def test_every_page_shows_data_under_load(open_page: Callable[..., Page]) -> None:
    page = open_page()
    pick_model(page, "two")
    for title in CHARTS:
        sidebar_link(page, title).click()
        expect_data(page, title)
        if title == "KV cache":
            expect(page.locator(".quire-block-map img")).to_have_attribute(
                "alt", re.compile(r"\d+ blocks: [1-9]\d* used")
            )
        if title == "Engine":
            expect(metric(page, "Engine")).to_have_text("up")
            expect(page.get_by_text("ranks 2", exact=True)).to_be_visible()


def test_the_playground_and_the_load_page_reach_the_model(open_page: Callable[..., Page]) -> None:
    page = open_page("playground")
    expect(page.get_by_placeholder("Your message"), "it has a chat template").to_be_visible()
    page.get_by_role("tab", name="Completion").click()
    page.get_by_role("button", name="Generate").click()
    expect(metric(page, "TTFT")).to_contain_text("ms")
    expect(page.get_by_text("finished by length")).to_be_visible()
    sidebar_link(page, "Load").click()
    page.get_by_label("Requests in all", exact=True).fill("8")
    page.keyboard.press("Tab")
    page.get_by_role("button", name="Start").click()
    expect(page.get_by_text("8 of 8 requests, done")).to_be_visible()
    expect(metric(page, "Errors")).to_have_text("0")


def test_the_cancel_button_ends_a_clients_stream(
    open_page: Callable[..., Page], streams: Streams, fault_file: Path
) -> None:
    with slow_steps(fault_file, seconds=0.1):  # 90 s of life, however fast the engine is
        answer = streams.ask("one", "doomed", max_tokens=900)
        page = open_page("requests")
        choose_request(page, "doomed")
        page.get_by_role("button", name="Cancel doomed").click()
        page.get_by_role("button", name=re.compile("^Cancel doomed .*now$")).click()
        expect(page.get_by_text("was cancelled.")).to_be_visible()
        assert answer.result(30).message == "the request was cancelled"


def test_the_chosen_request_ends(open_page: Callable[..., Page], streams: Streams, fault_file: Path) -> None:
    with slow_steps(fault_file, seconds=0.1):
        answer = streams.ask("one", "leaver", max_tokens=900)
        page = open_page("requests")
        choose_request(page, "leaver")
        expect(cancel_buttons(page)).to_have_count(1)
        answer.cancel()  # its client goes away
        expect(page.get_by_text(re.compile(r"^Request leaver \(.*\) has ended\.$"))).to_be_visible()
        expect(cancel_buttons(page), "others run on, and none of them has taken its place").to_have_count(0)
        expect(page.locator("tr[aria-selected=true]")).to_have_count(0)


def test_the_slo_class_changes_the_numbers(open_page: Callable[..., Page]) -> None:
    page = open_page()
    classes, goodput = page.get_by_test_id("stButtonGroup"), metric(page, "Goodput")
    for slo_class, figure in (("default", "100%"), ("batch", "0.0%")):
        classes.get_by_text(slo_class, exact=True).click()
        expect(goodput).to_have_text(figure)
    classes.get_by_text("All classes").click()
    expect(goodput).not_to_have_text("0.0%")
    expect(goodput).not_to_have_text("100%")


def test_it_fits_a_phone_in_the_dark_under_load(open_page: Callable[..., Page]) -> None:
    for title, path in (("Overview", ""), ("Engine", "engine")):
        page = open_page(path, width=NARROW, dark=True)
        expect_data(page, title)
        assert is_dark(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= NARROW


def test_two_models_are_in_a_strip_and_a_press_shows_the_other(open_page: Callable[..., Page], server: Server) -> None:
    page = open_page("overview?model=one&slo_class=default")
    strip = page.get_by_test_id("stMain").get_by_role("button").filter(has_text=re.compile("(one|two): "))
    # Half of what is asked of either misses its targets, whichever of them is looked at.
    expect(strip).to_have_text([re.compile(rf"{model}: in trouble, \d running") for model in ("one", "two")])
    strip.last.click()
    expect(page.get_by_role("combobox", name="Model", exact=True)).to_have_value("two")
    expect(page).to_have_url(re.compile(r"\?.*model=two"))
    expect(page, "the other model has that class, too").to_have_url(re.compile("slo_class=default"))
    sidebar_link(page, "Engine").click()
    expect(page.get_by_text("ranks 2", exact=True)).to_be_visible()


def test_one_of_a_thousand_requests_is_chosen_and_cancelled(
    open_page: Callable[..., Page], streams: Streams, fault_file: Path
) -> None:
    with slow_steps(fault_file, seconds=0.1):
        # Most are short: they end by themselves afterwards, so that few streams are cancelled.
        lengths = [900] * NUM_LONG + [2] * (1000 - NUM_LONG)
        answers = [streams.ask("one", f"crowd-{number}", length) for number, length in enumerate(lengths)]
        try:
            page = open_page("requests")
            counted = page.get_by_text(re.compile(r"^\d+ requests, 8 running, \d+ not$"))
            # The two streams of the module are among them, unless they are just between two requests.
            expect(counted).to_have_text(re.compile("^100[0-2] requests"))
            expect(page.get_by_text("Timeline, the oldest 40")).to_be_visible()
            choose_request(page, "crowd-3 ")
            # Others before it in the table end, and one of those that wait.
            for number in (0, 1, 500):
                answers[number].cancel()
            expect(counted).to_have_text(re.compile("^99[7-9] requests"))
            expect(page.locator("tr[aria-selected=true]")).to_contain_text("crowd-3 ")
            cancel_buttons(page).filter(has_text="crowd-3 ").click()
            cancel_buttons(page).filter(has_text=re.compile("crowd-3 .*now$")).click()
            expect(page.get_by_text(re.compile(r"^Request crowd-3 \(.*\) was cancelled\.$"))).to_be_visible()
            expect(counted).to_have_text(re.compile("^99[6-8] requests"))
            assert answers[3].result(30).message == "the request was cancelled"
            assert [number for number, answer in enumerate(answers) if answer.done()] == [0, 1, 3, 500]
        finally:
            for answer in answers[:NUM_LONG]:
                answer.cancel()
            with slow_steps(fault_file, seconds=0.0):
                wait(answers, timeout=60)
