"""Our engine and each peer that is installed, in one run: they take turns, each time in a fresh process.

    python tests/benchmarks/compare.py [--models s60 m400] [--engines quire vllm …] [--rounds 3] [--out FOLDER]

Same checkpoint, workload, number of threads and cores for all, prefix caching off, each with the settings that are best
for it; what it runs is in workload.py, and how in peers/. Every engine runs once per round, in the opposite order in
every other round; the table has medians over the rounds, and for each peer the median of the ratios within a round
(smallest and largest in brackets), with our first engine of the same precision. An engine that cannot run a checkpoint
is passed over with a line that says why, or how to install it (peers/setup.sh). `long_context` has prefix caching on.

Writes results.json, table.md and plot.png to the folder, and the table to standard output. With all peers a round of
s60 and m400 takes about ten minutes on two cores: leave the machine alone meanwhile.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from checkpoints import HYBRIDS, PUBLISHED, SHAPES, make_checkpoint
from harness.engines import ENGINES, Engine, Job, Run, RunError, cache_folder, run, runnable
from harness.machine import describe_machine
from harness.plot import draw_rates
from harness.results import Row, make_rows, markdown_table, summary
from workload import WORKLOADS, make_workload

ROOT = Path(__file__).resolve().parents[2]


def say(line: str) -> None:
    """Progress, as it comes."""
    print(line, file=sys.stderr, flush=True)


def split_by_caching(job: Job) -> list[Job]:
    """The job without the workloads that need prefix caching, and one of these with it."""
    cached = [name for name in job.workloads if make_workload(name).is_cached]
    plain = [name for name in job.workloads if name not in cached]
    jobs = (dataclasses.replace(job, workloads=plain),
            dataclasses.replace(job, workloads=cached, prefix_caching=True))  # fmt: skip
    return [one for one in jobs if one.workloads]


def run_rounds(plan: Sequence[tuple[Job, list[Engine]]], num_rounds: int, logs: Path) -> list[Run]:
    """All runs. An engine that fails a job is left out of it from then on."""
    runs: list[Run] = []
    for number in range(num_rounds):
        for job, engines in plan:
            for engine in engines[:] if number % 2 == 0 else engines[::-1]:
                log = logs / f"{engine.name}-{job.model.name}-{job.workloads[0]}-{number}.log"
                try:
                    done = run(engine, job, log)
                except RunError as error:
                    say(str(error))
                    engines.remove(engine)
                    continue
                runs += [dataclasses.replace(one, round=number) for one in done]
                say(f"round {number + 1}/{num_rounds}  {job.model.name}  {engine.label}: {summary(done)}")
    return runs


def write_report(
    out: Path, machine: dict[str, str], tables: dict[str, list[Row]], runs: Sequence[Run], note: str
) -> str:
    """The three files; returns the Markdown."""
    head = f"{machine['processor']}, {note}, {machine['date']}"
    parts = [f"### {model}\n\n{markdown_table(rows)}" for model, rows in tables.items()]
    text = f"{head} ({machine['instructions']}; {machine['memory']}; {machine['system']})\n\n" + "\n".join(parts)
    (out / "table.md").write_text(text)
    record = {"machine": machine, "note": note, "runs": [dataclasses.asdict(one) for one in runs]}
    (out / "results.json").write_text(json.dumps(record, indent=1) + "\n")
    if any(tables.values()):
        draw_rates(tables, "Tokens per second", head, out / "plot.png")
    return text


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [engine.name for engine in ENGINES]
    parser.add_argument("--models", nargs="+", choices=[*SHAPES, *HYBRIDS, *PUBLISHED], default=["s60", "m400"])
    parser.add_argument("--engines", nargs="+", choices=names, default=names, metavar="ENGINE", help=", ".join(names))
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=["one_stream", "mixed"])
    parser.add_argument("--rounds", type=int, default=3, help="0 converts checkpoints only")
    parser.add_argument("--requests", type=int, default=64, help="of the workloads with many; fewer for a quick look")
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--prefix-caching", action="store_true", help="on, for all (shared_prefix)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="a further setting of ours")
    parser.add_argument("--cache", type=Path, default=cache_folder(), help="of checkpoints ($QUIRE_BENCH_CACHE)")
    parser.add_argument(
        "--peers", type=Path, default=os.environ.get("QUIRE_BENCH_PEERS"), help="environments ($QUIRE_BENCH_PEERS)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "benchmarks")
    return parser.parse_args()


def main() -> None:
    """Entry point."""
    arguments = parse()
    logs = arguments.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    # Every engine sees as many cores as it is given threads.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    settings = {name: json.loads(value) for name, _, value in (item.partition("=") for item in arguments.set)}
    jobs = [
        Job(
            model=make_checkpoint(name, arguments.cache / "checkpoints"),
            workloads=arguments.workloads,
            cache=arguments.cache,
            peers=arguments.peers or arguments.cache / "peers",
            threads=arguments.threads,
            requests=arguments.requests,
            prefix_caching=arguments.prefix_caching,
            settings=settings,
        )
        for name in arguments.models
    ]
    engines = [engine for engine in ENGINES if engine.name in arguments.engines]
    plan = []
    for job in jobs:
        found = runnable(engines, job, logs, say)
        plan += [(one, list(found)) for one in split_by_caching(job)]
    runs = run_rounds(plan, arguments.rounds, logs)
    tables = {job.model.name: make_rows(engines, runs, job.model.name) for job in jobs}
    note = f"{arguments.threads} threads, {arguments.requests} requests, medians of {arguments.rounds} rounds"
    print(write_report(arguments.out, describe_machine(), tables, runs, note))
    say(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
