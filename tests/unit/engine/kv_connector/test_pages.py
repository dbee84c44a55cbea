"""A block's bytes are the same whatever order the kernels keep it in."""

from typing import Any

import numpy as np
import pytest
import torch
from quire_engine.kv_cache import AttentionSpec, RecurrentSpec, StateSpec
from quire_engine.kv_connector.pages import Pages
from quire_kernels import PageConverter, kv_cache
from quire_kernels.kv_cache import new_kv_cache, quantize_rows, scale_bytes, write_kv_cache

SHAPES = [(3, 8, 32), (1, 8, 16), (2, 5, 24)]
"""KV heads, tokens of a block and head size: two that C++ kernels keep in tiles, and one that they do not."""
BLOCKS = [5, 0, 3]
SPECS: list[StateSpec] = [AttentionSpec(1, 1, 1), AttentionSpec(1, 1, 1), AttentionSpec(1, 1, 1, value_size=1)]
"""Only how many tensors each has is read."""


def make_caches(dtype: torch.dtype, shape: tuple[int, int, int], fill: bool) -> list[tuple[torch.Tensor, ...]]:
    """Three layers of seven blocks, of different shapes, with numbers written by the op that steps write with. The last
    keeps no values."""
    random = torch.Generator().manual_seed(1)
    caches: list[tuple[torch.Tensor, ...]] = []
    for heads, block_size, head_size in (shape, (shape[0] + 1, *shape[1:])):
        keys, values = (new_kv_cache(7, heads, block_size, head_size, dtype) for _ in range(2))
        if fill:
            tokens = torch.randn(2, 7 * block_size, heads, head_size, generator=random)
            write_kv_cache(tokens[0], tokens[1], torch.arange(7 * block_size), keys, values)
        caches.append((keys, values))
    alone = new_kv_cache(7, *shape, dtype)
    if fill:
        tokens = torch.randn(7 * shape[1], shape[0], shape[2], generator=random)
        write_kv_cache(tokens, None, torch.arange(7 * shape[1]), alone, None)
    return [*caches, (alone,)]


def pages(caches: list[tuple[torch.Tensor, ...]], specs: list[StateSpec] = SPECS, layers: Any = None) -> Pages:
    return Pages(lambda: caches, specs, layers)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_pages_come_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    caches, others = make_caches(dtype, shape, fill=True), make_caches(dtype, shape, fill=False)
    rows = pages(caches).read(BLOCKS)
    heads, block_size, head_size = shape
    row_bytes = (2 * heads + 2 * (heads + 1) + heads) * block_size * (head_size * dtype.itemsize + scale_bytes(dtype))
    assert rows.shape == (3, row_bytes)
    assert pages(caches).block_bytes == row_bytes
    pages(others).write([1, 6, 2], rows)
    for pair, other in zip(caches, others, strict=True):
        for cache, copy in zip(pair, other, strict=True):
            assert copy.view(torch.uint8)[[1, 6, 2]].equal(cache.view(torch.uint8)[BLOCKS])
            assert not copy.view(torch.uint8)[[0, 3, 4, 5]].any()


def test_states_are_copied_as_they_are() -> None:
    """Beside keys and values in tiles, and of a shape that tiles could have."""
    specs = [*SPECS, RecurrentSpec(((4, 8, 32), (5,)), ())]
    caches, others = make_caches(torch.float32, SHAPES[0], fill=True), make_caches(torch.float32, SHAPES[0], fill=False)
    caches.append((torch.randn(7, 3, 4, 8, 32)[:, 1], torch.randn(7, 3, 5)))
    others.append((torch.zeros(7, 4, 8, 32), torch.zeros(7, 3, 5)))
    own = pages(caches, specs)
    rows = own.read(BLOCKS)
    assert rows.shape == (3, own.block_bytes)
    pages(others, specs).write(BLOCKS, rows)
    for layer, other in zip(caches, others, strict=True):
        for cache, copy in zip(layer, other, strict=True):
            assert copy[BLOCKS].equal(cache[BLOCKS])
    states = rows[:, -4 * (4 * 8 * 32 + 3 * 5) : -4 * 3 * 5].contiguous().view(torch.float32)
    assert states.equal(caches[-1][0][BLOCKS].flatten(1))
    some = pages(caches, specs, [0, 3]).read(BLOCKS)
    parts = pages(caches, specs, [0]).read(BLOCKS), pages(caches, specs, [3]).read(BLOCKS)
    assert some.equal(torch.cat(parts, 1)), "some of the layers"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_the_layout_is_that_of_the_documentation_on_all_processors(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, block_size, head_size = SHAPES[0]
    rows = pages(make_caches(dtype, SHAPES[0], fill=True)).read([2]).numpy()
    with monkeypatch.context() as patch:
        patch.setattr(kv_cache, "is_tiled", lambda cache: False)
        assert np.array_equal(pages(make_caches(dtype, SHAPES[0], fill=True)).read([2]).numpy(), rows)
    tokens = torch.randn(2, 7 * block_size, heads, head_size, generator=torch.Generator().manual_seed(1))
    tokens = quantize_rows(tokens) if dtype is torch.int8 else tokens.to(dtype)
    keys, values = tokens[:, 2 * block_size : 3 * block_size].transpose(1, 2).contiguous().view(torch.uint8).numpy()
    half = keys.size
    assert rows[0, :half].tobytes() == keys.tobytes()
    assert rows[0, half : 2 * half].tobytes() == values.tobytes()


def test_a_converter_knows_its_caches_and_refuses_what_would_write_elsewhere() -> None:
    caches, others = (make_caches(torch.float32, SHAPES[0], fill=True) for _ in range(2))
    converter = PageConverter.of(caches)
    if converter is None:
        pytest.skip("there are no C++ kernels")
    assert converter.is_for(caches)
    assert not converter.is_for(others)
    assert not converter.is_for([])
    rows = torch.zeros(2, converter.block_bytes, dtype=torch.uint8)
    for block_ids in ([0, 7], [-1, 0]):
        with pytest.raises(ValueError, match="there are 7"):
            converter.convert(block_ids, rows, to_cache=True)
    for bad in (rows[:, :-1], rows[:1], rows.float(), rows.t().contiguous().t()):
        with pytest.raises(ValueError, match="they must be uint8"):
            converter.convert([0, 1], bad, to_cache=True)
    assert PageConverter.of(make_caches(torch.float8_e4m3fn, SHAPES[0], fill=False)) is None
    del caches
    assert not converter.is_for(others)
