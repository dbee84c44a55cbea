"""Triton's metrics, prometheus-client's and OTLP's: the same names, labels, buckets and values after one history."""

import platform
import random
import time
from collections import Counter
from importlib import metadata
from typing import Any

import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_CUMULATIVE
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from quire_engine.lora import Adapter
from quire_engine.sampling_params import RequestOptions, SamplingParams
from quire_engine.slo import NO_TARGETS, RequestSLO, SLOTargets
from quire_engine.stats import (
    AdapterStats,
    DraftStats,
    ExpertLoadStats,
    FinishedRequestStats,
    ImageStats,
    IterationStats,
    KVConnectorStats,
    LiveRequestStats,
    SchedulerStats,
    StepStats,
)
from quire_engine.timeline import REQUEST_PHASES
from quire_monitoring.accumulator import Accumulator
from quire_monitoring.definitions import MAX_ADAPTERS, REFUSALS, MetricDefinition, MetricKind, MetricsConfig, series
from quire_monitoring.otel import OtelStatLogger
from quire_monitoring.otel.metrics import unit_of
from quire_monitoring.prometheus import PrometheusStatLogger
from quire_monitoring.triton import TritonStatLogger
from support.otlp import Collector, collect, samples_of

LABELS = {"model": "m", "version": "1", "engine": "0"}
SLO_CLASSES = {"default": SLOTargets(ttft_ms=500, e2e_ms=9000, objective=0.95), "batch": NO_TARGETS}
WORKERS = [True, False]
MAX_DRAFTS = 5
EXPERTS = (3, 4)
"""Layers and experts; the first layer has none."""
ADAPTERS = ("sql", "law", "a,b")

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class FakeServer:
    """What a tritonserver would answer to a scrape."""

    def __init__(self) -> None:
        self.samples: Samples = {}
        self.calls: Counter[str] = Counter()

    def make_family(self, definition: MetricDefinition) -> Any:
        server = self

        class Metric:
            def __init__(self, labels: dict[str, str], buckets: list[float] | None = None) -> None:
                self.labels, self.buckets = labels, buckets
                own = [(definition.name, labels)] if buckets is None else self.names(0.0)
                for key in [server.sample(*one) for one in own]:
                    assert key not in server.samples
                    server.samples[key] = 0.0

            def __del__(self) -> None:
                if definition.is_open:
                    del server.samples[server.sample(definition.name, self.labels)]

            def names(self, value: float) -> list[tuple[str, dict[str, str]]]:
                bounds = [bound for bound in self.buckets or () if value <= bound]
                return [
                    *((definition.name + "_bucket", self.labels | {"le": f"{bound:g}"}) for bound in bounds),
                    (definition.name + "_bucket", self.labels | {"le": "+Inf"}),
                    (definition.name + "_count", self.labels),
                    (definition.name + "_sum", self.labels),
                ]

            def set(self, value: float) -> None:
                assert definition.kind is MetricKind.GAUGE
                server.write(definition.name, self.labels, value, is_gauge=True)

            def increment(self, value: float) -> None:
                assert definition.kind is MetricKind.COUNTER
                assert value > 0
                server.write(definition.name, self.labels, value)

            def observe(self, value: float) -> None:
                assert definition.kind is MetricKind.HISTOGRAM
                server.calls[definition.name] += 1
                for name, labels in self.names(value):
                    server.samples[server.sample(name, labels)] += value if name.endswith("_sum") else 1

        class Family:
            def Metric(self, labels: dict[str, str], buckets: list[float] | None = None) -> Any:  # noqa: N802
                return Metric(labels, buckets)

        return Family()

    def write(self, name: str, labels: dict[str, str], value: float, is_gauge: bool = False) -> None:
        self.calls[name] += 1
        key = self.sample(name, labels)
        self.samples[key] = value if is_gauge else self.samples[key] + value

    @staticmethod
    def sample(name: str, labels: dict[str, str]) -> tuple[str, frozenset[tuple[str, str]]]:
        return name, frozenset(labels.items())


def scrape(stat_logger: PrometheusStatLogger) -> Samples:
    """Through the text, as a Prometheus would."""
    registry = CollectorRegistry()
    registry.register(stat_logger)
    found: Samples = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            found[sample.name, frozenset(sample.labels.items())] = sample.value
    return found


