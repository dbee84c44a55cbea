"""How soon each page of the dashboard shows what it says first, on a machine that is saturated.

    python tests/benchmarks/first_paint.py [--load 10] [--niceness 3] [--browser]

As many processes as `--load` says compute without end. A dashboard with a history of five minutes watches a stand-in
for the server, at the priority that `quire serve` gives it. Each page is opened by a visitor without a browser, or with
`--browser` in Chromium, which has to load its program on the same machine first. The figures are seconds after the
page was opened: its first words or figures (of Overview the verdict), its first chart or table, and its end.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from playwright.sync_api import expect  # noqa: E402
from quire_cli.dashboard import NICENESS  # noqa: E402
from quire_cli.process import lower_priority  # noqa: E402
from quire_dashboard.settings import Settings  # noqa: E402
from support.browser import chromium, dashboard, pages_of  # noqa: E402
from support.fake_triton import TOKEN, fake_triton  # noqa: E402
from support.processes import children  # noqa: E402
from support.viewer import Viewer  # noqa: E402

PAGES = ("", "kv-cache", "requests", "ended", "engine", "playground", "load")
WORDS, PICTURES = (
    ("alert", "metric", "text_area", "number_input", "markdown"),
    ("arrow_vega_lite_chart", "arrow_data_frame"),
)
MOST_SECONDS = 120.0


@contextmanager
def busy(number: int) -> Iterator[None]:
    """Processes that compute meanwhile, in a session of their own."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
               for _ in range(number)]  # fmt: skip
    try:
        yield
    finally:
        for one in running:
            one.kill()
            one.wait()


async def visit(address: str, page: str) -> Viewer:
    """Until the page was drawn once."""
    viewer = Viewer(address.removeprefix("http://"), page)
    watching = asyncio.create_task(viewer.watch(time.monotonic() + MOST_SECONDS))
    while "finished" not in viewer.seconds and not watching.done():
        await asyncio.sleep(0.005)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    return viewer


def of_first(viewer: Viewer, kinds: tuple[str, ...]) -> str:
    """When the first element of these kinds came."""
    found = [viewer.seconds[kind] for kind in kinds if kind in viewer.seconds]
    return f"{min(found):8.2f}" if found else "       —"


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=int, default=10)
    parser.add_argument("--niceness", type=int, default=NICENESS)
    parser.add_argument("--warm-up", type=float, default=20.0, help="seconds of history before")
    parser.add_argument("--browser", action="store_true")
    args = parser.parse_args()
    with ExitStack() as stack:
        fake = stack.enter_context(fake_triton())
        fake.state.traffic = 3
        fake.state.misses = 1
        settings = Settings(url=fake.url, metrics=fake.metrics, introspection_token=TOKEN)
        address = stack.enter_context(dashboard(settings))
        (process,) = [pid for pid in children(os.getpid()) if "streamlit" in Path(f"/proc/{pid}/cmdline").read_text()]
        time.sleep(args.warm_up)
        lower_priority(process, args.niceness)
        pages = stack.enter_context(pages_of(stack.enter_context(chromium()), address)) if args.browser else None
        stack.enter_context(busy(args.load))
        time.sleep(5)
        print(f"{args.load} busy processes, load {os.getloadavg()[0]:.1f}, niceness {args.niceness}")
        print("page             first  picture      end   s after it was opened")
        for page in ("", *PAGES):
            if pages is None:
                viewer = asyncio.run(visit(address, page))
                end = viewer.seconds.get("finished", MOST_SECONDS)
                print(f"{page or 'overview':12}  {of_first(viewer, WORDS)} {of_first(viewer, PICTURES)} {end:8.2f}")
                continue
            start = time.monotonic()
            seen = pages(page)
            first = ".st-key-verdict" if not page else '[data-testid="stMain"] [data-testid="stHeading"]'
            expect(seen.locator(first).first).to_be_visible(timeout=1000 * MOST_SECONDS)
            print(f"{page or 'overview':12}  {time.monotonic() - start:8.2f}")


if __name__ == "__main__":
    main()
