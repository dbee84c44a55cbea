"""What the attention and RoPE kernels reach of what the machine can do: GB/s and GFLOP/s beside measured ceilings.

    python tests/benchmarks/kernel_ops.py [--threads 1] [--seconds 0.5] [--dtype bfloat16] [--kv-cache-dtype int8]
        [--only decode]

The ceilings are measured first, in the same process: a sum over a large tensor for reading, copying a large tensor for
reading and writing, and torch's own large matrix product for arithmetic. Every figure is the best of as many calls as
fit into the time. With one thread the clock is the thread's CPU time, so that others on the machine disturb less.

Decode rows of long contexts are bound by reading the cache, short ones (which stay in the processor's caches) and
prefill chunks by arithmetic. The last table shows how a step's attention grows with batch and context.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from quire_kernels import (
    LinearWeight,
    cpu,
    head_linear,
    linear,
    pack_head_linear,
    pack_linear,
    paged_attention,
    plan_attention,
    rope_and_cache,
)
from quire_kernels.kv_cache import new_kv_cache, scale_bytes

CACHE_BYTES = 256 << 20
"""Of keys and values together, at most: larger than the processor's caches, and allocated quickly."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What it can do with the number of threads at hand."""

    read_gb_per_s: float
    copy_gb_per_s: float
    gflop_per_s: float


@dataclass(frozen=True, kw_only=True)
class Dtypes:
    """Of queries and new keys and values, and of the cache."""

    computed: torch.dtype
    cached: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Heads:
    """A model's attention. Legend in `quire_kernels`."""

    H: int
    K: int
    D: int
    V: int | None = None
    """Of latent attention: values are the last V features of keys."""

    def __str__(self) -> str:
        return f"{self.H}/{self.K} heads of {self.D}"


LATENT = Heads(H=16, K=1, D=576, V=512)
"""DeepSeek-V2-Lite's."""
HEADS = [Heads(H=16, K=4, D=64), Heads(H=32, K=8, D=128), Heads(H=8, K=8, D=64)]


class Timer:
    """Seconds of the fastest call."""

    def __init__(self, seconds: float, threads: int) -> None:
        self.seconds = seconds
        self.clock = time.thread_time if threads == 1 else time.perf_counter

    def __call__(self, call: Callable[[], object]) -> float:
        call()
        best, end = float("inf"), time.perf_counter() + self.seconds
        while time.perf_counter() < end:
            started = self.clock()
            call()
            best = min(best, self.clock() - started)
        return best


def measure_machine(best: Timer, dtype: torch.dtype) -> Machine:
    large = torch.ones(64 << 20)
    target = torch.empty_like(large)
    x, weight = torch.randn(512, 2048).to(dtype), torch.randn(2048, 2048).to(dtype)
    flop = 2 * x.shape[0] * weight.numel()
    return Machine(
        read_gb_per_s=large.nbytes / best(large.sum) / 1e9,
        copy_gb_per_s=2 * large.nbytes / best(lambda: target.copy_(large)) / 1e9,
        gflop_per_s=flop / best(lambda: torch.nn.functional.linear(x, weight)) / 1e9,
    )


def random_cache(num_blocks: int, heads: Heads, block_size: int, dtype: torch.dtype) -> torch.Tensor:
    cache = new_kv_cache(num_blocks, heads.K, block_size, heads.D, dtype)
    if dtype is not torch.int8:
        return cache.copy_(torch.randn(cache.shape))
    cache.random_(-127, 128)
    _, scales = cache.flatten(2).tensor_split([block_size * heads.D], -1)  # the end of a tile
    scales.copy_(torch.full((num_blocks, heads.K, block_size), 0.01).view(torch.int8))
    return cache