def random_history(rng: random.Random, num_steps: int) -> list[tuple[SchedulerStats | None, IterationStats]]:
    """Steps, requests that end in all ways, an engine that is started again and forgets its totals."""
    history: list[tuple[SchedulerStats | None, IterationStats]] = []
    totals = Counter[str]()
    busy_seconds, drafts = [0.0] * len(WORKERS), DraftStats()
    expert_tokens = [[0] * EXPERTS[1] for _ in range(EXPERTS[0])]
    for _ in range(num_steps):
        first_tokens = [rng.expovariate(1) for _ in range(rng.randrange(2))]
        if rng.random() < 0.02:
            totals.clear()
            busy_seconds, drafts = [0.0] * len(WORKERS), DraftStats()
            expert_tokens = [[0] * EXPERTS[1] for _ in range(EXPERTS[0])]
        for name in ("num_preemptions", "prefix_cache_queries", "prefix_cache_hits", "num_block_evictions"):
            totals[name] += rng.randrange(3)
        busy_seconds = [own + rng.random() for own in busy_seconds]
        if rng.random() < 0.5:
            drafts.count(MAX_DRAFTS, rng.randint(0, MAX_DRAFTS))
        expert_tokens[rng.randint(1, EXPERTS[0] - 1)][rng.randrange(EXPERTS[1])] += rng.randrange(3)
        load = ExpertLoadStats(
            [row.copy() if any(row) else [] for row in expert_tokens],
            [sum(map(sum, expert_tokens))] * len(WORKERS), *(1 + rng.random() for _ in range(4)),
        )  # fmt: skip
        waiting = rng.randrange(4)
        scheduler_stats = SchedulerStats(
            num_running=rng.randrange(9), num_waiting=waiting, num_waiting_for_fsm=rng.randint(0, waiting),
            num_blocks_used=rng.randrange(50), num_blocks_cached=rng.randrange(9), num_blocks_free=rng.randrange(9),
            rank_busy_seconds=busy_seconds, drafts=drafts.copy(), **totals,
            expert_load=rng.choice([None, load]),
            adapters=None if rng.random() < 0.5 else AdapterStats(
                running={name: 1 for name in ADAPTERS if rng.random() < 0.5},
                waiting={name: 1 for name in ADAPTERS if rng.random() < 0.5},
                ready=["digest"] * rng.randrange(3), in_use=["digest"] * rng.randrange(2),
                num_loads=totals["num_preemptions"], num_evictions=totals["prefix_cache_hits"],
                num_failed_loads=totals["prefix_cache_queries"],
            ),
            kv_connector=KVConnectorStats(
                0, *(10 * totals["num_preemptions"] + i for i in range(1, 9)),
                tiers={"memory": [totals["num_preemptions"] * i for i in range(1, 5)]},
            ),
        )  # fmt: skip
        iteration = IterationStats(
            num_prompt_tokens=rng.randrange(9), num_cached_tokens=rng.randrange(5),
            num_generation_tokens=rng.randrange(9),
            time_to_first_token_seconds=first_tokens,
            first_token_slo_classes=[rng.choice([*SLO_CLASSES, "novel"]) for _ in first_tokens],
            inter_token_seconds=[rng.expovariate(30) for _ in range(rng.randrange(9))],
            finished_requests=[random_request(rng) for _ in range(rng.randrange(3))],
            phases=[(rng.choice(REQUEST_PHASES), rng.expovariate(10)) for _ in range(rng.randrange(3))],
            misses=[(rng.choice([*SLO_CLASSES, "novel"]), "ttft", "id") for _ in range(rng.randrange(2))],
            live=rng.choice([None, LiveRequestStats(rng.randrange(9), {("default", "e2e"): rng.randrange(9)})]),
            num_engine_restarts=rng.randrange(2), num_requests_replayed=rng.randrange(3),
            step=rng.choice([None, StepStats(*(rng.expovariate(100) for _ in range(3)), 3, rng.randrange(99))]),
            images=rng.choice([None, ImageStats(1, 2, [rng.expovariate(1)])]),
            cancel_to_free_seconds=[rng.expovariate(100) for _ in range(rng.randrange(2))],
        )  # fmt: skip
        history.append((rng.choice([None, scheduler_stats]), iteration))
    return history


