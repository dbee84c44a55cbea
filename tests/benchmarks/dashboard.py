"""What the dashboard costs the engine: tokens/s of 32 streams with nobody looking, and with every page open.

    python tests/benchmarks/dashboard.py [--streams 32] [--seconds 10] [--runs 8] [--set NAME=JSON]

A real `quire serve` with its dashboard is under a steady load. Windows in which nobody looks and windows in which seven
visitors do, one on each page, take turns; the bar is a cost of 2%. A visitor here is what a browser's tab says and
hears, without the drawing: that happens on the visitor's own machine (`tests/support/viewer.py`). On a machine that
others use as well, throughput says little; the CPU seconds of each process, per second, still compare.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support.clients import ask  # noqa: E402
from support.processes import children, cpu_seconds_by_name  # noqa: E402
from support.serving import Server, serve  # noqa: E402
from support.viewer import Viewer  # noqa: E402
from tritonclient.grpc import aio as grpc_aio  # noqa: E402

BAR = 0.02
PAGES = ("", "kv-cache", "requests", "ended", "engine", "playground", "load")
PROCESSES = {
    "quire_engine.core.core_process": "engine",
    "python_backend_stub": "stub",
    "bin/tritonserver": "tritonserver",
    "streamlit": "dashboard",
}
SERVER = ("engine", "stub", "tritonserver")
SETTLE_S = 3.0
"""What opening a page costs is not what watching it does."""
SLO = {"default": {"ttft_ms": 2000, "tpot_ms": 100, "e2e_ms": 20000}, "batch": {"e2e_ms": 60000}}


@dataclass
class Load:
    """So many streams that each send one request after the other; no two prompts are alike."""

    server: Server
    streams: int
    tokens_per_answer: int
    num_tokens: int = 0
    """Received so far."""
    _tasks: list["asyncio.Task[None]"] = field(default_factory=list)

    async def __aenter__(self) -> "Load":
        numbers = itertools.count()
        self._tasks = [asyncio.create_task(self._stream(numbers)) for _ in range(self.streams)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def check(self) -> None:
        """Raise what a stream raised."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def _stream(self, numbers: Iterator[int]) -> None:
        params = {"temperature": 0.0, "max_tokens": self.tokens_per_answer, "ignore_eos": True}
        async with grpc_aio.InferenceServerClient(self.server.grpc) as client:
            while True:
                answer = await ask(
                    client, model="bench", outputs=["text_output", "num_output_tokens"], on_response=self._count,
                    text_input=f"# {next(numbers)}\ndef function(a, b):\n", stream=True, return_num_output_tokens=True,
                    **params,
                )  # fmt: skip
                assert answer.text

    def _count(self, response: dict[str, list[Any]]) -> None:
        self.num_tokens += sum(response.get("num_output_tokens", ()))


@dataclass
class Window:
    """What was measured while nobody looked, or everybody."""

    rate: float
    """Tokens per second."""
    cpu: Counter[str]
    """CPU seconds per second, by process."""


def cpu_seconds(server: Server) -> Counter[str]:
    """CPU time so far, by process; the dashboard is a child of `quire serve`, and no part of the run."""
    return cpu_seconds_by_name({*server.run_id.processes(), *children(server.process.pid)}, PROCESSES)


async def measure(load: Load, seconds: float) -> Window:
    """One window."""
    before, tokens, start = cpu_seconds(load.server), load.num_tokens, time.perf_counter()
    await asyncio.sleep(seconds)
    elapsed = time.perf_counter() - start
    used = cpu_seconds(load.server)
    load.check()
    rate = (load.num_tokens - tokens) / elapsed
    return Window(rate, Counter({name: (used[name] - before[name]) / elapsed for name in used}))


async def measure_watched(load: Load, seconds: float) -> tuple[Window, list[Viewer]]:
    """One window with every page open."""
    viewers = [Viewer(load.server.dashboard, page) for page in PAGES]
    until = time.monotonic() + SETTLE_S + seconds
    watching = asyncio.gather(*(viewer.watch(until) for viewer in viewers))
    await asyncio.sleep(SETTLE_S)
    window = await measure(load, seconds)
    await watching
    for viewer in viewers:
        assert viewer.elements, f"the page {viewer.page!r} shows nothing"
        assert not viewer.elements["exception"], f"the page {viewer.page!r} has failed"
    return window, viewers


