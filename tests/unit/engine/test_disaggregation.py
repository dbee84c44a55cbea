"""Prompts are computed by one engine, and what follows by another, in real processes: nobody can tell from the tokens.

QUIRE_KILLS=100 make test ARGS="tests/unit/engine/test_disaggregation.py -k kills"     more of it
"""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from quire_engine import LLM
from quire_engine.outputs import CompletionOutput
from quire_engine.stats import IterationStats, KVConnectorStats, SchedulerStats
from quire_kernels import SharedBlocks
from quire_kernels.cpu import library
from support.engines import Recorder, SharedEngine, Stream, assert_same, params, shared_engine, until
from support.shared_blocks import BlockSteps

pytestmark = pytest.mark.slow
needs_kernels = pytest.mark.skipif(library() is None, reason="memory needs the C++ kernels")

NUM_KILLS = int(os.environ.get("QUIRE_KILLS", "2"))
SEED = int(os.environ.get("QUIRE_SEED", "1"))
BLOCK_SIZE = 16
PREFILL, DECODE = 0, 1
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 1, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 1.0, "seed": 2, "repetition_penalty": 1.3},
    {"temperature": 0.8, "seed": 3, "n": 3, "top_p": 0.9},
    {
        "temperature": 1.0,
        "seed": 4,
        "structured_outputs": {"regex": "[a-f]{50}"},
        "ignore_eos": False,
        "max_tokens": 80,
    },
    {"max_tokens": 1},
]
NUM_PROMPT_TOKENS = [70, 16, 17, 1, 160, 48, 100, 33, 250, 40, 64, 15]
PARAMS = [params(**KINDS[number % len(KINDS)]) for number in range(len(NUM_PROMPT_TOKENS))]


class PerEngine(Recorder):
    """Knows what each engine has loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.connectors = [KVConnectorStats(), KVConnectorStats()]

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
        super().record(scheduler_stats, iteration_stats)
        if scheduler_stats is not None and scheduler_stats.kv_connector is not None:
            self.connectors[iteration_stats.engine_index] = scheduler_stats.kv_connector


def make_prompts(seed: int) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(5, 200) for _ in range(length)] for length in NUM_PROMPT_TOKENS]


@pytest.fixture(scope="module")
def undisturbed(checkpoint: Callable[[str], Path]) -> Iterator[Callable[[list[list[int]]], list[Any]]]:
    """What one engine says."""
    llm = LLM(checkpoint("tinypy"), dtype="float32", kv_cache_memory_bytes=1 << 24)
    yield lambda prompts: [output.outputs for output in llm.generate(prompts, PARAMS, use_tqdm=False)]
    llm.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module", params=["files", pytest.param("memory", marks=needs_kernels)])
def place(request: pytest.FixtureRequest) -> str:
    """Where blocks are handed over; in memory if nothing else is said."""
    return str(request.param)


@pytest.fixture(scope="module")
def shared(checkpoint: Callable[[str], Path], folder: Path, place: str) -> Iterator[SharedEngine]:
    """The decode side has room for four sequences at a time, and others wait."""
    settings: dict[str, Any] = {
        "disaggregation": {"prefill": 1, "decode": 1}, "max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 24,
    }  # fmt: skip
    if place == "files":
        extra = {"shared_storage_path": str(folder)}
        settings["kv_transfer_config"] = {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": extra}
    with shared_engine(checkpoint("tinypy"), PerEngine(), step_seconds=0.002, **settings) as one:
        yield one
        router = one.llm._client._router
        assert [router.num_requests(index) for index in (PREFILL, DECODE)] == [0, 0]
        assert not one.llm._client._disaggregation._prefills  # type: ignore[union-attr]


def damage_slots(descriptor: int | None) -> None:
    """A bit in each slot."""
    assert descriptor is not None
    blocks = SharedBlocks(descriptor, bytes(16))
    for number in range(blocks.stats().num_used):
        BlockSteps(blocks).slot(number)[100] ^= 1
    blocks.close()


async def ask(shared: SharedEngine, prompts: list[list[int]], expected: list[list[CompletionOutput]]) -> None:
    streams = [Stream(shared.llm, *one) for one in zip(prompts, PARAMS, strict=True)]
    for stream, one in zip(streams, expected, strict=True):
        assert_same((await stream.task).outputs, one)


def test_blocks_are_handed_over(shared: SharedEngine, undisturbed: Callable[..., list[Any]]) -> None:
    prompts = make_prompts(1)
    expected = undisturbed(prompts)

    async def main() -> None:
        await ask(shared, prompts, expected)

    shared.run(main)
    lengths = [length for length, one in zip(NUM_PROMPT_TOKENS, PARAMS, strict=True) if one.max_tokens != 1]
    num_blocks = sum(length // BLOCK_SIZE for length in lengths)
    assert (
        shared.recorder.connectors[DECODE].num_loaded_blocks >= num_blocks // 2
    )  # a slow machine may be late with some


def test_damaged_blocks_are_computed_again(
    shared: SharedEngine, undisturbed: Callable[..., list[Any]], folder: Path, place: str
) -> None:
    prompts = make_prompts(1)
    expected = undisturbed(prompts)
    if place == "memory":
        damage_slots(shared.llm._kv_memory.config.cache.kv_memory)
    for path in folder.glob("*/0/*/[!.]*"):  # an engine that was killed may have left one that is not whole
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    async def main() -> None:
        await shared.llm.reset_prefix_cache()
        await ask(shared, prompts, expected)

    shared.run(main)
    assert shared.recorder.connectors[PREFILL].num_failed_blocks > 0


def test_requests_that_are_cancelled_on_their_way_leave_nothing(shared: SharedEngine) -> None:
    async def main() -> None:
        streams = [
            Stream(shared.llm, prompt, params(max_tokens=200), request_id=f"gone-{number}")
            for number, prompt in enumerate(make_prompts(2))
        ]
        for number, stream in enumerate(streams):
            await until(lambda stream=stream: stream.num_tokens > 0)  # type: ignore[misc]
            shared.llm.abort(f"gone-{number}")
        outputs = await asyncio.gather(*(stream.task for stream in streams))
        assert {output.outputs[0].finish_reason for output in outputs} == {"abort"}

    shared.run(main)


@pytest.mark.timeout(120 + 15 * NUM_KILLS)
def test_kills_of_either_side_at_random_change_nothing(
    shared: SharedEngine, undisturbed: Callable[..., list[Any]]
) -> None:
    random = Random(SEED)
    print(f"seed {SEED}")
    all_prompts = [make_prompts(3 + number) for number in range(NUM_KILLS)]
    all_expected = [undisturbed(prompts) for prompts in all_prompts]

    async def main() -> None:
        for number in range(NUM_KILLS):
            await until(lambda: all(shared.llm.is_engine_up(index) for index in (PREFILL, DECODE)), 60)
            asked = asyncio.ensure_future(ask(shared, all_prompts[number], all_expected[number]))
            await asyncio.wait([asked], timeout=random.uniform(0.0, 0.5))
            os.kill(shared.llm.engine_pids[number % 2], signal.SIGKILL)
            await asked

    shared.run(main)
