"""Our engine offline: tokens per second, time until it is ready, memory, and what prefix caching gains.

    python tests/benchmarks/offline.py [--models m400] [--rounds 3] [--set NAME=JSON] [--json FILE]

Packed weights are mapped from a file; `--set 'weight_cache_dir=""'` packs them at each start.
Each measurement is a fresh process; the kinds take turns, and medians are printed. The memory is that of the process
tree at its peak, in a run whose KV cache is so small that the workload fills all of it (an untouched page of a larger
one is no memory yet); what is above weights and KV cache is the engine's own (goal: at most 300 MB). The shared-prefix
workload runs with prefix caching on and off (goal: at least 3 times as fast).
"""

import argparse
import dataclasses
import json
import math
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from checkpoints import SHAPES, make_checkpoint
from harness.checkpoint_size import kv_bytes_per_token, weight_bytes
from harness.engines import ENGINES, Engine, Job, Run, cache_folder, run, runnable
from harness.machine import describe_machine
from harness.results import summary
from workload import make_workload

ROOT = Path(__file__).resolve().parents[2]
FILLED_SHARE = 0.85
"""KV cache of the run that measures memory, as a share of all tokens of the workload: every block is used then."""


def kinds_of_run(job: Job) -> dict[str, Job]:
    """What is measured in each round."""
    tokens = make_workload("mixed", job.requests)
    kv_tokens = FILLED_SHARE * (tokens.num_input_tokens + tokens.num_output_tokens)
    kv_cache_bytes = math.ceil(kv_tokens) * kv_bytes_per_token(job.model)
    small = {**job.settings, "kv_cache_memory_bytes": kv_cache_bytes}
    return {
        "speed": dataclasses.replace(job, workloads=["one_stream", "mixed"]),
        "memory": dataclasses.replace(job, workloads=["mixed"], settings=small),
        "prefix caching off": dataclasses.replace(job, workloads=["shared_prefix"]),
        "prefix caching on": dataclasses.replace(job, workloads=["shared_prefix"], prefix_caching=True),
    }


def measure(engine: Engine, kinds: dict[str, Job], num_rounds: int, logs: Path) -> dict[str, list[Run]]:
    """The runs of each kind."""
    runs: dict[str, list[Run]] = {kind: [] for kind in kinds}
    for number in range(num_rounds):
        for kind, job in kinds.items():
            log = logs / f"{engine.name}-{job.model.name}-{kind.replace(' ', '-')}-{number}.log"
            done = [dataclasses.replace(one, round=number) for one in run(engine, job, log)]
            runs[kind] += done
            print(f"round {number + 1}/{num_rounds}  {engine.label}, {job.model.name}, {kind}: {summary(done)}",
                  file=sys.stderr, flush=True)  # fmt: skip
    return runs


def describe(engine: Engine, kinds: dict[str, Job], runs: dict[str, list[Run]]) -> list[str]:
    """Lines for people."""
    speed, job = runs["speed"], kinds["memory"]

    def rate(of: Sequence[Run], workload: str) -> float:
        return statistics.median(one.rate for one in of if one.workload == workload)

    off = {one.round: one.rate for one in runs["prefix caching off"]}
    gain = statistics.median(one.rate / off[one.round] for one in runs["prefix caching on"])
    peak = statistics.median(one.peak_memory_bytes for one in runs["memory"])
    weights = weight_bytes(job.model, quantized=engine.precision == "int8")
    kv_cache = int(job.settings["kv_cache_memory_bytes"])
    ready = statistics.median(one.ready_seconds for one in speed)
    load = statistics.median(one.load_seconds for one in speed)
    mib = 2**20
    return [
        f"{engine.label}, {job.model.name}, {job.threads} threads",
        f"  {job.requests} requests        {rate(speed, 'mixed'):8.1f} tok/s",
        f"  one stream         {rate(speed, 'one_stream'):8.1f} tok/s",
        f"  ready              {ready:8.1f} s   after its process was started; {load:.1f} s of it in LLM()",
        f"  memory             {(peak - weights - kv_cache) / mib:8.0f} MiB above weights ({weights / mib:.0f}) and "
        f"KV cache ({kv_cache / mib:.0f}); {peak / mib:.0f} at the peak",
        f"  shared prefix      {gain:8.2f} times as fast with prefix caching: "
        f"{rate(runs['prefix caching on'], 'shared_prefix'):.1f} tok/s, {statistics.median(off.values()):.1f} without",
    ]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["m400"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="a further setting")
    parser.add_argument("--cache", type=Path, default=cache_folder(), help="of checkpoints ($QUIRE_BENCH_CACHE)")
    parser.add_argument("--json", type=Path, help="file for all runs")
    arguments = parser.parse_args()
    logs = ROOT / "build" / "benchmarks" / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    settings = {name: json.loads(value) for name, _, value in (item.partition("=") for item in arguments.set)}
    record = []
    for name in arguments.models:
        job = Job(
            model=make_checkpoint(name, arguments.cache / "checkpoints"), workloads=["mixed"], cache=arguments.cache,
            peers=arguments.cache, threads=arguments.threads, requests=arguments.requests, settings=settings,
        )  # fmt: skip
        kinds = kinds_of_run(job)
        ours = [engine for engine in ENGINES if engine.peer is None and engine.precision != "int4"]
        for engine in runnable(ours, job, logs, lambda reason: print(f"passed over: {reason}", file=sys.stderr)):
            runs = measure(engine, kinds, arguments.rounds, logs)
            print("\n".join(describe(engine, kinds, runs)), flush=True)
            record += [{"kind": kind, **dataclasses.asdict(one)} for kind, done in runs.items() for one in done]
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": describe_machine(), "runs": record}, indent=1) + "\n")


if __name__ == "__main__":
    main()
