"""What all pages share: the choice of the visitor, live refresh, charts, and error messages."""

import math
import operator
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import streamlit as st
from quire_client.snapshot import RequestState, Snapshot
from quire_client.symptoms import Level
from quire_load.scrape import ScrapeError

from quire_dashboard.charts import HEIGHT, NUMBERS, line_spec, points_table
from quire_dashboard.choice import UNSEEN, Selection, clock, selection
from quire_dashboard.events import QUERIES, Event, find_events
from quire_dashboard.history import Point
from quire_dashboard.queries import Query, latest
from quire_dashboard.settings import INTROSPECTION_TOKEN_VARIABLE, INTROSPECTION_TOKENS_VARIABLE
from quire_dashboard.watchers import monitor, monitors
from quire_dashboard.words import as_code, as_text, printable, seconds

CHARTS_S = 5.0
"""Charts of minutes and hours are redrawn less often: they are most of a refresh's cost, here and in the browser, and
look the same two seconds later."""
TOKENS = "%d tok"
"""How a table's column says a number of tokens."""
OLD_S = 30.0
"""Figures that are older are not those of now."""
_FAR = 4.0
"""A target so many times higher than all values is not drawn: it would leave a flat line at the bottom."""
_TOO_FAR = 6.0
"""A target that was drawn is removed when it is so many times higher."""
_MOST_OF_A_LABEL = 64
_MOST_EVENTS = 6
_SPARK_VALUES = 30
_MOST_DRAWINGS = 30
"""Drawings of a table in which a visitor may still choose: those of the last minute."""
_events: dict["Selection", tuple[list[list[Point]], Sequence[Event]]] = {}
"""By what is selected: what they were found in, and the events."""
_drawn: dict[tuple[tuple["Line", ...], Hashable, float], "_Drawn"] = {}
"""By what is shown: lines, server and model, and time range."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A query in a chart. With `by`, one line per value of that label, else one of this name."""

    query: Query
    name: str = ""
    by: str = ""
    hides_zero: bool = False
    """Lines that are 0 all the time are left out, and out of the legend."""


def live(render: Callable[[], None], least_s: float = 0.0) -> None:
    """Draw a part of a page, and refresh it without the rest of the page.

    Args:
        render: draws it.
        least_s: seconds between two refreshes, at least, whatever the visitor picked.
    """
    refresh_s = selection().refresh_s
    st.fragment(render, run_every=None if refresh_s is None else max(refresh_s, least_s))()


def server_away() -> bool:
    """Show an error if /metrics cannot be read. Returns True if there is nothing else to show."""
    watcher = monitor()
    if not watcher.error:
        return False
    age = watcher.seconds_since_success
    which = f" {as_code(watcher.settings.url)}:" if len(monitors()) > 1 else ""
    shown = f"There is nothing to show yet, after {seconds(watcher.seconds_away or 0.0)}."
    if age is not None:
        shown = f"What is shown is {seconds(age)} old."
    _, health = watcher.judge(selection().model)
    box = st.error if health.level is Level.CRITICAL else st.warning
    box(f"**{health.headline}**{which} {as_text(health.findings[0].detail)} {shown}", icon=":material/cloud_off:")
    return age is None


def model_or_reason() -> str:
    """The selected model; shows why if there is none."""
    model = selection().model
    if not model and not server_away():
        st.info("No model of Quire is loaded.")
    return model


def snapshot_or_reason(model: str) -> Snapshot | None:
    """The model's snapshot; shows an error if there is none."""
    if not model:
        st.info("No model of Quire is loaded.")
        return None
    seen = monitor().snapshot(model, selection().refresh_s)
    if seen.snapshot is None:
        st.warning(
            f"**The requests of {model} cannot be seen.** {as_text(seen.error)}{what_to_do(seen.error)}",
            icon=":material/visibility_off:",
        )
    return seen.snapshot


def what_to_do(error: str) -> str:
    """Markdown with the next step after a rejection; empty if none is known."""
    if "introspection_token" not in error:
        return ""
    return (
        f". Start the dashboard with `{INTROSPECTION_TOKEN_VARIABLE}` set to the token that the model was loaded with: "
        "its setting `introspection_token`, or that variable in the server's environment."
        + (f" Where servers have different ones, `{INTROSPECTION_TOKENS_VARIABLE}` has them by the server's address."
           if len(monitors()) > 1 else "")
    )  # fmt: skip


def values(query: Query) -> dict[str, float]:
    """A query's results now, of the chosen model: by line."""
    return latest(query, monitor().view(), selection().labels)


def value(query: Query) -> float | None:
    """The same of a query with one line."""
    return values(query).get("")


