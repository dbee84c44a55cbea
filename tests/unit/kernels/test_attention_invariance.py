"""Paged attention on the shapes of real models, and what its result must not depend on: everything but the sequence.

"The same" is to the last bit here. Plain torch promises no such thing and is left out of those tests.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from quire_kernels import cpu, paged_attention, plan_attention
from quire_kernels.attention_plan import CpuAttentionPlan
from quire_kernels.kv_cache import dequantize_rows, new_kv_cache, quantize_rows, write_kv_cache
from support.full import pairs

Once = Callable[..., Any]

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.int8: 2e-4}
"""By the cache's dtype. With int8, queries are float32."""
ALL_DTYPES = (torch.float32, torch.bfloat16, torch.int8)
DTYPES = pytest.mark.parametrize("dtype", ALL_DTYPES, ids=["fp32", "bf16", "int8"])

NAN_BYTE = 0xFF
"""Numbers of these bytes are NaN, as are the scales of int8."""


@dataclass
class Sequences:
    """Queries, keys and values of whole sequences, and a cache that holds all of them."""

    query: list[torch.Tensor]
    key: list[torch.Tensor]
    value: list[torch.Tensor]
    key_cache: torch.Tensor
    value_cache: torch.Tensor | None
    """None: values are the last features of keys."""
    table: torch.Tensor

    def attend(self, chunks: list[tuple[int, int, int]], **options: Any) -> list[torch.Tensor]:
        """One step that computes, of sequence s, query tokens start … end, for each (s, start, end)."""
        table = self.table[[s for s, _, _ in chunks]]
        starts = torch.tensor([0, *(end - start for _, start, end in chunks)]).cumsum(0)
        out = paged_attention(
            torch.cat([self.query[s][start:end] for s, start, end in chunks]),
            self.key_cache,
            self.value_cache,
            table,
            starts,
            torch.tensor([end for _, _, end in chunks]),
            self.query[0].shape[-1] ** -0.5,
            **options,
        )
        return list(out.tensor_split(starts[1:-1]))

    def dense(self, s: int, window: int | None = None) -> torch.Tensor:
        """All rows of a sequence, from the definition, in float64."""
        length, num_heads, head_size = self.query[s].shape
        group = num_heads // self.key[s].shape[1]
        query = self.query[s].double().transpose(0, 1)
        key, value = (x[s].double().repeat_interleave(group, 1).transpose(0, 1) for x in (self.key, self.value))
        scores = query @ key.transpose(1, 2) * head_size**-0.5
        every = torch.ones(length, length, dtype=torch.bool)
        hidden = every.triu(1) | every.tril(-(window or length))
        if window is not None and window < 0:
            chunks = torch.arange(length) // -window
            hidden = every.triu(1) | (chunks[:, None] != chunks)
        scores.masked_fill_(hidden, float("-inf"))
        return (scores.softmax(-1) @ value).transpose(0, 1)


