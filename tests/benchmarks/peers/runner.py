"""The common part of the scripts that run one engine once, in a process and an environment of its own.

    python peers/NAME.py MODEL --variant VARIANT [--workloads one_stream mixed] [--threads 2] [--converted FOLDER]
                         [--requests 64] [--prefix-caching] [--outputs] [--prepare]

Prints one line of JSON per event, and nothing else, on standard output (what the engine itself prints goes to standard
error)::

    {"event": "ready", "version": …, "load_seconds": …, …}                   loaded, and warmed up by nothing yet
    {"event": "run", "workload": …, "seconds": …, "output_tokens": …, …}     of each workload; one_stream several times;
                                                            with --outputs, also the token ids that came out
    {"event": "end"}                                        and then waits for the end of its standard input, so that
                                                            whoever reads this can look at its memory

With `--prepare` it converts the checkpoint, where the engine does not read it as it is, and ends.

Standard library only, as each engine's environment has other packages. Knows no engine.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from workload import WARM_UP_TOKENS, make_workload

del sys.path[0]  # no engine shall take a benchmark of ours for a package of that name

__all__ = ["Arguments", "Engine", "main"]


ONE_STREAM_REPEATS = 3
"""It is short, and disturbed the more easily. Not with prefix caching, which would find the prompt in its cache."""


class Arguments(argparse.Namespace):
    """The command line."""

    model: Path
    variant: str
    workloads: list[str]
    threads: int
    converted: Path
    """Folder for what is made from checkpoints."""
    requests: int
    prefix_caching: bool
    outputs: bool
    """Tell the token ids of the outputs, too."""
    prepare: bool
    settings: str
    """JSON object of further settings of the engine."""


class Engine(Protocol):
    """What a script has to bring."""

    version: str

    def generate(self, prompts: list[list[int]], output_lengths: list[int]) -> list[list[int]]:
        """Run the requests together, greedily; returns the token ids that each got."""

    def reset(self, workload: str) -> None:
        """Called before each run, the warm-up's too: empty the prefix cache if there is one.

        A run that reads what its warm-up has cached comes without it.
        """

    def close(self) -> None:
        """End what has been started."""


def main(load: Callable[[Arguments], Engine], prepare: Callable[[Arguments], None] | None = None) -> None:
    """Entry point of a script.

    Args:
        load: makes the engine ready for its first request.
        prepare: makes what `load` needs besides the checkpoint, unless it is there.
    """
    arguments = _parse()
    events = _claim_stdout()
    if arguments.prepare:
        if prepare is not None:
            arguments.converted.mkdir(parents=True, exist_ok=True)
            prepare(arguments)
        return
    start = time.perf_counter()
    engine = load(arguments)
    _tell(events, event="ready", version=engine.version, load_seconds=time.perf_counter() - start)
    try:
        for name in arguments.workloads:
            _measure(engine, name, arguments, events)
        _tell(events, event="end")
        sys.stdin.read()
    finally:
        engine.close()


def _measure(engine: Engine, name: str, arguments: Arguments, events: TextIO) -> None:
    workload = make_workload(name, arguments.requests)
    if workload.is_cached and not arguments.prefix_caching:
        raise SystemExit(f"{name} needs --prefix-caching")
    engine.reset(name)
    _generate(engine, workload.warm_up, [WARM_UP_TOKENS] * len(workload.warm_up))
    repeats = ONE_STREAM_REPEATS if name == "one_stream" and not arguments.prefix_caching else 1
    for _ in range(repeats):
        if not workload.is_cached:
            engine.reset(name)
        seconds, outputs = _generate(engine, workload.prompts, workload.output_lengths)
        _tell(
            events,
            event="run",
            workload=name,
            seconds=seconds,
            requests=len(workload.prompts),
            input_tokens=workload.num_input_tokens,
            output_tokens=workload.num_output_tokens,
            outputs=outputs if arguments.outputs else None,
        )


def _generate(engine: Engine, prompts: list[list[int]], output_lengths: list[int]) -> tuple[float, list[list[int]]]:
    start = time.perf_counter()
    outputs = engine.generate(prompts, output_lengths)
    seconds = time.perf_counter() - start
    lengths = [len(output) for output in outputs]
    if lengths != output_lengths:
        raise SystemExit(f"asked for outputs of {output_lengths} tokens, got {lengths}")
    return seconds, outputs


def _claim_stdout() -> TextIO:
    """Standard output for us alone: engines, and what they start, print to standard error from now on."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return events


def _tell(events: TextIO, **fields: object) -> None:
    print(json.dumps(fields), file=events, flush=True)


def _parse() -> Arguments:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--variant", default="")
    parser.add_argument("--workloads", nargs="+", default=["one_stream", "mixed"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--converted", type=Path, default=Path("converted"))
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prefix-caching", action="store_true")
    parser.add_argument("--outputs", action="store_true")
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--settings", default="{}")
    return parser.parse_args(namespace=Arguments())
