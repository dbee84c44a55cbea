"""Scheduling for objectives: who comes next, who is refused, how much prompts get, and that nobody starves."""

from collections.abc import Iterable
from itertools import count
from typing import Any

import pytest
from benchmarks.goodput import Run, compare
from quire_engine.messages import EngineCoreOutput, ErrorCode
from quire_engine.sampling_params import RequestOptions, SamplingParams
from quire_engine.scheduler.request import Request
from quire_engine.scheduler.slo_policy import LATE_EVERY, SLOPolicy
from quire_engine.scheduler.step_time import StepLoad
from quire_engine.slo import RequestSLO, SLOTargets
from quire_engine.stats import StepStats
from support.scheduling import FakeModelRunner, make_request, make_scheduler


def step_seconds(load: StepLoad) -> float:
    """A millisecond for each prompt token, and ten for the rest."""
    return 0.010 + 0.001 * load.num_prompt_tokens + 0.0001 * load.num_rows


class Engine:
    """A scheduler on a machine whose steps take what they say."""

    def __init__(self, is_taught: bool = True, **settings: Any) -> None:
        self.now = 100.0
        defaults: dict[str, Any] = {"num_blocks": 2000, "max_num_batched_tokens": 100, "enable_prefix_caching": False}
        self.scheduler = make_scheduler(clock=lambda: self.now, scheduling_policy="slo", **{**defaults, **settings})
        assert isinstance(self.scheduler.policy, SLOPolicy)
        self.policy = self.scheduler.policy
        self.runner = FakeModelRunner.for_scheduler(self.scheduler)
        self.ended: dict[str, EngineCoreOutput] = {}
        self.first_tokens: dict[str, EngineCoreOutput] = {}
        self._numbers = count()
        if is_taught:
            for number in range(48):
                load = StepLoad(number % 5 * 20, number % 3)
                self.policy.costs.record(load, step_seconds(load))

    def add(
        self, name: str, length: int, *, max_tokens: int = 4, slo_class: str = "default", **targets: Any
    ) -> Request:
        prompt = [next(self._numbers) % 50, *range(1, length)]
        request = make_request(prompt, request_id=name, params=SamplingParams(max_tokens=max_tokens))
        request.options = RequestOptions(slo=RequestSLO(slo_class=slo_class))
        request.slo_targets = SLOTargets(**targets)
        request.queued_at = self.now
        self.scheduler.add_request(request)
        return request

    def step(self) -> dict[str, int]:
        """One step; returns what was scheduled."""
        step = self.scheduler.schedule()
        self.scheduler.check_integrity()
        load = StepLoad.of(step)
        self.now += step_seconds(load) if step.num_scheduled_tokens else 0.001
        for output in self.scheduler.update_from_output(step, self.runner.execute_model(step)):
            if output.new_token_ids:
                self.first_tokens.setdefault(output.request_id, output)
            if output.finish_reason is not None:
                self.ended[output.request_id] = output
        self.scheduler.note_step_seconds(StepStats(), step_seconds(load), step_seconds(load))
        return step.num_scheduled_tokens

    def run(self) -> None:
        for _ in range(2000):
            if not self.scheduler.has_requests():
                return
            self.step()
        raise AssertionError("no progress")


def names(requests: Iterable[Request]) -> list[str]:
    return [request.request_id for request in requests]


# -- order -----------------------------------------------------------------------------------------------------------


def test_least_slack_comes_first_and_what_cannot_make_it_gives_way() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add("running", 10, max_tokens=3)
    engine.step()
    engine.add("patient", 10)  # without objectives
    engine.add("long", 90, ttft_ms=1000)  # 0.1 s to compute, so it has less slack than the next
    engine.add("short", 10, ttft_ms=1050)
    engine.add("hopeless", 90, ttft_ms=20, on_overload="best_effort")
    engine.step()
    assert names(engine.scheduler.waiting) == ["long", "short", "patient", "hopeless"]
    engine.now += 1.1
    engine.step()
    assert names(engine.scheduler.waiting) == ["patient", "long", "short", "hopeless"], "those in time, then by arrival"
    engine.run()
    assert len(engine.ended) == 5
    assert all(output.error is None for output in engine.ended.values())