def make_sequences(
    lengths: list[int], num_heads: int, num_kv_heads: int, head_size: int, block_size: int, dtype: torch.dtype
) -> Sequences:
    generator = torch.Generator().manual_seed(sum(lengths) * head_size + num_heads)

    def random(length: int, heads: int) -> torch.Tensor:
        numbers = torch.randn(length, heads, head_size, generator=generator)
        return numbers if dtype is torch.int8 else numbers.to(dtype)

    blocks_each = -(-max(lengths) // block_size)
    ids = torch.randperm(blocks_each * len(lengths), generator=generator).view(len(lengths), blocks_each)
    key_cache, value_cache = (new_kv_cache(ids.numel(), num_kv_heads, block_size, head_size, dtype) for _ in range(2))
    key_cache.view(torch.uint8).fill_(NAN_BYTE)
    value_cache.view(torch.uint8).fill_(NAN_BYTE)
    query, key, value = ([random(length, heads) for length in lengths] for heads in (num_heads, *[num_kv_heads] * 2))
    for s, length in enumerate(lengths):
        positions = torch.arange(length)
        slots = ids[s, positions // block_size] * block_size + positions % block_size
        write_kv_cache(key[s], value[s], slots, key_cache, value_cache)
        if dtype is torch.int8:
            key[s], value[s] = (dequantize_rows(quantize_rows(x)) for x in (key[s], value[s]))
    return Sequences(query, key, value, key_cache, value_cache, ids)


SHAPES = [
    (2, 2, 64), (4, 2, 80), (9, 3, 96), (8, 2, 128), (5, 1, 64), (12, 2, 256), (7, 1, 80), (16, 2, 128), (17, 1, 64),
]  # fmt: skip
"""Heads, KV heads, head size."""


@pytest.mark.parametrize(("heads", "block_size", "dtype"), pairs(itertools.product(SHAPES, [16, 32, 128], ALL_DTYPES)))
def test_equals_dense_attention_on_the_shapes_of_models(
    heads: tuple[int, int, int], block_size: int, dtype: torch.dtype, cpu_kernels: str, once: Once
) -> None:
    lengths = [1, 17, 64, 129, 200, 203, 47]
    chunks = [(0, 0, 1), (1, 16, 17), (2, 0, 64), (3, 64, 129), (4, 199, 200), (5, 100, 203), (6, 45, 47)]
    sequences = make_sequences(lengths, *heads, block_size, dtype)
    for (s, start, end), out in zip(chunks, sequences.attend(chunks), strict=True):
        expected = once(s, lambda s=s: sequences.dense(s))[start:end]
        torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize("block_size", [16, 24, 128])
def test_the_same_however_a_prompt_is_cut(block_size: int, dtype: torch.dtype, cpu_kernels: str, once: Once) -> None:
    if cpu_kernels == "torch":
        pytest.skip("plain torch promises no such thing")
    length = 1100  # several segments, the last one short
    sequences = make_sequences([length], 6, 2, 32, block_size, dtype)
    (whole,) = sequences.attend([(0, 0, length)])
    expected = once("dense", lambda: sequences.dense(0))
    torch.testing.assert_close(whole.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    cuts = [0, 1, 2, 65, 511, 513, 640, 1023, 1025, length]
    pieces = [sequences.attend([(0, start, end)])[0] for start, end in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat(pieces), whole)
    ends = [*range(1, length, 37), 511, 512, 513, 1023, 1024, 1025, length]
    for end in ends:
        assert torch.equal(sequences.attend([(0, end - 1, end)])[0], whole[end - 1 : end]), end


@DTYPES
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_same_in_any_batch_with_any_number_of_threads(threads: int, dtype: torch.dtype, cpu_kernels: str) -> None:
    if cpu_kernels == "torch":
        pytest.skip("plain torch promises no such thing")
    lengths = [1500, 3, 700, 90, 33, 2000]
    chunks = [(0, 1499, 1500), (1, 0, 3), (2, 650, 700), (3, 0, 90), (4, 32, 33), (5, 1990, 2000)]
    sequences = make_sequences(lengths, 4, 1, 64, 16, dtype)
    before = cpu.get_num_threads()
    cpu.set_num_threads(1)
    alone = [sequences.attend([chunk])[0] for chunk in chunks]
    cpu.set_num_threads(threads)
    try:
        plan = plan_attention(
            torch.zeros(1, 100, dtype=torch.int64), torch.tensor([0, 1]), torch.tensor([1500]), 4, sequences.key_cache
        )
        assert plan is not None
        assert (len(plan.partials) > 0) == (threads > 1), "long sequences are to be split among threads"
        some = sequences.attend(chunks[:1])
        together = sequences.attend(chunks)
    finally:
        cpu.set_num_threads(before)
    assert torch.equal(some[0], alone[0])
    for chunk, expected, out in zip(chunks, alone, together, strict=True):
        assert torch.equal(out, expected), chunk


@pytest.mark.parametrize(
    ("window", "block_size", "dtype"),
    pairs(itertools.product([1, 50, 300, 513, 1090, -300, -513], [16, 24, 128], ALL_DTYPES)),
)
def test_a_window_is_the_same_however_a_prompt_is_cut(
    window: int, block_size: int, dtype: torch.dtype, cpu_kernels: str, once: Once
) -> None:
    """Whole blocks behind the window belong to others already: theirs is NaN here."""
    if cpu_kernels == "torch":
        pytest.skip("plain torch promises no such thing")
    length = 1100
    sequences = make_sequences([length], 6, 2, 32, block_size, dtype)
    (whole,) = sequences.attend([(0, 0, length)], window=window)
    expected = once("dense", lambda: sequences.dense(0, window))
    torch.testing.assert_close(whole.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    cuts = [0, 1, 2, 65, 511, 513, 640, 1023, 1025, length]
    ends = [*range(1, length, 97), 511, 512, 513, 1023, 1024, 1025, length]
    for start, end in sorted([*itertools.pairwise(cuts), *((end - 1, end) for end in ends)]):
        unseen = (start // -window * -window if window < 0 else max(0, start + 1 - window)) // block_size
        for cache in (sequences.key_cache, sequences.value_cache):
            assert cache is not None
            cache.view(torch.uint8)[sequences.table[0, :unseen]] = NAN_BYTE
        assert torch.equal(sequences.attend([(0, start, end)], window=window)[0], whole[start:end]), (start, end)


@DTYPES
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_windows_soft_caps_and_sinks_in_any_batch_with_any_number_of_threads(
    threads: int, dtype: torch.dtype, cpu_kernels: str
) -> None:
    if cpu_kernels == "torch":
        pytest.skip("plain torch promises no such thing")
    chunks = [(0, 1499, 1500), (1, 0, 3), (2, 650, 700), (3, 0, 90), (4, 32, 33), (5, 1990, 2000)]
    sequences = make_sequences([1500, 3, 700, 90, 33, 2000], 4, 1, 64, 16, dtype)
    options = {"window": 1200, "soft_cap": 3.0, "sinks_H": torch.tensor([0.0, -1.0, 2.0, 1.0])}
    before = cpu.get_num_threads()
    cpu.set_num_threads(1)
    alone = [sequences.attend([chunk], **options)[0] for chunk in chunks]
    cpu.set_num_threads(threads)
    try:
        plan = plan_attention(
            sequences.table[:1], torch.tensor([0, 1]), torch.tensor([1500]), 4, sequences.key_cache, 1200
        )
        assert isinstance(plan, CpuAttentionPlan)
        assert (len(plan.partials) > 0) == (threads > 1), "long windows are to be split among threads"
        some = sequences.attend(chunks[:1], **options)
        together = sequences.attend(chunks, **options)
    finally:
        cpu.set_num_threads(before)
    assert torch.equal(some[0], alone[0])
    for chunk, expected, out in zip(chunks, alone, together, strict=True):
        assert torch.equal(out, expected), chunk


@DTYPES
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("block_size", [16, 24])
def test_values_in_the_keys_in_any_batch_however_a_prompt_is_cut(
    block_size: int, threads: int, dtype: torch.dtype, cpu_kernels: str, once: Once
) -> None:
    if cpu_kernels == "torch":
        pytest.skip("plain torch promises no such thing")
    sequences = make_sequences([1100, 3, 700, 33], 6, 1, 80, block_size, dtype)
    sequences.value = [key[..., -48:] for key in sequences.key]
    sequences.value_cache = None
    before = cpu.get_num_threads()
    cpu.set_num_threads(1)
    whole = sequences.attend([(s, 0, len(query)) for s, query in enumerate(sequences.query)], value_size=48)
    cpu.set_num_threads(threads)
    try:
        for s, out in enumerate(whole):
            expected = once(s, lambda s=s: sequences.dense(s))
            torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        for chunks in (
            [(0, 1099, 1100)], [(3, 0, 33), (0, 511, 513), (2, 699, 700)], [(0, 0, 65), (1, 1, 3)], [(0, 65, 1100)],
        ):  # fmt: skip
            for (s, start, end), out in zip(chunks, sequences.attend(chunks, value_size=48), strict=True):
                assert torch.equal(out, whole[s][start:end]), (s, start, end)
    finally:
        cpu.set_num_threads(before)
