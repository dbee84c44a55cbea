"""The generator, on a clock that a test controls: nothing waits."""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from quire_load.arrivals import Arrivals
from quire_load.datasets import SampleRequest
from quire_load.endpoint import Chunk, EndpointError
from quire_load.load import Load
from quire_load.report import summarize
from support.virtual_clock import run_in_virtual_time

TTFT, GAP, TOKENS = 0.1, 0.02, 5
FIXED = math.inf


class Server:
    """An endpoint that answers in a known time, but for a stall."""

    def __init__(
        self, stall: tuple[float, float] = (0.0, 0.0), fail: Callable[[int], EndpointError | None] | None = None
    ):
        self.stall = stall
        self.fail = fail or (lambda number: None)
        self.running = self.most_running = self.num_sent = self.num_closed = 0

    async def generate(self, request: SampleRequest) -> AsyncGenerator[Chunk, None]:
        number, self.num_sent = self.num_sent, self.num_sent + 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            begin, end = self.stall
            now = asyncio.get_running_loop().time()
            await asyncio.sleep(TTFT + (end - now if begin <= now < end else 0.0))
            error = self.fail(number)
            if error is not None:
                raise error
            for place in range(request.max_tokens):
                if place:
                    await asyncio.sleep(GAP)
                yield Chunk(1, num_input_tokens=7)
        finally:
            self.running -= 1
            self.num_closed += 1

    async def close(self) -> None:
        pass


def run(
    server: Server, arrivals: Arrivals, num_requests: int = 40, *, stop_at: float | None = None, **settings: Any
) -> Load:
    requests = [SampleRequest(prompt="x", max_tokens=TOKENS)] * num_requests

    async def main() -> Load:
        load = Load(server, requests, arrivals, **settings)
        if stop_at is not None:
            asyncio.get_running_loop().call_later(stop_at, load.stop)
        await load.run()
        return load

    return run_in_virtual_time(main())


def test_times_are_those_of_the_server() -> None:
    load = run(Server(), Arrivals(request_rate=10.0, burstiness=FIXED))
    assert [record.scheduled_s for record in load.records] == pytest.approx([0.1 * (i + 1) for i in range(40)])
    for record in load.records:
        assert record.ttft_s == pytest.approx(TTFT)
        assert record.tpot_s == pytest.approx(GAP)
        assert record.itls_s == pytest.approx([GAP] * (TOKENS - 1))
        assert record.e2el_s == pytest.approx(TTFT + GAP * (TOKENS - 1))
        assert (record.num_input_tokens, record.num_output_tokens) == (7, TOKENS)
    assert load.duration_s == pytest.approx(4.0 + TTFT + GAP * (TOKENS - 1))
    assert summarize(load.records).max_lateness_ms == pytest.approx(0.0, abs=1e-6)


def test_a_stall_shows_in_the_times_of_all_who_came_meanwhile() -> None:
    """Ten requests come a second, and the server stalls from 1.05 s to 3.05 s: what was due at 1.1 s waits 1.95 s, and
    so on. One connection alone would have sent one request meanwhile, and seen one bad time."""
    load = run(Server(stall=(1.05, 3.05)), Arrivals(request_rate=10.0, burstiness=FIXED))
    late = {
        round(record.scheduled_s, 1): record.ttft_s for record in load.records if record.ttft_s != pytest.approx(TTFT)
    }
    assert late == pytest.approx({i / 10: TTFT + 3.05 - i / 10 for i in range(11, 31)})


def test_what_waits_for_a_place_is_late_and_its_time_runs() -> None:
    """One place of 0.18 s, and ten requests a second: each waits 0.08 s longer than the one before it."""
    server = Server()
    load = run(server, Arrivals(request_rate=10.0, burstiness=FIXED, max_concurrency=1))
    assert server.most_running == 1
    assert [record.ttft_s for record in load.records] == pytest.approx([TTFT + 0.08 * i for i in range(40)])
    assert summarize(load.records).max_lateness_ms == pytest.approx(1000 * 0.08 * 39)


def test_in_a_closed_loop_a_request_is_due_when_another_one_has_ended() -> None:
    server = Server()
    load = run(server, Arrivals(max_concurrency=4))
    assert server.most_running == 4
    assert load.duration_s == pytest.approx(10 * (TTFT + GAP * (TOKENS - 1)))
    assert [record.ttft_s for record in load.records] == pytest.approx([TTFT] * 40)


def test_failures_are_told_apart_and_leave_the_others_alone() -> None:
    def fail(number: int) -> EndpointError | None:
        return EndpointError("rejected", "the queue is full") if number % 4 == 0 else None

    report = summarize(run(Server(fail=fail), Arrivals(request_rate=5.0)).records)
    assert (report.completed, report.failed) == (30, 10)
    assert report.errors == {"rejected": 10}
    assert report.error_messages == {"rejected": "the queue is full"}
    assert len(report.times_ms["ttft"]) == 30


def test_what_no_endpoint_should_raise_is_a_failure_of_one_request() -> None:
    class Broken(Server):
        async def generate(self, request: SampleRequest) -> AsyncGenerator[Chunk, None]:
            yield Chunk(1)
            raise OSError("no more files")

    assert summarize(run(Broken(), Arrivals(), 2).records).error_messages == {"error": "OSError: no more files"}


def test_a_request_without_an_end_is_a_timeout() -> None:
    server = Server(stall=(0.0, 100.0))
    load = run(server, Arrivals(request_rate=10.0), 3, timeout_s=2.0)
    assert [record.error_kind for record in load.records] == ["timeout"] * 3
    assert [record.e2el_s for record in load.records] == pytest.approx([2.0] * 3)
    assert server.num_closed == 3


@pytest.mark.parametrize("arrivals", [Arrivals(request_rate=10.0, burstiness=FIXED), Arrivals(max_concurrency=2)])
def test_stopping_keeps_what_was_measured_and_closes_what_runs(arrivals: Arrivals) -> None:
    server = Server()
    load = run(server, arrivals, stop_at=1.05)
    assert load.is_interrupted
    assert 0 < len(load.records) < 40
    assert server.num_closed == server.num_sent > len(load.records)
    assert all(not record.error_kind for record in load.records)


def test_an_answer_without_a_token_has_failed() -> None:
    class Silent(Server):
        async def generate(self, request: SampleRequest) -> AsyncGenerator[Chunk, None]:
            yield Chunk(0)

    assert summarize(run(Silent(), Arrivals(), 2).records).errors == {"error": 2}
