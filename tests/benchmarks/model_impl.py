"""How fast transformers' own modelling code is, with our attention, next to a family of our own.

    python tests/benchmarks/model_impl.py [--model FOLDER] [--requests 1 16] [--tokens 32] [--runs 3]

The same greedy requests with the settings `model_impl: quire` and `model_impl: transformers`; the runs take turns, and
ratios are those of medians. The second figures are of the tokens after the first alone: prompts are matrix products,
which both compute with the same kernels.
"""

import argparse
import random
import statistics
from pathlib import Path

from executors import DEMO, KV_CACHE_BYTES, throughput
from quire_engine import LLM

IMPLS = ("quire", "transformers")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    rng = random.Random(0)
    prompts = [[rng.randrange(2, 4000) for _ in range(rng.randrange(32, 256))] for _ in range(max(arguments.requests))]
    settings = {"kv_cache_memory_bytes": KV_CACHE_BYTES, "enable_prefix_caching": False, "max_model_len": 512}
    llms = {impl: LLM(arguments.model, model_impl=impl, **settings) for impl in IMPLS}
    for num_requests in arguments.requests:
        all_tokens, later_tokens = ({impl: list[float]() for impl in llms} for _ in range(2))
        num_tokens = num_requests * arguments.tokens
        for run in range(arguments.runs + 1):
            for impl, llm in llms.items():
                seconds = num_tokens / throughput(llm, prompts[:num_requests], arguments.tokens)
                first_seconds = num_requests / throughput(llm, prompts[:num_requests], 1)
                if run > 0:  # the first warms up
                    all_tokens[impl].append(num_tokens / seconds)
                    later_tokens[impl].append((num_tokens - num_requests) / (seconds - first_seconds))
        for name, figures in (("all", all_tokens), ("after the first", later_tokens)):
            ours, theirs = (statistics.median(figures[impl]) for impl in IMPLS)
            print(
                f"{num_requests:3} requests, {name:15}: {ours:8.1f} and {theirs:8.1f} tok/s, {theirs / ours:.2f} of "
                f"ours, {ours / theirs:.2f} times"
            )


if __name__ == "__main__":
    main()
