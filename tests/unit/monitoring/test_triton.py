"""TritonStatLogger against a stand-in for the server's metrics."""

import threading
import time
import weakref
from collections import defaultdict
from typing import Any

import pytest
from quire_engine.pooling import PoolingParams
from quire_engine.sampling_params import RequestOptions
from quire_engine.stats import FinishedRequestStats, IterationStats, SchedulerStats, StepStats
from quire_monitoring.definitions import METRICS, MetricKind, MetricsConfig, make_aliases
from quire_monitoring.triton import HEALTH_INTERVAL_SECONDS, TritonStatLogger

LABELS = {"model": "m", "version": "1", "engine": "0"}
ALIASES = make_aliases(METRICS)
SUFFIXES = ("_bucket", "_sum", "_count")


def series_of(definition):
    """The keys of a metric's series at the server."""
    for labels in definition.label_sets():
        if definition.is_frequent:
            bounds = [f"{bound:g}" for bound in definition.buckets] + ["+Inf"]
            yield from ((definition.name + "_bucket", *labels.values(), bound) for bound in bounds)
            yield from ((definition.name + suffix, *labels.values()) for suffix in ("_sum", "_count"))
        else:
            yield (definition.name, *labels.values())


class Server:
    """What a scrape would show, and how many round trips it took."""

    def __init__(self, broken=False, missing=()):
        self.values = {}
        self.observed = defaultdict(list)
        self.buckets = {}
        self.calls = 0
        self.broken = broken
        self.missing = missing
        self.failing = ""
        self.on_call = lambda key: None
        self.changed = threading.Condition()
        self.alive = weakref.WeakSet()

    def make_family(self, definition):
        if self.broken:
            raise RuntimeError("metrics are off\nreally")
        if definition.kind in self.missing:
            return None
        server = self

        class Metric:
            def __init__(self, labels, buckets=None):
                assert {name: labels[name] for name in LABELS} == LABELS
                assert ("model_name" in labels) == definition.name.startswith("vllm:")
                own = {name: value for name, value in labels.items() if name not in (*LABELS, "model_name")}
                self.key = (definition.name, *own.values())
                server.alive.add(self)
                assert self.key not in server.values
                server.values[self.key] = 0
                server.buckets[self.key] = buckets

            def set(self, value):
                assert definition.kind is MetricKind.GAUGE
                self._call(value)

            def increment(self, value):
                assert definition.kind is MetricKind.COUNTER
                assert value > 0
                self._call(server.values[self.key] + value)

            def observe(self, value):
                assert definition.kind is MetricKind.HISTOGRAM
                server.observed[definition.name].append(value)
                self._call(value)

            def _call(self, value):
                with server.changed:
                    server.calls += 1
                    if definition.name == server.failing:
                        raise RuntimeError("no answer")
                    server.values[self.key] = value
                    server.changed.notify_all()
                server.on_call(self.key)

        class Family:
            def __init__(self):
                server.alive.add(self)

            def Metric(self, labels, buckets=None):  # noqa: N802
                return Metric(labels, buckets)

        return Family()

    def wait_for(self, key, value, timeout=60.0):
        with self.changed:
            assert self.changed.wait_for(lambda: self.values[key] == value, timeout), (key, self.values[key])


@pytest.fixture
def server():
    return Server()


@pytest.fixture
def stat_logger(server):
    result = TritonStatLogger(server.make_family, LABELS)
    result.start(is_up=lambda: True)
    yield result
    result.stop()


def test_every_series_exists_from_the_start(server: Any, stat_logger: Any) -> None:
    assert server.values.keys() == {key for definition in (*METRICS, *ALIASES) for key in series_of(definition)}
    assert ("quire_requests_total", "abort") in server.values
    assert ("quire_requests_waiting", "queue") in server.values


def test_definitions_are_well_formed() -> None:
    for definition in METRICS:
        assert definition.name.startswith("quire_")
        assert (definition.kind is MetricKind.COUNTER) == definition.name.endswith("_total")
        assert (definition.kind is MetricKind.HISTOGRAM) == bool(definition.buckets)
        assert list(definition.buckets) == sorted(set(definition.buckets))
    assert len({definition.name for definition in METRICS}) == len(METRICS)