def of_class(slo_class: str, adapter: str | None = None) -> RequestOptions:
    return RequestOptions(slo=RequestSLO(slo_class=slo_class), adapter=None if adapter is None else with_name(adapter))


def with_name(name: str) -> Adapter:
    return Adapter(name, f"/adapters/{name}", "digest")


def random_request(rng: random.Random) -> FinishedRequestStats:
    good = rng.random() < 0.5
    cause = "none" if good else rng.choice(["ttft", "tpot", "e2e", "rejected", "error"])
    return FinishedRequestStats(
        rng.choice(["stop", "length", "abort", "error", "novel"]),
        num_prompt_tokens=rng.randrange(1, 3000), num_output_tokens=rng.randrange(1000),
        params=SamplingParams(max_tokens=rng.choice([None, rng.randint(1, 1000)])),
        num_longest_output_tokens=rng.randrange(1000),
        e2e_seconds=rng.choice([0.5, rng.expovariate(1)]), generation_seconds=rng.random(),
        phases=[("held", 0.0), ("prefill", rng.random() / 4)], missed_live=not good and rng.random() < 0.5,
        time_to_first_token_seconds=rng.choice([None, rng.random()]),
        error_code=rng.choice([None, None, "unavailable", "deadline"]),
        options=of_class(rng.choice(["of no class", *SLO_CLASSES]), rng.choice([None, *ADAPTERS])),
        slo_verdict="good" if good else "miss", slo_cause=cause,
        predicted_ttft_seconds=rng.choice([None, rng.random()]), refusal=rng.choice([None, *REFUSALS, "novel"]),
    )  # fmt: skip


def pair(aliases: bool = True) -> tuple[FakeServer, TritonStatLogger, PrometheusStatLogger]:
    server = FakeServer()
    config = MetricsConfig(
        slo_classes=SLO_CLASSES, num_ranks=len(WORKERS), aliases=aliases, max_draft_tokens=MAX_DRAFTS,
        expert_shape=EXPERTS, expert_metrics=aliases, max_loras=2, takes_images=True,
    )  # fmt: skip
    triton = TritonStatLogger(server.make_family, LABELS, config)
    triton._declare_all()  # it is flushed by hand, without the thread
    triton._accumulator.set_loaded(None)  # which the other one calls in its `start`
    return server, triton, PrometheusStatLogger(LABELS, config)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("aliases", [True, False])
def test_both_exporters_agree(seed: int, aliases: bool) -> None:
    rng = random.Random(seed)
    server, triton, prometheus = pair(aliases)
    triton._is_up, triton._workers_up = (lambda: True), (lambda: WORKERS)
    prometheus.start(lambda: True, lambda: WORKERS)
    for step in random_history(rng, 300):
        for stat_logger in (triton, prometheus):
            stat_logger.record(*step)
            if len(step[1].finished_requests) == 2:
                stat_logger.record_rejection(*["default"][: len(step[1].inter_token_seconds) % 2])
        if rng.random() < 0.1:
            triton._flush()
        if rng.random() < 0.05:
            scrape(prometheus)
    triton._flush(is_last=True)
    expected = scrape(prometheus)
    assert server.samples.keys() == expected.keys()
    for key, value in expected.items():
        assert server.samples[key] == pytest.approx(value), key
    assert expected[FakeServer.sample("quire_worker_up", LABELS | {"rank": "1"})] == 0
    assert any(name.startswith("vllm:") for name, _ in expected) == aliases
    assert all(dict(labels).items() >= LABELS.items() for _, labels in expected)
    histograms = {name.removesuffix("_bucket"): 0.0 for name, _ in expected if name.endswith("_bucket")}
    assert all(
        sum(value for (name, _), value in expected.items() if name == histogram + "_count") > 0
        for histogram in histograms
    )


def received(collector: Collector) -> Samples:
    """What has come by OTLP under our names."""
    metrics = [metric for name, metric in collector.metrics.items() if name.startswith("quire_")]
    return {FakeServer.sample(name, labels): value for metric in metrics for name, labels, value in samples_of(metric)}


