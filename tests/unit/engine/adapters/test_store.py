"""What a rank keeps of adapters, and how much memory it sets aside for them."""

import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quire_engine.adapters.adaptable import adaptable_layers, adaptable_modules, planned_bytes
from quire_engine.adapters.board import AdapterBoard, row_length
from quire_engine.adapters.store import AdapterStore, Matrices, _Cell, _copied, _huge_pages, _staged
from quire_engine.config import EngineConfig, LoRAConfig
from quire_engine.distributed import ParallelState
from quire_engine.lora import AdaptableModules
from quire_engine.models import CheckpointConfig
from quire_engine.models.loader import META, build, new_model
from quire_kernels import lora_sizes, pack_lora
from support.checkpoints import make_small_checkpoint


def test_matrices_come_out_of_the_copy_as_they_went_in() -> None:
    matrices: Matrices = [
        [(torch.randn(3, 10), torch.randn(7, 3)), None],
        [None],
        [(torch.randn(1, 64), torch.randn(65, 1))],
    ]
    cell = _staged(matrices)
    assert cell.staged is not None
    weights = _copied(cell.matrices, cell.staged, torch.device("cpu"))
    for own, there in zip(matrices, weights, strict=True):
        for pair, weight in zip(own, there, strict=True):
            assert (pair is None) == (weight is None)
            if pair is not None and weight is not None:
                assert all(map(torch.equal, pair, weight.unpacked()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_the_same_in_huge_pages(dtype: torch.dtype) -> None:
    shapes = [[(16, 4096, 8192), (1, 4096, 7)], [], [(3, 64, 65)]]
    places = _huge_pages([[lora_sizes(*shape, dtype) for shape in own] for own in shapes], dtype)
    halves = [half for place in places for half in place]
    assert len({half.untyped_storage().data_ptr() for half in halves}) == 1
    assert all(half.data_ptr() % 64 == 0 for half in halves)
    pairs = [(torch.randn(r, k).to(dtype), torch.randn(n, r).to(dtype)) for own in shapes for r, k, n in own]
    weights = [pack_lora(*pair, out=place) for pair, place in zip(pairs, places, strict=True)]
    for pair, weight, place in zip(pairs, weights, places, strict=True):
        assert all(map(torch.equal, pair, weight.unpacked()))
        assert [half.data_ptr() for half in place] == [weight.a.data_ptr(), weight.b.data_ptr()]


def test_a_stage_whose_layers_an_adapter_leaves_alone_copies_nothing() -> None:
    cell = _staged([[None, None], [None]])
    assert cell.staged is not None
    assert not cell.staged.numel()
    assert _copied(cell.matrices, cell.staged, torch.device("cpu")) == [[None, None], [None]]


def test_an_adapter_that_is_not_needed_any_more_is_freed_before_the_next_one_comes() -> None:
    board = AdapterBoard(np.zeros((1, row_length(1)), dtype=np.int64))
    store = AdapterStore(LoRAConfig(enable_lora=True), AdaptableModules(), board, ParallelState())
    store._like = torch.empty(0)
    is_freed = threading.Event()
    cell = _Cell(staged=torch.empty(8))
    weakref.finalize(cell.staged, is_freed.set)
    store._loads.put(cell)
    del cell
    thread = threading.Thread(target=store._run)
    thread.start()
    try:
        assert is_freed.wait(30)
    finally:
        store.close()
        thread.join()


def test_memory_is_set_aside_for_the_largest_adapters_of_each_rank(tmp_path: Path) -> None:
    checkpoint = CheckpointConfig.from_folder(make_small_checkpoint(tmp_path / "base"))
    shapes = adaptable_modules(checkpoint).shapes
    assert len(shapes) == 14
    assert not {"embed_tokens", "lm_head"} & set(shapes)
    config, like = LoRAConfig(enable_lora=True, max_loras=2, max_cpu_loras=5, max_lora_rank=8), torch.empty(0)
    sizes = []
    for rank in range(2):
        parallel = ParallelState(rank=rank, tensor_parallel_size=2)
        model = build(lambda own=parallel: new_model(checkpoint, 1, own), torch.float32, META)
        sizes.append(planned_bytes(config, adaptable_layers(model), like))
    whole = planned_bytes(config, adaptable_layers(build(lambda: new_model(checkpoint, 1), torch.float32, META)), like)
    assert whole == 5 * 8 * 4 * sum(rows + columns for rows, columns in shapes.values())
    assert whole / 2 < sizes[0] == sizes[1] < whole


@pytest.mark.parametrize(
    ("settings", "experts", "dora"),
    [
        ({}, "", ""),
        ({"quantization": "fp8"}, "", "with a base in fp8"),
        (
            {"tensor_parallel_size": 2, "enable_expert_parallel": True, "quantization": "fp8"},
            "", "with a base in fp8",
        ),
        (
            {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": True},
            "with enable_eplb: set it to false", "",
        ),
        (
            {"data_parallel_size": 2, "enable_expert_parallel": True},
            "where replicas share experts: leave enable_expert_parallel out", "",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_settings_say_what_adapters_may_not_change(
    checkpoint: Callable[[str], Path], settings: dict[str, Any], experts: str, dora: str
) -> None:
    base = checkpoint("qwen3-moe")
    config = EngineConfig.from_settings({"model": str(base), "device": "cpu", **settings})
    modules = adaptable_modules(CheckpointConfig.from_folder(base), config)
    assert (modules.why_not_experts, modules.why_not_dora) == (experts, dora)
    assert ("layers.0.mlp.experts.8.up_proj" in modules.shapes) == (not experts)
    assert "layers.0.self_attn.q_proj" in modules.shapes


def test_no_memory_is_set_aside_for_experts(checkpoint: Callable[[str], Path]) -> None:
    config = CheckpointConfig.from_folder(checkpoint("qwen3-moe"))
    layers = adaptable_layers(build(lambda: new_model(config, 1), torch.float32, META))
    assert {name.split(".")[2] for layer in layers for name in layer.names} == {"self_attn"}


@pytest.mark.parametrize(
    ("name", "module"), [("mixtral", "mlp"), ("granite-moe", "block_sparse_moe"), ("qwen3-moe", "mlp")]
)
def test_transformers_names_of_stacks_are_those_of_the_model(
    checkpoint: Callable[[str], Path], name: str, module: str
) -> None:
    modules = adaptable_modules(CheckpointConfig.from_folder(checkpoint(name)))
    stack = modules.named(f"model.layers.0.{module}.experts")
    assert {f"{stack}.0.gate_proj", f"{stack}.1.up_proj", f"{stack}.0.down_proj"} <= set(modules.shapes)