def test_gauges_follow_and_the_last_state_is_written(server: Any, stat_logger: Any) -> None:
    busy = SchedulerStats(num_running=3, num_waiting=2, num_blocks_used=5, num_blocks_cached=1, num_blocks_free=4)
    stat_logger.record(busy, IterationStats())
    server.wait_for(("quire_requests_running",), 3)
    server.wait_for(("quire_kv_cache_usage_ratio",), 0.5)
    stat_logger.record(SchedulerStats(num_blocks_cached=6, num_blocks_free=4), IterationStats())
    server.wait_for(("quire_kv_blocks", "used"), 0)
    server.wait_for(("quire_requests_running",), 0)
    server.wait_for(("quire_requests_waiting", "queue"), 0)


def test_nothing_is_left_of_the_metrics_when_it_has_stopped(server: Any) -> None:
    stat_logger = TritonStatLogger(server.make_family, LABELS)
    stat_logger.start(is_up=lambda: True)
    num_families = sum(3 if definition.is_frequent else 1 for definition in (*METRICS, *ALIASES))
    assert len(server.alive) == num_families + len(server.values)
    stat_logger.stop()
    assert not server.alive
    stat_logger.record(SchedulerStats(num_running=3), IterationStats())
    stat_logger.record_rejection()


def test_busy_time_adds_up_rank_by_rank_over_restarts_of_the_engine(server: Any) -> None:
    stat_logger = TritonStatLogger(server.make_family, LABELS, MetricsConfig(num_ranks=2))
    for totals in ([1.0, 2.0], [1.5, 6.0], [0.25, 0.5], [0.5, 0.5]):
        stat_logger.record(SchedulerStats(rank_busy_seconds=totals), IterationStats())
    stat_logger.start(is_up=lambda: True)
    server.wait_for(("quire_worker_busy_seconds_total", "0"), 2.0)
    server.wait_for(("quire_worker_busy_seconds_total", "1"), 6.5)
    stat_logger.stop()


def test_counters_add_up(server: Any, stat_logger: Any) -> None:
    for total in (2, 5):
        stats = SchedulerStats(num_preemptions=total, prefix_cache_queries=10 * total, prefix_cache_hits=total)
        stat_logger.record(stats, IterationStats(num_prompt_tokens=7, num_cached_tokens=3, num_generation_tokens=total))
    stat_logger.record(SchedulerStats(num_preemptions=1), IterationStats())  # the engine was started again
    server.wait_for(("quire_preemptions_total",), 6)
    server.wait_for(("quire_prefix_cache_queries_total",), 50)
    server.wait_for(("quire_prompt_tokens_total",), 14)
    server.wait_for(("quire_prompt_tokens_cached_total",), 6)
    server.wait_for(("quire_generation_tokens_total",), 7)


def test_finished_requests_are_counted_and_timed(server: Any, stat_logger: Any) -> None:
    done = FinishedRequestStats("length", num_output_tokens=5, e2e_seconds=2.0, generation_seconds=1.0)
    short = FinishedRequestStats("abort", num_output_tokens=0, e2e_seconds=0.25)
    first_token = {"time_to_first_token_seconds": [0.125], "first_token_slo_classes": ["default"]}
    ended = IterationStats(finished_requests=[done, short], phases=[("queue", 0.5)], **first_token)
    stat_logger.record(None, ended)
    stat_logger.record_rejection()
    server.wait_for(("quire_requests_total", "length"), 1)
    server.wait_for(("quire_requests_total", "abort"), 1)
    server.wait_for(("quire_requests_total", "rejected"), 1)
    stat_logger.stop()
    assert server.observed["quire_time_to_first_token_seconds"] == [0.125]
    assert server.observed["quire_time_per_output_token_seconds"] == [0.25]
    assert server.observed["quire_e2e_request_latency_seconds"] == [2.0, 0.25]
    assert server.observed["quire_request_queue_time_seconds"] == [0.5]


def test_a_request_that_was_rejected_at_once_has_no_latency(server: Any, stat_logger: Any) -> None:
    """A full queue sends away in no time; that must not look like a server that answers fast. Waiting is not that."""
    done = FinishedRequestStats("length", num_output_tokens=5, e2e_seconds=2.0)
    late = FinishedRequestStats("error", e2e_seconds=3.0, error_code="deadline")
    refused = FinishedRequestStats("error", e2e_seconds=0.001, error_code="unavailable")
    waited = FinishedRequestStats("error", e2e_seconds=4.0, error_code="unavailable", refusal="queue_delay")
    held = FinishedRequestStats("error", e2e_seconds=5.0, error_code="unavailable", phases=[("held", 0.0)])
    stat_logger.record(None, IterationStats(finished_requests=[done, refused, late, waited, held]))
    server.wait_for(("quire_requests_total", "rejected"), 3)
    stat_logger.stop()
    assert server.observed["quire_e2e_request_latency_seconds"] == [2.0, 3.0, 4.0, 5.0]