@pytest.mark.parametrize("is_taken_by_the_server", [True, False])
def test_otlp_has_every_metric_with_the_value_that_a_scrape_shows(is_taken_by_the_server: bool) -> None:
    rng = random.Random(5)
    server, triton, prometheus = pair()
    if not is_taken_by_the_server:  # REPORT_CUSTOM_METRICS is false
        triton._families, triton._metrics = [], {}
        triton._reader.close()
    prometheus.start(lambda: True, lambda: WORKERS)
    with collect() as collector:
        before = time.time_ns()
        otel = OtelStatLogger(collector.endpoint, LABELS, export_interval_seconds=0.05)
        triton._is_up, triton._workers_up = (lambda: True), (lambda: WORKERS)
        otel.start(triton.totals())
        for step in random_history(rng, 300):
            for stat_logger in (triton, prometheus, otel):
                stat_logger.record(*step)
            if rng.random() < 0.1:
                triton._flush()
        exports = collector.num_exports
        collector.wait_for(lambda: collector.num_exports > exports + 1)
        triton._flush(is_last=True)
        otel.stop()
        expected = {key: value for key, value in scrape(prometheus).items() if key[0].startswith("quire_")}
        shown = {key: value for key, value in server.samples.items() if key[0].startswith("quire_")}
    started = FakeServer.sample("quire_server_start_time_seconds", LABELS)
    assert received(collector).pop(started) == triton._accumulator._server_start_time
    del expected[started]
    sent = {key: value for key, value in received(collector).items() if key != started}
    assert sent.keys() == expected.keys()
    for key, value in expected.items():
        assert sent[key] == pytest.approx(value), key
        if is_taken_by_the_server:
            assert sent[key] == pytest.approx(shown[key]), key
    assert sum(collector.metrics["quire_kv_blocks"].gauge.data_points[place].as_int for place in range(3)) > 0
    for metric in collector.metrics.values():
        kind = metric.WhichOneof("data")
        if kind in ("sum", "histogram"):
            assert getattr(metric, kind).aggregation_temporality == AGGREGATION_TEMPORALITY_CUMULATIVE, metric.name
            assert all(before <= point.start_time_unix_nano < point.time_unix_nano for point in
                       getattr(metric, kind).data_points), metric.name  # fmt: skip
        assert kind != "sum" or metric.sum.is_monotonic, metric.name


def test_a_metric_of_another_table_would_go_out_too() -> None:
    """Every definition that the server's logger has is one that OTLP has: there is no second list to forget."""
    _, triton, _ = pair()
    names = {
        definition.name
        for definition in triton._accumulator.definitions_with_aliases
        if not definition.name.startswith("vllm:")
    }
    assert {family.definition.name for family in triton.totals().read()} == names
    units = {unit_of(name) for name in names}
    assert units == {"", "s", "1", "{token}", "{request}", "{block}"}
    assert unit_of("quire_kv_blocks") == "{block}"
    assert unit_of("quire_prompt_tokens_total") == "{token}"


def test_the_cache_and_adapters_are_told_in_labels() -> None:
    """As Kubernetes' inference gateways and vLLM's boards ask for them."""
    server, config = FakeServer(), {"block_size": "16", "num_gpu_blocks": "64"}
    triton = TritonStatLogger(server.make_family, LABELS)
    prometheus = PrometheusStatLogger(LABELS)
    triton.start(lambda: True, cache_config=config)
    prometheus.start(lambda: True, cache_config=config)
    totals = triton.totals()
    triton.stop()
    vllms = LABELS | {"model_name": "m"}
    no_adapters = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    for samples in (server.samples, scrape(prometheus)):
        assert samples[FakeServer.sample("quire_cache_config_info", LABELS | config)] == 1
        assert samples[FakeServer.sample("vllm:cache_config_info", vllms | config)] == 1
        assert samples[FakeServer.sample("vllm:lora_requests_info", vllms | no_adapters)] > 0
    assert "quire_cache_config_info" in {family.definition.name for family in totals.read()}


