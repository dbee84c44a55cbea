"""Sizing: blocks from bytes."""

from collections.abc import Callable
from pathlib import Path

import pytest
from quire_engine import LLM
from quire_engine.kv_cache import STATE, AttentionSpec, KVCacheGroups, RecurrentSpec, block_bytes
from quire_engine.worker.cache_allocator import CacheAllocator, num_blocks_for


def test_block_holds_a_key_and_a_value_per_layer_head_and_token() -> None:
    specs = [AttentionSpec(10, 5, 7), AttentionSpec(10, 5, 7), AttentionSpec(4, 1, 3)]
    assert block_bytes(specs, block_size=11, dtype_bytes=2) == 2 * (5 * 7 + 5 * 7 + 1 * 3) * 11 * 2


def test_a_block_of_states_holds_the_inputs_of_each_draft_too() -> None:
    specs = [RecurrentSpec(((5, 7), (2,)), ((3, 11), (0, 13)))]
    assert block_bytes(specs, 11, dtype_bytes=2, max_drafts=4) == (5 * 7 + 2 + 7 * 11 + 4 * 13) * 4


def test_there_is_a_state_for_each_so_many_blocks_and_for_the_requests() -> None:
    groups = KVCacheGroups((None, STATE), snapshot_blocks=10)
    assert [groups.num_states(number, 4) for number in (1, 9, 10, 79, 80, 1000)] == [3, 3, 5, 17, 19, 111]
    assert KVCacheGroups((STATE,), snapshot_blocks=10).num_states(7, 4) == 7
    assert KVCacheGroups((None,)).num_states(7, 4) == 0


def test_a_block_of_latent_attention_holds_one_row_per_layer_and_token() -> None:
    specs = [AttentionSpec(16, 1, 576, value_size=512)] * 3
    assert block_bytes(specs, block_size=16, dtype_bytes=2) == 3 * 576 * 16 * 2


def test_latent_attention_keeps_one_tensor_per_layer(checkpoint: Callable[[str], Path]) -> None:
    layers, row_size, num_blocks = 3, 24 + 8, 11
    per_block = layers * row_size * 16 * 4
    llm = LLM(
        checkpoint("deepseek-v2"), dtype="float32", max_model_len=512, kv_cache_memory_bytes=num_blocks * per_block
    )
    caches = llm._core.executor._worker.runner.kv_caches  # type: ignore[attr-defined]
    assert [[cache.shape for cache in layer] for layer in caches] == [[(num_blocks, 1, 16, row_size)]] * layers
    llm.shutdown()


def test_the_memory_of_a_step_is_measured_with_one_block_where_there_are_states_alone(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU it counts as memory of activations, and such a block may be as large as hundreds of others."""
    allocated: list[int] = []
    allocate = CacheAllocator.allocate
    monkeypatch.setattr(
        CacheAllocator, "allocate", lambda self, number: (allocated.append(number), allocate(self, number))[1]
    )
    for name in ("mamba2", "qwen3"):
        LLM(checkpoint(name), dtype="float32", max_model_len=64, max_num_seqs=4, kv_cache_memory_bytes=2**22).shutdown()
    for_mamba, _, _, for_qwen, *_ = allocated
    assert (for_mamba, for_qwen) == (1, 8)


def num_blocks(
    available_bytes: int,
    max_model_len: int = 1000,
    max_num_seqs: int = 100,
    windows: tuple[int | None, ...] = (None,),
) -> int:
    return num_blocks_for(
        available_bytes=available_bytes,
        cache_bytes=lambda number: 100 * number,
        block_size=16,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=100,
        groups=KVCacheGroups(windows, snapshot_blocks=5),
    )


def test_only_whole_blocks_count() -> None:
    assert [num_blocks(available) for available in (100, 199, 200)] == [1, 1, 2]


def test_no_more_blocks_than_could_ever_be_used() -> None:
    assert num_blocks(10**9, max_model_len=33, max_num_seqs=4) == 12


def test_enough_blocks_that_all_requests_have_states_however_short_they_are() -> None:
    groups = KVCacheGroups((None, STATE), snapshot_blocks=98)
    number = num_blocks_for(
        available_bytes=10**12, cache_bytes=lambda number: 100 * number, block_size=16, max_model_len=512,
        max_num_seqs=256, max_num_batched_tokens=100, groups=groups,
    )  # fmt: skip
    assert groups.num_states(number, 256) >= 2 * 256


def test_no_more_blocks_than_the_windows_and_a_step_see() -> None:
    window = -(-(32 + 100) // 16) + 1
    assert num_blocks(10**9, max_num_seqs=4, windows=(None, 33, 33)) == 4 * (63 + 2 * window)


def test_a_cache_of_states_alone_has_room_for_snapshots() -> None:
    assert num_blocks(10**9, max_num_seqs=4, windows=(STATE,)) == 4 * (3 + 1000 // (16 * 5))


@pytest.mark.parametrize("available", [99, 0, -1])
def test_too_little_memory_for_one_block_names_the_setting_and_the_sizes(available: int) -> None:
    with pytest.raises(ValueError, match=f"kv_cache_memory_bytes: .* 100 bytes and only {available} are available"):
        num_blocks(available)
