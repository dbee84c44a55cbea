"""Charts as Vega-Lite specifications.

A specification holds no data: it stays the same from one refresh to the next, so that the browser only replaces the
points and nothing flickers.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import pyarrow as pa
from quire_client.snapshot import RequestState

from quire_dashboard.events import EVENT_COLOURS, Event
from quire_dashboard.history import Point

HEIGHT = 220
PHASE_COLOURS = {
    "encode": "#2fa37c", "held": "#a56eff", "queue": "#878d96", "prefill": "#cc7a1e", "decode": "#3b82d6",
    "preempted": "#d64545", "replayed": "#a07a00",
}  # fmt: skip
SERIES_COLOURS = ["#3b82d6", "#cc7a1e", "#2fa37c", "#a05bd6", "#d64545", "#2a93b5", "#a67c3d", "#878d96"]
"""Each is seen on a light page and on a dark one, as are those of events."""
_TIME: dict[str, Any] = {
    "field": "time", "type": "temporal", "title": None, "scale": {"nice": False},
    "axis": {"format": "%H:%M:%S", "labelOverlap": True, "tickCount": 6, "grid": False},
}  # fmt: skip
_IS_POINT = "isValid(datum.series)"
_SPAN: dict[str, Any] = {
    "mark": {"type": "rule", "opacity": 0, "tooltip": None},
    "transform": [{"filter": f"!{_IS_POINT}"}],
    "encoding": {"x": _TIME},
}
"""Draws nothing, and has the time axis reach over the two rows without a series."""
_EVENTS: dict[str, Any] = {
    "mark": {"type": "rule", "strokeWidth": 2, "strokeDash": [3, 3]},
    "transform": [{"filter": "isValid(datum.event)"}],
    "encoding": {
        "x": _TIME,
        "color": {
            "condition": [
                {"test": f"datum.event === '{what}'", "value": colour} for what, colour in EVENT_COLOURS.items()
            ],
            "value": "#878d96",
        },
        "tooltip": [
            {"field": "time", "type": "temporal", "title": "time", "format": "%H:%M:%S"},
            {"field": "event", "type": "nominal"},
        ],
    },
}  # fmt: skip
"""A vertical line for each event."""

NUMBERS = "datum.value && abs(datum.value) < 1 ? format(datum.value, '.3~g') : format(datum.value, '.3~s')"
SECONDS = (
    "datum.value === 0 ? '0' : datum.value < 0.001 ? format(1e6 * datum.value, '.4~g') + ' µs' : "
    "datum.value < 1 ? format(1000 * datum.value, '.4~g') + ' ms' : format(datum.value, '.4~g') + ' s'"
)
SHARES = "format(datum.value, '.0%')"


def points_table(points: Sequence[Point], span: tuple[float, float], events: Sequence[Event] = ()) -> pa.Table:
    """Points as columns `time`, `series`, `value` and `event`, in the form that is sent to the browser.

    An Arrow table: Streamlit would convert anything else by pandas, at ten times the cost.
    """
    return chart_table(
        [point.time for point in points], [point.series for point in points], [point.value for point in points], span,
        events,
    )  # fmt: skip


def chart_table(
    times: Sequence[float], series: Sequence[str], values: Sequence[float], span: tuple[float, float],
    events: Sequence[Event] = (),
) -> pa.Table:  # fmt: skip
    """The same from columns; the times are seconds since the epoch, and a value of nan ends a line.

    Args:
        times: of each point.
        series: of each point.
        values: of each point.
        span: what the time axis shows, from when to when. It travels as two rows without a series, since as a part of
            the specification it would have the browser draw a new chart with every refresh.
        events: within the span; rows without a series, too.
    """
    others = [None] * (len(span) + len(events))
    marks = [event.time for event in events]
    milliseconds = pa.array([int(1000 * time) for time in (*times, *span, *marks)], pa.int64())
    return pa.table({
        "time": milliseconds.cast(pa.timestamp("ms", "UTC")),
        "series": pa.array([*series, *others], pa.string()),
        "value": pa.array([*(None if math.isnan(value) else value for value in values), *others], pa.float64()),
        "event": pa.array([None] * (len(times) + len(span)) + [event.what for event in events], pa.string()),
    })  # fmt: skip


def line_spec(
    unit: str, *, rules: Mapping[str, float] | None = None, axis: str = NUMBERS, top: float | None = None,
    series: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Lines over time.

    Args:
        unit: title of the y axis.
        rules: dashed horizontal lines, such as a target, by what they are.
        axis: how the y axis says its numbers: `NUMBERS`, `SECONDS` or `SHARES`.
        top: fixed upper end of the y axis.
        series: fixes the order, and so the colours, of the lines.
    """
    rules = rules or {}
    names = [*series, *rules] if series else []
    colour: dict[str, Any] = {
        "field": "series", "type": "nominal", "title": None, "legend": {"orient": "bottom", "columns": 4},
        "scale": {"range": SERIES_COLOURS, **({"domain": names} if names else {})},
    }  # fmt: skip
    y: dict[str, Any] = {"field": "value", "type": "quantitative", "title": unit, "axis": {"labelExpr": axis}}
    if top is not None:
        y["scale"] = {"domain": [0, top], "clamp": True}
    tooltip = [
        {"field": "time", "type": "temporal", "title": "time", "format": "%H:%M:%S"},
        {"field": "series", "type": "nominal", "title": "line"},
        {"field": "value", "type": "quantitative", "title": unit, "format": ".4~g"},
    ]
    layers: list[dict[str, Any]] = [
        {
            "mark": {"type": "line", "clip": True, "strokeWidth": 2, "strokeCap": "round", "point": False},
            "transform": [{"filter": _IS_POINT}],
            "encoding": {"x": _TIME, "y": y, "color": colour, "tooltip": tooltip},
        },
        _SPAN,
        _EVENTS,
    ]
    for name, value in rules.items():
        layers.append(
            {
                "mark": {"type": "rule", "strokeDash": [6, 4], "strokeWidth": 1.5, "clip": True},
                "encoding": {"y": {"datum": value, "type": "quantitative"}, "color": {"datum": name}},
            }
        )
    return {"layer": layers}


