"""What of a GPU's memory is left for the KV cache. Without a GPU: the figures are a driver's that counts by itself."""

import re
from typing import Any

import pytest
import torch
from quire_engine.config import EngineConfig
from quire_engine.worker.cache_memory import CacheMemory, CpuCacheMemory, GpuCacheMemory, check_tables

GIGABYTE = 1 << 30
DEVICE = torch.device("cuda", 0)


def test_a_context_whose_tables_exceed_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a checkpoint may claim any `max_position_embeddings`."""
    monkeypatch.setattr("quire_engine.worker.cache_memory.available_memory_bytes", lambda: 4 * GIGABYTE)
    check_tables(64, 1 << 20, 128)
    with pytest.raises(ValueError, match=r"^max_model_len is 1000000000: .* set max_model_len to at most 1864135, or"):
        check_tables(64, 10**9, 128)
    check_tables(64, 1864135, 128)


@pytest.mark.parametrize(
    ("settings", "there"),
    [
        ({}, "this machine has 4294967296 bytes"),
        ({"tensor_parallel_size": 2}, "this machine for each rank of 2 has 2147483648 bytes"),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}, "this machine has 4294967296 bytes"),
    ],
)
def test_a_cache_beyond_the_machines_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], there: str
) -> None:
    monkeypatch.setattr("quire_engine.worker.cache_memory.total_memory_bytes", lambda: 4 * GIGABYTE)

    def check(asked: int | None) -> None:
        config = EngineConfig.from_settings({"model": "m", "kv_cache_memory_bytes": asked, **settings})
        CpuCacheMemory(config).check_setting()

    check(None)
    check(2 * GIGABYTE)
    with pytest.raises(ValueError, match=rf"^kv_cache_memory_bytes is {5 * GIGABYTE}, and {there} of memory; lower it"):
        check(5 * GIGABYTE)


def test_a_cache_beyond_the_gpus_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeDriver(monkeypatch, others=10 * GIGABYTE)
    settings = {"model": "m", "kv_cache_memory_bytes": 81 * GIGABYTE}
    memory = GpuCacheMemory(EngineConfig.from_settings(settings), DEVICE)
    with pytest.raises(ValueError, match=rf"is {81 * GIGABYTE}, and cuda:0 has {80 * GIGABYTE} bytes of memory"):
        memory.check_setting()


class FakeDriver:
    """A GPU of 80 GB, of which other programs hold some, and torch and the libraries the rest of what is taken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, others: int) -> None:
        self.others, self.allocated, self.cached, self.libraries, self.peak = others, 0, 0, 0, 0
        functions = {
            "mem_get_info": lambda device: (80 * GIGABYTE - self.taken, 80 * GIGABYTE),
            "memory_allocated": lambda device: self.allocated,
            "memory_reserved": lambda device: self.allocated + self.cached,
            "max_memory_allocated": lambda device: self.peak,
            "reset_peak_memory_stats": lambda device: setattr(self, "peak", self.allocated),
            "synchronize": lambda device: None,
            "empty_cache": lambda: setattr(self, "cached", 0),
        }
        for name, function in functions.items():
            monkeypatch.setattr(torch.cuda, name, function)

    @property
    def taken(self) -> int:
        return self.others + self.allocated + self.cached + self.libraries

    def load(self, size: int) -> None:
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def step(self) -> None:
        """Takes 3 GB, which torch keeps, and lets a library take 1 GB."""
        self.load(3 * GIGABYTE)
        self.allocated -= 3 * GIGABYTE
        self.cached, self.libraries = 3 * GIGABYTE, GIGABYTE


def config(share: float) -> EngineConfig:
    return EngineConfig.from_settings({"model": "m", "gpu_memory_utilization": share})


def test_the_cache_gets_what_weights_and_steps_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(monkeypatch, others=10 * GIGABYTE)
    memory = GpuCacheMemory(config(0.75), DEVICE)
    driver.load(16 * GIGABYTE)
    measured = memory.measure(driver.step, graph_bytes=2 * GIGABYTE)
    assert measured == CacheMemory(60 * GIGABYTE, 3 * GIGABYTE, (60 - 16 - 3 - 1 - 2) * GIGABYTE)
    assert memory.free_bytes() == (80 - 10 - 16 - 1) * GIGABYTE


def test_a_share_that_others_hold_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeDriver(monkeypatch, others=10 * GIGABYTE)
    message = f"gpu_memory_utilization is 0.9: that is {72 * GIGABYTE} bytes of cuda:0, of which {70 * GIGABYTE} are"
    with pytest.raises(ValueError, match=f"^{re.escape(message)} free; lower it"):
        GpuCacheMemory(config(0.9), DEVICE)
    GpuCacheMemory(config(0.875), DEVICE)
