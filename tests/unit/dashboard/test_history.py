"""Readings of /metrics, and what is computed from them."""

import math
from collections.abc import Mapping
from typing import ClassVar

import pytest
from quire_dashboard.history import Point, Ring, View
from quire_dashboard.prometheus import Prometheus
from quire_dashboard.queries import MOST_POINTS, Gauge, Quantile, Query, Rate, Ratio, evaluate, latest, selector
from quire_load.scrape import Key, Scrape, ScrapeError, fetch, parse, quantile
from support.fake_triton import State, fake_triton

LABELS = {"model": "tinypy"}


def key(name: str, **labels: str) -> Key:
    return name, tuple(sorted({"model": "tinypy", "engine": "0", **labels}.items()))


def ring_of(*readings: tuple[float, dict[Key, float]]) -> Ring:
    ring = Ring(1000)
    for time, values in readings:
        ring.append(Scrape(time, values))
    return ring


# -- one reading ------------------------------------------------------------------------------------------------------


def test_only_quires_own_series_are_read() -> None:
    scrape = parse(State().metrics_text(), 12.0)
    assert scrape.time == 12.0
    assert {name[:6] for name, _ in scrape.values} == {"quire_"}
    assert scrape.values[key("quire_kv_blocks", state="free", version="1")] == 40


def test_a_histogram_whose_buckets_are_written_as_counters_keeps_its_names() -> None:
    text = (
        "# TYPE quire_step_seconds_bucket counter\n"
        'quire_step_seconds_bucket{le="+Inf",model="tinypy"} 4\nquire_step_seconds_bucket{le="0.5",model="tinypy"} 3\n'
    )
    assert {name for name, _ in parse(text, 0.0).values} == {"quire_step_seconds_bucket"}


def test_the_keys_of_an_earlier_reading_are_used_again() -> None:
    keys: dict[str, Key] = {}
    text = State().metrics_text() + 'quire_x{a="b c} d"} 1\nquire_bare 2\nquire_timed{a="b"} 3 1700000000000\n'
    first = parse(text, 0.0, keys)
    assert parse(text, 0.0, keys) == first == parse(text, 0.0)
    assert first.values["quire_x", (("a", "b c} d"),)] == 1
    assert first.values["quire_bare", ()] == 2
    assert first.values["quire_timed", (("a", "b"),)] == 3
    again = parse(text.replace('quire_x{a="b c} d"} 1', 'quire_x{a="b c} d"} +Inf'), 0.0, keys)
    assert again.values["quire_x", (("a", "b c} d"),)] == math.inf
    assert not any("quire_bare" in sample or "timed" in sample for sample in keys)


def test_what_is_not_metrics_is_said_to_be_none() -> None:
    with pytest.raises(ScrapeError, match="text format"):
        parse('quire_engine_up{model="tinypy} 1\n', 0.0)


def test_a_server_that_is_away_is_named() -> None:
    with fake_triton() as fake:
        endpoint = fake.metrics
        assert "quire_engine_up" in fetch(endpoint)
    with pytest.raises(ScrapeError, match=rf"http://{endpoint}/metrics cannot be read: .*connection refused"):
        fetch(endpoint)


@pytest.mark.parametrize(
    ("q", "buckets", "expected"),
    [
        (0.5, [], None),
        (0.5, [(1.0, 0), (math.inf, 0)], None),
        (0.5, [(1.0, 3)], None),  # without +Inf it is no whole histogram
        (0.5, [(1.0, 4), (2.0, 4), (math.inf, 4)], 0.5),
        (0.75, [(math.inf, 4), (2.0, 4), (1.0, 2)], 1.5),
        (0.95, [(1.0, 0), (2.0, 0), (math.inf, 4)], 2.0),  # beyond the last bound
        (1.0, [(1.0, 4), (2.0, 3), (math.inf, 4)], 1.0),  # read while it was being written
    ],
)
def test_quantile(q: float, buckets: list[tuple[float, float]], expected: float | None) -> None:
    assert quantile(q, buckets) == expected


# -- many readings ----------------------------------------------------------------------------------------------------


def test_a_rate_goes_on_over_a_restart_of_the_server() -> None:
    total = key("quire_generation_tokens_total")
    ring = ring_of(*((float(t), {total: v}) for t, v in [(0, 100), (10, 200), (20, 30), (30, 60)]))
    # 100 before the restart, then 30 and 30 more: the fall from 200 to 30 is no negative growth.
    assert latest(Rate(name="quire_generation_tokens_total"), ring.view(), LABELS) == {"": 160 / 30}


