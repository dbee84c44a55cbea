"""What the metrics cost: tokens/s through tritonserver with them and without, and the round trips that they take.

    python tests/benchmarks/metrics.py [--streams 32] [--tokens 128] [--requests 64] [--runs 8]

Two models with the same checkpoint stand in one server, one with the setting `metrics` off, and are given the same
load in turn, in changing order; the bar is a cost of 1%. The CPU time is that of all processes of the server, per token
that was generated: where others use the machine, too, it says more than the throughput does.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from quire_engine.stats import FinishedRequestStats, IterationStats, SchedulerStats, StepStats  # noqa: E402
from quire_monitoring import MetricDefinition, TritonStatLogger  # noqa: E402
from quire_monitoring.otel import OtelStatLogger  # noqa: E402
from support.clients import ask  # noqa: E402
from support.otlp import collect  # noqa: E402
from support.processes import cpu_seconds  # noqa: E402
from support.serving import Server, serve  # noqa: E402
from tritonclient.grpc import aio as grpc_aio  # noqa: E402

BAR = 0.01


class CountingFamily:
    """A server whose metrics cost nothing, and are counted."""

    num_calls = 0

    def Metric(self, labels: dict[str, str], buckets: list[float] | None = None) -> Any:  # noqa: N802
        return self

    def set(self, value: float) -> None:
        CountingFamily.num_calls += 1

    increment = observe = set


def measure_record(streams: int) -> None:
    """Microseconds of the output path per step, and round trips per second of a busy engine."""

    def make_family(definition: MetricDefinition) -> CountingFamily:
        return CountingFamily()

    stat_logger = TritonStatLogger(make_family, {"model": "m", "version": "1", "engine": "0"})
    stat_logger.start(lambda: True)
    end = FinishedRequestStats("length", num_output_tokens=100, e2e_seconds=1.0, queue_seconds=0.1)
    num_steps, seconds, started = 0, 0.0, time.perf_counter()
    while time.perf_counter() - started < 3.0:
        iteration = IterationStats(inter_token_seconds=[0.005] * streams, num_generation_tokens=streams,
                                   step=StepStats(1e-4, 5e-3, 1e-4, streams, streams),
                                   finished_requests=[end] if num_steps % 4 == 0 else [])  # fmt: skip
        stats = SchedulerStats(num_running=streams, num_blocks_used=num_steps % 100, prefix_cache_queries=num_steps)
        before = time.perf_counter()
        stat_logger.record(stats, iteration)
        seconds += time.perf_counter() - before
        num_steps += 1
        time.sleep(0.005)
    elapsed = time.perf_counter() - started
    stat_logger.stop()
    print(f"record        {1e6 * seconds / num_steps:8.1f} µs per step of {streams} tokens")
    print(f"round trips   {CountingFamily.num_calls / elapsed:8.0f} /s, with {num_steps / 4 / elapsed:.0f} requests/s")


def measure_otlp() -> None:
    """CPU time of one export of all metrics, at a receiver in this process."""
    labels = {"model": "m", "version": "1", "engine": "0"}
    with collect() as collector:
        totals = TritonStatLogger(lambda definition: None, labels).totals()
        stat_logger = OtelStatLogger(collector.endpoint, labels, totals, export_interval_seconds=0.1)
        stat_logger.start()
        collector.wait_for(lambda: collector.num_exports > 2)  # it is connected
        exports, seconds = collector.num_exports, time.process_time()
        collector.wait_for(lambda: collector.num_exports >= exports + 30)
        seconds = (time.process_time() - seconds) / (collector.num_exports - exports)
        stat_logger.stop()
    print(f"OTLP          {1e3 * seconds:8.1f} ms per export, {seconds / 10:.2%} of a core at one in 10 s")


async def load(server: Server, model: str, args: argparse.Namespace, run: int) -> float:
    """Tokens/s of so many requests, so many at a time."""
    params = {"temperature": 0.0, "max_tokens": args.tokens, "ignore_eos": True}
    room = asyncio.Semaphore(args.streams)
    async with grpc_aio.InferenceServerClient(server.grpc) as client:

        async def one(i: int) -> None:
            async with room:
                prompt = f"# {run}.{i}\ndef function_{i}(a, b):\n"
                answer = await ask(
                    client, model=model, outputs=["text_output"], text_input=prompt, stream=True, **params
                )
                assert answer.text

        started = time.perf_counter()
        await asyncio.gather(*(one(i) for i in range(args.requests)))
        return args.requests * args.tokens / (time.perf_counter() - started)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "model_repository" / "tinypy" / "1" / "model"))
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--runs", type=int, default=8)
    args = parser.parse_args()
    measure_record(args.streams)
    measure_otlp()
    rates: dict[str, list[float]] = {"on": [], "off": []}
    micros: dict[str, list[float]] = {"on": [], "off": []}
    with tempfile.TemporaryDirectory() as folder:
        for name in rates:
            version = Path(folder) / name / "1"
            version.mkdir(parents=True)
            (Path(folder) / name / "config.pbtxt").write_text('backend: "quire"\n')
            settings = {"model": args.model, "kv_cache_memory_bytes": 256 << 20, "metrics": name == "on"}
            (version / "model.json").write_text(json.dumps(settings))
        with serve("--model-repository", folder) as server:
            for run in range(args.runs + 1):
                for name in ("on", "off") if run % 2 else ("off", "on"):
                    # Of all processes of the server: an idle model adds next to nothing.
                    before = cpu_seconds(*server.run_id.processes())
                    rate = asyncio.run(load(server, name, args, run))
                    used = cpu_seconds(*server.run_id.processes()) - before
                    if run:  # after a warm-up
                        rates[name].append(rate)
                        micros[name].append(1e6 * used / args.requests / args.tokens)
                if run:
                    print(f"run {run}: on {rates['on'][-1]:.0f}, off {rates['off'][-1]:.0f} tok/s", flush=True)
    for what, unit, values in (("throughput", "tok/s", rates), ("CPU time", "µs per token", micros)):
        on, off = (statistics.median(values[name]) for name in ("on", "off"))
        costs = [cost_of(with_, without, what) for with_, without in zip(values["on"], values["off"], strict=True)]
        cost, bar = statistics.median(costs), f"bar {100 * BAR:.0f}%"
        print(f"{what:12}  {on:8.0f} {unit} with metrics, {off:.0f} without: cost {100 * cost:.1f}% ({bar})")


def cost_of(with_metrics: float, without: float, what: str) -> float:
    """Which share is lost: of throughput, less is a cost; of CPU time, more is."""
    return 1 - with_metrics / without if what == "throughput" else with_metrics / without - 1


if __name__ == "__main__":
    main()
