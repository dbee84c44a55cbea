"""Events that explain a chart's bends: restarts of the engine and of the server, and storms of preemptions.

They are found in the points of queries, so that they come from wherever the charts come from.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from quire_dashboard.history import Point
from quire_dashboard.queries import Gauge, Query, Rate

__all__ = ["ENGINE_RESTARTED", "EVENT_COLOURS", "QUERIES", "SERVER_RESTARTED", "STORM", "Event", "find_events"]

ENGINE_RESTARTED, SERVER_RESTARTED, STORM = "engine restarted", "server restarted", "preemption storm"
EVENT_COLOURS = {ENGINE_RESTARTED: "#d64545", SERVER_RESTARTED: "#a05bd6", STORM: "#f2a33a"}
STORM_BEGINS, STORM_ENDS = 0.1, 0.05
"""Preemptions per second."""
STORM_SHARE = 0.1
"""A storm is at least so many preemptions per request that ends, as the alert QuireKVCacheSaturated has it."""
QUERIES: Sequence[Query] = (
    Gauge(name="quire_engine_restarts_total"),
    Gauge(name="quire_server_start_time_seconds", how="max"),
    Rate(name="quire_preemptions_total"),
    Rate(name="quire_requests_total"),
)
"""What `find_events` needs the points of."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened."""

    time: float
    """Seconds since the epoch."""
    what: str
    """One of `EVENT_COLOURS`."""


def find_events(points: Sequence[Sequence[Point]]) -> list[Event]:
    """The events in time's order.

    Args:
        points: of each of `QUERIES`, over the same time.
    """
    restarts, starts, preemptions, requests = points
    found = [Event(now.time, ENGINE_RESTARTED) for before, now in _changes(restarts) if now.value > before.value]
    # The gauge is the moment itself; only a start that was seen from the one before counts.
    found += [Event(now.value, SERVER_RESTARTED) for before, now in _changes(starts) if now.value > before.value]
    found += _storms(preemptions, {point.time: point.value for point in _valid(requests)})
    return sorted(found, key=lambda event: event.time)


def _valid(points: Iterable[Point]) -> Iterator[Point]:
    return (point for point in points if not math.isnan(point.value))


def _changes(points: Iterable[Point]) -> Iterator[tuple[Point, Point]]:
    """Points whose value is another than that of the one before, with that one."""
    before: Point | None = None
    for point in _valid(points):
        if before is not None and point.value != before.value:
            yield before, point
        before = point


def _storms(preemptions: Iterable[Point], requests: Mapping[float, float]) -> Iterator[Event]:
    is_on = False
    for point in _valid(preemptions):
        least = STORM_ENDS if is_on else max(STORM_BEGINS, STORM_SHARE * requests.get(point.time, 0.0))
        was_on, is_on = is_on, point.value >= least
        if is_on and not was_on:
            yield Event(point.time, STORM)