async def compare(server: Server, args: argparse.Namespace) -> None:
    """Take turns, then print."""
    alone, watched = [], []
    async with Load(server, args.streams, args.tokens) as load:
        await asyncio.sleep(args.warm_up)
        for run in range(args.runs):
            for turn in (0, 1) if run % 2 else (1, 0):
                if turn:
                    window, viewers = await measure_watched(load, args.seconds)
                    watched.append(window)
                else:
                    await asyncio.sleep(SETTLE_S)
                    alone.append(await measure(load, args.seconds))
            cost = 1 - watched[-1].rate / alone[-1].rate
            print(f"run {run + 1}: alone {alone[-1].rate:.0f}, watched {watched[-1].rate:.0f} tok/s, cost {cost:+.1%}",
                  flush=True)  # fmt: skip
    report(alone, watched)
    kilobytes = sum(viewer.num_bytes for viewer in viewers) / 1024 / (args.seconds + SETTLE_S)
    intervals = sorted({viewer.interval_s for viewer in viewers if viewer.interval_s})
    refreshes = sum(viewer.num_refreshes for viewer in viewers) / (args.seconds + SETTLE_S)
    print(f"the pages    refresh every {', '.join(f'{seconds:g}' for seconds in intervals)} s; "
          f"{refreshes:.1f} parts and {kilobytes:.0f} KiB per second")  # fmt: skip


def report(alone: list[Window], watched: list[Window]) -> None:
    """Medians, and what the difference is."""
    rates = [statistics.median(window.rate for window in windows) for windows in (alone, watched)]
    costs = [1 - after.rate / before.rate for before, after in zip(alone, watched, strict=True)]
    print(f"throughput   alone {rates[0]:.0f}, watched {rates[1]:.0f} tok/s: ratio {rates[1] / rates[0]:.3f}, "
          f"median cost of a pair {statistics.median(costs):+.1%} (bar {BAR:.0%})")  # fmt: skip
    print("CPU          % of a core, alone and watched; µs per token of the server alone")
    for name in ("engine", "stub", "tritonserver", "dashboard", "client"):
        shares = [100 * statistics.median(window.cpu[name] for window in windows) for windows in (alone, watched)]
        per_token = [1e6 * statistics.median(window.cpu[name] / window.rate for window in windows)
                     for windows in (alone, watched)]  # fmt: skip
        print(f"  {name:12} {shares[0]:6.1f}% {shares[1]:6.1f}%   {per_token[0]:7.1f} {per_token[1]:7.1f} µs per token")
    micros = [1e6 * statistics.median(sum(window.cpu[name] for name in SERVER) / window.rate for window in windows)
              for windows in (alone, watched)]  # fmt: skip
    print(f"  the server together {micros[0]:.1f} and {micros[1]:.1f} µs per token: {micros[1] / micros[0] - 1:+.1%}")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "model_repository" / "tinypy" / "1" / "model"))
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a window")
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--warm-up", type=float, default=10.0, help="seconds of load before the first window")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="a setting of model.json")
    args = parser.parse_args()
    settings: dict[str, Any] = {"model": str(Path(args.model).resolve()), "dtype": "float32", "slo": SLO,
                                "max_num_seqs": args.streams, "kv_cache_memory_bytes": 256 * 2**20}  # fmt: skip
    settings |= {name: json.loads(value) for name, _, value in (item.partition("=") for item in args.set)}
    with tempfile.TemporaryDirectory() as folder:
        version = Path(folder) / "bench" / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text('backend: "quire"\n')
        (version / "model.json").write_text(json.dumps(settings))
        with serve("--model-repository", folder, "--dashboard", "--dashboard-port", "0") as server:
            assert server.dashboard, server.log()
            asyncio.run(compare(server, args))


if __name__ == "__main__":
    main()
