"""The dashboard in a process of its own, a headless Chromium, and pages of it that may only talk to the dashboard."""

import json
import os
import re
import signal
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright
from quire_dashboard.launch import streamlit_command
from quire_dashboard.settings import Settings, settings_of_servers, to_environment
from support.chromium import find_chromium
from support.ports import free_port
from support.serving import wait_until

__all__ = ["TIMEOUT_MS", "choose_request", "choose_row", "chromium", "dashboard", "is_dark", "pages_of", "sidebar_link"]

TIMEOUT_MS = 60_000


@contextmanager
def chromium() -> Iterator[Browser]:
    """A running browser; without one, the test is skipped."""
    found = find_chromium()
    if found is None:
        pytest.skip("there is no Chromium; make test unpacks Debian's, and QUIRE_CHROMIUM names another one")
    with sync_playwright() as playwright:
        started: dict[str, Any] = {
            "executable_path": found.executable, "args": list(found.arguments), "env": found.environment,
        }  # fmt: skip
        running = playwright.chromium.launch(**started)
        yield running
        running.close()


@contextmanager
def pages_of(browser: Browser, address: str) -> Iterator[Callable[..., Page]]:
    """Opens pages; afterwards, nothing may have been asked of another host. A page that is opened closes those before,
    which would go on drawing, unless it is opened `beside` them.

    Pages of the usual time zone share a context of the browser, which keeps the dashboard's scripts from test to test;
    each page begins without cookies and stored items.
    """
    opened: list[Page] = []
    foreign: list[str] = []

    def close() -> None:
        while opened:
            page = opened.pop()
            context = page.context
            if context == browser.contexts[0]:
                page.close()
                context.clear_cookies()
            else:
                context.close()

    def at(
        path: str = "", *, base: str = "", width: int = 1280, dark: bool = False, timezone: str = "UTC",
        beside: bool = False,
    ) -> Page:  # fmt: skip
        if not beside:
            close()
        if not browser.contexts:
            _new_context(browser, "UTC")
        is_usual = timezone == "UTC" and not opened
        page = (browser.contexts[0] if is_usual else _new_context(browser, timezone)).new_page()
        opened.append(page)
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme="dark" if dark else "light")
        page.set_default_timeout(TIMEOUT_MS)
        here = base or address
        own = (here, here.replace("http", "ws"), "data:", "blob:")
        page.on("request", lambda asked: None if asked.url.startswith(own) else foreign.append(asked.url))
        page.goto(f"{here}/{path}")
        return page

    expect.set_options(timeout=TIMEOUT_MS)
    yield at
    close()
    assert foreign == []


def _new_context(browser: Browser, timezone: str) -> BrowserContext:
    context = browser.new_context(timezone_id=timezone)
    context.add_init_script("if (location.protocol === 'http:') localStorage.clear()")
    return context


@contextmanager
def dashboard(*servers: Settings) -> Iterator[str]:
    """Started as `quire dashboard` starts it; gives its address."""
    with free_port() as port:
        settings = settings_of_servers(
            [one.url for one in servers], [one.metrics for one in servers], prometheus=servers[0].prometheus,
            traces=servers[0].traces, token=servers[0].token,
            introspection_tokens=json.dumps({one.url: one.introspection_token for one in servers}),
        )  # fmt: skip
        process = subprocess.Popen(
            streamlit_command("127.0.0.1", port),
            env={**os.environ, **to_environment(settings)},
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        address = f"http://127.0.0.1:{port}"

        def is_up() -> bool:
            assert process.poll() is None, "the dashboard ended while it started"
            return _answers(f"{address}/_stcore/health")

        try:
            wait_until(is_up, "the dashboard has started")
            yield address
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def sidebar_link(page: Page, title: str) -> Any:
    """The link to a page of the dashboard."""
    return page.get_by_test_id("stSidebarNav").get_by_role("link", name=title, exact=True)


def is_dark(page: Page) -> bool:
    """Whether the page's background is."""
    background = page.evaluate("getComputedStyle(document.querySelector('.stApp')).backgroundColor")
    return sum(map(int, re.findall(r"\d+", background)[:3])) < 200


def choose_row(page: Page, row: int) -> None:
    """Tick a row of the page's first table, which is a drawing beside hidden rows for screen readers."""
    table = page.get_by_test_id("stDataFrame").first
    expect(table.locator("tr").nth(row + 1)).to_be_attached()  # after the heading
    table.click(position={"x": 14, "y": 35 * (row + 1) + 17})


def choose_request(page: Page, name: str) -> None:
    """Tick the row of that table that has a name in it, wherever others that come and go have moved it meanwhile."""
    row = page.get_by_test_id("stDataFrame").first.locator("tr").filter(has_text=name)
    chosen = page.locator("tr[aria-selected=true]").filter(has_text=name)
    for _ in range(5):
        expect(row).to_have_count(1)
        choose_row(page, int(row.evaluate("it => it.rowIndex")) - 1)
        with suppress(AssertionError):
            expect(chosen).to_have_count(1, timeout=5000)
            return
    expect(chosen).to_have_count(1)
