"""Mixtures of experts say token for token what transformers says, however their experts are divided among ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine import LLM, SamplingParams
from quire_engine.distributed import ParallelState
from quire_engine.models.layers.experts import MixtureOfExperts, experts_of_rank
from quire_engine.worker.forward.recorded import RecordedForward
from quire_kernels import cpu
from support.oracle import Expected, assert_exact
from support.ranks import ThreadExecutor, llm_of_thread_ranks

Workload = tuple[list[list[int]], list[int], list[Expected]]

SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_num_batched_tokens": 128}
LAYOUTS = [("gpt-oss", 2, 1), ("mixtral", 4, 1), ("qwen2-moe", 2, 1), ("qwen3-moe", 2, 2)]
"""Checkpoint, tensor parallel size, pipeline parallel size; all with expert parallelism, as `test_every_family.py` has
the others."""


@contextmanager
def make_llm(folder: Path, **settings: Any) -> Iterator[LLM]:
    with llm_of_thread_ranks(folder, **{**SETTINGS, **settings}) as llm:
        yield llm


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tensor", "pipeline"), LAYOUTS)
def test_requests_are_token_exact(
    name: str, tensor: int, pipeline: int, checkpoint: Callable[[str], Path], workload: Callable[[str], Workload]
) -> None:
    prompts, lengths, expected = (part[:24] for part in workload(name))
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, logprobs=0) for n in lengths]
    settings = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    with make_llm(checkpoint(name), **settings, enable_expert_parallel=True) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        executor = llm._core.executor
        assert isinstance(executor, ThreadExecutor)
        models = [worker.runner.model for worker in executor.workers]
    assert_exact(outputs, expected)
    mixtures = [
        module for model in models[:tensor] for module in model.modules() if isinstance(module, MixtureOfExperts)
    ]
    held = [len(module.experts) for module in mixtures]
    number = mixtures[0].options.num_experts
    assert sum(held) == number * len(held) // tensor, "each expert is on one rank"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recorded_steps_give_the_bits_of_those_that_are_not(
    dtype: str, checkpoint: Callable[[str], Path], workload: Callable[[str], Workload], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = workload("qwen2-moe")[0][:12]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0)
    results = []
    for is_recorded in (True, False):
        if not is_recorded:
            monkeypatch.setattr(RecordedForward, "takes", lambda self, inputs: False)
        with make_llm(checkpoint("qwen2-moe"), dtype=dtype) as llm:
            outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
            recorded = llm._core.executor._worker.runner._recorded
            assert cpu.library() is None or (recorded is not None and recorded._layers is not None)
        results.append([(output.token_ids, output.cumulative_logprob) for output in outputs])
    assert results[0] == results[1]


def test_tokens_are_counted_by_expert_however_experts_are_divided(checkpoint: Callable[[str], Path]) -> None:
    prompts = [[5, 6, 7, 8 + i] for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    counted = []
    for tensor, pipeline in ((1, 1), (2, 1), (2, 2)):
        settings = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
        with make_llm(checkpoint("qwen3-moe"), **settings, enable_expert_parallel=True) as llm:
            executor = llm._core.executor
            assert not executor.expert_tokens().any(), "what was computed before the first request does not count"
            llm.generate(prompts, params, use_tqdm=False)
            counted.append(executor.expert_tokens().tolist())
    assert counted[0] == counted[1] == counted[2]
    num_tokens = sum(len(prompt) + 4 for prompt in prompts)  # the last token of each is not computed
    assert [sum(row) for row in counted[0]] == [4 * num_tokens] * 3
    assert all(max(row) <= num_tokens for row in counted[0])


def test_models_without_experts_count_nothing(checkpoint: Callable[[str], Path]) -> None:
    with make_llm(checkpoint("tied-gqa")) as llm:
        llm.generate([[5, 6]], SamplingParams(max_tokens=2), use_tqdm=False)
        core = llm._core
        assert core.executor.expert_tokens() is None
        assert core.make_stats().expert_load is None


@pytest.mark.parametrize(("ranks", "replicas"), [(1, 1), (2, 1), (3, 1), (4, 1), (7, 1), (1, 3), (2, 2), (3, 2)])
def test_each_expert_is_on_one_rank_and_none_is_without(ranks: int, replicas: int) -> None:
    states = [
        ParallelState(
            rank=rank, tensor_parallel_size=ranks, enable_expert_parallel=True, expert_replica=replica,
            num_expert_replicas=replicas,
        )
        for replica in range(replicas) for rank in range(ranks)
    ]  # fmt: skip
    held = [experts_of_rank(7, state) for state in states]
    assert [expert for part in held for expert in part] == [*range(7)]
    assert max(map(len, held)) - min(map(len, held)) <= 1


def test_routers_are_not_quantised(checkpoint: Callable[[str], Path]) -> None:
    with make_llm(checkpoint("qwen2-moe"), quantization="int8") as llm:
        (mixture,) = [
            module for module in llm._core.executor._worker.runner.model.modules()
            if isinstance(module, MixtureOfExperts)
        ]  # fmt: skip
    assert mixture.shared_expert is not None
    assert not mixture.gate.packed.is_quantized
    assert not mixture.shared_expert_gate.packed.is_quantized
    assert mixture.shared_expert.down_proj.packed.data.dtype == torch.int8
    assert mixture._packed is not None
    assert all(weight.data.dtype == torch.int8 for weight in mixture._packed.gate_up)
