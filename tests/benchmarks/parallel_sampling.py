"""What sharing the prompt saves with n > 1, and what is left to save by copying its last block instead of computing it.

    python tests/benchmarks/parallel_sampling.py [--model FOLDER] [--n 8] [--length 480] [--runs 9]

1. Time and KV blocks of one request with n sequences, and of n requests without sharing.
2. A child computes for itself what follows the prompt's last full block: one token of a prompt of 16 k + 1 tokens, and
   sixteen of one of 16 k + 16. The difference is all that copying a partial block could ever save; it is shown as a
   share of a request with n sequences of 64 tokens.
"""

import argparse
import random
import statistics
import time
from pathlib import Path

from quire_engine import LLM, SamplingParams

DEMO = Path(__file__).resolve().parents[2] / "model_repository" / "tinypy" / "1" / "model"
KV_CACHE_BYTES = 256 * 2**20
VOCAB_SIZE = 4096
NUM_TOKENS = 64


def measure(llm: LLM, prompt_length: int, n: int, num_tokens: int, runs: int) -> tuple[float, int]:
    """Median CPU seconds of a request for n sequences, and the most KV blocks in use."""
    rng = random.Random(0)
    seconds, most_blocks = [], 0
    params = SamplingParams(n=n, seed=1, max_tokens=num_tokens, ignore_eos=True)
    for run in range(runs + 1):
        prompt = [rng.randrange(2, VOCAB_SIZE) for _ in range(prompt_length)]
        start = time.process_time()
        for _ in llm.stream(prompt, params):
            most_blocks = max(most_blocks, llm.get_stats().num_blocks_used)
        if run > 0:
            seconds.append(time.process_time() - start)
    return statistics.median(seconds), most_blocks


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--length", type=int, default=480)
    parser.add_argument("--runs", type=int, default=9)
    arguments = parser.parse_args()
    length, n, runs = arguments.length // 16 * 16, arguments.n, arguments.runs
    shared = LLM(arguments.model, kv_cache_memory_bytes=KV_CACHE_BYTES)
    alone = LLM(arguments.model, kv_cache_memory_bytes=KV_CACHE_BYTES, enable_prefix_caching=False)
    for name, llm in (("shared", shared), ("not shared", alone)):
        seconds, blocks = measure(llm, length, n, 8, runs)
        print(f"n={n}, prompt of {length} tokens, 8 generated, {name:10}  {1e3 * seconds:7.1f} ms  {blocks} blocks")
    least, _ = measure(shared, length + 1, n, 1, runs)
    most, _ = measure(shared, length + 16, n, 1, runs)
    whole, _ = measure(shared, length + 16, n, NUM_TOKENS, runs)
    print(f"first tokens, 1 token computed per sequence    {1e3 * least:7.1f} ms")
    print(f"first tokens, 16 tokens computed per sequence  {1e3 * most:7.1f} ms")
    print(
        f"most that copying could save: {1e3 * (most - least):.1f} ms, {100 * (most - least) / whole:.1f}% of the "
        f"{1e3 * whole:.1f} ms of the request"
    )


if __name__ == "__main__":
    main()
