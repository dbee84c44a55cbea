"""What worker processes cost, and what sharing a model among them gains on this machine.

    python tests/benchmarks/executors.py [--model FOLDER] [--requests 16] [--tokens 32] [--runs 3] [--only uni mp …]

Offline throughput of the same greedy requests with the worker in the engine's process (uni), in one of its own (mp),
and with two by tensor and by pipeline parallelism; the runs take turns, and ratios are those of medians. Then the CPU
time that each uses while it has nothing to do.
"""

import argparse
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from quire_engine import LLM, SamplingParams
from support.processes import cpu_seconds

DEMO = Path(__file__).resolve().parents[2] / "model_repository" / "tinypy" / "1" / "model"
KV_CACHE_BYTES = 512 * 2**20
IDLE_SECONDS = 3.0
KINDS: dict[str, dict[str, Any]] = {
    "uni": {},
    "mp": {"distributed_executor_backend": "mp"},
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
}


def throughput(llm: LLM, prompts: list[list[int]], num_tokens: int) -> float:
    """Output tokens per second."""
    start = time.perf_counter()
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs) / (time.perf_counter() - start)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(KINDS), default=list(KINDS))
    arguments = parser.parse_args()
    rng = random.Random(0)
    prompts = [[rng.randrange(2, 4000) for _ in range(rng.randrange(32, 256))] for _ in range(arguments.requests)]
    settings = {"kv_cache_memory_bytes": KV_CACHE_BYTES, "enable_prefix_caching": False, "max_model_len": 512}
    llms = {kind: LLM(arguments.model, **settings, **KINDS[kind]) for kind in arguments.only}
    figures: dict[str, list[float]] = {kind: [] for kind in llms}
    for run in range(arguments.runs + 1):
        for kind, llm in llms.items():
            tokens_per_second = throughput(llm, prompts, arguments.tokens)
            if run > 0:  # the first warms up
                figures[kind].append(tokens_per_second)
    base = statistics.median(next(iter(figures.values())))
    for kind, values in figures.items():
        median = statistics.median(values)
        print(f"{kind:4} {median:8.1f} tok/s   {median / base:5.2f} of {next(iter(figures))}")
    for kind, llm in llms.items():
        pids = [os.getpid(), *llm.worker_pids] if kind == "uni" else llm.worker_pids
        before = cpu_seconds(*pids)
        time.sleep(IDLE_SECONDS)
        print(f"{kind:4} idle: {100 * (cpu_seconds(*pids) - before) / IDLE_SECONDS:.1f}% of a core")


if __name__ == "__main__":
    main()
