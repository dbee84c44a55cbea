"""OtelStatLogger against a real OTLP receiver, one that is not there, and one that hangs."""

import logging
import socket
import threading
import time
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from quire_engine.pooling import PoolingParams
from quire_engine.sampling_params import RequestOptions, SamplingParams
from quire_engine.stats import FinishedRequestStats, IterationStats
from quire_engine.structured_outputs_params import StructuredOutputsParams
from quire_monitoring.otel import OtelStatLogger
from quire_monitoring.totals import Totals
from quire_monitoring.triton import TritonStatLogger
from support.otlp import Collector, attributes_of, collect
from support.serving import wait_until

LABELS = {"model": "m", "version": "1", "engine": "0"}
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def request(
    *, label: str = "mine", traceparent: str | None = None, operation: str = "text_completion", response_id: str = "",
    **fields: Any,
) -> FinishedRequestStats:  # fmt: skip
    options = RequestOptions(label=label, traceparent=traceparent, operation=operation, response_id=response_id)
    values: dict[str, Any] = {
        "finish_reason": "length", "num_prompt_tokens": 7, "num_output_tokens": 5, "e2e_seconds": 2.0,
        "phases": [("queue", 0.0), ("prefill", 0.25), ("decode", 0.75), ("preempted", 1.0), ("decode", 1.5)],
        "time_to_first_token_seconds": 0.75, "generation_seconds": 1.2, "num_preemptions": 1, "options": options,
        "slo_verdict": "good", "slo_cause": "none",
    }  # fmt: skip
    return FinishedRequestStats(**(values | fields))


def record(stat_logger: OtelStatLogger, *requests: FinishedRequestStats) -> None:
    stat_logger.record(None, IterationStats(finished_requests=list(requests)))


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collect() as running:
        yield running


def totals() -> Totals:
    return TritonStatLogger(lambda definition: None, LABELS).totals()


def exporter(endpoint: str, **options: Any) -> OtelStatLogger:
    stat_logger = OtelStatLogger(endpoint, LABELS, export_interval_seconds=0.2, **options)
    stat_logger.start(totals())
    return stat_logger


def test_one_trace_per_request_with_its_phases(collector: Collector) -> None:
    stat_logger = exporter(collector.endpoint)
    before = time.time_ns()
    record(stat_logger, request(traceparent=f"00-{TRACE_ID}-{PARENT_ID}-01"))
    collector.wait_for(lambda: len(collector.spans) == 6)
    stat_logger.stop()
    assert len(collector.spans) == 6
    (root,) = (span for span in collector.spans if span.name == "text_completion m")
    children = [span for span in collector.spans if span is not root]
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert root.end_time_unix_nano - root.start_time_unix_nano == 2_000_000_000
    assert before <= root.end_time_unix_nano <= time.time_ns()
    attributes = attributes_of(root)
    assert attributes["gen_ai.request.model"] == "m"
    assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == (7, 5)
    assert attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert (attributes["gen_ai.response.id"], attributes["quire.slo.verdict"]) == ("mine", "good")
    assert {span.parent_span_id for span in children} == {root.span_id}
    assert {span.trace_id for span in children} == {root.trace_id}
    start = root.start_time_unix_nano
    times = [
        (span.name, (span.start_time_unix_nano - start) / 1e9, (span.end_time_unix_nano - start) / 1e9)
        for span in children
    ]
    assert times == [
        ("queue", 0, 0.25), ("prefill", 0.25, 0.75), ("decode", 0.75, 1.0), ("preemption", 1.0, 1.5),
        ("decode", 1.5, 2.0),
    ]  # fmt: skip
    assert collector.resources[0]["service.name"] == "quire"


def test_an_answer_has_the_clients_name_and_a_chat_is_a_chat(collector: Collector) -> None:
    stat_logger = exporter(collector.endpoint)
    times = {"phases": [("held", 0.0), ("queue", 1.0), ("replayed", 1.5)], "time_to_first_token_seconds": None}
    record(stat_logger, request(operation="chat", response_id="chatcmpl-1", **times))
    stat_logger.stop()
    root = next(span for span in collector.spans if span.name == "chat m")
    attributes = attributes_of(root)
    assert (attributes["gen_ai.operation.name"], attributes["gen_ai.response.id"]) == ("chat", "chatcmpl-1")
    assert (attributes["quire.request.label"], attributes["gen_ai.usage.output_tokens"]) == ("mine", 5)
    assert [span.name for span in collector.spans if span is not root] == ["held", "queue", "replay"]
    (point,) = collector.metrics["gen_ai.server.request.duration"].histogram.data_points
    assert attributes_of(point)["gen_ai.operation.name"] == "chat"


