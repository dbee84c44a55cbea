"""Roles on several hosts, and hosts that come and leave, in real processes: nobody can tell from the tokens.

QUIRE_KILLS=100 make test ARGS="tests/unit/engine/test_several_hosts.py"     more of it
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest
from quire_engine import LLM, CompletionOutput
from quire_engine.async_llm import AsyncLLM
from quire_engine.stats import IterationStats, KVConnectorStats, SchedulerStats
from support.engines import Recorder, Stream, assert_same, engine, params, run, until
from support.host_processes import Site, started
from support.namespaces import Namespace, namespaces

pytestmark = pytest.mark.slow

NUM_KILLS = int(os.environ.get("QUIRE_KILLS", "1"))
SEED = int(os.environ.get("QUIRE_SEED", "1"))
PREFILL, DECODE = 0, 1
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 1, "logprobs": 2},
    {"temperature": 1.0, "seed": 2, "repetition_penalty": 1.3},
    {"temperature": 0.8, "seed": 3, "n": 2, "top_p": 0.9},
    {"temperature": 1.0, "seed": 4, "structured_outputs": {"regex": "[a-f]{50}"}, "ignore_eos": False},
]
NUM_PROMPT_TOKENS = [70, 17, 1, 160, 48, 100, 33, 250, 40, 64]
PARAMS = [params(max_tokens=80, **KINDS[number % len(KINDS)]) for number in range(len(NUM_PROMPT_TOKENS))]


class PerEngine(Recorder):
    """Knows what each engine has loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.connectors: dict[int, KVConnectorStats] = {}

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


def ask(llm: AsyncLLM, prompts: list[list[int]]) -> list[Stream]:
    return [Stream(llm, *one) for one in zip(prompts, PARAMS, strict=True)]


async def compare(streams: list[Stream], expected: list[list[CompletionOutput]]) -> None:
    for stream, one in zip(streams, expected, strict=True):
        assert_same((await stream.task).outputs, one)


@pytest.fixture
def host() -> Iterator[Namespace | None]:
    """A namespace, where the kernel gives us one; else this host is the other one, too."""
    with ExitStack() as stack:
        one = None
        with contextlib.suppress(pytest.skip.Exception):
            (one,) = stack.enter_context(namespaces(1))
        yield one


@pytest.mark.timeout(240 + 120 * NUM_KILLS)
def test_prefill_here_and_decode_there_whatever_is_killed_or_cut_off(
    checkpoint: Callable[[str], Path],
    undisturbed: Callable[..., list[Any]],
    tmp_path: Path,
    host: Namespace | None,
) -> None:
    """The engine of either side, the other host, the store, and the network between them, at random moments. What is
    silent has open connections, and does not answer."""
    tinypy, random = checkpoint("tinypy"), Random(SEED)
    roles: dict[str, Any] = {"disaggregation": {"prefill": 1, "decode": 1}, "data_parallel_size_local": 1}
    site = Site(tmp_path, tinypy, host, has_store=True, **roles)
    victims = ["decode engine", "prefill engine", "store", "silent store", "other host", "silent other host"]
    victims += ["network"] if host is not None else []
    rounds = [victim for _ in range(NUM_KILLS) for victim in victims]
    random.shuffle(rounds)
    print(f"seed {SEED}: {rounds}")
    all_prompts = [make_prompts(10 * SEED + number) for number in range(1 + len(rounds))]
    all_expected = [undisturbed(prompts) for prompts in all_prompts]

    async def main() -> None:
        await compare(ask(llm, all_prompts[0]), all_expected[0])  # nobody has joined: the front does all
        await llm.reset_prefix_cache()
        processes["other host"] = site.headless(DECODE)
        await until(lambda: llm.is_engine_up(DECODE), 120)
        await compare(ask(llm, all_prompts[0]), all_expected[0])
        assert recorder.connectors[PREFILL].num_saved_blocks > 0
        assert recorder.connectors[DECODE].num_loaded_blocks > 0
        for victim, prompts, expected in zip(rounds, all_prompts[1:], all_expected[1:], strict=True):
            streams = ask(llm, prompts)
            await asyncio.sleep(random.uniform(0.05, 0.5))
            if victim == "network":
                assert host is not None
                host.cut()
                await until(lambda: not llm.is_engine_up(DECODE), 60)
                host.mend()
            elif victim == "silent store":
                processes["store"].send_signal(signal.SIGSTOP)
                await compare(streams, expected)
                processes["store"].send_signal(signal.SIGCONT)
            elif victim == "silent other host":
                processes["other host"].send_signal(signal.SIGSTOP)
                await until(lambda: not llm.is_engine_up(DECODE), 60)
                await compare(streams, expected)
                processes["other host"].send_signal(signal.SIGCONT)
            elif victim.endswith("engine"):
                os.kill(llm.engine_pids[PREFILL if victim == "prefill engine" else DECODE], signal.SIGKILL)
            else:
                processes[victim].kill()
                processes[victim].communicate()
            if not victim.startswith("silent"):
                await compare(streams, expected)
            if victim == "store":
                processes[victim] = site.store()
            elif victim == "other host":
                processes[victim] = site.headless(DECODE)
            await until(lambda: all(llm.is_engine_up(index) for index in (PREFILL, DECODE)), 120)
        assert llm.replica_indices == [PREFILL, DECODE]

    with ExitStack() as stack:
        processes = stack.enter_context(started())
        processes["store"] = site.store()
        llm, recorder = stack.enter_context(engine(tinypy, PerEngine(), step_seconds=0.002, **site.settings))
        run(llm, main)


