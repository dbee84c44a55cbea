"""What choosing the tokens of a step costs, and what the kernels beside the matrix products and attention do.

    python tests/benchmarks/sampling.py [--rows 1 16 64] [--vocab-sizes 32000 128256] [--seconds 0.3] [--threads 1]

1. Milliseconds per step of `sample` and `argmax`, in C++ and in plain torch, and GB/s against what reading the logits
   alone takes.
2. Penalties and grammar bitmasks over the same logits.
3. Norm, SiLU · mul, quantisation and embedding of 64 tokens and of 1, per call.

Times are the best of many, as other programs can only make them longer; with one thread they are its CPU time.
"""

import argparse
import os
import time
from collections.abc import Callable

import numpy as np
import torch
from quire_engine.sampling.penalties import PenaltyState, apply_penalties
from quire_engine.sampling_params import SamplingParams
from quire_kernels import add_rms_norm, apply_token_bitmask, argmax, cpu, embedding, sample, silu_and_mul
from quire_kernels.linear import pack_linear, quantize_per_token

KINDS: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top-k 50": {"temperature": 0.8, "top_k": 50},
    "top-p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "top-k 50, top-p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "min-p 0.05": {"temperature": 0.8, "min_p": 0.05},
}
NUM_SEEN = 500


def best_of(run: Callable[[], object], seconds: float) -> float:
    """The least seconds of a call, of as many as fit into the time; at least three."""
    run()
    clock = time.thread_time if cpu.get_num_threads() == 1 else time.perf_counter
    best, number, end = float("inf"), 0, time.perf_counter() + seconds
    while number < 3 or time.perf_counter() < end:
        start = clock()
        run()
        best = min(best, clock() - start)
        number += 1
    return best


