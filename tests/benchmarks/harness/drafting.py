"""What drafts gain: one batch of one engine, and the figures of many of these in turn."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire_engine import LLM, SamplingParams
from quire_engine.stats import DraftStats

from .forced_text import ForcedTexts
from .results import Spread, spread
from .texts import Task

__all__ = [
    "FIRST_SEED",
    "Batch",
    "Cell",
    "Figures",
    "count_differing",
    "count_wrong",
    "judge",
    "run_batch",
    "table",
    "way_name",
]

FIRST_SEED = 2**40
"""Far from the seed 0 of requests that have none."""
GAINS = {"suffix": 2.5, "ngram": 1.8}
"""Bars for one stream of `copy`."""
NEVER_BELOW = 0.97
"""Bar for the model's own text that nothing can be drafted from."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What an engine did with some tasks."""

    prompt_seconds: float
    """To compute the prompts, and a first token of each, or few."""
    seconds: float
    """To generate, with the prompts in the prefix cache: but for the few tokens of each that fill no block, this is
    decoding alone."""
    outputs: list[list[int]]
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    process: int = 0
    """In which this was: its number."""


def run_batch(
    llm: LLM,
    texts: ForcedTexts,
    tasks: Sequence[Task],
    num_tokens: int,
    *,
    temperature: float = 0.0,
    first: int = 1,
    num_first_tokens: int = 1,
    first_seed: int = FIRST_SEED,
    process: int = 0,
) -> Batch:
    """Carry out tasks all at once.

    Args:
        llm: with prefix caching.
        texts: of this engine.
        tasks: those with a text get it forced.
        num_tokens: length of each output.
        temperature: of the tasks.
        first: prompts that are computed one by one, before the others, which share blocks with them.
        num_first_tokens: that are generated with the prompts, before decoding is timed.
        first_seed: that of the first task; each has the next one. Random weights say nearly the same to any prompt with
            the same seed, so other tasks of the same engine should have others.
        process: this one's number.
    """
    texts.clear()
    prompts = [{"prompt_token_ids": task.prompt} for task in tasks]
    seeds = range(first_seed, first_seed + len(tasks))
    for seed, task in zip(seeds, tasks, strict=True):
        if task.text is not None:
            texts.add(seed, len(task.prompt), task.text)

    def params(max_tokens: int) -> list[SamplingParams]:
        return [
            SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
            for seed in seeds
        ]

    start = time.perf_counter()
    for prompt, own in zip(prompts[:first], params(num_first_tokens)[:first], strict=True):
        llm.generate([prompt], own, use_tqdm=False)
    if prompts[first:]:
        llm.generate(prompts[first:], params(num_first_tokens)[first:], use_tqdm=False)
    prompt_seconds = time.perf_counter() - start
    before = llm.get_stats().drafts or DraftStats()
    start = time.perf_counter()
    outputs = llm.generate(prompts, params(num_tokens), use_tqdm=False)
    seconds = time.perf_counter() - start
    after = llm.get_stats().drafts or DraftStats()
    for output in outputs:
        if output.error is not None:
            raise RuntimeError(f"a request failed: {output.error}")
    return Batch(
        prompt_seconds=prompt_seconds,
        seconds=seconds,
        outputs=[list(output.outputs[0].token_ids) for output in outputs],
        num_drafts=after.num_drafts - before.num_drafts,
        num_draft_tokens=after.num_draft_tokens - before.num_draft_tokens,
        num_accepted_tokens=after.num_accepted_tokens - before.num_accepted_tokens,
        process=process,
    )


