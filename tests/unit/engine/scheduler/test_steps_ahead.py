"""Async scheduling: steps follow on from tokens that are not known yet, and nobody gets anything else for it."""

from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_engine.messages import EngineCoreOutput, FinishReason, ModelRunnerOutput, SchedulerOutput
from quire_engine.sampling_params import SamplingParams
from quire_engine.scheduler.request import Request
from quire_engine.scheduler.scheduler import Scheduler
from quire_engine.structured_outputs_params import StructuredOutputsParams
from support.scheduling import FakeModelRunner, make_request, make_requests, make_scheduler, undisturbed_output

NEEDS_VALUES = {
    "structured_outputs": StructuredOutputsParams(regex=".*"),
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "bad_words_token_ids": [[5], [5, 6]],
}
NEEDS_NO_VALUES = {
    "bad_words_token_ids": [[5], [6]],
    "logit_bias": {5: 1.0},
    "allowed_token_ids": [5, 6],
    "min_tokens": 3,
    "logprobs": 2,
    "seed": 5,
}


def ahead(*requests: Request, **settings: Any) -> Scheduler:
    """A scheduler with these requests that schedules ahead."""
    scheduler = make_scheduler(async_scheduling=True, **settings)
    for request in requests:
        scheduler.add_request(request)
    return scheduler


def update(scheduler: Scheduler, step: SchedulerOutput, token_id: int = 60, *request_ids: str) -> list[str]:
    """Give every scheduled request, or just these, a token; returns who is told of one."""
    sampled = {request_id: [token_id] for request_id in request_ids or step.num_scheduled_tokens}
    outputs = scheduler.update_from_output(step, ModelRunnerOutput(sampled))
    scheduler.check_integrity()
    return [output.request_id for output in outputs]


def scheduled(scheduler: Scheduler) -> dict[str, int]:
    step = scheduler.schedule()
    scheduler.check_integrity()
    return step.num_scheduled_tokens


# -- who runs ahead ----------------------------------------------------------------------------------------------------


def test_step_follows_on_from_tokens_in_flight() -> None:
    scheduler = ahead(*make_requests(2, prompt_length=8))
    assert scheduled(scheduler) == {"r0": 8, "r1": 8}
    step = scheduler.schedule()
    assert step.num_scheduled_tokens == {"r0": 1, "r1": 1}
    assert step.cached_requests.num_computed_tokens == [8, 8]
    assert step.cached_requests.new_token_ids == []
    assert [request.num_output_placeholders for request in scheduler.running] == [2, 2]


def test_without_async_scheduling_a_token_in_flight_is_waited_for() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request([1, 2], request_id="a"))
    assert scheduled(scheduler) == {"a": 2}
    assert scheduled(scheduler) == {}


def test_placeholder_goes_when_its_token_comes() -> None:
    (request,) = make_requests(1, max_tokens=9)
    scheduler = ahead(request)
    first, second = scheduler.schedule(), scheduler.schedule()
    for step, left in ((first, 1), (second, 0)):
        update(scheduler, step)
        assert request.num_output_placeholders == left
    assert (request.num_tokens, request.num_computed_tokens) == (10, 9)


def test_chunk_that_does_not_end_its_prompt_has_no_placeholder() -> None:
    request = make_request(range(12), request_id="long")
    scheduler = ahead(request, max_num_batched_tokens=8)
    numbers = [(scheduled(scheduler), request.num_output_placeholders) for _ in range(3)]
    assert numbers == [({"long": 8}, 0), ({"long": 4}, 1), ({"long": 1}, 2)]


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_request_whose_last_token_is_in_flight_is_passed_over(max_tokens: int) -> None:
    scheduler = ahead(*make_requests(1, prompt_length=4, max_tokens=max_tokens))
    steps = [scheduler.schedule() for _ in range(max_tokens)]
    assert [step.num_scheduled_tokens for step in steps] == [{"r0": 4}, *[{"r0": 1}] * (max_tokens - 1)]
    assert scheduled(scheduler) == {}
    for step in steps:
        assert update(scheduler, step) == ["r0"]
    assert not scheduler.has_requests()


