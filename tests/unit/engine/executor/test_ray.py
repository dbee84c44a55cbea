"""RayExecutor on a real local Ray cluster: the same tokens as one process, and an end that is noticed."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from quire_engine import LLM, EngineConfig, SamplingParams
from quire_engine.errors import EngineDeadError, EngineError
from quire_engine.executor import make_executor
from quire_engine.executor import ray as ray_module
from quire_engine.executor.ray import RayExecutor
from quire_engine.messages import UsesGpu
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


@pytest.mark.parametrize("settings", [{}, {"pipeline_parallel_size": 2}], ids=["one", "pp2"])
def test_actors_give_the_same_tokens(
    checkpoint: Callable[[str], Path],
    ray_llm: Callable[..., LLM],
    settings: dict[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
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
    outputs = ray_llm(introspection_token=token, **settings).generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    assert [item.rank for item in told] == list(range(settings.get("pipeline_parallel_size", 1)))
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


def config_of(folder: Path, **settings: Any) -> EngineConfig:
    return EngineConfig.from_settings({"model": str(folder), "distributed_executor_backend": "ray", **settings})


def test_without_ray_the_error_says_what_to_install(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    folder = checkpoint("tied-gqa")
    with pytest.raises(EngineError, match=r"pip install .*\[ray\]"):
        make_executor(config_of(folder), CheckpointConfig.from_folder(folder), 64)


def test_an_error_of_a_worker_is_its_own(ray_llm: Callable[..., LLM]) -> None:
    with pytest.raises(ValueError, match="kv_cache_memory_bytes"):
        ray_llm(kv_cache_memory_bytes=10)
    assert "RAY_ADDRESS" not in os.environ


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster of this program's own, of two CPUs and one GPU: Ray believes what it is told."""
    import ray

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        ray.init(
            address="local", num_cpus=2, num_gpus=1, object_store_memory=ray_module.OBJECT_STORE_BYTES,
            include_dashboard=False, _temp_dir=folder, _node_ip_address=ray_module.LOOPBACK,
        )  # fmt: skip
        yield ray
        ray.shutdown()


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="of a torch without CUDA")
def test_each_rank_has_a_gpu_put_aside(
    cluster: Any, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("tied-gqa")
    with monkeypatch.context() as patch:
        patch.setattr(ray_module, "PLACEMENT_SECONDS", 0.1)
        with pytest.raises(EngineError, match=r"no room for 2 ranks of one CPU and one GPU each; .* device to 'cpu'"):
            RayExecutor(config_of(folder, device="cuda", tensor_parallel_size=2), 64)
    with pytest.raises(ValueError, match=r"^device is 'cuda', but torch .* has no CUDA"):  # says the actor
        RayExecutor(config_of(folder, device="cuda"), 64)
    for device in ("auto", "cpu"):
        executor = RayExecutor(config_of(folder, device=device, tensor_parallel_size=2), 64)
        assert executor.collective_rpc(UsesGpu()) == [False, False]
        assert cluster.available_resources()["GPU"] == 1
        executor.shutdown()
    assert cluster.is_initialized()
