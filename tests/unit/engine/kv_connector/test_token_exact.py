"""With blocks that come from files, tokens are those without; in a new engine, under preemption, on several ranks."""

import itertools
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from quire_engine import SamplingParams
from quire_engine.ipc.semaphore import SharedMemory
from quire_engine.kv_cache import AttentionSpec, block_bytes
from quire_engine.kv_connector import kv_memory
from quire_engine.models import CheckpointConfig
from quire_engine.stats import KVConnectorStats
from quire_kernels.cpu import library
from support.every_kind import core_of
from support.full import FULL
from support.ranks import llm_of_thread_ranks
from support.remote import store_server

PROMPTS = [random.Random(i).choices(range(60), k=20 + 7 * i) for i in range(6)]
PARAMS = [
    SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=12, ignore_eos=True) for i in range(len(PROMPTS))
]


def generate(
    folder: Path, store: Path | dict[str, Any] | None, memory: int | None = None, **settings: Any
) -> tuple[list[list[int]], KVConnectorStats | None]:
    """In an engine of its own, which ends.

    Args:
        folder: of the checkpoint.
        store: where blocks are kept: in a folder, or as the setting says.
        memory: that outlives the engine, in the place of memory of its own.
        settings: others.
    """
    if isinstance(store, Path):
        extra = {"shared_storage_path": str(store)}
        store = {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": extra}
    if store is not None:
        settings["kv_transfer_config"] = store
    settings = {"dtype": "float32", "block_size": 4, "max_num_batched_tokens": 32, "max_model_len": 96, **settings}
    with pytest.MonkeyPatch.context() as patch:
        if memory is not None:
            patch.setattr(kv_memory, "_allocate", lambda max_bytes: os.dup(memory))
        with llm_of_thread_ranks(folder, **settings) as llm:
            core = core_of(llm)
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS, use_tqdm=False)
            core.scheduler.check_integrity()
            return [list(output.outputs[0].token_ids) for output in outputs], core.make_stats().kv_connector


