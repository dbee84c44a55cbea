"""What drafting from the text so far gains in other engines, next to ours: one stream, each run a process of its own.

Nobody else's text can be forced, so this takes a checkpoint whose own greedy text is in its prompt: m400-walk, and the
workload `copying` (see checkpoints.py and workload.py). Every token that comes out is known beforehand.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .drafting import count_differing
from .engines import ENGINES, Engine, Job, Run, RunError, run, runnable
from .results import Spread, spread

__all__ = ["Lookup", "LookupRun", "lookup_table", "lookups", "run_lookups"]

NUM_SPECULATIVE_TOKENS = 7
NGRAM_SIZE = 3
PEERS: dict[str, dict[str, dict[str, Any]]] = {
    "llamacpp": {
        "ngram-simple": {
            "spec-type": "ngram-simple",
            "spec-ngram-simple-size-n": NGRAM_SIZE,
            "spec-ngram-simple-size-m": NUM_SPECULATIVE_TOKENS,
        },
        "ngram-cache": {"spec-type": "ngram-cache", "spec-draft-n-max": NUM_SPECULATIVE_TOKENS},
    },
    "openvino": {
        "prompt lookup": {
            "prompt_lookup": True,
            "num_assistant_tokens": NUM_SPECULATIVE_TOKENS,
            "max_ngram_size": NGRAM_SIZE,
        },
    },
}
"""By the peer's environment: its ways of drafting, and their settings. The defaults of llama.cpp's ngram-simple, 12
tokens looked up and 48 drafted, are for longer copies than these."""


@dataclass(frozen=True)
class Lookup:
    """One engine with one way of drafting."""

    label: str
    off: Engine
    on: Engine


@dataclass(frozen=True)
class LookupRun:
    """What an engine did with the prompt and its copy."""

    engine: str
    version: str
    round: int
    prompt_seconds: float
    seconds: float
    """Of prompt and output."""
    output: list[int]

    @property
    def rate(self) -> float:
        """Tokens per second after the first."""
        return (len(self.output) - 1) / (self.seconds - self.prompt_seconds)


def lookups(precisions: Sequence[str], methods: dict[str, dict[str, Any]]) -> list[Lookup]:
    """Ours and every peer's, of these precisions.

    Args:
        precisions: of `bf16` and `int8`.
        methods: ours: name → `speculative_config`.
    """
    found = []
    for engine in ENGINES:
        if engine.precision not in precisions:
            continue
        if engine.peer is None:
            ways = {name: {"speculative_config": config} for name, config in methods.items()}
        else:
            ways = PEERS.get(engine.peer, {})
        for way, settings in ways.items():
            on = replace(engine, name=f"{engine.name}-{way.replace(' ', '-')}", settings=settings)
            found.append(Lookup(f"{engine.label}, {way}", engine, on))
    return found


def run_lookups(
    wanted: Sequence[Lookup], job: Job, num_rounds: int, logs: Path, say: Callable[[str], None]
) -> list[LookupRun]:
    """All runs. In each round every engine runs once, in every other round in the opposite order.

    Args:
        wanted: those of peers that are not installed are passed over.
        job: with the workloads `copying` and `copying_prompt`, and with outputs.
        logs: folder for what the engines print.
        say: gets lines about progress and about what is passed over.
    """
    engines = {engine.name: engine for lookup in wanted for engine in (lookup.off, lookup.on)}
    ready = runnable(engines.values(), job, logs, say)
    runs = []
    for number in range(num_rounds):
        for engine in ready if number % 2 == 0 else ready[::-1]:
            try:
                done = run(engine, job, logs / f"{engine.name}-{number}.log")
            except RunError as error:
                say(str(error))
                continue
            runs.append(_lookup_run(done, number))
            say(f"round {number + 1}/{num_rounds}  {engine.name}: {runs[-1].rate:.1f} tok/s")
    return runs


def _lookup_run(runs: Sequence[Run], number: int) -> LookupRun:
    by_workload = {run.workload: run for run in runs}
    whole, prompt = by_workload["copying"], by_workload["copying_prompt"]
    assert whole.outputs is not None
    return LookupRun(whole.engine, whole.version, number, prompt.seconds, whole.seconds, whole.outputs[0])


def lookup_table(wanted: Sequence[Lookup], runs: Sequence[LookupRun], expected: Sequence[int]) -> str:
    """Markdown: a line for each engine and way that ran, and whose it is.

    Args:
        wanted: in this order.
        runs: of all of them.
        expected: the tokens that every engine is to say.
    """
    lines = [
        "| engine | version | off, tok/s | on, tok/s | on ÷ off | with prompt | on and off differ | not the walk's |",
        "| --- | --- |" + " ---: |" * 6,
    ]
    for lookup in wanted:
        off = {run.round: run for run in runs if run.engine == lookup.off.name}
        on = {run.round: run for run in runs if run.engine == lookup.on.name}
        rounds = sorted(off.keys() & on.keys())
        if not rounds:
            continue
        pairs = [(off[number], on[number]) for number in rounds]
        differing = sum(count_differing([one.output], [other.output]) for one, other in pairs)
        wrong = sum(count_differing([expected], [run.output]) for pair in pairs for run in pair)
        ratio = spread(b.rate / a.rate for a, b in pairs)
        with_prompt = spread(a.seconds / b.seconds for a, b in pairs)
        lines.append(
            f"| {lookup.label} | {pairs[0][0].version} | {_median(a.rate for a, _ in pairs):,.1f} "
            f"| {_median(b.rate for _, b in pairs):,.1f} | {as_text(ratio)} | {with_prompt.median:.2f} "
            f"| {differing} | {wrong} |"
        )
    return "\n".join(lines) + "\n"


def as_text(ratio: Spread) -> str:
    """Median [smallest, largest]."""
    return f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def _median(values: Any) -> float:
    return spread(values).median