def test_many_steps_take_few_round_trips(server: Any, stat_logger: Any) -> None:
    with server.changed:  # the server takes its time
        for step in range(1, 1001):
            stat_logger.record(SchedulerStats(num_running=1 + step % 2), IterationStats(num_generation_tokens=1))
    server.wait_for(("quire_generation_tokens_total",), 1000)
    assert server.calls < 50


def test_idle_writes_nothing(server: Any, stat_logger: Any) -> None:
    server.wait_for(("quire_engine_up",), 1)
    stat_logger.record(SchedulerStats(), IterationStats())
    stat_logger.record_rejection()
    server.wait_for(("quire_requests_total", "rejected"), 1)
    for _ in range(2):  # the second is called when all of the first flush has been written
        called = threading.Event()
        stat_logger.when_written(called.set)
        assert called.wait(60)
    calls = server.calls
    stat_logger.record(SchedulerStats(), IterationStats())
    threading.Event().wait(0.25)
    assert server.calls == calls


def test_engine_up_falls_when_it_dies_and_when_it_stops(server: Any) -> None:
    healthy = threading.Event()
    healthy.set()
    stat_logger = TritonStatLogger(server.make_family, LABELS)
    stat_logger.start(is_up=healthy.is_set)
    server.wait_for(("quire_engine_up",), 1)
    healthy.clear()
    server.wait_for(("quire_engine_up",), 0)
    healthy.set()
    found: list[float] = []
    called = threading.Event()
    stat_logger.when_written(lambda: (found.append(server.values[("quire_engine_up",)]), called.set()))
    assert called.wait(60)
    assert found == [1]  # whoever hears from an engine finds it up
    stat_logger.stop()
    assert server.values[("quire_engine_up",)] == 0


def test_gauges_of_an_engine_that_is_gone_are_zero(server: Any) -> None:
    healthy = threading.Event()
    healthy.set()
    stat_logger = TritonStatLogger(server.make_family, LABELS)
    stat_logger.start(is_up=healthy.is_set)
    busy = SchedulerStats(num_running=3, num_waiting=2, num_blocks_used=5, num_blocks_cached=1, num_blocks_free=4)
    stat_logger.record(busy, IterationStats(num_generation_tokens=7))
    server.wait_for(("quire_kv_cache_usage_ratio",), 0.5)
    healthy.clear()
    gauges = [definition for definition in (*METRICS, *ALIASES) if definition.kind is MetricKind.GAUGE]
    # Not the engine's:
    others = (
        "quire_build_info", "quire_goodput_ratio", "quire_model_load_timestamp_seconds",
        "quire_server_start_time_seconds", "quire_slo_objective_ratio", "vllm:lora_requests_info",
    )  # fmt: skip
    gauges = [definition for definition in gauges if definition.name not in others]
    for key in [(definition.name, *labels.values()) for definition in gauges for labels in definition.label_sets()]:
        server.wait_for(key, 0)
    assert server.values[("quire_generation_tokens_total",)] == 7
    stat_logger.stop()


def test_server_without_histograms_loses_only_those(caplog: Any) -> None:
    server = Server(missing={MetricKind.HISTOGRAM})
    stat_logger = TritonStatLogger(server.make_family, LABELS)
    stat_logger.start(is_up=lambda: True)
    done = FinishedRequestStats("length", e2e_seconds=2.0)
    stat_logger.record(SchedulerStats(num_running=1), IterationStats(finished_requests=[done]))
    server.wait_for(("quire_requests_total", "length"), 1)
    server.wait_for(("quire_requests_running",), 1)
    stat_logger.stop()
    assert [record.getMessage() for record in caplog.records] == [
        "no histogram metrics: this server does not have them"
    ]


@pytest.mark.parametrize(
    "failing", ["quire_prompt_tokens_total", "quire_e2e_request_latency_seconds", "quire_requests_running"]
)
def test_failed_write_loses_nothing_else_and_is_told_once(server: Any, failing: str, caplog: Any) -> None:
    server.failing = failing
    stat_logger = TritonStatLogger(server.make_family, LABELS)
    stat_logger.start(is_up=lambda: True)
    done = FinishedRequestStats("length", e2e_seconds=2.0)
    for total in (1, 2):
        iteration = IterationStats(
            num_prompt_tokens=1, num_generation_tokens=1, finished_requests=[done], phases=[("queue", 0.5)]
        )
        stat_logger.record(SchedulerStats(num_running=total, num_waiting=total), iteration)
        server.wait_for(("quire_generation_tokens_total",), total)
        server.wait_for(("quire_requests_waiting", "queue"), total)
    assert server.observed["quire_request_queue_time_seconds"] == [0.5, 0.5]
    assert [record.getMessage() for record in caplog.records] == [f"{failing} was not written: no answer"]
    server.failing = ""
    if failing == "quire_requests_running":
        server.wait_for(("quire_requests_running",), 2)  # the present is told as soon as that works again
    stat_logger.stop()