def test_prompt_in_computation_pauses_for_one_with_less_slack() -> None:
    engine = Engine()
    engine.add("long", 500, ttft_ms=60_000)
    assert engine.step() == {"long": 100}
    engine.add("urgent", 250, ttft_ms=400)
    assert [engine.step() for _ in range(4)] == [{"urgent": 100}, {"urgent": 100}, {"long": 50, "urgent": 50}, {
        "urgent": 1, "long": 99}]  # fmt: skip
    engine.run()


def test_end_that_is_due_counts_as_a_first_token_before_it() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add("running", 10, max_tokens=3)
    engine.step()
    engine.add("later", 10, ttft_ms=2500)
    engine.add("end", 10, max_tokens=100, e2e_ms=3000)  # 100 tokens take 1 s
    engine.step()
    assert names(engine.scheduler.waiting) == ["end", "later"]


# -- admission -------------------------------------------------------------------------------------------------------


def test_what_cannot_make_it_is_refused_at_once_with_the_prediction() -> None:
    engine = Engine()
    for number in range(5):
        engine.add(f"r{number}", 100, ttft_ms=700, slo_class="chat")
    engine.add("last", 100, ttft_ms=500, slo_class="chat")
    engine.add("out", 90, ttft_ms=300, slo_class="chat")
    engine.add("best-effort", 90, ttft_ms=300, slo_class="offline", on_overload="best_effort")
    engine.scheduler.requests["out"].age_seconds = 0.1
    engine.run()
    refused = {name: output for name, output in engine.ended.items() if output.error}
    assert refused, "nobody was refused, so this shows nothing"
    for name, output in refused.items():
        assert name != "best-effort"
        assert (output.error_code, output.refusal) == (ErrorCode.UNAVAILABLE, "ttft")
        assert output.error is not None
        assert "ttft_ms of class 'chat'" in output.error
        assert output.retry_after_seconds is not None
        assert output.predicted_ttft_seconds is not None
        assert 0 < output.retry_after_seconds < 1
        assert 0.3 < output.predicted_ttft_seconds < 1.2
        assert name not in engine.first_tokens
    for name, first in engine.first_tokens.items():
        if name != "best-effort":
            assert first.predicted_ttft_seconds is not None, name


def test_nothing_is_refused_by_a_guess_or_for_its_own_length_or_after_it_was_accepted() -> None:
    guessing = Engine(is_taught=False)
    for number in range(8):
        guessing.add(f"r{number}", 100, ttft_ms=50)
    guessing.run()
    engine = Engine()
    for number in range(4):
        engine.add(f"r{number}", 100, ttft_ms=5000)
    engine.add("alone-too-long", 300, ttft_ms=100)
    engine.add("replayed", 80, ttft_ms=120).is_replay = True
    engine.run()
    assert [output.error for output in [*guessing.ended.values(), *engine.ended.values()]] == [None] * 14


def test_predicted_times_are_those_that_come() -> None:
    engine = Engine(max_num_seqs=4)
    for number in range(12):
        engine.add(f"r{number}", 20 + 13 * number % 100, max_tokens=10, ttft_ms=30_000)
    waiting = list(engine.scheduler.waiting)
    began = engine.now
    times = {}
    while engine.scheduler.has_requests():
        engine.step()
        times.update({name: engine.now - began for name in engine.first_tokens if name not in times})
    predicted = {name: output.predicted_ttft_seconds for name, output in engine.first_tokens.items()}
    assert len(waiting) == len(predicted) == 12
    errors = [abs((predicted[name] or 0) - times[name]) / times[name] for name in times]
    assert sorted(errors)[6] < 0.2


