"""Pictures of the dashboard: a real server whose KV cache is too small for its load.

    python tests/dashboard/screenshots.py FOLDER [NAME ...]

Each page is taken on a desktop and on a phone, light and dark: `dashboard-PAGE[-phone][-dark].png`, of 256 colours; or
only those that are named, as `overview-phone-dark`. `playground` is a chat with the model of `--model demo`, which is
downloaded for it. The README and the documentation show what `docs/` has of them.
"""

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from PIL import Image
from playwright.sync_api import Browser, Page, ViewportSize, expect
from quire_dashboard.settings import Settings
from support.browser import chromium, dashboard
from support.chromium import find_chromium
from support.measured_load import in_background
from support.serving import ROOT, serve

SETTINGS = {
    "kv_cache_memory_bytes": 12 * 2**20, "max_num_seqs": 16,
    "slo": {"default": {"ttft_ms": 1500, "tpot_ms": 200, "e2e_ms": 15000}, "batch": {"e2e_ms": 60000}},
}  # fmt: skip
STEP_SECONDS = 0.03
"""More than the demo model takes: the browser wants the processor, too, and the cache is to be what is short."""
NUM_STREAMS = 20
HISTORY_SECONDS = 45.0
TIMEOUT_MS = 90_000
TOKEN = "the token of the pictures"
QUESTIONS = ("What is the capital of France?", "What is it known for?")
PAGES = ("overview", "kv-cache", "requests", "ended")
SCREENS: dict[str, ViewportSize] = {"": {"width": 1280, "height": 1200}, "-phone": {"width": 390, "height": 844}}
THEMES: dict[str, Literal["light", "dark"]] = {"": "light", "-dark": "dark"}


def make_repository(folder: Path) -> None:
    """The demo model, with a cache that is too small."""
    demo = ROOT / "model_repository" / "tinypy"
    version = folder / "tinypy" / "1"
    version.mkdir(parents=True)
    (folder / "tinypy" / "config.pbtxt").write_text((demo / "config.pbtxt").read_text())
    settings = json.loads((demo / "1" / "model.json").read_text())
    settings |= {**SETTINGS, "model": str(demo / "1" / settings["model"])}
    (version / "model.json").write_text(json.dumps(settings))


def make_request(number: int) -> dict[str, Any]:
    """The n-th of the load; the running ones want twice the blocks that there are."""
    task = ("report", "chat", "review")[number % 3]
    return {
        "model": "tinypy", "request_id": f"{task}-{number}", "max_tokens": 160, "ignore_eos": True,
        "text_input": f"# {task} {number}\n" + 8 * f"def function_{number}(values):\n    return values\n\n",
        "parameters": {"slo_class": ("default", "default", "batch")[number % 3]},
    }  # fmt: skip


def take(browser: Browser, address: str, file: Path, viewport: ViewportSize, scheme: Literal["light", "dark"]) -> None:
    """One picture, once every chart is drawn and has found its place."""
    page = browser.new_page(viewport=viewport, color_scheme=scheme)
    page.set_default_timeout(TIMEOUT_MS)
    page.goto(address)
    expect(page.get_by_role("heading").first).to_have_css("font-size", "20px")
    expect(page.get_by_test_id("stMain").locator("svg.marks, table").first).to_be_attached()
    expect(page.get_by_test_id("stSkeleton")).to_have_count(0)
    page.wait_for_timeout(3_000)
    save(page, file)


def take_chat(browser: Browser, file: Path) -> None:
    """The playground after two questions, with a server of its own."""
    with (
        serve("--model", "demo", "--yes") as server,
        dashboard(Settings(url=server.grpc, metrics=server.metrics)) as address,
    ):
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.set_default_timeout(TIMEOUT_MS)
        page.goto(f"{address}/playground")
        message, turns = page.get_by_placeholder("Your message"), page.get_by_test_id("stChatMessage")
        for number, question in enumerate(QUESTIONS):
            message.fill(question)
            message.press("Enter")
            expect(turns.nth(2 * number + 1)).to_contain_text("finished by")
        save(page, file)


def save(page: Page, file: Path) -> None:
    """Take the picture, and close the page."""
    page.screenshot(path=file)
    page.close()
    with Image.open(file) as picture:
        picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(file, optimize=True)


def main(folder: Path, names: Sequence[str]) -> None:
    """Take them."""
    if find_chromium() is None:
        sys.exit("quire: there is no Chromium; install it, or name one in QUIRE_CHROMIUM")
    folder.mkdir(parents=True, exist_ok=True)
    expect.set_options(timeout=TIMEOUT_MS)
    with chromium() as browser:
        if not names or "playground" in names:
            take_chat(browser, folder / "dashboard-playground.png")
        if not names or set(names) - {"playground"}:
            take_pages(browser, folder, names)


def take_pages(browser: Browser, folder: Path, names: Sequence[str]) -> None:
    """Those of a server under load."""
    with ExitStack() as stack:
        models = stack.enter_context(tempfile.TemporaryDirectory())
        make_repository(Path(models))
        environment = {"QUIRE_INTROSPECTION_TOKEN": TOKEN}
        server = stack.enter_context(
            serve("--model-repository", models, env=environment, step_seconds=STEP_SECONDS)
        )  # fmt: skip
        # `quire serve` would start one that leaves the processor to everybody else.
        settings = Settings(url=server.grpc, metrics=server.metrics, introspection_token=TOKEN)
        address = stack.enter_context(dashboard(settings))
        stack.enter_context(in_background(server, make_request, NUM_STREAMS))
        time.sleep(HISTORY_SECONDS)
        for page, (screen, viewport), (theme, scheme) in product(PAGES, SCREENS.items(), THEMES.items()):
            name = f"{page}{screen}{theme}"
            if not names or name in names:
                take(browser, f"{address}/{page}", folder / f"dashboard-{name}.png", viewport, scheme)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
