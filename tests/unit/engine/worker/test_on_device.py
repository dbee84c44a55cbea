"""What a GPU computes touches no tensor of the host, and waits for nothing: shown without a GPU, on tensors that have a
device, a shape and a dtype, and no memory."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quire_engine.messages import CachedRequestData, GrammarBitmask, NewRequestData, SchedulerOutput
from quire_engine.models import CheckpointConfig, step_context
from quire_engine.models.decoder import Decoder
from quire_engine.models.layers.parallel import Packable
from quire_engine.models.linear import linear_methods
from quire_engine.models.loader import build
from quire_engine.sampling import sampler, token_constraints
from quire_engine.sampling_params import SamplingParams
from quire_engine.worker import model_runner
from quire_engine.worker.batch import sampling_inputs
from quire_engine.worker.batch.input_batch import InputBatch
from quire_engine.worker.forward import decode_graphs
from quire_engine.worker.forward.decode_graphs import DecodeGraphs, run_as_captured
from quire_engine.worker.model_runner import ModelRunner
from quire_kernels import cpu
from quire_kernels.attention_plan import GpuAttentionPlan
from quire_kernels.gpu.interpreter import INTERPRETED
from quire_kernels.kv_cache import new_kv_cache
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GPU = torch.device("lazy", 0)
"""Stands for one: torch's index operator asks for the device's driver, and of all devices that are none only this one
has a driver that does nothing."""
BLOCK_SIZE = 16
MAX_MODEL_LEN = 64
QUANTIZATION = {torch.float32: None, torch.bfloat16: "fp8", torch.float16: "int8"}
"""What the weights are, by the activations' dtype."""


def upload(device: torch.device, *arrays: np.ndarray[Any, Any]) -> list[torch.Tensor]:
    assert device == GPU
    return [torch.empty(array.shape, dtype=torch.from_numpy(array[:0]).dtype, device=GPU) for array in arrays]


def upload_tensors(device: torch.device, columns: Any) -> Any:
    if columns is None:
        return None
    names = list(type(columns).__slots__)
    return type(columns)(**{name: torch.empty_like(getattr(columns, name), device=device) for name in names})


def plan_attention(
    table: torch.Tensor, starts: torch.Tensor, lens: torch.Tensor, num_heads: int, key_cache: torch.Tensor,
    window: None, is_causal: bool,
) -> GpuAttentionPlan:  # fmt: skip
    assert starts.device.type == lens.device.type == "cpu", "the host would wait for these"
    decodes, prefills = (len(table), key_cache.shape[1], num_heads, 2), (8, num_heads, 2)
    sizes = [(*decodes, key_cache.shape[3]), decodes, (*prefills, key_cache.shape[3]), prefills]
    return GpuAttentionPlan(2, num_heads, 2, *(torch.empty(size, device=GPU) for size in sizes))


class FakeDownload:
    def __init__(self, *tensors: torch.Tensor) -> None:
        assert all(tensor.device == GPU for tensor in tensors)


def launch(executor: Any, *arguments: Any, **settings: Any) -> None:
    tensors = [one for one in (*arguments, *settings.values()) if isinstance(one, torch.Tensor)]
    assert tensors
    assert {one.device for one in tensors} == {GPU}, "a kernel is given what it cannot read"