def test_a_counter_that_appears_late_or_is_missing_for_a_while_does_not_count_twice() -> None:
    total = key("quire_generation_tokens_total")
    ring = ring_of((0.0, {}), (10.0, {total: 50}), (20.0, {}), (30.0, {total: 80}))
    assert latest(Rate(name="quire_generation_tokens_total"), ring.view(), LABELS) == {"": 1.0}


def test_a_clock_that_is_set_back_leaves_no_reading_of_the_future() -> None:
    counter = key("quire_requests_total")
    ring = ring_of(*((10_000.0 + 2 * second, {counter: 0.0}) for second in range(40)))
    for time, value in ((6400.0, 10.0), (6402.0, 14.0)):
        ring.append(Scrape(time, {counter: value}))
    view = ring.view()
    assert view.times == [6400.0, 6402.0]
    assert (view.first, view.last) == (40, 41)
    assert latest(Rate(name="quire_requests_total"), view, LABELS) == {"": 2.0}


def test_the_ring_forgets_the_oldest_and_keeps_its_growth_right() -> None:
    ring = Ring(3)
    for time in range(10):
        ring.append(Scrape(float(time), {key("quire_preemptions_total"): float(time * time)}))
    view = ring.view()
    assert view.times == [7.0, 8.0, 9.0]
    assert latest(Rate(name="quire_preemptions_total"), view, LABELS) == {"": (81 - 49) / 2}


def test_gauges_are_aggregated_over_engines_and_told_apart_by_a_label() -> None:
    values = {
        key("quire_kv_blocks", state="used"): 3.0, key("quire_kv_blocks", state="used", engine="1"): 4.0,
        key("quire_kv_blocks", state="free"): 5.0, key("quire_kv_blocks", state="free", model="other"): 99.0,
    }  # fmt: skip
    view = ring_of((0.0, values)).view()
    assert latest(Gauge(name="quire_kv_blocks", by="state"), view, LABELS) == {"used": 7.0, "free": 5.0}
    assert latest(Gauge(name="quire_kv_blocks", how="max"), view, LABELS) == {"": 5.0}
    assert latest(Gauge(name="quire_kv_blocks", labels=(("state", "used"),)), view, LABELS) == {"": 7.0}


def test_a_ratio_has_no_value_while_nothing_happens() -> None:
    hits, queries = key("quire_prefix_cache_hits_total"), key("quire_prefix_cache_queries_total")
    ratio = Ratio(part=Rate(name=hits[0]), whole=Rate(name=queries[0]))
    ring = ring_of((0.0, {hits: 0, queries: 0}), (10.0, {hits: 0, queries: 0}))
    assert latest(ratio, ring.view(), LABELS) == {}
    ring.append(Scrape(20.0, {hits: 30.0, queries: 120.0}))
    assert latest(ratio, ring.view(), LABELS) == {"": 0.25}


def test_a_quantile_looks_at_the_window_only() -> None:
    def reading(fast: float, slow: float) -> dict[Key, float]:
        name = "quire_step_seconds_bucket"
        return {key(name, le="1.0", phase="execute"): fast, key(name, le="2.0", phase="execute"): fast + slow,
                key(name, le="+Inf", phase="execute"): fast + slow}  # fmt: skip

    ring = ring_of((0.0, reading(1000, 0)), (100.0, reading(1000, 0)), (150.0, reading(1000, 10)))
    assert latest(Quantile(name="quire_step_seconds", q=0.5, by="phase"), ring.view(), LABELS) == {"execute": 1.5}


def test_a_long_history_is_thinned_and_ends_with_the_newest_reading() -> None:
    ring = ring_of(*((float(t), {key("quire_requests_running"): float(t)}) for t in range(1000)))
    points = evaluate(Gauge(name="quire_requests_running"), ring.view(), LABELS, 900, {})
    assert 100 <= len(points) <= MOST_POINTS + 2
    assert points[-1] == Point(999.0, "", 999.0)
    assert points[0].time >= 99.0
    assert [point.time for point in points] == sorted(point.time for point in points)


def shown(query: Query, ring: Ring) -> list[float | None]:
    """Values in order of time; None where a line ends."""
    points = evaluate(query, ring.view(), LABELS, 1e9, {})
    assert [point.time for point in points] == sorted(point.time for point in points)
    return [None if math.isnan(point.value) else point.value for point in points]