def test_a_span_says_what_was_asked_and_what_happened(collector: Collector) -> None:
    params = SamplingParams(
        temperature=0.5, top_p=0.9, top_k=7, max_tokens=9, seed=3, presence_penalty=0.25, stop=["secret"],
        structured_outputs=StructuredOutputsParams(json_object=True),
    )  # fmt: skip
    stat_logger = exporter(collector.endpoint)
    record(
        stat_logger,
        request(request_id="ours", params=params, is_streamed=True, num_cached_tokens=4, num_replays=1,
                grammar_seconds=0.125, prefill_chunks=[(0.25, 4), (0.5, 3)], finish_reason="error",
                error="the rank died"),
        request(label="", request_id="other", params=SamplingParams(seed=2**64 - 1)),
    )  # fmt: skip
    stat_logger.stop()
    root = next(one for one in collector.spans if attributes_of(one).get("quire.request.id") == "ours")
    attributes = attributes_of(root)
    named = {name: attributes[name] for name in attributes if name.startswith("gen_ai.")}
    published = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    assert named.keys() <= published
    assert attributes["quire.request.label"] == attributes["gen_ai.response.id"] == "mine"
    expected = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "max_tokens": 9, "seed": 3, "presence_penalty": 0.25,
        "frequency_penalty": 0.0, "stream": True, "choice.count": 1, "model": "m",
    }  # fmt: skip
    asked = "gen_ai.request."
    assert {name.removeprefix(asked): named[name] for name in named if name.startswith(asked)} == expected
    assert "secret" not in str(collector.spans)
    assert named["gen_ai.output.type"] == "json"
    assert named["gen_ai.usage.cache_read.input_tokens"] == 4
    assert named["gen_ai.response.time_to_first_chunk"] == 0.75
    assert (root.status.code, root.status.message) == (2, "the rank died")
    start = root.start_time_unix_nano
    children = {one.name: one for one in reversed(collector.spans) if one.parent_span_id == root.span_id}
    seen = {
        (name, event.name): (event.time_unix_nano - start) / 1e9
        for name, span in [("root", root), *children.items()]
        for event in span.events
    }
    assert seen == {("queue", "grammar compiled"): 0.125, ("prefill", "chunk"): 0.75}
    assert [attributes_of(event)["quire.num_tokens"] for event in children["prefill"].events] == [4, 3]
    other = next(one for one in collector.spans if attributes_of(one).get("quire.request.id") == "other")
    assert attributes_of(other)["gen_ai.response.id"] == "other"
    assert (
        attributes_of(other)
        .keys()
        .isdisjoint({"gen_ai.request.seed", "gen_ai.response.time_to_first_chunk", "gen_ai.request.top_k"})
    )


def test_a_request_that_was_refused_is_one_span(collector: Collector) -> None:
    stat_logger = exporter(collector.endpoint)
    refused = FinishedRequestStats("rejected", e2e_seconds=0.5, error_code="invalid_arg",
                                   options=request(traceparent=f"00-{TRACE_ID}-{PARENT_ID}-01").options)  # fmt: skip
    stat_logger.record_rejection(refused)
    stat_logger.stop()
    (span,) = collector.spans
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert span.end_time_unix_nano - span.start_time_unix_nano == 500_000_000
    assert (span.status.code, span.status.message) == (2, "invalid_arg")
    attributes = attributes_of(span)
    assert (attributes["error.type"], attributes["gen_ai.response.id"]) == ("invalid_arg", "mine")
    assert not [name for name in attributes if name.startswith(("gen_ai.usage", "gen_ai.response.finish", "quire.slo"))]
    (point,) = collector.metrics["gen_ai.server.request.duration"].histogram.data_points
    assert (point.count, attributes_of(point)["error.type"]) == (1, "invalid_arg")


def test_metrics_under_the_genai_names(collector: Collector) -> None:
    stat_logger = exporter(collector.endpoint)
    failed = request(finish_reason="error", time_to_first_token_seconds=None, num_output_tokens=0)
    record(stat_logger, request(), request(e2e_seconds=3.0), failed)
    stat_logger.stop()
    metrics = {name: metric for name, metric in collector.metrics.items() if name.startswith("gen_ai.")}
    assert metrics.keys() == {
        "gen_ai.server.request.duration", "gen_ai.server.time_to_first_token", "gen_ai.server.time_per_output_token",
    }  # fmt: skip
    assert {metric.unit for metric in metrics.values()} == {"s"}
    good, bad = sorted(
        collector.metrics["gen_ai.server.request.duration"].histogram.data_points,
        key=lambda point: "error.type" in attributes_of(point),
    )
    assert (good.count, good.sum) == (2, 5.0)
    assert list(good.explicit_bounds)[:2] == [0.01, 0.02]
    assert (bad.count, attributes_of(bad)["error.type"]) == (1, "error")
    (per_token,) = collector.metrics["gen_ai.server.time_per_output_token"].histogram.data_points
    assert (per_token.count, per_token.sum) == (2, pytest.approx(0.6))
    (first_token,) = collector.metrics["gen_ai.server.time_to_first_token"].histogram.data_points
    assert (first_token.count, first_token.sum) == (2, 1.5)


