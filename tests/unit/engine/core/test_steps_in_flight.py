"""EngineCore with two steps in flight: none is lost, none goes out for nothing, whatever ends meanwhile."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quire_engine.config import EngineConfig
from quire_engine.core import build_engine
from quire_engine.core.engine_core import EngineCore
from quire_engine.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    ErrorCode,
    FinishReason,
    ModelRunnerOutput,
    SchedulerOutput,
    WorkerCall,
)
from quire_engine.sampling_params import RequestOptions, SamplingParams
from support.scheduling import FakeModelRunner, make_request, undisturbed_output

NUM_BLOCKS = 64


class RunnerExecutor:
    """An `Executor` whose worker is a `FakeModelRunner` that takes steps ahead."""

    max_concurrent_batches = 2
    async_scheduling = True
    worker_pids: tuple[int, ...] = ()
    clock = staticmethod(time.perf_counter)

    def __init__(self, block_size: int) -> None:
        self.runner = FakeModelRunner(NUM_BLOCKS, block_size, lambda request_id, number: request_id in self.poison)
        self.poison: set[str] = set()
        self.refuse: set[int] = set()
        """Numbers of steps that cannot be submitted."""
        self.submitted: list[SchedulerOutput] = []
        self.num_in_flight = 0

    def initialize_cache(self, num_blocks: int) -> int:
        assert num_blocks == NUM_BLOCKS
        return 0

    def submit(self, scheduler_output: SchedulerOutput) -> None:
        if len(self.submitted) in self.refuse:
            self.refuse.clear()
            raise OSError("no room")
        assert self.num_in_flight < self.max_concurrent_batches
        self.submitted.append(scheduler_output)
        self.num_in_flight += 1
        self.runner.submit(scheduler_output)

    def collect(self) -> ModelRunnerOutput:
        self.num_in_flight -= 1
        return self.runner.collect()

    def busy_seconds(self) -> list[float]:
        return []

    def collective_rpc(self, call: WorkerCall) -> list[int]:
        assert self.num_in_flight == 0
        return [0]

    def shutdown(self) -> None:
        """Nothing is left of it."""


class Core:
    """An engine core over such an executor, and all that it told."""

    def __init__(self, core: EngineCore, executor: RunnerExecutor) -> None:
        self.core, self.executor = core, executor
        self.told: list[EngineCoreOutput] = []
        self.expected: dict[str, tuple[list[int], FinishReason]] = {}

    def add(self, request_id: str, **params: Any) -> None:
        prompt = [number + ord(request_id) for number in range(6)]
        sampling_params = SamplingParams(**{"max_tokens": 6, "ignore_eos": True, **params})
        self.expected[request_id] = undisturbed_output(make_request(prompt, params=sampling_params))
        self.core.add_request(EngineCoreRequest(request_id, prompt, sampling_params))

    def step(self) -> None:
        self.told += self.core.step().outputs
        self.core.scheduler.check_integrity()

    def run(self, max_steps: int = 50) -> int:
        """Until there is nothing to do; returns in how many steps."""
        for number in range(max_steps):
            if not self.core.has_requests():
                return number
            self.step()
        raise AssertionError("it never ends")

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.told if output.request_id == request_id for token in output.new_token_ids]

    def check(self, *request_ids: str) -> None:
        """These ended as they should, and nothing is left."""
        for request_id in request_ids:
            last = [output for output in self.told if output.request_id == request_id][-1]
            assert (self.tokens(request_id), last.finish_reason) == self.expected[request_id]
        assert self.executor.num_in_flight == 0
        assert self.core.scheduler.make_stats().num_blocks_used == 0


@pytest.fixture
def core(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Core:
    config = EngineConfig.from_settings({"model": str(checkpoint("tinypy")), "max_model_len": 64})
    executor = RunnerExecutor(config.cache.block_size)
    monkeypatch.setattr(build_engine, "make_executor", lambda *arguments: executor)
    return Core(build_engine.build_engine(config, NUM_BLOCKS), executor)


def test_each_step_but_the_first_goes_out_before_the_result_of_the_one_before(core: Core) -> None:
    core.add("a")
    core.step()
    assert (len(core.tokens("a")), core.executor.num_in_flight) == (1, 1)
    assert core.run() == 5
    assert len(core.executor.submitted) == 6, "a request that ends by length takes no step too many"
    core.check("a")


def test_one_step_too_many_after_a_stop_token_is_collected_and_tells_nothing(core: Core) -> None:
    core.add("a", max_tokens=20)
    stop = core.expected["a"][0][3]
    core.core.abort_request("a")
    core.add("b")
    core.run()
    core.add("a", max_tokens=20, stop_token_ids=[stop])
    num_tokens, before = len(core.expected["a"][0]), len(core.executor.submitted)
    assert num_tokens <= 4
    assert core.run() == num_tokens + 1
    assert len(core.executor.submitted) == before + num_tokens + 1
    core.check("a", "b")


def test_requests_that_need_token_values_take_one_step_at_a_time(core: Core) -> None:
    core.add("a", presence_penalty=0.5)
    core.add("b", presence_penalty=0.5)
    assert core.run() == len(core.executor.submitted) == 6, "no step goes out for nothing"
    core.check("a", "b")


def test_both_kinds_together_each_keep_their_own_time(core: Core) -> None:
    core.add("a")
    core.add("b", presence_penalty=0.5)
    core.run()
    scheduled = [sorted(step.num_scheduled_tokens) for step in core.executor.submitted]
    assert scheduled[:6] == [["a", "b"], ["a"]] * 3
    core.check("a", "b")


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_after_an_abort_of_all_the_steps_in_flight_are_collected_and_no_other_goes_out(
    num_steps: int, core: Core
) -> None:
    core.add("a")
    core.add("b")
    for _ in range(num_steps):
        core.step()
    submitted = len(core.executor.submitted)
    core.core.abort_request("a")
    core.core.abort_request("b")
    assert core.run() == min(num_steps, 1)
    assert len(core.executor.submitted) == submitted
    core.add("c")
    core.run()
    assert core.executor.runner.known_request_ids == {"c"}
    core.check("c")


def test_abort_goes_out_alone_where_the_others_wait_for_their_tokens(core: Core) -> None:
    core.add("a")
    core.add("b", presence_penalty=0.5)
    core.step()
    core.step()
    core.core.abort_request("a")
    core.step()
    steps = [(sorted(step.num_scheduled_tokens), step.dropped_request_ids) for step in core.executor.submitted]
    assert steps == [(["a", "b"], []), (["a"], []), (["a", "b"], []), ([], ["a"])]
    assert core.executor.runner.known_request_ids == {"b"}
    core.run()
    core.check("b")


def test_deadline_ends_a_request_with_its_steps_in_flight(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    core.add("a")
    core.core.add_request(
        EngineCoreRequest("late", [1, 2, 3], SamplingParams(max_tokens=20), RequestOptions(deadline_ms=6e4))
    )
    core.step()
    monkeypatch.setattr(core.core.scheduler._limits, "_clock", lambda: time.monotonic() + 3600)
    core.run(max_steps=7)
    (last,) = [output for output in core.told if output.finish_reason and output.request_id == "late"]
    assert last.error_code is ErrorCode.DEADLINE
    core.check("a")


def test_deadline_of_the_only_request_is_told(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    core.core.add_request(
        EngineCoreRequest("late", [1, 2, 3], SamplingParams(max_tokens=20), RequestOptions(deadline_ms=6e4))
    )
    core.step()
    monkeypatch.setattr(core.core.scheduler._limits, "_clock", lambda: time.monotonic() + 3600)
    core.run(max_steps=3)
    assert [output.error_code for output in core.told] == [None, ErrorCode.DEADLINE]
    core.check()


@pytest.mark.parametrize("number", range(1, 5))
def test_step_that_cannot_be_submitted_disturbs_nobody(number: int, core: Core) -> None:
    core.executor.refuse = {number}
    core.add("a")
    core.add("b")
    core.run()
    assert core.core.scheduler.num_failed_steps == 1
    core.check("a", "b")


def test_faulty_request_of_a_failed_step_ends_alone(core: Core) -> None:
    for request_id in "abc":
        core.add(request_id)
    core.step()
    core.executor.poison.add("b")
    core.run()
    (error,) = [output for output in core.told if output.finish_reason is FinishReason.ERROR]
    assert (error.request_id, error.error) == ("b", "the engine failed at this request; its log has the cause")
    assert core.tokens("b") == core.expected["b"][0][:2], "what was in flight behind the first token had no poison yet"
    core.check("a", "c")


def test_sleep_collects_what_was_in_flight_of_aborted_requests(core: Core) -> None:
    core.add("a")
    core.step()
    core.core.abort_request("a")
    assert core.executor.num_in_flight == 1
    assert core.core.sleep()
    assert core.executor.num_in_flight == 0


def test_the_time_in_the_socket_is_of_a_request_s_age(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    params = SamplingParams(max_tokens=6)
    core.core.add_request(EngineCoreRequest("a", [1], params, arrived_at=now - 2))
    core.core.add_request(EngineCoreRequest("b", [1], params))
    requests = core.core.scheduler.requests
    assert [requests[name].age_seconds for name in "ab"] == [pytest.approx(2.0), 0.0]
