"""Sections on kernels: the roofline itself, paged attention, and the ops around it."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from quire_kernels import (
    add_rms_norm,
    argmax,
    linear,
    pack_linear,
    paged_attention,
    plan_attention,
    rms_norm,
    rope_and_cache,
    sample,
    silu_and_mul,
)
from quire_kernels.kv_cache import new_kv_cache

from .bench import Bench, Roofline
from .figures import Figure, at_least

__all__ = ["measure_decode", "measure_ops", "measure_prefill", "measure_roofline", "measure_splits"]

DECODE_BAR = at_least(80)
"""Percent of the copy bandwidth."""
BAR_SHAPE = (64, 4096, 16, 128)
"""Of `DECODES`, the one that the bar is for."""
#          sequences, context, tokens per block, head size
DECODES = [
    BAR_SHAPE, (64, 4096, 64, 128), (64, 4096, 16, 64), (1, 4096, 16, 128), (1, 32768, 16, 128), (16, 4096, 16, 128),
    (64, 512, 16, 128), (256, 1024, 16, 128), (256, 4096, 16, 128),
]  # fmt: skip
SMOKE_SHAPE = (2, 40, 16, 64)
#           sequences, tokens each, head size
PREFILLS = [(1, 2048, 128), (4, 2048, 128), (1, 8192, 128), (1, 16384, 128), (4, 2048, 64)]
SWEPT: dict[str, list[int]] = {"DECODE_STAGES": [5, 7], "MIN_SPLIT": [64, 128, 256, 512]}
"""Constants of `quire_kernels.gpu.attention`, by name, with the values to try."""
SWEEPS = [(1, 512, 16, 128), (1, 4096, 16, 128), BAR_SHAPE, (256, 1024, 16, 128)]
"""As of `DECODES`."""
EPS = 1e-5


def measure_roofline(bench: Bench) -> Iterator[Figure | Roofline]:
    """Copy and read bandwidth, and the rate of a large product of random numbers."""
    elements, size = ((1 << 20), 256) if bench.is_smoke else ((1 << 30), 8192)
    copied = _copy_rate(bench, elements)
    yield Figure(name="copy, bytes read and written", value=copied / 1e9, unit="GB/s")
    summed = _sum_rate(bench, elements)
    yield Figure(name="sum, bytes read", value=summed / 1e9, unit="GB/s")
    multiplied = _product_rate(bench, size)
    yield Figure(name=f"product of bf16 matrices of {size} x {size}", value=multiplied / 1e12, unit="TFLOP/s")
    # What a copy moves both ways, a kernel can read: where torch's sum is slower, it is the sum that is.
    yield Roofline(
        copy_bytes_per_second=copied, read_bytes_per_second=max(copied, summed), flops_per_second=multiplied
    )  # fmt: skip


def _copy_rate(bench: Bench, elements: int) -> float:
    source = bench.randn(elements, dtype=torch.float32)
    target = torch.empty_like(source)
    return 2 * source.nbytes / bench.seconds(lambda: target.copy_(source))


def _sum_rate(bench: Bench, elements: int) -> float:
    source = bench.randn(elements, dtype=torch.float32)
    return source.nbytes / bench.seconds(source.sum)


def _product_rate(bench: Bench, size: int) -> float:
    a, b = bench.randn(size, size), bench.randn(size, size)
    return 2 * size**3 / bench.seconds(lambda: a @ b)


def measure_decode(bench: Bench) -> Iterator[Figure]:
    """One query row for each sequence, 32 query heads on 8 KV heads: bytes of keys and values, by time."""
    yield from (_decode_figure(bench, shape) for shape in ([SMOKE_SHAPE] if bench.is_smoke else DECODES))


def _decode_figure(bench: Bench, shape: tuple[int, int, int, int], what: str = "") -> Figure:
    num_seqs, seq_len, block_size, head_size = shape
    heads, kv_heads = _heads(bench)
    rate, note = _attend_rate(bench, [1] * num_seqs, [seq_len] * num_seqs, block_size, head_size)
    return Figure(
        name=what
        or f"{num_seqs} x {seq_len:,} tokens, heads {heads}/{kv_heads} of {head_size}, blocks of {block_size}",
        value=100 * rate / bench.machine.copy_bytes_per_second,
        unit="%",
        note=note,
        bar=DECODE_BAR if shape == BAR_SHAPE and not what else None,
    )


def _heads(bench: Bench) -> tuple[int, int]:
    return (4, 2) if bench.is_smoke else (32, 8)


def _attend_seconds(bench: Bench, query_lens: list[int], lens: list[int], block_size: int, head_size: int) -> float:
    """A step for each of several sets of such sequences, whose blocks lie anywhere in one cache."""
    num_heads, num_kv_heads = _heads(bench)
    num_sets = bench.num_sets(2 * sum(lens) * num_kv_heads * head_size * 2)
    blocks_each = [-(-length // block_size) for length in lens]
    num_blocks = num_sets * sum(blocks_each)
    caches = [
        new_kv_cache(num_blocks, num_kv_heads, block_size, head_size, torch.bfloat16, bench.device).normal_()
        for _ in range(2)
    ]
    starts, seq_lens = torch.tensor([0, *query_lens]).cumsum(0), torch.tensor(lens)
    query = bench.randn(sum(query_lens), num_heads, head_size)
    on_device = (starts.to(bench.device), seq_lens.to(bench.device))

    def call_of(ids: torch.Tensor) -> Callable[[], torch.Tensor]:
        rows = torch.nn.utils.rnn.pad_sequence(ids.split(blocks_each), batch_first=True).to(bench.device)
        plan = plan_attention(rows, starts, seq_lens, num_heads, caches[0])
        return lambda: paged_attention(query, *caches, rows, *on_device, head_size**-0.5, plan)

    return bench.seconds(*(call_of(ids) for ids in torch.randperm(num_blocks).view(num_sets, -1)))


def _attend_rate(
    bench: Bench, query_lens: list[int], lens: list[int], block_size: int, head_size: int
) -> tuple[float, str]:
    """Bytes of keys and values per second, and that in words."""
    seconds = _attend_seconds(bench, query_lens, lens, block_size, head_size)
    rate = 2 * sum(lens) * _heads(bench)[1] * head_size * 2 / seconds
    return rate, f"{1e6 * seconds:,.1f} µs, {rate / 1e9:,.0f} GB/s"


def measure_splits(bench: Bench) -> Iterator[Figure]:
    """Sequences of which one is longer than all others; a short suffix on a long prefix; a prompt among decodes; and
    decodes with other constants than those that the kernels have."""
    short, long, context, suffix = (20, 300, 120, 20) if bench.is_smoke else (512, 32768, 8192, 64)
    size = SMOKE_SHAPE[3] if bench.is_smoke else 128
    for what, query_lens, lens in (
        (f"{255 if not bench.is_smoke else 3} x {short:,} tokens and one of {long:,}",
         [1] * (4 if bench.is_smoke else 256), [short] * (3 if bench.is_smoke else 255) + [long]),
        (f"{suffix} tokens on {context:,}", [suffix], [context + suffix]),
    ):  # fmt: skip
        rate, note = _attend_rate(bench, query_lens, lens, 16, size)
        yield Figure(name=what, value=100 * rate / bench.machine.copy_bytes_per_second, unit="%", note=note)
    decodes, prompt = ([1] * 3, 40) if bench.is_smoke else ([1] * 63, 2048)
    apart = [
        _attend_seconds(bench, query_lens, lens, 16, size)
        for query_lens, lens in ((decodes, [context // 2] * len(decodes)), ([prompt], [prompt]))
    ]
    mixed = _attend_seconds(bench, [*decodes, prompt], [*[context // 2] * len(decodes), prompt], 16, size)
    yield Figure(
        name=f"{len(decodes)} x {context // 2:,} tokens and a prompt of {prompt:,}: each alone = 1",
        value=mixed / sum(apart),
        unit="x",
        note=f"{1e6 * mixed:,.1f} µs; alone {1e6 * apart[0]:,.1f} and {1e6 * apart[1]:,.1f}",
    )
    yield from _sweep(bench)


def _sweep(bench: Bench) -> Iterator[Figure]:
    from quire_kernels.gpu import attention

    for name, values in SWEPT.items():
        usual = getattr(attention, name)
        try:
            for value in values:
                setattr(attention, name, value)
                for shape in [SMOKE_SHAPE] if bench.is_smoke else SWEEPS:
                    yield _decode_figure(bench, shape, f"{name} = {value}: {shape[0]} x {shape[1]:,} tokens")
        finally:
            setattr(attention, name, usual)


def measure_prefill(bench: Bench) -> Iterator[Figure]:
    """Whole prompts, next to torch's own attention over the same keys and values, which for it lie side by side."""
    heads, kv_heads, block_size = (4, 2, 16) if bench.is_smoke else (32, 8, 16)
    for num_seqs, length, head_size in [(2, 40, 64)] if bench.is_smoke else PREFILLS:
        flop = 4 * num_seqs * heads * head_size * length * (length + 1) / 2
        ours = flop / bench.seconds(_prefill_call(bench, (num_seqs, length, head_size), heads, kv_heads, block_size))
        query = bench.randn(num_seqs, heads, length, head_size)
        key, value = (bench.randn(num_seqs, kv_heads, length, head_size) for _ in range(2))
        attend = partial(F.scaled_dot_product_attention, query, key, value, is_causal=True, enable_gqa=True)
        theirs = flop / bench.seconds(attend)
        yield Figure(
            name=f"{num_seqs} x {length:,} tokens, heads {heads}/{kv_heads} of {head_size}: torch's SDPA = 1",
            value=ours / theirs,
            unit="x",
            note=f"{ours / 1e12:,.0f} TFLOP/s, {100 * ours / bench.machine.flops_per_second:.0f}% of the product's; "
            f"SDPA {theirs / 1e12:,.0f}",
        )


