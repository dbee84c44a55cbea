"""The dashboard in a real browser: every page clicked through, a request cancelled, the SLO class changed.

The server is a stand-in; the dashboard is a process of its own, started as `quire dashboard` starts it.
"""

import dataclasses
import http.client
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs

import pytest
from playwright.sync_api import Browser, Page, expect
from quire_dashboard.settings import Settings
from quire_dashboard.words import printable
from support.browser import choose_request, choose_row, chromium, dashboard, is_dark, pages_of, sidebar_link
from support.fake_triton import TOKEN, FakeTriton, fake_triton, make_request
from support.serving import wait_until

pytestmark = pytest.mark.browser

PAGES = {
    "Overview": "Users are served within their SLO",
    "KV cache": "report (aaaa11): 4",
    "Requests": "2 requests",
    "Slow & failed": "No request has ended since",
    "Engine": "Messages that wait",
    "Playground": "Prompt",
    "Load": "No load has been started.",
}
SPARKS = '[data-testid="stMetric"] *'
"""The small lines in figures are drawn anew when they have one more value."""
DASHBOARD_TOKEN = "open sesame, please"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


def settings_of(fake: FakeTriton, token: str = "") -> Settings:
    return Settings(url=fake.url, metrics=fake.metrics, token=token, introspection_token=TOKEN)


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeTriton]:
    with fake_triton() as running:
        running.state.traffic = 3
        yield running


@pytest.fixture(scope="module")
def address(fake: FakeTriton) -> Iterator[str]:
    with dashboard(settings_of(fake)) as found:
        yield found


@pytest.fixture
def open_page(browser: Browser, address: str) -> Iterator[Callable[..., Page]]:
    with pages_of(browser, address) as at:
        yield at


def test_every_page_is_reached_by_a_click(open_page: Callable[..., Page]) -> None:
    page = open_page()
    for title, content in PAGES.items():
        sidebar_link(page, title).click()
        expect(page.get_by_role("heading", name=title, exact=True)).to_be_visible()
        expect(page.get_by_text(content).first).to_be_visible()
        expect(page.get_by_test_id("stException")).to_have_count(0)


def test_figures_follow_the_server_without_a_reload(open_page: Callable[..., Page], fake: FakeTriton) -> None:
    page = open_page()
    running = page.get_by_test_id("stMetric").filter(has_text="Running")
    expect(running).to_contain_text("2")
    page.evaluate("window.notReloaded = true")
    fake.state.set("requests_running", 7)
    expect(running).to_contain_text("7")
    fake.state.set("requests_running", 2)
    assert page.evaluate("window.notReloaded") is True


def test_a_refresh_keeps_the_charts_where_they_are(open_page: Callable[..., Page], fake: FakeTriton) -> None:
    page = open_page()
    running = page.get_by_test_id("stMetric").filter(has_text="Running")
    expect(page.locator(f"svg.marks:not({SPARKS})")).to_have_count(9)  # nothing is missed

    def refresh(*numbers: int) -> None:
        for number in numbers:
            fake.state.set("requests_running", number)
            expect(running.get_by_test_id("stMetricValue")).to_have_text(str(number))

    refresh(11, 12, 13)  # until then the page still finds its width
    # Whoever flickers takes the drawing away and puts up another one.
    page.evaluate("""() => {
        window.removed = 0;
        const isChart = node => node.querySelector && (node.matches('svg.marks') || node.querySelector('svg.marks'));
        const isSpark = node => node.closest && node.closest('[data-testid="stMetric"]');
        const count = change => change.removedNodes.forEach(node => {
            if (isChart(node) && !isSpark(change.target)) window.removed++;
        });
        const main = document.querySelector('[data-testid="stMain"]');
        new MutationObserver(changes => changes.forEach(count)).observe(main, {childList: true, subtree: true});
    }""")
    refresh(14, 15, 16, 2)
    assert page.evaluate("window.removed") == 0


