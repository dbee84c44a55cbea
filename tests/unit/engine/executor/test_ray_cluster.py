"""RayExecutor in the Ray cluster of the program that uses the engine."""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from quire_engine import LLM, EngineConfig, SamplingParams
from quire_engine.errors import EngineError
from quire_engine.executor import ray as ray_module
from quire_engine.executor.ray import RayExecutor
from quire_engine.messages import UsesGpu
from quire_engine.spec_decode import make_proposer
from support.every_kind import PARAMS, PROMPTS, Told, assert_told, core_of, make_llm
from support.scheduling import draft_always

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of two CPUs and one GPU, which Ray does not look for."""
    import ray

    with (
        patch.dict(os.environ, {"RAY_USAGE_STATS_ENABLED": "0"}),  # what Ray sets is gone afterwards, too
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
    ):
        ray.init(
            address="local", num_cpus=2, num_gpus=1, object_store_memory=ray_module.OBJECT_STORE_BYTES,
            include_dashboard=False, _temp_dir=folder, _node_ip_address=ray_module.LOOPBACK,
        )  # fmt: skip
        yield ray
        ray.shutdown()


def config_of(folder: Path, **settings: Any) -> EngineConfig:
    return EngineConfig.from_settings({"model": str(folder), "distributed_executor_backend": "ray", **settings})


def test_one_rank_gives_the_same_tokens(checkpoint: Callable[[str], Path]) -> None:
    outputs, prompts = [], [[5, 6, 7], [9] * 40]
    for settings in ({}, {"distributed_executor_backend": "ray"}):
        llm = LLM(checkpoint("tied-gqa"), dtype="float32", **settings)
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        outputs.append([one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)])
        llm.shutdown()
    assert outputs[0] == outputs[1]


def test_every_kind_of_request_with_drafts_on_two_ranks(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("tinypy")
    llm = make_llm(folder)
    expected = [Told(output) for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    llm.shutdown()
    drafts = {"method": "suffix", "num_speculative_tokens": 7}
    llm = make_llm(folder, tensor_parallel_size=2, distributed_executor_backend="ray", speculative_config=drafts)
    try:
        core = core_of(llm)
        assert isinstance(core.executor, RayExecutor)
        assert core.scheduler.config.speculative_config is not None
        draft_always(core.scheduler, make_proposer(core.scheduler.config.speculative_config), 4096, 7)
        for _ in range(2):  # the second time, the outputs of the first are what is drafted
            assert_told(llm.generate(PROMPTS, PARAMS, use_tqdm=False), expected)
        stats = llm.get_stats()
        assert (stats.num_failed_steps, stats.num_blocks_used, stats.num_running) == (0, 0, 0)
        assert stats.drafts is not None
        assert stats.drafts.num_accepted_tokens >= 20
        core.scheduler.check_integrity()
    finally:
        llm.shutdown()


def test_an_error_of_a_worker_is_its_own(checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match="kv_cache_memory_bytes"):
        LLM(checkpoint("tied-gqa"), distributed_executor_backend="ray", kv_cache_memory_bytes=10)


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="of a torch without CUDA")
def test_each_rank_has_a_gpu_put_aside(
    cluster: Any, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("tied-gqa")
    with monkeypatch.context() as patched:
        patched.setattr(ray_module, "PLACEMENT_SECONDS", 0.1)
        with pytest.raises(EngineError, match=r"no room for 2 ranks of one CPU and one GPU each; .* device to 'cpu'"):
            RayExecutor(config_of(folder, device="cuda", tensor_parallel_size=2), 64)
    with pytest.raises(ValueError, match=r"^device is 'cuda', but torch .* has no CUDA"):  # says the actor
        RayExecutor(config_of(folder, device="cuda"), 64)
    executor = RayExecutor(config_of(folder, tensor_parallel_size=2), 64)
    assert executor.collective_rpc(UsesGpu()) == [False, False]
    assert cluster.available_resources()["GPU"] == 1
    executor.shutdown()
    assert cluster.is_initialized()
