"""Every metric on a real tritonserver's /metrics, and goodput that is exact."""

import asyncio
import json
import re
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from quire_engine.slo import parse_classes
from quire_monitoring.definitions import MetricKind, MetricsConfig, make_aliases, make_cache_info, make_metrics
from support.clients import Answer, ask, ask_all, run, with_client
from support.serving import SMALL, Server, add_model, serve, wait_until
from tritonclient.grpc import aio as grpc_aio

pytestmark = pytest.mark.server

SLO: dict[str, Any] = {"default": {"e2e_ms": 1e7}, "fast": {"ttft_ms": 0.001}, "batch": {}}
MODELS: dict[str, dict[str, Any]] = {
    "judged": {"slo": SLO, "max_num_seqs": 1, "max_queued_requests": 0},
    "plain": {"metric_aliases": "none", "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}
CACHE = {
    "block_size": "16", "cache_dtype": "auto", "enable_prefix_caching": "True", "gpu_memory_utilization": "0.9",
}  # fmt: skip
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository: Path = tmp_path_factory.mktemp("repository")
    for name, settings in MODELS.items():
        add_model(repository, name, {**SMALL, **settings})
    with serve("--model-repository", str(repository)) as running:
        yield running


def scrape(server: Server, model: str) -> tuple[Samples, dict[str, str]]:
    """All our samples of a model without the common labels, and the types that are declared."""
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    samples: Samples = {}
    for match in filter(None, (re.fullmatch(r"((?:quire_|vllm:)\w+)\{(.*)\} (\S+)", line) for line in lines)):
        labels = dict(re.findall(r'(\w+)="(.*?)"', match[2]))
        common = {name: labels.pop(name) for name in ("model", "version", "engine")}
        if common["model"] == model:
            assert common == {"model": model, "version": "1", "engine": "0"}
            assert labels.pop("model_name", None) == (model if match[1].startswith("vllm:") else None)
            samples[match[1], frozenset(labels.items())] = float(match[3])
    return samples, dict(line.split()[2:4] for line in lines if line.startswith("# TYPE"))


def value(server: Server, name: str, model: str = "judged", **labels: str) -> float:
    return scrape(server, model)[0][name, frozenset(labels.items())]


def verdicts(server: Server) -> Counter[tuple[str, str, str]]:
    """(class, verdict, cause) → requests, of those that there were."""
    found: Counter[tuple[str, str, str]] = Counter()
    for (name, labels), count in scrape(server, "judged")[0].items():
        if name == "quire_slo_requests_total" and count:
            own = dict(labels)
            found[own["slo"], own["verdict"], own["cause"]] = int(count)
    return found


def differences(server: Server, model: str) -> set[tuple[str, frozenset[tuple[str, str]]]]:
    """Series of a model that are scraped and not in the table, or in the table and not scraped."""
    settings = MODELS[model]
    drafts = settings.get("speculative_config", {}).get("num_speculative_tokens", 0)
    samples, types = scrape(server, model)
    (name,) = {dict(labels)["settings"] for name, labels in samples if name == "quire_model_load_timestamp_seconds"}
    assert name
    slo_classes = parse_classes(settings.get("slo", {}))
    metrics = make_metrics(MetricsConfig(slo_classes=slo_classes, max_draft_tokens=drafts, settings=name))
    num_blocks = sum(number for (name, _), number in samples.items() if name == "quire_kv_blocks")
    metrics = (*metrics, make_cache_info({**CACHE, "num_gpu_blocks": f"{num_blocks:.0f}"}))
    expected = set()
    for definition in (*metrics, *(make_aliases(metrics) if model == "judged" else ())):
        for own in definition.label_sets():
            if definition.kind is not MetricKind.HISTOGRAM:
                expected.add((definition.name, frozenset(own.items())))
                continue
            expected |= {(definition.name + suffix, frozenset(own.items())) for suffix in ("_sum", "_count")}
            for bound in [f"{bound:g}" for bound in definition.buckets] + ["+Inf"]:
                expected.add((definition.name + "_bucket", frozenset({**own, "le": bound}.items())))
        if not definition.is_frequent:
            assert types.get(definition.name) in (definition.kind.value, None)
    return expected ^ samples.keys()


@pytest.mark.parametrize("model", MODELS)
def test_metrics_are_those_of_the_table(server: Server, model: str) -> None:
    with suppress(AssertionError):  # gauges are refreshed from time to time
        wait_until(lambda: not differences(server, model), "all series are there")
    assert differences(server, model) == set()


def test_steps_and_tokens_are_counted_under_both_names(server: Server) -> None:
    before = scrape(server, "judged")[0]
    run(server, model="judged", input_ids=[5] * 5, max_tokens=7, ignore_eos=True)

    def growth(name: str, **labels: str) -> float:
        key = name, frozenset(labels.items())
        return scrape(server, "judged")[0][key] - before[key]

    def grows(name: str, count: float, **labels: str) -> None:
        """What is of every token or step comes after the last response."""
        wait_until(lambda: growth(name, **labels) == count, f"{name} grows by {count}")

    assert growth("vllm:request_success_total", finished_reason="length") == 1
    grows("vllm:time_per_output_token_seconds_count", 6)
    grows("vllm:time_per_output_token_seconds_bucket", 6, le="+Inf")
    assert growth("vllm:request_params_n_sum") == 1
    for prefix in ("quire_", "vllm:"):
        grows(f"{prefix}inter_token_latency_seconds_count", 6)
        for name, count in {
            "generation_tokens_total": 7, "prompt_tokens_total": 5,
            "request_prompt_tokens_sum": 5, "request_decode_time_seconds_count": 1,
            "request_generation_tokens_sum": 7, "request_prefill_time_seconds_count": 1,
        }.items():  # fmt: skip
            assert growth(prefix + name) == count, prefix + name
    assert growth("vllm:time_to_first_token_seconds_count") == 1
    assert growth("quire_time_to_first_token_seconds_count", slo="default") == 1
    grows("quire_iteration_tokens_sum", 5 + 6)
    grows("vllm:iteration_tokens_total_sum", 5 + 6)
    for phase in ("schedule", "execute", "update"):
        grows("quire_step_seconds_count", 7, phase=phase)
        assert growth("quire_step_seconds_bucket", phase=phase, le="+Inf") == 7
        assert 0 < growth("quire_step_seconds_sum", phase=phase) < 10
    assert value(server, "quire_worker_up", rank="0") == 1


def test_who_has_the_last_response_finds_the_request_counted(server: Server) -> None:
    """One of several that run, not only the last one, and one that is refused."""

    def counted() -> tuple[float, float]:
        samples = scrape(server, "plain")[0]
        ended = sum(value for (name, _), value in samples.items() if name == "quire_requests_total")
        return ended, samples["quire_e2e_request_latency_seconds_count", frozenset({("slo", "default")})]

    ended, timed = counted()
    lock = asyncio.Lock()
    num_done = num_refused = 0

    async def work(client: grpc_aio.InferenceServerClient) -> None:
        async def one(index: int) -> None:
            nonlocal num_done, num_refused
            is_bad = index % 4 == 0
            answer = await ask(client, model="plain", text_input="x = ", max_tokens=3 + 3 * index, ignore_eos=True,
                               stream=True, parameters={"slo_class": "gold"} if is_bad else None)  # fmt: skip
            assert (answer.error is not None) == is_bad
            async with lock:
                num_done, num_refused = num_done + 1, num_refused + is_bad
                now = await asyncio.to_thread(counted)
                assert now[0] >= ended + num_done
                assert now[1] >= timed + num_done - num_refused

        await asyncio.gather(*(one(index) for index in range(16)))

    asyncio.run(with_client(server, work))
    assert counted() == (ended + 16, timed + 12)


def test_goodput_is_exact(server: Server) -> None:
    """Good ones, missed ones, one that is refused, one that is cancelled, one that is wrong."""
    before = verdicts(server)
    tokens_before = value(server, "quire_goodput_tokens_total", slo="default")
    short = {"model": "judged", "text_input": "x = ", "max_tokens": 3, "ignore_eos": True, "return_perf_metrics": True}

    def verdict(answer: Answer) -> tuple[str, str, str]:
        metrics = json.loads(answer.responses[-1]["perf_metrics"][0])
        return metrics["slo_class"], metrics["slo_verdict"], metrics["slo_cause"]

    async def work(client: grpc_aio.InferenceServerClient) -> None:
        for _ in range(3):
            assert verdict(await ask(client, **short)) == ("default", "good", "none")
        for parameters, expected in (
            ({"slo_class": "fast"}, ("fast", "miss", "ttft")),
            ({"slo_class": "fast", "slo_ttft_ms": "1e7"}, ("fast", "good", "none")),
            ({"slo_class": "batch", "slo_e2e_ms": "0.001"}, ("batch", "miss", "e2e")),
            ({"slo_tpot_ms": "0.000001"}, ("default", "miss", "tpot")),
        ):
            assert verdict(await ask(client, parameters=parameters, **short)) == expected
        first = asyncio.Event()
        long = {**short, "max_tokens": 400, "stream": True}
        running = asyncio.create_task(ask(client, **long, on_response=lambda response: first.set()))
        await first.wait()
        refused = await ask(client, parameters={"slo_class": "batch"}, **short)
        assert "queue is full" in refused.message
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        wrong = await ask(client, parameters={"slo_class": "gold"}, **short)
        assert "slo_class is 'gold'; this model has batch, default, fast" in wrong.message

    asyncio.run(with_client(server, work))
    expected = Counter({
        ("default", "good", "none"): 3, ("fast", "miss", "ttft"): 1, ("fast", "good", "none"): 1,
        ("batch", "miss", "e2e"): 1, ("default", "miss", "tpot"): 1, ("batch", "miss", "rejected"): 1,
    })  # fmt: skip
    wait_until(lambda: verdicts(server) - before == expected, f"{expected}")
    wait_until(lambda: value(server, "quire_goodput_tokens_total", slo="default") == tokens_before + 9, "tokens")
    wait_until(lambda: value(server, "quire_cancel_to_free_seconds_count") >= 1, "the cancellation is acknowledged")
    after = verdicts(server)
    for slo_class in SLO:
        of_all, of_these = (
            found[slo_class, "good", "none"] / sum(count for (name, _, _), count in found.items() if name == slo_class)
            for found in (after, expected)
        )
        ratios = [value(server, "quire_goodput_ratio", slo=slo_class, window=window) for window in ("1m", "5m")]
        # What other tests sent may be longer ago than a minute.
        assert ratios in (pytest.approx([of_all, of_all]), pytest.approx([of_these, of_all]))


def test_what_clients_say_adds_no_series(server: Server) -> None:
    before = {model: scrape(server, model)[0].keys() for model in MODELS}
    rejected = value(server, "quire_requests_total", outcome="rejected")
    junk = [{"model": "judged", "text_input": "x", "parameters": {"slo_class": f"junk{i}"}} for i in range(300)] + [
        {"model": f"junk{i}", "text_input": "x"} for i in range(100)
    ]
    judged = verdicts(server)
    assert all(answer.message for answer in ask_all(server, junk))
    wait_until(lambda: value(server, "quire_requests_total", outcome="rejected") == rejected + 300, "all are counted")
    assert {model: scrape(server, model)[0].keys() for model in MODELS} == before
    assert verdicts(server) == judged