def attention_seconds(
    best: Timer, heads: Heads, query_len: int, seq_len: int, num_seqs: int, block_size: int, dtypes: Dtypes
) -> float:
    """Seconds of one layer's attention over `num_seqs` equal sequences, each in blocks that lie anywhere."""
    blocks_each = -(-seq_len // block_size)
    num_blocks = blocks_each * num_seqs
    key_cache = random_cache(num_blocks, heads, block_size, dtypes.cached)
    value_cache = random_cache(num_blocks, heads, block_size, dtypes.cached) if heads.V is None else None
    table = torch.randperm(num_blocks).view(num_seqs, blocks_each)
    query_start_loc, seq_lens = torch.arange(num_seqs + 1) * query_len, torch.full((num_seqs,), seq_len)
    query = torch.randn(num_seqs * query_len, heads.H, heads.D).to(dtypes.computed)
    plan = plan_attention(table, query_start_loc, seq_lens, heads.H, key_cache)
    return best(
        lambda: paged_attention(
            query, key_cache, value_cache, table, query_start_loc, seq_lens, heads.D**-0.5, plan, value_size=heads.V
        )
    )  # fmt: skip


def attention_work(heads: Heads, query_len: int, seq_len: int, num_seqs: int, dtypes: Dtypes) -> tuple[int, float]:
    """Bytes of keys and values, and multiplications and additions, of what is visible."""
    pairs = query_len * (seq_len - query_len) + query_len * (query_len + 1) / 2
    row_bytes = heads.D * dtypes.cached.itemsize + scale_bytes(dtypes.cached)
    return num_seqs * seq_len * heads.K * row_bytes * 2, 4 * num_seqs * pairs * heads.H * heads.D


def bench_attention(best: Timer, machine: Machine, dtypes: Dtypes, name: str) -> None:
    """Decodes (one query row each) or prefill chunks."""
    shapes = {
        "decode": [(1, 256, 16), (1, 4096, 16), (1, 32768, 1)],
        "prefill": [(64, 64, 8), (512, 512, 1), (512, 4096, 1)],
    }
    print(f"\n{name}: query_len x seq_len x sequences")
    for heads in HEADS:
        for block_size in (16, 128):
            for query_len, seq_len, num_seqs in shapes[name]:
                seconds = attention_seconds(best, heads, query_len, seq_len, num_seqs, block_size, dtypes)
                num_bytes, flop = attention_work(heads, query_len, seq_len, num_seqs, dtypes)
                gb_per_s, gflop_per_s = num_bytes / seconds / 1e9, flop / seconds / 1e9
                print(
                    f"  {heads!s:20} B {block_size:3}  {query_len:4} x {seq_len:5} x {num_seqs:2}  "
                    f"{1e6 * seconds:9.0f} µs  {gb_per_s:6.1f} GB/s ({gb_per_s / machine.read_gb_per_s:4.0%})  "
                    f"{gflop_per_s:6.0f} GFLOP/s ({gflop_per_s / machine.gflop_per_s:4.0%})",
                    flush=True,
                )


def rope_seconds(best: Timer, heads: Heads, qkv: torch.Tensor, block_size: int, dtype: torch.dtype) -> float:
    """Seconds of one layer's rotation and cache write; queries, keys and values are slices of one projection."""
    query, key, value = (
        x.unflatten(-1, (-1, heads.D)) for x in qkv.split([heads.H * heads.D, heads.K * heads.D, heads.K * heads.D], -1)
    )
    num_blocks = -(-len(qkv) // block_size)
    key_cache, value_cache = (new_kv_cache(num_blocks, heads.K, block_size, heads.D, dtype) for _ in range(2))
    positions, cos_sin = torch.arange(len(qkv)), torch.rand(len(qkv), heads.D)
    return best(lambda: rope_and_cache(query, key, value, positions, cos_sin, positions, key_cache, value_cache))


def bench_rope(best: Timer, machine: Machine, dtypes: Dtypes) -> None:
    """Bytes are those read and those written."""
    print("\nrope and cache write")
    for heads in HEADS:
        for num_tokens, block_size in ((1, 16), (64, 16), (512, 16), (512, 128)):
            qkv = torch.randn(num_tokens, (heads.H + 2 * heads.K) * heads.D).to(dtypes.computed)
            seconds = rope_seconds(best, heads, qkv, block_size, dtypes.cached)
            row_bytes = heads.D * dtypes.cached.itemsize + scale_bytes(dtypes.cached)
            written = num_tokens * (heads.H * heads.D * qkv.itemsize + 2 * heads.K * row_bytes)
            gb_per_s = (qkv.nbytes + written) / seconds / 1e9
            print(
                f"  {heads!s:20} B {block_size:3}  {num_tokens:4} tokens  {1e6 * seconds:9.1f} µs  "
                f"{gb_per_s:6.1f} GB/s ({gb_per_s / machine.copy_gb_per_s:4.0%})",
                flush=True,
            )


def bench_growth(best: Timer, machine: Machine, dtypes: Dtypes) -> None:
    """Decode steps of one layer, and how many times longer they take than reading the keys and values once."""
    heads, batches = HEADS[0], (1, 4, 16, 64)
    print(f"\ngrowth: µs (times the roofline) of one layer, {heads}, block size 16, decode batches of", *batches)
    for seq_len in (128, 512, 2048, 8192):
        cells = []
        for num_seqs in batches:
            num_bytes, flop = attention_work(heads, 1, seq_len, num_seqs, dtypes)
            if num_bytes > CACHE_BYTES:
                continue
            seconds = attention_seconds(best, heads, 1, seq_len, num_seqs, 16, dtypes)
            roofline = max(num_bytes / machine.read_gb_per_s, flop / machine.gflop_per_s) / 1e9
            cells.append(f"{1e6 * seconds:8.0f} ({seconds / roofline:4.1f})")
        print(f"  context {seq_len:5}", *cells, flush=True)


def bench_latent(best: Timer, machine: Machine, dtypes: Dtypes) -> None:
    """Values in the keys against a cache of their own, and one operation for all heads against one for each."""
    print(f"\nlatent attention, {LATENT}: query_len x seq_len x sequences, of one cache and of two")
    for query_len, seq_len, num_seqs in ((1, 256, 1), (1, 256, 32), (1, 4096, 1), (1, 4096, 16), (512, 4096, 1)):
        one, two = (
            attention_seconds(best, heads, query_len, seq_len, num_seqs, 16, dtypes)
            for heads in (LATENT, replace(LATENT, V=None))
        )
        print(
            f"  {query_len:4} x {seq_len:5} x {num_seqs:2}  {1e6 * one:9.0f} and {1e6 * two:9.0f} µs, {one / two:.2f}",
            flush=True,
        )
    print("\nprojections of heads: tokens, one operation and one for each head")
    for num_tokens in (1, 32, 512):
        for out_features, in_features in ((576, 192), (128, 512)):
            weight_HNK = torch.randn(LATENT.H, out_features, in_features).to(dtypes.computed)
            x_THK = torch.randn(num_tokens, LATENT.H, in_features).to(dtypes.computed)
            together, each = pack_head_linear(weight_HNK), [pack_linear(own) for own in weight_HNK]

            def loop(x_THK: torch.Tensor = x_THK, each: list[LinearWeight] = each) -> None:
                for head, own in enumerate(each):
                    linear(x_THK[:, head], own)

            one, many = best(partial(head_linear, x_THK, together)), best(loop)
            print(
                f"  {num_tokens:4}  {in_features:3} -> {out_features:3}  {1e6 * one:9.1f} and {1e6 * many:9.1f} µs, "
                f"{one / many:.2f}",
                flush=True,
            )


def main() -> None:
    """Entry point."""
    names = ["decode", "prefill", "rope", "growth", "latent"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each measurement")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--kv-cache-dtype", choices=["auto", "int8"], default="auto")
    parser.add_argument("--only", choices=names)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype: torch.dtype = getattr(torch, args.dtype)
    dtypes = Dtypes(computed=dtype, cached=torch.int8 if args.kv_cache_dtype == "int8" else dtype)
    best = Timer(args.seconds, args.threads)
    machine = measure_machine(best, dtype)
    cpu.set_num_threads(args.threads)
    print(
        f"kernels: {cpu.status().instruction_set or cpu.status().reason}; threads: {args.threads}; {args.dtype}; "
        f"KV cache {dtypes.cached}"
    )
    print(
        f"machine: reads {machine.read_gb_per_s:.1f} GB/s, copies {machine.copy_gb_per_s:.1f} GB/s, "
        f"{machine.gflop_per_s:.0f} GFLOP/s"
    )
    for name in [args.only] if args.only else names:
        if name == "rope":
            bench_rope(best, machine, dtypes)
        elif name == "growth":
            bench_growth(best, machine, dtypes)
        elif name == "latent":
            bench_latent(best, machine, dtypes)
        else:
            bench_attention(best, machine, dtypes, name)


if __name__ == "__main__":
    main()