def test_what_waits_for_the_counters_finds_them_final_and_shares_their_round_trips(server: Any) -> None:
    stat_logger = TritonStatLogger(server.make_family, LABELS)
    stat_logger.start(is_up=lambda: True)
    server.wait_for(("quire_engine_up",), 1)
    found: list[tuple[float, int]] = []
    done = FinishedRequestStats("length", num_output_tokens=5, e2e_seconds=2.0)
    changed = threading.Condition()

    def look() -> None:
        with changed:
            observed = len(server.observed["quire_e2e_request_latency_seconds"])
            found.append((server.values["quire_requests_total", "length"], observed))
            changed.notify()

    def record(number: int) -> None:
        iteration = IterationStats(num_generation_tokens=number, finished_requests=[done] * number)
        stat_logger.record(SchedulerStats(num_running=1), iteration)

    for count in (1, 2):  # the second comes before the next flush of a busy engine is due
        record(1)
        stat_logger.when_written(look)
        with changed:
            assert changed.wait_for(lambda count=count: len(found) == count, timeout=60)
        assert found[-1] == (count, count)
    calls = server.calls
    with server.changed:  # the server takes its time, and many requests end meanwhile
        record(1)
        stat_logger.when_written(look)
        for _ in range(50):
            record(1)
            stat_logger.when_written(look)
    with changed:
        assert changed.wait_for(lambda: len(found) == 53, timeout=60)
    assert found[-1] == (53, 53)
    num_counters, observations = 4, 4 * 51  # two histograms and two counters, each under both names
    assert server.calls - calls <= observations + 3 * num_counters
    stat_logger.stop()
    stat_logger.when_written(look)
    assert len(found) == 54  # nothing is written any more, and nobody waits for ever


def test_an_end_waits_for_what_it_needs_and_not_for_what_happens_with_every_step(server: Server) -> None:
    """Those that come with the last step of an engine, too, which is when all the rest is written as well."""
    stat_logger = TritonStatLogger(server.make_family, LABELS)
    stat_logger.start(is_up=lambda: True)
    server.wait_for(("quire_engine_up",), 1)
    step = StepStats(num_tokens=1, schedule_seconds=0.001, execute_seconds=0.02, update_seconds=0.001)
    done = FinishedRequestStats("length", num_output_tokens=5, e2e_seconds=2.0)
    last = IterationStats(
        num_generation_tokens=1, inter_token_seconds=[0.01] * 5, step=step, finished_requests=[done]
    )  # fmt: skip
    found: list[int] = []
    called = threading.Event()
    with server.changed:  # the writing thread writes all of this in one flush
        before = server.calls
        stat_logger.record(SchedulerStats(num_running=1), IterationStats(num_generation_tokens=1))
        stat_logger.record(SchedulerStats(), last)
        stat_logger.when_written(lambda: (found.append(server.calls - before), called.set()))
    assert called.wait(60)
    assert found[0] <= 20  # two counters, and what is observed of a request, under both names
    server.wait_for(("quire_step_seconds_count", "execute"), 1)
    server.wait_for(("vllm:iteration_tokens_total_count",), 1)
    assert server.calls - before > 100
    stat_logger.stop()


def test_ends_go_before_the_histograms_that_are_being_written(server: Server) -> None:
    stat_logger = TritonStatLogger(server.make_family, LABELS)
    stat_logger.start(is_up=lambda: True)
    server.wait_for(("quire_engine_up",), 1)
    step = StepStats(num_tokens=1, schedule_seconds=0.001, execute_seconds=0.02, update_seconds=0.001)
    found: list[int] = []
    called = threading.Event()

    def end(key: tuple[str, ...]) -> None:
        if key == ("quire_inter_token_latency_seconds_count",) and not before:  # the first of some twenty histograms
            before.append(server.calls)
            stat_logger.when_written(lambda: (found.append(server.calls), called.set()))

    before: list[int] = []
    server.on_call = end
    stat_logger.record(SchedulerStats(), IterationStats(inter_token_seconds=[0.01], step=step))
    assert called.wait(60)
    assert found == before
    for phase in ("schedule", "execute", "update"):
        server.wait_for(("quire_step_seconds_count", phase), 1)
    stat_logger.stop()