def test_a_line_is_not_drawn_where_it_has_no_value(open_page: Callable[..., Page], fake: FakeTriton) -> None:
    page = open_page()
    line = page.locator("svg.marks").filter(has_text="share of blocks").locator(".mark-line path")
    usage = page.get_by_test_id("stMetric").filter(has_text="KV cache")
    expect(usage).to_contain_text("25.0%")
    expect(line).to_be_attached()
    before = (line.get_attribute("d") or "").count("M")
    with fake.state.lock:
        gauges = fake.state.samples.pop("kv_cache_usage_ratio")
    expect(usage).to_contain_text("—")
    with fake.state.lock:
        fake.state.samples["kv_cache_usage_ratio"] = gauges
    expect(usage).to_contain_text("25.0%")
    expect(line).to_have_attribute("d", re.compile(rf"^(M[^M]*){{{before + 1}}}$"))


class History(BaseHTTPRequestHandler):
    """A Prometheus that knows of goodput only: the value of each class, by the seconds before the end."""

    goodput: ClassVar[dict[str, Callable[[float], str | None]]] = {
        "default": lambda ago: "0" if ago > 240 else "1" if ago < 60 else None,
        "batch": lambda ago: "0.5" if ago > 120 else None,
    }

    def do_POST(self) -> None:
        asked = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        end, step = float(asked["end"][0]), float(asked["step"][0])
        ages = [step * number for number in range(round((end - float(asked["start"][0])) / step), -1, -1)]
        result = [
            {"metric": {"slo": slo}, "values": [[end - ago, value] for ago in ages if (value := value_at(ago))]}
            for slo, value_at in self.goodput.items()
            if 'verdict="good"' in asked["query"][0]
        ]
        body = json.dumps({"status": "success", "data": {"result": result}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def test_no_line_is_drawn_across_minutes_in_which_nothing_happened(open_page: Callable[..., Page]) -> None:
    with (
        web_server(History) as prometheus,
        fake_triton() as idle,
        dashboard(dataclasses.replace(settings_of(idle), prometheus=prometheus)) as address,
    ):
        page = open_page(base=address)
        title = page.locator("p").filter(has=page.locator("strong", has_text=re.compile("^Goodput$")))
        expect(title, "of a class that has ended two minutes ago, nothing is said to be now").to_have_text(
            re.compile(r"^Goodput\s+default 100%$")
        )
        chart = page.locator("svg.marks").filter(has_text="share of requests")
        lines = chart.locator(".mark-line path")
        expect(lines).to_have_count(2)
        found = [line.get_attribute("d") or "" for line in lines.all()]
        (batch,), default = sorted((re.findall(r"M[^M]*", path) for path in found), key=len)
        heights = [set(re.findall(r",([-\d.]+)", part)) for part in default]
        assert [len(one) for one in heights] == [1, 1], "neither part climbs to the other"
        assert heights[0] != heights[1]
        # The axis is the chosen range: from its left edge to its right, whatever has a value.
        width = float(chart.locator(".background").first.get_attribute("d").split("h")[1].split("v")[0])
        left, until, right = (float(re.findall(r"[ML]([-\d.]+),", part)[place]) for part, place in
                              ((default[0], 0), (batch, -1), (default[1], -1)))  # fmt: skip
        assert left == pytest.approx(0, abs=0.03 * width)
        assert until == pytest.approx(0.6 * width, abs=0.03 * width)
        assert right == pytest.approx(width, abs=0.03 * width)


def test_the_slo_class_filters_goodput(open_page: Callable[..., Page], fake: FakeTriton) -> None:
    page = open_page()
    # Of all classes, or of the chosen one; with several there is a figure for each besides.
    goodput = page.get_by_test_id("stMetric").filter(has=page.get_by_text("Goodput", exact=True))
    classes, value = page.get_by_test_id("stButtonGroup"), goodput.get_by_test_id("stMetricValue")
    # Again and again: a figure is of the last minute, in which a busy machine may draw nothing.
    fake.state.misses = 1
    try:
        classes.get_by_text("batch", exact=True).click()
        expect(value).to_have_text("0.0%")
        classes.get_by_text("default", exact=True).click()
        expect(value).to_have_text("100%")
    finally:
        fake.state.misses = 0


def test_a_request_is_cancelled(open_page: Callable[..., Page], fake: FakeTriton) -> None:
    with fake.state.lock:
        fake.state.snapshot["requests"].append(make_request("eeee5555ffff6666", label="doomed"))
    page = open_page("requests")
    expect(page.get_by_text("3 requests")).to_be_visible()
    choose_request(page, "doomed (eeee55)")
    button = page.get_by_test_id("stMain").get_by_role("button", name="Cancel doomed (eeee55)…")
    expect(button).to_be_visible()
    # One that is older comes first in the table, another one ends: the choice and the button stay with theirs.
    with fake.state.lock:
        live = fake.state.snapshot["requests"]
        live.append(make_request("ffff7777aaaa8888", label="older", age_seconds=83.0))
        first = live.pop(0)
    cells = page.get_by_test_id("stDataFrame").locator("td")
    expect(cells.filter(has_text="older (ffff77)")).to_have_count(1)
    expect(cells.filter(has_text="report (aaaa11)")).to_have_count(0)
    expect(page.locator("tr[aria-selected=true]")).to_contain_text("doomed (eeee55)")
    with fake.state.lock:
        live.pop()
        live.insert(0, first)
    expect(cells.filter(has_text="older (ffff77)")).to_have_count(0)
    button.click()
    assert fake.state.cancelled == []
    confirm = page.get_by_role("button", name="Cancel doomed (eeee55) now")
    red, green, blue = map(int, re.findall(r"\d+", confirm.evaluate("it => getComputedStyle(it).backgroundColor"))[:3])
    assert red > 150 > 100 > max(green, blue), "it looks like what it is"
    confirm.click()
    expect(page.get_by_text("Request doomed (eeee55) was cancelled.")).to_be_visible()
    expect(page.get_by_text("2 requests")).to_be_visible()
    assert fake.state.cancelled == ["eeee5555ffff6666"]


def test_two_operators_at_one_request_of_which_one_cancels_it(open_page: Callable[..., Page], fake: FakeTriton) -> None:
    with fake.state.lock:
        fake.state.snapshot["requests"].append(make_request("9999aaaa8888bbbb", label="contested"))
    name = "contested (9999aa)"
    pages = open_page("requests"), open_page("requests", beside=True)
    for page in pages:
        choose_request(page, name)
        page.get_by_test_id("stMain").get_by_role("button", name=f"Cancel {name}…").click()
    one, other = (page.get_by_role("button", name=f"Cancel {name} now") for page in pages)
    expect(other).to_be_visible()
    one.click()
    expect(pages[0].get_by_text(f"Request {name} was cancelled.")).to_be_visible()
    expect(pages[1].get_by_text(f"Request {name} has ended.")).to_be_visible()
    expect(other, "there is nothing left to cancel").to_have_count(0)
    expect(pages[1].get_by_text("was cancelled.")).to_have_count(0)
    for page in pages:
        expect(page.locator("tr[aria-selected=true]")).to_have_count(0)
        expect(page.get_by_text("2 requests")).to_be_visible()
    assert fake.state.cancelled.count("9999aaaa8888bbbb") == 1
    fake.state.cancelled.clear()


def test_the_ticked_row_is_the_detailed_one_while_rows_move(open_page: Callable[..., Page], fake: FakeTriton) -> None:
    with fake.state.lock:
        before = fake.state.snapshot
    try:
        page = open_page("requests")
        for turn in range(6):
            # Older ones come and go before the others, with every reading.
            crowd = [
                make_request(f"{turn:04x}{number:04x}ffff0000", label=f"crowd-{number}", age_seconds=90.0 - number)
                for number in range(turn % 3)
            ]
            with fake.state.lock:
                fake.state.snapshot = {**before, "requests": [*crowd, *before["requests"]]}
            name = ("report (aaaa11)", "chat (cccc33)")[turn % 2]
            choose_request(page, name)
            expect(page.get_by_test_id("stMain").get_by_role("button", name=f"Cancel {name}…")).to_be_visible()
            expect(page.locator("tr[aria-selected=true]")).to_contain_text(name)
    finally:
        with fake.state.lock:
            fake.state.snapshot = before


def test_a_viewer_in_another_time_zone_sees_one_zone_everywhere(
    open_page: Callable[..., Page], fake: FakeTriton
) -> None:
    fake.state.end(time_unix=1768519805.0, label="at-midnight")  # 2026-01-15, 23:30:05 UTC
    fake.state.add("engine_restarts_total", 1)
    page = open_page("ended", timezone="Asia/Tokyo")
    expect(page.get_by_text("times are JST")).to_be_visible()
    row = page.get_by_test_id("stDataFrame").locator("tr").filter(has_text="at-midnight")
    expect(row).to_contain_text("08:30:05")
    page = open_page("", timezone="Asia/Tokyo")
    dashed = page.get_by_text(re.compile(r"Dashed lines, JST: .*engine restarted"))
    expect(dashed).to_be_visible()
    hours = page.evaluate("new Date().getHours()")
    chart = page.locator("svg.marks").filter(has_text="share of requests").first
    expect(chart, "the axis is of the same zone").to_contain_text(re.compile(rf"{hours:02}:\d\d:\d\d"))


WIDE = """() => [...document.querySelectorAll('[data-testid="stDataFrame"] .dvn-scroller')].map(
    it => [it.clientWidth, it.scrollWidth])"""


def test_no_column_is_cut_off_on_a_small_screen(open_page: Callable[..., Page], fake: FakeTriton) -> None:
    fake.state.end()
    page = open_page(width=1280)
    for title in ("Requests", "Slow & failed", "KV cache", "Engine"):
        sidebar_link(page, title).click()
        expect(page.get_by_role("heading", name=title, exact=True)).to_be_visible()
        expect(page.get_by_test_id("stDataFrame").first.locator("tr").nth(1)).to_be_attached()
        widths = page.evaluate(WIDE)
        assert widths, title
        assert all(scrolled <= seen + 1 for seen, scrolled in widths), (title, widths)


@contextmanager
def web_server(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """On loopback; gives its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_port}"
        finally:
            running.shutdown()
            thread.join()


@contextmanager
def other_host() -> Iterator[tuple[str, list[str]]]:
    """A web server of somebody else; gives its address, and what it is asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_: Any) -> None:
            pass

    with web_server(Handler) as address:
        yield address, asked


def test_what_a_client_calls_its_request_is_only_text(open_page: Callable[..., Page], fake: FakeTriton) -> None:
    with other_host() as (host, asked):
        labels = (
            f"![x]({host}/image.png)",
            f"`![x]({host}/code.png)",
            f"# **bold** $x$ :red[<{host}/link>] \n\u202e",
            f"x</title><img src='{host}/tag.png'>",
        )
        hostile = [make_request(f"{number}bcdef0123456789", label=label) for number, label in enumerate(labels)]
        with fake.state.lock:
            before = fake.state.snapshot
            owner = [index for index in range(2, 6) for _ in range(4)] + [-1] * 48
            blocks = {**before["blocks"], "owner": owner, "ref_count": [1] * 16 + [0] * 48}
            fake.state.snapshot = {**before, "requests": [*before["requests"], *hostile], "blocks": blocks}
        try:
            page = open_page("kv-cache")
            expect(page.get_by_text(f"{labels[0]} (0bcdef): 4")).to_be_visible()
            expect(page.locator(".quire-block-map img")).to_have_count(1)
            page = open_page("requests")
            expect(page.get_by_text("6 requests")).to_be_visible()
            for request, label in zip(hostile, labels, strict=True):
                name = f"{printable(label, 64)} ({request['id'][:6]})"
                choose_row(page, 2)  # the first of them that is left
                button = page.get_by_test_id("stMain").get_by_role("button", name=f"Cancel {name}…", exact=True)
                expect(button).to_be_visible()
                expect(page.locator(f'[src*="{host}"], [href*="{host}"]')).to_have_count(0)
                button.click()
                page.get_by_test_id("stMain").get_by_role("button", name=f"Cancel {name} now", exact=True).click()
                expect(page.get_by_text(f"Request {name} was cancelled.")).to_be_visible()
                expect(page.locator(f'[src*="{host}"], [href*="{host}"]')).to_have_count(0)
            assert asked == []
        finally:
            with fake.state.lock:
                fake.state.snapshot = before
                fake.state.cancelled.clear()


def test_the_block_map_is_a_picture_that_is_seen(open_page: Callable[..., Page]) -> None:
    page = open_page("kv-cache")
    picture = page.locator(".quire-block-map img")
    expect(picture).to_be_visible()
    expect(picture).to_have_attribute("alt", "64 blocks: 8 used, 16 cached, 40 free")
    assert page.evaluate("document.querySelector('.quire-block-map img').naturalWidth") > 0


def test_the_playground_answers(open_page: Callable[..., Page]) -> None:
    page = open_page("playground")
    page.get_by_role("button", name="Generate").click()
    expect(page.get_by_text("return n")).to_be_visible()
    expect(page.get_by_test_id("stMetric").filter(has_text="TTFT")).to_contain_text("12 ms")


def test_a_chat_model_opens_a_chat_that_can_be_stopped(open_page: Callable[..., Page], fake: FakeTriton) -> None:
    fake.state.chat_format["has_chat_template"] = fake.state.stalls = True
    try:
        page = open_page("playground")
        message, stop = page.get_by_placeholder("Your message"), page.get_by_role("button", name="Stop")
        message.fill("hello")
        message.press("Enter")
        expect(page.get_by_test_id("stChatMessage").nth(1)).to_contain_text("def")
        stop.click()
        expect(stop).to_have_count(0)
        expect(page.get_by_test_id("stChatMessage")).to_have_text([re.compile("hello"), re.compile("def")])
        fake.state.stalls = False
        message.fill("go on")
        message.press("Enter")
        expect(page.get_by_text("return n")).to_be_visible()
        expect(page.get_by_test_id("stChatMessage")).to_have_count(4)
    finally:
        fake.state.chat_format["has_chat_template"] = fake.state.stalls = False
    turns = json.loads(fake.state.prompts[-1][0])
    assert [(turn["role"], turn["content"]) for turn in turns] == [
        ("user", "hello"), ("assistant", "def "), ("user", "go on"),
    ]  # fmt: skip


def test_a_load_is_started_and_watched(open_page: Callable[..., Page], fake: FakeTriton) -> None:
    page = open_page("load")
    before = len(fake.state.prompts)
    page.get_by_role("button", name="Start").click()
    expect(page.get_by_text(re.compile("64 of 64 requests, done"))).to_be_visible()
    assert len(fake.state.prompts) == before + 64


PALE_TEXT = """() => {
    const parts = colour => { const [r, g, b, a = 1] = colour.match(/[0-9.]+/g).map(Number); return [r, g, b, a]; };
    const over = ([r, g, b, a], below) => [r, g, b].map((part, i) => part * a + below[i] * (1 - a));
    const linear = part => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    const luminance = rgb => rgb.map(part => linear(part / 255)).reduce((sum, part, i) =>
        sum + part * [0.2126, 0.7152, 0.0722][i], 0);
    const lineage = node => node ? [...lineage(node.parentElement), node] : [];
    const found = [];
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
        const node = texts.currentNode.parentElement, style = getComputedStyle(node), all = lineage(node);
        const isIcon = node.closest('[data-testid="stIconMaterial"]'), isDrawing = node instanceof SVGElement;
        const opacity = all.reduce((product, one) => product * Number(getComputedStyle(one).opacity), 1);
        if (!texts.currentNode.textContent.trim() || !node.getClientRects().length || isIcon || !opacity) continue;
        const ground = all.map(one => parts(getComputedStyle(one).backgroundColor))
            .reduce((below, colour) => over(colour, below), [255, 255, 255]);
        const ink = parts(isDrawing ? style.fill : style.color);
        ink[3] *= opacity * (isDrawing ? Number(style.fillOpacity) : 1);
        const [dark, light] = [luminance(over(ink, ground)), luminance(ground)].sort((a, b) => a - b);
        const contrast = (light + 0.05) / (dark + 0.05);
        if (contrast < 4.5) found.push(`${contrast.toFixed(1)}: ${node.textContent.slice(0, 40)}`);
    }
    return found;
}"""
"""Text with a contrast of less than 4.5 to 1 (WCAG 2.2, 1.4.3), without what is a picture of the word beside it."""


@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_a_phone_and_can_be_read_in_both_themes(
    open_page: Callable[..., Page], fake: FakeTriton, dark: bool
) -> None:
    for path in ("", "kv-cache", "requests", "ended", "engine", "playground", "load"):
        page = open_page(path, width=390, dark=dark)
        for name in ("tinypy", fake.url):
            shown = page.get_by_test_id("stMain").get_by_text(name, exact=True).first
            expect(shown).to_be_visible()
            box = shown.bounding_box()
            assert box
            assert box["y"] + box["height"] < 300, "model and server are on the first screen"
        expect(page.get_by_role("heading").first).to_have_css("font-size", "20px")
        assert is_dark(page) is dark
        if path == "":
            verdict = page.locator(".st-key-verdict p").first
            expect(verdict, "which page it is matters less than what it says").to_have_css("font-size", "20.8px")
        if path == "requests":
            choose_row(page, 0)
            button = page.get_by_test_id("stMain").get_by_role("button", name=re.compile("^Cancel"))
            expect(button).to_be_visible()
            boxes = button.bounding_box(), page.locator("svg.marks").bounding_box()
            assert boxes[0]
            assert boxes[1]
            assert boxes[0]["y"] < boxes[1]["y"], "the button comes before the bars of all requests"
        if path not in ("ended", "playground", "load"):
            expect(page.locator("svg.marks").last).to_be_visible()
        assert page.evaluate(PALE_TEXT) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_server_that_goes_away_is_said(browser: Browser, open_page: Callable[..., Page]) -> None:
    with fake_triton() as fleeting, dashboard(settings_of(fleeting)) as address:
        page = open_page(base=address)
        expect(page.get_by_text("no request has ended in the last")).to_be_visible()
        fleeting.stop()
        expect(page.get_by_text("The server does not answer.").first).to_be_visible()
        expect(page.get_by_text("nothing listens there").first).to_be_visible()


def test_what_is_chosen_is_in_the_address(browser: Browser, open_page: Callable[..., Page]) -> None:
    with ExitStack() as stack:
        two = stack.enter_context(fake_triton())
        two.state.set("engine_up", 1, model="other")  # before the first reading: else there is no choice
        address = stack.enter_context(dashboard(settings_of(two)))
        two.state.finish(20)
        page = open_page("overview?model=tinypy&slo_class=batch&range=15+minutes", base=address)
        expect(page.get_by_role("combobox", name="Model")).to_have_value("tinypy")
        expect(page.get_by_role("combobox", name="Time range")).to_have_value("15 minutes")
        parts = page.locator("strong", has_text="Its parts, p95, all classes")
        expect(parts, "a class is chosen, which the server does not tell apart there").to_be_visible()
        assert page.get_by_role("heading", name="Overview").is_visible()
        sidebar_link(page, "Engine").click()
        expect(page.get_by_role("heading", name="Engine", exact=True)).to_be_visible()
        expect(page).to_have_url(re.compile(r"/engine\?.*model=tinypy.*range=15|/engine\?.*range=15.*model=tinypy"))


def test_a_press_on_another_server_is_in_the_pickers_and_the_address(open_page: Callable[..., Page]) -> None:
    with fake_triton() as one, fake_triton() as two, dashboard(settings_of(one), settings_of(two)) as address:
        two.state.set("requests_running", 7)
        page = open_page(base=address)
        server = page.get_by_role("combobox", name="Server")
        running = page.get_by_test_id("stMetric").filter(has_text="Running")
        expect(server).to_have_value(one.url)
        expect(running).to_contain_text("2")
        page.get_by_test_id("stMain").get_by_role("button").filter(has_text=two.url).click()
        expect(server).to_have_value(two.url)
        expect(running).to_contain_text("7")
        expect(page).to_have_url(re.compile(rf"\?.*server={two.url.replace(':', '(:|%3A)')}"))
        one.stop()
        expect(page.get_by_role("button").filter(has_text=f"{one.url}: no answer for")).to_be_visible()
        expect(running).to_contain_text("7")


def test_the_history_begins_before_the_first_visitor() -> None:
    with fake_triton() as lonely, dashboard(settings_of(lonely)):
        wait_until(lambda: lonely.state.num_readings >= 2, "the server is watched")


def test_with_a_token_it_must_be_known(open_page: Callable[..., Page], fake: FakeTriton) -> None:
    with dashboard(settings_of(fake, DASHBOARD_TOKEN)) as address:
        page = open_page(base=address)
        page.get_by_label("Token", exact=True).fill("guess")
        page.keyboard.press("Enter")
        expect(page.get_by_text("This is not the token.")).to_be_visible()
        assert "Running" not in page.inner_text("body")
        page.get_by_label("Token", exact=True).fill(DASHBOARD_TOKEN)
        page.keyboard.press("Enter")
        expect(page.get_by_test_id("stMetric").filter(has_text="Running")).to_be_visible()
        page = open_page(f"?token={DASHBOARD_TOKEN.replace(' ', '%20')}", base=address)
        expect(page.get_by_test_id("stMetric").filter(has_text="Running")).to_be_visible()
        assert "token" not in page.url


def test_only_its_own_pages_may_talk_to_it(address: str) -> None:
    own = address.removeprefix("http://")
    port = own.rpartition(":")[2]

    def is_taken(host: str, origin: str | None) -> bool:
        request = {"Host": host, "Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13",
                   "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==", "Sec-WebSocket-Protocol": "streamlit",
                   **({} if origin is None else {"Origin": origin})}  # fmt: skip
        with closing(http.client.HTTPConnection(own, timeout=30)) as connection:
            connection.request("GET", "/_stcore/stream", headers=request)
            return connection.getresponse().status == http.client.SWITCHING_PROTOCOLS

    assert is_taken(own, f"http://{own}")
    assert is_taken(f"localhost:{port}", f"http://localhost:{port}")
    assert is_taken(own, None), "no browser"
    for host, origin in (
        (own, "http://localhost:3000"), (own, f"http://localhost:{port}"), (own, "http://127.0.0.1"),
        (own, "http://0.0.0.0:1"), (own, "null"), (own, "https://example.org"), ("evil.example", "http://evil.example"),
    ):  # fmt: skip
        assert not is_taken(host, origin), origin


def test_pictures_show_something(open_page: Callable[..., Page], tmp_path: Path) -> None:
    for path, dark in (("", False), ("kv-cache", False), ("requests", True)):
        page = open_page(path, dark=dark)
        expect(page.locator("svg.marks").first).to_be_visible()
        file = tmp_path / "shot.png"
        page.screenshot(path=file)
        assert file.stat().st_size > 20_000
