"""RayExecutor with a local Ray cluster of its own: the same tokens as one process, and an end that is noticed."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from quire_engine import LLM, EngineConfig, SamplingParams
from quire_engine.errors import EngineDeadError, EngineError
from quire_engine.executor import make_executor
from quire_engine.executor import ray as ray_module
from quire_engine.models.checkpoints.config import CheckpointConfig

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9] * 40, [2, 3]]


@pytest.fixture
def ray_llm(checkpoint: Callable[[str], Path]) -> Iterator[Callable[..., LLM]]:
    llms = []

    def make(**settings: Any) -> LLM:
        llm = LLM(checkpoint("tied-gqa"), dtype="float32", distributed_executor_backend="ray", **settings)
        llms.append(llm)
        return llm

    yield make
    for llm in llms:
        llm.shutdown()


def test_two_stages_give_the_same_tokens(
    checkpoint: Callable[[str], Path], ray_llm: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[ray_module.RayWorkerArguments] = []

    def arguments(*values: Any) -> ray_module.RayWorkerArguments:
        told.append(actual(*values))
        return told[-1]

    actual = ray_module.RayWorkerArguments
    monkeypatch.setattr(ray_module, "RayWorkerArguments", arguments)
    # As under `quire serve`, whose temporary folder's path leaves no room for the paths of Ray's sockets.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert len(str(tmp_path)) > ray_module.LONGEST_TEMP_DIR
    expected = LLM(checkpoint("tied-gqa"), dtype="float32").generate(PROMPTS, GREEDY, use_tqdm=False)
    token = "only-the-frontend-knows"
    outputs = ray_llm(introspection_token=token, pipeline_parallel_size=2).generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    assert [item.rank for item in told] == [0, 1]
    assert not any(token.encode() in msgspec.msgpack.encode(item) for item in told)


def test_two_ranks_give_the_same_tokens_and_a_dead_one_is_noticed(
    checkpoint: Callable[[str], Path], ray_llm: Callable[..., LLM]
) -> None:
    import ray

    expected = LLM(checkpoint("tied-gqa"), dtype="float32").generate(PROMPTS, GREEDY, use_tqdm=False)
    llm = ray_llm(tensor_parallel_size=2)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    executor: Any = llm._core.executor
    ray.kill(executor._actors[1])
    with pytest.raises(EngineDeadError, match="rank 1 is gone"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    llm.shutdown()
    assert not ray.is_initialized()
    assert "RAY_ADDRESS" not in os.environ


def test_without_ray_the_error_says_what_to_install(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    folder = checkpoint("tied-gqa")
    config = EngineConfig.from_settings({"model": str(folder), "distributed_executor_backend": "ray"})
    with pytest.raises(EngineError, match=r"pip install .*\[ray\]"):
        make_executor(config, CheckpointConfig.from_folder(folder), 64)