def test_without_statistics_there_are_traces_alone(collector: Collector) -> None:
    stat_logger = OtelStatLogger(collector.endpoint, LABELS, export_interval_seconds=0.2)
    record(stat_logger, request())
    stat_logger.stop()
    assert collector.spans
    assert not collector.metrics


def test_a_process_that_was_started_again_is_another_instance(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        exporter(collector.endpoint).stop()
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=staging")
    exporter(collector.endpoint).stop()
    first, second, named = collector.resources
    assert first["service.instance.id"] != second["service.instance.id"]
    assert (first["service.name"], first["service.version"]) == ("quire", version("quire"))
    assert (first["quire.model"], first["quire.engine"]) == ("m", "0")
    assert (named["service.name"], named["deployment.environment.name"]) == ("chat", "staging")


def test_sampling_follows_the_caller_and_else_the_ratio(collector: Collector) -> None:
    stat_logger = exporter(collector.endpoint, trace_sample_ratio=0.0)
    record(stat_logger, request(), request(traceparent="no context at all"))
    record(stat_logger, request(traceparent=f"00-{TRACE_ID}-{PARENT_ID}-01"))
    stat_logger.stop()
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE_ID}
    collector.spans.clear()
    stat_logger = exporter(collector.endpoint)
    record(stat_logger, request(traceparent=f"00-{TRACE_ID}-{PARENT_ID}-00"), request(traceparent="00-junk"))
    record(stat_logger, request(finish_reason="abort", time_to_first_token_seconds=None, phases=[("queue", 0.0)]))
    stat_logger.stop()
    assert TRACE_ID not in {span.trace_id.hex() for span in collector.spans}
    assert len({span.trace_id for span in collector.spans}) == 2
    assert sorted(span.name for span in collector.spans)[-2:] == ["text_completion m"] * 2


def test_a_collector_that_is_not_there_costs_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        caplog.set_level(logging.INFO)
        stat_logger = exporter(f"http://127.0.0.1:{taken.getsockname()[1]}")
        for _ in range(300):
            record(stat_logger, request())
        wait_until(lambda: caplog.records, "the warning is logged")
        threading.Event().wait(1.0)  # some more attempts
        stat_logger.stop()
    (line,) = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert line.startswith("nothing can be exported to the OTLP collector at http://127.0.0.1:")


def test_a_collector_that_hangs_holds_up_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as hanging:
        hanging.bind(("127.0.0.1", 0))
        hanging.listen()
        stat_logger = exporter(f"http://127.0.0.1:{hanging.getsockname()[1]}")
        for _ in range(15_000):  # more than are kept, and too many for one that waits at each, or at each hundredth
            record(stat_logger, request())
        stat_logger.stop()  # waits for its timeout at most, not for an answer
    assert len([one for one in caplog.records if one.levelno >= logging.WARNING]) <= 2


def test_a_request_for_a_vector_says_its_size_and_nothing_of_sampling(collector: Collector) -> None:
    stat_logger = exporter(collector.endpoint)
    options = RequestOptions(operation="embeddings", pooling_params=PoolingParams(task="embed", dimensions=64))
    times = {"phases": [("queue", 0.0), ("prefill", 1.0)], "time_to_first_token_seconds": None}
    sampling = SamplingParams(max_tokens=1)
    record(stat_logger, request(finish_reason="stop", options=options, params=sampling, num_output_tokens=0, **times))
    stat_logger.stop()
    attributes = attributes_of(next(span for span in collector.spans if span.name == "embeddings m"))
    assert attributes["gen_ai.operation.name"] == "embeddings"
    assert (attributes["gen_ai.embeddings.dimension.count"], attributes["gen_ai.usage.input_tokens"]) == (64, 7)
    assert attributes["quire.task"] == "embed"
    assert not [name for name in attributes if "output" in name or name.startswith("gen_ai.request.max")]
    (point,) = collector.metrics["gen_ai.server.request.duration"].histogram.data_points
    assert attributes_of(point)["gen_ai.operation.name"] == "embeddings"
    assert "gen_ai.server.time_to_first_token" not in collector.metrics
