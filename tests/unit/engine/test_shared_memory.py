"""KV blocks in memory survive an engine that is killed, are shared by replicas, and go with the frontend."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quire_engine import AsyncLLM, EngineConfig
from quire_engine.kv_connector import kv_memory
from quire_engine.kv_connector.kv_memory import KVMemory
from quire_engine.stats import IterationStats, KVConnectorStats, SchedulerStats
from quire_kernels.cpu import library
from support.engines import Recorder, Stream, engine, kill, offline, params, run, until
from support.oracle import make_prompts
from support.processes import start_forked

pytestmark = [pytest.mark.slow, pytest.mark.skipif(library() is None, reason="memory needs the C++ kernels")]

MEMORY: dict[str, Any] = {
    "kv_connector": "SharedMemoryConnector",
    "kv_connector_extra_config": {"max_bytes": 32 << 20},
}
BLOCK_SIZE = 4


@pytest.fixture
def folder(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("tied-gqa")


def segments(pid: int) -> list[str]:
    """The shared memory for blocks that a process has mapped or open."""
    found = [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    maps = Path(f"/proc/{pid}/maps").read_text()
    return [one for one in [*found, *maps.split()] if "quire-kv-blocks" in one]


class PerEngine(Recorder):
    """Knows what each engine has loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.connectors = [KVConnectorStats(), KVConnectorStats()]

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
        super().record(scheduler_stats, iteration_stats)
        if scheduler_stats is not None and scheduler_stats.kv_connector is not None:
            self.connectors[iteration_stats.engine_index] = scheduler_stats.kv_connector


@pytest.mark.parametrize("size", [1, 2])
def test_what_is_in_memory_is_loaded_after_a_kill(folder: Path, size: int) -> None:
    prompts, sampling_params = make_prompts(4, 64, max_length=80, seed=6), params(max_tokens=40)
    expected = offline(folder, prompts, sampling_params, block_size=BLOCK_SIZE)
    num_blocks = len({tuple(prompt[:end]) for prompt in prompts for end in range(BLOCK_SIZE, len(prompt), BLOCK_SIZE)})
    before = set(os.listdir("/dev/shm"))

    async def main() -> None:
        streams = [Stream(llm, prompt, sampling_params) for prompt in prompts]
        await until(lambda: min(stream.num_tokens for stream in streams) > 0)
        await until(lambda: recorder.scheduler_stats.kv_connector.num_saved_blocks >= num_blocks)
        kill(llm)
        outputs = await asyncio.gather(*(stream.task for stream in streams))
        assert [output.outputs for output in outputs] == expected

    settings: dict[str, Any] = {"kv_transfer_config": MEMORY, "block_size": BLOCK_SIZE, "tensor_parallel_size": size}
    with engine(folder, step_seconds=0.02, **settings) as (llm, recorder):
        run(llm, main)
        assert recorder.num_restarts == 1
        stats = recorder.scheduler_stats.kv_connector
        assert segments(llm.engine_pid)
        assert set(os.listdir("/dev/shm")) == before
    assert stats.num_loaded_blocks >= num_blocks
    assert stats.num_failed_blocks == 0
    assert not segments(os.getpid()), "the frontend has let go of it"


def test_replicas_share_it(folder: Path) -> None:
    """What one has computed, the other loads; also one that has joined later."""
    prompts, sampling_params = make_prompts(3, 64, max_length=80, seed=7), params(max_tokens=8)
    expected = offline(folder, prompts, sampling_params, block_size=BLOCK_SIZE)
    recorder = PerEngine()

    async def ask() -> None:
        outputs = await asyncio.gather(*(Stream(llm, prompt, sampling_params).task for prompt in prompts))
        assert [output.outputs for output in outputs] == expected

    async def main() -> None:
        await ask()
        await until(lambda: recorder.connectors[0].num_saved_blocks > 0)
        await llm.scale(2)
        await llm.reset_prefix_cache()
        for _ in range(2):
            await ask()

    settings: dict[str, Any] = {
        "kv_transfer_config": MEMORY, "block_size": BLOCK_SIZE, "data_parallel_routing": "round_robin",
        "kv_cache_memory_bytes": 1 << 22,
    }  # fmt: skip
    with engine(folder, recorder, **settings) as (llm, _):
        run(llm, main)
        assert all(segments(pid) for pid in llm.engine_pids)
    assert recorder.connectors[1].num_loaded_blocks > 0


FRONTEND = """
import asyncio, sys
from quire_engine import AsyncLLM, EngineConfig, SamplingParams
llm = AsyncLLM(EngineConfig.from_settings({"model": sys.argv[1], "dtype": "float32", "block_size": 4,
    "kv_transfer_config": {"kv_connector": "SharedMemoryConnector",
                           "kv_connector_extra_config": {"max_bytes": 33554432}}}))
async def main():
    await llm.start()
    async for _ in llm.generate(list(range(40)), SamplingParams(max_tokens=4)):
        pass
    print("pid", llm.engine_pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def test_nothing_is_left_when_the_frontend_is_killed(folder: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    frontend = start_forked(FRONTEND, str(folder))
    try:
        assert frontend.stdout is not None
        pid = int(next(line for line in frontend.stdout if line.startswith(b"pid")).split()[1])
        assert segments(pid)
        assert segments(frontend.pid)
        descriptor = os.pidfd_open(pid)
        os.kill(frontend.pid, signal.SIGKILL)
        frontend.wait()
        asyncio.run(until(lambda: not Path(f"/proc/{pid}/maps").exists() or not Path(f"/proc/{pid}/maps").read_text()))
        os.close(descriptor)
    finally:
        frontend.kill()
        frontend.communicate()
    assert set(os.listdir("/dev/shm")) == before


def test_more_than_there_is_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def config(**extra: int) -> EngineConfig:
        transfer = {"kv_connector": "SharedMemoryConnector", "kv_connector_extra_config": extra}
        return EngineConfig.from_settings({"model": "/m", "kv_transfer_config": transfer})

    monkeypatch.setattr(kv_memory, "available_memory_bytes", lambda: 8 << 30)
    for max_bytes in (9 << 30, 1000):
        with pytest.raises(ValueError, match=rf"max_bytes is {max_bytes}; it must be at least 1048576, and at most"):
            KVMemory(config(max_bytes=max_bytes))
    for memory, size in ((KVMemory(config()), 2 << 30), (KVMemory(config(max_bytes=5 << 20)), 5 << 20)):
        descriptor = memory.config.cache.kv_memory
        assert descriptor is not None
        assert os.fstat(descriptor).st_size == size
        assert os.fstat(descriptor).st_blocks == 0
        with pytest.raises(PermissionError):
            os.truncate(descriptor, 4096)
        memory.close()
        memory.close()
    plain = EngineConfig.from_settings({"model": "/m"})
    assert KVMemory(plain).config is plain


def test_a_block_that_does_not_fit_is_refused_at_the_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_memory, "LEAST_BYTES", 4096)
    transfer = {"kv_connector": "SharedMemoryConnector", "kv_connector_extra_config": {"max_bytes": 500_000}}
    settings = {"model": str(folder), "dtype": "float32", "block_size": 1024, "kv_transfer_config": transfer}
    with pytest.raises(Exception, match=r"max_bytes is 500000, which cannot be used: .*raise max_bytes"):
        AsyncLLM(EngineConfig.from_settings(settings))
    assert not segments(os.getpid())
