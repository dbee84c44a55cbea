"""Engines that share the experts, and of which some die, hang or fail: the same tokens, and nobody else is to blame."""

import asyncio
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quire_engine import CompletionOutput, RequestOutput
from quire_engine.errors import EngineUnavailableError
from quire_engine.system import crash_loop
from support.engines import Stream, assert_same, engine, offline, params, run, until
from support.processes import is_gone

pytestmark = pytest.mark.slow

ALONE: dict[str, Any] = {
    "max_model_len": 256, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 1 << 23,
}  # fmt: skip
TOGETHER: dict[str, Any] = {
    **ALONE, "data_parallel_size": 2, "enable_expert_parallel": True, "data_parallel_routing": "round_robin",
}  # fmt: skip
PROMPTS = [[5 + number, 6, 7] * (1 + 9 * (number % 3)) for number in range(8)]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 1},
    {"temperature": 1.0, "seed": 2, "repetition_penalty": 1.3, "logprobs": 1},
    {"temperature": 0.8, "seed": 3, "n": 2, "top_p": 0.9},
]
PARAMS = [params(max_tokens=120, **KINDS[number % 4]) for number in range(8)]
NUM_KILLS = int(os.environ.get("QUIRE_KILLS", "3"))
SEED = int(os.environ.get("QUIRE_SEED", "1"))


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("qwen2-moe")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[CompletionOutput]]:
    return [offline(folder, [prompt], one, **ALONE)[0] for prompt, one in zip(PROMPTS, PARAMS, strict=True)]


def assert_all(outputs: list[RequestOutput], expected: list[list[CompletionOutput]]) -> None:
    for output, one in zip(outputs, expected, strict=True):
        assert_same(output.outputs, one)


@pytest.mark.parametrize("settings", [{}, {"tensor_parallel_size": 2}], ids=["one rank", "two ranks"])
def test_whoever_is_killed_at_any_moment_all_go_on(
    settings: dict[str, Any], folder: Path, expected: list[list[CompletionOutput]]
) -> None:
    """One after the other, also while one is being started again; the other stays, with its weights."""
    chance = random.Random(SEED)

    async def main() -> list[RequestOutput]:
        streams = [Stream(llm, *one) for one in zip(PROMPTS, PARAMS, strict=True)]

        def num_tokens() -> int:
            return sum(stream.num_tokens for stream in streams)

        for number in range(NUM_KILLS):
            before, ahead = num_tokens(), chance.randint(1, 60)
            await until(lambda: num_tokens() >= before + ahead, 60)  # noqa: B023
            victim = chance.randrange(2)
            pids = llm.engine_pids
            killed = pids[victim]
            if settings and chance.random() < 0.5:
                killed = (await llm.snapshot()).engine.ranks[2 * victim + 1].pid
            began_at = time.monotonic()
            os.kill(killed, signal.SIGKILL)
            await until(lambda: not llm.is_engine_up(victim))  # noqa: B023
            assert not llm.is_healthy
            assert llm.outage is not None
            if number == 0:  # what comes, and what is given up, while all wait
                streams.append(Stream(llm, PROMPTS[0], PARAMS[0]))
                given_up = Stream(llm, PROMPTS[1], PARAMS[1])
                await asyncio.sleep(0)
                given_up.task.cancel()
            if number == 1:  # the other one as well, in the meantime
                os.kill(pids[1 - victim], signal.SIGKILL)
            await until(lambda: llm.is_healthy, 60)
            print(f"up again {time.monotonic() - began_at:.1f} s after the kill")
            if number != 1:
                assert llm.engine_pids[1 - victim] == pids[1 - victim], "nobody else is started again"
        assert not all(stream.task.done() for stream in streams)
        return await asyncio.gather(*(stream.task for stream in streams))

    with engine(folder, step_seconds=0.01, **TOGETHER, **settings) as (llm, recorder):
        outputs = run(llm, main)
        assert recorder.num_restarts == NUM_KILLS + (NUM_KILLS > 1)
        pids = llm.engine_pids
    assert all(map(is_gone, pids))
    assert_all(outputs, [*expected, expected[0]])


