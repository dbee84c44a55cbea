"""Goodput: requests a second that meet their objectives, first come, first served against `scheduling_policy` "slo".

    python tests/benchmarks/goodput.py [--seconds 120] [--arrivals poisson bursts] [--seeds 3]
    python tests/benchmarks/goodput.py --model FOLDER [--seconds 30] …

Three classes are mixed (chat, code, batch), at 0.8, 1.0, 1.2 and 2 times the rate that saturates. The scheduler is the
real one; the clock and the machine are not: a step takes what its tokens, rows and contexts cost, with some noise. So
the figures are of the scheduling alone, are the same every time, and a minute takes seconds. With a model it is real
engines, one for each policy, in turn; requests are a quarter as long, and objectives follow from the rate that
saturates.

Goals: at least 1.5 times the goodput at 1.2 times the rate, and twice at twice the rate; at least 0.98 of the output
tokens/s at 0.8 times the rate, when nobody is refused (`--best-effort`: those that are have no tokens); and a median
error of the predicted times to first token of at most 20%.
"""

import argparse
import asyncio
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from quire_engine.config import SchedulerConfig
from quire_engine.kv_cache import KVCacheManager
from quire_engine.messages import EngineCoreOutput, EngineCoreRequest, ModelRunnerOutput, SchedulerOutput
from quire_engine.sampling_params import RequestOptions, SamplingParams
from quire_engine.scheduler.request import Request
from quire_engine.scheduler.scheduler import Scheduler
from quire_engine.scheduler.step_time import StepLoad
from quire_engine.slo import RequestSLO, SLOTargets, judge
from quire_engine.stats import StepStats

MULTIPLES = (0.8, 1.0, 1.2, 2.0)
POLICIES = ("fcfs", "slo")
_TOKEN, _EOS = 7, 2
_VOCABULARY = 30_000


@dataclass(frozen=True, kw_only=True)
class TrafficClass:
    """Requests of one kind: a share of all, lengths from a range, and what is good for them."""

    share: float
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    targets: SLOTargets


