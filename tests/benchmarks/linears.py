"""What the linears reach of what the machine can do: GB/s and GFLOP/s beside measured ceilings.

    python tests/benchmarks/linears.py [--threads 2] [--seconds 0.3] [--rows 1 16 64] [--kinds bfloat16 int8]

The shapes are m400's. Every call takes another of several equal weights, so that each comes from memory, as in a step.
Int8 includes the quantisation of the activations. Few rows are bound by reading the weight, many by arithmetic: the
share in brackets is of the roofline, the least time that both allow. The ceilings are torch's best, so a share may
exceed 100%.
"""

import argparse
import itertools
import os
import time

import torch
from harness.roofline import Ceilings, measure_ceilings
from quire_kernels import cpu, linear, pack_linear
from quire_kernels.linear import LinearWeight

SHAPES = {  # outputs, inputs, gated
    "qkv_proj": (2048, 1024, False),
    "o_proj": (1024, 1024, False),
    "gate_up_proj": (5632, 1024, True),
    "down_proj": (1024, 2816, False),
    "lm_head": (32000, 1024, False),
}
ROWS = [1, 4, 16, 64, 256]
KINDS = {"bfloat16": 2, "float32": 4, "int8": 1}
"""Bytes of a weight."""
BEYOND_CACHES = 160 << 20
"""Bytes of all copies of a weight."""


def make_weights(kind: str, shape: tuple[int, int, bool]) -> list[LinearWeight]:
    outputs, inputs, gated = shape
    copies = max(1, BEYOND_CACHES // (outputs * inputs * KINDS[kind]))
    matrix = torch.randn(outputs, inputs)
    matrix = matrix if kind == "float32" else matrix.bfloat16()
    return [pack_linear(matrix.clone(), quantize=kind == "int8", gated=gated) for _ in range(copies)]


def best_seconds(weights: list[LinearWeight], rows: int, seconds: float) -> float:
    """Of one call: the best round over all weights."""
    x = torch.randn(rows, weights[0].in_features).to(weights[0].dtype)
    best, end = float("inf"), time.perf_counter() + seconds
    for trial in itertools.count():
        started = time.perf_counter()
        for weight in weights:
            linear(x, weight)
        now = time.perf_counter()
        best = min(best, (now - started) / len(weights))
        if trial and now > end:
            return best
    raise AssertionError


def print_kind(kind: str, ceilings: Ceilings, arguments: argparse.Namespace) -> None:
    read, peak = ceilings.bytes_per_second / 1e9, ceilings.flops_per_second / 1e9
    print(f"\n{kind}: ceilings {read:.1f} GB/s read, {peak:.0f} GFLOP/s")
    for name, (outputs, inputs, gated) in SHAPES.items():
        weights = make_weights(kind, (outputs, inputs, gated))
        for rows in arguments.rows:
            seconds = best_seconds(weights, rows, arguments.seconds)
            gb, gflop = outputs * inputs * KINDS[kind] / 1e9, 2 * rows * outputs * inputs / 1e9
            share = max(gb / read, gflop / peak) / seconds
            print(
                f"  {name:13} {outputs:5} x {inputs:4}  {rows:4} rows  {1e6 * seconds:8.0f} µs  "
                f"{gb / seconds:6.1f} GB/s  {gflop / seconds:6.0f} GFLOP/s  ({share:4.0%})",
                flush=True,
            )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=0.3, help="of each measurement")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=["bfloat16", "int8"])
    arguments = parser.parse_args()
    torch.manual_seed(0)
    for kind in arguments.kinds:
        torch.set_num_threads(arguments.threads)
        ceilings = measure_ceilings(int8=kind == "int8")
        cpu.set_num_threads(arguments.threads)
        with torch.inference_mode():
            print_kind(kind, ceilings, arguments)
    print(f"\nkernels: {cpu.status().reason}; {arguments.threads} threads")


if __name__ == "__main__":
    main()
