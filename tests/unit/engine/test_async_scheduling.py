"""AsyncLLM: priorities, queue limits and deadlines, sequences and beams, chat, sleep; through the process boundary."""

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from quire_engine import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from quire_engine.errors import (
    DeadlineExceededError,
    EngineDeadError,
    EngineUnavailableError,
    OperationError,
    RequestError,
)
from quire_engine.messages import ErrorCode
from quire_engine.outputs import RequestOutput
from quire_engine.sampling_params import RequestOptions
from support import engines
from support.engines import Recorder

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
PROMPT = [5 + i % 60 for i in range(40)]


def engine(folder: Path, **settings: Any) -> AbstractContextManager[tuple[AsyncLLM, Recorder]]:
    return engines.engine(folder, **{"max_model_len": 512, **settings})


async def collect(llm: AsyncLLM, prompt: Any, params: SamplingParams, **arguments: Any) -> RequestOutput:
    outputs = [output async for output in llm.generate(prompt, params, **arguments)]
    return outputs[-1]


class Stream:
    """A request whose deltas are kept, and that can be waited for."""

    def __init__(self, llm: AsyncLLM, params: SamplingParams, **arguments: Any) -> None:
        self.request = llm.input_processor.process(PROMPT, params, options=RequestOptions(**arguments))
        self.outputs: list[RequestOutput] = []
        self.started, self.ended = asyncio.Event(), asyncio.Event()
        llm.add_request(self.request, self._take)

    def _take(self, output: RequestOutput) -> None:
        self.outputs.append(output)
        self.started.set()
        if output.finished:
            self.ended.set()