# -- chunks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tpot_ms", "low", "high"), [(None, 95, 99), (60, 30, 50), (25, 16, 16)])
def test_chunks_are_as_large_as_the_time_per_token_of_rows_allows(tpot_ms: float | None, low: int, high: int) -> None:
    engine = Engine()
    engine.add("row", 10, max_tokens=60, **({"tpot_ms": tpot_ms} if tpot_ms else {}))
    engine.step()
    engine.add("long", 600, ttft_ms=60_000)
    chunks = [engine.step()["long"] for _ in range(5)]
    assert low <= min(chunks[1:]) <= max(chunks[1:]) <= high, chunks


def test_chunks_while_prompts_seem_to_cost_nothing() -> None:
    """Steps happened to be the shorter the more of a prompt they had: then any number fits."""
    engine = Engine(is_taught=False)
    for number in range(48):
        load = StepLoad(number % 5 * 20, number % 3)
        engine.policy.costs.record(load, 0.010 + 0.0001 * load.num_rows - 0.00001 * load.num_prompt_tokens)
    engine.add("row", 10, max_tokens=60, tpot_ms=25)
    engine.step()
    engine.add("long", 900)
    assert engine.step()["long"] == 99


def test_row_that_missed_its_first_token_does_not_hold_prompts_back() -> None:
    engine = Engine()
    engine.add("row", 100, max_tokens=60, ttft_ms=20, tpot_ms=25)
    engine.step()
    engine.add("long", 600, ttft_ms=60_000)
    assert engine.step()["long"] == 99


def test_no_more_rows_than_their_time_per_token_allows() -> None:
    engine = Engine()
    for number in range(40):
        engine.add(f"r{number}", 10, max_tokens=40, tpot_ms=12)  # 10.0 ms and 0.1 ms for each row
    most = 0
    while engine.scheduler.has_requests():
        engine.step()
        most = max(most, len(engine.scheduler.running))
    assert 5 <= most <= 20


# -- shares ----------------------------------------------------------------------------------------------------------


def test_late_requests_get_their_share_while_others_keep_coming() -> None:
    engine = Engine()
    engine.add("late", 1000, ttft_ms=10, on_overload="best_effort", max_tokens=1)
    numbers = {"late": 0, "others": 0}
    for number in range(300):
        if len(engine.scheduler.waiting) < 4:
            engine.add(f"r{number}", 80, ttft_ms=5000, max_tokens=1)
            engine.add(f"s{number}", 80, ttft_ms=5000, max_tokens=1)
        for name, tokens in engine.step().items():
            numbers["late" if name == "late" else "others"] += tokens
        if "late" in engine.ended:
            break
    assert engine.ended["late"].error is None
    share = numbers["late"] / sum(numbers.values())
    assert 0.5 < share * LATE_EVERY < 3


def test_without_objectives_everything_is_as_first_come_first_served() -> None:
    engine = Engine(max_num_seqs=2)
    for number in range(6):
        engine.add(f"r{number}", 20 + number)
    order = []
    while engine.scheduler.has_requests():
        order += [name for name in engine.step() if name not in order]
    assert order == [f"r{number}" for number in range(6)]


# -- goodput ---------------------------------------------------------------------------------------------------------


def goodput_ratio(runs: dict[str, Run]) -> float:
    return runs["slo"].goodput / runs["fcfs"].goodput


def test_more_requests_meet_their_objectives_than_first_come_first_served() -> None:
    below, above, far_above = (compare(multiple, 5.6, 15.0, seed=0) for multiple in (0.8, 1.2, 2.0))
    assert below["slo"].output_tokens_per_second >= 0.98 * below["fcfs"].output_tokens_per_second
    assert goodput_ratio(below) >= 1.0
    assert goodput_ratio(above) >= 1.5
    assert goodput_ratio(far_above) >= 2.0
    errors = sorted(error for runs in (below, above, far_above) for error in runs["slo"].ttft_errors)
    assert errors[len(errors) // 2] <= 0.2
