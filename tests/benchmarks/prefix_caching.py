"""What prefix caching costs when nothing is ever found in it (goal: less than 1%), and what it gains when all is.

    python tests/benchmarks/prefix_caching.py [--model FOLDER] [--prompts 32] [--length 256] [--tokens 32] [--runs 7]

Two engines in one process, one with prefix caching and one without, take turns with the same prompts, which no run
repeats; medians of the process's CPU seconds are compared. As neighbours on the machine blur differences of less than
a few percent, the same schedule is also carried out without the model: the difference that makes, as a share of the
engine's whole time, is the cost proper.
"""

import argparse
import random
import statistics
import time
from pathlib import Path

from quire_engine import LLM, SamplingParams
from quire_engine.config import SchedulerConfig
from quire_engine.kv_cache import KVCacheManager
from quire_engine.messages import EngineCoreRequest, ModelRunnerOutput
from quire_engine.scheduler.request import Request
from quire_engine.scheduler.scheduler import Scheduler

DEMO = Path(__file__).resolve().parents[2] / "model_repository" / "tinypy" / "1" / "model"
KV_CACHE_BYTES = 256 * 2**20
VOCAB_SIZE = 4096


def cpu_seconds(llm: LLM, prompts: list[list[int]], num_tokens: int) -> float:
    """CPU time of one batch."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    start = time.process_time()
    llm.generate(prompts, params, use_tqdm=False)
    return time.process_time() - start


def bookkeeping_seconds(enable_prefix_caching: bool, prompts: list[list[int]], num_tokens: int) -> float:
    """Time of the scheduler's part of such a batch."""
    scheduler = Scheduler(SchedulerConfig(), KVCacheManager(100_000, 16, enable_prefix_caching))
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        scheduler.add_request(Request(EngineCoreRequest(str(i), [*prompt], params)))
    seconds = 0.0
    while scheduler.has_requests():
        start = time.perf_counter()
        scheduler_output = scheduler.schedule()
        seconds += time.perf_counter() - start
        requests = [scheduler.requests[request_id] for request_id in scheduler_output.num_scheduled_tokens]
        sampled = {r.request_id: [7] for r in requests if r.num_computed_tokens == r.num_tokens}
        start = time.perf_counter()
        scheduler.update_from_output(scheduler_output, ModelRunnerOutput(sampled))
        seconds += time.perf_counter() - start
    return seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--runs", type=int, default=7)
    arguments = parser.parse_args()
    rng = random.Random(0)
    engines = {
        enabled: LLM(arguments.model, enable_prefix_caching=enabled, kv_cache_memory_bytes=KV_CACHE_BYTES)
        for enabled in (False, True)
    }
    times: dict[bool, list[float]] = {False: [], True: []}
    bookkeeping: dict[bool, list[float]] = {False: [], True: []}
    for run in range(arguments.runs + 1):
        prompts = [[rng.randrange(2, VOCAB_SIZE) for _ in range(arguments.length)] for _ in range(arguments.prompts)]
        for enabled, llm in sorted(engines.items(), reverse=run % 2 == 1):
            seconds = cpu_seconds(llm, prompts, arguments.tokens)
            if run > 0:  # the first warms up
                times[enabled].append(seconds)
                bookkeeping[enabled].append(bookkeeping_seconds(enabled, prompts, arguments.tokens))
    hits = engines[True].get_stats().prefix_cache_hits
    off, on = statistics.median(times[False]), statistics.median(times[True])
    extra = statistics.median(bookkeeping[True]) - statistics.median(bookkeeping[False])
    repeated = statistics.median([cpu_seconds(engines[True], prompts, arguments.tokens) for _ in range(3)])
    print(
        f"{arguments.prompts} prompts of {arguments.length} tokens, {arguments.tokens} generated; hits: {hits} tokens"
    )
    ratio = statistics.median([b / a for a, b in zip(times[False], times[True], strict=True)])
    print(f"whole engine       off {off:.3f} s  on {on:.3f} s  median of the pairs {100 * (ratio - 1):+.2f}%")
    plain = statistics.median(bookkeeping[False])
    print(f"its bookkeeping    off {1e3 * plain:.2f} ms  extra when on {1e3 * extra:.2f} ms")
    print(f"cost at 0% hits    {100 * extra / off:.3f}% of the engine's time")
    print(f"everything found   {repeated:.3f} s, {off / repeated:.2f} times as fast as off")


if __name__ == "__main__":
    main()
