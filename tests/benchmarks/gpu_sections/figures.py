"""What a section measures, with the bars that it is held to, and how that is written down."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Figure", "Goal", "as_markdown", "at_least", "at_most", "figure_from"]

DIGITS = {"%": 0, "x": 2}
"""Behind the point, by unit; 1 for others."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A value that a figure is to reach."""

    value: float
    at_least: bool

    def is_met(self, value: float) -> bool:
        """Whether a figure reaches it."""
        return value >= self.value if self.at_least else value <= self.value


def at_least(value: float) -> Goal:
    """The more, the better."""
    return Goal(value=value, at_least=True)


def at_most(value: float) -> Goal:
    """The less, the better."""
    return Goal(value=value, at_least=False)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One line of the table."""

    name: str
    value: float
    unit: str
    note: str = ""
    bar: Goal | None = None
    """What it must reach."""
    aim: Goal | None = None
    """What it should reach."""

    @property
    def cells(self) -> list[str]:
        """Name, value, bar, aim and note, for people."""
        return [self.name, self._written(self.value), self._judged(self.bar), self._judged(self.aim), self.note]

    @property
    def line(self) -> str:
        """All of it in one line of text, without what is empty."""
        name, value, bar, aim, note = self.cells
        goals = [f"{kind} {goal}" for kind, goal in (("bar", bar), ("aim", aim)) if goal]
        return f"  {name:58} {value:>14}  " + "  ".join([*goals, note])

    def _written(self, value: float) -> str:
        space = "" if self.unit in DIGITS else " "
        return f"{value:,.{DIGITS.get(self.unit, 1)}f}{space}{self.unit}"

    def _judged(self, goal: Goal | None) -> str:
        if goal is None:
            return ""
        verdict = "met" if goal.is_met(self.value) else "missed"
        return f"{'≥' if goal.at_least else '≤'} {self._written(goal.value)} {verdict}"


def figure_from(fields: Mapping[str, Any]) -> Figure:
    """What `dataclasses.asdict` made of a figure."""
    goals = {name: Goal(**fields[name]) for name in ("bar", "aim") if fields[name] is not None}
    return dataclasses.replace(Figure(**fields), **goals)


def as_markdown(title: str, figures: Iterable[Figure], error: str) -> list[str]:
    """Lines of a section: its table, and why it has ended early if it has."""
    lines = [f"## {title}", "", "| what | figure | bar | aim | |", "| --- | ---: | --- | --- | --- |"]
    lines += ["| " + " | ".join(figure.cells) + " |" for figure in figures]
    return [*lines, *(["", f"**{error}**"] if error else []), ""]