def test_the_adapters_of_running_and_waiting_requests_are_the_labels_of_one_series() -> None:
    server, triton, prometheus = pair()
    prometheus.start(lambda: True, lambda: WORKERS)
    triton._is_up, triton._workers_up = (lambda: True), (lambda: WORKERS)
    for adapters, running, waiting in (
        (None, "", ""),
        (AdapterStats(running={"sql": 2, "law": 1}, waiting={"tax": 1}), "law,sql", "tax"),
        (AdapterStats(waiting={"tax": 4}), "", "tax"),
        (AdapterStats(waiting={f"a{number:03}": 1 for number in range(200)}), "",
         ",".join(f"a{number:03}" for number in range(MAX_ADAPTERS))),
    ):  # fmt: skip
        before = time.time()
        for stat_logger in (triton, prometheus):
            stat_logger.record(SchedulerStats(adapters=adapters), IterationStats())
        triton._flush(is_last=True)
        wanted = {"max_lora": "2", "running_lora_adapters": running, "waiting_lora_adapters": waiting}
        for samples in (server.samples, scrape(prometheus)):
            ((labels, value),) = [
                (dict(key[1]), value) for key, value in samples.items() if "lora_requests_info" in key[0]
            ]
            assert labels == LABELS | {"model_name": "m"} | wanted
            assert value <= time.time()
            assert adapters is None or value >= before


def test_requests_are_counted_by_adapter_up_to_so_many_of_them() -> None:
    server, triton, _ = pair()
    options = [of_class("default", f"a{number}") for number in range(MAX_ADAPTERS + 5) for _ in range(2)]
    ended = [FinishedRequestStats("stop", num_output_tokens=3, options=one) for one in (*options, of_class("default"))]
    triton.record(None, IterationStats(finished_requests=ended))
    triton._flush(is_last=True)

    def counted(name: str) -> dict[str, float]:
        return {dict(labels)["adapter"]: value for (metric, labels), value in server.samples.items() if metric == name}

    kept = {f"a{number}": 2 for number in range(MAX_ADAPTERS)}
    assert counted("quire_lora_requests_total") == kept | {"other": 10}
    assert counted("quire_lora_generation_tokens_total") == dict.fromkeys(kept, 6) | {"other": 30}


def test_versions_are_the_labels_of_build_info() -> None:
    server, prometheus = FakeServer(), PrometheusStatLogger(LABELS)
    build = {name: metadata.version(name) for name in ("quire", "torch")} | {"python": platform.python_version()}
    triton = TritonStatLogger(server.make_family, LABELS)
    triton.start(lambda: False)
    totals = triton.totals()
    triton.stop()
    for samples in (server.samples, scrape(prometheus)):
        assert samples[FakeServer.sample("quire_build_info", LABELS | build)] == 1
    assert [family.series for family in totals.read() if family.definition.name == "quire_build_info"] == [[(build, 1)]]


def test_what_one_exporter_has_taken_the_others_still_find() -> None:
    accumulator = Accumulator()
    first = accumulator.reader()
    accumulator.record_rejection()
    late = accumulator.reader()
    accumulator.record(None, IterationStats(num_generation_tokens=3, inter_token_seconds=[0.5]))
    rejected, tokens = series("quire_requests_total", outcome="rejected"), series("quire_generation_tokens_total")
    assert late.take() == ({tokens: 3}, {series("quire_inter_token_latency_seconds"): [0.5]})
    assert late.take() == ({}, {})
    assert first.take() == ({rejected: 1, tokens: 3}, {series("quire_inter_token_latency_seconds"): [0.5]})
    first.close()
    late.close()
    assert not accumulator.is_read


def test_vllms_series_have_its_labels() -> None:
    _, _, prometheus = pair()
    prometheus.start(lambda: True, lambda: WORKERS)
    waiting = SchedulerStats(
        num_running=2, num_waiting=5, num_waiting_for_fsm=3, num_loading=1, num_blocks_used=1, num_blocks_free=3
    )
    ends = [FinishedRequestStats("stop"), FinishedRequestStats("error", error_code="unavailable")]
    prometheus.record(waiting, IterationStats(finished_requests=ends))
    prometheus.record_rejection()
    samples, labels = scrape(prometheus), LABELS | {"model_name": "m"}
    assert samples["vllm:num_requests_waiting", frozenset(labels.items())] == 5
    for reason, count in {"queue": 1, "grammar": 3, "remote_kv": 1}.items():
        assert samples[FakeServer.sample("quire_requests_waiting", LABELS | {"reason": reason})] == count
    assert samples["vllm:kv_cache_usage_perc", frozenset(labels.items())] == 0.25
    success = {dict(own)["finished_reason"]: value for (name, own), value in samples.items()
               if name == "vllm:request_success_total"}  # fmt: skip
    assert success == {"stop": 1, "length": 0, "abort": 0, "error": 0}
    assert samples[FakeServer.sample("quire_requests_total", LABELS | {"outcome": "rejected"})] == 2