class OneDevice(TorchDispatchMode):
    """Refuses ops between a GPU's tensor and the host's; torch takes indices from the host, and waits for the GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        assert len({one.device for one in tensors}) <= 1, f"{func} of tensors here and there"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def config(checkpoint: Callable[[str], Path]) -> CheckpointConfig:
    return CheckpointConfig.from_folder(checkpoint("biased-mqa"))


@pytest.fixture
def _gpu(config: CheckpointConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not INTERPRETED.value:
        pytest.skip("there is a GPU, and other tests run on it")
    monkeypatch.setenv(cpu.KERNELS_VARIABLE, cpu.INTERPRETER)  # the kernels of GPUs, whose launch is another below
    cpu.status.cache_clear()
    for module in (
        model_runner,
        sampling_inputs,
        step_context,
        sampler,
        token_constraints,
        decode_graphs,
    ):
        monkeypatch.setattr(module, "upload", upload)
    monkeypatch.setattr(sampling_inputs, "upload_tensors", upload_tensors)
    monkeypatch.setattr(sampler, "Download", FakeDownload)
    monkeypatch.setattr(step_context, "plan_attention", plan_attention)
    monkeypatch.setattr("triton.runtime.interpreter.GridExecutor.__call__", launch)
    with FakeTensorMode(allow_non_fake_inputs=True), OneDevice():
        yield
    monkeypatch.undo()
    cpu.status.cache_clear()


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=str)
def runner(request: pytest.FixtureRequest, config: CheckpointConfig, _gpu: None) -> ModelRunner:
    methods = linear_methods(config.weight_format, QUANTIZATION[request.param])
    model = build(lambda: Decoder(config, MAX_MODEL_LEN), request.param, GPU, methods)
    for module in model.modules():
        if isinstance(module, Packable):
            module.pack()
    batch = InputBatch(8, MAX_MODEL_LEN, BLOCK_SIZE, config.vocab_size)
    runner = ModelRunner(model, batch, device=GPU, runs_ahead=True)
    dtype = torch.float8_e4m3fn if request.param == torch.bfloat16 else request.param
    shape = (9, config.num_kv_heads, BLOCK_SIZE, config.head_size)
    runner.use_caches(
        [(new_kv_cache(*shape, dtype, GPU), new_kv_cache(*shape, dtype, GPU)) for _ in range(config.num_layers)]
    )
    return runner


PARAMETERS = {
    "greedy": SamplingParams(temperature=0),
    "drawn": SamplingParams(temperature=0.8, top_p=0.9, top_k=5, min_p=0.1, seed=1),
    "logprobs": SamplingParams(temperature=0.8, seed=1, logprobs=3),
    "min_tokens": SamplingParams(temperature=0, min_tokens=4),
    "penalties": SamplingParams(temperature=0, repetition_penalty=1.3, presence_penalty=0.1),
    "constraints": SamplingParams(
        temperature=0, allowed_token_ids=[1, 2, 3], logit_bias={2: 1.0}, bad_words_token_ids=[[3]]
    ),
}


def steps(params: SamplingParams, bitmask: GrammarBitmask | None = None) -> list[SchedulerOutput]:
    """A prompt of 5 tokens in two chunks beside one of 3 tokens; then both decode, ahead of the results."""
    first, second = (
        NewRequestData(name, list(range(length)), length, params, [1, 7], [block], 0)
        for name, length, block in (("a", 5, 0), ("b", 3, 1))
    )
    both = [CachedRequestData(["a", "b"], [[], []], [5 + i, 3 + i]) for i in range(2)]
    return [
        SchedulerOutput({"a": 4}, [first]),
        SchedulerOutput(
            {"a": 1, "b": 3}, [second], CachedRequestData(["a"], [[]], [4]), grammar_bitmask=bitmask
        ),
        *(SchedulerOutput({"a": 1, "b": 1}, [], columns, grammar_bitmask=bitmask) for columns in both),
    ]  # fmt: skip


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("with_graphs", [False, True], ids=["op by op", "graphs"])
def test_a_step_needs_nothing_of_the_host(name: str, with_graphs: bool, runner: ModelRunner) -> None:
    if with_graphs:
        arguments = (runner.model, runner.kv_caches, runner.batch, runner.last_token_ids, MAX_MODEL_LEN)
        graphs = DecodeGraphs(*arguments, lambda: run_as_captured)
        graphs.capture([1, 2, 4], lambda: 0, 0)
        runner.use_caches(runner.kv_caches, graphs=graphs)
    for step in steps(PARAMETERS[name]):
        runner.submit(step)


def test_a_step_with_a_grammar_needs_nothing_of_the_host(runner: ModelRunner) -> None:
    words = -(-runner.batch.vocab_size // 32)
    bitmask = GrammarBitmask(["b"], b"\xff" * 4 * words)
    for step in steps(PARAMETERS["greedy"], bitmask):
        runner.submit(step)


def test_what_the_host_would_wait_for_is_noticed(runner: ModelRunner) -> None:
    with pytest.raises(DataDependentOutputException):
        runner.last_token_ids.tolist()
