"""The pictures of the README: a real server whose KV cache is too small for its load, seen through the dashboard.

python tests/dashboard/screenshots.py FOLDER
"""

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from playwright.sync_api import Page, expect, sync_playwright
from support.chromium import find_chromium
from support.serving import ROOT, serve

SETTINGS = {
    "kv_cache_memory_bytes": 12 * 2**20, "max_num_seqs": 16,
    "slo": {"default": {"ttft_ms": 1500, "tpot_ms": 50, "e2e_ms": 8000}, "batch": {"e2e_ms": 60000}},
}  # fmt: skip
LOAD = {"Streams at the same time": 20, "Requests in all": 2000, "Tokens per answer": 160, "Tokens per prompt": 90}
SHOTS = (("overview", "", False), ("kv-cache", "kv-cache", False), ("requests", "requests", True))


def make_repository(folder: Path) -> None:
    """The demo model, with a cache that is too small."""
    demo = ROOT / "model_repository" / "tinypy"
    version = folder / "tinypy" / "1"
    version.mkdir(parents=True)
    (folder / "tinypy" / "config.pbtxt").write_text((demo / "config.pbtxt").read_text())
    settings = json.loads((demo / "1" / "model.json").read_text())
    settings |= {**SETTINGS, "model": str(demo / "1" / settings["model"])}
    (version / "model.json").write_text(json.dumps(settings))


def start_load(page: Page) -> None:
    """By the dashboard's own page."""
    for label, value in LOAD.items():
        field = page.get_by_label(label, exact=True)
        field.fill(str(value))
        field.press("Tab")
    page.get_by_role("button", name="Start").click()
    expect(page.get_by_role("button", name="Stop")).to_be_visible()


def main(folder: Path) -> None:
    """Take them."""
    chromium = find_chromium()
    if chromium is None:
        sys.exit("quire: there is no Chromium; install it, or name one in QUIRE_CHROMIUM")
    folder.mkdir(parents=True, exist_ok=True)
    expect.set_options(timeout=30_000)
    with tempfile.TemporaryDirectory() as models, sync_playwright() as playwright:
        make_repository(Path(models))
        with serve("--model-repository", models, "--dashboard", "--dashboard-port", "0") as server:
            browser = playwright.chromium.launch(
                executable_path=chromium.executable, args=list(chromium.arguments), env=dict(chromium.environment)
            )
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.goto(f"http://{server.dashboard}/load")
            start_load(page)
            page.wait_for_timeout(45_000)  # a history to look at
            for name, path, dark in SHOTS:
                shot = browser.new_page(
                    viewport={"width": 1280, "height": 900}, color_scheme="dark" if dark else "light"
                )  # fmt: skip
                shot.goto(f"http://{server.dashboard}/{path}")
                expect(shot.locator("svg.marks").first).to_be_visible()
                shot.wait_for_timeout(3_000)  # until every chart has found its place
                shot.screenshot(path=folder / f"dashboard-{name}.png")
                shot.close()
            page.get_by_role("button", name="Stop").click()
            browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
