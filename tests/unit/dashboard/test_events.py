"""Events that are marked in the charts, found in points."""

import math

from quire_dashboard.events import (
    ENGINE_RESTARTED,
    LOADED,
    SERVER_RESTARTED,
    SETTINGS_CHANGED,
    STORM,
    UNLOADED,
    Event,
    find_events,
)
from quire_dashboard.history import Point


def line(*values: float) -> list[Point]:
    return [Point(float(time), "", value) for time, value in enumerate(values)]


def found(**lines: list[Point]) -> list[tuple[float, str]]:
    names = ("restarts", "starts", "preemptions", "requests", "loads")
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


def loads(*values: tuple[float, float, str]) -> list[Point]:
    """(time, when it was loaded, settings); a line after the other, as Prometheus has them."""
    return [Point(time, settings, value) for time, value, settings in sorted(values, key=lambda one: one[2])]


def test_a_load_is_at_the_moment_that_it_says() -> None:
    assert found(loads=loads((10, 8.5, "a"), (11, 8.5, "a"))) == [(8.5, LOADED)]
    assert found(loads=loads((10, 8.5, "a"), (12, 11.5, "a"))) == [(8.5, LOADED), (11.5, LOADED)]
    assert found(loads=loads((10, 0.0, "a"))) == [], "it is not loaded yet"


def test_a_load_with_other_settings_is_a_change_of_them() -> None:
    both = loads((10, 8.5, "b"), (11, 8.5, "b"), (11, 10.5, "a"), (12, math.nan, "b"), (12, 10.5, "a"))
    assert found(loads=both) == [(8.5, LOADED), (10.5, SETTINGS_CHANGED)], "of two, the newest counts"


def test_a_model_that_is_gone_was_unloaded_unless_it_was_only_not_seen() -> None:
    before, gone = (10.0, 8.5, "a"), (12.0, math.nan, "a")
    assert found(loads=loads(before, gone)) == [(8.5, LOADED), (12, UNLOADED)]
    assert found(loads=loads(before, gone, (14, 8.5, "a"))) == [(8.5, LOADED)]
    again = loads(before, gone, (14, 13.5, "a"))
    assert found(loads=again) == [(8.5, LOADED), (12, UNLOADED), (13.5, LOADED)]
    starts = [Point(10, "", 5.0), Point(14, "", 12.5)]
    assert found(loads=again, starts=starts) == [(8.5, LOADED), (12.5, SERVER_RESTARTED), (13.5, LOADED)]


def test_events_are_in_times_order() -> None:
    events = find_events([line(0, 0, 1), line(0.5, 1.5), line(0.2), [], []])
    assert events == [Event(0.0, STORM), Event(1.5, SERVER_RESTARTED), Event(2.0, ENGINE_RESTARTED)]
