"""Traces and metrics of a real tritonserver, at a real OTLP receiver."""

import queue
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from support.clients import ask_all, run
from support.otlp import Collector, attributes_of, collect, samples_of
from support.serving import SMALL, Server, add_model, serve

pytestmark = pytest.mark.server

TRACE_ID, PARENT_ID, OTHER_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", "00f067aa0ba902b7"
TRITON_TRACES = (
    "--trace-config=mode=opentelemetry", "--trace-config=level=TIMESTAMPS", "--trace-config=rate=1",
    # It speaks HTTP, not gRPC; nobody listens there, and nothing depends on it.
    "--trace-config=opentelemetry,url=http://127.0.0.1:9/v1/traces",
)  # fmt: skip


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collect() as running:
        yield running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Server]:
    repository: Path = tmp_path_factory.mktemp("repository")
    add_model(repository, "traced", {**SMALL, "otlp_endpoint": collector.endpoint})
    with serve("--model-repository", str(repository), "--", *TRITON_TRACES) as running:
        yield running


def roots(collector: Collector, label: str) -> list[Any]:
    return [span for span in collector.spans if attributes_of(span).get("gen_ai.response.id") == label]


def children(collector: Collector, root: Any) -> set[str]:
    return {span.name for span in collector.spans if span.parent_span_id == root.span_id}


def test_a_request_continues_its_callers_trace(server: Server, collector: Collector) -> None:
    context = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
    run(
        server,
        model="traced",
        request_id="called",
        text_input="x = ",
        max_tokens=5,
        ignore_eos=True,
        parameters=context,
    )
    collector.wait_for(lambda: roots(collector, "called"))
    (root,) = roots(collector, "called")
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    collector.wait_for(lambda: children(collector, root) == {"queue", "prefill", "decode"})


def test_a_traceparent_header_is_forwarded_but_a_parameter_counts_more(server: Server, collector: Collector) -> None:
    prompt = grpcclient.InferInput("text_input", [1], "BYTES")
    prompt.set_data_from_numpy(np.array([b"x"], dtype=object))
    answers: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(server.grpc) as client:
        client.start_stream(
            lambda result, error: answers.put(error), headers={"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
        )
        for label, own in (("header", {}), ("both", {"traceparent": f"00-{TRACE_ID}-{OTHER_ID}-01"})):
            client.async_stream_infer("traced", [prompt], request_id=label, parameters={"max_tokens": 2, **own})
            assert answers.get(timeout=60) is None
    collector.wait_for(lambda: roots(collector, "header") and roots(collector, "both"))
    parents = [roots(collector, label)[0].parent_span_id.hex() for label in ("header", "both")]
    assert parents == [PARENT_ID, OTHER_ID]


def test_a_request_continues_the_servers_own_trace(server: Server, collector: Collector) -> None:
    ask_all(
        server, [{"model": "traced", "request_id": f"own{i}", "text_input": "x", "max_tokens": 2} for i in range(2)]
    )
    collector.wait_for(lambda: roots(collector, "own0") and roots(collector, "own1"))
    found = [*roots(collector, "own0"), *roots(collector, "own1")]
    assert len({root.trace_id for root in found}) == 2
    assert all(root.parent_span_id for root in found)


def test_a_request_that_is_refused_is_part_of_its_callers_trace(server: Server, collector: Collector) -> None:
    context = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "slo_class": "unknown"}
    answer = run(server, model="traced", request_id="refused", text_input="x", parameters=context)
    assert "slo_class is 'unknown'" in answer.message
    collector.wait_for(lambda: roots(collector, "refused"))
    (root,) = roots(collector, "refused")
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert attributes_of(root)["error.type"] == "invalid_arg"
    assert not children(collector, root)


def scraped(server: Server) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """All samples of the model on /metrics under our names."""
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    found = filter(None, (re.fullmatch(r"(quire_\w+)\{(.*)\} (\S+)", line) for line in lines))
    return {(one[1], frozenset(re.findall(r'(\w+)="(.*?)"', one[2]))): float(one[3]) for one in found}


def test_every_metric_arrives_with_the_value_on_the_servers_page(server: Server, collector: Collector) -> None:
    run(server, model="traced", text_input="x", max_tokens=3, ignore_eos=True)

    def agree() -> bool:
        shown = scraped(server)
        sent = {
            (name, frozenset(labels.items())): value
            for metric in collector.metrics.values()
            if metric.name.startswith("quire_")
            for name, labels, value in samples_of(metric)
        }
        return sent.keys() == shown.keys() and all(
            value == pytest.approx(shown[one], rel=1e-4) for one, value in sent.items()
        )

    collector.wait_for(agree)
    (point,) = collector.metrics["gen_ai.server.time_per_output_token"].histogram.data_points
    assert attributes_of(point)["gen_ai.request.model"] == "traced"
    assert sum(point.as_int for point in collector.metrics["quire_kv_blocks"].gauge.data_points) > 0
