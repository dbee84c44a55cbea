"""What the engine tells of its steps, its ranks, cancelled requests, and of what each request was promised."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from quire_engine import LLM, AsyncLLM, RequestOutput, SamplingParams
from quire_engine.errors import EngineDeadError, EngineUnavailableError, RequestError
from quire_engine.slo import RequestSLO
from quire_engine.stats import StepStats
from quire_engine.timeline import stretches
from support import engines
from support.engines import SharedEngine, run, shared_engine, until

pytestmark = pytest.mark.slow

SLO = {"default": {"e2e_ms": 1e8}, "fast": {"ttft_ms": 1e-3}, "steady": {"tpot_ms": 1e-3, "e2e_ms": 1e8}}


class Recorder(engines.Recorder):
    """Gives out the verdicts on requests once each."""

    def __init__(self) -> None:
        super().__init__()
        self._num_taken = 0

    @property
    def steps(self) -> list[StepStats]:
        return [stats.step for stats in self.iterations if stats.step is not None]

    @property
    def cancel_to_free_seconds(self) -> list[float]:
        return [seconds for stats in self.iterations for seconds in stats.cancel_to_free_seconds]

    @property
    def busy_seconds(self) -> list[float]:
        return self.scheduler_stats.rank_busy_seconds if self.scheduler_stats is not None else []

    def verdicts(self) -> list[tuple[str | None, str | None, str | None]]:
        taken = self.finished[self._num_taken :]
        self._num_taken += len(taken)
        return [(one.options.slo.slo_class, one.slo_verdict, one.slo_cause) for one in taken]


def engine(folder: Path, **settings: Any) -> AbstractContextManager[tuple[AsyncLLM, Recorder]]:
    return engines.engine(folder, Recorder(), **{"slo": SLO, **settings})


def params(max_tokens: int = 8, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **fields})


async def last(llm: AsyncLLM, sampling_params: SamplingParams, **options: Any) -> RequestOutput:
    return [output async for output in llm.generate([5, 6, 7], sampling_params, **options)][-1]


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("tied-gqa")


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[SharedEngine]:
    with shared_engine(folder, Recorder(), slo=SLO) as running:
        yield running


def test_steps_tell_their_times_and_tokens(folder: Path) -> None:
    async def main() -> None:
        await last(llm, params(8))
        (chunk, *decodes) = recorder.steps
        assert (chunk.num_requests, chunk.num_tokens, chunk.num_prefill_tokens) == (1, 2, 2)
        assert [(step.num_tokens, step.num_prefill_tokens) for step in decodes] == [
            (1, 0)
        ] * 8  # the third of the prompt
        assert chunk.num_decode_tokens == 0
        for step in recorder.steps:
            assert step.execute_seconds > 0
            assert step.schedule_seconds > 0
            assert step.update_seconds > 0
            assert step.execute_seconds + step.schedule_seconds + step.update_seconds < 30

    with engine(folder, max_num_batched_tokens=2, max_num_seqs=2) as (llm, recorder):
        run(llm, main)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks_tell_for_how_long_they_compute(folder: Path, num_ranks: int) -> None:
    async def main() -> None:
        began_at = time.monotonic()
        await last(llm, params(8))
        before = recorder.busy_seconds
        # A rank may end its part of a step after the one whose answer the engine waits for.
        steps = sum(step.execute_seconds for step in recorder.steps)
        most = steps if num_ranks == 1 else time.monotonic() - began_at
        assert len(before) == num_ranks
        assert all(0 < seconds < most for seconds in before)
        await last(llm, params(8))
        assert all(now > then for now, then in zip(recorder.busy_seconds, before, strict=True))

    with engine(folder, tensor_parallel_size=num_ranks) as (llm, recorder):
        run(llm, main)


def test_cancelled_requests_are_acknowledged_once(shared: SharedEngine) -> None:
    llm, recorder = shared.llm, shared.recorder

    async def main() -> None:
        for num_sequences in (1, 3):
            request = llm.input_processor.process([5, 6, 7], params(200, n=num_sequences, temperature=1.0))
            llm.add_request(request, lambda output: None)
            await until(lambda wanted=num_sequences: recorder.num_running == wanted)
            llm.abort(request.request_id)
            llm.abort(request.request_id)
            await until(lambda: recorder.num_running == 0)
        await until(lambda: len(recorder.cancel_to_free_seconds) == 4)
        assert all(0 < seconds < 60 for seconds in recorder.cancel_to_free_seconds)
        await last(llm, params())
        llm.abort("unknown")
        await last(llm, params())
        assert len(recorder.cancel_to_free_seconds) == 4
        assert not llm._aborted_at

    shared.run(main)


def test_a_stop_string_is_no_cancellation(folder: Path, shared: SharedEngine) -> None:
    llm, recorder = shared.llm, shared.recorder

    text = LLM(folder, dtype="float32").generate([[5, 6, 7]], params(20), use_tqdm=False)[0].outputs[0].text

    async def main() -> None:
        output = await last(llm, params(200, stop=[text[2:4]]))
        assert output.outputs[0].finish_reason == "stop"
        await last(llm, params())
        assert recorder.cancel_to_free_seconds == []
        assert recorder.verdicts() == [("default", "good", "none")] * 2

    shared.run(main)


def test_every_end_of_a_request_has_its_verdict(shared: SharedEngine) -> None:
    llm, recorder = shared.llm, shared.recorder

    async def main() -> None:
        output = await last(llm, params())
        assert output.metrics is not None
        assert (output.metrics.slo_verdict, output.metrics.slo_cause) == ("good", "none")
        await last(llm, params(), slo=RequestSLO(slo_class="fast"))
        await last(llm, params(), slo=RequestSLO(slo_class="fast", ttft_ms=1e8))
        await last(llm, params(), slo=RequestSLO(slo_class="steady"))
        await last(llm, params(1), slo=RequestSLO(slo_class="steady"))
        await last(llm, params(n=3, temperature=1.0), slo=RequestSLO(e2e_ms=1e-3))
        assert recorder.verdicts() == [
            ("default", "good", "none"), ("fast", "miss", "ttft"), ("fast", "good", "none"), ("steady", "miss", "tpot"),
            ("steady", "good", "none"), ("default", "miss", "e2e"),
        ]  # fmt: skip
        with pytest.raises(RequestError, match="slo_class is 'gold'"):
            await last(llm, params(), slo=RequestSLO(slo_class="gold"))
        assert recorder.verdicts() == []

    shared.run(main)


def test_cancelled_and_impossible_requests_are_not_judged_and_refused_ones_are(folder: Path) -> None:
    async def main() -> None:
        running = asyncio.ensure_future(last(llm, params(400)))
        await until(lambda: recorder.num_running == 1)
        with pytest.raises(EngineUnavailableError):  # its first token is not late yet: that would be the cause
            await last(llm, params(), slo=RequestSLO(slo_class="fast", ttft_ms=1e8))
        assert recorder.verdicts() == [("fast", "miss", "rejected")]
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        assert recorder.verdicts() == [("default", None, None)]
        refused, cancelled = recorder.finished
        assert (refused.num_running_before, refused.num_waiting_before) == (1, 0)
        assert "max_queued_requests" in (refused.error or "")
        assert (cancelled.aborted_by, refused.aborted_by, cancelled.num_running_before) == ("client", None, 0)

    with engine(folder, step_seconds=0.05, max_num_seqs=1, max_queued_requests=0) as (llm, recorder):
        run(llm, main)


def test_a_request_that_waited_for_too_long_says_how_long(folder: Path) -> None:
    async def main() -> None:
        running = asyncio.ensure_future(last(llm, params(400)))
        await until(lambda: recorder.num_running == 1)
        with pytest.raises(EngineUnavailableError, match="max_queue_delay_ms is 50"):
            await last(llm, params())
        (refused,) = recorder.finished
        assert 0.05 <= refused.phase_seconds["queue"] <= refused.e2e_seconds
        assert [phase for phase, _ in refused.phases] == ["queue"]
        assert refused.time_to_first_token_seconds is None
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    with engine(folder, step_seconds=0.05, max_num_seqs=1, max_queue_delay_ms=50) as (llm, recorder):
        run(llm, main)


def test_a_request_that_could_never_be_served_is_not_judged(shared: SharedEngine) -> None:
    llm, recorder = shared.llm, shared.recorder

    async def main() -> None:
        with pytest.raises(RequestError, match="structured_outputs"):
            await last(llm, params(structured_outputs={"regex": "[a"}))
        assert recorder.verdicts() == [("default", None, None)]

    shared.run(main)


def test_a_replayed_request_keeps_its_clock(folder: Path) -> None:
    """The time without an engine counts: it is the client's time."""

    async def main() -> None:
        began_at = time.monotonic()
        task = asyncio.ensure_future(last(llm, params(400), slo=RequestSLO(slo_class="default", e2e_ms=1e7)))
        await until(lambda: recorder.num_running == 1 and len(recorder.steps) > 3)
        os.kill(llm.engine_pid, signal.SIGKILL)
        killed_at = time.monotonic()
        await until(lambda: not llm.is_healthy)
        assert llm.workers_up() == [False]
        down_until = killed_at
        while not recorder.num_restarts:
            down_until = time.monotonic()
            await asyncio.sleep(0.005)
        restarted_at = time.monotonic()
        metrics = (await task).metrics
        assert metrics is not None
        assert down_until - killed_at < metrics.e2e_seconds < time.monotonic() - began_at
        assert metrics.time_to_first_token_seconds is not None
        assert metrics.time_to_first_token_seconds < killed_at - began_at
        assert metrics.generation_seconds > down_until - killed_at
        assert [phase for phase, _ in metrics.phases] == ["queue", "prefill", "decode", "held", "replayed", "decode"]
        seconds = metrics.phase_seconds
        assert sum(seconds.values()) == pytest.approx(metrics.e2e_seconds)
        assert 0 < seconds["held"] < restarted_at - killed_at, "the wait for an engine is no prefill, and no decode"
        assert recorder.verdicts() == [("default", "good", "none")]
        assert metrics.num_replays == 1

    with engine(folder, step_seconds=0.005) as (llm, recorder):
        run(llm, main)


