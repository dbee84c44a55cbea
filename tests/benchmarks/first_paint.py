"""How soon each page of the dashboard shows what it says first, on a machine that is saturated.

    python tests/benchmarks/first_paint.py [--load 10] [--niceness 0]

As many processes as `--load` says compute without end. A dashboard with a history of five minutes watches a stand-in
for the server. Each page is opened by a visitor without a browser, whose program has a machine of its own. The figures
are seconds after the page was opened: its first words or figures (of Overview the verdict), its first chart, and its
end. Afterwards, without the load, it says what five visitors on as many pages cost.
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

from quire_dashboard.settings import Settings  # noqa: E402
from support.browser import dashboard  # noqa: E402
from support.fake_triton import TOKEN, fake_triton  # noqa: E402
from support.processes import children, cpu_seconds  # noqa: E402
from support.viewer import Viewer  # noqa: E402

PAGES = ("", "kv-cache", "requests", "ended", "engine", "playground", "load")
WORDS, PICTURES = ("alert", "metric", "dataframe", "text_area", "number_input"), ("vega_lite_chart",)
MOST_SECONDS = 120.0


@contextmanager
def busy(number: int) -> Iterator[None]:
    """Processes that compute meanwhile, in a session of their own."""
    source = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    running = [subprocess.Popen([sys.executable, "-c", source], start_new_session=True) for _ in range(number)]
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


async def watch(address: str, seconds: float) -> None:
    """Five visitors, each on another page."""
    viewers = [Viewer(address.removeprefix("http://"), page) for page in PAGES[:5]]
    await asyncio.gather(*(viewer.watch(time.monotonic() + seconds) for viewer in viewers))
    assert all(viewer.elements and not viewer.elements["exception"] for viewer in viewers)


def of_first(viewer: Viewer, kinds: tuple[str, ...]) -> str:
    """When the first element of these kinds came."""
    found = [viewer.seconds[kind] for kind in kinds if kind in viewer.seconds]
    return f"{min(found):8.2f}" if found else "       —"


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=int, default=10)
    parser.add_argument("--niceness", type=int, default=0)
    parser.add_argument("--warm-up", type=float, default=20.0, help="seconds of history before")
    parser.add_argument("--seconds", type=float, default=30.0, help="that they look")
    args = parser.parse_args()
    with ExitStack() as stack:
        fake = stack.enter_context(fake_triton())
        fake.state.traffic = 3
        fake.state.misses = 1
        settings = Settings(url=fake.url, metrics=fake.metrics, introspection_token=TOKEN)
        address = stack.enter_context(dashboard(settings))
        (process,) = [pid for pid in children(os.getpid()) if "streamlit" in Path(f"/proc/{pid}/cmdline").read_text()]
        time.sleep(args.warm_up)
        for thread in os.listdir(f"/proc/{process}/task") if args.niceness else ():
            os.setpriority(os.PRIO_PROCESS, int(thread), args.niceness)
        with busy(args.load):
            time.sleep(5)
            print(f"{args.load} busy processes, load {os.getloadavg()[0]:.1f}, niceness {args.niceness}")
            print("page             first  picture      end   s after it was opened")
            for page in ("", *PAGES):
                viewer = asyncio.run(visit(address, page))
                end = viewer.seconds.get("finished", MOST_SECONDS)
                print(f"{page or 'overview':12}  {of_first(viewer, WORDS)} {of_first(viewer, PICTURES)} {end:8.2f}")
        before = cpu_seconds(process)
        time.sleep(args.seconds)
        alone = cpu_seconds(process)
        asyncio.run(watch(address, args.seconds))
        watched = cpu_seconds(process)
        alone, watched = (100 * spent / args.seconds for spent in (alone - before, watched - alone))
        print(f"CPU of the dashboard, % of a core: {alone:.1f} without visitors, {watched:.1f} with five")


if __name__ == "__main__":
    main()
