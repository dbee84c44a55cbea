"""What the linears reach of what the machine can do: GB/s and GFLOP/s beside measured ceilings.

    python tests/benchmarks/linears.py [--threads 2] [--seconds 0.3] [--rows 1 16 64] [--kinds bfloat16 int8]
        [--adapters 1 8 32] [--rank 16]

The shapes are m400's. Every call takes another of several equal weights, so that each comes from memory, as in a step.
Int8 includes the quantisation of the activations. Few rows are bound by reading the weight, many by arithmetic: the
share in brackets is of the roofline, the least time that both allow. The ceilings are torch's best, so a share may
exceed 100%.

With `--adapters`, instead: how fast the linears of 24 layers are with rows of so many different adapters, as a share of
their speed without, recorded as in a step and in turn. 0 adapters: all rows are the base's.
"""

import argparse
import itertools
import os
import statistics
import time

import torch
from harness.roofline import Ceilings, measure_ceilings
from quire_kernels import LoraRows, LoraTable, Recording, cpu, linear, pack_linear, pack_lora, record
from quire_kernels.linear import LinearWeight

SHAPES = {  # outputs, inputs, gated
    "qkv_proj": (2048, 1024, False),
    "o_proj": (1024, 1024, False),
    "gate_up_proj": (5632, 1024, True),
    "down_proj": (1024, 2816, False),
    "lm_head": (32000, 1024, False),
}
PROJECTIONS = {"qkv_proj": [1024, 512, 512], "o_proj": [1024], "gate_up_proj": [2816, 2816], "down_proj": [1024]}
"""Output features of those that have adapters."""
NUM_LAYERS = 24
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


def make_table(sizes: list[int], inputs: int, dtype: torch.dtype, max_loras: int, rank: int) -> LoraTable:
    table = LoraTable(sizes, inputs, dtype, max_loras=max_loras, max_rank=rank)
    for slot in range(max_loras):
        pairs = [(torch.randn(rank, inputs).to(dtype), torch.randn(size, rank).to(dtype)) for size in sizes]
        table.set_slot(slot, [pack_lora(a, b) for a, b in pairs])
    return table


def print_adapters(kind: str, arguments: argparse.Namespace) -> None:
    """The median ratio of rounds, of all linears and of each."""
    # With one thread, its own time: other programs disturb less.
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    layers: dict[str, list[tuple[LinearWeight, LoraTable]]] = {}
    for name, sizes in PROJECTIONS.items():
        outputs, inputs, gated = SHAPES[name]
        layers[name] = []
        for _ in range(NUM_LAYERS):
            weight = pack_linear(torch.randn(outputs, inputs).to(dtype), quantize=kind == "int8", gated=gated)
            table = make_table(sizes, inputs, dtype, max(1, *arguments.adapters), arguments.rank)
            layers[name].append((weight, table))
    for rows in arguments.rows:
        slots = [None] + [torch.arange(rows) % number if number else -torch.ones(rows, dtype=torch.int64)
                          for number in arguments.adapters]  # fmt: skip
        recordings: list[dict[str, Recording]] = [{} for _ in slots]
        for name, its in layers.items():
            x = torch.randn(rows, its[0][0].in_features).to(dtype)
            for recorded, of_rows in zip(recordings, slots, strict=True):
                with record(rows) as recorded[name]:
                    for weight, table in its:
                        linear(x, weight, lora=None if of_rows is None else LoraRows(table, of_rows))
        seconds: list[dict[str, list[float]]] = [{name: [] for name in layers} for _ in slots]
        end = time.perf_counter() + arguments.seconds * len(slots) * len(layers)
        while time.perf_counter() < end or len(seconds[0]["o_proj"]) < 3:
            for name in layers:
                for recorded, spent in zip(recordings, seconds, strict=True):
                    started = clock()
                    recorded[name].run(rows)
                    spent[name].append(clock() - started)
        rounds = [[sum(one) for one in zip(*its.values(), strict=True)] for its in seconds]
        print(f"\n{kind}, {rows} rows, rank {arguments.rank}: {1e3 * statistics.median(rounds[0]):.2f} ms without")
        for number, spent, whole in zip(arguments.adapters, seconds[1:], rounds[1:], strict=True):
            ratios = {"all": _ratio(rounds[0], whole)}
            ratios |= {name: _ratio(seconds[0][name], its_seconds) for name, its_seconds in spent.items()}
            cells = "  ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
            print(f"  {number:4} adapters  {cells}", flush=True)


def _ratio(base: list[float], others: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(base, others, strict=True))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=0.3, help="of each measurement")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=["bfloat16", "int8"])
    parser.add_argument("--adapters", type=int, nargs="+", default=[])
    parser.add_argument("--rank", type=int, default=16)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    for kind in arguments.kinds:
        if arguments.adapters:
            cpu.set_num_threads(arguments.threads)
            with torch.inference_mode():
                print_adapters(kind, arguments)
            continue
        torch.set_num_threads(arguments.threads)
        ceilings = measure_ceilings(int8=kind == "int8")
        cpu.set_num_threads(arguments.threads)
        with torch.inference_mode():
            print_kind(kind, ceilings, arguments)
    print(f"\nkernels: {cpu.status().reason}; {arguments.threads} threads")


if __name__ == "__main__":
    main()