@pytest.mark.timeout(240)
def test_hosts_come_and_leave_under_load(
    checkpoint: Callable[[str], Path], undisturbed: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """One that nobody has counted on, and replicas of the front's own beside it: nothing fails, and all is counted."""
    tinypy = checkpoint("tinypy")
    site = Site(tmp_path, tinypy, data_parallel_max_size=3, data_parallel_routing="round_robin")
    prompts, present = make_prompts(3), []
    expected = undisturbed(prompts)

    async def main() -> None:
        llm.watch_replicas(lambda: present.append(llm.replica_indices))
        assert llm.replica_indices == [0]
        going = asyncio.ensure_future(keep_asking())
        processes["host"] = site.headless(2)
        await until(lambda: llm.is_engine_up(2) and llm.replica_indices == [0, 2], 120)
        await until(lambda: any(iteration.engine_index == 2 for iteration in recorder.iterations), 60)
        await llm.scale(2)
        assert (llm.replica_indices, llm.num_replicas, llm.num_remote_replicas) == ([0, 2, 3], 2, 1)
        streams = ask(llm, prompts)
        snapshot = await llm.snapshot()
        while {request.engine for request in snapshot.requests} != {0, 2, 3}:
            snapshot = await llm.snapshot()
        assert [(one.index, bool(one.host), one.up) for one in snapshot.engine.engines] == [
            (0, False, True), (2, True, True), (3, False, True)
        ]  # fmt: skip
        processes["host"].terminate()
        assert await asyncio.to_thread(processes["host"].wait, 60) == 0
        await until(lambda: llm.replica_indices == [0, 3])
        await llm.scale(1)
        await compare(streams, expected)
        assert [one.index for one in (await llm.snapshot()).engine.engines] == []
        assert (llm.replica_indices, llm.num_remote_replicas) == ([0], 0)
        going.cancel()
        await asyncio.wait((going,))
        assert going.cancelled()

    async def keep_asking() -> None:
        while True:
            await compare(ask(llm, prompts), expected)

    with ExitStack() as stack:
        processes = stack.enter_context(started())
        llm, recorder = stack.enter_context(engine(tinypy, step_seconds=0.005, **site.settings))
        run(llm, main)
        assert (recorder.num_restarts, recorder.num_replayed) == (0, 0)
        assert sum(stats.num_requests_moved for stats in recorder.iterations) > 0
    assert present == [[0], [0, 2], [0, 3]]
