"""What an LLM held is free after `shutdown`, while the LLM itself is still there."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine import LLM, SamplingParams
from quire_engine.errors import EngineDeadError
from quire_kernels.gpu.interpreter import INTERPRETED
from support.triton_interpreter import interpreted_kernels

SETTINGS: dict[str, dict[str, Any]] = {
    "recorded": {"device": "cpu"},
    "one step ahead": {"device": "cpu", "async_scheduling": True},
    "graphs": {},
}
PARAMS = SamplingParams(temperature=0.5, seed=1, max_tokens=4, ignore_eos=True)


@pytest.fixture(params=SETTINGS)
def settings(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """The last on a GPU's kernels: on the GPU where there is one."""
    with interpreted_kernels() if request.param == "graphs" and INTERPRETED.value else nullcontext():
        yield {"max_num_seqs": 2, "max_model_len": 32, "kv_cache_memory_bytes": 1 << 20, **SETTINGS[request.param]}


def held_by(llm: LLM) -> list[weakref.ref[Any]]:
    """Of the weights, the KV cache, and what was captured or recorded of them."""
    worker = llm._core.executor._worker  # type: ignore[attr-defined]
    runner = worker.runner
    captured = runner.graphs or runner._recorded
    assert captured is not None
    caches = [cache for pair in runner.kv_caches for cache in pair]
    parts = [worker, runner, runner.model, captured, runner.last_token_ids, *runner.model.parameters(), *caches]
    if runner.graphs is not None:
        parts += [getattr(graph.forward, "__self__", graph.forward) for graph in runner.graphs._graphs.values()]
        parts += [runner.graphs._hidden, *(plan.partials for plan in runner.graphs._plans.values())]
    return [weakref.ref(part) for part in parts]


def test_everything_is_given_back(settings: dict[str, Any], checkpoint: Callable[[str], Path]) -> None:
    llm = LLM(checkpoint("tied-gqa"), dtype="float32", **settings)
    on_gpu = torch.cuda.is_available() and "device" not in settings
    llm.generate([[3, 4, 5], [6]], PARAMS, use_tqdm=False)
    held = held_by(llm)
    stream = llm.stream([3, 4, 5, 6], PARAMS)
    next(stream)  # a step may be in flight
    before = torch.cuda.memory_reserved() if on_gpu else 0
    llm.shutdown()
    assert [part() for part in held if part() is not None] == []
    if on_gpu:
        assert torch.cuda.memory_reserved() <= before - (1 << 20)
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="the engine was shut down"):
        list(stream)
    with pytest.raises(EngineDeadError, match="the engine was shut down"):
        llm.generate([3], PARAMS, use_tqdm=False)