def request_names(requests: Sequence[RequestState]) -> list[str]:
    """Names of the requests: the client's label if there is one, and the beginning of the id.

    A client chooses the label: use `words.as_code` where Markdown is rendered.
    """
    return [
        f"{printable(request.label, _MOST_OF_A_LABEL)} ({request.id[:6]})" if request.label else request.id[:12]
        for request in requests
    ]


def chart(
    title: str, unit: str, lines: Sequence[Line], *, key: str, rules: Mapping[str, float] | None = None,
    axis: str = NUMBERS, top: float | None = None, say: Callable[[float], str] | None = None,
) -> None:  # fmt: skip
    """A chart of queries over the selected time range, below its title and present values."""
    picked = selection()
    error = ""
    try:
        found = [monitor().points(line.query, line.by, picked.labels, picked.range_s) for line in lines]
    except ScrapeError as failure:
        found, error = [], str(failure)
    drawn = _drawn_of((tuple(lines), (picked.server, picked.model), picked.range_s), found, events())
    rules = rules or {}
    near = rules if top is not None else _near(rules, drawn)
    now = " · ".join(
        filter(None, [_now(drawn, say, time.time()) if say else "", *(name for name in rules if name not in near)])
    )
    st.markdown(f"**{title}**" + (f" &nbsp; :gray[{now}]" if now else ""))
    if error:
        st.warning(as_text(error))
    elif not drawn.names:
        st.caption("Nothing in this time range.")
    else:
        if top is None and drawn.highest <= 0:
            top = 1.0  # an axis from 0 to 0 has no numbers
        spec = line_spec(unit, rules=near, axis=axis, top=top, series=drawn.names)
        # The alternative text is part of the specification: with figures in it, each refresh would draw a new chart.
        draw(drawn.table, spec, key=key, alt=title)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Drawn:
    """A chart's data, shared by all visitors until there are new points."""

    source: list[Sequence[object]]
    """The points of each line, and the events."""
    table: pa.Table
    names: Sequence[str]
    """The lines' names; empty when there is nothing to draw."""
    time: float
    """When it was made: the right end of the time axis."""
    newest: Mapping[str, Point]
    """The newest point of each line."""
    highest: float
    """The largest of all values, at least 0."""
    near: set[str]
    """Rules that were drawn the last time."""


def _near(rules: Mapping[str, float], drawn: _Drawn) -> Mapping[str, float]:
    """Rules that leave room for the lines, with hysteresis: with values around a single limit, every refresh would
    change the specification, and so draw a new chart."""
    near = {
        name: value
        for name, value in rules.items()
        if value <= drawn.highest * (_TOO_FAR if name in drawn.near else _FAR)
    }
    drawn.near.difference_update(rules)
    drawn.near.update(near)
    return near


def _drawn_of(
    what: tuple[tuple[Line, ...], Hashable, float], points_of_lines: list[list[Point]], marks: Sequence[Event] = ()
) -> _Drawn:
    """Cached by the lists of points: `Monitor.points` returns the same ones until there is something new. Without
    anything new, the time goes on all the same."""
    lines, _, range_s = what
    source: list[Sequence[object]] = [*points_of_lines, marks]
    last, now = _drawn.get(what), time.time()
    is_same = last is not None and len(last.source) == len(source) and all(map(operator.is_, last.source, source))
    if last is not None and is_same and now - last.time < CHARTS_S:
        return last
    points = [
        point if line.by else Point(point.time, line.name, point.value)
        for line, found in zip(lines, points_of_lines, strict=False)  # none if they could not be fetched
        for point in found
        if point.time >= now - range_s
    ]
    present = {point.series for point in points if not math.isnan(point.value)}
    if any(line.hides_zero for line in lines):
        present = {point.series for point in points if point.value > 0}
        points = [point for point in points if point.series in present]
    names = [line.name for line in lines] if all(not line.by for line in lines) else sorted(present)
    _drawn[what] = drawn = _Drawn(
        source=source,
        table=points_table(points, (now - range_s, now), [one for one in marks if now - range_s <= one.time <= now]),
        names=names if present else [],
        time=now,
        newest={point.series: point for point in points},
        highest=max((point.value for point in points if not math.isnan(point.value)), default=0.0),
        near=set() if last is None else last.near,
    )
    return drawn


def events() -> Sequence[Event]:
    """What happened to the selected model in the selected time range; the same list until there is something new."""
    picked = selection()
    try:
        source = [monitor().points(query, query.by, picked.labels, picked.range_s) for query in QUERIES]
    except ScrapeError:  # which the charts say
        return ()
    last = _events.get(picked)
    if last is None or not all(map(operator.is_, last[0], source)):
        start = time.time() - picked.range_s
        found = [event for event in find_events(source) if event.time >= start]
        # The same list: with another one, each refresh would send all charts anew.
        _events[picked] = last = (source, found if last is None or found != last[1] else last[1])
    return last[1]


