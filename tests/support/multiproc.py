"""A MultiProcExecutor for a test, and steps for it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire_engine import EngineConfig, SamplingParams
from quire_engine.executor.multiproc import MultiProcExecutor
from quire_engine.messages import NewRequestData, SchedulerOutput
from support.processes import is_gone, open_descriptors

__all__ = ["bad_step", "executor", "settings", "step"]

KV_CACHE_BYTES = 2**20


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": str(folder),
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_batched_tokens": 64,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "distributed_executor_backend": "mp",
        **more,
    }


@contextlib.contextmanager
def executor(folder: Path, **more: Any) -> Iterator[MultiProcExecutor]:
    """Afterwards its processes are gone, and its descriptors closed."""
    descriptors = open_descriptors()
    config = EngineConfig.from_settings(settings(folder, **more))
    workers = MultiProcExecutor(config, 256)
    pids = workers.worker_pids
    try:
        workers.initialize_cache(workers.determine_num_blocks())
        yield workers
    finally:
        workers.shutdown()
    workers.shutdown()
    assert all(is_gone(pid) for pid in pids)
    assert open_descriptors() <= descriptors


def step(request_id: str, num_tokens: int = 4) -> SchedulerOutput:
    request = NewRequestData(request_id, [5] * num_tokens, num_tokens, SamplingParams(temperature=0), [], [0], 0)
    return SchedulerOutput({request_id: num_tokens}, new_requests=[request])


def bad_step() -> SchedulerOutput:
    return SchedulerOutput({"unknown to the workers": 1})
