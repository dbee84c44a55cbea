"""Hidden states of some layers that a step keeps by slot, however it is computed."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from quire_engine import LLM, SamplingParams
from quire_engine.distributed import ParallelState
from quire_engine.kv_cache import STATE
from quire_engine.messages import NewRequestData, SchedulerOutput
from quire_engine.models import CheckpointConfig
from quire_engine.models.base import OUTPUT, FeatureTaps
from quire_engine.models.decoder import Decoder
from quire_engine.models.loader import build, load_model
from quire_engine.worker.batch.input_batch import InputBatch
from quire_engine.worker.batch.step_inputs import StepInputs
from quire_engine.worker.forward.decode_graphs import DecodeGraphs, run_as_captured
from quire_engine.worker.forward.eager import EagerForward, Forward
from quire_engine.worker.forward.recorded import RecordedForward
from quire_kernels import cpu
from quire_kernels.gpu.interpreter import INTERPRETED
from quire_kernels.kv_cache import new_kv_cache
from support.every_kind import core_of
from support.families import FAMILIES, OF_EACH_KIND
from support.full import FULL
from support.oracle import load_reference
from support.triton_interpreter import interpreted_kernels
from transformers import AutoModelForCausalLM

BLOCK_SIZE, NUM_BLOCKS, SIZE = 16, 7, 64  # the last block is the graphs' scratch block
LAYERS = (0, 2, OUTPUT, 1)
REQUESTS = {"a": ([7 * i % 500 for i in range(21)], [4, 1]), "b": ([3, 1, 4, 1, 5], [2])}
"""Tokens, and blocks. The last token is computed in a step of its own."""


@pytest.fixture
def folder(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("qwen3")


class Steps:
    """A model, and forwards over its own cache and batch."""

    def __init__(self, folder: Path, is_tapped: bool = True) -> None:
        self.model = load_model(folder, CheckpointConfig.from_folder(folder), torch.float32, 64)
        self.table = torch.full((NUM_BLOCKS * BLOCK_SIZE, len(LAYERS) * SIZE), -1.0)
        if is_tapped:
            self.model.feature_taps = FeatureTaps(LAYERS, self.table)
        self.batch = InputBatch(2, 64, BLOCK_SIZE, 515)
        for name, (token_ids, blocks) in REQUESTS.items():
            self.batch.add(NewRequestData(name, token_ids, len(token_ids), SamplingParams(), [], blocks, 0))
        self.kv_caches = [
            tuple(
                new_kv_cache(NUM_BLOCKS, spec.num_kv_heads, BLOCK_SIZE, spec.head_size, torch.float32) for _ in range(2)
            )
            for spec in self.model.state_specs
        ]
        self.eager = EagerForward(self.model, self.kv_caches, self.batch, None)  # type: ignore[arg-type]

    def recorded(self) -> RecordedForward:
        return RecordedForward(self.model, self.kv_caches, self.batch, None)  # type: ignore[arg-type]

    def graphs(self) -> DecodeGraphs:
        graphs = DecodeGraphs(
            self.model, self.kv_caches, self.batch, torch.zeros(3, dtype=torch.int64), 64, lambda: run_as_captured
        )  # type: ignore[arg-type]
        graphs.capture([2], lambda: 0, 1)
        return graphs

    def run(self, forward: Forward, *, last_tokens: bool) -> None:
        """Compute the last token of each request, or all tokens before them."""
        scheduled = {name: 1 if last_tokens else len(token_ids) - 1 for name, (token_ids, _) in REQUESTS.items()}
        if last_tokens:
            for name, (token_ids, _) in REQUESTS.items():
                self.batch.num_computed_tokens[self.batch.slots[name]] = len(token_ids) - 1
        inputs = StepInputs.of(self.batch, SchedulerOutput(scheduled))
        assert forward.takes(inputs)
        forward(inputs)


def expected_table(folder: Path) -> torch.Tensor:
    """What transformers has before each layer, and at last."""
    table = torch.full((NUM_BLOCKS * BLOCK_SIZE, len(LAYERS) * SIZE), -1.0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for token_ids, blocks in REQUESTS.values():
        states = model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
        slots = [blocks[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(len(token_ids))]
        table[slots] = torch.cat([states[layer][0] for layer in LAYERS], dim=-1)
    return table


@pytest.mark.parametrize("way", ["op by op", "recorded", "graphs"])
@torch.inference_mode()
def test_a_step_keeps_what_plain_torch_computes(way: str, folder: Path) -> None:
    if way == "recorded" and cpu.library() is None:
        pytest.skip(cpu.status().reason)
    if way == "graphs" and not INTERPRETED.value:
        pytest.skip("the interpreter is off where there is a GPU; see tests/conftest.py")
    expected = expected_table(folder)
    with interpreted_kernels() if way == "graphs" else nullcontext():
        steps = Steps(folder)
        forward: Forward = steps.recorded() if way == "recorded" else steps.eager
        steps.run(forward, last_tokens=False)
        if way == "graphs":
            forward = steps.graphs()
        steps.run(forward, last_tokens=True)
    scratch = (NUM_BLOCKS - 1) * BLOCK_SIZE
    torch.testing.assert_close(steps.table[:scratch], expected[:scratch], rtol=1e-4, atol=1e-4)
    assert way == "graphs" or torch.equal(steps.table[scratch:], expected[scratch:]), "no other slot is written"


def test_nothing_is_computed_for_it_without_a_table(folder: Path) -> None:
    if cpu.library() is None:
        pytest.skip(cpu.status().reason)
    with torch.inference_mode():
        tapped, plain = (Steps(folder, is_tapped).recorded()._layers._recording for is_tapped in (True, False))
    assert tapped is not None
    assert plain is not None
    assert len(tapped._kernels) == len(plain._kernels) + len(LAYERS)


@torch.inference_mode()
def test_a_stage_writes_the_columns_of_its_own_layers(folder: Path) -> None:
    config = CheckpointConfig.from_folder(folder)
    parallel = ParallelState(rank=1, tensor_parallel_size=1, pipeline_parallel_size=2)
    steps = Steps(folder)
    steps.model = model = build(lambda: Decoder(config, 64, parallel), torch.float32, torch.device("cpu"))
    assert list(model.layers) == ["2"]
    model.feature_taps = FeatureTaps(LAYERS, steps.table)
    for parameter in model.parameters():
        parameter.data.normal_()
    for module in model.modules():
        if hasattr(module, "pack"):
            module.pack()
    _, context = steps.eager.upload(StepInputs.of(steps.batch, SchedulerOutput({"b": 4})))
    hidden, residual = torch.randn(4, SIZE), torch.randn(4, SIZE)
    total = hidden + residual
    model.run_layers(hidden, residual, context, steps.kv_caches[2:])  # type: ignore[arg-type]
    assert torch.equal(steps.table[2 * BLOCK_SIZE : 2 * BLOCK_SIZE + 4, SIZE : 2 * SIZE], total)
    assert (steps.table != -1).sum() == total.numel()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", FAMILIES if FULL else OF_EACH_KIND)
@torch.inference_mode()
def test_every_family_keeps_what_transformers_has(architecture: str, checkpoint: Callable[[str], Path]) -> None:
    """Before each layer, and at last; so heads and blocks that read hidden states can draft for it."""
    folder, prompt = checkpoint(FAMILIES[architecture]), [5 + 7 * i % 500 for i in range(40)]
    config = CheckpointConfig.from_folder(folder)
    if all(window == STATE for window in config.windows):
        pytest.skip("such methods use the blocks of keys and values")
    if config.options.altup is not None:
        pytest.skip("there are several residual streams")
    layers = (*range(config.num_layers), OUTPUT)
    llm = LLM(
        folder, dtype="float32", max_model_len=64, kv_cache_memory_bytes=2**22, disable_hybrid_kv_cache_manager=True
    )
    runner = core_of(llm).executor._worker.runner  # type: ignore[attr-defined]
    num_blocks = max(len(cache) for caches in runner.kv_caches for cache in caches)
    table = torch.zeros(num_blocks * BLOCK_SIZE, len(layers) * config.hidden_size)
    runner.model.feature_taps = FeatureTaps(layers, table)
    llm.generate([prompt], SamplingParams(max_tokens=1), use_tqdm=False)
    (slot,) = (runner.batch.num_prompt_tokens == len(prompt)).nonzero()[0]
    positions = torch.arange(len(prompt))
    blocks = torch.from_numpy(runner.batch.block_table[slot])[positions // BLOCK_SIZE]
    found = table[blocks * BLOCK_SIZE + positions % BLOCK_SIZE].chunk(len(layers), 1)
    llm.shutdown()
    states = load_reference(folder)(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    assert len(states) == len(layers)
    for own, want in zip(found, states, strict=True):
        torch.testing.assert_close(own, want[0], rtol=1e-3, atol=1e-3 * float(want.abs().max()))