def test_context_ends_as_a_length_does() -> None:
    scheduler = ahead(make_request(range(6), request_id="a", max_model_len=8))
    assert [scheduled(scheduler) for _ in range(3)] == [{"a": 6}, {"a": 1}, {}]


@pytest.mark.parametrize("name", NEEDS_VALUES)
def test_request_whose_next_token_depends_on_values_waits_for_them(name: str) -> None:
    params = SamplingParams(**{name: NEEDS_VALUES[name]})  # type: ignore[arg-type]
    request = make_request([1, 2], request_id="waits", params=params)
    assert request.needs_token_values
    scheduler = ahead(make_request([3, 4, 5], request_id="runs"))
    scheduler.requests["waits"] = request
    scheduler.waiting.add(request)  # as one whose grammar is compiled
    first = scheduler.schedule()
    assert first.num_scheduled_tokens == {"runs": 3, "waits": 2}
    assert scheduled(scheduler) == {"runs": 1}
    update(scheduler, first)
    assert scheduled(scheduler) == {"runs": 1, "waits": 1}


@pytest.mark.parametrize("name", NEEDS_NO_VALUES)
def test_other_parameters_keep_nobody_waiting(name: str) -> None:
    params = SamplingParams(**{name: NEEDS_NO_VALUES[name]})  # type: ignore[arg-type]
    scheduler = ahead(make_request([1, 2], request_id="a", params=params))
    assert [scheduled(scheduler) for _ in range(2)] == [{"a": 2}, {"a": 1}]


def test_structured_request_is_sampled_only_with_its_grammar_up_to_date() -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex=".*"))
    request = make_request(range(6), request_id="a", params=params)
    scheduler = ahead(max_num_batched_tokens=4)
    scheduler.requests["a"] = scheduler._structured["a"] = request
    scheduler.waiting.add(request)
    sampled = [scheduler.structured_requests_to_sample(scheduler.schedule()) for _ in range(3)]
    assert sampled == [[], [request], []]


# -- ends --------------------------------------------------------------------------------------------------------------


def test_stop_token_is_noticed_one_step_late_and_what_follows_is_dropped() -> None:
    request = make_request([1, 2], request_id="a", eos_token_ids=[7])
    scheduler = ahead(request)
    first, second = scheduler.schedule(), scheduler.schedule()
    (output,) = scheduler.update_from_output(first, ModelRunnerOutput({"a": [7]}))
    assert (output.new_token_ids, output.finish_reason) == ([7], FinishReason.STOP)
    assert second.num_scheduled_tokens == {"a": 1}
    assert update(scheduler, second) == []
    assert request.all_token_ids == [1, 2, 7]
    assert scheduler.make_stats().num_blocks_used == 0


def test_step_too_many_does_not_count_for_a_new_request_of_that_id() -> None:
    scheduler = ahead(make_request([1, 2], request_id="same", eos_token_ids=[7]))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert update(scheduler, first, 7) == ["same"]
    again = make_request([3, 4], request_id="same")
    scheduler.add_request(again)
    third = scheduler.schedule()
    assert (third.dropped_request_ids, third.num_scheduled_tokens) == (["same"], {"same": 2})
    assert update(scheduler, second) == []
    assert update(scheduler, third) == ["same"]
    assert (again.num_output_tokens, again.num_output_placeholders) == (1, 0)


def test_step_too_many_that_fails_ends_nobody_else() -> None:
    scheduler = ahead(make_request([1, 2], request_id="same", eos_token_ids=[7]))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert second.num_scheduled_tokens == {"same": 1}
    update(scheduler, first, 7)
    scheduler.add_request(make_request([3, 4], request_id="same"))
    assert scheduler.recover_from_failed_step(second, "why") == []
    assert scheduled(scheduler) == {"same": 2}


def test_aborted_request_is_dropped_once_with_two_steps_in_flight() -> None:
    scheduler = ahead(*make_requests(2))
    steps = [scheduler.schedule(), scheduler.schedule()]
    scheduler.finish_request("r0")
    assert [update(scheduler, step) for step in steps] == [["r1"], ["r1"]]
    assert scheduler.schedule().dropped_request_ids == ["r0"]
    assert scheduler.schedule().dropped_request_ids == []


# -- taken back --------------------------------------------------------------------------------------------------------


