"""Queries of the charts. Each line is defined once, and computed in two ways: by Prometheus, or from our own history.

Both give the same, except for Prometheus' extrapolation to the ends of its window. All are sums over the engines
(data-parallel replicas) and versions of one model.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from quire_load.scrape import quantile

from quire_dashboard.history import Point, View

MOST_POINTS = 150
WINDOW_S = 60.0
"""Window of rates and quantiles, at least."""
GAP_S = 15.0
"""Between two readings; after a longer time without any, what was in between is not known."""


class Query(Protocol):
    """One line of a chart, or one per value of a label."""

    def promql(self, labels: Mapping[str, str], window_s: float) -> str:
        """The query in PromQL."""

    def values(self, view: View, labels: Mapping[str, str], first: int, last: int) -> dict[str, float]:
        """Value per line at reading `last`; rates and quantiles look back to reading `first`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gauge:
    """A present value."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()
    by: str = ""
    """Label with one line per value; empty: one line."""
    how: str = "sum"
    """Over engines: `sum`, `max`, `min` or `avg`."""

    def promql(self, labels: Mapping[str, str], window_s: float) -> str:
        return f"{self.how}{_by(self.by)}({self.name}{selector({**labels, **dict(self.labels)})})"

    def values(self, view: View, labels: Mapping[str, str], first: int, last: int) -> dict[str, float]:
        groups: dict[str, list[float]] = defaultdict(list)
        for own, column in view.columns(self.name, {**labels, **dict(self.labels)}):
            value = view.at(column, last)
            if not math.isnan(value):
                groups[own.get(self.by, "")].append(value)
        return {series: _AGGREGATE[self.how](values) for series, values in groups.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """How fast a counter grows, per second."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()
    by: str = ""
    among: tuple[str, tuple[str, ...]] | None = None
    """A label, and the values of it that count; None: all."""

    def promql(self, labels: Mapping[str, str], window_s: float) -> str:
        picked = selector({**labels, **dict(self.labels)})
        if self.among is not None:
            label, values = self.among
            picked = f'{picked[:-1]}{"," if len(picked) > 2 else ""}{label}=~"{"|".join(values)}"}}'
        return f"sum{_by(self.by)}(rate({self.name}{picked}[{window_s:.0f}s]))"

    def values(self, view: View, labels: Mapping[str, str], first: int, last: int) -> dict[str, float]:
        seconds = view.times[last] - view.times[first]
        if seconds <= 0:
            return {}
        return {series: grown / seconds for series, grown in self.increases(view, labels, first, last).items()}

    def increases(self, view: View, labels: Mapping[str, str], first: int, last: int) -> dict[str, float]:
        """How much it grew."""
        groups: dict[str, float] = defaultdict(float)
        for own, column in view.columns(self.name, {**labels, **dict(self.labels)}):
            if self.among is None or own.get(self.among[0]) in self.among[1]:
                groups[own.get(self.by, "")] += view.increase(column, first, last)
        return dict(groups)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """Growth of one counter per growth of another; nothing where the latter does not grow."""

    part: Rate
    whole: Rate
    plus: float = 0.0
    """Added to it."""

    def promql(self, labels: Mapping[str, str], window_s: float) -> str:
        ratio = f"{self.part.promql(labels, window_s)} / ({self.whole.promql(labels, window_s)} > 0)"
        return f"{self.plus:g} + {ratio}" if self.plus else ratio

    def values(self, view: View, labels: Mapping[str, str], first: int, last: int) -> dict[str, float]:
        whole = self.whole.increases(view, labels, first, last)
        part = self.part.increases(view, labels, first, last)
        return {series: self.plus + part.get(series, 0.0) / total for series, total in whole.items() if total > 0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantile:
    """A quantile of a histogram over the window."""

    name: str
    """Without `_bucket`."""
    q: float
    labels: tuple[tuple[str, str], ...] = ()
    by: str = ""

    def promql(self, labels: Mapping[str, str], window_s: float) -> str:
        picked = selector({**labels, **dict(self.labels)})
        by = f"le, {self.by}" if self.by else "le"
        return f"histogram_quantile({self.q}, sum by ({by}) (rate({self.name}_bucket{picked}[{window_s:.0f}s])))"

    def values(self, view: View, labels: Mapping[str, str], first: int, last: int) -> dict[str, float]:
        groups: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
        for own, column in view.columns(f"{self.name}_bucket", {**labels, **dict(self.labels)}):
            groups[own.get(self.by, "")][float(own["le"])] += view.increase(column, first, last)
        found = {series: quantile(self.q, buckets.items()) for series, buckets in groups.items()}
        return {series: value for series, value in found.items() if value is not None}


def selector(labels: Mapping[str, str]) -> str:
    """`{a="b",…}`, with the labels' values escaped."""
    escaped = {
        name: value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") for name, value in labels.items()
    }
    return "{" + ",".join(f'{name}="{value}"' for name, value in sorted(escaped.items())) + "}"


def evaluate(
    query: Query, view: View, labels: Mapping[str, str], range_s: float, known: dict[tuple[int, int], list[Point]]
) -> list[Point]:
    """A query over the last `range_s` seconds of the own history, at no more than about `MOST_POINTS` moments.

    ::

        readings   r0  r1  r2  r3  r4  r5  r6  r7  r8        at a stride of 3
        moments    r0          r3          r6      r8        those that 3 divides, and the newest

    A moment is identified by the number of its reading, so that it stays the same when the next reading comes: its
    result is reused, and a refresh computes the newest moment and hardly any other.

    Args:
        query: what to compute.
        view: the history.
        labels: of the series.
        range_s: how far to look back.
        known: results of earlier calls with the same query, labels and range; empty at first. It is updated.
    """
    if not view.times:
        return []
    newest = len(view.times) - 1
    start = view.row_at(view.times[-1] - range_s)
    stride = max(1, (newest + 1 - start) // MOST_POINTS)
    found: dict[tuple[int, int], list[Point]] = {}
    for row in range(start, newest + 1):
        number = view.first + row
        if number % stride and row != newest:
            continue
        points = known.get((stride, number))
        if points is None:
            points = _points_at(query, view, labels, row, stride)
        found[stride, number] = points
    known.clear()
    known.update(found)
    return _with_ends(view, [(number - view.first, points) for (_, number), points in found.items()])


def _with_ends(view: View, moments: Iterable[tuple[int, Sequence[Point]]]) -> list[Point]:
    """All points, and where a line has no value for a while, or nothing was read, one that ends it."""
    points: list[Point] = []
    before, going = 0, set[str]()
    for row, found in moments:
        hole = next((r for r in range(before + 1, row + 1) if view.times[r] - view.times[r - 1] > GAP_S), None)
        present = {point.series for point in found}
        ends = sorted(going) if hole is not None else sorted(going - present)
        time = view.times[row] if hole is None else (view.times[hole - 1] + view.times[hole]) / 2
        points += [Point(time, series, math.nan) for series in ends]
        points += found
        before, going = row, present
    return points


def _points_at(query: Query, view: View, labels: Mapping[str, str], row: int, stride: int) -> list[Point]:
    time = view.times[row]
    window = max(WINDOW_S, time - view.times[max(0, row - stride)])
    values = query.values(view, labels, view.row_at(time - window), row)
    return [Point(time, series, value) for series, value in values.items()]


def latest(query: Query, view: View, labels: Mapping[str, str], window_s: float = WINDOW_S) -> dict[str, float]:
    """The present result of a query, per line."""
    if not view.times:
        return {}
    last = len(view.times) - 1
    return query.values(view, labels, view.row_at(view.times[last] - window_s), last)


def _by(label: str) -> str:
    return f" by ({label}) " if label else ""


_AGGREGATE: Mapping[str, Callable[[list[float]], float]] = {
    "sum": sum,
    "max": max,
    "min": min,
    "avg": lambda values: sum(values) / len(values),
}
