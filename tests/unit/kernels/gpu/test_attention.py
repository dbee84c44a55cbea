"""Paged attention against dense attention, over ragged batches on odd shapes."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from quire_kernels import paged_attention, plan_attention
from quire_kernels.attention_plan import GpuAttentionPlan
from quire_kernels.kv_cache import new_kv_cache

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass
class Batch:
    """Sequences of (query rows, length), their cache, and what each row's attention is by definition."""

    query: torch.Tensor
    key: list[torch.Tensor]
    value: list[torch.Tensor]
    caches: tuple[torch.Tensor, torch.Tensor]
    table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor

    def attend(self, sequences: list[int] | None = None, **options: float | torch.Tensor | None) -> torch.Tensor:
        """Of these sequences, in this order, or of all."""
        order = list(range(len(self.key))) if sequences is None else sequences
        starts = self.query_start_loc.tolist()
        query = torch.cat([self.query[starts[s] : starts[s + 1]] for s in order])
        lens = self.query_start_loc.diff()[order].cumsum(0)
        out = paged_attention(
            query, *self.caches, self.table[order], torch.cat((lens.new_zeros(1), lens)), self.seq_lens[order],
            query.shape[-1] ** -0.5, **options,
        )  # fmt: skip
        assert out.dtype == query.dtype
        return out

    def dense(
        self,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
        is_causal: bool = True,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """In float64."""
        out, starts = [], self.query_start_loc.tolist()
        for s, (key, value) in enumerate(zip(self.key, self.value, strict=True)):
            query = self.query[starts[s] : starts[s + 1]].double().transpose(0, 1)
            group = query.shape[0] // key.shape[1]
            key, value = (x.double().repeat_interleave(group, 1).transpose(0, 1) for x in (key, value))
            scores = query @ key.transpose(1, 2) * query.shape[-1] ** -0.5
            if soft_cap is not None:
                scores = soft_cap * (scores / soft_cap).tanh()
            keys = torch.arange(key.shape[1], device=key.device)
            rows = keys[key.shape[1] - query.shape[1] :, None]
            if bias is not None:
                reach = bias.shape[1] // 2
                scores = scores + bias.double()[:, (keys - rows).clamp(-reach, reach) + reach]
            hidden = (keys <= rows - (window or len(keys))) | (keys >= rows + (1 if is_causal else window or len(keys)))
            if window is not None and window < 0:
                hidden = (keys < rows // -window * -window) | (keys > rows)
            scores = scores.masked_fill(hidden, float("-inf"))
            if sinks is not None:
                scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(rows), 1)), -1)
            out.append((scores.softmax(-1)[..., : len(keys)] @ value).transpose(0, 1))
        return torch.cat(out)