def test_preempted_request_forgets_what_was_in_flight() -> None:
    requests = make_requests(2, prompt_length=7, max_tokens=9)
    scheduler = ahead(*requests, num_blocks=4, block_size=4)
    steps = [scheduler.schedule() for _ in range(3)]
    assert [list(step.num_scheduled_tokens) for step in steps] == [["r0", "r1"], ["r0", "r1"], ["r0"]]
    victim = requests[1]
    assert (victim.num_computed_tokens, victim.num_output_placeholders, victim.num_preemptions) == (0, 0, 1)
    assert [update(scheduler, step) for step in steps] == [["r0"], ["r0"], ["r0"]]
    assert victim.num_output_tokens == 0


def test_isolated_requests_wait_for_their_token() -> None:
    scheduler = ahead(*make_requests(3, max_tokens=9))
    scheduler.recover_from_failed_step(scheduler.schedule(), "why")
    for request_id in ("r0", "r1", "r2"):
        step = scheduler.schedule()
        assert list(step.num_scheduled_tokens) == [request_id]
        assert scheduled(scheduler) == {}, "nobody besides the isolated one, and it not before it has survived"
        update(scheduler, step)
    assert [list(scheduled(scheduler)) for _ in range(2)] == [["r0", "r1", "r2"]] * 2


def test_failure_forgets_all_placeholders() -> None:
    requests = make_requests(2)
    scheduler = ahead(*requests)
    first, _ = scheduler.schedule(), scheduler.schedule()
    scheduler.recover_from_failed_step(first, "why")
    assert [request.num_output_placeholders for request in requests] == [0, 0]
    assert [request.num_computed_tokens for request in requests] == [0, 0]


# -- what is cached ----------------------------------------------------------------------------------------------------


def cached_ids(scheduler: Scheduler) -> set[int]:
    return {block.block_id for block in scheduler.kv_cache.block_pool.cached_blocks}


def test_block_is_cached_when_all_of_its_tokens_are_known() -> None:
    request = make_request(range(6), request_id="a")
    scheduler = ahead(request, block_size=4)
    steps = [scheduler.schedule() for _ in range(3)]  # tokens 6 and 7 fill block 1, and are in flight
    assert request.num_computed_tokens == 8
    assert cached_ids(scheduler) == {0}
    update(scheduler, steps[0])
    scheduler.schedule()
    assert cached_ids(scheduler) == {0}
    update(scheduler, steps[1])
    scheduler.schedule()
    assert cached_ids(scheduler) == {0, 1}
    again = make_request([*range(6), 60, 60, 9])
    assert [block.block_id for block in scheduler.kv_cache.get_computed_blocks(again)] == [0, 1]


@pytest.mark.parametrize(("max_tokens", "cached"), [(2, {0}), (3, {0, 1})])
def test_request_that_ends_caches_what_has_become_known_since(max_tokens: int, cached: set[int]) -> None:
    scheduler = ahead(
        make_request(range(6), request_id="a", params=SamplingParams(max_tokens=max_tokens)), block_size=4
    )
    steps = [scheduler.schedule() for _ in range(max_tokens)]
    for step in steps:
        update(scheduler, step)
    assert not scheduler.has_requests()
    assert cached_ids(scheduler) == cached, "the last token is never computed"


def test_request_that_is_aborted_caches_nothing_that_is_not_known() -> None:
    scheduler = ahead(make_request(range(6), request_id="a"), block_size=4)
    for _ in range(3):
        scheduler.schedule()
    scheduler.finish_request("a")
    assert cached_ids(scheduler) == {0}


# -- whatever comes together -------------------------------------------------------------------------------------------

PROMPT = list(range(10, 22))

request_specs = st.fixed_dictionaries(
    {
        "prompt": st.builds(
            lambda length, tail: PROMPT[:length] + tail, st.integers(1, 12), st.lists(st.integers(0, 63), max_size=4)
        ),
        "max_tokens": st.sampled_from([1, 2, 3, 8, 20]),
        "stop_token_ids": st.sampled_from([[], list(range(0, 64, 5))]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 1.0]),
        "priority": st.integers(-1, 1),
        "poison": st.sampled_from([None, None, None, None, None, 0, 2]),
    }
)  # fmt: skip
operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), request_specs),
        st.tuples(st.just("abort"), st.integers(0, 9)),
        st.tuples(st.just("reset"), st.none()),
        *[st.tuples(st.just("step"), st.none())] * 3,
    ),
    min_size=4,
    max_size=30,
)


