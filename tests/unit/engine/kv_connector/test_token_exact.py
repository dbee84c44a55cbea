"""With blocks that come from files, tokens are those without; in a new engine, under preemption, on several ranks."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quire_engine import LLM, SamplingParams
from quire_engine.core import engine_core
from quire_engine.models import CheckpointConfig
from quire_engine.models.base import AttentionSpec
from quire_engine.stats import KVConnectorStats
from quire_engine.worker.cache_sizing import block_bytes
from support.ranks import ThreadExecutor
from support.remote import store_server

PROMPTS = [random.Random(i).choices(range(60), k=20 + 7 * i) for i in range(6)]
PARAMS = [
    SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=12, ignore_eos=True) for i in range(len(PROMPTS))
]


def generate(
    folder: Path, store: Path | dict[str, Any] | None, **settings: Any
) -> tuple[list[list[int]], KVConnectorStats | None]:
    """In an engine of its own, which ends.

    Args:
        folder: of the checkpoint.
        store: where blocks are kept: in a folder, or as the setting says.
        settings: others.
    """
    if isinstance(store, Path):
        extra = {"shared_storage_path": str(store)}
        store = {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": extra}
    if store is not None:
        settings["kv_transfer_config"] = store
    with pytest.MonkeyPatch.context() as patch:
        if settings.get("tensor_parallel_size", 1) > 1:
            patch.setattr(engine_core, "make_executor", ThreadExecutor)
        llm = LLM(folder, dtype="float32", block_size=4, max_num_batched_tokens=32, max_model_len=96, **settings)
    try:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS, use_tqdm=False)
        llm._core._core.scheduler.check_integrity()
        return [list(output.outputs[0].token_ids) for output in outputs], llm._core._core.make_stats().kv_connector
    finally:
        llm._core._core.shutdown()


@pytest.fixture
def folder(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("tied-gqa")


def test_a_new_engine_loads_what_another_has_saved(folder: Path, tmp_path: Path) -> None:
    expected, _ = generate(folder, None)
    first, saved = generate(folder, tmp_path)
    second, loaded = generate(folder, tmp_path)
    assert first == second == expected
    assert saved is not None
    assert loaded is not None
    assert (saved.hits, saved.num_unsaved_blocks) == (0, 0)
    assert loaded.num_loaded_blocks >= sum((len(prompt) - 1) // 4 for prompt in PROMPTS)
    assert (loaded.num_failed_blocks, loaded.num_loading) == (0, 0)


def test_blocks_come_from_a_store_on_another_host_while_it_is_there(folder: Path, tmp_path: Path) -> None:
    expected, _ = generate(folder, None, tensor_parallel_size=2)
    with store_server(tmp_path) as (_, transfer):
        first, saved = generate(folder, transfer, tensor_parallel_size=2)
        second, loaded = generate(folder, transfer, tensor_parallel_size=2)
    third, alone = generate(folder, transfer, tensor_parallel_size=2)
    assert first == second == third == expected
    assert saved is not None
    assert loaded is not None
    assert alone is not None
    assert saved.num_unsaved_blocks == 0
    assert loaded.num_loaded_blocks >= sum((len(prompt) - 1) // 4 for prompt in PROMPTS)
    assert (alone.num_loaded_blocks, alone.num_saved_blocks) == (0, 0)


def test_each_rank_has_its_own_part(folder: Path, tmp_path: Path) -> None:
    expected, _ = generate(folder, None, tensor_parallel_size=2)
    generate(folder, tmp_path, tensor_parallel_size=2)
    for number, path in enumerate(sorted(tmp_path.glob("*/1/*/*"))):
        if number % 4 == 0:
            path.unlink()
    tokens, stats = generate(folder, tmp_path, tensor_parallel_size=2)
    assert tokens == expected
    assert stats is not None
    assert min(stats.num_loaded_blocks, stats.num_failed_blocks) > 0


def test_damaged_files_are_computed_again(folder: Path, tmp_path: Path) -> None:
    expected, _ = generate(folder, tmp_path)
    for number, path in enumerate(sorted(tmp_path.glob("*/0/*/*"))):
        if number % 3 == 0:
            content = bytearray(path.read_bytes())
            content[-1 - number] ^= 1
            path.write_bytes(content)
    tokens, stats = generate(folder, tmp_path)
    assert tokens == expected
    assert stats is not None
    assert stats.num_failed_blocks > 0


def test_a_small_cache_loads_what_it_has_lost(folder: Path, tmp_path: Path) -> None:
    expected, _ = generate(folder, None)
    config = CheckpointConfig.from_folder(folder)
    specs = [AttentionSpec(config.num_heads, config.num_kv_heads, config.head_size)] * config.num_layers
    generate(folder, tmp_path)
    tokens, stats = generate(folder, tmp_path, kv_cache_memory_bytes=26 * block_bytes(specs, 4, 4))
    assert tokens == expected
    assert stats is not None
    assert stats.num_loaded_blocks > 0
