"""What the kernels of recurrent layers reach: tokens per second of a layer, beside torch and the memory's bandwidth.

    python tests/benchmarks/recurrences.py [--threads 2] [--seconds 0.5] [--ops delta space] [--torch]

One layer of Qwen3.5-0.8B (16 heads of 128 × 128, a convolution of 4 over 6144 channels) and of Mamba-2 (48 heads of 64,
state 128). A step of S sequences decodes one token of each, from a block to another, or computes a prompt; every call
takes other blocks, so that states come from memory. GB/s are of states alone, read once and written once, and the
ceiling is of a copy that reads and writes as much. With `--torch` also the references, in turn with the kernels. With
one thread, all times are the thread's own: other programs disturb less.
"""

import argparse
import itertools
import os
import time
from collections.abc import Callable

import torch
from quire_kernels import StateRows, causal_conv, cpu, gated_delta_rule, gated_rms_norm, state_space

NUM_BLOCKS = 80
"""Of each cache: 80 states of 1 to 1.5 MiB."""
STEPS = {"decode of 1": (1, 1), "decode of 32": (32, 1), "prompt of 512": (1, 512)}
"""Sequences, and tokens of each."""
Layer = tuple[Callable[[StateRows], torch.Tensor], int]
"""The op of a step, and the bytes of a sequence's state."""


def make_rows(sequences: int, tokens: int, first_block: int) -> StateRows:
    """Each sequence goes on from a block in another."""
    blocks = (torch.arange(2 * sequences) + first_block) % NUM_BLOCKS
    starts = torch.arange(sequences + 1)
    return StateRows(
        positions=torch.arange(100, 100 + tokens).repeat(sequences), query_start_loc=starts * tokens,
        sources=blocks[:sequences], num_replayed=torch.zeros(sequences, dtype=torch.int64),
        targets=blocks[sequences:], store_start_loc=starts, store_lens=torch.full((sequences,), tokens),
        store_blocks=blocks[sequences:],
    )  # fmt: skip


def delta(rows: int, dtype: torch.dtype) -> Layer:
    mixed = torch.randn(rows, 6144 + 32).to(dtype)
    query, key, value = (part.unflatten(1, (16, 128)) for part in mixed[:, :6144].split(2048, 1))
    gate, beta = mixed[:, 6144:6160].unflatten(1, (16, 1)), mixed[:, 6160:]
    state, ring = torch.zeros(NUM_BLOCKS, 16, 128, 128), torch.zeros(NUM_BLOCKS, 0, 4096 + 32)
    decay, bias = torch.rand(16), torch.randn(16, 1)
    run = lambda step: gated_delta_rule(query, key, value, gate, beta, decay, bias, state, ring, step)  # noqa: E731
    return run, state[0].nbytes


def space(rows: int, dtype: torch.dtype) -> Layer:
    x, dt, b, c = torch.randn(rows, 3072 + 48 + 256).to(dtype).split([3072, 48, 128, 128], 1)
    state, ring = torch.zeros(NUM_BLOCKS, 48, 64, 128), torch.zeros(NUM_BLOCKS, 0, 3072 + 48 + 128)
    decay, skip, bias = torch.rand(48), torch.rand(48), torch.randn(48)
    inputs = (x.unflatten(1, (48, 64)), dt, b.unflatten(1, (1, 128)), c.unflatten(1, (1, 128)))
    return lambda step: state_space(*inputs, decay, skip, bias, state, ring, step), state[0].nbytes


def conv(rows: int, dtype: torch.dtype) -> Layer:
    x, weight, ring = torch.randn(rows, 6144).to(dtype), torch.randn(6144, 4), torch.zeros(NUM_BLOCKS, 3, 6144)
    return lambda step: causal_conv(x, weight, None, ring, step), ring[0].nbytes


def norm(rows: int, dtype: torch.dtype) -> Layer:
    hidden, gate, weight = torch.randn(rows, 2048).to(dtype), torch.randn(rows, 2048).to(dtype), torch.rand(128)
    return lambda step: gated_rms_norm(hidden, gate, weight, 1e-6, 128, False), 0


OPS = {"delta": delta, "space": space, "conv": conv, "norm": norm}


clock = time.perf_counter


def best_seconds(run: Callable[[StateRows], torch.Tensor], steps: list[StateRows], seconds: float) -> float:
    """Of one call, the fastest."""
    best, end = float("inf"), time.perf_counter() + seconds
    for number in itertools.count():
        started = clock()
        run(steps[number % len(steps)])
        best = min(best, clock() - started)
        if number and time.perf_counter() > end:
            return best
    raise AssertionError


def copy_bandwidth() -> float:
    """Bytes per second that torch copies, those read and those written, of 1 GiB."""
    source = torch.zeros(1 << 27)
    target = torch.zeros_like(source)
    best = float("inf")
    for _ in range(5):
        started = clock()
        target.copy_(source)
        best = min(best, clock() - started)
    return 2 * source.nbytes / best


def in_torch(run: Callable[[StateRows], torch.Tensor]) -> Callable[[StateRows], torch.Tensor]:
    """The same op without the C++ kernels."""

    def compute(step: StateRows) -> torch.Tensor:
        before = os.environ.get(cpu.KERNELS_VARIABLE)
        os.environ[cpu.KERNELS_VARIABLE] = "torch"
        cpu.status.cache_clear()
        try:
            return run(step)
        finally:
            os.environ.pop(cpu.KERNELS_VARIABLE)
            if before is not None:
                os.environ[cpu.KERNELS_VARIABLE] = before
            cpu.status.cache_clear()
            cpu.status()

    return compute


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=0.5, help="of each measurement")
    parser.add_argument("--ops", nargs="+", choices=list(OPS), default=list(OPS))
    parser.add_argument("--torch", action="store_true", help="measure the references, too")
    arguments = parser.parse_args()
    global clock
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    print(f"copy {copy_bandwidth() / 1e9:.1f} GB/s, {arguments.threads} threads, {cpu.status().reason}")
    cpu.set_num_threads(arguments.threads)
    for name, (title, (sequences, tokens)) in itertools.product(arguments.ops, STEPS.items()):
        run, state_bytes = OPS[name](sequences * tokens, torch.bfloat16)
        steps = [make_rows(sequences, tokens, first) for first in range(0, NUM_BLOCKS, 2)]
        with torch.inference_mode():
            seconds = best_seconds(run, steps, arguments.seconds)
            line = (
                f"{name:6} {title:14} {1e6 * seconds:9.1f} µs  {sequences * tokens / seconds:10.0f} tokens/s"
                f"  {2 * sequences * state_bytes / seconds / 1e9:6.1f} GB/s"
            )
            if arguments.torch:
                line += (
                    f"  torch takes {best_seconds(in_torch(run), steps, arguments.seconds) / seconds:.0f} times as long"
                )
        print(line, flush=True)


if __name__ == "__main__":
    main()
