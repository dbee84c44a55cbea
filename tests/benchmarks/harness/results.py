"""From runs to a table: medians, and ratios of runs of the same round.

A shared machine drifts by more over hours than engines differ, so that figures of different hours do not compare. In
each round every engine runs once; a ratio is taken within each round, and the median of these is what is quoted.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .engines import Engine, Run

__all__ = [
    "Row",
    "Spread",
    "make_rows",
    "markdown_table",
    "our_ratio",
    "rates_by_round",
    "spread",
    "summary",
    "workload_title",
]


@dataclass(frozen=True)
class Spread:
    """Several measurements of the same."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """One engine's figures for one model."""

    label: str
    version: str
    precision: str
    is_ours: bool
    rates: dict[str, Spread]
    """Tokens per second, by the workload's title."""
    ratios: dict[str, Spread]
    """Our first engine of the same precision ÷ this one, by the workload's title; empty without one, and for itself."""
    ready_seconds: float
    peak_memory_bytes: float


def workload_title(workload: str, num_requests: int) -> str:
    """For people."""
    titles = {
        "mixed": f"{num_requests} requests",
        "one_stream": "one stream",
        "long_prompts": "prompts of 2,048",
        "long_context": f"{num_requests} streams behind 3,000",
    }
    return titles.get(workload, f"{workload.replace('_', ' ')}, {num_requests} requests")


def spread(values: Iterable[float]) -> Spread:
    """Median, smallest, largest."""
    numbers = list(values)
    return Spread(statistics.median(numbers), min(numbers), max(numbers))


def rates_by_round(runs: Iterable[Run], engine: str, workload: str) -> dict[int, float]:
    """Output tokens per second of one engine in each round; the median where it ran several times in it."""
    rounds: dict[int, list[float]] = {}
    for run in runs:
        if (run.engine, run.workload) == (engine, workload):
            rounds.setdefault(run.round, []).append(run.rate)
    return {number: statistics.median(rates) for number, rates in rounds.items()}


def summary(runs: Iterable[Run]) -> str:
    """Of the runs of one process, as part of a line."""
    rates: dict[str, list[float]] = {}
    for run in runs:
        rates.setdefault(workload_title(run.workload, run.requests), []).append(run.rate)
    return ", ".join(f"{title} {statistics.median(values):,.0f} tok/s" for title, values in rates.items())


def our_ratio(runs: Sequence[Run], ours: str, theirs: str, workload: str) -> Spread | None:
    """How many times as fast ours is, by rounds in which both ran; None without one."""
    our_rates, their_rates = rates_by_round(runs, ours, workload), rates_by_round(runs, theirs, workload)
    ratios = [our_rates[number] / their_rates[number] for number in our_rates.keys() & their_rates.keys()]
    return spread(ratios) if ratios else None


def make_rows(engines: Iterable[Engine], runs: Sequence[Run], model: str) -> list[Row]:
    """A row for each engine that ran the model, in the engines' order."""
    engines = list(engines)
    of_model = [run for run in runs if run.model == model]
    ran = {run.engine for run in of_model}
    ours: dict[str, str] = {}
    for engine in engines:
        if engine.peer is None and engine.name in ran:
            ours.setdefault(engine.precision, engine.name)
    rows = []
    for engine in engines:
        own = [run for run in of_model if run.engine == engine.name]
        if not own:
            continue
        titles = {run.workload: workload_title(run.workload, run.requests) for run in own}
        ratios = {}
        if ours.get(engine.precision, engine.name) != engine.name:
            for workload, title in titles.items():
                ratio = our_ratio(of_model, ours[engine.precision], engine.name, workload)
                if ratio is not None:
                    ratios[title] = ratio
        rows.append(
            Row(
                label=engine.label,
                version=own[0].version,
                precision=engine.precision,
                is_ours=engine.peer is None,
                rates={
                    title: spread(rates_by_round(own, engine.name, workload).values())
                    for workload, title in titles.items()
                },
                ratios=ratios,
                ready_seconds=statistics.median(run.ready_seconds for run in own),
                peak_memory_bytes=statistics.median(run.peak_memory_bytes for run in own),
            )
        )
    return rows


def markdown_table(rows: Sequence[Row]) -> str:
    """The rows as Markdown; ratios above 1 say that ours is faster."""
    titles = list(dict.fromkeys(title for row in rows for title in row.rates))
    head = ["engine", "version", *(cell for title in titles for cell in (f"{title}, tok/s", "ours ÷ it"))]
    lines = [[*head, "ready in", "peak memory"], ["---"] * 2 + ["---:"] * (2 * len(titles) + 2)]
    for row in rows:
        cells = [f"**{row.label}**" if row.is_ours else row.label, row.version]
        for title in titles:
            cells += [_rate(row.rates.get(title)), _ratio(row.ratios.get(title), row.is_ours)]
        lines.append([*cells, f"{row.ready_seconds:.1f} s", f"{row.peak_memory_bytes / 2**20:,.0f} MiB"])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def _rate(rate: Spread | None) -> str:
    return "-" if rate is None else f"{rate.median:,.0f}"


def _ratio(ratio: Spread | None, is_ours: bool) -> str:
    if ratio is None:
        return "1" if is_ours else "-"
    return f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