CLASSES = {
    "chat": TrafficClass(
        share=0.5, prompt_tokens=(32, 256), output_tokens=(32, 128), targets=SLOTargets(ttft_ms=500, tpot_ms=60)
    ),
    "code": TrafficClass(
        share=0.3, prompt_tokens=(256, 1024), output_tokens=(16, 64), targets=SLOTargets(ttft_ms=2000, tpot_ms=100)
    ),
    "batch": TrafficClass(
        share=0.2,
        prompt_tokens=(512, 2048),
        output_tokens=(64, 256),
        targets=SLOTargets(e2e_ms=60_000, on_overload="best_effort"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a step takes, in seconds."""

    fixed: float = 0.008
    prompt_token: float = 0.00025
    row: float = 0.0004
    position: float = 2e-8
    prompt_position: float = 1e-8
    noise: float = 0.05

    def seconds(self, load: StepLoad, random: Random) -> float:
        """Of one step, with noise, and now and then with twice the time: somebody else has the cores."""
        exact = (
            self.fixed
            + self.prompt_token * load.num_prompt_tokens
            + self.row * load.num_rows
            + self.position * load.context
            + self.prompt_position * load.prompt_context
        )
        return exact * (2 if random.random() < 0.01 else 1) * random.uniform(1 - self.noise, 1 + self.noise)


@dataclass(slots=True)
class Arrival:
    """One request, and what became of it."""

    at: float
    slo_class: str
    num_prompt_tokens: int
    num_output_tokens: int
    targets: SLOTargets
    first_token_at: float | None = None
    ended_at: float | None = None
    num_tokens: int = 0
    predicted_ttft: float | None = None
    refusal: str | None = None

    @property
    def is_good(self) -> bool:
        """Whether it met its objectives."""
        if self.ended_at is None or self.first_token_at is None:
            return False
        decode = self.ended_at - self.first_token_at
        return judge(
            self.targets,
            e2e_seconds=self.ended_at - self.at,
            time_to_first_token_seconds=self.first_token_at - self.at,
            time_per_output_token_seconds=decode / (self.num_tokens - 1) if self.num_tokens > 1 else None,
            decode_seconds=decode,
        ).good


def arrivals(
    rate: float, seconds: float, random: Random, bursts: bool = False, classes: Mapping[str, TrafficClass] = CLASSES
) -> Iterator[Arrival]:
    """Requests at so many a second, as a Poisson process; or in bursts, with a gamma distribution of shape 0.25."""
    now = 0.0
    while True:
        now += random.gammavariate(0.25, 4 / rate) if bursts else random.expovariate(rate)
        if now > seconds:
            return
        name = random.choices(list(classes), [one.share for one in classes.values()])[0]
        kind = classes[name]
        lengths = random.randint(*kind.prompt_tokens), random.randint(*kind.output_tokens)
        yield Arrival(now, name, *lengths, kind.targets)


@dataclass
class Run:
    """What came of one load."""

    requests: list[Arrival]
    seconds: float

    @property
    def goodput(self) -> float:
        """Requests per second that met their objectives."""
        return sum(one.is_good for one in self.requests) / self.seconds

    @property
    def output_tokens_per_second(self) -> float:
        """Until the last one ended."""
        return sum(one.num_tokens for one in self.requests) / self.seconds

    def good_share(self, slo_class: str) -> float:
        """Of the requests of a class."""
        own = [one for one in self.requests if one.slo_class == slo_class]
        return sum(one.is_good for one in own) / max(len(own), 1)

    def num_refused(self, slo_class: str) -> int:
        """Of the requests of a class."""
        return sum(one.refusal is not None for one in self.requests if one.slo_class == slo_class)

    @property
    def ttft_errors(self) -> list[float]:
        """Of predictions, relative to what came."""
        pairs = [(one.predicted_ttft, one.first_token_at - one.at) for one in self.requests
                 if one.predicted_ttft is not None and one.first_token_at is not None]  # fmt: skip
        return [abs(predicted - real) / real for predicted, real in pairs]


class Simulation:
    """The scheduler on a machine whose time is counted, not passed."""

    def __init__(self, policy: str, machine: Machine | None = None, seed: int = 0, **settings: int) -> None:
        self.now = 0.0
        self._machine = machine or Machine()
        self._random = Random(seed)
        config = SchedulerConfig(scheduling_policy=policy, **{"max_num_batched_tokens": 1024, **settings})
        kv_cache = KVCacheManager(6000, 16, enable_prefix_caching=False)
        self.scheduler = Scheduler(config, kv_cache, lambda: self.now)
        self._live: dict[str, Arrival] = {}

    def run(self, load: list[Arrival], seconds: float) -> Run:
        """Until all have ended; throughput and goodput are of that time, or of `seconds` if it is shorter."""
        run, coming = Run(load, seconds), list(reversed(load))
        while coming or self.scheduler.has_requests():
            if not self.scheduler.has_requests():
                self.now = max(self.now, coming[-1].at)
            while coming and coming[-1].at <= self.now:
                self._add(coming.pop())
            self._step()
        run.seconds = max(self.now, seconds)
        return run

    def _add(self, arrival: Arrival) -> None:
        name = f"r{len(self.scheduler.requests)}-{arrival.at}"
        prompt = [self._random.randrange(3, _VOCABULARY) for _ in range(arrival.num_prompt_tokens)]
        request = Request(EngineCoreRequest(name, [*prompt], SamplingParams(max_tokens=1024)), [_EOS])
        request.options = RequestOptions(slo=RequestSLO(slo_class=arrival.slo_class))
        request.slo_targets = arrival.targets
        request.age_seconds = self.now - arrival.at
        self._live[name] = arrival
        self.scheduler.add_request(request)

    def _step(self) -> None:
        step = self.scheduler.schedule()
        if step.num_scheduled_tokens:
            seconds = self._machine.seconds(StepLoad.of(step), self._random)
            self.now += seconds
        self._take(self.scheduler.update_from_output(step, self._result(step)))
        if step.num_scheduled_tokens:
            self.scheduler.note_step_seconds(
                StepStats(num_tokens=sum(step.num_scheduled_tokens.values())), seconds, seconds
            )

    def _result(self, step: SchedulerOutput) -> ModelRunnerOutput:
        sampled = {}
        for request_id in step.num_scheduled_tokens:
            request = self.scheduler.requests[request_id]
            if request.num_computed_tokens == request.num_tokens:
                is_last = request.num_output_tokens + 1 == self._live[request_id].num_output_tokens
                sampled[request_id] = [_EOS if is_last else _TOKEN]
        return ModelRunnerOutput(sampled)

    def _take(self, outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            arrival = self._live[output.request_id]
            arrival.num_tokens += len(output.new_token_ids)
            if output.new_token_ids and arrival.first_token_at is None:
                arrival.first_token_at = self.now
                arrival.predicted_ttft = output.predicted_ttft_seconds
            if output.finish_reason is not None:
                arrival.refusal = output.refusal
                arrival.ended_at = None if output.error else self.now
                del self._live[output.request_id]


def saturating_rate(seed: int = 0, **settings: int) -> float:
    """Requests per second that are served when there are always more."""
    load = list(arrivals(20.0, 30.0, Random(seed)))
    for one in load:
        one.at = 0.0
    return len(load) / Simulation("fcfs", seed=seed, **settings).run(load, 0.0).seconds


def best_effort(classes: Mapping[str, TrafficClass]) -> dict[str, TrafficClass]:
    """The same, of which no request is refused: one that would be too late gives way instead."""
    return {
        name: replace(one, targets=replace(one.targets, on_overload="best_effort")) for name, one in classes.items()
    }


def compare(
    multiple: float, rate: float, seconds: float, seed: int, bursts: bool = False,
    classes: Mapping[str, TrafficClass] = CLASSES,
) -> dict[str, Run]:  # fmt: skip
    """The same load under both policies."""
    return {
        policy: Simulation(policy, seed=seed).run(
            list(arrivals(multiple * rate, seconds, Random(seed + 1), bursts, classes)), seconds
        )
        for policy in POLICIES
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="measure real engines with this checkpoint")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arrivals", nargs="+", default=["poisson", "bursts"], choices=["poisson", "bursts"])
    parser.add_argument("--multiples", type=float, nargs="+", default=MULTIPLES, help="of the rate that saturates")
    parser.add_argument("--best-effort", action="store_true", help="refuse no request: those too late give way")
    arguments = parser.parse_args()
    classes = best_effort(CLASSES) if arguments.best_effort else CLASSES
    if arguments.model is not None:
        asyncio.run(measure_engines(arguments, classes))
        return
    rate = saturating_rate()
    print(f"saturates at {rate:.2f} requests/s")
    for kind in arguments.arrivals:
        print(f"\n{kind}: good requests/s; of each class the good ones, and refused ones")
        for multiple in arguments.multiples:
            seeds = range(arguments.seeds)
            report(
                multiple,
                [compare(multiple, rate, arguments.seconds, seed, kind == "bursts", classes) for seed in seeds],
            )


def quarter(lengths: tuple[int, int]) -> tuple[int, int]:
    """Of a range of numbers of tokens."""
    return lengths[0] // 4, lengths[1] // 4


async def measure_engines(arguments: argparse.Namespace, traffic: Mapping[str, TrafficClass]) -> None:
    """The same comparison with real engines; the rate that saturates is measured first."""
    from harness.goodput_engine import Engines  # tests import this file as part of a package

    settings = {name: {"on_overload": one.targets.on_overload} for name, one in traffic.items()}
    engines = Engines(arguments.model, POLICIES, settings, max_num_batched_tokens=256, max_model_len=1024)
    short = {
        name: replace(one, prompt_tokens=quarter(one.prompt_tokens), output_tokens=quarter(one.output_tokens))
        for name, one in traffic.items()
    }
    try:
        warm_up = list(arrivals(20.0, 3.0, Random(0), classes=short))
        estimate, _ = await engines.saturate(warm_up)  # so few that most of it is their beginning and their end
        rate, tpot = await engines.saturate(list(arrivals(estimate, arguments.seconds, Random(0), classes=short)))
        targets = {
            "chat": SLOTargets(ttft_ms=3000 / rate, tpot_ms=1500 * tpot),
            "code": SLOTargets(ttft_ms=11_000 / rate, tpot_ms=2500 * tpot),
            "batch": SLOTargets(e2e_ms=300_000 / rate),
        }
        classes = {
            name: replace(one, targets=replace(targets[name], on_overload=one.targets.on_overload))
            for name, one in short.items()
        }
        print(f"saturates at {rate:.2f} requests/s; {targets}")
        for kind in arguments.arrivals:
            print(f"\n{kind}: good requests/s; of each class the good ones, and refused ones")
            for multiple in arguments.multiples:
                runs = []
                for seed in range(arguments.seeds):
                    run = {}
                    for policy in POLICIES if seed % 2 == 0 else POLICIES[::-1]:
                        load = list(
                            arrivals(multiple * rate, arguments.seconds, Random(seed + 1), kind == "bursts", classes)
                        )
                        run[policy] = Run(load, max(await engines.serve(policy, load), arguments.seconds))
                    runs.append(run)
                report(multiple, runs)
    finally:
        engines.shutdown()


def report(multiple: float, runs: list[dict[str, Run]]) -> None:
    """Print the means of some runs at one rate."""
    for policy in POLICIES:
        own = [run[policy] for run in runs]
        classes = [
            f"{name} {statistics.mean(run.good_share(name) for run in own):4.0%} "
            f"({statistics.mean(run.num_refused(name) for run in own):.0f})"
            for name in CLASSES
        ]
        goodput = statistics.mean(run.goodput for run in own)
        print(f"  {multiple:3} x  {policy:5} {goodput:6.2f}   {'  '.join(classes)}")
    good, tokens = (
        [statistics.mean(getattr(run[policy], name) for run in runs) for policy in POLICIES]
        for name in ("goodput", "output_tokens_per_second")
    )
    errors = [error for run in runs for error in run["slo"].ttft_errors]
    error = f"{statistics.median(errors):.1%}" if errors else "unknown"
    print(
        f"         slo / fcfs: goodput {good[1] / max(good[0], 1e-9):.2f}, output tokens/s {tokens[1] / tokens[0]:.3f}"
        f"; median error of predicted TTFT {error}"
    )


if __name__ == "__main__":
    main()