def say_events() -> None:
    """What the vertical lines in all charts are."""
    found = list(events())
    if not found:
        return
    said = " · ".join(f"{clock(event.time, '%H:%M:%S')} {event.what}" for event in found[-_MOST_EVENTS:])
    more = f", {len(found) - _MOST_EVENTS} before" if len(found) > _MOST_EVENTS else ""
    st.caption(f"Dashed lines, {clock(found[-1].time, '%Z')}: {said}{more}")


def figures(shown: Sequence[tuple[str, str, str]], sparks: Mapping[str, Query] | None = None) -> None:
    """A row of figures: (name, value, explanation). On a phone, two in a row.

    Args:
        shown: the figures.
        sparks: by name, what is drawn below a figure, over the selected time range.
    """
    with st.container(horizontal=True, gap="small"):
        for label, value, explained in shown:
            query = (sparks or {}).get(label)
            st.metric(
                label, value, help=explained or None, width=150, chart_data=None if query is None else _spark(query)
            )


def _spark(query: Query) -> list[float] | None:
    """A value for each thirtieth of the time range but the present one, which is not over: with that, each refresh
    would draw a new line. They are rounded, since the line fills its height, and would show noise. None without any."""
    picked = selection()
    try:
        points = monitor().points(query, "", picked.labels, picked.range_s)
    except ScrapeError:
        return None
    width = picked.range_s / _SPARK_VALUES
    values = {int(point.time / width): point.value for point in points if not math.isnan(point.value)}
    values.pop(int(time.time() / width), None)
    found = [float(f"{value:.3g}") for _, value in sorted(values.items())]
    return found if len(found) > 1 else None


def draw(data: pa.Table, spec: Mapping[str, Any], *, key: str, alt: str, height: int = HEIGHT) -> None:
    """A Vega-Lite chart of the page's width."""
    st.vega_lite_chart(data, dict(spec), key=key, alt=alt, height=height, width="stretch")


def table(rows: Sequence[Mapping[str, Any]], *, key: str, columns: Mapping[str, Any] | None = None) -> None:
    """A table of rows with the same columns."""
    st.dataframe(pa.Table.from_pylist(rows), hide_index=True, key=key, column_config=columns)


def choice_table(
    rows: Sequence[Mapping[str, Any]], ids: Sequence[str], chosen: str | None, *, key: str,
    columns: Mapping[str, Any], on_choice: Callable[[str | None], None],
) -> None:  # fmt: skip
    """A table in which one row is chosen.

    The browser knows rows by their number only, and others come and go. So each drawing has a number, which the browser
    repeats with all that it says: a choice is of the rows of that drawing, and a selection that this drawing or a later
    one already had is none. The chosen one stays so until the visitor chooses another, even when its row has gone.

    Args:
        rows: with the same columns.
        ids: one per row.
        chosen: the id that is.
        key: of the table's own state in the visitor's session.
        columns: how they are shown.
        on_choice: gets the id of the visitor's choice, or None.
    """
    repeated = f"{key}-drawing"
    drawings: dict[str, tuple[Sequence[str], list[int]]] = st.session_state.setdefault(f"{key}-drawings", {})

    def note() -> None:
        rows, numbers = list(st.session_state[key].selection.rows), list(drawings)
        seen = st.session_state[repeated]
        since = numbers[numbers.index(seen) :] if seen in drawings else numbers[-1:]
        if all(rows != drawings[later][1] for later in since):
            shown = drawings[since[0]][0]
            on_choice(shown[rows[0]] if rows and rows[0] < len(shown) else None)

    picked = [row for row, id_ in enumerate(ids) if id_ == chosen]
    number = str(1 + int(next(reversed(drawings), "0")))
    drawings[number] = (ids, picked)
    if len(drawings) > _MOST_DRAWINGS:
        del drawings[next(iter(drawings))]
    st.session_state[key] = {"selection": {"rows": picked, "columns": [], "cells": []}}
    st.session_state[repeated] = number
    data = pa.Table.from_pylist(list(rows))
    st.dataframe(data, hide_index=True, key=key, column_config=columns, on_select=note, selection_mode="single-row")
    with st.container(key=f"{UNSEEN}-{key}"):
        st.text_input("Drawing", key=repeated)


def _now(drawn: _Drawn, say: Callable[[float], str], time: float) -> str:
    """The present values, in words. A line that has ended, or was not read for a while, has none."""
    names = drawn.names
    current = {
        name: point.value
        for name, point in drawn.newest.items()
        if point.time > time - OLD_S and not math.isnan(point.value)
    }
    if len(names) > 3:  # of many, those that say something
        names = [name for name in names if current.get(name)]
    return " · ".join(f"{name} {say(current[name])}".strip() for name in names if name in current)
