"""Events that are marked in the charts, found in points."""

import math

from quire_dashboard.events import ENGINE_RESTARTED, SERVER_RESTARTED, STORM, Event, find_events
from quire_dashboard.history import Point


def line(*values: float) -> list[Point]:
    return [Point(float(time), "", value) for time, value in enumerate(values)]


def found(**lines: list[Point]) -> list[tuple[float, str]]:
    names = ("restarts", "starts", "preemptions", "requests")
    return [(event.time, event.what) for event in find_events([lines.get(name, []) for name in names])]


def test_restarts_are_where_the_counter_grew() -> None:
    assert found(restarts=line(2, 2, 3, 3, math.nan, 5, 0, 1)) == [
        (2, ENGINE_RESTARTED), (5, ENGINE_RESTARTED), (7, ENGINE_RESTARTED),
    ]  # fmt: skip
    assert found(restarts=line(7)) == []


def test_a_server_was_restarted_when_it_says_that_it_was() -> None:
    assert found(starts=line(100.5, 100.5, 102.25, 102.25)) == [(102.25, SERVER_RESTARTED)]


def test_a_storm_is_one_until_it_is_clearly_over() -> None:
    assert found(preemptions=line(0.0, 0.2, 0.07, 0.2, 0.01, 0.3)) == [(1, STORM), (5, STORM)]
    assert found(preemptions=line(0.0, 0.2, 0.5), requests=line(3.0, 3.0, 3.0)) == [(2, STORM)], "per request"


def test_events_are_in_times_order() -> None:
    events = find_events([line(0, 0, 1), line(0.5, 1.5), line(0.2), []])
    assert events == [Event(0.0, STORM), Event(1.5, SERVER_RESTARTED), Event(2.0, ENGINE_RESTARTED)]