@pytest.fixture
def folder(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("tied-gqa")


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("name", ["tied-gqa", "deepseek-v2"])  # keys and values; one row per token
def test_a_new_engine_loads_what_another_has_saved(
    name: str, kv_cache_dtype: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = checkpoint(name)
    expected, _ = generate(folder, None, kv_cache_dtype=kv_cache_dtype)
    first, saved = generate(folder, tmp_path, kv_cache_dtype=kv_cache_dtype)
    second, loaded = generate(folder, tmp_path, kv_cache_dtype=kv_cache_dtype)
    assert first == second == expected
    assert saved is not None
    assert loaded is not None
    assert (saved.hits, saved.num_unsaved_blocks) == (0, 0)
    assert loaded.num_loaded_blocks >= sum((len(prompt) - 1) // 4 for prompt in PROMPTS)
    assert (loaded.num_failed_blocks, loaded.num_loading) == (0, 0)


STATES = ("bamba", "jamba", "kimi-linear", "lfm2", "qwen3-5", "recurrent-gemma")
"""One family with each kind of state."""
OTHERS = (
    "falcon-h1", "falcon-mamba", "granite-hybrid", "lfm2-moe", "lfm3", "mamba", "mamba2", "nemotron-h", "olmo-hybrid",
    "qwen3-5-moe", "qwen3-next", "zamba2",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind"), [*itertools.product((*STATES, *OTHERS) if FULL else STATES, ("files", "memory"))]
)
def test_states_of_recurrent_layers_come_with_the_blocks(
    name: str, kind: str, checkpoint: Callable[[str], Path], tmp_path: Path, memory: int
) -> None:
    folder, store = checkpoint(name), tmp_path if kind == "files" else MEMORY
    own = memory if kind == "memory" else None
    expected, _ = generate(folder, None, enable_prefix_caching=False)
    first, saved = generate(folder, store, own)
    second, loaded = generate(folder, store, own)
    assert first == second == expected
    assert saved is not None
    assert loaded is not None
    assert (saved.hits, saved.num_unsaved_blocks) == (0, 0)
    assert loaded.hits >= sum((len(prompt) - 1) // 4 * 4 for prompt in PROMPTS), "a prompt's last state was not found"
    assert (loaded.num_failed_blocks, loaded.num_loading) == (0, 0)


def test_blocks_of_another_dtype_are_not_found(folder: Path, tmp_path: Path) -> None:
    generate(folder, tmp_path)
    expected, _ = generate(folder, None, kv_cache_dtype="int8")
    first, saved = generate(folder, tmp_path, kv_cache_dtype="int8")
    assert first == expected
    assert saved is not None
    assert (saved.hits, saved.num_loaded_blocks) == (0, 0)
    block_bytes = [path.stat().st_size for path in tmp_path.glob("*/0/*/*") if path.is_file()]
    assert len(set(block_bytes)) == 2, "of float32, and of int8 with scales"


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


MEMORY: dict[str, Any] = {"kv_connector": "SharedMemoryConnector"}


@pytest.fixture
def memory() -> Iterator[int]:
    """What a frontend has, whose engines come and go."""
    descriptor = SharedMemory.create("test-blocks", 16 << 20)
    yield descriptor
    os.close(descriptor)


needs_kernels = pytest.mark.skipif(library() is None, reason="memory needs the C++ kernels")


@needs_kernels
@pytest.mark.parametrize(("size", "kv_cache_dtype"), [(1, "auto"), (2, "auto"), (2, "int8")])
def test_the_next_engine_finds_what_was_in_memory(folder: Path, memory: int, size: int, kv_cache_dtype: str) -> None:
    settings = {"tensor_parallel_size": size, "kv_cache_dtype": kv_cache_dtype}
    expected, _ = generate(folder, None, **settings)
    first, saved = generate(folder, MEMORY, memory, **settings)
    second, loaded = generate(folder, MEMORY, memory, **settings)
    assert first == second == expected
    assert saved is not None
    assert loaded is not None
    assert (saved.hits, saved.num_unsaved_blocks) == (0, 0)
    assert loaded.num_loaded_blocks >= sum((len(prompt) - 1) // 4 for prompt in PROMPTS)
    assert (loaded.num_failed_blocks, loaded.num_loading) == (0, 0)


@needs_kernels
def test_blocks_in_memory_of_which_some_are_damaged_are_computed_again(folder: Path, memory: int) -> None:
    expected, _ = generate(folder, MEMORY, memory)
    with open(os.dup(memory), "r+b") as segment:
        for place in range(300_000, 4 << 20, 40_000):
            segment.seek(place)
            content = segment.read(8)
            segment.seek(place)
            segment.write(bytes(one ^ 5 for one in content))
    tokens, stats = generate(folder, MEMORY, memory)
    assert tokens == expected
    assert stats is not None
    assert stats.num_failed_blocks > 0


@needs_kernels
def test_memory_that_holds_little_is_used_as_far_as_it_goes(folder: Path) -> None:
    expected, _ = generate(folder, None)
    transfer = {**MEMORY, "kv_connector_extra_config": {"max_bytes": 1 << 20}}
    config = CheckpointConfig.from_folder(folder)
    specs = [AttentionSpec(config.num_heads, config.num_kv_heads, config.head_size)] * config.num_layers
    for _ in range(2):
        tokens, stats = generate(folder, transfer, kv_cache_memory_bytes=26 * block_bytes(specs, 4, 4))
        assert tokens == expected
    assert stats is not None
    assert stats.num_unsaved_blocks == 0


@needs_kernels
@pytest.mark.parametrize("size", [1, 2])
def test_blocks_come_from_memory_or_from_files(folder: Path, tmp_path: Path, size: int) -> None:
    files = {
        "kv_connector": "SharedStorageConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    both = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [MEMORY, files]}}
    expected, _ = generate(folder, None, tensor_parallel_size=size)
    first, saved = generate(folder, both, tensor_parallel_size=size)
    for number, path in enumerate(sorted(tmp_path.glob("*/0/*/*"))):
        if number % 5 == 0:
            path.unlink()
    descriptor = SharedMemory.create("test-blocks", 16 << 20)
    try:
        second, loaded = generate(folder, both, descriptor, tensor_parallel_size=size)
        third, again = generate(folder, both, descriptor, tensor_parallel_size=size)
    finally:
        os.close(descriptor)
    assert first == second == third == expected
    assert saved is not None
    assert loaded is not None
    assert again is not None
    num_blocks = sum((len(prompt) - 1) // 4 for prompt in PROMPTS)
    assert saved.tiers["memory"][0] >= saved.tiers["files"][0] >= saved.num_saved_blocks > 0
    assert loaded.tiers["files"][1] > 0
    assert loaded.tiers["memory"][1] == 0, "it is empty at first"
    assert again.num_failed_blocks == 0
    assert again.tiers["memory"][1] >= num_blocks
    assert again.tiers["files"][1] == 0
