"""Events that explain a chart's bends: restarts of the engine and of the server, loads of the model, changes of its
settings, and storms of preemptions.

They are found in the points of queries, so that they come from wherever the charts come from.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from quire_client.symptoms import SYMPTOMS

from quire_dashboard.history import Point
from quire_dashboard.queries import Gauge, Rate

ENGINE_RESTARTED, SERVER_RESTARTED, STORM = "engine restarted", "server restarted", "preemption storm"
LOADED, UNLOADED, SETTINGS_CHANGED = "model loaded", "model unloaded", "loaded with other settings"
EVENT_COLOURS = {
    ENGINE_RESTARTED: "#d64545", SERVER_RESTARTED: "#a05bd6", STORM: "#cc7a1e", LOADED: "#2fa37c", UNLOADED: "#878d96",
    SETTINGS_CHANGED: "#3b82d6",
}  # fmt: skip
QUERIES: Sequence[Gauge | Rate] = (
    Gauge(name="quire_engine_restarts_total"),
    Gauge(name="quire_server_start_time_seconds", how="max"),
    Rate(name="quire_preemptions_total"),
    Rate(name="quire_requests_total"),
    Gauge(name="quire_model_load_timestamp_seconds", by="settings", how="max"),
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
    """The events in time's order; a load may have been before the first point.

    Args:
        points: of each of `QUERIES`, over the same time.
    """
    restarts, starts, preemptions, requests, loads = points
    found = [Event(now.time, ENGINE_RESTARTED) for before, now in _changes(restarts) if now.value > before.value]
    # The gauge is the moment itself; only a start that was seen from the one before counts.
    found += [Event(now.value, SERVER_RESTARTED) for before, now in _changes(starts) if now.value > before.value]
    found += _storms(preemptions, {point.time: point.value for point in _valid(requests)})
    found += _loads(loads, {point.value for point in _valid(starts)})
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
    limits, is_on = SYMPTOMS["kv_cache_full"].limits, False
    for point in _valid(preemptions):
        share = 0.0 if is_on else limits["per_request"].begins * requests.get(point.time, 0.0)
        least = max(limits["per_second"].at(is_on), share)
        was_on, is_on = is_on, point.value >= least
        if is_on and not was_on:
            yield Event(point.time, STORM)


def _loads(loads: Iterable[Point], starts: Collection[float]) -> Iterator[Event]:
    """Each load, which is at the moment that the gauge says, and each time that the model was gone.

    While it is loaded again, there are two of them: the newest counts. One that is gone and comes back as the same load
    was there all the time, and only not seen; one that went with its server was not unloaded.

    Args:
        loads: a line for each settings.
        starts: of the server, which were seen.
    """
    last: tuple[float, str] | None = None
    gone: float | None = None
    for time, points in groupby(sorted(loads, key=attrgetter("time")), attrgetter("time")):
        there = max(((point.value, point.series) for point in points if point.value > 0), default=None)
        if there is None:
            gone = time if gone is None and last is not None else gone
            continue
        if last is None or there[0] > last[0]:
            if last is not None and gone is not None and not any(last[0] < start <= there[0] for start in starts):
                yield Event(gone, UNLOADED)
            is_other = last is not None and there[1] != last[1]
            yield Event(there[0], SETTINGS_CHANGED if is_other else LOADED)
            last = there
        gone = None
    if gone is not None:
        yield Event(gone, UNLOADED)
