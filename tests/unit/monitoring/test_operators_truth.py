"""What operators are shown of requests that still wait, and what the time of all of them went to.

The frontend and what exports are real. The engines compute nothing, but have real schedulers and small caches.
"""

import asyncio
import contextlib
import math
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from quire_engine import AsyncLLM, EngineConfig, SamplingParams
from quire_engine.replicas import local_replica
from quire_engine.slo import RequestSLO, parse_classes
from quire_engine.snapshot import Snapshot
from quire_engine.stats import FinishedRequestStats, IterationStats
from quire_engine.timeline import REQUEST_PHASES
from quire_monitoring.accumulator import Accumulator
from quire_monitoring.definitions import MetricsConfig, Series, series
from quire_monitoring.ended_requests import EndedRequestLog
from quire_monitoring.otel.traces import RequestTraces
from support.engines import Recorder, until
from support.fleet import Engine, SchedulingEngine
from support.serving import ROOT

MODEL = ROOT / "model_repository" / "tinypy" / "1" / "model"
NUM_REQUESTS = 1000
SLO = {"default": {"e2e_ms": 1e8}, "fast": {"ttft_ms": 1}, "steady": {"tpot_ms": 300}, "short": {"e2e_ms": 1}}


class World:
    """A frontend, its engines, and all that exports its statistics."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        classes = parse_classes(SLO)
        self.recorder, self.ended = Recorder(), EndedRequestLog(5000, classes)
        self.accumulator = Accumulator(MetricsConfig(slo_classes=classes))
        self._reader = self.accumulator.reader()
        self.counters: Counter[Series] = Counter()
        self.observations: dict[Series, list[float]] = {}
        config = EngineConfig.from_settings({"model": str(folder), "slo": SLO, **settings})
        self.llm = AsyncLLM(config, [self.recorder, self.ended, self.accumulator])
        self.steps_left = math.inf
        """Of the engines together; they hang after these."""

    @property
    def engines(self) -> list[Any]:
        """Of the replicas that are up."""
        return [one.link for one in self.llm._client.replicas if one.is_alive]

    @property
    def iterations(self) -> list[IterationStats]:
        return self.recorder.iterations

    @property
    def finished(self) -> list[FinishedRequestStats]:
        return self.recorder.finished

    def read(self) -> None:
        """Take in what was counted."""
        counters, observations = self._reader.take()
        self.counters.update(counters)
        for one, values in observations.items():
            self.observations.setdefault(one, []).extend(values)

    def misses(self, slo: str) -> dict[str, int]:
        """Counted so far, by cause."""
        self.read()
        name = "quire_slo_requests_total"
        found = {cause: self.counters[series(name, slo=slo, verdict="miss", cause=cause)]
                 for cause in ("ttft", "tpot", "e2e", "rejected", "error")}  # fmt: skip
        return {cause: count for cause, count in found.items() if count}

    def gauge(self, name: str, **labels: str) -> float:
        """As it is exported, also while the engine is down."""
        return self.accumulator.gauges(self.llm.is_healthy, [])[series(name, **labels)]

    def submit(self, prompt: list[int], max_tokens: int, slo: str = "default", n: int = 1) -> "asyncio.Task[None]":
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, detokenize=False, n=n, temperature=float(n > 1))

        async def last() -> None:
            async for _ in self.llm.generate(prompt, params, slo=RequestSLO(slo_class=slo)):
                pass

        return asyncio.ensure_future(last())

    async def _drive(self) -> None:
        while True:
            for engine in self.engines:
                if self.steps_left > 0 and engine.is_alive and engine.step():
                    self.steps_left -= 1
            await asyncio.sleep(0)

    def run(self, main: Callable[[], Awaitable[None]]) -> None:
        async def driven() -> None:
            await self.llm.start()
            driver = asyncio.ensure_future(self._drive())
            try:
                await main()
            finally:
                driver.cancel()
                self.llm.shutdown()

        asyncio.run(driven())


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., World]]:
    monkeypatch.setattr(local_replica, "LocalLink", SchedulingEngine)
    Engine.all, Engine.may_start, Engine.fails_to_start = [], threading.Event(), set()
    Engine.may_start.set()
    yield lambda **settings: World(MODEL, **settings)
    Engine.may_start.set()


# -- requests that still wait -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slo", "cause"), [("fast", "ttft"), ("short", "e2e")])
def test_a_miss_counts_when_its_time_has_passed_and_not_again_at_the_end(
    world: Callable[..., World], slo: str, cause: str
) -> None:
    one = world()

    async def main() -> None:
        one.steps_left = 0
        tasks = [one.submit([1, 2, 3], 4, slo) for _ in range(3)]
        await until(lambda: one.misses(slo) == {cause: 3})
        assert one.finished == []
        assert one.gauge("quire_requests_overdue", slo=slo, target=cause) == 3
        assert one.gauge("quire_goodput_ratio", slo=slo, window="1m") == 0
        tasks[0].cancel()
        one.steps_left = math.inf
        await asyncio.gather(*tasks[1:])
        await until(lambda: one.gauge("quire_requests_overdue", slo=slo, target=cause) == 0)
        assert one.misses(slo) == {cause: 3}, "one whose client has given up has missed it all the same"
        verdicts = [(end.slo_verdict, end.slo_cause, end.missed_live) for end in one.finished]
        assert verdicts == [("miss", cause, True)] * 3

    one.run(main)


def test_a_late_token_is_overdue_at_once_and_a_miss_once_it_cannot_be_made_up_for(world: Callable[..., World]) -> None:
    one = world()

    async def main() -> None:
        one.steps_left = 0
        short, long = one.submit([1, 2, 3], 2, "steady"), one.submit([4, 5, 6], 60, "steady")
        await until(lambda: len(one.engines[0].requests) == 2)
        one.steps_left = 1
        await until(lambda: one.gauge("quire_requests_overdue", slo="steady", target="tpot") == 2)
        await until(lambda: one.misses("steady") == {"tpot": 1})
        assert one.finished == [], "the long one may still be in time on average"
        one.steps_left = 1
        await short
        assert [end.slo_cause for end in one.finished] == ["tpot"]
        long.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await long

    one.run(main)


def test_requests_that_wait_for_an_engine_are_counted_and_seen_as_held(world: Callable[..., World]) -> None:
    one = world()

    async def main() -> None:
        await one.submit([1, 2, 3], 4)
        Engine.may_start.clear()
        one.engines[0].kill()
        await until(lambda: not one.llm.is_healthy)
        tasks = [one.submit([1, 2, 3], 4, "fast") for _ in range(5)]
        await until(lambda: one.gauge("quire_requests_waiting", reason="held") == 5)
        assert one.gauge("quire_engine_up") == 0
        gauges = one.accumulator.gauges(False, [], aliases=True)
        assert gauges[series("vllm:num_requests_waiting")] == 5, "what autoscaling goes by, under either name"
        assert sum(value for (name, _), value in gauges.items() if name == "quire_requests_waiting") == 5
        await until(lambda: one.misses("fast") == {"ttft": 5})
        seen: Snapshot = await one.llm.snapshot()
        assert [request.phase for request in seen.requests] == ["held"] * 5
        assert [[phase for phase, _ in request.phases] for request in seen.requests] == [["held"]] * 5
        Engine.may_start.set()
        await asyncio.gather(*tasks)
        await until(lambda: one.gauge("quire_requests_waiting", reason="held") == 0)
        for end in one.finished[1:]:
            assert [phase for phase, _ in end.phases] == ["held", "queue", "prefill", "decode"]

    one.run(main)


def test_queue_and_prefill_are_observed_when_they_end(world: Callable[..., World]) -> None:
    one = world()

    def observed(phase: str) -> int:
        one.read()
        return len(one.observations.get(series(f"quire_request_{phase}_time_seconds"), ()))

    async def main() -> None:
        one.steps_left = 3
        task = one.submit([1, 2, 3], 60)
        await until(lambda: observed("queue") == 1 and observed("prefill") == 1)
        assert one.finished == []
        assert observed("decode") == 0
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert (observed("queue"), observed("prefill"), observed("decode")) == (1, 1, 1)

    one.run(main)


# -- what the time goes to --------------------------------------------------------------------------------------------


def spans_of(finished: list[FinishedRequestStats]) -> list[list[Any]]:
    """Of each request, its span and then those of its phases in order."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    traces = RequestTraces(provider.get_tracer("test"), {"gen_ai.request.model": "m"})
    found = []
    for request in finished:
        traces.make(10**18, request)
        *children, root = exporter.get_finished_spans()
        found.append([root, *children])
        exporter.clear()
    return found


