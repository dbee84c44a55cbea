"""Paged attention against dense attention, on odd shapes and every instruction set (see conftest.py)."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from quire_kernels import paged_attention
from quire_kernels.kv_cache import dequantize_rows, is_tiled, new_kv_cache, quantize_rows, write_kv_cache
from support.full import pairs

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.int8: 3e-4}
"""By the cache's dtype. With int8, queries are float32."""
ALL_DTYPES = (torch.float32, torch.bfloat16, torch.int8)
DTYPES = pytest.mark.parametrize("dtype", ALL_DTYPES, ids=["fp32", "bf16", "int8"])


def filled_cache(shape: tuple[int, int, int, int], dtype: torch.dtype, byte: int = 0xFF) -> torch.Tensor:
    """A cache of these bytes, which make NaN of numbers and of the scales of int8."""
    cache = new_kv_cache(*shape, dtype)
    cache.view(torch.uint8).fill_(byte)
    return cache


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As a cache has it."""
    return dequantize_rows(quantize_rows(x)) if dtype is torch.int8 else x.to(dtype)


def dense_attention(
    query_QHD: torch.Tensor,
    key_LKD: torch.Tensor,
    value_LKD: torch.Tensor,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    is_causal: bool = True,
) -> torch.Tensor:
    """Straight from the definition, in float64."""
    num_rows, num_heads, head_size = query_QHD.shape
    length, num_kv_heads, _ = key_LKD.shape
    key, value = (
        x.double().repeat_interleave(num_heads // num_kv_heads, 1).transpose(0, 1) for x in (key_LKD, value_LKD)
    )
    scores_HQL = query_QHD.double().transpose(0, 1) @ key.transpose(1, 2) * head_size**-0.5
    if soft_cap is not None:
        scores_HQL = soft_cap * (scores_HQL / soft_cap).tanh()
    keys = torch.arange(length)
    rows = keys[length - num_rows :, None]
    first = rows - (window or length) + 1
    if window is not None and window < 0:
        first = rows // -window * -window
    last = rows if is_causal else rows + (window or length) - 1
    scores_HQL = scores_HQL.masked_fill((keys < first) | (keys > last), float("-inf"))
    if sinks is not None:
        scores_HQL = torch.cat((scores_HQL, sinks.double()[:, None, None].expand(-1, num_rows, 1)), -1)
    return (scores_HQL.softmax(-1)[..., :length] @ value).transpose(0, 1)


@DTYPES
@pytest.mark.parametrize("block_size", [1, 16, 24])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_size"), [(4, 4, 16), (6, 2, 20), (8, 1, 64)])
def test_equals_dense_attention(
    num_heads: int, num_kv_heads: int, head_size: int, block_size: int, dtype: torch.dtype, cpu_kernels: str
) -> None:
    torch.manual_seed(0)
    query_dtype = torch.float32 if dtype is torch.int8 else dtype
    #        query rows of this step, of a sequence of this length: decodes, whole prompts, chunks, one-token prompts
    shapes = [(1, 1), (1, 37), (5, 5), (7, 40), (1, 16), (16, 48), (33, 33), (1, 49)]
    max_blocks = -(-max(length for _, length in shapes) // block_size)
    num_blocks = max_blocks * len(shapes) + 3
    ids = torch.randperm(num_blocks)
    table = torch.zeros(len(shapes), max_blocks, dtype=torch.int64)  # unused entries: some valid block
    shape = (num_blocks, num_kv_heads, block_size, head_size)
    key_cache, value_cache = (filled_cache(shape, dtype, 0x46) for _ in range(2))  # 1e4: would show at once
    queries, expected = [], []
    for s, (rows, length) in enumerate(shapes):
        query = torch.randn(rows, num_heads, head_size).to(query_dtype)
        key, value = rounded(torch.randn(2, length, num_kv_heads, head_size), dtype)
        used = ids[s * max_blocks : s * max_blocks + -(-length // block_size)]
        table[s, : len(used)] = used
        positions = torch.arange(length)
        slots = used[positions // block_size] * block_size + positions % block_size
        write_kv_cache(key, value, slots, key_cache, value_cache)
        queries.append(query)
        expected.append(dense_attention(query, key, value))
    lengths = torch.tensor([rows for rows, _ in shapes])
    out = paged_attention(
        torch.cat(queries),
        key_cache,
        value_cache,
        table,
        torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))),
        torch.tensor([length for _, length in shapes]),
        head_size**-0.5,
    )
    assert out.dtype == query_dtype
    torch.testing.assert_close(out.double(), torch.cat(expected), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("rows", [1, 3])
@DTYPES
def test_what_others_left_in_a_block_never_leaks(rows: int, dtype: torch.dtype, cpu_kernels: str) -> None:
    """Padding entries of the block table and the tail of the last block may hold NaN; weights of 0 do not undo that."""
    torch.manual_seed(0)
    block_size, length = 8, 11
    query_dtype = torch.float32 if dtype is torch.int8 else dtype
    key, value = rounded(torch.randn(2, length, 2, 16), dtype)
    query = torch.randn(rows, 4, 16).to(query_dtype)
    long_query = torch.randn(1, 4, 16).to(query_dtype)  # a neighbour with more blocks, so that the table is padded
    table = torch.tensor([[1, 2, 0, 0, 0], [3, 4, 5, 6, 7]])
    key_cache, value_cache = (filled_cache((8, 2, block_size, 16), dtype) for _ in range(2))
    if dtype is not torch.int8:
        value_cache.fill_(float("inf"))
    ones = torch.ones(5 * block_size, 2, 16)
    write_kv_cache(ones, ones, torch.arange(3 * block_size, 8 * block_size), key_cache, value_cache)
    positions = torch.arange(length)
    slots = table[0, positions // block_size] * block_size + positions % block_size
    write_kv_cache(key, value, slots, key_cache, value_cache)
    out = paged_attention(
        torch.cat((query, long_query)), key_cache, value_cache, table,
        torch.tensor([0, rows, rows + 1]), torch.tensor([length, 40]), 0.25,
    )  # fmt: skip
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out[:rows].double(), dense_attention(query, key, value), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(out[rows:], torch.ones(1, 4, 16, dtype=query_dtype), atol=tolerance, rtol=tolerance)


@DTYPES
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (1, None), (9, None), (65, None), (9, 2.0)])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size", "block_size"),
    [(4, 4, 16, 8), (6, 2, 20, 8), (3, 3, 32, 8), (3, 3, 32, 16), (4, 2, 96, 32)],
)
def test_rows_see_both_sides(
    num_heads: int, num_kv_heads: int, head_size: int, block_size: int, window: int | None, soft_cap: float | None,
    dtype: torch.dtype, cpu_kernels: str,
) -> None:  # fmt: skip
    """Whole sequences, of one token, of several tiles of rows and of several chunks; and the end of one."""
    torch.manual_seed(0)
    shapes = [(1, 1), (17, 17), (5, 30), (300, 300), (64, 64)]
    query_dtype = torch.float32 if dtype is torch.int8 else dtype
    table = torch.arange(5 * 38).view(5, 38)
    caches = [filled_cache((5 * 38, num_kv_heads, block_size, head_size), dtype) for _ in range(2)]
    queries, expected = [], []
    for s, (rows, length) in enumerate(shapes):
        query, positions = torch.randn(rows, num_heads, head_size).to(query_dtype), torch.arange(length)
        key, value = rounded(torch.randn(2, length, num_kv_heads, head_size), dtype)
        slots = table[s, positions // block_size] * block_size + positions % block_size
        write_kv_cache(key, value, slots, caches[0], caches[1])
        queries.append(query)
        expected.append(dense_attention(query, key, value, window, soft_cap, is_causal=False))
    lens = torch.tensor([rows for rows, _ in shapes])

    def attend(chosen: list[int]) -> torch.Tensor:
        starts = torch.cat((lens.new_zeros(1), lens[chosen].cumsum(0)))
        return paged_attention(
            torch.cat([queries[s] for s in chosen]), caches[0], caches[1], table[chosen], starts,
            torch.tensor([shapes[s][1] for s in chosen]), head_size**-0.5, window=window, is_causal=False,
            soft_cap=soft_cap,
        )  # fmt: skip

    together, tolerance = attend([0, 1, 2, 3, 4]), TOLERANCE[dtype]
    torch.testing.assert_close(together.double(), torch.cat(expected), atol=tolerance, rtol=tolerance)
    if cpu_kernels != "torch":
        alone = torch.cat([attend([s]) for s in range(5)])
        assert torch.equal(alone, together)


@DTYPES
@pytest.mark.parametrize(("soft_cap", "reach"), [(None, 16), (None, 144), (2.0, 37)])
def test_position_bias(soft_cap: float | None, reach: int, dtype: torch.dtype, cpu_kernels: str) -> None:
    """Of sequences that are shorter and longer than the table, the same alone and together; heads share keys."""
    torch.manual_seed(0)
    lengths, block_size = [1, 17, 200, 64], 8
    query_dtype = torch.float32 if dtype is torch.int8 else dtype
    inner = torch.randn(1, 4, 2 * (reach - 15) + 1)
    bias = torch.nn.functional.pad(inner, (15, 15), mode="replicate")[0]
    table = torch.arange(4 * 25).view(4, 25)
    caches = [filled_cache((4 * 25, 2, block_size, 16), dtype) for _ in range(2)]
    queries, expected = [], []
    for s, length in enumerate(lengths):
        query, positions = torch.randn(length, 4, 16).to(query_dtype), torch.arange(length)
        key, value = rounded(torch.randn(2, length, 2, 16), dtype)
        write_kv_cache(key, value, table[s, positions // block_size] * block_size + positions % block_size, *caches)
        queries.append(query)
        key, value = (x.double().repeat_interleave(2, 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query.double(), key) * 0.25
        scores = scores if soft_cap is None else soft_cap * (scores / soft_cap).tanh()
        scores += bias.double()[:, (positions - positions[:, None]).clamp(-reach, reach) + reach]
        expected.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value))

    def attend(chosen: list[int]) -> torch.Tensor:
        lens = torch.tensor([lengths[s] for s in chosen])
        return paged_attention(
            torch.cat([queries[s] for s in chosen]), *caches, table[chosen],
            torch.cat((lens.new_zeros(1), lens.cumsum(0))), lens, 0.25, is_causal=False, soft_cap=soft_cap,
            position_bias_HR=bias,
        )  # fmt: skip

    together, tolerance = attend([0, 1, 2, 3]), {**TOLERANCE, torch.float32: 1e-5}[dtype]
    torch.testing.assert_close(together.double(), torch.cat(expected), atol=tolerance, rtol=tolerance)
    if cpu_kernels != "torch":
        assert torch.equal(torch.cat([attend([s]) for s in range(4)]), together)


@pytest.mark.parametrize(
    ("window", "soft_cap", "has_sinks", "dtype"),
    pairs(product([None, 1, 9, -9], [None, 2.0], [False, True], ALL_DTYPES)),
)
def test_window_soft_cap_and_sinks(
    window: int | None, soft_cap: float | None, has_sinks: bool, dtype: torch.dtype, cpu_kernels: str
) -> None:
    torch.manual_seed(0)
    shapes, block_size = [(1, 30), (1, 1), (6, 25), (9, 9)], 8
    caches = [filled_cache((17, 2, block_size, 16), dtype) for _ in range(2)]
    query_dtype = torch.float32 if dtype is torch.int8 else dtype
    sinks = torch.tensor([-3.0, 0.5, 4.0, 200.0]) if has_sinks else None  # the last head attends to nothing
    queries, expected, table = [], [], torch.arange(16).view(4, 4)
    for s, (rows, length) in enumerate(shapes):
        query, positions = (torch.randn(rows, 4, 16) * 2).to(query_dtype), torch.arange(length)
        key, value = rounded(torch.randn(2, length, 2, 16), dtype)
        slots = table[s, positions // block_size] * block_size + positions % block_size
        write_kv_cache(key, value, slots, caches[0], caches[1])
        if window is not None:  # blocks that no row can see any more may be another sequence's
            first = length - rows
            unseen = first // -window * -window if window < 0 else max(0, first - window + 1)
            table[s, : unseen // block_size] = 16
        queries.append(query)
        expected.append(dense_attention(query, key, value, window, soft_cap, sinks))
    lens = torch.tensor([rows for rows, _ in shapes])
    out = paged_attention(
        torch.cat(queries), caches[0], caches[1], table, torch.cat((lens.new_zeros(1), lens.cumsum(0))),
        torch.tensor([length for _, length in shapes]), 0.25, window=window, soft_cap=soft_cap,
        sinks_H=sinks,
    )  # fmt: skip
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.int8: 3e-4}[dtype]
    torch.testing.assert_close(out.double(), torch.cat(expected), atol=tolerance, rtol=tolerance)


def test_a_soft_cap_of_small_and_of_huge_scores(cpu_kernels: str) -> None:
    """Keys of one feature are their own scores, and values of one each show the weights, to the last digits."""
    scores = torch.tensor([0.0, 1e-6, -1e-3, 0.3, -0.6, 0.7, 5.0, -40.0, 1e4, 0.01])
    key = torch.zeros(10, 1, 16)
    key[:, 0, 0] = scores
    value = torch.eye(16)[:10].unsqueeze(1)
    query = torch.zeros(1, 1, 16)
    query[..., 0] = 1.0
    caches = torch.zeros(2, 1, 1, 16, 16)
    write_kv_cache(key, value, torch.arange(10), caches[0], caches[1])
    out = paged_attention(
        query, caches[0], caches[1], torch.zeros(1, 1, dtype=torch.int64), torch.tensor([0, 1]), torch.tensor([10]),
        1.0, soft_cap=1.5,
    )  # fmt: skip
    expected = (1.5 * (scores.double() / 1.5).tanh()).softmax(0)
    torch.testing.assert_close(out[0, 0, :10].double(), expected, atol=0, rtol=1e-6)


@pytest.mark.parametrize(
    ("heads", "block_size", "has_options", "dtype"),
    pairs(
        product(
            [(5, 1, 80, 64), (3, 1, 48, 34), (16, 1, 576, 512), (4, 2, 32, 32), (4, 2, 20, 7), (2, 1, 16, 1)],
            [1, 8, 24, 64],
            [False, True],
            ALL_DTYPES,
        )
    ),
)
def test_values_that_are_a_part_of_the_keys(
    heads: tuple[int, int, int, int], block_size: int, has_options: bool, dtype: torch.dtype, cpu_kernels: str,
    once: Callable[..., Any],
) -> None:  # fmt: skip
    """As with a cache of values that has the same numbers, bit for bit in C++; what is in neither is NaN."""
    torch.manual_seed(0)
    num_heads, num_kv_heads, head_size, value_size = heads
    options: dict[str, Any] = {"window": 9, "soft_cap": 2.0, "sinks_H": 1.5} if has_options else {}
    shapes = [(1, 30), (1, 1), (6, 25), (9, 9), (1, 601), (20, 300)]
    max_blocks = -(-max(length for _, length in shapes) // block_size)
    table = torch.randperm(max_blocks * len(shapes)).view(len(shapes), -1)
    shape = (table.numel() + 1, num_kv_heads, block_size, head_size)
    keys, values, only_keys = (filled_cache(shape, dtype) for _ in range(3))
    query_dtype = torch.float32 if dtype is torch.int8 else dtype
    sinks = torch.full((num_heads,), options["sinks_H"]) if options else None
    queries, expected = [], []
    for s, (rows, length) in enumerate(shapes):
        query, positions = torch.randn(rows, num_heads, head_size).to(query_dtype), torch.arange(length)
        key = rounded(torch.randn(length, num_kv_heads, head_size), dtype)
        slots = table[s, positions // block_size] * block_size + positions % block_size
        write_kv_cache(key, key, slots, keys, values)
        write_kv_cache(key, None, slots, only_keys, None)
        queries.append(query)
        window, soft_cap = (options["window"], options["soft_cap"]) if options else (None, None)
        values_of_keys = key[..., -value_size:]
        expected.append(
            once(s, lambda given=(query, key, values_of_keys, window, soft_cap, sinks): dense_attention(*given))
        )
    assert torch.equal(only_keys.view(torch.uint8), keys.view(torch.uint8))
    lens = torch.tensor([rows for rows, _ in shapes])
    arguments = (
        table, torch.cat((lens.new_zeros(1), lens.cumsum(0))), torch.tensor([length for _, length in shapes]),
        head_size**-0.5,
    )  # fmt: skip
    kinds = options | {"sinks_H": sinks}
    out = paged_attention(torch.cat(queries), only_keys, None, *arguments, value_size=value_size, **kinds)
    assert out.shape == (len(torch.cat(queries)), num_heads, value_size)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.int8: 3e-4}[dtype]
    torch.testing.assert_close(out.double(), torch.cat(expected), atol=tolerance, rtol=tolerance)
    if cpu_kernels != "torch" and is_tiled(keys):
        both = paged_attention(torch.cat(queries), keys, values, *arguments, **kinds)
        assert torch.equal(out, both[..., -value_size:])
