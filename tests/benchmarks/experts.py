"""A mixture of experts: tokens per second with one stream and with many, next to others and to the machine's limits.

    python tests/benchmarks/experts.py [--engines quire quire-int8 transformers llamacpp] [--rounds 3] [--json FILE]

Each measurement is a fresh process; the engines take turns, and medians are printed, with ours divided by theirs in
the same round. Engines of setup.sh that are not installed are passed over, but for transformers, which is here as well.

The share of the roofline is of what a decode step has to read: all weights but those of experts that no token has
chosen. Of one stream these are exactly `num_experts_per_tok` experts in each layer; of many, those that as many tokens
hit if each expert is as likely, which with random weights is nearly so.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
from pathlib import Path

from checkpoints import MIXTURES, make_checkpoint
from harness.checkpoint_size import bytes_of_a_step
from harness.engines import ENGINES, Engine, Job, Run, cache_folder, find_peer, run, runnable
from harness.machine import describe_machine
from harness.results import summary, workload_title
from harness.roofline import measure_ceilings

ROOT = Path(__file__).resolve().parents[2]
WORKLOADS = ("one_stream", "mixed")
NAMES = ("quire", "quire-int8", "transformers", "llamacpp")


def chosen_engines(names: list[str], job: Job, logs: Path) -> list[Engine]:
    """Those that can be run here, and have what they need besides the checkpoint."""
    engines = []
    for engine in (engine for name in names for engine in ENGINES if engine.name == name):
        if engine.peer == "transformers" and find_peer(job.peers, engine.peer):
            engine = dataclasses.replace(engine, peer=None)
        engines.append(engine)
    return runnable(engines, job, logs, lambda reason: print(f"passed over: {reason}", file=sys.stderr))


def measure(engines: list[Engine], job: Job, num_rounds: int, logs: Path) -> dict[str, list[Run]]:
    """The runs of each engine."""
    runs: dict[str, list[Run]] = {}
    for number in range(num_rounds):
        for engine in engines:
            done = run(engine, job, logs / f"{engine.name}-{job.model.name}-experts-{number}.log")
            runs.setdefault(engine.name, []).extend(dataclasses.replace(one, round=number) for one in done)
            print(f"round {number + 1}/{num_rounds}  {engine.label}: {summary(done)}", file=sys.stderr, flush=True)
    return runs


def describe(engines: list[Engine], runs: dict[str, list[Run]], job: Job, bytes_per_second: float) -> list[str]:
    """Lines for people."""
    lines = [f"{job.model.name}, {job.threads} threads, memory {bytes_per_second / 1e9:.1f} GB/s"]
    for engine in engines:
        ours = "quire-int8" if engine.precision == "int8" else "quire"
        for workload in WORKLOADS:
            by_round: dict[str, dict[int, float]] = {ours: {}, engine.name: {}}
            for name, rates in by_round.items():
                for one in (one for one in runs.get(name, []) if one.workload == workload):
                    rates[one.round] = max(rates.get(one.round, 0.0), one.rate)
            rate = statistics.median(by_round[engine.name].values())
            line = f"  {engine.label:28} {workload_title(workload, job.requests):14} {rate:8.1f} tok/s"
            if ours == engine.name:
                batch = 1 if workload == "one_stream" else job.requests
                least = bytes_of_a_step(job.model, batch, engine.precision == "int8") / bytes_per_second
                line += f"  {100 * rate * least / batch:5.1f}% of the roofline of a decode step"
            elif by_round[ours]:
                ratios = [by_round[ours][i] / rate for i, rate in by_round[engine.name].items()]
                line += f"  ours is {statistics.median(ratios):.2f} times as fast"
            lines.append(line)
    return lines


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MIXTURES), default="e1b")
    parser.add_argument("--engines", nargs="+", choices=[engine.name for engine in ENGINES], default=list(NAMES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--cache", type=Path, default=cache_folder(), help="of checkpoints ($QUIRE_BENCH_CACHE)")
    parser.add_argument("--peers", type=Path, help="of other engines' environments; unset: in the cache")
    parser.add_argument("--json", type=Path, help="file for all runs")
    arguments = parser.parse_args()
    logs = ROOT / "build" / "benchmarks" / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    peers = arguments.peers or Path(os.environ.get("QUIRE_BENCH_PEERS") or arguments.cache / "peers")
    job = Job(
        model=make_checkpoint(arguments.model, arguments.cache / "checkpoints"), workloads=WORKLOADS,
        cache=arguments.cache, peers=peers, threads=arguments.threads, requests=arguments.requests,
    )  # fmt: skip
    engines = chosen_engines(arguments.engines, job, logs)
    bytes_per_second = measure_ceilings().bytes_per_second
    runs = measure(engines, job, arguments.rounds, logs)
    print("\n".join(describe(engines, runs, job, bytes_per_second)), flush=True)
    if arguments.json:
        record = [dataclasses.asdict(one) for done in runs.values() for one in done]
        arguments.json.write_text(json.dumps({"machine": describe_machine(), "runs": record}, indent=1) + "\n")


if __name__ == "__main__":
    main()