def _prefill_call(
    bench: Bench, shape: tuple[int, int, int], num_heads: int, num_kv_heads: int, block_size: int
) -> Callable[[], torch.Tensor]:
    num_seqs, length, head_size = shape
    blocks_each = -(-length // block_size)
    caches = [
        new_kv_cache(
            num_seqs * blocks_each, num_kv_heads, block_size, head_size, torch.bfloat16, bench.device
        ).normal_()
        for _ in range(2)
    ]
    table = torch.randperm(num_seqs * blocks_each, device=bench.device).view(num_seqs, blocks_each)
    starts, lens = torch.arange(num_seqs + 1) * length, torch.full((num_seqs,), length)
    plan = plan_attention(table, starts, lens, num_heads, caches[0])
    query = bench.randn(num_seqs * length, num_heads, head_size)
    on_device = (starts.to(bench.device), lens.to(bench.device))
    return lambda: paged_attention(query, *caches, table, *on_device, head_size**-0.5, plan)


def measure_ops(bench: Bench) -> Iterator[Figure]:
    """The other ops of a layer of 4,096 features, and sampling: the least bytes they could move, by time."""
    for rows in (3,) if bench.is_smoke else (64, 4096):
        yield from _rope(bench, rows)
        yield from _elementwise(bench, rows)
    for rows in (2,) if bench.is_smoke else (1, 64, 256):
        yield from _sampling(bench, rows)
    for rows in (2,) if bench.is_smoke else (1, 16, 64, 256, 4096):
        yield from _linears(bench, rows)


def _against_bandwidth(
    bench: Bench, name: str, num_bytes: int, make_call: Callable[[], Callable[[], object]]
) -> Figure:
    seconds = bench.seconds(*(make_call() for _ in range(bench.num_sets(num_bytes))))
    return Figure(
        name=name,
        value=100 * num_bytes / seconds / bench.machine.copy_bytes_per_second,
        unit="%",
        note=f"{1e6 * seconds:,.1f} µs, {num_bytes / seconds / 1e9:,.0f} GB/s",
    )


def _rope(bench: Bench, rows: int) -> Iterator[Figure]:
    heads, kv_heads, head_size, block_size = (4, 2, 64, 16) if bench.is_smoke else (32, 8, 128, 16)
    num_blocks = -(-rows // block_size)
    positions = torch.arange(rows, device=bench.device)
    cos_sin = torch.rand(rows, head_size, device=bench.device)
    sizes = [heads * head_size, kv_heads * head_size, kv_heads * head_size]

    def make_call() -> Callable[[], object]:
        caches = [
            new_kv_cache(num_blocks, kv_heads, block_size, head_size, torch.bfloat16, bench.device) for _ in range(2)
        ]
        parts = [part.unflatten(-1, (-1, head_size)) for part in bench.randn(rows, sum(sizes)).split(sizes, -1)]
        slots = torch.randperm(num_blocks * block_size, device=bench.device)[:rows]
        return lambda: rope_and_cache(parts[0], parts[1], parts[2], positions, cos_sin, slots, caches[0], caches[1])

    num_bytes = 2 * rows * sum(sizes) * 2 + cos_sin.nbytes
    yield _against_bandwidth(bench, f"RoPE and cache write, {rows:,} tokens", num_bytes, make_call)


def _elementwise(bench: Bench, rows: int) -> Iterator[Figure]:
    hidden, intermediate = (64, 96) if bench.is_smoke else (4096, 14336)
    weight = bench.randn(hidden)

    def norm() -> Callable[[], object]:
        x = bench.randn(rows, hidden)
        return lambda: rms_norm(x, weight, EPS)

    def add_norm() -> Callable[[], object]:
        x, residual = bench.randn(rows, hidden), bench.randn(rows, hidden)
        return lambda: add_rms_norm(x, residual, weight, EPS)

    def activation() -> Callable[[], object]:
        gate_up = bench.randn(rows, 2 * intermediate)
        return lambda: silu_and_mul(gate_up)

    size = 2 * rows * hidden
    yield _against_bandwidth(bench, f"RMSNorm, {rows:,} x {hidden:,}", 2 * size, norm)
    yield _against_bandwidth(bench, f"addition and RMSNorm, {rows:,} x {hidden:,}", 4 * size, add_norm)
    yield _against_bandwidth(bench, f"SiLU · mul, {rows:,} x {intermediate:,}", 6 * rows * intermediate, activation)


def _sampling(bench: Bench, rows: int) -> Iterator[Figure]:
    vocab_size = 512 if bench.is_smoke else 128_256
    num_bytes = rows * vocab_size * 4

    def greedy() -> Callable[[], object]:
        logits = bench.randn(rows, vocab_size, dtype=torch.float32)
        return lambda: argmax(logits)

    yield _against_bandwidth(bench, f"argmax, {rows} x {vocab_size:,} logits", num_bytes, greedy)
    for what, min_p, top_k, top_p in (
        ("no mask", 0.0, vocab_size, 1.0), ("top-k 50", 0.0, 50, 1.0), ("top-p 0.9", 0.0, vocab_size, 0.9),
        ("min-p, top-k, top-p", 0.05, 50, 0.9),
    ):  # fmt: skip

        def draw(min_p: float = min_p, top_k: int = top_k, top_p: float = top_p) -> Callable[[], object]:
            logits = 3 * bench.randn(rows, vocab_size, dtype=torch.float32)
            floats = [torch.full((rows,), value, device=bench.device) for value in (0.8, min_p, top_p)]
            top_ks = torch.full((rows,), top_k, device=bench.device)
            seeds = torch.arange(rows, device=bench.device)
            return lambda: sample(logits, floats[0], floats[1], top_ks, floats[2], seeds, seeds)

        yield _against_bandwidth(bench, f"sampling, {what}, {rows} x {vocab_size:,}", num_bytes, draw)


def _linears(bench: Bench, rows: int) -> Iterator[Figure]:
    """Against whichever takes longer at best: to read the weights, or to multiply, in 8 bits at twice the rate."""
    out_features, in_features = (96, 64) if bench.is_smoke else (14336, 4096)
    flop = 2 * rows * out_features * in_features
    for kind in (torch.bfloat16, torch.int8, torch.float8_e4m3fn):
        num_bytes = out_features * in_features * kind.itemsize + 2 * rows * (in_features + out_features)
        x = bench.randn(rows, in_features)
        weights = [
            pack_linear(
                bench.randn(out_features, in_features) * in_features**-0.5,
                quantize=kind != torch.bfloat16,
                quantized_dtype=torch.int8 if kind == torch.bfloat16 else kind,
            )
            for _ in range(bench.num_sets(num_bytes))
        ]
        seconds = bench.seconds(*(partial(linear, x, weight) for weight in weights))
        rate = bench.machine.flops_per_second * 2 / kind.itemsize
        floor = max(num_bytes / bench.machine.read_bytes_per_second, flop / rate)
        yield Figure(
            name=f"linear, {str(kind).removeprefix('torch.')}, {rows:,} x {in_features:,} → {out_features:,}",
            value=100 * floor / seconds,
            unit="%",
            note=f"{1e6 * seconds:,.1f} µs, {num_bytes / seconds / 1e9:,.0f} GB/s, "
            f"{flop / seconds / 1e12:,.0f} TFLOP/s",
        )