class Engine:
    """The loop of an engine core around a scheduler and a worker that takes steps ahead, and what it told of whom."""

    def __init__(self, **settings: Any) -> None:
        self.scheduler = ahead(**settings)
        self.runner = FakeModelRunner.for_scheduler(self.scheduler, lambda name, number: self.poison[name] == number)
        self.in_flight: deque[SchedulerOutput] = deque()
        self.poison: dict[str, int | None] = {}
        self.expected: dict[str, tuple[list[int], FinishReason]] = {}
        self.told: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}
        self.num_wasted: dict[str, int] = {}

    def add(self, spec: dict[str, Any]) -> None:
        spec, name = dict(spec), f"r{len(self.expected)}"
        prompt, self.poison[name] = spec.pop("prompt"), spec.pop("poison")
        if self.scheduler.config.scheduling_policy == "fcfs":
            del spec["priority"]
        request = make_request(prompt, request_id=name, params=SamplingParams(**spec), eos_token_ids=[2])
        self.expected[name], self.told[name] = undisturbed_output(request), []
        self.scheduler.add_request(request)

    def abort(self, number: int) -> None:
        if self.scheduler.finish_request(f"r{number}") is not None:
            self.ended[f"r{number}"] = FinishReason.ABORT

    def step(self) -> None:
        while len(self.in_flight) < 2 and self.scheduler.has_requests():
            step = self.scheduler.schedule()
            self.scheduler.check_integrity()
            if self.in_flight and not (step.num_scheduled_tokens or step.dropped_request_ids):
                break
            assert self.in_flight or step.num_scheduled_tokens, "no progress"
            self.in_flight.append(step)
            self.runner.submit(step)
        if self.in_flight:
            self._take(self._collect())
        self.scheduler.check_integrity()

    def _collect(self) -> list[EngineCoreOutput]:
        step = self.in_flight.popleft()
        try:
            output = self.runner.collect()
        except RuntimeError as error:
            while self.in_flight:
                self.in_flight.popleft()
                with pytest.raises(RuntimeError):
                    self.runner.collect()
            return self.scheduler.recover_from_failed_step(step, str(error))
        for name in output.sampled_token_ids:
            self.num_wasted[name] = self.num_wasted.get(name, 0) + (name in self.ended)
        return self.scheduler.update_from_output(step, output)

    def _take(self, outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.ended, "heard of after its end"
            self.told[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.ended[output.request_id] = output.finish_reason


@settings(max_examples=300, deadline=None)
@given(
    operations=operations,
    num_blocks=st.integers(9, 14),
    block_size=st.sampled_from([4, 6]),
    max_num_batched_tokens=st.sampled_from([1, 5, 64]),
    max_num_seqs=st.integers(1, 4),
    scheduling_policy=st.sampled_from(["fcfs", "priority"]),
    enable_prefix_caching=st.booleans(),
)
def test_any_history_gives_each_its_undisturbed_output(operations: list[tuple[str, Any]], **settings: Any) -> None:
    engine = Engine(**settings)
    for name, argument in operations:
        if name == "add":
            engine.add(argument)
        elif name == "abort":
            engine.abort(argument)
        elif name == "reset":
            engine.scheduler.kv_cache.reset_prefix_cache()
        else:
            engine.step()
    for _ in range(1000):
        if not engine.scheduler.has_requests() and not engine.in_flight:
            break
        engine.step()
    assert set(engine.ended) == set(engine.expected)
    for name, (tokens, reason) in engine.expected.items():
        told, ended = engine.told[name], engine.ended[name]
        assert told == tokens[: len(told)]
        if ended is FinishReason.ERROR:
            assert len(told) == engine.poison[name]
        elif ended is not FinishReason.ABORT:
            assert (told, ended) == (tokens, reason)
            assert engine.num_wasted[name] <= (reason is FinishReason.STOP)
    assert engine.scheduler.make_stats().num_blocks_used == 0