def test_the_phases_of_all_requests_add_up_to_their_time(world: Callable[..., World]) -> None:
    """With roles, deaths, replays, isolation, preemptions, requests that come while there is no engine, and cancels."""
    transfer = {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": {"shared_storage_path": "/kv"}}
    one = world(disaggregation={"prefill": 2, "decode": 2}, kv_transfer_config=transfer)
    random = Random(7)

    async def main() -> None:
        tasks: list[asyncio.Task[None]] = []

        def submit(number: int) -> None:
            for _ in range(number):
                prompt = [random.randrange(1, 60) for _ in range(random.choice([3, 9, 20, 24]))]
                tasks.append(one.submit(prompt, random.randint(1, 12), n=random.choice([1] * 9 + [2])))

        async def until_ended(share: float) -> None:
            await until(lambda: len(one.finished) >= share * len(tasks), seconds=120)

        for wave in range(10):
            submit(NUM_REQUESTS // 10)
            await until_ended(0.3)
            if wave in (2, 5):  # all of them, for a while
                Engine.may_start.clear()
                for engine in one.engines:
                    engine.kill()
                await until(lambda: not one.llm.is_healthy)
                submit(5)
                await until(lambda: one.llm._output_processor.has_requests())
                Engine.may_start.set()
                await until(lambda: len(one.engines) == 4)
            elif wave < 8:
                random.choice(one.engines).kill()
            random.choice(tasks).cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not one.llm._output_processor.has_requests()

    one.run(main)
    one.read()
    assert len(one.finished) >= NUM_REQUESTS
    totals = Counter[str]()
    for end in one.finished:
        assert sum(end.phase_seconds.values()) == pytest.approx(end.e2e_seconds, abs=1e-3)
        assert end.phases[0][1] == 0.0
        begins = [begin for _, begin in end.phases]
        assert begins == sorted(begins)
        totals.update(end.phase_seconds)
    print(f"{len(one.finished)} requests: {dict(totals)}")
    assert all(totals[phase] > 0 for phase in REQUEST_PHASES if phase != "encode"), "each of them has occurred"

    for kept in one.ended.since().requests:
        whole = sum(getattr(kept, f"{phase}_seconds") for phase in REQUEST_PHASES)
        assert whole == pytest.approx(kept.e2e_seconds, abs=1e-3)

    observed = {
        phase: sum(one.observations[series(f"quire_request_{phase}_time_seconds")])
        for phase in REQUEST_PHASES
        if phase != "encode"
    }
    assert observed == pytest.approx({phase: totals[phase] for phase in observed}, abs=1e-3)
    latencies = [
        values for (name, _), values in one.observations.items() if name == "quire_e2e_request_latency_seconds"
    ]
    assert sum(observed.values()) == pytest.approx(sum(map(sum, latencies)), abs=1e-3)

    for end, (root, *children) in zip(one.finished, spans_of(one.finished), strict=True):
        assert root.end_time - root.start_time == pytest.approx(1e9 * end.e2e_seconds, abs=1e6)
        assert sum(span.end_time - span.start_time for span in children) == pytest.approx(
            1e9 * end.e2e_seconds, abs=1e6
        )
        for before, after in pairwise(children):
            assert abs(after.start_time - before.end_time) <= 1, "there is no gap, and nothing counts twice"
        assert {span.parent.span_id for span in children} == {root.context.span_id}