def count_differing(outputs: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> int:
    """Positions at which two lists of outputs do not have the same token; missing ones count."""
    return sum(
        abs(len(own) - len(other)) + sum(a != b for a, b in zip(own, other, strict=False))
        for own, other in zip(outputs, others, strict=True)
    )


@dataclass(frozen=True, order=True)
class Cell:
    """What one line of the table is about."""

    model: str
    quantization: str
    workload: str
    streams: int
    method: str
    acceptance: str = "exact"
    """Of drafts by a model; `rejection` samples other tokens."""

    @property
    def way(self) -> str:
        """See `way_name`."""
        return way_name(self.method, self.acceptance)


@dataclass
class Figures:
    """Of one cell: a pair of batches of each round."""

    off: list[Batch] = field(default_factory=list)
    on: list[Batch] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Of one batch."""
        return sum(map(len, self.off[0].outputs))

    @property
    def off_rate(self) -> float:
        """Output tokens per second without drafts, median."""
        return spread(self.num_tokens / batch.seconds for batch in self.off).median

    @property
    def on_rate(self) -> float:
        """With drafts."""
        return spread(self.num_tokens / batch.seconds for batch in self.on).median

    def add(self, more: "Figures") -> None:
        """Take in those of another process."""
        self.off += more.off
        self.on += more.on

    @property
    def ratio(self) -> Spread:
        """How many times as fast it is with drafts: by rounds, or by processes if there were several, each with the
        median of its rounds."""
        return self._spread(lambda batch: batch.seconds)

    @property
    def ratio_with_prompt(self) -> Spread:
        """The same, if the prompts are to be computed, too."""
        return self._spread(lambda batch: batch.prompt_seconds + batch.seconds)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens that a step yields for a request with a draft, mean; None if there was no draft."""
        drafts = sum(batch.num_drafts for batch in self.on)
        return 1 + sum(batch.num_accepted_tokens for batch in self.on) / drafts if drafts else None

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a step yields for a request, with a draft or without, mean: all but the accepted drafts come
        from a step of their own."""
        accepted = sum(batch.num_accepted_tokens for batch in self.on)
        total = self.num_tokens * len(self.on)
        return total / (total - accepted)

    @property
    def num_differing(self) -> int:
        """Tokens that are not the same with drafts and without, of all rounds."""
        return sum(count_differing(off.outputs, on.outputs) for off, on in zip(self.off, self.on, strict=True))

    def _spread(self, seconds: Callable[[Batch], float]) -> Spread:
        rounds: dict[int, list[float]] = {}
        for off, on in zip(self.off, self.on, strict=True):
            rounds.setdefault(off.process, []).append(seconds(off) / seconds(on))
        if len(rounds) == 1:
            return spread(*rounds.values())
        return spread(spread(own).median for own in rounds.values())


def way_name(method: str, acceptance: str) -> str:
    """The method, and how its drafts are accepted if not exactly."""
    return method if acceptance == "exact" else f"{method}, {acceptance}"


def count_wrong(figures: dict[Cell, Figures]) -> int:
    """Tokens that are not the same with drafts and without, of the cells in which they should be."""
    return sum(own.num_differing for cell, own in figures.items() if cell.acceptance == "exact")


def table(figures: dict[Cell, Figures]) -> str:
    """The figures of one model and quantization as Markdown."""
    head = "| workload | streams | method | off, tok/s | on, tok/s | on ÷ off | with prompt | acceptance length |"
    lines = [f"{head} tokens per step | differing |", "| --- | ---: | --- |" + " ---: |" * 7]
    for cell, own in figures.items():
        length = own.acceptance_length
        ratio = own.ratio
        differing = own.num_differing if cell.acceptance == "exact" else "-"
        lines.append(
            f"| {cell.workload} | {cell.streams} | {cell.way} | {own.off_rate:,.1f} | {own.on_rate:,.1f} "
            f"| {ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}] | {own.ratio_with_prompt.median:.2f} "
            f"| {'-' if length is None else f'{length:.2f}'} | {own.tokens_per_step:.2f} | {differing} |"
        )
    return "\n".join(lines) + "\n"


def judge(figures: dict[Cell, Figures]) -> list[str]:
    """A line for each bar and cell that it is for: the median ratio meets it or not."""
    lines = []
    for cell, own in figures.items():
        bar = None
        if cell.workload == "copy" and cell.streams == 1:
            bar = GAINS.get(cell.method)
        elif cell.workload in ("random", "greedy"):
            bar = NEVER_BELOW
        if bar is not None:
            verdict = "met" if own.ratio.median >= bar else "MISSED"
            lines.append(
                f"{verdict}: {cell.way}, {cell.model} {cell.quantization}, {cell.workload}, streams {cell.streams}: "
                f"{own.ratio.median:.2f}, at least {bar}"
            )
    return lines