def test_a_request_that_dies_with_its_engine_is_a_miss(folder: Path) -> None:
    async def main() -> None:
        task = asyncio.ensure_future(last(llm, params(400), slo=RequestSLO(slo_class="steady")))
        await until(lambda: recorder.num_running == 1)
        os.kill(llm.engine_pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await task
        assert recorder.verdicts() == [("steady", "miss", "error")]

    with engine(folder, step_seconds=0.005, replay_on_crash=False) as (llm, recorder):
        run(llm, main)


def test_a_request_whose_output_nobody_can_take_ends_once(shared: SharedEngine) -> None:
    llm, recorder = shared.llm, shared.recorder

    async def ends_once(num_sequences: int, fails_at_its_end: bool) -> None:
        def sink(output: RequestOutput) -> None:
            if output.finished or not fails_at_its_end:
                raise ZeroDivisionError("by design")

        num_finished = len(recorder.finished)
        sampling_params = params(3, n=num_sequences, temperature=1.0)
        llm.add_request(llm.input_processor.process([5, 6, 7], sampling_params), sink)
        await until(lambda: len(recorder.finished) == num_finished + 1)
        await last(llm, params())
        assert len(recorder.finished) == num_finished + 2
        verdicts = recorder.verdicts()
        if not fails_at_its_end:
            assert verdicts == [("default", "miss", "error"), ("default", "good", "none")]

    async def main() -> None:
        for num_sequences in (1, 2):
            for fails_at_its_end in (False, True):
                await ends_once(num_sequences, fails_at_its_end)

    shared.run(main)


def test_stretches_of_preemption_lie_within_the_decode(folder: Path) -> None:
    async def main() -> None:
        metrics = [output.metrics for output in await asyncio.gather(*(last(llm, params(300)) for _ in range(2)))]
        preempted = [one for one in metrics if one is not None and one.num_preemptions]
        assert preempted
        for one in preempted:
            assert one.time_to_first_token_seconds is not None
            preemptions = [
                (begin, end) for phase, begin, end in stretches(one.phases, one.e2e_seconds) if phase == "preempted"
            ]
            assert len(preemptions) == one.num_preemptions
            for begin, end in preemptions:
                assert one.time_to_first_token_seconds <= begin < end <= one.e2e_seconds

    # 24 blocks: layers · keys and values · heads · head size · tokens · bytes.
    room = 24 * 2 * 2 * 2 * 16 * 16 * 4
    with engine(folder, enable_prefix_caching=False, kv_cache_memory_bytes=room) as (llm, recorder):
        run(llm, main)
        assert all(end.slo_verdict == "good" for end in recorder.finished)


def test_ranks_are_looked_after_one_by_one(folder: Path) -> None:
    async def main() -> None:
        assert llm.workers_up() == [True, True]
        os.kill(llm.worker_pids[1], signal.SIGSTOP)
        await until(lambda: llm.workers_up() in ([True, False], [False, False]))
        await until(lambda: recorder.num_restarts == 1)
        assert llm.workers_up() == [True, True]

    with engine(folder, tensor_parallel_size=2) as (llm, recorder):
        run(llm, main)