def stacked_spec(unit: str, series: Sequence[str]) -> dict[str, Any]:
    """Areas over time, one on the other; the first of `series` is at the bottom."""
    areas = {
        "mark": {"type": "area", "opacity": 0.8, "interpolate": "step-after", "clip": True},
        "transform": [{"filter": _IS_POINT}],
        "encoding": {
            "x": _TIME,
            "y": {
                "field": "value", "type": "quantitative", "title": unit, "stack": "zero",
                "axis": {"labelExpr": NUMBERS},
            },
            "color": {
                "field": "series", "type": "nominal", "title": None, "legend": {"orient": "bottom"},
                "scale": {"domain": list(series), "range": SERIES_COLOURS},
            },
            "tooltip": [{"field": "series"}, {"field": "value", "type": "quantitative", "format": ".4~g"}],
        },
    }  # fmt: skip
    return {"layer": [areas, _SPAN, _EVENTS]}


def timeline_spec(until: str = "now") -> dict[str, Any]:
    """One bar per request, cut by phase; at the right is `until`."""
    return {
        "mark": {"type": "bar", "height": {"band": 0.7}, "clip": True},
        "encoding": {
            "x": {
                "field": "start", "type": "quantitative", "title": f"seconds before {until}", "scale": {"nice": False},
            },
            "x2": {"field": "end"},
            "y": {
                "field": "request", "type": "nominal", "title": None, "sort": None,
                "axis": {"labelLimit": 110, "labelOverlap": False},
            },
            "color": {
                "field": "phase", "type": "nominal", "title": None, "legend": {"orient": "bottom", "columns": 2},
                "scale": {"domain": list(PHASE_COLOURS), "range": list(PHASE_COLOURS.values())},
            },
            "tooltip": [
                {"field": "request"}, {"field": "phase"},
                {"field": "duration", "type": "quantitative", "title": "seconds", "format": ".3f"},
            ],
        },
    }  # fmt: skip


def phases_table(name: str, phases: Iterable[tuple[str, float]]) -> pa.Table:
    """The data of `timeline_spec` for one request that has ended: its phases and their seconds, in order."""
    found = list(phases)
    times = [*accumulate((seconds for _, seconds in found), initial=-sum(seconds for _, seconds in found))]
    return _bars((name, phase, *span) for (phase, _), span in zip(found, pairwise(times), strict=True))


def timeline_table(requests: Iterable[RequestState], names: Mapping[str, str]) -> pa.Table:
    """The data of `timeline_spec`; `names` gives each request's id the name it is shown by."""
    return _bars(
        (names[request.id], segment.phase, -segment.start_age, -segment.end_age)
        for request in requests
        for segment in request.segments()
    )


def _bars(rows: Iterable[tuple[str, str, float, float]]) -> pa.Table:
    """A row for each bar: request, phase, start and end."""
    found = [(*row, row[3] - row[2]) for row in rows]
    kinds = zip(_BAR_COLUMNS, (pa.string(), pa.string(), *[pa.float64()] * 3), strict=True)
    return pa.table([[row[place] for row in found] for place in range(len(_BAR_COLUMNS))], schema=pa.schema(kinds))


_BAR_COLUMNS = ("request", "phase", "start", "end", "duration")
