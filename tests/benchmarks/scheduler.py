"""What a step's bookkeeping costs: schedule() and update_from_output() with 256 running decodes, and no model.

    python tests/benchmarks/scheduler.py [--requests 256] [--steps 2000] [--policy fcfs] [--async-scheduling]

Medians over many steps, in ms per step and µs per request (goals: 0.6 ms and 2 µs, both calls together), and the worst
percentile, which holds the steps in which many blocks become full at once.
"""

import argparse
import statistics
import time
from collections import deque

from quire_engine.config import SchedulerConfig
from quire_engine.kv_cache import KVCacheManager
from quire_engine.messages import EngineCoreRequest, ModelRunnerOutput, SchedulerOutput
from quire_engine.sampling_params import RequestOptions, SamplingParams
from quire_engine.scheduler.request import Request
from quire_engine.scheduler.scheduler import Scheduler

PROMPT_LENGTH = 100
BLOCK_SIZE = 16


def make_scheduler(num_requests: int, num_steps: int, policy: str, deadlines: bool, ahead: bool) -> Scheduler:
    """A scheduler whose requests have all been computed up to their first token."""
    num_blocks = num_requests * (-(-(PROMPT_LENGTH + num_requests + num_steps) // BLOCK_SIZE) + 2)
    config = SchedulerConfig(
        max_num_seqs=num_requests, max_num_batched_tokens=num_requests * PROMPT_LENGTH * 2, scheduling_policy=policy
    )
    scheduler = Scheduler(config, KVCacheManager(num_blocks, BLOCK_SIZE), async_scheduling=ahead)
    for i in range(num_requests):
        # Prompts of different lengths, so that not all blocks become full in the same step.
        prompt = [i, *range(PROMPT_LENGTH + i % BLOCK_SIZE)]
        request = Request(EngineCoreRequest(f"request-{i:06}", [*prompt], SamplingParams(max_tokens=None)))
        request.options = RequestOptions(deadline_ms=1e9 if deadlines else None)
        scheduler.add_request(request)
    return scheduler


def measure(scheduler: Scheduler, num_steps: int) -> tuple[list[float], list[float]]:
    """Seconds of every schedule() and of every update_from_output(); with async scheduling, one step ahead."""
    schedule_times, update_times = [], []
    in_flight: deque[SchedulerOutput] = deque()
    if scheduler.async_scheduling:
        in_flight.append(scheduler.schedule())
    for step in range(num_steps + 1):
        start = time.perf_counter()
        in_flight.append(scheduler.schedule())
        scheduled = time.perf_counter()
        scheduler_output = in_flight.popleft()
        runner_output = ModelRunnerOutput({request_id: [7] for request_id in scheduler_output.num_scheduled_tokens})
        executed = time.perf_counter()
        scheduler.update_from_output(scheduler_output, runner_output)
        if step > 0:  # the first computes the prompts
            schedule_times.append(scheduled - start)
            update_times.append(time.perf_counter() - executed)
    return schedule_times, update_times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--policy", default="fcfs", choices=["fcfs", "priority"])
    parser.add_argument("--deadlines", action="store_true", help="give every request a deadline")
    parser.add_argument("--async-scheduling", action="store_true", help="schedule one step ahead")
    arguments = parser.parse_args()
    scheduler = make_scheduler(
        arguments.requests, arguments.steps, arguments.policy, arguments.deadlines, arguments.async_scheduling
    )
    schedule_times, update_times = measure(scheduler, arguments.steps)
    totals = [a + b for a, b in zip(schedule_times, update_times, strict=True)]
    print(f"{arguments.requests} running decodes, policy {arguments.policy}, {arguments.steps} steps")
    for name, times in (
        ("schedule()", schedule_times),
        ("update_from_output()", update_times),
        ("both", totals),
    ):
        median, worst = statistics.median(times), statistics.quantiles(times, n=100)[-1]
        print(
            f"{name:22} {1e3 * median:7.3f} ms per step  {1e6 * median / arguments.requests:6.3f} µs per request"
            f"  (99th percentile {1e3 * worst:.3f} ms)"
        )


if __name__ == "__main__":
    main()