@pytest.fixture
def poison(expected: list[list[CompletionOutput]]) -> int:
    """A token that the second request alone is given."""
    others = {
        token for place, outputs in enumerate(expected) if place != 1 for one in outputs for token in one.token_ids
    }
    return next(token for token in expected[1][0].token_ids if token not in others)


def test_a_request_whose_steps_fail_ends_and_no_other(
    folder: Path, expected: list[list[CompletionOutput]], fault: Callable[..., Path], poison: int
) -> None:
    fault(action="raise", token_id=poison)

    async def main() -> list[RequestOutput | BaseException]:
        streams = [Stream(llm, *one) for one in zip(PROMPTS, PARAMS, strict=True)]
        return await asyncio.gather(*(stream.task for stream in streams), return_exceptions=True)

    with engine(folder, **TOGETHER) as (llm, recorder):
        outputs = run(llm, main)
        assert recorder.num_restarts == 0
    assert "the engine failed at this request" in str(outputs[1])
    assert_all([output for output in outputs if isinstance(output, RequestOutput)], expected[:1] + expected[2:])


def test_a_request_that_kills_engines_is_found_and_no_other(
    folder: Path, expected: list[list[CompletionOutput]], fault: Callable[..., Path], poison: int
) -> None:
    fault(action="kill", token_id=poison)

    async def main() -> list[RequestOutput | BaseException]:
        streams = [Stream(llm, *one) for one in zip(PROMPTS, PARAMS, strict=True)]
        return await asyncio.gather(*(stream.task for stream in streams), return_exceptions=True)

    with engine(folder, **TOGETHER) as (llm, recorder):
        outputs = run(llm, main)
        assert recorder.num_restarts == 4, "one, the other, and twice where it runs alone"
    assert "the engine died of this request again and again" in str(outputs[1])
    assert_all([output for output in outputs if isinstance(output, RequestOutput)], expected[:1] + expected[2:])


@pytest.mark.parametrize("how", ["stopped", "hangs"])
def test_one_that_stands_still_is_replaced_alone(
    how: str, folder: Path, expected: list[list[CompletionOutput]], fault: Callable[..., Path]
) -> None:
    file = fault(action="slow", seconds=0.01)

    async def main() -> list[RequestOutput]:
        streams = [Stream(llm, *one) for one in zip(PROMPTS, PARAMS, strict=True)]
        await until(lambda: min(stream.num_tokens for stream in streams) > 3, 60)
        before = llm.engine_pids
        if how == "stopped":
            os.kill(before[0], signal.SIGSTOP)
        else:
            fault(action="hang", num_output_tokens=60, once=True)
        await until(lambda: not llm.is_healthy)
        if how == "hangs":
            assert not file.exists()
        await until(lambda: llm.is_healthy, 60)
        assert sum(one == other for one, other in zip(llm.engine_pids, before, strict=True)) == 1
        return await asyncio.gather(*(stream.task for stream in streams))

    with engine(folder, step_timeout_s=3, **TOGETHER) as (llm, recorder):
        outputs = run(llm, main)
        assert recorder.num_restarts == 1
    assert_all(outputs, expected)


def test_where_one_does_not_stay_up_nobody_waits_for_ever(
    folder: Path, expected: list[list[CompletionOutput]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crash_loop, "MAX_DEATHS", 1)
    copy = shutil.copytree(folder, tmp_path / "model")

    async def main() -> RequestOutput:
        streams = [Stream(llm, *one) for one in zip(PROMPTS, PARAMS, strict=True)]
        await until(lambda: min(stream.num_tokens for stream in streams) > 3, 60)
        (copy / "config.json").rename(tmp_path / "aside")
        os.kill(llm.engine_pids[1], signal.SIGKILL)
        outputs = await asyncio.gather(*(stream.task for stream in streams), return_exceptions=True)
        assert {type(output) for output in outputs} == {EngineUnavailableError}
        with pytest.raises(EngineUnavailableError):
            await Stream(llm, PROMPTS[0], PARAMS[0]).task
        (tmp_path / "aside").rename(copy / "config.json")
        await until(lambda: llm.is_healthy, 60)
        return await Stream(llm, PROMPTS[0], PARAMS[0]).task

    with engine(copy, step_seconds=0.01, **TOGETHER) as (llm, _):
        output = run(llm, main)
    assert_same(output.outputs, expected[0])