def peaked_logits(rows: int, vocab_size: int) -> torch.Tensor:
    """Like a language model's: a broad bell, and a few tokens far above it."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocab_size, generator=generator) * 2
    likely = torch.randint(vocab_size, (rows, 30), generator=generator)
    return logits.scatter_(1, likely, torch.rand(rows, 30, generator=generator) * 10 + 6)


def drawing(logits: torch.Tensor, kind: dict[str, float]) -> Callable[[], object]:
    """A call of `sample` for every row of the logits, or of `argmax` where there is no temperature."""
    if not kind:
        return lambda: argmax(logits)
    rows = len(logits)
    columns = (
        torch.full((rows,), kind["temperature"]),
        torch.full((rows,), kind.get("min_p", 0.0)),
        torch.full((rows,), int(kind.get("top_k", logits.shape[1]))),
        torch.full((rows,), kind.get("top_p", 1.0)),
        torch.arange(rows) * 977,
        torch.arange(rows),
    )
    return lambda: sample(logits, *columns)


def in_torch(run: Callable[[], object], seconds: float) -> float:
    """The same op without the C++ kernels."""
    before = os.environ.get(cpu.KERNELS_VARIABLE)
    os.environ[cpu.KERNELS_VARIABLE] = "torch"
    cpu.status.cache_clear()
    try:
        return best_of(run, seconds)
    finally:
        os.environ.pop(cpu.KERNELS_VARIABLE)
        if before is not None:
            os.environ[cpu.KERNELS_VARIABLE] = before
        cpu.status.cache_clear()


def measure_sampling(rows: int, vocab_size: int, seconds: float) -> None:
    """Print a line per kind of sampling."""
    for name, make in (("flat", torch.randn), ("peaked", peaked_logits)):
        logits = make(rows, vocab_size)
        read = best_of(lambda logits=logits: logits.amax(), seconds)  # type: ignore[misc]
        print(f"[{rows}, {vocab_size}] {name}: plain read {1e3 * read:.3f} ms, {logits.nbytes / read / 1e9:.1f} GB/s")
        for kind, parameters in KINDS.items():
            run = drawing(logits, parameters)
            ours, reference = best_of(run, seconds), in_torch(run, seconds / 3)
            print(
                f"    {kind:20} {1e3 * ours:8.3f} ms {logits.nbytes / ours / 1e9:6.1f} GB/s   "
                f"torch {1e3 * reference:9.2f} ms   {reference / ours:6.1f}x"
            )


def measure_masks(rows: int, vocab_size: int, seconds: float) -> None:
    """Print what penalties and bitmasks add to a step when every row has them."""
    rng = np.random.default_rng(0)
    state = PenaltyState(rows, vocab_size, 2 * NUM_SEEN)
    for slot in range(rows):
        token_ids = rng.integers(0, vocab_size, NUM_SEEN).tolist()
        state.add(slot, SamplingParams(repetition_penalty=1.1, frequency_penalty=0.5), token_ids, NUM_SEEN // 2)
    slots, logits = np.arange(rows), torch.randn(rows, vocab_size)

    def penalize() -> None:
        penalties = state.gather(slots)
        assert penalties is not None
        apply_penalties(logits, penalties)

    words = torch.full((rows, -(-vocab_size // 32)), 0x55555555, dtype=torch.int32)
    row_ids = torch.arange(rows)
    bitmask = best_of(lambda: apply_token_bitmask(logits, row_ids, words), seconds)
    bitmask_torch = in_torch(lambda: apply_token_bitmask(logits, row_ids, words), seconds)
    logits.normal_()
    print(
        f"[{rows}, {vocab_size}] penalties, {NUM_SEEN} tokens per row {1e3 * best_of(penalize, seconds):.3f} ms; "
        f"bitmask {1e3 * bitmask:.3f} ms, torch {1e3 * bitmask_torch:.2f} ms"
    )


def measure_rows(tokens: int, seconds: float) -> None:
    """Print microseconds per call of the kernels that work row by row, for a model of 1024 by 2816."""
    hidden, residual = torch.randn(tokens, 1024).bfloat16(), torch.randn(tokens, 1024).bfloat16()
    weight, gate_up = torch.ones(1024).bfloat16(), torch.randn(tokens, 5632).bfloat16()
    table = torch.randn(32000, 1024).bfloat16()
    packed, token_ids = pack_linear(table), torch.randint(32000, (tokens,))
    ops: dict[str, tuple[Callable[[], object], int]] = {
        "add_rms_norm": (lambda: add_rms_norm(hidden, residual, weight, 1e-5), 4 * hidden.nbytes),
        "silu_and_mul": (lambda: silu_and_mul(gate_up), gate_up.nbytes * 3 // 2),
        "quantize_per_token": (lambda: quantize_per_token(hidden), hidden.nbytes * 3 // 2),
        "embedding, plain": (lambda: embedding(token_ids, table), 2 * hidden.nbytes),
    }
    for name, (run, num_bytes) in ops.items():
        ours, reference = best_of(run, seconds), in_torch(run, seconds)
        print(
            f"    {tokens:3} tokens, {name:20} {1e6 * ours:8.1f} us {num_bytes / ours / 1e9:6.1f} GB/s   "
            f"torch {1e6 * reference:8.1f} us"
        )
    ours = best_of(lambda: embedding(token_ids, packed), seconds)
    print(f"    {tokens:3} tokens, {'embedding, packed':20} {1e6 * ours:8.1f} us")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--vocab-sizes", type=int, nargs="+", default=[32000, 128256])
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--threads", type=int, default=cpu.get_num_threads())
    arguments = parser.parse_args()
    cpu.set_num_threads(arguments.threads)
    print(f"kernels: {cpu.status().reason}; {cpu.get_num_threads()} threads")
    with torch.inference_mode():
        for vocab_size in arguments.vocab_sizes:
            for rows in arguments.rows:
                measure_sampling(rows, vocab_size, arguments.seconds)
            measure_masks(arguments.rows[-1], vocab_size, arguments.seconds)
        for tokens in (1, 64):
            measure_rows(tokens, arguments.seconds)


if __name__ == "__main__":
    main()
