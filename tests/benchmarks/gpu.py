"""What the engine and its kernels reach of what a GPU can do, in one command of less than ten minutes.

    python tests/benchmarks/gpu.py [--only decode steps] [--output FILE.md] [--json FILE] [--smoke]

Each section runs in a process of its own and has its own time, so that none takes another's GPU memory, or its result
by failing; what a section has measured when its time is up counts. The roofline comes first, whatever is asked for:

    roofline     copy bandwidth (bytes read and bytes written), read bandwidth, rate of a bf16 product
    decode       paged attention, one token per sequence: bytes of keys and values by time, next to the copy
    prefill      paged attention over whole prompts, next to torch's scaled_dot_product_attention
    splits       one long sequence among short ones, a short suffix, a mixed step; other constants of the decode kernel
    steps        decode steps of dummies of 1B and 8B, by the time that reading weights and KV cache takes
    throughput   offline, next to transformers' continuous batching
    switches     what CUDA graphs and scheduling one step ahead gain, and what top-p costs
    ops          RoPE and cache write, norms, SiLU · mul, sampling, linears: next to the least that they have to move

Exit codes: 0 all was measured, whether a bar was met or not, or there is no GPU; 1 a section failed or was stopped.
`--smoke` runs everything on tiny shapes, also without a GPU; its figures mean nothing.
"""

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpu_sections import engine, kernels
from gpu_sections.bench import Bench, Roofline
from gpu_sections.figures import Figure, as_markdown, figure_from
from harness.machine import describe_machine

TOTAL_SECONDS = 550
"""What a section has left, the next ones may take; the last have what remains."""
MARK = "@gpu "
"""Begins the lines of a section's process that are not for people."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """Something to measure, and how long that may take."""

    title: str
    seconds: float
    measure: Callable[[Bench], Iterator[Figure | Roofline]]


SECTIONS = {
    "roofline": Section(title="The machine", seconds=45, measure=kernels.measure_roofline),
    "decode": Section(
        title="Paged attention: decode, of the copy bandwidth", seconds=75, measure=kernels.measure_decode
    ),
    "prefill": Section(title="Paged attention: prefill", seconds=60, measure=kernels.measure_prefill),
    "splits": Section(title="Paged attention: uneven work", seconds=75, measure=kernels.measure_splits),
    "steps": Section(title="Decode steps", seconds=150, measure=engine.measure_steps),
    "throughput": Section(title="Offline throughput", seconds=150, measure=engine.measure_throughput),
    "switches": Section(title="CUDA graphs, scheduling ahead, top-p", seconds=120, measure=engine.measure_switches),
    "ops": Section(title="Other kernels, of their floor", seconds=90, measure=kernels.measure_ops),
}


@dataclass
class Result:
    """What became of a section."""

    figures: list[Figure] = field(default_factory=list)
    roofline: Roofline | None = None
    error: str = ""

    def take(self, item: Figure | Roofline) -> None:
        """Keep what was measured, and show it."""
        if isinstance(item, Roofline):
            self.roofline = item
        else:
            self.figures.append(item)
            print(item.line, flush=True)


def run_here(name: str, bench: Bench) -> Result:
    """Run a section in this process."""
    result = Result()
    try:
        for item in SECTIONS[name].measure(bench):
            result.take(item)
    except Exception as error:  # the other sections go on
        traceback.print_exc()
        result.error = f"failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return result


def run_apart(name: str, bench: Bench, seconds: float) -> Result:
    """Run a section in a process of its own, and end that when the time is up."""
    roofline = None if bench.roofline is None else dataclasses.asdict(bench.roofline)
    command = [sys.executable, __file__, "--section", name, json.dumps(roofline), *["--smoke"] * bench.is_smoke]
    result, is_late = Result(error="failed: its process ended early"), threading.Event()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None

        def stop() -> None:
            is_late.set()
            os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(seconds, stop)
        timer.start()
        try:
            for line in process.stdout:
                if not line.startswith(MARK):
                    print(line, end="", flush=True)
                    continue
                kind, value = json.loads(line.removeprefix(MARK))
                if kind == "end":
                    result.error = value
                else:
                    result.take(figure_from(value) if kind == "Figure" else Roofline(**value))
        finally:
            timer.cancel()
    if is_late.is_set():
        result.error = f"stopped after its {seconds:.0f} s"
    return result


def serve_section(name: str, bench: Bench) -> None:
    """The other side of `run_apart`: say what is measured, line by line."""

    def tell(kind: str, value: Any) -> None:
        print(MARK + json.dumps([kind, value]), flush=True)

    error = ""
    try:
        for item in SECTIONS[name].measure(bench):
            tell(type(item).__name__, dataclasses.asdict(item))
    except Exception as problem:
        traceback.print_exc()
        error = f"failed: {type(problem).__name__}: {str(problem).partition(chr(10))[0]}"
    tell("end", error)


def describe() -> dict[str, str]:
    """The machine, its GPU and its libraries."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    return describe_machine() | {"gpu": gpu, "libraries": versions}


def measure(names: list[str], is_smoke: bool, is_apart: bool) -> dict[str, Result]:
    """All of these sections, in order, after the roofline."""
    end = time.monotonic() + TOTAL_SECONDS
    bench = Bench(is_smoke=is_smoke)
    results: dict[str, Result] = {}
    for name in ["roofline", *(name for name in SECTIONS if name in names and name != "roofline")]:
        section, start = SECTIONS[name], time.monotonic()
        print(f"{section.title} ({name})", flush=True)
        seconds = min(section.seconds, end - start)
        results[name] = run_apart(name, bench, seconds) if is_apart else run_here(name, bench)
        bench = dataclasses.replace(bench, roofline=results[name].roofline or bench.roofline)
        print(f"  {results[name].error or 'done'}, {time.monotonic() - start:.0f} s", flush=True)
    return results


def save(results: dict[str, Result], output: Path | None, as_json: Path | None) -> None:
    """Write the tables and the numbers."""
    machine = describe()
    if output:
        lines = ["# Figures of a GPU", "", *(f"- {name}: {value}" for name, value in machine.items()), ""]
        for name, result in results.items():
            lines += as_markdown(SECTIONS[name].title, result.figures, result.error)
        output.write_text("\n".join(lines))
    if as_json:
        sections = {name: dataclasses.asdict(result) for name, result in results.items()}
        as_json.write_text(json.dumps({"machine": machine, "sections": sections}, indent=1) + "\n")


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--output", type=Path, help="file for the tables, in Markdown")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, to see that everything runs")
    parser.add_argument("--in-process", action="store_true", help="all sections in this process, without time limits")
    parser.add_argument("--section", nargs=2, metavar=("NAME", "ROOFLINE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not (arguments.smoke or torch.cuda.is_available()):
        print("gpu.py: passed over, there is no GPU; --smoke runs it nevertheless, on tiny shapes")
        return 0
    if arguments.section:
        name, roofline = arguments.section[0], json.loads(arguments.section[1])
        serve_section(name, Bench(is_smoke=arguments.smoke, roofline=roofline and Roofline(**roofline)))
        return 0
    results = measure(arguments.only, arguments.smoke, not arguments.in_process)
    save(results, arguments.output, arguments.json)
    return int(any(result.error for result in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