def test_a_line_ends_where_it_has_no_value_and_begins_again() -> None:
    good, every = key("quire_good_total"), key("quire_all_total")
    ratio = Ratio(part=Rate(name=good[0]), whole=Rate(name=every[0]))
    ring = Ring(1000)
    for time in range(0, 200, 10):  # one bad request at 10, one good one at 150; in between nobody is judged
        ring.append(Scrape(float(time), {good: float(time >= 150), every: float(time >= 10) + (time >= 150)}))
    assert shown(ratio, ring) == [0.0] * 6 + [None] + [1.0] * 5


def test_a_line_ends_where_nothing_was_read() -> None:
    running = key("quire_requests_running")
    ring = ring_of(*((time, {running: time}) for time in (0.0, 2.0, 100.0, 102.0)))
    points = evaluate(Gauge(name="quire_requests_running"), ring.view(), LABELS, 1e9, {})
    assert [point.time for point in points if math.isnan(point.value)] == [51.0]
    assert shown(Gauge(name="quire_requests_running"), ring) == [0.0, 2.0, None, 100.0, 102.0]


def test_a_line_of_prometheus_ends_where_it_has_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [[1000.0, "1"], [1002.0, "2"], [1010.0, "3"], [1012.0, "NaN"]]
    asked: list[dict[str, str]] = []

    def answer(self: Prometheus, what: str, **parameters: str) -> dict[str, object]:
        asked.append(parameters)
        return {"result": [{"metric": {}, "values": values}]}

    monkeypatch.setattr(Prometheus, "_get", answer)
    found = Prometheus("http://p").range(Gauge(name="a"), "", LABELS, 712.0, 1012.0)
    assert [(point.time, None if math.isnan(point.value) else point.value) for point in found] == [
        (1000.0, 1.0), (1002.0, 2.0), (1004.0, None), (1010.0, 3.0), (1012.0, None),
    ]  # fmt: skip
    start, end, step = (float(asked[0][name]) for name in ("start", "end", "step"))
    assert (end - start) % step < 0.01, "the last moment is the end"


class Counting(Gauge):
    """Counts how often it is computed."""

    times: ClassVar[list[int]] = []

    def values(self, view: View, labels: Mapping[str, str], first: int, last: int) -> dict[str, float]:
        self.times.append(last)
        return Gauge.values(self, view, labels, first, last)


@pytest.mark.parametrize("size", [50, 400])
def test_a_point_of_the_past_is_computed_once(size: int) -> None:
    ring, query, known = Ring(size), Counting(name="quire_requests_running"), {}
    for time in range(3 * size):
        ring.append(Scrape(float(time), {key("quire_requests_running"): float(time)}))
        Counting.times.clear()
        points = evaluate(query, ring.view(), LABELS, 1e9, known)
        fresh = evaluate(Gauge(name="quire_requests_running"), ring.view(), LABELS, 1e9, {})
        assert points == fresh
        assert all(point.value == point.time for point in points)
        # The newest, and at most one more, when the one before it was the newest and is none of those that are kept;
        # all of them when the history has grown so long that fewer are shown.
        assert len(Counting.times) <= 2 or len(ring.view().times) % MOST_POINTS == 0
        assert len(known) == len(points)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (Gauge(name="a", how="max", by="state"), 'max by (state) (a{model="m"})'),
        (Rate(name="a_total", labels=(("slo", "default"),)), 'sum(rate(a_total{model="m",slo="default"}[60s]))'),
        (Quantile(name="a", q=0.95, by="phase"),
         'histogram_quantile(0.95, sum by (le, phase) (rate(a_bucket{model="m"}[60s])))'),
        (Ratio(part=Rate(name="a_total"), whole=Rate(name="b_total")),
         'sum(rate(a_total{model="m"}[60s])) / (sum(rate(b_total{model="m"}[60s])) > 0)'),
    ],
)  # fmt: skip
def test_the_same_query_for_prometheus(query: Query, expected: str) -> None:
    assert query.promql({"model": "m"}, 60) == expected


def test_a_label_cannot_break_out_of_its_query() -> None:
    assert selector({"model": 'a"} or vector(1) #\\'}) == r'{model="a\"} or vector(1) #\\"}'


def test_a_prometheus_that_is_away_is_named() -> None:
    with fake_triton() as fake:
        url = f"http://{fake.metrics}"
    with pytest.raises(ScrapeError, match="connection refused"):
        Prometheus(url).range(Gauge(name="a"), "", LABELS, 0, 60)