def test_sequences_beams_and_chat_equal_the_offline_engine(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("tinypy")
    params = SamplingParams(n=3, seed=5, temperature=0.8, max_tokens=12)
    beams = BeamSearchParams(beam_width=3, max_tokens=8)
    conversation = [{"role": "user", "content": "def f(x):"}]
    offline = LLM(folder, dtype="float32", max_model_len=512)

    async def main(llm: AsyncLLM) -> None:
        output = await collect(llm, PROMPT, params)
        (want,) = offline.generate([PROMPT], params, use_tqdm=False)
        assert [item.token_ids for item in output.outputs] == [item.token_ids for item in want.outputs]
        assert [item.text for item in output.outputs] == [item.text for item in want.outputs]

        found = await llm.beam_search("import os", beams, "my-search")
        (search,) = offline.beam_search("import os", beams)
        assert found.request_id == "my-search"
        assert [found.prompt_token_ids + item.token_ids for item in found.outputs] == [
            s.tokens for s in search.sequences
        ]
        assert [item.cumulative_logprob for item in found.outputs] == pytest.approx(
            [s.cum_logprob for s in search.sequences]
        )

        chat = [output async for output in llm.chat(conversation, GREEDY)][-1]
        assert chat.outputs[0].text == offline.chat(conversation, GREEDY, use_tqdm=False)[0].outputs[0].text
        async for _ in llm.chat(conversation, LONG):
            break

    with engine(folder) as (llm, _):
        asyncio.run(main(llm))


def test_abort_ends_all_sequences_and_frees_their_blocks(checkpoint: Callable[[str], Path]) -> None:
    async def main(llm: AsyncLLM, recorder: Recorder) -> None:
        await llm.start()
        stream = Stream(llm, SamplingParams(n=4, max_tokens=400, ignore_eos=True))
        await stream.started.wait()
        llm.abort(stream.request.request_id)
        assert stream.ended.is_set()
        assert {item.finish_reason for output in stream.outputs[-4:] for item in output.outputs} == {"abort"}
        assert await llm.reset_prefix_cache()  # comes after the aborts, and its answer after their effect
        assert recorder.scheduler_stats is not None
        assert (recorder.scheduler_stats.num_running, recorder.scheduler_stats.num_blocks_used) == (0, 0)

    with engine(checkpoint("tied-gqa"), step_seconds=0.005) as (llm, recorder):
        asyncio.run(main(llm, recorder))


def test_urgent_request_overtakes_those_that_wait(checkpoint: Callable[[str], Path]) -> None:
    async def main(llm: AsyncLLM) -> None:
        await llm.start()
        order: list[str] = []

        async def run(name: str, priority: int) -> None:
            await collect(llm, PROMPT, GREEDY, request_id=name, priority=priority)
            order.append(name)

        first = Stream(llm, LONG)
        await first.started.wait()
        await asyncio.gather(run("late", 2), run("normal", 0), run("urgent", -1))
        assert order == ["urgent", "normal", "late"]

    with engine(checkpoint("tied-gqa"), scheduling_policy="priority", max_num_seqs=1) as (llm, _):
        asyncio.run(main(llm))


def test_priority_is_refused_without_the_policy(checkpoint: Callable[[str], Path]) -> None:
    llm = LLM(checkpoint("tied-gqa"), dtype="float32", max_model_len=64)
    with pytest.raises(RequestError, match="scheduling_policy 'priority'"):
        llm.generate([[5]], SamplingParams(priority=1), use_tqdm=False)
    with pytest.raises(RequestError, match="scheduling_policy 'priority'"):
        llm.generate([[5]], GREEDY, use_tqdm=False, priority=[1])
    assert llm.generate([[5]], SamplingParams(priority=1, max_tokens=1), use_tqdm=False, priority=0)[0].finished
    with pytest.raises(ValueError, match="2 entries for 1 prompts"):
        llm.generate([[5]], GREEDY, use_tqdm=False, priority=[0, 0])


def test_full_queue_and_long_wait_are_unavailable(checkpoint: Callable[[str], Path]) -> None:
    async def main(llm: AsyncLLM) -> None:
        await llm.start()
        running = Stream(llm, LONG)
        await running.started.wait()
        queued = Stream(llm, LONG)  # waits for longer than it may
        with pytest.raises(EngineUnavailableError, match="max_queued_requests is 1") as error:
            await collect(llm, PROMPT, GREEDY)
        assert error.value.retry_after_seconds is not None
        await queued.ended.wait()
        output = queued.outputs[-1]
        assert output.error_code is ErrorCode.UNAVAILABLE
        assert output.error is not None
        assert "max_queue_delay_ms is 150" in output.error
        assert output.outputs[0].finish_reason == "error"
        await running.ended.wait()
        assert running.outputs[-1].outputs[0].finish_reason == "length"
        assert (await collect(llm, PROMPT, GREEDY)).finished

    with engine(checkpoint("tinypy"), max_num_seqs=1, max_queued_requests=1, max_queue_delay_ms=150) as (llm, _):
        asyncio.run(main(llm))


def test_refused_sequence_refuses_its_request(checkpoint: Callable[[str], Path]) -> None:
    async def main(llm: AsyncLLM) -> None:
        with pytest.raises(EngineUnavailableError, match="queue is full"):
            await collect(llm, PROMPT, SamplingParams(n=4, max_tokens=400, ignore_eos=True))
        assert len((await collect(llm, PROMPT, SamplingParams(n=3, max_tokens=4))).outputs) == 3

    with engine(checkpoint("tied-gqa"), max_num_seqs=2, max_queued_requests=1) as (llm, _):
        asyncio.run(main(llm))


def test_deadline_ends_what_runs_and_what_waits(checkpoint: Callable[[str], Path]) -> None:
    async def main(llm: AsyncLLM, recorder: Recorder) -> None:
        await llm.start()
        running, waiting = Stream(llm, LONG, deadline_ms=200), Stream(llm, LONG, deadline_ms=100)
        await asyncio.gather(running.ended.wait(), waiting.ended.wait())
        for stream in (running, waiting):
            assert stream.outputs[-1].error_code is ErrorCode.DEADLINE
        assert sum(len(output.outputs[0].token_ids) for output in running.outputs) < 400
        with pytest.raises(DeadlineExceededError, match="deadline passed"):
            await collect(llm, PROMPT, LONG, deadline_ms=20)
        assert (await collect(llm, PROMPT, GREEDY, deadline_ms=60_000)).finished
        with pytest.raises(RequestError, match="deadline_ms is 0"):
            await collect(llm, PROMPT, GREEDY, deadline_ms=0)
        await llm.reset_prefix_cache()
        assert recorder.scheduler_stats is not None
        assert recorder.scheduler_stats.num_blocks_used == 0

    with engine(checkpoint("tinypy"), step_seconds=0.005, max_num_seqs=1) as (llm, recorder):
        asyncio.run(main(llm, recorder))


def test_sleep_and_wake_up(checkpoint: Callable[[str], Path]) -> None:
    async def main(llm: AsyncLLM) -> None:
        want = (await collect(llm, PROMPT, GREEDY)).outputs[0].token_ids
        stream = Stream(llm, LONG)
        await stream.started.wait()
        with pytest.raises(RequestError, match=r"mode is 'keep'; it must be 'wait' .*or 'abort'"):
            await llm.sleep(mode="keep")
        llm._client.calls.busy = "the weights are being updated"
        with pytest.raises(OperationError, match="the weights are being updated; try again"):
            await llm.sleep(mode="abort")
        llm._client.calls.busy = None
        assert stream.outputs[-1].outputs[0].finish_reason != "abort", "what is rejected aborts no request"
        for level in (1, 2):
            await llm.sleep(level, mode="abort")
            assert (await llm.is_sleeping(), llm.sleep_level) == (True, level)
            assert stream.ended.is_set()
            with pytest.raises(EngineUnavailableError, match="sleeps"):
                await collect(llm, PROMPT, GREEDY)
            await llm.wake_up()
            assert not await llm.is_sleeping()
            assert (await collect(llm, PROMPT, GREEDY)).outputs[0].token_ids == want
        for bad in ("deeply", 0, 3, True):
            with pytest.raises(RequestError, match=r"^level is .*; it must be 1 \(KV cache\) or 2"):
                await llm.sleep(bad)  # type: ignore[arg-type]

    with engine(checkpoint("tied-gqa")) as (llm, _):
        asyncio.run(main(llm))


def test_utility_call_fails_with_its_engine_and_the_next_waits_for_the_next_engine(
    checkpoint: Callable[[str], Path],
) -> None:
    async def main(llm: AsyncLLM) -> None:
        await llm.start()
        os.kill(llm.engine_pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await llm.reset_prefix_cache()
        assert await llm.reset_prefix_cache()

    with engine(checkpoint("tied-gqa")) as (llm, _):
        asyncio.run(main(llm))
