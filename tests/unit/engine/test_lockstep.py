"""Engines that share the experts, in real processes: to the last bit what one engine says, whoever has work when."""

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine import LLM, CompletionOutput, EngineConfig, RequestOutput
from quire_engine.core import build_engine
from quire_engine.errors import EngineUnavailableError, ScalingError
from quire_engine.messages import Sleep, WakeUp
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_engine.worker import Worker
from support.engines import SharedEngine, Stream, assert_same, engine, offline, params, run, shared_engine, until
from support.processes import idles

pytestmark = pytest.mark.slow

ALONE: dict[str, Any] = {
    "max_model_len": 256, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 1 << 23,
}  # fmt: skip
TOGETHER: dict[str, Any] = {
    **ALONE, "data_parallel_size": 2, "enable_expert_parallel": True, "data_parallel_routing": "round_robin",
}  # fmt: skip
PROMPTS = [[5 + number, 6, 7] * (1 + 9 * (number % 3)) for number in range(7)]
"""Of 3 to 57 tokens: pieces of prompts are computed in the same step as single tokens elsewhere."""
PARAMS = params(max_tokens=24, logprobs=0)

KINDS = {
    "float32": ("qwen2-moe", {}),
    "bfloat16": ("qwen2-moe", {"dtype": "bfloat16"}),
    "int8": ("qwen3-moe", {"dtype": "bfloat16", "quantization": "int8"}),
    "latent attention": ("deepseek-v3", {}),
    "three engines": ("qwen3-moe", {"data_parallel_size": 3}),
    "biases": ("gpt-oss", {}),
    "drafts": ("qwen3-moe", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
    "processes of their own": ("qwen3-moe", {"distributed_executor_backend": "mp"}),
}


@pytest.fixture(scope="module")
def expected(checkpoint: Callable[[str], Path]) -> list[list[CompletionOutput]]:
    return offline(checkpoint("qwen2-moe"), PROMPTS, PARAMS, **ALONE)


@pytest.fixture(scope="module")
def shared(checkpoint: Callable[[str], Path]) -> Iterator[SharedEngine]:
    with shared_engine(checkpoint("qwen2-moe"), **TOGETHER) as shared:
        yield shared


def assert_bits(outputs: list[CompletionOutput], expected: list[CompletionOutput]) -> None:
    assert_same(outputs, expected)
    for one, other in zip(outputs, expected, strict=True):
        assert [list(item.values()) for item in one.logprobs or []] == [
            list(item.values()) for item in other.logprobs or []
        ]


@pytest.mark.parametrize(("name", "settings"), KINDS.values(), ids=KINDS)
def test_they_say_what_one_engine_says(name: str, settings: dict[str, Any], checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint(name)

    async def main() -> list[RequestOutput]:
        streams = [Stream(llm, prompt, PARAMS) for prompt in PROMPTS]
        return await asyncio.gather(*(stream.task for stream in streams))

    with engine(folder, **{**TOGETHER, **settings}) as (llm, _):
        outputs = run(llm, main)
    of_one = {name: value for name, value in settings.items() if name in ("dtype", "quantization")}
    one = LLM(folder, **{**ALONE, "dtype": "float32", **of_one})
    expected = one.generate(PROMPTS, PARAMS, use_tqdm=False)
    for output, other in zip(outputs, expected, strict=True):
        # What gpt-oss says in one engine depends on what is beside it, by some last bits.
        (assert_same if name == "gpt-oss" else assert_bits)(output.outputs, other.outputs)


def test_ranks_of_several_engines_share_the_experts(checkpoint: Callable[[str], Path]) -> None:
    """Cut into slices, numbers are rounded differently. Four ranks have some of the five experts each."""
    folder = checkpoint("mixtral")

    async def main() -> list[RequestOutput]:
        streams = [Stream(llm, prompt, PARAMS) for prompt in PROMPTS]
        outputs = await asyncio.gather(*(stream.task for stream in streams))
        assert len((await llm.snapshot()).engine.ranks) == 4
        return outputs

    with engine(folder, **TOGETHER, tensor_parallel_size=2) as (llm, _):
        outputs = run(llm, main)
    for output, one in zip(outputs, offline(folder, PROMPTS, PARAMS, **ALONE), strict=True):
        assert_same(output.outputs, one)


def test_one_that_has_nothing_to_do_lends_its_experts(
    shared: SharedEngine, expected: list[list[CompletionOutput]]
) -> None:
    async def main() -> RequestOutput:
        stream = Stream(shared.llm, PROMPTS[2], PARAMS)
        await until(lambda: stream.num_tokens > 2)
        assert len((await shared.llm.snapshot()).requests) == 1
        return await stream.task

    assert_bits(shared.run(main).outputs, expected[2])


def test_requests_that_come_as_the_wave_ends_are_neither_lost_nor_held(
    shared: SharedEngine, expected: list[list[CompletionOutput]]
) -> None:
    """Each comes at the moment at which the last one ends, or some turns of the loop after it."""
    chance = random.Random(5)

    async def client(number: int) -> None:
        for _ in range(40):
            place, length = chance.randrange(len(PROMPTS)), chance.randint(1, 5)
            output = await Stream(shared.llm, PROMPTS[place], params(max_tokens=length)).task
            assert output.outputs[0].token_ids == expected[place][0].token_ids[:length]
            for _ in range(chance.randrange(4) * chance.randrange(20)):
                await asyncio.sleep(0)

    async def main() -> None:
        await client(0)
        await asyncio.gather(*map(client, range(3)))

    shared.run(main)


def test_who_gives_up_changes_nothing_for_others(shared: SharedEngine, expected: list[list[CompletionOutput]]) -> None:
    async def main() -> list[RequestOutput]:
        streams = [Stream(shared.llm, prompt, PARAMS) for prompt in PROMPTS]
        aborted = [Stream(shared.llm, prompt, params(max_tokens=150)) for prompt in PROMPTS[:4]]
        for one in aborted:
            await until(lambda one=one: one.num_tokens > 1)  # type: ignore[misc]
            one.task.cancel()
        return await asyncio.gather(*(stream.task for stream in streams))

    for output, one in zip(shared.run(main), expected, strict=True):
        assert_bits(output.outputs, one)


def test_they_use_no_cpu_when_nobody_has_work(shared: SharedEngine) -> None:
    async def main() -> None:
        await Stream(shared.llm, PROMPTS[0], params(max_tokens=3)).task
        assert await idles(*shared.llm.engine_pids, most=0.05, seconds=1.5)  # idle check included

    shared.run(main)


def test_all_sleep_and_wake_up(shared: SharedEngine, expected: list[list[CompletionOutput]]) -> None:
    async def main() -> RequestOutput:
        llm = shared.llm
        stream = Stream(llm, PROMPTS[0], params(max_tokens=150))
        await until(lambda: stream.num_tokens > 1)
        for level in (1, 2):
            await llm.sleep(level, mode="abort")
            assert stream.task.done()
            with pytest.raises(EngineUnavailableError, match="sleeps"):
                await Stream(llm, PROMPTS[0], PARAMS).task
            await llm.wake_up()
            output = await Stream(llm, PROMPTS[1], PARAMS).task
            assert_bits(output.outputs, expected[1])
        return output

    shared.run(main)


def test_whoever_has_work_waits_for_one_that_sleeps(
    shared: SharedEngine, expected: list[list[CompletionOutput]]
) -> None:
    """As when a request comes to one engine while another is falling asleep already."""

    async def main() -> list[RequestOutput | BaseException]:
        sleeper = shared.llm._client.replicas[0]
        await sleeper.call_utility(Sleep(2))
        streams = [Stream(shared.llm, PROMPTS[3], PARAMS) for _ in range(2)]  # one to each
        await until(lambda: any(stream.task.done() for stream in streams))  # it is refused where the engine sleeps
        await sleeper.call_utility(WakeUp())
        return await asyncio.gather(*(stream.task for stream in streams), return_exceptions=True)

    outputs = shared.run(main)
    assert [type(output) for output in outputs if not isinstance(output, RequestOutput)] == [EngineUnavailableError]
    (output,) = [output for output in outputs if isinstance(output, RequestOutput)]
    assert_bits(output.outputs, expected[3])


def test_requests_with_a_grammar_go_on_in_step(shared: SharedEngine, checkpoint: Callable[[str], Path]) -> None:
    structured = params(max_tokens=30, structured_outputs={"regex": "[a-f]{20}"}, ignore_eos=False)

    async def main() -> list[RequestOutput]:
        streams = [Stream(shared.llm, prompt, structured) for prompt in PROMPTS[:3]]
        return await asyncio.gather(*(stream.task for stream in streams))

    expected = offline(checkpoint("qwen2-moe"), PROMPTS[:3], structured, **ALONE)
    for output, one in zip(shared.run(main), expected, strict=True):
        assert_same(output.outputs, one)


def test_there_are_as_many_as_at_the_start(shared: SharedEngine) -> None:
    async def main() -> None:
        with pytest.raises(ScalingError, match=r"change data_parallel_size in model\.json"):
            await shared.llm.scale(3)
        await shared.llm.scale(2)

    shared.run(main)


def test_more_ranks_than_experts_are_refused(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_engine, "make_executor", None)
    settings = {**TOGETHER, "model": str(checkpoint("mixtral")), "data_parallel_size": 3, "tensor_parallel_size": 2}
    with pytest.raises(ValueError, match=r"data_parallel_size is 3; .* 5 experts are divided among the 6 ranks"):
        build_engine.build_engine(EngineConfig.from_settings(settings).for_replica(1).core)


def test_gpus_are_refused(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("mixtral")
    config = EngineConfig.from_settings({**TOGETHER, "model": str(folder)}).for_replica(1).core
    with pytest.raises(ValueError, match=r"on cuda; replicas share experts on the CPU alone: set device to 'cpu'"):
        Worker(config, CheckpointConfig.from_folder(folder), 256, device=torch.device("cuda"))
