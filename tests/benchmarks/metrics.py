"""What the metrics cost, or the ring of ended requests, or OTLP: tokens/s through tritonserver with them and without.

    python tests/benchmarks/metrics.py [--of metrics] [--streams 32] [--tokens 128] [--requests 64] [--runs 8]
    python tests/benchmarks/metrics.py --of ended otlp

Two models with the same checkpoint stand in one server, one with what `--of` names and one without, and are given the
same load in turn, in changing order; the bar is a cost of 1%. OTLP is metrics and a trace of each request, sent to a
collector in this process. The CPU time is that of the server and of the model's own processes, per token that was
generated: where others use the machine, too, it says more than the throughput does. Of `metrics` and `otlp` it prints
first what a record takes, and an export.
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
from quire_monitoring.definitions import MetricDefinition  # noqa: E402
from quire_monitoring.otel import OtelStatLogger  # noqa: E402
from quire_monitoring.triton import TritonStatLogger  # noqa: E402
from support.clients import ask  # noqa: E402
from support.otlp import collect  # noqa: E402
from support.processes import command_line, cpu_seconds, parent  # noqa: E402
from support.serving import Server, serve  # noqa: E402
from tritonclient.grpc import aio as grpc_aio  # noqa: E402

BAR = 0.01
PARTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "metrics": ({"metrics": True}, {"metrics": False}),
    "ended": ({"ended_requests": 2000}, {"ended_requests": 0}),
    "otlp": ({"otlp_endpoint": ""}, {}),  # the collector's, once it is there
}
"""What can be measured: settings of a model with it, and without."""


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
    end = FinishedRequestStats("length", num_output_tokens=100, e2e_seconds=1.0, phases=[("queue", 0.0)])
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
        stat_logger = OtelStatLogger(collector.endpoint, labels, export_interval_seconds=0.1)
        stat_logger.start(totals)
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


def cpu_of(server: Server, model: str) -> float:
    """CPU seconds so far of tritonserver and of a model's own processes. The other model exports meanwhile, too."""
    others = [name for name in ("on", "off") if name != model]
    return cpu_seconds(*(pid for pid in server.run_id.processes() if model_of(pid) not in others))


def model_of(pid: int) -> str | None:
    """Whose stub a process is or descends from."""
    while pid > 1:
        words = command_line(pid)
        if "triton_python_backend_stub" in words:
            return next((name for name in ("on", "off") if f"/{name}/" in words), None)
        pid = parent(pid)
    return None


def write_models(folder: Path, checkpoint: str, parts: list[str], endpoint: str) -> None:
    """Both models."""
    for name, place in (("on", 0), ("off", 1)):
        version = folder / name / "1"
        version.mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text('backend: "quire"\n')
        settings = {"model": checkpoint, "kv_cache_memory_bytes": 256 << 20}
        for part in parts:
            settings |= PARTS[part][place]
        if settings.get("otlp_endpoint") == "":
            settings["otlp_endpoint"] = endpoint
        (version / "model.json").write_text(json.dumps(settings))


def take_turns(server: Server, args: argparse.Namespace) -> None:
    """Load the models in turn, then print."""
    rates: dict[str, list[float]] = {"on": [], "off": []}
    micros: dict[str, list[float]] = {"on": [], "off": []}
    for run in range(args.runs + 1):
        for name in ("on", "off") if run % 2 else ("off", "on"):
            before = cpu_of(server, name)
            rate = asyncio.run(load(server, name, args, run))
            used = cpu_of(server, name) - before
            if run:  # after a warm-up
                rates[name].append(rate)
                micros[name].append(1e6 * used / args.requests / args.tokens)
        if run:
            print(f"run {run}: on {rates['on'][-1]:.0f}, off {rates['off'][-1]:.0f} tok/s", flush=True)
    for what, unit, values in (("throughput", "tok/s", rates), ("CPU time", "µs per token", micros)):
        on, off = (statistics.median(values[name]) for name in ("on", "off"))
        costs = [cost_of(with_, without, what) for with_, without in zip(values["on"], values["off"], strict=True)]
        cost, bar = statistics.median(costs), f"bar {100 * BAR:.0f}%"
        print(f"{what:12}  {on:8.0f} {unit} with {' and '.join(args.of)}, {off:.0f} without: "
              f"cost {100 * cost:.1f}% ({bar})")  # fmt: skip


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", nargs="+", choices=list(PARTS), default=["metrics"], help="what is measured (metrics)")
    parser.add_argument("--model", default=str(ROOT / "model_repository" / "tinypy" / "1" / "model"))
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--runs", type=int, default=8)
    args = parser.parse_args()
    if "metrics" in args.of:
        measure_record(args.streams)
    if "otlp" in args.of or "metrics" in args.of:
        measure_otlp()
    with collect() as collector, tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder), args.model, args.of, collector.endpoint)
        with serve("--model-repository", folder) as server:
            take_turns(server, args)
    if "otlp" in args.of:
        print(f"the collector has got {len(collector.spans)} spans, and metrics {collector.num_exports} times")


def cost_of(with_metrics: float, without: float, what: str) -> float:
    """Which share is lost: of throughput, less is a cost; of CPU time, more is."""
    return 1 - with_metrics / without if what == "throughput" else with_metrics / without - 1


if __name__ == "__main__":
    main()
