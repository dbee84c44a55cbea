"""The engine core's process ends when one of its workers does, and takes the others with it."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from quire_engine import EngineConfig, SamplingParams
from quire_engine.core.client import AsyncMPClient
from quire_engine.messages import EngineCoreRequest
from support.processes import eventually, is_gone


def start(folder: Path) -> AsyncMPClient:
    settings = {"model": str(folder), "max_model_len": 256, "tensor_parallel_size": 2, "kv_cache_memory_bytes": 2**20}
    client = AsyncMPClient(EngineConfig.from_settings(settings))
    client.wait_until_ready()
    return client


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("rank", [0, 1])
def test_worker_that_is_killed_ends_the_engine(rank: int, busy: bool, checkpoint: Callable[[str], Path]) -> None:
    client = start(checkpoint("tied-gqa"))
    try:
        pids = client.ready.worker_pids
        assert len(pids) == 2
        if busy:
            params = SamplingParams(max_tokens=200, ignore_eos=True)
            client.add_request(EngineCoreRequest("a", [1, 2, 3], params))
        os.kill(pids[rank], signal.SIGKILL)
        assert eventually(lambda: client._process.poll() is not None, 5)
        assert client._process.returncode == 1
        assert all(is_gone(pid) for pid in pids)
    finally:
        client.shutdown()


def test_workers_die_with_the_engine_core(checkpoint: Callable[[str], Path]) -> None:
    client = start(checkpoint("tied-gqa"))
    try:
        pids = client.ready.worker_pids
        os.kill(pids[1], signal.SIGSTOP)
        os.kill(client.pid, signal.SIGKILL)
        assert eventually(lambda: all(is_gone(pid) for pid in pids), 2)
    finally:
        client.shutdown()


def test_shutdown_ends_all_processes(checkpoint: Callable[[str], Path]) -> None:
    client = start(checkpoint("tied-gqa"))
    pids = [client.pid, *client.ready.worker_pids]
    client.shutdown()
    assert all(is_gone(pid) for pid in pids)
    assert client._process.returncode == 0