def test_predictions_are_compared_with_what_came_and_refusals_counted_by_class_and_reason() -> None:
    _, _, prometheus = pair()
    predicted = FinishedRequestStats("stop", time_to_first_token_seconds=0.5, predicted_ttft_seconds=0.4)
    refused = FinishedRequestStats(
        "error", error_code="unavailable", options=of_class("batch"), refusal="ttft", predicted_ttft_seconds=9.0
    )
    prometheus.record(None, IterationStats(finished_requests=[predicted, refused, FinishedRequestStats("stop")]))
    samples = scrape(prometheus)
    assert samples[FakeServer.sample("quire_ttft_prediction_error_ratio_count", LABELS)] == 1
    assert samples[FakeServer.sample("quire_ttft_prediction_error_ratio_sum", LABELS)] == pytest.approx(0.2)
    counted = {key: value for key, value in samples.items() if key[0] == "quire_requests_refused_total" and value}
    labels = LABELS | {"slo": "batch", "reason": "ttft"}
    assert counted == {FakeServer.sample("quire_requests_refused_total", labels): 1}


def test_experts_that_are_idle_or_were_started_again() -> None:
    _, _, prometheus = pair()
    prometheus.start(lambda: True, lambda: WORKERS)
    for num_running, tokens in (
        (1, [[], [5, 1, 0, 0], []]),
        (1, [[], [5, 4, 0, 0], [0, 0, 7, 0]]),
        (0, [[], [2, 0, 0, 0], []]),
    ):
        load = ExpertLoadStats(tokens, [sum(map(sum, tokens)), 0], 1.5, 2.0, 3.0, 4.0)
        prometheus.record(SchedulerStats(num_running=num_running, expert_load=load), IterationStats())
        samples = scrape(prometheus)
        worst = samples[
            FakeServer.sample("quire_expert_imbalance_ratio", LABELS | {"over": "experts", "layers": "max"})
        ]
        assert worst == 4.0 * num_running, "there is none while nothing runs"
    counted = {(dict(own)["layer"], dict(own)["expert"]): value for (name, own), value in samples.items()
               if name == "quire_expert_tokens_total" and value}  # fmt: skip
    assert counted == {("1", "0"): 7, ("1", "1"): 4, ("2", "2"): 7}
    assert samples[FakeServer.sample("quire_expert_rank_tokens_total", LABELS | {"rank": "0"})] == 18


def test_what_clients_say_adds_no_series() -> None:
    server, triton, prometheus = pair()
    triton._is_up, triton._workers_up = (lambda: True), (lambda: WORKERS)
    triton._flush()
    before = set(server.samples), set(scrape(prometheus))
    for i in range(10_000):
        junk = FinishedRequestStats(f"novel{i}", options=of_class(f"junk{i}"), slo_verdict="good", slo_cause="none")
        for stat_logger in (triton, prometheus):
            stat_logger.record(None, IterationStats(finished_requests=[junk]))
            stat_logger.record_rejection(f"gold{i}")
    triton._flush()
    assert (set(server.samples), set(scrape(prometheus))) == before
    rejected = LABELS | {"slo": "default", "verdict": "miss", "cause": "rejected"}
    assert server.samples[FakeServer.sample("quire_slo_requests_total", rejected)] == 10_000


def test_frequent_observations_cost_a_bounded_number_of_round_trips() -> None:
    server, triton, _ = pair()
    for _ in range(1000):
        triton.record(None, IterationStats(inter_token_seconds=[0.004] * 64, step=StepStats(1e-4, 1e-2, 1e-4, 64, 64)))
    triton._flush()
    assert sum(server.calls.values()) < 250
    key = FakeServer.sample("vllm:inter_token_latency_seconds_count", LABELS | {"model_name": "m"})
    assert server.samples[key] == 64_000
