"""Two engines behind one frontend, in real processes: one is killed, and its streams go on on the other, the same."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quire_engine import LLM, CompletionOutput, RequestOutput
from quire_engine.errors import EngineError
from support.engines import Stream, assert_same, engine, params, run, until
from support.processes import is_gone

pytestmark = pytest.mark.slow

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.9, "seed": 1},
    {"temperature": 1.0, "seed": 2, "repetition_penalty": 1.3, "logprobs": 1},
    {"temperature": 0.8, "seed": 3, "n": 3, "top_p": 0.9},
    {"temperature": 1.0, "seed": 4, "structured_outputs": {"regex": "[a-f]{150}"}, "ignore_eos": False},
]
"""Each is sent twice, so that each engine has some of it."""
PROMPTS = [[5 + number, 6, 7] for number in range(2 * len(KINDS))]
PARAMS = [params(max_tokens=160, **kind) for kind in KINDS * 2]


@pytest.fixture(scope="module")
def expected(checkpoint: Callable[[str], Path]) -> list[list[CompletionOutput]]:
    """What an engine answers that nobody disturbs."""
    undisturbed = LLM(checkpoint("tinypy"), dtype="float32")
    outputs = undisturbed.generate(PROMPTS, PARAMS, use_tqdm=False)
    undisturbed.shutdown()
    return [output.outputs for output in outputs]


def test_streams_of_an_engine_that_is_killed_go_on_on_the_other(
    checkpoint: Callable[[str], Path], expected: list[list[CompletionOutput]]
) -> None:
    tinypy = checkpoint("tinypy")

    async def main() -> list[RequestOutput]:
        first = [Stream(llm, prompt, PARAMS[3]) for prompt in PROMPTS[:2]]
        await asyncio.gather(*(stream.task for stream in first))  # one on each: their grammar compilers have started
        streams = [Stream(llm, *one) for one in zip(PROMPTS, PARAMS, strict=True)]
        await until(lambda: min(stream.num_tokens for stream in streams) > 8)
        snapshot = await llm.snapshot()
        assert {request.engine for request in snapshot.requests} == {0, 1}
        assert len(snapshot.blocks.owner) == snapshot.blocks.num_blocks
        assert [one.up for one in snapshot.engine.engines] == [True, True]
        assert len({rank.pid for rank in snapshot.engine.ranks}) == 2
        with pytest.raises(EngineError, match="requests are live"):
            await llm.sleep()
        killed_at, before = time.monotonic(), [stream.num_tokens for stream in streams]
        os.kill(llm.engine_pids[1], signal.SIGKILL)
        await until(lambda: not llm.is_engine_up(1))
        assert llm.is_healthy
        assert llm.outage is None
        await until(lambda: all(s.num_tokens > was or s.task.done() for s, was in zip(streams, before, strict=True)))
        print(f"all go on {time.monotonic() - killed_at:.2f} s after the kill")
        assert not llm.is_engine_up(1), "nobody waits for the next engine"
        outputs = await asyncio.gather(*(stream.task for stream in streams))
        await until(lambda: llm.is_engine_up(1), 60)
        await llm.sleep()
        await llm.wake_up()
        return outputs

    with engine(tinypy, step_seconds=0.005, data_parallel_size=2, kv_cache_memory_bytes=1 << 24) as (llm, recorder):
        outputs = run(llm, main)
        assert recorder.num_restarts == 1
        assert recorder.num_replayed >= 3
        pids = llm.engine_pids
    assert all(is_gone(pid) for pid in pids)
    for output, one in zip(outputs, expected, strict=True):
        assert_same(output.outputs, one)


def test_replicas_come_and_leave_under_load(
    checkpoint: Callable[[str], Path], expected: list[list[CompletionOutput]]
) -> None:
    """From a single engine to two and back: whoever had to move gets the same tokens, and no crash is counted."""
    tinypy = checkpoint("tinypy")

    async def main() -> list[RequestOutput]:
        before = Stream(llm, PROMPTS[0], PARAMS[0])
        await until(lambda: before.num_tokens > 2)
        await llm.scale(2)
        streams = [before, *(Stream(llm, *one) for one in list(zip(PROMPTS, PARAMS, strict=True))[1:])]
        await until(lambda: min(stream.num_tokens for stream in streams) > 8)
        snapshot = await llm.snapshot()
        assert {request.engine for request in snapshot.requests} == {0, 1}
        assert len(snapshot.engine.engines) == 2
        leaving = llm.engine_pids[1]
        counts = [stream.num_tokens for stream in streams]
        began_at = time.monotonic()
        scaling = asyncio.ensure_future(llm.scale(1))
        await until(lambda: all(s.num_tokens > was or s.task.done() for s, was in zip(streams, counts, strict=True)))
        print(f"all go on {time.monotonic() - began_at:.2f} s after the command")
        await scaling
        assert is_gone(leaving)
        snapshot = await llm.snapshot()
        assert {request.engine for request in snapshot.requests} <= {0}
        assert not snapshot.engine.engines
        return await asyncio.gather(*(stream.task for stream in streams))

    with engine(tinypy, step_seconds=0.005, kv_cache_memory_bytes=1 << 24) as (llm, recorder):
        outputs = run(llm, main)
        assert (recorder.num_restarts, recorder.num_replayed) == (0, 0)
        assert sum(stats.num_requests_moved for stats in recorder.iterations) >= 3
    for output, one in zip(outputs, expected, strict=True):
        assert_same(output.outputs, one)
