"""Recorded kernels do what the ops did, for up to as many rows, and nothing is left out silently."""

from collections.abc import Iterator

import pytest
import torch
from quire_kernels import (
    NotRecordableError,
    add_residual,
    add_rms_norm,
    argmax,
    cpu,
    embedding,
    head_linear,
    linear,
    pack_head_linear,
    pack_linear,
    paged_attention,
    record,
    rope_and_cache,
    standing_plan,
    store_rows,
)
from quire_kernels.attention_plan import CpuAttentionPlan
from quire_kernels.kv_cache import new_kv_cache
from quire_kernels.linear import LinearWeight
from support.processes import ended, start_python

ROWS, SIZE = 8, 64


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    if cpu.library() is None:
        pytest.skip(cpu.status().reason)
    with torch.inference_mode():
        yield


class Block:
    """Some ops in a row, over a residual stream."""

    def __init__(self, dtype: torch.dtype, bits: int | None) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = [(2 * SIZE, SIZE, True), (SIZE, SIZE, False)]
        self.weights: list[LinearWeight] = [
            pack_linear(
                torch.randn(n, k, generator=generator).to(dtype),
                quantize=bits is not None,
                activation_bits=bits or 8,
                gated=gated,
                activation=name,
            )
            for (n, k, gated), name in zip(shapes, ("gelu_tanh", "silu"), strict=True)
        ]
        self.norm = torch.rand(SIZE, generator=generator).to(dtype)

    def __call__(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            hidden = linear(add_rms_norm(hidden, residual, self.norm, 1e-5, multiplier=0.22), weight)
        add_residual(hidden, residual, multiplier=0.22)
        return hidden


@pytest.mark.parametrize(
    ("dtype", "bits"), [(torch.bfloat16, None), (torch.float32, None), (torch.bfloat16, 8), (torch.bfloat16, 16)]
)
def test_a_recording_computes_what_the_ops_do(dtype: torch.dtype, bits: int | None) -> None:
    block = Block(dtype, bits)
    hidden, residual = torch.empty(ROWS, SIZE, dtype=dtype), torch.empty(ROWS, SIZE, dtype=dtype)
    with record(ROWS) as recording:
        out = block(hidden, residual)
    for rows in (1, ROWS, 3, 3, 1):
        given, expected_residual = torch.randn(rows, SIZE).to(dtype), torch.randn(rows, SIZE).to(dtype)
        hidden[:rows], residual[:rows] = given, expected_residual
        expected = block(given, expected_residual)
        recording.run(rows)
        assert torch.equal(out[:rows], expected)
        assert torch.equal(residual[:rows], expected_residual)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_later_results_overwrite_those_that_nothing_refers_to(dtype: torch.dtype) -> None:
    block = Block(dtype, None)
    hidden, residual = torch.empty(ROWS, SIZE, dtype=dtype), torch.empty(ROWS, SIZE, dtype=dtype)

    def results(hidden: torch.Tensor, residual: torch.Tensor, number: int, keeps: int) -> list[torch.Tensor]:
        kept: list[torch.Tensor] = []
        for _ in range(number):
            hidden = block(hidden, residual)
            kept = [*kept, hidden.view(-1, 2)][-keeps:]
        return kept

    sizes = []
    for number, keeps in ((2, 1), (6, 1), (6, 6)):
        with record(ROWS) as recording:
            out = results(hidden, residual, number, keeps)
        hidden[:], residual[:] = torch.randn(ROWS, SIZE).to(dtype), torch.randn(ROWS, SIZE).to(dtype)
        expected = results(hidden, residual.clone(), number, keeps)
        recording.run(ROWS)
        assert all(map(torch.equal, out, expected))
        sizes.append(recording.num_bytes)
    assert sizes[0] == sizes[1] < sizes[2]


def test_nothing_runs_while_it_is_recorded() -> None:
    block = Block(torch.float32, None)
    hidden, residual = torch.zeros(ROWS, SIZE), torch.ones(ROWS, SIZE)
    with record(ROWS):
        block(hidden, residual)
    assert torch.equal(residual, torch.ones(ROWS, SIZE))


def test_what_torch_computes_is_not_left_out_silently() -> None:
    x = torch.ones(ROWS, SIZE)
    with pytest.raises(NotRecordableError, match=r"aten\.add.* cannot be recorded"), record(ROWS):
        x + x
    with pytest.raises(NotRecordableError, match="cannot be recorded"), record(ROWS):
        add_rms_norm(x.T, torch.ones(SIZE, ROWS), torch.ones(ROWS), 1e-5)  # a copy without gaps
    assert torch.equal(x + x, torch.full((ROWS, SIZE), 2.0)), "a recording that failed is over"


def test_all_calls_have_the_rows_of_the_recording() -> None:
    weight, x = pack_linear(torch.ones(32, SIZE)), torch.ones(3, SIZE)
    with pytest.raises(NotRecordableError, match=f"LinearCall of 3 rows in a recording of {ROWS}"), record(ROWS):
        linear(x, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_normed_heads_are_recorded_as_one_kernel(dtype: torch.dtype) -> None:
    heads = torch.empty(ROWS, 8, 32, dtype=dtype)  # of queries, keys and values
    norms, caches = torch.rand(2, 32).to(dtype), torch.zeros(2, 2, 2, 16, 32, dtype=dtype)
    positions, slots = torch.zeros(ROWS, dtype=torch.int64), torch.zeros(ROWS, dtype=torch.int64)
    cos_sin = torch.rand(99, 32)

    def rope(rows: int, caches: torch.Tensor) -> torch.Tensor:
        query, key, value = (part[:rows] for part in heads.split([4, 2, 2], 1))
        return rope_and_cache(
            query, key, value, positions[:rows], cos_sin, slots[:rows], caches[0], caches[1],
            query_norm_D=norms[0], key_norm_D=norms[1], eps=1e-5,
        )  # fmt: skip

    with record(ROWS) as recording:
        out = rope(ROWS, caches)
    assert len(recording._kernels) == 1
    for rows in (1, ROWS, 3):
        heads[:] = torch.randn(heads.shape)
        positions[:], slots[:] = torch.randint(0, 99, (ROWS,)), torch.randperm(32)[:ROWS]
        expected_caches = caches.clone()
        expected = rope(rows, expected_caches)
        recording.run(rows)
        assert torch.equal(out[:rows], expected)
        assert torch.equal(caches, expected_caches)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rows_are_stored_where_the_slots_of_a_run_say(dtype: torch.dtype) -> None:
    given, slots = torch.empty(ROWS, SIZE, dtype=dtype), torch.zeros(ROWS, dtype=torch.int64)
    table = torch.zeros(20, 2 * SIZE, dtype=dtype)
    with record(ROWS) as recording:
        store_rows(given, slots, table[:, SIZE:])
    assert not table.any()
    expected = table.clone()
    for rows in (1, ROWS, 3):
        given[:], slots[:] = torch.randn(given.shape), torch.randperm(20)[:ROWS]
        expected[slots[:rows], SIZE:] = given[:rows]
        recording.run(rows)
        assert torch.equal(table, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rows_of_a_plain_embedding_are_recorded(dtype: torch.dtype) -> None:
    table, token_ids = torch.randn(20, SIZE).to(dtype), torch.zeros(ROWS, dtype=torch.int64)
    with record(ROWS) as recording:
        out = embedding(token_ids, table)
    for rows in (1, ROWS, 3):
        token_ids[:] = torch.randint(20, (ROWS,))
        recording.run(rows)
        assert torch.equal(out[:rows], table[token_ids[:rows]])


def test_sampling_is_recorded_too() -> None:
    weight = pack_linear(torch.eye(SIZE))
    x = torch.zeros(ROWS, SIZE)
    with record(ROWS) as recording:
        token_ids = argmax(linear(x, weight))
    for first in (3, 40):
        x[:] = torch.eye(SIZE)[first : first + ROWS]
        recording.run(ROWS)
        assert token_ids.tolist() == list(range(first, first + ROWS))


def test_packing_cannot_be_recorded() -> None:
    matrix = torch.ones(32, SIZE)
    with pytest.raises(NotRecordableError), record(ROWS):
        pack_linear(matrix)


LIGHT = """
    import sys
    import torch
    from quire_kernels import pack_linear, linear, record

    weight, x = pack_linear(torch.ones(32, 64)), torch.ones(8, 64)
    with torch.inference_mode(), record(8) as recording:
        linear(x, weight)
    recording.run(3)
    print([name for name in ("torch._dynamo", "sympy", "triton") if name in sys.modules])
"""


def test_recording_does_not_bring_torchs_compiler() -> None:
    process = start_python(LIGHT)
    with ended([process]):
        assert process.communicate()[0].split(b"\n")[-2] == b"[]"


def test_attention_is_planned_anew_for_each_step_of_a_recording() -> None:
    """Also where the plan becomes larger than at first, and where threads share a sequence."""
    num_seqs, heads, kv_heads, head_size, block_size, max_blocks = 64, 8, 2, 64, 16, 160
    generator = torch.Generator().manual_seed(0)
    caches = [new_kv_cache(200, kv_heads, block_size, head_size, torch.float32) for _ in range(2)]
    for cache in caches:
        cache.copy_(torch.randn(cache.shape, generator=generator))
    query = torch.randn(num_seqs, heads, head_size, generator=generator)
    table = torch.randint(0, 200, (num_seqs, max_blocks), generator=generator)
    starts, lens = torch.arange(num_seqs + 1), torch.ones(num_seqs, dtype=torch.int64)
    threads = cpu.get_num_threads()
    cpu.set_num_threads(4)
    try:
        standing = standing_plan(table, starts, lens, heads, caches[0])
        plan = standing.plan
        with record(num_seqs) as recording:
            out = paged_attention(query, *caches, table, starts, lens, 0.125, plan)
        shared = []
        for tokens in ([1], [max_blocks * block_size], [3, 40, 17], [1] * 64, [2000, 5], [900] * 64):
            rows = len(tokens)
            lens[:rows] = torch.tensor(tokens)
            standing.plan_for(rows)
            recording.run(rows)
            shared.append(standing.has_shared_sequences)
            expected = paged_attention(query[:rows], *caches, table[:rows], starts[: rows + 1], lens[:rows], 0.125)
            assert torch.equal(out[:rows], expected)
        assert not shared[0]
        assert shared[1], "four threads and one long sequence"
    finally:
        cpu.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_latent_attention_is_recorded(dtype: torch.dtype) -> None:
    """Projections of heads, rows that are written once, and attention whose values are a part of them."""
    heads, rope_size, latent_size = 3, 16, 34
    generator = torch.Generator().manual_seed(0)
    keys, values = (
        pack_head_linear(torch.randn(heads, n, k, generator=generator).to(dtype) / 8)
        for n, k in ((48 + rope_size, 24), (10, latent_size))
    )
    query, row = torch.empty(ROWS, heads, 24, dtype=dtype), torch.empty(ROWS, 1, 48 + rope_size, dtype=dtype)
    cache, table = torch.zeros(ROWS, 1, 16, 48 + rope_size, dtype=dtype), torch.arange(ROWS)[:, None].contiguous()
    starts, lens, slots = torch.arange(ROWS + 1), torch.ones(ROWS, dtype=torch.int64), torch.arange(ROWS) * 16
    cos_sin = torch.rand(99, rope_size, generator=generator)
    standing = standing_plan(table, starts, lens, heads, cache)
    plan = standing.plan

    def attend(rows: int, cache: torch.Tensor, plan: CpuAttentionPlan | None) -> torch.Tensor:
        absorbed, own = head_linear(query[:rows], keys), slots[:rows]
        rotated = rope_and_cache(absorbed, row[:rows], None, lens[:rows], cos_sin, own, cache, None)
        sums = paged_attention(
            rotated, cache, None, table[:rows], starts[: rows + 1], lens[:rows], 0.25, plan, value_size=latent_size
        )
        return head_linear(sums, values)

    with record(ROWS) as recording:
        out = attend(ROWS, cache, plan)
    for position, rows in enumerate((1, ROWS, 3)):
        for tensor in (query, row):
            tensor[:] = torch.randn(tensor.shape, generator=generator)
        lens[:rows], slots[:] = position + 1, torch.arange(ROWS) * 16 + position
        standing.plan_for(rows)
        expected_cache = cache.clone()
        expected = attend(rows, expected_cache, None)
        recording.run(rows)
        assert torch.equal(out[:rows], expected)
        assert torch.equal(cache, expected_cache)