def make_batch(
    shapes: list[tuple[int, int]], num_heads: int, num_kv_heads: int, head_size: int, block_size: int,
    dtype: torch.dtype, device: torch.device, cache_dtype: torch.dtype | None = None,
) -> Batch:  # fmt: skip
    """Whatever no sequence has written to is NaN, and so are the blocks that pad the block table."""
    generator = torch.Generator().manual_seed(head_size + num_heads)

    def random(length: int, heads: int) -> torch.Tensor:
        return torch.randn(length, heads, head_size, generator=generator).to(device, dtype)

    blocks_each = -(-max(length for _, length in shapes) // block_size)
    num_blocks = blocks_each * len(shapes) + 1
    ids = torch.randperm(num_blocks, generator=generator).to(device)
    table = ids[-1].repeat(len(shapes), blocks_each)
    caches = [new_kv_cache(num_blocks, num_kv_heads, block_size, head_size, dtype, device) for _ in range(2)]
    for cache in caches:
        cache.fill_(float("nan"))
    keys, values = ([random(length, num_kv_heads) for _, length in shapes] for _ in range(2))
    for s, (_, length) in enumerate(shapes):
        used = -(-length // block_size)
        table[s, :used] = ids[s * blocks_each : s * blocks_each + used]
        positions = torch.arange(length, device=device)
        for cache, x in zip(caches, (keys[s], values[s]), strict=True):
            cache[table[s, positions // block_size], :, positions % block_size] = x
    rows = torch.tensor([rows for rows, _ in shapes], device=device)
    return Batch(
        random(int(rows.sum()), num_heads),
        keys,
        values,
        (caches[0].to(cache_dtype or dtype), caches[1].to(cache_dtype or dtype)),
        table,
        torch.cat((rows.new_zeros(1), rows.cumsum(0))),
        torch.tensor([length for _, length in shapes], device=device),
    )


def assert_near(out: torch.Tensor, expected: torch.Tensor, factor: float = 1.0) -> None:
    step = TOLERANCE[out.dtype] * factor
    if out.is_cuda and out.dtype == torch.float32:
        step *= 4  # products of TF32 parts
    torch.testing.assert_close(out.double(), expected, atol=step, rtol=step)


FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = pytest.mark.parametrize(
    "dtype", [FP32, BF16, *[FP16] * torch.cuda.is_available()], ids=lambda dtype: str(dtype).removeprefix("torch.")
)
#         H  K  D  block size
MODELS = [
    (2, 2, 64, 16, FP32), (4, 2, 80, 32, BF16), (6, 2, 96, 128, FP16), (8, 1, 128, 16, BF16),
    (5, 1, 256, 32, FP32), (3, 1, 64, 128, BF16), (7, 1, 80, 16, FP16), (4, 1, 128, 24, FP32), (17, 1, 64, 16, BF16),
]  # fmt: skip


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_size", "block_size", "dtype"), MODELS, ids=str)
def test_equals_dense_attention(
    num_heads: int, num_kv_heads: int, head_size: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    #         decodes, whole prompts, chunks, sequences without a row, one-token prompts, several tiles of rows and keys
    shapes = [
        (1, 1),
        (1, 37),
        (5, 5),
        (7, 40),
        (0, 3),
        (1, 64),
        (16, 48),
        (1, 130),
        (140 // (num_heads // num_kv_heads), 150),
    ]
    batch = make_batch(shapes, num_heads, num_kv_heads, head_size, block_size, dtype, device)
    assert_near(batch.attend(), batch.dense())


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("head_size", "block_size"), [(64, 16), (128, 16), (128, 64)])
def test_heads_of_large_models(head_size: int, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """32 on 8; on a GPU of as many tokens as they are given there."""
    shapes = [(1, 70), (20, 20), (7, 33)]
    if device.type == "cuda":
        shapes = [(1, 4096), (700, 700), (1, 1), (300, 2000), (1, 8000), (5, 777)]
    batch = make_batch(shapes, 32, 8, head_size, block_size, dtype, device)
    assert_near(batch.attend(), batch.dense())


@DTYPES
def test_long_decodes_are_split(dtype: torch.dtype, device: torch.device) -> None:
    """Of a length of one split, one more, and some."""
    shapes = [(1, 512), (1, 513), (3, 1400), (2, 1025), (1, 1), (16, 1100)]
    batch = make_batch(shapes, 2, 1, 64, 16, dtype, device)
    plan = plan_attention(batch.table, batch.query_start_loc, batch.seq_lens, 2, batch.caches[0])
    assert plan.max_splits == 3
    assert_near(batch.attend(), batch.dense())


def test_splits_have_a_bound(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire_kernels.gpu import attention

    monkeypatch.setattr(attention, "MIN_SPLIT", 16)
    monkeypatch.setattr(attention, "MAX_SPLITS", 4)
    batch = make_batch([(1, 1000), (2, 300), (1, 20), (1, 257)], 4, 2, 64, 32, FP32, device)
    whole = batch.attend()
    assert_near(whole, batch.dense())
    for programs in (1, 10, 18):  # for both KV heads: one takes all in turn, or some begin within a sequence
        monkeypatch.setattr(attention, "_num_programs", lambda device, programs=programs: programs)
        monkeypatch.setattr(attention, "SEQUENCES", 2)
        assert torch.equal(batch.attend(), whole)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU nobody sees what a program does")
def test_programs_share_the_keys_evenly(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """One long sequence among short ones and a prompt: no program does a split more than its share."""
    from quire_kernels.gpu import attention
    from triton.runtime.interpreter import interpreter_builder

    keys = [0] * 6
    attend = attention._attend

    def count(query: Any, positions: Any, bias: Any, first_key: Any, end_key: Any, *arguments: Any) -> Any:
        if query.shape[0] == attention.DECODE_ROWS:
            keys[interpreter_builder.grid_idx[0]] += int(end_key) - int(first_key)
        return attend(query, positions, bias, first_key, end_key, *arguments)

    monkeypatch.setattr(attention, "_attend", count)
    monkeypatch.setattr(attention, "_num_programs", lambda device: len(keys))
    shapes = [(1, 60), (1, 64), (20, 30), (1, 2600), (1, 5), (0, 90), (1, 100)]
    batch = make_batch(shapes, 2, 1, 16, 16, FP32, device)
    assert_near(batch.attend(), batch.dense())
    assert sum(keys) == 60 + 64 + 2600 + 5 + 100
    padded = 64 + 64 + 2624 + 64 + 128  # in tiles of 64
    assert max(keys) < padded / len(keys) + attention.MIN_SPLIT
    assert min(keys) > padded / len(keys) - attention.MIN_SPLIT


@pytest.mark.parametrize(
    ("dtype", "window", "soft_cap"),
    [
        (FP32, None, None), (FP32, 1, None), (FP32, 33, None), (FP32, 20, 5.0), (BF16, None, None), (BF16, 20, 5.0),
        *[(FP16, 33, None)] * torch.cuda.is_available(),
    ],
    ids=str,
)  # fmt: skip
def test_rows_see_both_sides(
    dtype: torch.dtype, window: int | None, soft_cap: float | None, device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Whole sequences, as short as decodes and of several tiles; by one program for each tile and by several; to the
    last bit the same alone."""
    from quire_kernels.gpu import attention

    monkeypatch.setattr(attention, "PREFILL_SPLIT", 64)
    batch = make_batch([(1, 1), (5, 5), (100, 100), (9, 70)], 4, 2, 64, 16, dtype, device)
    options = {"window": window, "soft_cap": soft_cap, "is_causal": False}
    together = batch.attend(**options)
    assert_near(together, batch.dense(**options))
    starts = batch.query_start_loc.tolist()
    for s in range(4):
        assert torch.equal(batch.attend([s], **options), together[starts[s] : starts[s + 1]]), s
    monkeypatch.setattr(attention, "_num_programs", lambda device: 1)
    assert torch.equal(batch.attend(**options), together)


@pytest.mark.parametrize("window", [None, 50])
@DTYPES
def test_prefills_by_several_programs(
    dtype: torch.dtype, window: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short suffixes on long prefixes: to the last bit what one program for each tile makes of them."""
    from quire_kernels.gpu import attention

    monkeypatch.setattr(attention, "PREFILL_SPLIT", 64)
    batch = make_batch([(10, 270), (1, 40), (9, 64), (75, 150), (11, 65), (0, 9)], 4, 2, 64, 16, dtype, device)
    plan = plan_attention(batch.table, batch.query_start_loc, batch.seq_lens, 4, batch.caches[0])
    assert isinstance(plan, GpuAttentionPlan)
    assert plan.prefill_programs == 5, "one for each split of the longest"
    shared = batch.attend(window=window)
    assert_near(shared, batch.dense(window))
    for programs, expected in ((1, 1), (20, 2)):
        monkeypatch.setattr(attention, "_num_programs", lambda device, programs=programs: programs)
        plan = plan_attention(batch.table, batch.query_start_loc, batch.seq_lens, 4, batch.caches[0])
        assert isinstance(plan, GpuAttentionPlan)
        assert plan.prefill_programs == expected
        assert torch.equal(batch.attend(window=window), shared)
    monkeypatch.setattr(attention, "_num_programs", lambda device: 1000)
    monkeypatch.setattr(attention, "MAX_PREFILL_PARTS_BYTES", 106 * 4 * 5 * 65 * 4 - 1)
    plan = plan_attention(batch.table, batch.query_start_loc, batch.seq_lens, 4, batch.caches[0])
    assert isinstance(plan, GpuAttentionPlan)
    assert plan.prefill_programs == 1, "their parts would take more memory than they may"


@pytest.mark.parametrize("window", [1, 5, 64, 100, -1, -64, -100])
def test_sliding_window(window: int, device: torch.device) -> None:
    """Blocks that no row can see any more may belong to others: theirs is NaN here."""
    batch = make_batch([(1, 20), (1, 700), (70, 150), (3, 130), (9, 9)], 4, 2, 64, 16, FP32, device)
    expected = batch.dense(window=window)
    for s, key in enumerate(batch.key):
        first_row = len(key) - int(batch.query_start_loc.diff()[s])
        unseen = (first_row // -window * -window if window < 0 else max(0, first_row - window + 1)) // 16
        for cache in batch.caches:
            cache[batch.table[s, :unseen]] = float("nan")
    assert_near(batch.attend(window=window), expected)


@pytest.mark.parametrize("window", [None, 50])
def test_soft_cap(window: int | None, device: torch.device) -> None:
    batch = make_batch([(1, 20), (1, 600), (60, 130)], 2, 1, 64, 16, FP32, device)
    batch.query *= 8
    assert_near(batch.attend(window=window, soft_cap=3.0), batch.dense(window, 3.0), factor=3)


@pytest.mark.parametrize("prefill_programs", [1, 1000])
@pytest.mark.parametrize("window", [None, 50])
def test_sinks(
    window: int | None, prefill_programs: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of decodes with one split and with several, and of tiles of prompts that have one program or several."""
    from quire_kernels.gpu import attention

    monkeypatch.setattr(attention, "PREFILL_SPLIT", 64)
    monkeypatch.setattr(attention, "_num_programs", lambda device: prefill_programs)
    batch = make_batch([(1, 20), (1, 600), (60, 130)], 4, 2, 64, 16, FP32, device)
    sinks = torch.tensor([-3.0, 0.5, 4.0, 200.0], device=device)
    assert_near(batch.attend(window=window, sinks_H=sinks), batch.dense(window, None, sinks))


@pytest.mark.parametrize(("soft_cap", "dtype"), [(None, FP32), (3.0, FP32), (None, BF16)])
def test_position_bias(soft_cap: float | None, dtype: torch.dtype, device: torch.device) -> None:
    """Of prompts with few rows and with many, and of distances beyond the table."""
    batch = make_batch([(1, 1), (7, 7), (60, 130), (170, 170)], 4, 2, 64, 16, dtype, device)
    bias = torch.randn(4, 101, generator=torch.Generator().manual_seed(0)).to(device) * 2
    out = batch.attend(soft_cap=soft_cap, is_causal=False, position_bias_HR=bias)
    assert_near(out, batch.dense(None, soft_cap, None, is_causal=False, bias=bias), factor=3 if soft_cap else 1)


def test_a_plan_for_a_window_needs_room_for_the_window_alone(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire_kernels.gpu import attention

    monkeypatch.setattr(attention, "PREFILL_SPLIT", 64)
    batch = make_batch([(1, 1500), (10, 1500)], 2, 1, 64, 16, FP32, device)
    for window in (1, 64, 190, 700):
        plan = plan_attention(batch.table, batch.query_start_loc, batch.seq_lens, 2, batch.caches[0], window)
        assert isinstance(plan, GpuAttentionPlan)
        assert plan.max_splits <= -(-(window + 65) // 256)
        assert plan.prefill_parts.shape[2] <= -(-(window + 74) // 64) + 1
        assert_near(batch.attend(window=window), batch.dense(window))


def test_an_fp8_cache(device: torch.device) -> None:
    batch = make_batch([(1, 20), (1, 600), (40, 90)], 4, 2, 64, 16, BF16, device, torch.float8_e4m3fn)
    batch.key = [key.to(torch.float8_e4m3fn).to(BF16) for key in batch.key]
    batch.value = [value.to(torch.float8_e4m3fn).to(BF16) for value in batch.value]
    assert_near(batch.attend(), batch.dense(), factor=2)


@DTYPES
def test_the_same_in_any_batch(dtype: torch.dtype, device: torch.device) -> None:
    batch = make_batch([(1, 1), (1, 800), (60, 130), (4, 40), (1, 513), (30, 30)], 4, 2, 64, 16, dtype, device)
    together = batch.attend().split(batch.query_start_loc.diff().tolist())
    for order in ([0], [1], [2], [3], [4], [5], [5, 1, 3], [4, 0, 2]):
        expected = torch.cat([together[s] for s in order])
        assert torch.equal(batch.attend(order), expected), order


@pytest.mark.parametrize("prefill_split", [None, 64])
@DTYPES
def test_the_same_however_a_prompt_is_cut(
    dtype: torch.dtype, prefill_split: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into chunks that are too long to be decodes, and whether a chunk's tiles have one program each or several."""
    from quire_kernels.gpu import attention

    if prefill_split:
        monkeypatch.setattr(attention, "PREFILL_SPLIT", prefill_split)
    batch = make_batch([(150, 150)], 4, 2, 64, 16, dtype, device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_num_programs", lambda device: 1)
        whole = batch.attend()
    for start, end in ((0, 9), (9, 70), (70, 150), (20, 150), (33, 43)):
        out = paged_attention(
            batch.query[start:end], *batch.caches, batch.table, torch.tensor([0, end - start], device=device),
            torch.tensor([end], device=device), 64**-0.5,
        )  # fmt: skip
        assert torch.equal(out, whole[start:end]), (start, end)


def test_queries_may_be_strided_and_the_plan_made_from_the_hosts_lengths(device: torch.device) -> None:
    batch = make_batch([(1, 20), (9, 30)], 4, 2, 64, 16, FP32, device)
    whole = batch.attend()
    wide = torch.cat((batch.query, batch.query), dim=1)
    plan = plan_attention(batch.table, batch.query_start_loc.cpu(), batch.seq_lens.cpu(), 4, batch.caches[0])
    arguments = (*batch.caches, batch.table, batch.query_start_loc, batch.seq_lens, 64**-0.5, plan)
    assert torch.equal(paged_attention(wide[:, 4:], *arguments), whole)


def test_no_sequence_has_a_row(device: torch.device) -> None:
    batch = make_batch([(0, 3), (0, 20)], 4, 2, 64, 16, FP32, device)
    assert batch.attend().shape == (0, 4, 64)


@pytest.mark.parametrize(
    ("dtype", "head_size", "value_size", "window"),
    [
        (FP32, 80, 64, 40), (FP32, 48, 34, None), (FP32, 144, 128, None), (FP32, 24, 24, 40),
        (BF16, 80, 64, None), (BF16, 144, 128, 40),
    ],
    ids=str,
)  # fmt: skip
def test_values_that_are_a_part_of_the_keys(
    dtype: torch.dtype, head_size: int, value_size: int, window: int | None, device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Decodes and prefills, in one part and in several."""
    from quire_kernels.gpu import attention

    monkeypatch.setattr(attention, "MIN_SPLIT", 32)
    monkeypatch.setattr(attention, "PREFILL_SPLIT", 64)
    batch = make_batch([(1, 37), (3, 100), (20, 150), (1, 1), (9, 9)], 5, 1, head_size, 16, dtype, device)
    keys = batch.caches[0]
    batch.caches, batch.value = (keys, None), [key[..., -value_size:] for key in batch.key]  # type: ignore[assignment]
    out = batch.attend(value_size=value_size, window=window)
    assert out.shape[2] == value_size
    assert_near(out, batch.dense(window))