def test_ranks_are_not_looked_at_for_every_end(server: Server) -> None:
    looks: list[float] = []
    up = threading.Event()
    up.set()

    def workers_up() -> list[bool]:
        looks.append(time.monotonic())
        return [up.is_set()]

    stat_logger = TritonStatLogger(server.make_family, LABELS)
    started, called = time.monotonic(), threading.Event()
    stat_logger.start(up.is_set, workers_up)
    server.wait_for(("quire_worker_up", "0"), 1)
    for _ in range(200):
        stat_logger.record_rejection()
        stat_logger.when_written(called.set)
        assert called.wait(60)
        called.clear()
    assert len(looks) <= 2 + (time.monotonic() - started) / HEALTH_INTERVAL_SECONDS
    up.clear()
    stat_logger.when_written(called.set)
    assert called.wait(60)
    assert server.values["quire_worker_up", "0"] == 0  # and at once when the engine has died
    stat_logger.stop()


def test_a_callback_that_raises_loses_no_other(server: Server, stat_logger: TritonStatLogger, caplog: Any) -> None:
    called = threading.Event()
    with server.changed:
        stat_logger.record(SchedulerStats(), IterationStats(num_generation_tokens=1))
        stat_logger.when_written(lambda: 1 / 0)
        stat_logger.when_written(called.set)
    assert called.wait(60)
    stat_logger.stop()
    assert [record.exc_info and record.exc_info[0] for record in caplog.records] == [ZeroDivisionError]


def test_an_engine_whose_health_cannot_be_told_delays_no_end_of_a_request(server: Any, caplog: Any) -> None:
    looks: list[float] = []

    def is_up() -> bool:
        looks.append(time.monotonic())
        raise OSError("no descriptors")

    stat_logger = TritonStatLogger(server.make_family, LABELS)
    stat_logger.start(is_up=is_up)
    called = threading.Event()
    for _ in range(2):
        called.clear()
        stat_logger.when_written(called.set)
        assert called.wait(60)
    threading.Event().wait(0.5)
    stat_logger.stop()
    assert len(looks) < 20  # and it is not asked without a pause
    assert [record.getMessage() for record in caplog.records] == ["metrics were not written: no descriptors"]


def test_server_without_metrics_is_noted_once(caplog: Any) -> None:
    stat_logger = TritonStatLogger(Server(broken=True).make_family, LABELS)
    stat_logger.start(is_up=lambda: True)
    assert not stat_logger.enabled
    stat_logger.record(SchedulerStats(), IterationStats(num_generation_tokens=1))
    stat_logger.record_rejection()
    stat_logger.stop()
    assert [record.getMessage() for record in caplog.records] == ["no custom metrics: metrics are off"]


def test_an_unknown_outcome_is_passed_over(server: Any, stat_logger: Any) -> None:
    stat_logger.record(None, IterationStats(finished_requests=[FinishedRequestStats("novel")], num_prompt_tokens=1))
    server.wait_for(("quire_prompt_tokens_total",), 1)


def test_a_request_for_a_vector_has_a_prompt_and_an_end_and_no_times_of_tokens(server: Any, stat_logger: Any) -> None:
    options = RequestOptions(pooling_params=PoolingParams(task="embed"))
    done = FinishedRequestStats(
        "stop", num_prompt_tokens=9, num_cached_tokens=4, e2e_seconds=0.5, slo_verdict="good", slo_cause="none",
        phases=[("queue", 0.0), ("prefill", 0.25)], options=options,
    )  # fmt: skip
    phases = [("queue", 0.25), ("prefill", 0.25)]
    stat_logger.record(None, IterationStats(num_prompt_tokens=9, finished_requests=[done], phases=phases))
    server.wait_for(("quire_requests_total", "stop"), 1)
    server.wait_for(("quire_prompt_tokens_total",), 9)
    stat_logger.stop()
    for name, values in (
        ("request_prompt_tokens", [9]), ("e2e_request_latency_seconds", [0.5]),
        ("request_queue_time_seconds", [0.25]), ("request_prefill_time_seconds", [0.25]),
    ):  # fmt: skip
        assert server.observed[f"quire_{name}"] == values, name
    for name in (
        "time_to_first_token_seconds", "time_per_output_token_seconds", "request_generation_tokens",
        "request_params_n", "request_params_max_tokens", "request_decode_time_seconds",
    ):  # fmt: skip
        assert not server.observed[f"quire_{name}"], name
